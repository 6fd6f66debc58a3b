/*
 * What is written comes back, over one and three files, both backends, odd stripes and blocks; and it lies in the files
 * where the striping says, so that another daemon with other blocks finds it. Sums are the same whoever makes them: the
 * thread that waits, or update threads, in pieces.
 */
#include "testing.h"

#include <fcntl.h>

#define SIZE (FY__CHECKSUM_PIECE + (UINT64_C(3) << 20))
#define SCRATCH (2 * SIZE)

static void check_layout(uint32_t files, uint64_t stripe, const unsigned char *expected)
{
    unsigned char *page = malloc(FY__PAGE);
    CHECK(page != NULL);
    for (uint64_t at = 0; at < SIZE; at += FY__PAGE) {
        const uint64_t block = at / stripe;
        const int fd = open(testing_path((uint32_t)(block % files)), O_RDONLY);
        CHECK(fd >= 0);
        CHECK_EQUAL(pread(fd, page, FY__PAGE, (off_t)(block / files * stripe + at % stripe)), FY__PAGE);
        CHECK_EQUAL(close(fd), 0);
        CHECK(memcmp(page, expected + at, FY__PAGE) == 0);
    }
    free(page);
}

static void round_trip(uint32_t backend, uint32_t files, uint64_t stripe, uint64_t block_size, uint32_t update_threads,
                       uint32_t flags)
{
    fy_store *store = testing_store(files, stripe, SIZE);
    fy_arena *arena = testing_arena(SCRATCH + fy_scratch_size(16384, 2));
    unsigned char *base = fy_arena_base(arena);
    fy_options options = testing_options(backend);
    options.block_size = block_size;
    options.flags = flags;
    options.update_threads = update_threads;
    options.chunk_params = 16384;
    options.scratch_offset = SCRATCH;
    options.scratch_size = fy_scratch_size(16384, 2);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(fy_daemon_backend(daemon), backend);

    testing_fill(base, SIZE, stripe + block_size + files);
    fy_result result;
    CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, &result), 0);
    const uint64_t expected = (flags & FY_DAEMON_DATA_SUMS) != 0 ? fy_checksum(base, SIZE, 0) : 0;
    CHECK(result.data_sum == expected);
    CHECK_EQUAL(testing_read(daemon, SIZE, 0, SIZE, &result), 0);
    CHECK(result.data_sum == expected);
    CHECK(memcmp(base, base + SIZE, SIZE) == 0);

    /* A piece from the middle, across stripes, lands where it was sent and nowhere else. */
    memset(base + SIZE, 0xA5, SIZE);
    const uint64_t from = 5 * FY__PAGE;
    const uint64_t size = 37 * FY__PAGE;
    CHECK_EQUAL(testing_read(daemon, SIZE + FY__PAGE, from, size, NULL), 0);
    CHECK(memcmp(base + SIZE + FY__PAGE, base + from, size) == 0);
    CHECK(base[SIZE + FY__PAGE - 1] == 0xA5);
    CHECK(base[SIZE + FY__PAGE + size] == 0xA5);

    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.written_bytes, SIZE);
    CHECK_EQUAL(counters.read_bytes, SIZE + size);
    CHECK_EQUAL(counters.in_flight + counters.queued, 0);
    CHECK(counters.update_cpu_ns < UINT64_C(1000000000)); /* sums are none of it, and never more than all */
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    check_layout(files, stripe, base);
    CHECK_EQUAL(fy_arena_destroy(arena), 0);
    for (uint32_t i = 0; i < files; i++)
        CHECK_EQUAL(unlink(testing_path(i)), 0);
}

int main(void)
{
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++) {
        for (uint32_t files = 1; files <= 3; files += 2) {
            round_trip(*backend, files, 64 << 10, 64 << 10, 0, FY_DAEMON_DATA_SUMS);
            round_trip(*backend, files, 40 << 10, 1 << 20, 1, 0);
            round_trip(*backend, files, 1 << 20, 12 << 10, 3, FY_DAEMON_DATA_SUMS);
        }
    }
    return 0;
}
