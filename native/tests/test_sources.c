/*
 * Sources: files of somebody else behind a store, which are only read. What is read is the file's, zeros follow its end, and
 * the n-th failing I/O fails exactly its own ticket. A file that is not as it is said to be is refused, one that is cut,
 * lengthened, written or moved later is noticed, and neither is ever written.
 */
#include "testing.h"

#include <fcntl.h>
#include <sys/stat.h>

#define STORE (UINT64_C(64) << 10)
#define FIRST ((UINT64_C(200) << 10) + 1234) /* bytes of the first source */
#define SECOND UINT64_C(96)                /* of the second: less than a page */
#define PAGES(size) fy__whole_pages(size)
#define STALE 0xEE

#define LARGEST (UINT64_C(256) << 10)

static unsigned char content[2][LARGEST];
static const uint64_t sizes[2] = {FIRST, SECOND};

static void write_source(uint32_t number, uint64_t size)
{
    testing_fill(content[number], LARGEST, 5 + number);
    const int fd = open(testing_path(1 + number), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    CHECK(fd >= 0);
    CHECK_EQUAL(write(fd, content[number], size), size);
    CHECK_EQUAL(close(fd), 0);
}

static uint64_t changed_ns(uint32_t number)
{
    struct stat status;
    CHECK_EQUAL(stat(testing_path(1 + number), &status), 0);
    return (uint64_t)status.st_mtim.tv_sec * 1000000000 + (uint64_t)status.st_mtim.tv_nsec;
}

static int attach(fy_store *store, uint32_t number, fy_failure *why)
{
    return fy_store_attach(store, testing_path(1 + number), sizes[number], changed_ns(number), why);
}

static fy_store *store_with_sources(void)
{
    fy_store *store = testing_store(1, FY__PAGE, STORE);
    fy_failure why;
    for (uint32_t number = 0; number < 2; number++) {
        write_source(number, sizes[number]);
        CHECK_EQUAL(attach(store, number, &why), 0);
    }
    return store;
}

static bool holds(const unsigned char *data, uint32_t number, uint64_t from, uint64_t size)
{
    for (uint64_t i = 0; i < size; i++) {
        const unsigned char wanted = from + i < sizes[number] ? content[number][from + i] : 0;
        if (data[i] != wanted)
            return false;
    }
    return true;
}

static void bytes_and_bounds(uint32_t backend)
{
    fy_arena *arena = testing_arena(LARGEST);
    fy_store *store = store_with_sources();
    unsigned char *base = fy_arena_base(arena);
    fy_options options = testing_options(backend);
    options.flags = FY_DAEMON_DATA_SUMS;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(attach(store, 0, NULL), -EBUSY);
    const uint64_t second = FY_SOURCES_AT + PAGES(FIRST);
    uint64_t sum = 0;
    for (int pass = 0; pass < 2; pass++) { /* what follows the end does not depend on what was there */
        fy_result result;
        memset(base, STALE + pass, LARGEST);
        CHECK_EQUAL(testing_read(daemon, 0, FY_SOURCES_AT, PAGES(FIRST), &result), 0);
        CHECK(holds(base, 0, 0, PAGES(FIRST)));
        CHECK(pass == 0 || result.data_sum == sum);
        sum = result.data_sum;
        CHECK_EQUAL(base[PAGES(FIRST)], STALE + pass);
    }
    CHECK_EQUAL(testing_read(daemon, FY__PAGE, FY_SOURCES_AT + 2 * FY__PAGE, FY__PAGE, NULL), 0);
    CHECK(holds(base + FY__PAGE, 0, 2 * FY__PAGE, FY__PAGE));
    CHECK_EQUAL(testing_read(daemon, 0, second, FY__PAGE, NULL), 0);
    CHECK(holds(base, 1, 0, FY__PAGE));
    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.read_bytes, 2 * PAGES(FIRST) + 2 * FY__PAGE); /* whole pages are asked for */
    CHECK_EQUAL(counters.short_resubmitted, 0);                        /* a file's end is no short read */

    fy_ticket ticket;
    CHECK_EQUAL(fy_submit_write(daemon, 0, FY_SOURCES_AT, FY__PAGE, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, 0, second - FY__PAGE, 2 * FY__PAGE, 0, 0, &ticket), -ERANGE); /* two files */
    CHECK_EQUAL(fy_submit_read(daemon, 0, second, 2 * FY__PAGE, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, 0, second + FY__PAGE, FY__PAGE, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, 0, UINT64_MAX - FY__PAGE + 1, FY__PAGE, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, 0, STORE, FY__PAGE, 0, 0, &ticket), -ERANGE); /* between store and sources */
    testing_close(daemon, arena, store);
}

