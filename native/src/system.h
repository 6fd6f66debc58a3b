/*
 * system.h - the table of system calls, so that a test can make the n-th one fail.
 *
 * Every call of the library that the kernel may refuse goes through `fy__system`. In the product the table is const and
 * the compiler sees through it; built with FY_TESTING it is writable and tests put their own functions in, before any
 * daemon runs (the daemon's threads read the table without a lock).
 *
 * io_uring has no call per I/O to replace, so the ring asks four questions instead: may I be set up with these flags,
 * may I enter the kernel, (per completion) is this really the result, and which of those that came is looked at next.
 */
#ifndef FUYOU_SYSTEM_H
#define FUYOU_SYSTEM_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

struct fy__system {
    int (*open)(const char *path, int flags, mode_t mode);
    int (*close)(int fd);
    int (*set_flags)(int fd, int flags); /* fcntl F_SETFL */
    int (*direct_alignment)(int fd);     /* statx: bytes that direct I/O is aligned to; 0: it has none; -1: not told */
    int (*flock)(int fd, int operation);
    int (*fstat)(int fd, struct stat *out);
    int (*lstat)(const char *path, struct stat *out);
    int (*fchmod)(int fd, mode_t mode);
    int (*fallocate)(int fd, int mode, off_t offset, off_t size);
    int (*ftruncate)(int fd, off_t size);
    int (*fdatasync)(int fd);
    int (*fsync)(int fd);
    int (*unlink)(const char *path);
    ssize_t (*pread)(int fd, void *data, size_t size, off_t offset);
    ssize_t (*pwrite)(int fd, const void *data, size_t size, off_t offset);
    void *(*mmap)(void *hint, size_t size, int protection, int flags, int fd, off_t offset);
    int (*munmap)(void *data, size_t size);
    int (*madvise)(void *data, size_t size, int advice);
    void *(*calloc)(size_t count, size_t size);
    int (*eventfd)(unsigned value, int flags);
    int (*thread_create)(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
    int (*ring_setup)(unsigned flags);                                          /* 0 or -errno */
    int (*ring_enter)(void);                                                    /* 0 or -errno */
    int32_t (*ring_result)(uint32_t operation, int32_t result, uint32_t wanted); /* the completion's result */
    uint32_t (*ring_next)(uint32_t count);                                      /* below count; 0: the one that came first */
};

#ifdef FY_TESTING
extern struct fy__system fy__system;
#else
extern const struct fy__system fy__system;
#endif

/* The real table, for tests that wrap a call and for putting things back. */
extern const struct fy__system fy__system_real;

#endif
