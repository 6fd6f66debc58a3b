/* shim_log.c - which files are watched, and what is written down of their calls (see shim.h). */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAMES 512
#define NAME_SIZE 400
#define DESCRIPTORS 4096

struct trace {
    uint64_t capacity; /* of records */
    atomic_uint_fast64_t clock;
    atomic_uint_fast64_t count;
    atomic_uint_fast64_t names_count;
    atomic_uint_fast64_t faults; /* done so far */
    char names[NAMES][NAME_SIZE];
    struct record records[];
};

static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t bytes_lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_size;
static struct trace *trace;
static int bytes_file = -1;
static const char *bytes_of;
static uint64_t bytes_used;
static atomic_int files[DESCRIPTORS]; /* descriptor -> 1 + name */

/* ---- set-up: of the process that runs, which may have been forked from one that had no such environment ---- */

static void map_trace(const char *path)
{
    struct stat status;
    const int fd = real.open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0) {
        void *found = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        trace = found == MAP_FAILED ? NULL : found;
    }
    if (fd >= 0)
        (void)real.close(fd);
}

/* What the environment says is read when a folder is first named there: a forked child has another than its parent. */
void configure(void)
{
    static atomic_bool done;
    const char *folder = getenv("FUYOU_SHIM_ROOT");
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
            bytes_file = real.open(text, O_WRONLY | O_CREAT | O_CLOEXEC, 0600); /* as it is: a worker opens it as well */
        bytes_of = getenv("FUYOU_SHIM_BYTES_OF");
        if ((text = getenv("FUYOU_SHIM_FAULT")) != NULL)
            read_fault(text);
        atomic_store(&done, true);
    }
    (void)pthread_mutex_unlock(&names_lock);
}

/* ---- names ---- */

/* The absolute path, without following the last link. False: it is not below the folder. */
bool below(int folder, const char *path, char *out)
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

uint32_t name_number(const char *path)
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

bool watched(int fd, uint32_t *name)
{
    if (fd < 0 || fd >= DESCRIPTORS || root_size == 0)
        return false;
    const int found = atomic_load(&files[fd]);
    *name = found > 0 ? (uint32_t)(found - 1) : 0;
    return found > 0;
}

void watch(int fd, uint32_t name)
{
    if (fd >= 0 && fd < DESCRIPTORS)
        atomic_store(&files[fd], 1 + (int)name);
}

void forget(int fd)
{
    if (fd >= 0 && fd < DESCRIPTORS)
        atomic_store(&files[fd], 0);
}

/* ---- records ---- */

struct record *begin(enum call call, uint32_t file, uint64_t offset, uint64_t size)
{
    if (trace == NULL)
        return NULL;
    const uint64_t place = atomic_fetch_add(&trace->count, 1);
    if (place >= trace->capacity)
        return NULL;
    struct timespec now;
    (void)real.clock_gettime(CLOCK_MONOTONIC, &now);
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

void end(struct record *record, int64_t result)
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

void keep_bytes(struct record *record, const void *data, size_t size)
{
    if (record == NULL || bytes_file < 0 || !is_kept(record->file))
        return;
    (void)pthread_mutex_lock(&bytes_lock);
    record->bytes_at = bytes_used;
    size_t done = 0;
    while (done < size) {
        const ssize_t some = real.pwrite(bytes_file, (const char *)data + done, size - done, (off_t)(bytes_used + done));
        if (some <= 0)
            abort(); /* a proof without its log proves nothing */
        done += (size_t)some;
    }
    bytes_used += size;
    (void)pthread_mutex_unlock(&bytes_lock);
}

void count_fault(void)
{
    if (trace != NULL)
        atomic_fetch_add(&trace->faults, 1);
}
