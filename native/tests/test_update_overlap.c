/*
 * Many updates at once: four stages are sent together, the most urgent last, and share the scratch; each is equal
 * to fy_adamw(); reads and writes of an unrelated client go between. Counters and events add up to the bytes the homes
 * say.
 */
#include "updating.h"

#define STAGES 4
#define STAGE_ARENA (UINT64_C(2) * EXTENT) /* weights, gradients */
#define CLIENT (STAGES * STAGE_ARENA)
#define OWN_SCRATCH (CLIENT + STAGES * EXTENT)
#define STAGE_STORE (UINT64_C(2) * TENSOR_COUNT * EXTENT)

static struct stage stages[STAGES];

/* The update of stage `index`, moved to its own part of arena and store. */
static fy_update moved_update(uint32_t index)
{
    const uint64_t store = index * STAGE_STORE;
    fy_update update = stage_update(&stages[index], 2, 0);
    update.weights = index * STAGE_ARENA;
    update.gradients = index * STAGE_ARENA + EXTENT;
    update.weights_target += store;
    fy_home *const homes[] = {&update.remainder, &update.momentum, &update.variance};
    for (uint32_t i = 0; i < 3; i++) {
        homes[i]->source += store;
        homes[i]->target += store;
    }
    update.priority = STAGES - index; /* the last sent is the most urgent */
    update.label = index;
    return update;
}

static void place(fy_daemon *daemon, uint32_t index)
{
    unsigned char *base = fy_arena_base(daemon->arena);
    memcpy(base + index * STAGE_ARENA, stages[index].plain[W], stage_bytes(&stages[index], W));
    memcpy(base + index * STAGE_ARENA + EXTENT, stages[index].plain[G], stage_bytes(&stages[index], G));
    for (int i = R; i <= V; i++) {
        memcpy(base + CLIENT, stages[index].plain[i], stage_bytes(&stages[index], i));
        CHECK_EQUAL(testing_write(daemon, CLIENT, index * STAGE_STORE + extent_of(i, 0),
                                  stage_bytes(&stages[index], i), NULL), 0);
    }
}

static void check(fy_daemon *daemon, uint32_t index, const fy_update *update, const fy_result *result)
{
    const unsigned char *base = fy_arena_base(daemon->arena);
    struct stage *stage = &stages[index];
    const uint64_t sums[] = {result->weights_sum, result->remainder_sum, result->momentum_sum, result->variance_sum};
    CHECK_EQUAL(result->nonfinite, stage_step_plain(stage, update));
    CHECK(memcmp(base + index * STAGE_ARENA, stage->plain[W], stage_bytes(stage, W)) == 0);
    for (int i = W; i <= V; i++) {
        const uint64_t bytes = stage_bytes(stage, i);
        CHECK(sums[i] == fy_checksum(stage->plain[i], bytes, 0));
        CHECK_EQUAL(testing_read(daemon, CLIENT, index * STAGE_STORE + extent_of(i, 1), bytes, NULL), 0);
        CHECK(memcmp(base + CLIENT, stage->plain[i], bytes) == 0);
    }
}

static void forget_events(fy_daemon *daemon)
{
    fy_event events[256];
    uint32_t count = 256;
    uint64_t dropped = 0;
    while (count == 256) /* until nothing is left */
        CHECK_EQUAL(fy_daemon_events(daemon, events, 256, &count, &dropped), 0);
}

