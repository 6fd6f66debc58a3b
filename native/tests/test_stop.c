/*
 * Stop with everything outstanding: reads, writes and updates, with threads waiting for some of them. Stop returns, the
 * waiting threads hear -ECANCELED or a result, nothing is left with the kernel, and the arena can go. Also at once after
 * the stop, although what came was still being summed: by a thread in fy_wait(), which stop lets finish, or by update
 * threads, whose pieces it waits for.
 */
#include "updating.h"

#define WAITERS 3
#define READS 24
#define CLIENT (SCRATCH + fy_scratch_size(16384, 3)) /* an extent per read or write, in arena and store */
#define CLIENT_STORE (UINT64_C(2) * TENSOR_COUNT * EXTENT)

static struct stage stage = {
    .weights_dtype = FY_BFLOAT16,
    .gradients_dtype = FY_BFLOAT16,
    .remainder = HOME_STORE,
    .momentum = HOME_STORE,
    .variance = HOME_STORE,
    .weights_written = true,
};

struct waiter {
    fy_daemon *daemon;
    fy_ticket ticket;
    int error;
    _Atomic bool out;
};

static void *wait_thread(void *argument)
{
    struct waiter *waiter = argument;
    fy_result result;
    waiter->error = fy_wait(waiter->daemon, waiter->ticket, WAIT_NS, &result);
    atomic_store(&waiter->out, true);
    if (waiter->error != 0)
        CHECK_EQUAL(result.failure.error, waiter->error);
    return NULL;
}

/* Whether each waits or has waited. Those that are out are counted first: nobody is counted twice. */
static bool all_have_come(fy_daemon *daemon, struct waiter *waiters)
{
    uint32_t come = 0;
    for (uint32_t i = 0; i < WAITERS; i++)
        come += atomic_load(&waiters[i].out);
    fy__lock(daemon);
    come += daemon->waiters;
    fy__unlock(daemon);
    return come == WAITERS;
}

static void stop_in_the_middle(uint32_t backend, fy_arena *arena, fy_store *store, useconds_t after_us)
{
    const fy_options options = update_options(backend, 2, 16384, 3);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    stage_place(&stage, daemon);
    stage_place_gradients(&stage, daemon);
    struct waiter waiters[WAITERS];
    fy_ticket ticket = 0;
    const fy_update update = stage_update(&stage, 1, 0);
    CHECK_EQUAL(fy_submit_update(daemon, &update, stage_segments, &waiters[0].ticket), 0);
    for (uint32_t i = 0; i < READS; i++) {
        fy_ticket *out = i < WAITERS - 1 ? &waiters[i + 1].ticket : &ticket;
        const uint64_t arena_offset = CLIENT + i * EXTENT;
        const uint64_t store_offset = CLIENT_STORE + i * EXTENT;
        if (i % 2 == 0)
            CHECK_EQUAL(fy_submit_read(daemon, arena_offset, store_offset, EXTENT, i, i, out), 0);
        else
            CHECK_EQUAL(fy_submit_write(daemon, arena_offset, store_offset, EXTENT, i, i, out), 0);
    }
    pthread_t threads[WAITERS];
    for (uint32_t i = 0; i < WAITERS; i++) {
        waiters[i].daemon = daemon;
        atomic_init(&waiters[i].out, false);
        CHECK_EQUAL(pthread_create(&threads[i], NULL, wait_thread, &waiters[i]), 0);
    }
    while (!all_have_come(daemon, waiters))
        CHECK_EQUAL(usleep(100), 0); /* no call may begin once stop has */
    CHECK_EQUAL(usleep(after_us), 0);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    for (uint32_t i = 0; i < WAITERS; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
        CHECK(waiters[i].error == 0 || waiters[i].error == -ECANCELED);
    }
}

#define SUMMED (UINT64_C(64) << 20)

struct summing {
    fy_daemon *daemon;
    fy_ticket ticket;
    fy_result result;
    int error;
    _Atomic bool out;
};

static void *sum_thread(void *argument)
{
    struct summing *summing = argument;
    summing->error = fy_wait(summing->daemon, summing->ticket, WAIT_NS, &summing->result);
    atomic_store(&summing->out, true);
    return NULL;
}

static bool somebody_waits(fy_daemon *daemon)
{
    fy__lock(daemon);
    const bool waits = daemon->waiters > 0;
    fy__unlock(daemon);
    return waits;
}

/* Stops as soon as everything has been read: it has hardly begun to be summed. */
static void stop_while_summing(uint32_t backend, uint32_t update_threads)
{
    fy_arena *arena = testing_arena(SUMMED + fy_scratch_size(16384, 2));
    fy_store *store = testing_store(1, 1 << 20, SUMMED);
    fy_options options = testing_options(backend);
    options.flags = FY_DAEMON_DATA_SUMS;
    options.block_size = 4 << 20;
    options.update_threads = update_threads;
    options.chunk_params = 16384;
    options.scratch_offset = SUMMED;
    options.scratch_size = fy_scratch_size(16384, 2);
    struct summing summing = {.daemon = testing_daemon(&options, arena, store)};
    unsigned char *base = fy_arena_base(arena);
    testing_fill(base, SUMMED, backend);
    const uint64_t expected = fy_checksum(base, SUMMED, 0);
    CHECK_EQUAL(testing_write(summing.daemon, 0, 0, SUMMED, NULL), 0);
    memset(base, 0, SUMMED);
    atomic_init(&summing.out, false);
    CHECK_EQUAL(fy_submit_read(summing.daemon, 0, 0, SUMMED, 0, 1, &summing.ticket), 0);
    pthread_t thread;
    CHECK_EQUAL(pthread_create(&thread, NULL, sum_thread, &summing), 0);
    while (!somebody_waits(summing.daemon) && !atomic_load(&summing.out))
        CHECK_EQUAL(usleep(100), 0); /* no call may begin once stop has */
    fy_counters counters = {0};
    while (counters.read_bytes < SUMMED)
        CHECK_EQUAL(fy_daemon_counters(summing.daemon, &counters), 0);
    testing_close(summing.daemon, arena, store);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK(summing.error == 0 || (update_threads > 0 && summing.error == -ECANCELED));
    if (summing.error == 0)
        CHECK_EQUAL(summing.result.data_sum, expected);
    CHECK_EQUAL(unlink(testing_path(0)), 0);
}

int main(void)
{
    const uint32_t *backend = testing_backends();
    fy_arena *arena = testing_arena(CLIENT + READS * EXTENT);
    fy_store *store = testing_store(2, 64 << 10, CLIENT_STORE + READS * EXTENT);
    stage_create(&stage, 3);
    for (; *backend != FY_BACKEND_AUTO; backend++) {
        for (useconds_t after_us = 0; after_us < 2000; after_us += 400)
            stop_in_the_middle(*backend, arena, store, after_us);
        /* And with nobody waiting, at once. */
        const fy_options options = testing_options(*backend);
        fy_daemon *daemon = testing_daemon(&options, arena, store);
        fy_ticket ticket = 0;
        for (uint32_t i = 0; i < READS; i++)
            CHECK_EQUAL(fy_submit_read(daemon, CLIENT + i * EXTENT, 0, EXTENT, 0, i, &ticket), 0);
        CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    }
    stage_destroy(&stage);
    testing_close(NULL, arena, store);
    for (backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++)
        for (uint32_t update_threads = 0; update_threads <= 2; update_threads++)
            stop_while_summing(*backend, update_threads);
    CHECK_EQUAL(fy_daemon_stop(NULL), 0);
    return 0;
}
