/*
 * shim.h - the parts of a library that the proofs preload into a run: it sees every call that reads or changes a file below one
 * folder, writes it down where it outlives the process, and makes chosen calls fail.
 *
 *   shim_calls.c   the calls that stand in for the C library's
 *   shim_log.c     the environment, names of files, records and bytes
 *   shim_faults.c  what is done to which call
 *
 *   FUYOU_SHIM_ROOT   the folder; without it nothing is looked at
 *   FUYOU_SHIM_TRACE  a file of `struct trace`, made by who starts the run, mapped shared: a killed process loses none of it
 *   FUYOU_SHIM_BYTES  a file, empty at first, in which everything that is written is kept; records say where. With
 *                     FUYOU_SHIM_BYTES_OF only what goes to files whose names end so
 *   FUYOU_SHIM_FAULT  FIRST:LAST:HOW, calls of HOW's kinds counted from 1: eio, enospc, eagain, eintr, short, flip, slow,
 *                     erofs; slow makes calls wait for 1 to 10 ms, late flushes for 20 ms; kill ends the process before
 *                     the call, torn after half of a write; clock sets the wall clock a year ahead and a year back, at
 *                     every reading in turn
 *
 * A record has the number of calls that had begun when it began and when it ended: a write is covered by a flush that began
 * after the write had ended. I/O that io_uring does passes by: runs under it use the thread backend.
 */
#ifndef FUYOU_SHIM_H
#define FUYOU_SHIM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

enum call { OPEN = 1, CREATE, READ, WRITE, FLUSH, FLUSH_FOLDER, RENAME, LINK, UNLINK, RESIZE, ALLOCATE, MKDIR };

struct record {
    uint64_t begin; /* 0: not begun to be written down */
    uint64_t end;   /* 0: under way */
    uint64_t time_ns;
    uint32_t call;
    uint32_t file;
    uint32_t other; /* RENAME, LINK: the new name */
    uint32_t fault; /* which was done to it */
    uint64_t offset;
    uint64_t size;
    int64_t result; /* or -errno */
    uint64_t bytes_at;
};

/* The C library's own calls. */
struct real {
    int (*open)(const char *, int, ...);
    int (*openat)(int, const char *, int, ...);
    int (*close)(int);
    ssize_t (*pread)(int, void *, size_t, off_t);
    ssize_t (*pwrite)(int, const void *, size_t, off_t);
    ssize_t (*write)(int, const void *, size_t);
    int (*fsync)(int);
    int (*fdatasync)(int);
    int (*rename)(const char *, const char *);
    int (*link)(const char *, const char *);
    int (*unlink)(const char *);
    int (*ftruncate)(int, off_t);
    int (*fallocate)(int, int, off_t, off_t);
    int (*posix_fallocate)(int, off_t, off_t);
    int (*mkdir)(const char *, mode_t);
    int (*clock_gettime)(clockid_t, struct timespec *);
};
extern struct real real;

/* shim_log.c */
void configure(void); /* reads the environment, once it names a folder */
bool below(int folder, const char *path, char *out);
uint32_t name_number(const char *path);
bool watched(int fd, uint32_t *name);
void watch(int fd, uint32_t name);
void forget(int fd);
struct record *begin(enum call call, uint32_t file, uint64_t offset, uint64_t size);
void end(struct record *record, int64_t result);
void keep_bytes(struct record *record, const void *data, size_t size);
void count_fault(void);

/* shim_faults.c */
enum fault { NONE = 0, EIO_FAULT, ENOSPC_FAULT, EAGAIN_FAULT, EINTR_FAULT, SHORT, FLIP, SLOW, EROFS_FAULT, LATE, KILL, TORN,
             CLOCK };

void read_fault(const char *text);
enum fault struck(enum call call, struct record *record);
bool fails(enum fault how); /* sets errno where the call is to fail */
void move_clock(struct timespec *now); /* what the wall's clock shows, where that is the fault */

#endif
