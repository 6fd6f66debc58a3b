/* shim_calls.c - the calls that stand in for the C library's (see shim.h). */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct real real;

static void look_up(void *target, const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(target, &found, sizeof found);
}

static void set_up_calls(void)
{
    look_up(&real.open, "open64");
    look_up(&real.openat, "openat64");
    look_up(&real.close, "close");
    look_up(&real.pread, "pread64");
    look_up(&real.pwrite, "pwrite64");
    look_up(&real.write, "write");
    look_up(&real.fsync, "fsync");
    look_up(&real.fdatasync, "fdatasync");
    look_up(&real.rename, "rename");
    look_up(&real.link, "link");
    look_up(&real.unlink, "unlink");
    look_up(&real.ftruncate, "ftruncate64");
    look_up(&real.fallocate, "fallocate64");
    look_up(&real.posix_fallocate, "posix_fallocate64");
    look_up(&real.mkdir, "mkdir");
    look_up(&real.clock_gettime, "clock_gettime");
}

static void ready(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, set_up_calls);
    configure();
}

#pragma GCC visibility push(default) /* nothing else of the library is seen by the process */

static int opened(int folder, const char *path, int flags, mode_t mode)
{
    char full[PATH_MAX];
    ready();
    if (!below(folder, path, full))
        return real.openat(folder, path, flags, mode);
    const uint32_t name = name_number(full);
    const bool makes = (flags & (O_CREAT | O_TRUNC)) != 0;
    struct record *record = begin(makes ? CREATE : OPEN, name, (uint64_t)flags, 0);
    if (fails(struck(makes ? CREATE : OPEN, record))) {
        end(record, -1);
        return -1;
    }
    const int fd = real.openat(folder, path, flags, mode);
    watch(fd, name);
    end(record, fd);
    return fd;
}

#define OPENING(name, ...)                                                                                             \
    mode_t mode = 0;                                                                                                   \
    if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {                                                  \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }                                                                                                                  \
    return opened(__VA_ARGS__, flags, mode)

int open(const char *path, int flags, ...) { OPENING(open, AT_FDCWD, path); }
int open64(const char *path, int flags, ...) { OPENING(open64, AT_FDCWD, path); }
int openat(int folder, const char *path, int flags, ...) { OPENING(openat, folder, path); }
int openat64(int folder, const char *path, int flags, ...) { OPENING(openat64, folder, path); }

int close(int fd)
{
    ready();
    forget(fd);
    return real.close(fd);
}

ssize_t pread64(int fd, void *data, size_t size, off_t offset)
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return real.pread(fd, data, size, offset);
    struct record *record = begin(READ, name, (uint64_t)offset, size);
    const enum fault how = struck(READ, record);
    if (fails(how)) {
        end(record, -1);
        return -1;
    }
    const ssize_t got = real.pread(fd, data, how == SHORT && size > 4096 ? size / 8192 * 4096 : size, offset);
    if (how == FLIP && got > 0)
        ((unsigned char *)data)[(size_t)got / 2] ^= 0x04;
    end(record, got);
    return got;
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return pread64(fd, data, size, offset); }

static ssize_t written(int fd, uint32_t name, const void *data, size_t size, off_t offset, bool placed)
{
    struct record *record = begin(WRITE, name, (uint64_t)offset, size);
    const enum fault how = struck(WRITE, record);
    if (fails(how)) {
        end(record, -1);
        return -1;
    }
    const bool part = (how == SHORT || how == TORN) && size > 1;
    const size_t some = !part ? size : size > 4096 ? size / 8192 * 4096 + (size < 8192) * 4096 : size / 2;
    keep_bytes(record, data, some);
    const ssize_t got = placed ? real.pwrite(fd, data, some, offset) : real.write(fd, data, some);
    if (how == TORN)
        (void)kill(getpid(), SIGKILL);
    end(record, got);
    return got;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset)
{
    uint32_t name;
    ready();
    return watched(fd, &name) ? written(fd, name, data, size, offset, true) : real.pwrite(fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size)
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return real.write(fd, data, size);
    const int flags = fcntl(fd, F_GETFL);
    const off_t at = lseek(fd, 0, flags >= 0 && (flags & O_APPEND) != 0 ? SEEK_END : SEEK_CUR);
    return written(fd, name, data, size, at < 0 ? 0 : at, false);
}

