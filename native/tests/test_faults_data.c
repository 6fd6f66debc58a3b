/*
 * Every I/O of a read or write is made to fail in turn: the n-th one, once and for ever, for n = 1, 2, ... until
 * nothing is hit any more. A ticket fails exactly when one of its own I/Os did, it says where, the others hold the
 * right bytes, and afterwards the same daemon works. Transient errors and short results are no failures when they
 * happen once.
 */
#include "testing.h"

#define BLOCK (UINT64_C(16) << 10)
#define BLOCKS 3 /* per request */
#define REQUESTS 3
#define SIZE (BLOCK * BLOCKS)
#define LABEL 90
#define STALE 0xEE

static const struct {
    int error;
    bool passes_once; /* one such answer is no failure */
    int reported;     /* what is reported when it does not stop */
} kinds[] = {
    {-EIO, false, -EIO},   {-ENOSPC, false, -ENOSPC}, {-EAGAIN, true, -EAGAIN},
    {-EINTR, true, -EINTR}, {0, false, -ENODATA},      {1, true, -EIO},
};

static fy_arena *arena;
static fy_store *store;
static unsigned char *base;

/* What was written by the last good write, by request. */
static unsigned char expected[REQUESTS][SIZE];

static void submit(fy_daemon *daemon, uint32_t operation, uint32_t i, fy_ticket *ticket)
{
    int (*const call)(fy_daemon *, uint64_t, uint64_t, uint64_t, uint64_t, uint32_t, fy_ticket *) =
        operation == FY_OP_READ ? fy_submit_read : fy_submit_write;
    CHECK_EQUAL(call(daemon, i * SIZE, i * SIZE, SIZE, 0, LABEL + i, ticket), 0);
}

/* Sends all requests, so that they are in the daemon together, and waits for them. */
static void run_all(fy_daemon *daemon, uint32_t operation, int errors[REQUESTS], fy_result results[REQUESTS])
{
    fy_ticket tickets[REQUESTS];
    for (uint32_t i = 0; i < REQUESTS; i++)
        submit(daemon, operation, i, &tickets[i]);
    for (uint32_t i = 0; i < REQUESTS; i++)
        errors[i] = testing_wait(daemon, tickets[i], &results[i]);
}

static void check_failure(uint32_t i, uint32_t operation, int error, int reported, const fy_failure *failure)
{
    CHECK_EQUAL(error, reported);
    CHECK_EQUAL(failure->error, reported);
    CHECK_EQUAL(failure->operation, operation);
    CHECK_EQUAL(failure->label, LABEL + i);
    CHECK_EQUAL(failure->wanted, BLOCK);
    CHECK(failure->got < BLOCK);
    const uint64_t logical = (failure->file_offset / BLOCK * 2 + failure->file) * BLOCK; /* two files, stripe BLOCK */
    CHECK(logical >= i * SIZE && logical < (i + 1) * SIZE);
}

/* Returns whether anything was hit. */
static bool one_case(fy_daemon *daemon, uint32_t operation, uint32_t kind, uint64_t first, uint64_t times, bool serial)
{
    int errors[REQUESTS];
    fy_result results[REQUESTS];
    if (operation == FY_OP_READ)
        memset(base, STALE, REQUESTS * SIZE);
    else
        testing_fill(base, REQUESTS * SIZE, first * 31 + kind);
    testing_fault_set(kinds[kind].error, operation, first, times);
    run_all(daemon, operation, errors, results);
    const uint64_t hits = atomic_load(&testing_fault_now.hits);
    testing_fault_clear();

    const bool fatal = hits > 0 && (times == FOREVER || !kinds[kind].passes_once);
    uint32_t failed = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        if (errors[i] != 0) {
            check_failure(i, operation, errors[i], kinds[kind].reported, &results[i].failure);
            failed++;
        } else if (operation == FY_OP_READ) {
            CHECK(memcmp(base + i * SIZE, expected[i], SIZE) == 0);
        }
        /* One block at a time, the n-th I/O is known, and so is whose it is. */
        if (serial && fatal && times == 1)
            CHECK_EQUAL(errors[i] != 0, i == (first - 1) / BLOCKS);
    }
    if (times == 1)
        CHECK_EQUAL(failed, fatal ? 1 : 0);
    else
        CHECK_EQUAL(failed > 0, fatal);

    /* Then everything works again. */
    if (operation == FY_OP_WRITE) {
        for (uint32_t i = 0; i < REQUESTS; i++)
            memcpy(expected[i], base + i * SIZE, SIZE);
        run_all(daemon, FY_OP_WRITE, errors, results);
        for (uint32_t i = 0; i < REQUESTS; i++)
            CHECK_EQUAL(errors[i], 0);
        memset(base, STALE, REQUESTS * SIZE);
    }
    run_all(daemon, FY_OP_READ, errors, results);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        CHECK_EQUAL(errors[i], 0);
        CHECK(memcmp(base + i * SIZE, expected[i], SIZE) == 0);
    }
    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.in_flight + counters.queued, 0);
    return hits > 0;
}

static void sweep(uint32_t backend, uint32_t depth)
{
    fy_options options = testing_options(backend);
    options.read_depth = depth;
    options.write_depth = depth;
    options.block_size = BLOCK;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    for (uint32_t kind = 0; kind < sizeof kinds / sizeof kinds[0]; kind++) {
        for (uint32_t operation = FY_OP_READ; operation <= FY_OP_WRITE; operation++) {
            for (uint64_t first = 1; one_case(daemon, operation, kind, first, 1, depth == 1); first++)
                CHECK(first < 100);
            for (uint64_t first = 1; one_case(daemon, operation, kind, first, FOREVER, depth == 1); first++)
                CHECK(first < 100);
        }
    }
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
}

int main(void)
{
    testing_fault_install();
    const uint32_t *backends = testing_backends();
    arena = testing_arena(REQUESTS * SIZE);
    store = testing_store(2, BLOCK, REQUESTS * SIZE);
    base = fy_arena_base(arena);
    const uint32_t descriptors = testing_descriptors();
    for (; *backends != FY_BACKEND_AUTO; backends++) {
        fy_options options = testing_options(*backends);
        fy_daemon *daemon = testing_daemon(&options, arena, store);
        testing_fill(base, REQUESTS * SIZE, 1);
        memcpy(expected, base, sizeof expected);
        CHECK_EQUAL(testing_write(daemon, 0, 0, REQUESTS * SIZE, NULL), 0);
        CHECK_EQUAL(fy_daemon_stop(daemon), 0);
        sweep(*backends, 1);
        sweep(*backends, 4);
    }
    CHECK_EQUAL(testing_descriptors(), descriptors);
    testing_close(NULL, arena, store);
    return 0;
}
