/*
 * shim.c - preloaded into a run by the proofs: it sees every call that reads or changes a file below one folder, writes it
 * down where it outlives the process, and makes chosen calls fail.
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
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NAMES 512
#define NAME_SIZE 400
#define DESCRIPTORS 4096

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

struct trace {
    uint64_t capacity; /* of records */
    atomic_uint_fast64_t clock;
    atomic_uint_fast64_t count;
    atomic_uint_fast64_t names_count;
    atomic_uint_fast64_t faults; /* done so far */
    char names[NAMES][NAME_SIZE];
    struct record records[];
};

enum fault { NONE = 0, EIO_FAULT, ENOSPC_FAULT, EAGAIN_FAULT, EINTR_FAULT, SHORT, FLIP, SLOW, EROFS_FAULT, LATE, KILL, TORN,
             CLOCK };
static const char *const fault_names[] = {"", "eio", "enospc", "eagain", "eintr", "short", "flip", "slow", "erofs", "late",
                                          "kill", "torn", "clock"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t bytes_lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_size;
static struct trace *trace;
static int bytes_file = -1;
static const char *bytes_of;
static uint64_t bytes_used;
static enum fault fault;
static uint64_t fault_first, fault_last;
static atomic_uint_fast64_t counted;
static atomic_int files[DESCRIPTORS]; /* descriptor -> 1 + name */

static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_pread)(int, void *, size_t, off_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_fsync)(int);
static int (*real_fdatasync)(int);
static int (*real_rename)(const char *, const char *);
static int (*real_link)(const char *, const char *);
static int (*real_unlink)(const char *);
static int (*real_ftruncate)(int, off_t);
static int (*real_fallocate)(int, int, off_t, off_t);
static int (*real_posix_fallocate)(int, off_t, off_t);
static int (*real_mkdir)(const char *, mode_t);
static int (*real_clock_gettime)(clockid_t, struct timespec *);

static void look_up(void *target, const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    memcpy(target, &found, sizeof found);
}

/* ---- set-up: of the process that runs, which may have been forked from one that had no such environment ---- */

static void set_up_calls(void)
{
    look_up(&real_open, "open64");
    look_up(&real_openat, "openat64");
    look_up(&real_close, "close");
    look_up(&real_pread, "pread64");
    look_up(&real_pwrite, "pwrite64");
    look_up(&real_write, "write");
    look_up(&real_fsync, "fsync");
    look_up(&real_fdatasync, "fdatasync");
    look_up(&real_rename, "rename");
    look_up(&real_link, "link");
    look_up(&real_unlink, "unlink");
    look_up(&real_ftruncate, "ftruncate64");
    look_up(&real_fallocate, "fallocate64");
    look_up(&real_posix_fallocate, "posix_fallocate64");
    look_up(&real_mkdir, "mkdir");
    look_up(&real_clock_gettime, "clock_gettime");
}

static void map_trace(const char *path)
{
    struct stat status;
    const int fd = real_open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0) {
        void *found = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        trace = found == MAP_FAILED ? NULL : found;
    }
    if (fd >= 0)
        (void)real_close(fd);
}

static void read_fault(const char *text)
{
    char how[16] = "";
    if (sscanf(text, "%lu:%lu:%15s", &fault_first, &fault_last, how) != 3)
        return;
    for (size_t i = 1; i < sizeof fault_names / sizeof fault_names[0]; i++)
        if (strcmp(how, fault_names[i]) == 0)
            fault = (enum fault)i;
}

