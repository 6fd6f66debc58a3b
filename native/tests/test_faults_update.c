/*
 * Every I/O of an update is made to fail in turn, once and for ever. The update's ticket fails and says where, nothing
 * is left behind, and the daemon goes on to do the same update right. A disturbance that is no failure (EINTR, EAGAIN,
 * a short result) changes nothing. Stop in the middle of a failing update returns.
 */
#include "updating.h"

/* Every how many-th I/O is the one that fails. ThreadSanitizer makes each case ten times as slow, and what it looks for shows in
 * any of them. */
#ifdef __SANITIZE_THREAD__
#define EVERY 4
#else
#define EVERY 1
#endif

static struct stage stage = {
    .weights_dtype = FY_BFLOAT16,
    .gradients_dtype = FY_FLOAT32,
    .remainder = HOME_STORE,
    .momentum = HOME_STORE,
    .variance = HOME_COMMIT,
    .gradients_on_store = true,
    .weights_written = true,
};

/* Places everything anew (a failed update leaves the weights half new) and sends the update. */
static fy_ticket send_update(fy_daemon *daemon, fy_update *update)
{
    fy_ticket ticket = 0;
    stage_place(&stage, daemon);
    stage_place_gradients(&stage, daemon);
    *update = stage_update(&stage, 1, 0);
    return ticket;
}

static bool one_case(fy_daemon *daemon, int error, uint32_t operation, uint64_t first, uint64_t times)
{
    fy_update update;
    fy_result result;
    fy_ticket ticket = send_update(daemon, &update);
    testing_fault_set(error, operation, first, times);
    CHECK_EQUAL(fy_submit_update(daemon, &update, segments_of(&stage), &ticket), 0);
    const int got = testing_wait(daemon, ticket, &result);
    const uint64_t hits = atomic_load(&testing_fault_now.hits);
    testing_fault_clear();
    if (hits == 0) {
        CHECK_EQUAL(got, 0);
        return false;
    }
    CHECK_EQUAL(got, error);
    CHECK_EQUAL(result.failure.operation, operation);
    CHECK_EQUAL(result.failure.label, update.label);
    CHECK(result.failure.wanted > 0);
    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.in_flight + counters.queued, 0);
    return true;
}

/* The update must come out right, although its n-th I/O is disturbed in a way that is no failure. Was it hit? */
static bool works(fy_daemon *daemon, int disturbance, uint64_t first)
{
    fy_update update;
    fy_result result;
    struct stage fresh = stage;
    fy_ticket ticket = send_update(daemon, &update);
    testing_fault_set(disturbance, FY_OP_NONE, first, first > 0 ? 1 : 0);
    CHECK_EQUAL(fy_submit_update(daemon, &update, segments_of(&stage), &ticket), 0);
    CHECK_EQUAL(testing_wait(daemon, ticket, &result), 0);
    const uint64_t hits = atomic_load(&testing_fault_now.hits);
    testing_fault_clear();
    for (int i = 0; i < TENSOR_COUNT; i++) {
        fresh.plain[i] = malloc(PARAMS * 4);
        CHECK(fresh.plain[i] != NULL);
        memcpy(fresh.plain[i], stage.plain[i], PARAMS * 4);
    }
    CHECK_EQUAL(result.nonfinite, stage_step_plain(&fresh, &update));
    stage_check(&fresh, daemon, 1, &result);
    stage_destroy(&fresh);
    return hits > 0;
}

static void sweep(uint32_t backend, uint32_t chunk_params, fy_arena *arena, fy_store *store)
{
    static const int errors[] = {-EIO, -ENOSPC};
    static const int disturbances[] = {-EINTR, -EAGAIN, 1 /* short */};
    fy_options options = update_options(backend, 2, chunk_params, 3);
    options.block_size = 128 << 10;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    for (uint32_t e = 0; e < sizeof errors / sizeof errors[0]; e++) {
        for (uint32_t operation = FY_OP_READ; operation <= FY_OP_WRITE; operation++) {
            for (uint64_t first = 1; one_case(daemon, errors[e], operation, first, 1); first += EVERY * (1 + e))
                CHECK(first < 1000);
            for (uint64_t first = 1; one_case(daemon, errors[e], operation, first, FOREVER); first += EVERY * (2 + e))
                CHECK(first < 1000);
        }
        (void)works(daemon, 0, 0);
    }
    for (uint32_t i = 0; i < sizeof disturbances / sizeof disturbances[0]; i++) {
        for (uint64_t first = 1 + i; works(daemon, disturbances[i], first); first += EVERY * 5)
            CHECK(first < 1000);
    }
    /* Stopped while its I/Os fail and are tried again: stop returns, with nothing in flight. */
    fy_update update;
    fy_ticket ticket = send_update(daemon, &update);
    testing_fault_set(-EAGAIN, FY_OP_NONE, 1, FOREVER);
    CHECK_EQUAL(fy_submit_update(daemon, &update, segments_of(&stage), &ticket), 0);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    testing_fault_clear();
}

int main(void)
{
    testing_fault_install();
    const uint32_t *backends = testing_backends();
    fy_arena *arena = testing_arena(SCRATCH + fy_scratch_size(FY_STATE_TILE, 3));
    fy_store *store = testing_store(2, 64 << 10, 2 * TENSOR_COUNT * EXTENT);
    stage_create(&stage, 77);
    const uint32_t descriptors = testing_descriptors();
    for (const uint32_t *backend = backends; *backend != FY_BACKEND_AUTO; backend++)
        sweep(*backend, 16384, arena, store);
    stage_destroy(&stage);
    stage.states_dtype = FY_INT8; /* other sizes and places, the same chain: one backend will do */
    stage_create(&stage, 78);
    sweep(*backends, FY_STATE_TILE, arena, store);
    CHECK_EQUAL(testing_descriptors(), descriptors);
    stage_destroy(&stage);
    testing_close(NULL, arena, store);
    return 0;
}