static void check_events(fy_daemon *daemon, const fy_counters *before, const fy_counters *after, bool chunks_too)
{
    fy_event events[256];
    uint32_t count = 0;
    uint64_t dropped = 0;
    uint64_t bytes = 0;
    uint32_t updates = 0;
    uint32_t chunks = 0;
    uint64_t of_updates[2] = {0, 0}; /* read, written */
    CHECK_EQUAL(fy_daemon_events(daemon, events, 256, &count, &dropped), 0);
    CHECK_EQUAL(dropped, 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(events[i].begin_ns <= events[i].end_ns);
        updates += events[i].operation == FY_OP_UPDATE;
        chunks += events[i].operation == FY_OP_CHUNK;
        bytes += events[i].bytes;
        if (events[i].operation == FY_OP_UPDATE || events[i].operation == FY_OP_CHUNK)
            CHECK_EQUAL(events[i].bytes, 0);
        else if (events[i].label != 99)
            of_updates[events[i].operation == FY_OP_WRITE] += events[i].bytes;
    }
    CHECK_EQUAL(updates, STAGES);
    CHECK_EQUAL(chunks, chunks_too ? STAGES * ((PARAMS + 16383) / 16384) : 0);
    CHECK_EQUAL(bytes, after->read_bytes + after->written_bytes - before->read_bytes - before->written_bytes);
    CHECK_EQUAL(of_updates[0], after->read_bytes - before->read_bytes - STAGES * EXTENT);
    CHECK_EQUAL(of_updates[1], after->written_bytes - before->written_bytes);
    CHECK_EQUAL(fy_daemon_events(daemon, events, 256, &count, &dropped), 0);
    CHECK_EQUAL(count, 0);
    /* Of the updates alone: 10 bytes per parameter read (remainder, moments), 12 written. */
    CHECK_EQUAL(after->read_bytes - before->read_bytes, STAGES * PARAMS * 10 + STAGES * EXTENT);
    CHECK_EQUAL(after->written_bytes - before->written_bytes, STAGES * PARAMS * 12);
    CHECK_EQUAL(after->update_params, STAGES * PARAMS);
    CHECK(after->update_cpu_ns > 0 && after->ring_cpu_ns > 0);
    CHECK(after->read_busy_ns > 0 && after->write_busy_ns > 0);
}

static void overlap(uint32_t backend, uint32_t threads)
{
    fy_arena *arena = testing_arena(OWN_SCRATCH + fy_scratch_size(16384, 5));
    fy_store *store = testing_store(2, 256 << 10, STAGES * STAGE_STORE);
    fy_options options = update_options(backend, threads, 16384, 5);
    options.scratch_offset = OWN_SCRATCH;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    fy_ticket tickets[STAGES];
    fy_ticket reads[STAGES];
    fy_update updates[STAGES];
    fy_result results[STAGES];
    fy_counters before;
    fy_counters after;
    for (uint32_t i = 0; i < STAGES; i++) {
        stages[i] = (struct stage){.weights_dtype = FY_BFLOAT16, .gradients_dtype = i % 2, .remainder = HOME_STORE,
                                   .momentum = HOME_STORE, .variance = HOME_STORE, .weights_written = true};
        stage_create(&stages[i], 40 + 10 * i);
        place(daemon, i);
    }
    forget_events(daemon);
    if (threads > 1)
        CHECK_EQUAL(fy_daemon_log_chunks(daemon), 0);
    CHECK_EQUAL(fy_daemon_counters(daemon, &before), 0);
    for (uint32_t i = 0; i < STAGES; i++) {
        updates[i] = moved_update(i);
        CHECK_EQUAL(fy_submit_update(daemon, &updates[i], stage_segments, &tickets[i]), 0);
        CHECK_EQUAL(fy_submit_read(daemon, CLIENT + i * EXTENT, extent_of(G, 0), EXTENT, 0, 99, &reads[i]), 0);
    }
    for (uint32_t i = 0; i < STAGES; i++) {
        CHECK_EQUAL(testing_wait(daemon, reads[i], NULL), 0);
        CHECK_EQUAL(testing_wait(daemon, tickets[i], &results[i]), 0);
    }
    CHECK_EQUAL(fy_daemon_counters(daemon, &after), 0);
    check_events(daemon, &before, &after, threads > 1);
    for (uint32_t i = 0; i < STAGES; i++) {
        check(daemon, i, &updates[i], &results[i]);
        stage_destroy(&stages[i]);
    }
    testing_close(daemon, arena, store);
}

/* ---- lanes ---- */

#define BESIDE SCRATCH /* weights and gradients of the update that streams, behind the tensors of the one that rests */
#define LANES_SCRATCH (BESIDE + 2 * EXTENT)