/* The n-th I/O fails, for every n: the ticket says which file and where, and afterwards all is well. */
static void failing_calls(uint32_t backend)
{
    static const int errors[] = {-EIO, 0, 1}; /* an error, the end of the file, and half of what was asked */
    fy_arena *arena = testing_arena(LARGEST);
    fy_store *store = store_with_sources();
    unsigned char *base = fy_arena_base(arena);
    const fy_options options = testing_options(backend);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    for (uint32_t kind = 0; kind < 3; kind++) {
        uint64_t hits = 1;
        for (uint64_t first = 1; hits > 0; first++) {
            CHECK(first < 20);
            fy_result result;
            memset(base, STALE, LARGEST);
            testing_fault_set(errors[kind], FY_OP_READ, first, 1);
            const int error = testing_read(daemon, 0, FY_SOURCES_AT, PAGES(FIRST), &result);
            hits = atomic_load(&testing_fault_now.hits);
            testing_fault_clear();
            CHECK_EQUAL(error, hits == 0 || errors[kind] == 1 ? 0 : errors[kind] == 0 ? -ENODATA : errors[kind]);
            if (error == 0) {
                CHECK(holds(base, 0, 0, PAGES(FIRST)));
            } else {
                CHECK_EQUAL(result.failure.file, 1);
                CHECK(result.failure.file_offset < FIRST);
            }
        }
    }
    testing_close(daemon, arena, store);
}

/* The length of the first source changes under a running daemon. */
static void other_length(uint32_t backend, uint64_t length, int expected)
{
    fy_arena *arena = testing_arena(LARGEST);
    fy_store *store = store_with_sources();
    const fy_options options = testing_options(backend);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(truncate(testing_path(1), (off_t)length), 0);
    fy_result result;
    const int error = testing_read(daemon, 0, FY_SOURCES_AT, PAGES(FIRST), &result);
    CHECK_EQUAL(error, expected);
    CHECK_EQUAL(result.failure.file, 1);
    fy_failure why;
    CHECK_EQUAL(fy_store_sync(store, &why), -ESTALE);
    CHECK_EQUAL(why.file, 1);
    testing_close(daemon, arena, store);
}

static atomic_bool grows;

/* The first read comes back with less than a page, and the file is longer when the page is asked for again. */
static bool grown_now(void)
{
    if (!atomic_exchange(&grows, false))
        return false;
    write_source(0, LARGEST);
    return true;
}

static ssize_t growing_pread(int fd, void *data, size_t size, off_t offset)
{
    return grown_now() ? SLIVER : testing_pread(fd, data, size, offset);
}

static int32_t growing_result(uint32_t operation, int32_t result, uint32_t wanted)
{
    return grown_now() ? SLIVER : testing_ring_result(operation, result, wanted);
}

/* What a file has gained is found, and stays within the page that was asked for. */
static void grown_while_read_again(uint32_t backend)
{
    fy_arena *arena = testing_arena(LARGEST);
    fy_store *store = store_with_sources();
    unsigned char *base = fy_arena_base(arena);
    fy__system.pread = growing_pread;
    fy__system.ring_result = growing_result;
    const fy_options options = testing_options(backend);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    memset(base, STALE, LARGEST);
    atomic_store(&grows, true);
    const uint64_t last = PAGES(FIRST) - FY__PAGE;
    CHECK_EQUAL(testing_read(daemon, 0, FY_SOURCES_AT + last, FY__PAGE, NULL), -ESTALE);
    CHECK(!atomic_load(&grows));
    for (uint64_t i = FY__PAGE; i < LARGEST; i++)
        CHECK_EQUAL(base[i], STALE);
    testing_close(daemon, arena, store);
    fy__system.pread = testing_pread;
    fy__system.ring_result = testing_ring_result;
}

