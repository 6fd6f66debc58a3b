/*
 * Every call of set-up is made to fail in turn: arena, store and daemon come up or report the error that was injected,
 * leave no descriptor, no memory (the sanitizer looks) and no file that they made, and the next attempt works.
 */
#include "testing.h"

#include <sys/mman.h>

static uint64_t call_now;
static uint64_t call_failing;

static bool strikes(void)
{
    call_now++;
    return call_now == call_failing;
}

static void *failing_calloc(size_t count, size_t size)
{
    return strikes() ? NULL : fy__system_real.calloc(count, size);
}

static int failing_open(const char *path, int flags, mode_t mode)
{
    errno = EMFILE;
    return strikes() ? -1 : fy__system_real.open(path, flags, mode);
}

static int failing_flock(int fd, int operation)
{
    errno = ENOLCK;
    return strikes() ? -1 : fy__system_real.flock(fd, operation);
}

static int failing_fstat(int fd, struct stat *out)
{
    errno = EIO;
    return strikes() ? -1 : fy__system_real.fstat(fd, out);
}

static int failing_fallocate(int fd, int mode, off_t offset, off_t size)
{
    errno = ENOSPC;
    return strikes() ? -1 : fy__system_real.fallocate(fd, mode, offset, size);
}

static int failing_fdatasync(int fd)
{
    errno = EIO;
    return strikes() ? -1 : fy__system_real.fdatasync(fd);
}

static int failing_fsync(int fd)
{
    errno = EIO;
    return strikes() ? -1 : fy__system_real.fsync(fd);
}

static int failing_set_flags(int fd, int flags)
{
    errno = EACCES;
    return strikes() ? -1 : fy__system_real.set_flags(fd, flags);
}

static ssize_t failing_pread(int fd, void *data, size_t size, off_t offset)
{
    errno = ENOTCONN;
    return strikes() ? -1 : fy__system_real.pread(fd, data, size, offset);
}

static int not_told(int fd)
{
    (void)fd;
    return -1;
}

static void *failing_mmap(void *hint, size_t size, int protection, int flags, int fd, off_t offset)
{
    errno = ENOMEM;
    return strikes() ? MAP_FAILED : fy__system_real.mmap(hint, size, protection, flags, fd, offset);
}

static int failing_eventfd(unsigned value, int flags)
{
    errno = EMFILE;
    return strikes() ? -1 : fy__system_real.eventfd(value, flags);
}

static int failing_thread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                                 void *argument)
{
    return strikes() ? EAGAIN : fy__system_real.thread_create(thread, attributes, body, argument);
}

static int failing_ring_setup(unsigned flags)
{
    return strikes() ? -EPERM : fy__system_real.ring_setup(flags);
}

static void install(void)
{
    fy__system.calloc = failing_calloc;
    fy__system.open = failing_open;
    fy__system.flock = failing_flock;
    fy__system.fstat = failing_fstat;
    fy__system.fallocate = failing_fallocate;
    fy__system.fdatasync = failing_fdatasync;
    fy__system.fsync = failing_fsync;
    fy__system.set_flags = failing_set_flags;
    fy__system.direct_alignment = not_told; /* so that a page is read */
    fy__system.pread = failing_pread;
    fy__system.mmap = failing_mmap;
    fy__system.eventfd = failing_eventfd;
    fy__system.thread_create = failing_thread_create;
    fy__system.ring_setup = failing_ring_setup;
}

/* Brings everything up; 0, or the first error. What came up is taken down again. */
static int bring_up(uint32_t backend)
{
    const char *paths[2] = {testing_path(0), testing_path(1)};
    fy_arena *arena = NULL;
    fy_store *store = NULL;
    fy_daemon *daemon = NULL;
    fy_failure why = {0};
    fy_options options = testing_options(backend);
    options.update_threads = 2;
    options.chunk_params = 16384;
    options.scratch_size = fy_scratch_size(16384, 2);
    int error = fy_arena_create(1 << 20, &arena);
    if (error == 0) {
        error = fy_store_open(paths, 2, 1 << 16, 1 << 20, FY_STORE_CREATE, &store, &why);
        CHECK_EQUAL(why.error, error);
    }
    if (error == 0) {
        error = fy_daemon_start(&options, arena, store, &daemon, &why);
        CHECK_EQUAL(why.error, error);
    }
    const uint64_t calls = call_now;
    call_failing = 0;
    if (error != 0) {
        CHECK(daemon == NULL);
        if (store == NULL)
            CHECK(access(paths[0], F_OK) != 0 && access(paths[1], F_OK) != 0);
    }
    testing_close(daemon, arena, store);
    (void)unlink(paths[0]); /* there or not: that was looked at above */
    (void)unlink(paths[1]);
    call_now = calls;
    return error;
}

static int taken_flock(int fd, int operation)
{
    (void)fd;
    (void)operation;
    errno = EWOULDBLOCK;
    return -1;
}

/* Two runs begin at once: one makes the file, the other is quicker to lock it. It stays, for it is the other's now. */
static void leave_what_another_has_locked(void)
{
    const char *path = testing_path(0);
    fy_store *store = NULL;
    fy_failure why = {0};
    fy__system.flock = taken_flock;
    CHECK_EQUAL(fy_store_open(&path, 1, 1 << 16, 1 << 20, FY_STORE_CREATE, &store, &why), -EBUSY);
    CHECK(store == NULL);
    CHECK_EQUAL(access(path, F_OK), 0);
    CHECK_EQUAL(unlink(path), 0);
    fy__system = fy__system_real;
}

int main(void)
{
    leave_what_another_has_locked();
    const uint32_t *backends = testing_backends();
    CHECK(testing_path(0) != NULL);
    install();
    for (; *backends != FY_BACKEND_AUTO; backends++) {
        uint32_t failures = 0;
        const uint32_t descriptors = testing_descriptors();
        for (uint64_t n = 1;; n++) {
            CHECK(n < 200);
            call_now = 0;
            call_failing = n;
            const int error = bring_up(*backends);
            CHECK_EQUAL(testing_descriptors(), descriptors);
            if (call_now < n) {
                CHECK_EQUAL(error, 0);
                break;
            }
            failures += error != 0;
        }
        CHECK(failures > 20);
    }
    return 0;
}