/* What the environment says is read when a folder is first named there: a forked child has another than its parent. */
static void configure(void)
{
    static atomic_bool done;
    const char *folder = getenv("FUYOU_SHIM_ROOT");
    (void)pthread_once(&once, set_up_calls);
    if (atomic_load(&done) || folder == NULL || folder[0] == '\0')
        return;
    (void)pthread_mutex_lock(&names_lock);
    if (!atomic_load(&done)) {
        const char *text;
        (void)snprintf(root, sizeof root, "%s", folder);
        root_size = strlen(root);
        if ((text = getenv("FUYOU_SHIM_TRACE")) != NULL)
            map_trace(text);
        if ((text = getenv("FUYOU_SHIM_BYTES")) != NULL)
            bytes_file = real_open(text, O_WRONLY | O_CREAT | O_CLOEXEC, 0600); /* as it is: a worker opens it as well */
        bytes_of = getenv("FUYOU_SHIM_BYTES_OF");
        if ((text = getenv("FUYOU_SHIM_FAULT")) != NULL)
            read_fault(text);
        atomic_store(&done, true);
    }
    (void)pthread_mutex_unlock(&names_lock);
}

/* ---- names ---- */

/* The absolute path, without following the last link. False: it is not below the folder. */
static bool below(int folder, const char *path, char *out)
{
    if (root_size == 0 || path == NULL)
        return false;
    if (path[0] == '/') {
        if (snprintf(out, PATH_MAX, "%s", path) >= PATH_MAX)
            return false;
    } else {
        char base[PATH_MAX], link_name[64];
        if (folder == AT_FDCWD) {
            if (getcwd(base, sizeof base) == NULL)
                return false;
        } else {
            (void)snprintf(link_name, sizeof link_name, "/proc/self/fd/%d", folder);
            const ssize_t size = readlink(link_name, base, sizeof base - 1);
            if (size < 0)
                return false;
            base[size] = '\0';
        }
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX)
            return false;
    }
    return strncmp(out, root, root_size) == 0 && (out[root_size] == '/' || out[root_size] == '\0');
}

static uint32_t name_number(const char *path)
{
    const char *rest = path + root_size + (path[root_size] == '/');
    if (trace == NULL)
        return 0;
    (void)pthread_mutex_lock(&names_lock);
    const uint64_t count = atomic_load(&trace->names_count);
    uint64_t found = 0;
    while (found < count && strcmp(trace->names[found], rest) != 0)
        found++;
    if (found == count && count < NAMES - 1) {
        (void)snprintf(trace->names[count], NAME_SIZE, "%s", rest);
        atomic_store(&trace->names_count, count + 1);
    }
    (void)pthread_mutex_unlock(&names_lock);
    return (uint32_t)found;
}

static bool watched(int fd, uint32_t *name)
{
    if (fd < 0 || fd >= DESCRIPTORS || root_size == 0)
        return false;
    const int found = atomic_load(&files[fd]);
    *name = found > 0 ? (uint32_t)(found - 1) : 0;
    return found > 0;
}

/* ---- records and faults ---- */

static struct record *begin(enum call call, uint32_t file, uint64_t offset, uint64_t size)
{
    if (trace == NULL)
        return NULL;
    const uint64_t place = atomic_fetch_add(&trace->count, 1);
    if (place >= trace->capacity)
        return NULL;
    struct timespec now;
    (void)real_clock_gettime(CLOCK_MONOTONIC, &now);
    struct record *record = &trace->records[place];
    record->time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    record->call = call;
    record->file = file;
    record->offset = offset;
    record->size = size;
    atomic_thread_fence(memory_order_release);
    record->begin = 1 + atomic_fetch_add(&trace->clock, 1);
    return record;
}

static void end(struct record *record, int64_t result)
{
    const int error = errno;
    if (record != NULL) {
        record->result = result < 0 ? -error : result;
        atomic_thread_fence(memory_order_release);
        record->end = 1 + atomic_fetch_add(&trace->clock, 1);
    }
    errno = error;
}

static bool is_kept(uint32_t name)
{
    if (bytes_of == NULL)
        return true;
    const size_t size = strlen(trace->names[name]), wanted = strlen(bytes_of);
    return size >= wanted && strcmp(trace->names[name] + size - wanted, bytes_of) == 0;
}