static int flushed(int fd, int (*flush)(int))
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return flush(fd);
    struct stat status;
    const bool folder = fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
    const enum call call = folder ? FLUSH_FOLDER : FLUSH;
    struct record *record = begin(call, name, 0, 0);
    const bool refused = fails(struck(call, record));
    const int done = refused ? -1 : flush(fd);
    end(record, done);
    return done;
}
int fsync(int fd) { ready(); return flushed(fd, real.fsync); }
int fdatasync(int fd) { ready(); return flushed(fd, real.fdatasync); }

static int two_names(enum call call, const char *from, const char *to, int (*act)(const char *, const char *))
{
    char first[PATH_MAX], second[PATH_MAX];
    if (!below(AT_FDCWD, from, first) || !below(AT_FDCWD, to, second))
        return act(from, to);
    struct record *record = begin(call, name_number(first), 0, 0);
    if (record != NULL)
        record->other = name_number(second);
    const int done = fails(struck(call, record)) ? -1 : act(from, to);
    end(record, done);
    return done;
}
int rename(const char *from, const char *to) { ready(); return two_names(RENAME, from, to, real.rename); }
int link(const char *from, const char *to) { ready(); return two_names(LINK, from, to, real.link); }
int linkat(int a, const char *from, int b, const char *to, int flags)
{
    (void)a, (void)b, (void)flags;
    ready();
    return two_names(LINK, from, to, real.link);
}

int unlink(const char *path)
{
    char full[PATH_MAX];
    ready();
    if (!below(AT_FDCWD, path, full))
        return real.unlink(path);
    struct record *record = begin(UNLINK, name_number(full), 0, 0);
    const int done = fails(struck(UNLINK, record)) ? -1 : real.unlink(path);
    end(record, done);
    return done;
}

int mkdir(const char *path, mode_t mode)
{
    char full[PATH_MAX];
    ready();
    if (!below(AT_FDCWD, path, full))
        return real.mkdir(path, mode);
    struct record *record = begin(MKDIR, name_number(full), 0, 0);
    const int done = fails(struck(MKDIR, record)) ? -1 : real.mkdir(path, mode);
    end(record, done);
    return done;
}

int ftruncate64(int fd, off_t size)
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return real.ftruncate(fd, size);
    struct record *record = begin(RESIZE, name, 0, (uint64_t)size);
    const int done = fails(struck(RESIZE, record)) ? -1 : real.ftruncate(fd, size);
    end(record, done);
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int fallocate64(int fd, int mode, off_t offset, off_t size)
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return real.fallocate(fd, mode, offset, size);
    struct record *record = begin(ALLOCATE, name, (uint64_t)offset, (uint64_t)size);
    const int done = fails(struck(ALLOCATE, record)) ? -1 : real.fallocate(fd, mode, offset, size);
    end(record, done);
    return done;
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }

int posix_fallocate64(int fd, off_t offset, off_t size)
{
    uint32_t name;
    ready();
    if (!watched(fd, &name))
        return real.posix_fallocate(fd, offset, size);
    struct record *record = begin(ALLOCATE, name, (uint64_t)offset, (uint64_t)size);
    const int error = fails(struck(ALLOCATE, record)) ? errno : real.posix_fallocate(fd, offset, size);
    errno = error;
    end(record, error ? -1 : 0);
    return error;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

int clock_gettime(clockid_t which, struct timespec *now)
{
    ready();
    const int result = real.clock_gettime(which, now);
    if (result == 0 && which == CLOCK_REALTIME)
        move_clock(now);
    return result;
}