static pthread_mutex_t gates[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER}; /* of reads, of writes */
static _Atomic uint32_t arrived[2];

static void pass_gate(uint32_t which)
{
    atomic_fetch_add(&arrived[which], 1);
    CHECK_EQUAL(pthread_mutex_lock(&gates[which]), 0);
    CHECK_EQUAL(pthread_mutex_unlock(&gates[which]), 0);
}

static ssize_t gated_pread(int fd, void *data, size_t size, off_t offset)
{
    pass_gate(0);
    return fy__system_real.pread(fd, data, size, offset);
}

static ssize_t gated_pwrite(int fd, const void *data, size_t size, off_t offset)
{
    pass_gate(1);
    return fy__system_real.pwrite(fd, data, size, offset);
}

static void wait_for_arrival(uint32_t which)
{
    for (uint32_t i = 0; i < 60000 && atomic_load(&arrived[which]) == 0; i++)
        CHECK_EQUAL(usleep(1000), 0);
    CHECK(atomic_load(&arrived[which]) > 0);
}

/* stages[0] rests in the arena and writes its weights, where a write is what stands still; stages[1] streams. */
static void place_lanes(fy_daemon *daemon, bool written)
{
    unsigned char *base = fy_arena_base(daemon->arena);
    stages[0] = (struct stage){.weights_dtype = FY_BFLOAT16, .weights_written = written};
    stages[1] = (struct stage){.weights_dtype = FY_BFLOAT16, .remainder = HOME_STORE, .momentum = HOME_STORE,
                               .variance = HOME_STORE};
    for (uint32_t i = 0; i < 2; i++)
        stage_create(&stages[i], 90 + 10 * i);
    stage_place(&stages[0], daemon);
    stage_place_gradients(&stages[0], daemon);
    memcpy(base + BESIDE, stages[1].plain[W], stage_bytes(&stages[1], W));
    memcpy(base + BESIDE + EXTENT, stages[1].plain[G], stage_bytes(&stages[1], G));
    for (int i = R; i <= V; i++)
        put_on_store(daemon, stages[1].plain[i], stage_bytes(&stages[1], i), extent_of(i, 0));
}

/* With reads or writes held in the kernel, an update of one lane waits there with all the slots that it can have, and is the
 * more urgent one. The other lane's goes on all the same: `held` 0, that in the arena ends while the first reads stand; 1,
 * the one that streams reads while the first writes stand. */
static void lanes(uint32_t held)
{
    fy__system.pread = fy__system_real.pread;
    fy__system.pwrite = fy__system_real.pwrite;
    fy_arena *arena = testing_arena(LANES_SCRATCH + fy_scratch_size(16384, 2));
    fy_store *store = testing_store(1, 256 << 10, 2 * TENSOR_COUNT * EXTENT);
    fy_options options = update_options(FY_BACKEND_THREADS, 1, 16384, 2);
    options.scratch_offset = LANES_SCRATCH;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    place_lanes(daemon, held == 1);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    fy__system.pread = gated_pread;
    fy__system.pwrite = gated_pwrite;
    daemon = testing_daemon(&options, arena, store);
    atomic_store(&arrived[0], 0);
    atomic_store(&arrived[1], 0);
    fy_update updates[2] = {stage_update(&stages[0], 2, 0), stage_update(&stages[1], 2, 0)};
    updates[1].weights = BESIDE;
    updates[1].gradients = BESIDE + EXTENT;
    const uint32_t first = 1 - held; /* the one that is held */
    updates[first].priority = 1;
    fy_ticket tickets[2];
    fy_result results[2];
    CHECK_EQUAL(pthread_mutex_lock(&gates[held]), 0);
    CHECK_EQUAL(fy_submit_update(daemon, &updates[first], stage_segments, &tickets[first]), 0);
    wait_for_arrival(held);
    CHECK_EQUAL(fy_submit_update(daemon, &updates[1 - first], stage_segments, &tickets[1 - first]), 0);
    if (held == 0)
        CHECK_EQUAL(testing_wait(daemon, tickets[0], &results[0]), 0);
    else
        wait_for_arrival(0);
    CHECK_EQUAL(pthread_mutex_unlock(&gates[held]), 0);
    for (uint32_t i = held == 0; i < 2; i++)
        CHECK_EQUAL(testing_wait(daemon, tickets[i], &results[i]), 0);
    for (uint32_t i = 0; i < 2; i++)
        CHECK_EQUAL(results[i].nonfinite, stage_step_plain(&stages[i], &updates[i]));
    stage_check(&stages[0], daemon, 1, &results[0]);
    CHECK(memcmp((unsigned char *)fy_arena_base(arena) + BESIDE, stages[1].plain[W], stage_bytes(&stages[1], W)) == 0);
    const uint64_t sums[] = {0, results[1].remainder_sum, results[1].momentum_sum, results[1].variance_sum};
    for (int i = R; i <= V; i++)
        check_extent(daemon, &stages[1], i, 1, sums[i]);
    for (uint32_t i = 0; i < 2; i++)
        stage_destroy(&stages[i]);
    testing_close(daemon, arena, store);
}