static void keep_bytes(struct record *record, const void *data, size_t size)
{
    if (record == NULL || bytes_file < 0 || !is_kept(record->file))
        return;
    (void)pthread_mutex_lock(&bytes_lock);
    record->bytes_at = bytes_used;
    size_t done = 0;
    while (done < size) {
        const ssize_t some = real_pwrite(bytes_file, (const char *)data + done, size - done, (off_t)(bytes_used + done));
        if (some <= 0)
            abort(); /* a proof without its log proves nothing */
        done += (size_t)some;
    }
    bytes_used += size;
    (void)pthread_mutex_unlock(&bytes_lock);
}

/* Which kinds of calls a fault can be done to. */
static bool applies(enum call call)
{
    switch (fault) {
    case NONE:
    case CLOCK: return false;
    case SHORT: return call == READ || call == WRITE;
    case FLIP: return call == READ;
    case TORN: return call == WRITE;
    case LATE: return call == FLUSH || call == FLUSH_FOLDER;
    case ENOSPC_FAULT:
        return call == CREATE || call == WRITE || call == RENAME || call == LINK || call == RESIZE || call == ALLOCATE ||
               call == MKDIR || call == FLUSH;
    case EROFS_FAULT: return call != READ && call != OPEN && call != FLUSH && call != FLUSH_FOLDER;
    case EAGAIN_FAULT:
    case EINTR_FAULT: return call == READ || call == WRITE || call == FLUSH || call == ALLOCATE;
    default: return true;
    }
}

static enum fault struck(enum call call, struct record *record)
{
    if (!applies(call))
        return NONE;
    const uint64_t number = 1 + atomic_fetch_add(&counted, 1);
    if (number < fault_first || number > fault_last)
        return NONE;
    if (trace != NULL)
        atomic_fetch_add(&trace->faults, 1);
    if (record != NULL)
        record->fault = fault;
    if (fault == KILL)
        (void)kill(getpid(), SIGKILL);
    if (fault == LATE)
        (void)usleep(20000);
    if (fault == SLOW) /* some longer than others: what began later may end sooner */
        (void)usleep((useconds_t)(1000 * (1 + number * 7 % 10)));
    return fault;
}

/* Sets errno where the call is to fail. */
static bool fails(enum fault how)
{
    switch (how) {
    case EIO_FAULT: errno = EIO; return true;
    case ENOSPC_FAULT: errno = ENOSPC; return true;
    case EAGAIN_FAULT: errno = EAGAIN; return true;
    case EINTR_FAULT: errno = EINTR; return true;
    case EROFS_FAULT: errno = EROFS; return true;
    default: return false;
    }
}

/* ---- the calls ---- */

static int opened(int folder, const char *path, int flags, mode_t mode)
{
    char full[PATH_MAX];
    configure();
    if (!below(folder, path, full))
        return real_openat(folder, path, flags, mode);
    const uint32_t name = name_number(full);
    const bool makes = (flags & (O_CREAT | O_TRUNC)) != 0;
    struct record *record = begin(makes ? CREATE : OPEN, name, (uint64_t)flags, 0);
    if (fails(struck(makes ? CREATE : OPEN, record))) {
        end(record, -1);
        return -1;
    }
    const int fd = real_openat(folder, path, flags, mode);
    if (fd >= 0 && fd < DESCRIPTORS)
        atomic_store(&files[fd], 1 + (int)name);
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
    configure();
    if (fd >= 0 && fd < DESCRIPTORS)
        atomic_store(&files[fd], 0);
    return real_close(fd);
}