static void not_as_said(void)
{
    const uint32_t descriptors = testing_descriptors();
    fy_store *store = testing_store(1, FY__PAGE, STORE);
    fy_failure why;
    write_source(0, FIRST);
    const uint64_t changed = changed_ns(0);
    CHECK_EQUAL(fy_store_attach(store, testing_path(1), FIRST + 1, changed, &why), -ESTALE);
    CHECK_EQUAL(why.file, 1);
    CHECK_EQUAL(why.operation, FY_OP_OPEN);
    CHECK_EQUAL(fy_store_attach(store, testing_path(1), FIRST, changed + 1, &why), -ESTALE);
    CHECK_EQUAL(fy_store_attach(store, testing_path(1), 0, changed, &why), -EINVAL);
    CHECK_EQUAL(fy_store_attach(store, testing_path(9), FIRST, changed, &why), -ENOENT);
    CHECK_EQUAL(fy_store_attach(store, testing_folder, FIRST, changed, &why), -EINVAL);
    CHECK_EQUAL(symlink(testing_path(1), testing_path(3)), 0);
    CHECK_EQUAL(fy_store_attach(store, testing_path(3), FIRST, changed, &why), -ELOOP);
    CHECK_EQUAL(unlink(testing_path(3)), 0);
    CHECK_EQUAL(fy_store_check_sources(store, &why), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    CHECK_EQUAL(testing_descriptors(), descriptors);
}

static int no_direct(int fd)
{
    (void)fd;
    return 0;
}

/* Nothing that is opened so that a pipe cannot hold it up stays so: reads of it may wait. */
static void reads_may_wait(void)
{
    fy_store *store = store_with_sources();
    CHECK_EQUAL(fcntl(store->files[1].fd, F_GETFL) & O_NONBLOCK, 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    const char *path = testing_path(0);
    const uint32_t flags = FY_STORE_READ_ONLY | FY_STORE_BUFFERED;
    CHECK_EQUAL(fy_store_open(&path, 1, FY__PAGE, STORE, flags, &store, NULL), 0);
    CHECK_EQUAL(fcntl(store->files[0].fd, F_GETFL) & O_NONBLOCK, 0);
    CHECK_EQUAL(fy_store_close(store), 0);
}

static void changed_later(void)
{
    for (int how = 0; how < 3; how++) {
        fy_store *store = store_with_sources();
        fy_failure why;
        CHECK_EQUAL(fy_store_sync(store, &why), 0);
        const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
        if (how == 0)
            CHECK_EQUAL(utimensat(AT_FDCWD, testing_path(2), times, 0), 0);
        else if (how == 1)
            CHECK_EQUAL(unlink(testing_path(2)), 0);
        else
            CHECK_EQUAL(rename(testing_path(1), testing_path(2)), 0); /* one is gone, the other is another file */
        CHECK_EQUAL(fy_store_sync(store, &why), -ESTALE);
        CHECK_EQUAL(why.operation, FY_OP_SYNC);
        CHECK_EQUAL(why.file, how == 2 ? 1 : 2);
        CHECK_EQUAL(fy_store_check_sources(store, &why), -ESTALE);
        CHECK_EQUAL(fy_store_close(store), 0);
    }
}

int main(void)
{
    fy__system.pread = testing_pread;
    fy__system.ring_result = testing_ring_result;
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++) {
        bytes_and_bounds(*backend);
        failing_calls(*backend);
        other_length(*backend, FIRST - FY__PAGE, -ENODATA);
        other_length(*backend, FIRST + 7, -ESTALE);
        grown_while_read_again(*backend);
    }
    not_as_said();
    fy__system.direct_alignment = no_direct;
    reads_may_wait();
    fy__system.direct_alignment = fy__system_real.direct_alignment;
    changed_later();
    return 0;
}