/* Writes stand, and an update that writes its weights waits there with all the slots that it can have. A less urgent one that
 * rests in the arena altogether ends all the same. */
static void rests_beside_written(void)
{
    fy__system.pread = fy__system_real.pread;
    fy__system.pwrite = fy__system_real.pwrite;
    fy_arena *arena = testing_arena(2 * SCRATCH + fy_scratch_size(16384, 2));
    fy_store *store = testing_store(1, 256 << 10, 2 * TENSOR_COUNT * EXTENT);
    fy_options options = update_options(FY_BACKEND_THREADS, 1, 16384, 2);
    options.scratch_offset = 2 * SCRATCH;
    fy__system.pwrite = gated_pwrite;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    atomic_store(&arrived[1], 0);
    fy_update updates[2];
    fy_ticket tickets[2];
    fy_result results[2];
    for (uint32_t i = 0; i < 2; i++) {
        stages[i] = (struct stage){.weights_dtype = FY_BFLOAT16, .weights_written = i == 0};
        stage_create(&stages[i], 90 + 10 * i);
        updates[i] = stage_update(&stages[i], 2, 0);
        updates[i].priority = i;
        updates[i].weights += i * SCRATCH;
        updates[i].gradients += i * SCRATCH;
        uint64_t *const offsets[] = {&updates[i].weights, &updates[i].remainder.arena, &updates[i].momentum.arena,
                                     &updates[i].variance.arena, &updates[i].gradients};
        for (int t = R; t <= V; t++)
            *offsets[t] += i * SCRATCH;
        for (int t = W; t <= G; t++)
            memcpy((unsigned char *)fy_arena_base(arena) + *offsets[t], stages[i].plain[t], stage_bytes(&stages[i], t));
    }
    CHECK_EQUAL(pthread_mutex_lock(&gates[1]), 0);
    CHECK_EQUAL(fy_submit_update(daemon, &updates[0], stage_segments, &tickets[0]), 0);
    wait_for_arrival(1);
    CHECK_EQUAL(fy_submit_update(daemon, &updates[1], stage_segments, &tickets[1]), 0);
    CHECK_EQUAL(testing_wait(daemon, tickets[1], &results[1]), 0);
    CHECK_EQUAL(pthread_mutex_unlock(&gates[1]), 0);
    CHECK_EQUAL(testing_wait(daemon, tickets[0], &results[0]), 0);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQUAL(results[i].nonfinite, stage_step_plain(&stages[i], &updates[i]));
        const unsigned char *weights = (unsigned char *)fy_arena_base(arena) + i * SCRATCH;
        CHECK(memcmp(weights, stages[i].plain[W], stage_bytes(&stages[i], W)) == 0);
        stage_destroy(&stages[i]);
    }
    testing_close(daemon, arena, store);
}

int main(void)
{
    lanes(0);
    lanes(1);
    rests_beside_written();
    fy__system.pread = fy__system_real.pread;
    fy__system.pwrite = fy__system_real.pwrite;
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++) {
        overlap(*backend, 1);
        overlap(*backend, 2);
    }
    return 0;
}
