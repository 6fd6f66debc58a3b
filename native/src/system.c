/*
 * system.c - the real system calls behind the table of system.h. No state, any thread.
 */
#define _GNU_SOURCE
#include "system.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int system_open(const char *path, int flags, mode_t mode)
{
    return open(path, flags, mode);
}

static int system_set_flags(int fd, int flags)
{
    return fcntl(fd, F_SETFL, flags);
}

/* From Linux 6.1 on. The kernel's layout is spelt out, for the C library may be older: its struct has no such field then. */
static int system_direct_alignment(int fd)
{
#ifdef SYS_statx
    enum { DIOALIGN = 0x2000, MASK_AT = 0, MEMORY_AT = 0x98, OFFSET_AT = 0x9c };
    _Alignas(8) unsigned char status[256] = {0};
    uint32_t mask = 0;
    uint32_t memory = 0;
    uint32_t offset = 0;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, DIOALIGN, status) != 0)
        return -1;
    memcpy(&mask, status + MASK_AT, sizeof mask);
    memcpy(&memory, status + MEMORY_AT, sizeof memory);
    memcpy(&offset, status + OFFSET_AT, sizeof offset);
    if ((mask & DIOALIGN) == 0)
        return -1;
    return offset == 0 ? 0 : (int)(memory > offset ? memory : offset);
#else
    (void)fd;
    return -1;
#endif
}

static int system_lstat(const char *path, struct stat *out)
{
    return lstat(path, out);
}

static int system_eventfd(unsigned value, int flags)
{
    return eventfd(value, flags);
}

static int ring_setup_allowed(unsigned flags)
{
    (void)flags;
    return 0;
}

static int ring_enter_allowed(void)
{
    return 0;
}

static int32_t ring_result_as_is(uint32_t operation, int32_t result, uint32_t wanted)
{
    (void)operation;
    (void)wanted;
    return result;
}

static uint32_t ring_next_in_order(uint32_t count)
{
    (void)count;
    return 0;
}

#define REAL_CALLS                                                                                                    \
    {                                                                                                                 \
        .open = system_open, .close = close, .set_flags = system_set_flags, .flock = flock, .fstat = fstat,           \
        .direct_alignment = system_direct_alignment, .lstat = system_lstat, .fchmod = fchmod, .fallocate = fallocate, .ftruncate = ftruncate,                      \
        .fdatasync = fdatasync, .fsync = fsync, .unlink = unlink, .pread = pread, .pwrite = pwrite,                   \
        .mmap = mmap, .munmap = munmap, .madvise = madvise, .calloc = calloc,                                         \
        .eventfd = system_eventfd, .thread_create = pthread_create, .ring_setup = ring_setup_allowed,                 \
        .ring_enter = ring_enter_allowed, .ring_result = ring_result_as_is, .ring_next = ring_next_in_order,          \
    }

const struct fy__system fy__system_real = REAL_CALLS;
#ifdef FY_TESTING
struct fy__system fy__system = REAL_CALLS;
#else
const struct fy__system fy__system = REAL_CALLS;
#endif