ssize_t pread64(int fd, void *data, size_t size, off_t offset)
{
    uint32_t name;
    configure();
    if (!watched(fd, &name))
        return real_pread(fd, data, size, offset);
    struct record *record = begin(READ, name, (uint64_t)offset, size);
    const enum fault how = struck(READ, record);
    if (fails(how)) {
        end(record, -1);
        return -1;
    }
    const ssize_t got = real_pread(fd, data, how == SHORT && size > 4096 ? size / 8192 * 4096 : size, offset);
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
    const ssize_t got = placed ? real_pwrite(fd, data, some, offset) : real_write(fd, data, some);
    if (how == TORN)
        (void)kill(getpid(), SIGKILL);
    end(record, got);
    return got;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset)
{
    uint32_t name;
    configure();
    return watched(fd, &name) ? written(fd, name, data, size, offset, true) : real_pwrite(fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t write(int fd, const void *data, size_t size)
{
    uint32_t name;
    configure();
    if (!watched(fd, &name))
        return real_write(fd, data, size);
    const int flags = fcntl(fd, F_GETFL);
    const off_t at = lseek(fd, 0, flags >= 0 && (flags & O_APPEND) != 0 ? SEEK_END : SEEK_CUR);
    return written(fd, name, data, size, at < 0 ? 0 : at, false);
}

static int flushed(int fd, int (*flush)(int))
{
    uint32_t name;
    configure();
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
int fsync(int fd) { configure(); return flushed(fd, real_fsync); }
int fdatasync(int fd) { configure(); return flushed(fd, real_fdatasync); }

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
int rename(const char *from, const char *to) { configure(); return two_names(RENAME, from, to, real_rename); }
int link(const char *from, const char *to) { configure(); return two_names(LINK, from, to, real_link); }
int linkat(int a, const char *from, int b, const char *to, int flags)
{
    (void)a, (void)b, (void)flags;
    configure();
    return two_names(LINK, from, to, real_link);
}

int unlink(const char *path)
{
    char full[PATH_MAX];
    configure();
    if (!below(AT_FDCWD, path, full))
        return real_unlink(path);
    struct record *record = begin(UNLINK, name_number(full), 0, 0);
    const int done = fails(struck(UNLINK, record)) ? -1 : real_unlink(path);
    end(record, done);
    return done;
}

int mkdir(const char *path, mode_t mode)
{
    char full[PATH_MAX];
    configure();
    if (!below(AT_FDCWD, path, full))
        return real_mkdir(path, mode);
    struct record *record = begin(MKDIR, name_number(full), 0, 0);
    const int done = fails(struck(MKDIR, record)) ? -1 : real_mkdir(path, mode);
    end(record, done);
    return done;
}

int ftruncate64(int fd, off_t size)
{
    uint32_t name;
    configure();
    if (!watched(fd, &name))
        return real_ftruncate(fd, size);
    struct record *record = begin(RESIZE, name, 0, (uint64_t)size);
    const int done = fails(struck(RESIZE, record)) ? -1 : real_ftruncate(fd, size);
    end(record, done);
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int fallocate64(int fd, int mode, off_t offset, off_t size)
{
    uint32_t name;
    configure();
    if (!watched(fd, &name))
        return real_fallocate(fd, mode, offset, size);
    struct record *record = begin(ALLOCATE, name, (uint64_t)offset, (uint64_t)size);
    const int done = fails(struck(ALLOCATE, record)) ? -1 : real_fallocate(fd, mode, offset, size);
    end(record, done);
    return done;
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }

int posix_fallocate64(int fd, off_t offset, off_t size)
{
    uint32_t name;
    configure();
    if (!watched(fd, &name))
        return real_posix_fallocate(fd, offset, size);
    struct record *record = begin(ALLOCATE, name, (uint64_t)offset, (uint64_t)size);
    const int error = fails(struck(ALLOCATE, record)) ? errno : real_posix_fallocate(fd, offset, size);
    errno = error;
    end(record, error ? -1 : 0);
    return error;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

/* ---- the clock ---- */

#define YEAR (365 * 24 * 3600)

int clock_gettime(clockid_t which, struct timespec *now)
{
    configure();
    const int result = real_clock_gettime(which, now);
    if (result != 0 || fault != CLOCK || which != CLOCK_REALTIME)
        return result;
    const uint64_t number = 1 + atomic_fetch_add(&counted, 1);
    if (number < fault_first || number > fault_last)
        return result;
    if (trace != NULL)
        atomic_fetch_add(&trace->faults, 1);
    now->tv_sec += number % 2 == 0 ? YEAR : -YEAR;
    return result;
}
