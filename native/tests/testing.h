/*
 * testing.h - what the native tests share: a check that says where, a temporary folder, a small daemon, and faults.
 *
 * A test is one program: 0 it holds, 1 it does not, 77 this kernel cannot show it. FUYOU_TEST_DIR says where the files
 * go (default: TMPDIR or /tmp).
 */
#ifndef FUYOU_TESTING_H
#define FUYOU_TESTING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define SKIPPED 77
#define FOREVER UINT64_MAX

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);          \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

#define CHECK_EQUAL(actual, expected)                                                                         \
    do {                                                                                                      \
        const long long actual_ = (long long)(actual);                                                        \
        const long long expected_ = (long long)(expected);                                                    \
        if (actual_ != expected_) {                                                                           \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #actual, actual_, expected_); \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

/* ---- a folder of its own, removed at exit ---- */
static char testing_folder[256];

static inline void testing_folder_remove(void)
{
    DIR *folder = opendir(testing_folder);
    if (folder == NULL)
        return;
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (entry->d_name[0] != '.')
            (void)unlinkat(dirfd(folder), entry->d_name, 0);
    }
    (void)closedir(folder);
    (void)rmdir(testing_folder);
}

static inline const char *testing_path(uint32_t index)
{
    static char paths[FY_MAX_DIRECTORIES][320];
    if (testing_folder[0] == '\0') {
        const char *where = getenv("FUYOU_TEST_DIR");
        if (where == NULL)
            where = getenv("TMPDIR");
        (void)snprintf(testing_folder, sizeof testing_folder, "%s/fuyou-test-XXXXXX", where != NULL ? where : "/tmp");
        CHECK(mkdtemp(testing_folder) != NULL);
        CHECK(atexit(testing_folder_remove) == 0);
    }
    CHECK(index < FY_MAX_DIRECTORIES);
    (void)snprintf(paths[index], sizeof paths[index], "%s/store-%u", testing_folder, index);
    return paths[index];
}

static inline fy_store *testing_store(uint32_t count, uint64_t stripe, uint64_t size)
{
    const char *paths[FY_MAX_DIRECTORIES];
    for (uint32_t i = 0; i < count; i++)
        paths[i] = testing_path(i);
    fy_store *store = NULL;
    fy_failure why;
    CHECK_EQUAL(fy_store_open(paths, count, stripe, size, FY_STORE_CREATE, &store, &why), 0);
    return store;
}

static inline fy_arena *testing_arena(uint64_t size)
{
    fy_arena *arena = NULL;
    CHECK_EQUAL(fy_arena_create(size, &arena), 0);
    return arena;
}

/* ---- a daemon ---- */
static inline fy_options testing_options(uint32_t backend)
{
    return (fy_options){
        .backend = backend, .read_depth = 4, .write_depth = 4, .requests = 64, .block_size = 64 << 10};
}

static inline fy_daemon *testing_daemon(const fy_options *options, fy_arena *arena, fy_store *store)
{
    fy_daemon *daemon = NULL;
    fy_failure why;
    CHECK_EQUAL(fy_daemon_start(options, arena, store, &daemon, &why), 0);
    return daemon;
}

static inline void testing_close(fy_daemon *daemon, fy_arena *arena, fy_store *store)
{
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    CHECK_EQUAL(fy_arena_destroy(arena), 0);
}

/* Is io_uring there? Tests of both backends leave it out where it is not. */
static inline bool testing_has_ring(void)
{
    fy_arena *arena = testing_arena(FY__PAGE);
    fy_store *store = testing_store(1, FY__PAGE, FY__PAGE);
    const fy_options options = testing_options(FY_BACKEND_IO_URING);
    fy_daemon *daemon = NULL;
    const bool there = fy_daemon_start(&options, arena, store, &daemon, NULL) == 0;
    testing_close(daemon, arena, store);
    (void)unlink(testing_path(0));
    return there;
}

/* The backends this machine has, as a list that FY_BACKEND_AUTO ends. */
static inline const uint32_t *testing_backends(void)
{
    static uint32_t backends[3];
    uint32_t count = 0;
    if (testing_has_ring())
        backends[count++] = FY_BACKEND_IO_URING;
    backends[count++] = FY_BACKEND_THREADS;
    backends[count] = FY_BACKEND_AUTO;
    return backends;
}

#define WAIT_NS UINT64_C(60000000000)

static inline int testing_wait(fy_daemon *daemon, fy_ticket ticket, fy_result *result)
{
    fy_result own;
    const int error = fy_wait(daemon, ticket, WAIT_NS, result != NULL ? result : &own);
    CHECK(error != -ETIME);
    CHECK(error != -ENOENT);
    return error;
}

static inline int testing_read(fy_daemon *daemon, uint64_t arena, uint64_t store, uint64_t size, fy_result *result)
{
    fy_ticket ticket = 0;
    CHECK_EQUAL(fy_submit_read(daemon, arena, store, size, 0, 7, &ticket), 0);
    return testing_wait(daemon, ticket, result);
}

static inline int testing_write(fy_daemon *daemon, uint64_t arena, uint64_t store, uint64_t size, fy_result *result)
{
    fy_ticket ticket = 0;
    CHECK_EQUAL(fy_submit_write(daemon, arena, store, size, 0, 7, &ticket), 0);
    return testing_wait(daemon, ticket, result);
}

/* ---- numbers that are the same every time ---- */
static inline uint64_t testing_random(uint64_t *state)
{
    *state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static inline void testing_fill(void *data, uint64_t size, uint64_t seed)
{
    CHECK(size % 8 == 0);
    for (uint64_t i = 0; i < size / 8; i++) {
        const uint64_t word = testing_random(&seed);
        memcpy((unsigned char *)data + i * 8, &word, 8);
    }
}

/* Open descriptors of this process: the same before and after, or something leaks. */
static inline uint32_t testing_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    uint32_t count = 0;
    while (readdir(folder) != NULL)
        count++;
    CHECK_EQUAL(closedir(folder), 0);
    return count;
}

/* ---- faults of data I/O: the n-th call, once or from then on ---- */
#define SLIVER 512 /* less than a page: moved, but of no use under direct I/O */
struct testing_fault {
    int error;            /* negative errno; 0: the result is zero; 1: half of what was asked, or a sliver of a page */
    uint32_t operation;   /* FY_OP_READ, FY_OP_WRITE, or FY_OP_NONE for both */
    uint64_t first;       /* 1 is the first call */
    uint64_t times;       /* FOREVER or how often */
    _Atomic uint64_t calls;
    _Atomic uint64_t hits;
};
static struct testing_fault testing_fault_now;

static inline bool testing_fault_strikes(uint32_t operation)
{
    struct testing_fault *fault = &testing_fault_now;
    if (fault->times == 0 || (fault->operation != FY_OP_NONE && fault->operation != operation))
        return false;
    const uint64_t call = atomic_fetch_add(&fault->calls, 1) + 1;
    if (call < fault->first || call - fault->first >= fault->times)
        return false;
    atomic_fetch_add(&fault->hits, 1);
    return true;
}

static inline size_t half(size_t size)
{
    return size / 2 & ~(size_t)(FY__PAGE - 1);
}

static inline ssize_t testing_pread(int fd, void *data, size_t size, off_t offset)
{
    if (!testing_fault_strikes(FY_OP_READ))
        return fy__system_real.pread(fd, data, size, offset);
    if (testing_fault_now.error >= 0)
        return testing_fault_now.error == 0 ? 0
               : size <= FY__PAGE           ? SLIVER
                                            : fy__system_real.pread(fd, data, half(size), offset);
    errno = -testing_fault_now.error;
    return -1;
}

static inline ssize_t testing_pwrite(int fd, const void *data, size_t size, off_t offset)
{
    if (!testing_fault_strikes(FY_OP_WRITE))
        return fy__system_real.pwrite(fd, data, size, offset);
    if (testing_fault_now.error >= 0)
        return testing_fault_now.error == 0 ? 0
               : size <= FY__PAGE           ? SLIVER
                                            : fy__system_real.pwrite(fd, data, half(size), offset);
    errno = -testing_fault_now.error;
    return -1;
}

static inline int32_t testing_ring_result(uint32_t operation, int32_t result, uint32_t wanted)
{
    if (!testing_fault_strikes(operation))
        return result;
    if (testing_fault_now.error < 0)
        return testing_fault_now.error;
    if (testing_fault_now.error == 0)
        return 0;
    return wanted <= FY__PAGE ? SLIVER : result / 2 + 1; /* off a page: some comes twice */
}

/* Before any daemon runs: its threads read the table without a lock. */
static inline void testing_fault_install(void)
{
    fy__system.pread = testing_pread;
    fy__system.pwrite = testing_pwrite;
    fy__system.ring_result = testing_ring_result;
}

/* While no I/O is under way: the daemon's lock orders the change before the next one. */
static inline void testing_fault_set(int error, uint32_t operation, uint64_t first, uint64_t times)
{
    CHECK(fy__system.pread == testing_pread);
    testing_fault_now.error = error;
    testing_fault_now.operation = operation;
    testing_fault_now.first = first;
    testing_fault_now.times = times;
    atomic_store(&testing_fault_now.calls, 0);
    atomic_store(&testing_fault_now.hits, 0);
}

static inline void testing_fault_clear(void)
{
    testing_fault_now.times = 0;
}

#endif
