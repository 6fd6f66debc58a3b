/*
 * Answers come late and in any order: every I/O is told of up to 0.3 ms after it was done, and later ones overtake
 * earlier ones. Updates of a stage and an unrelated client's reads and writes have the same bytes and sums as ever.
 */
#include "updating.h"

#define STEPS 4
#define SPANS 12
#define SPAN (UINT64_C(192) << 10)
#define OUT (SCRATCH + fy_scratch_size(16384, 3)) /* of the arena: what the client writes, */
#define BACK (OUT + SPANS * SPAN)                 /*   and where it reads that back */
#define CLIENT_STORE (UINT64_C(2) * TENSOR_COUNT * EXTENT)

static _Atomic uint64_t drawn;
static _Atomic uint64_t begun;
static _Atomic uint64_t newest; /* of the I/Os that were told of */
static _Atomic uint64_t overtaken;

static uint64_t any_below(uint64_t bound)
{
    uint64_t state = atomic_fetch_add(&drawn, 1);
    return testing_random(&state) % bound;
}

/* Waits, then tells of I/O `number`. */
static void tell_late(uint64_t number)
{
    const int error = errno;
    (void)usleep((useconds_t)any_below(300));
    uint64_t before = atomic_load(&newest);
    if (number < before)
        atomic_fetch_add(&overtaken, 1);
    while (before < number && !atomic_compare_exchange_weak(&newest, &before, number)) { /* until ours is, or a later one */
    }
    errno = error;
}

static ssize_t late_pread(int fd, void *data, size_t size, off_t offset)
{
    const uint64_t number = atomic_fetch_add(&begun, 1);
    const ssize_t moved = fy__system_real.pread(fd, data, size, offset);
    tell_late(number);
    return moved;
}

static ssize_t late_pwrite(int fd, const void *data, size_t size, off_t offset)
{
    const uint64_t number = atomic_fetch_add(&begun, 1);
    const ssize_t moved = fy__system_real.pwrite(fd, data, size, offset);
    tell_late(number);
    return moved;
}

static int32_t late_ring_result(uint32_t operation, int32_t result, uint32_t wanted)
{
    (void)operation;
    (void)wanted;
    (void)usleep((useconds_t)any_below(300)); /* meanwhile more comes */
    return result;
}

static uint32_t any_next(uint32_t count)
{
    const uint32_t next = (uint32_t)any_below(count);
    if (next > 0)
        atomic_fetch_add(&overtaken, 1);
    return next;
}

/* All spans in one direction. */
static void client_moves(fy_daemon *daemon, uint32_t operation, fy_ticket tickets[SPANS])
{
    for (uint32_t i = 0; i < SPANS; i++) {
        const uint64_t store = CLIENT_STORE + i * SPAN;
        const int error = operation == FY_OP_WRITE
                              ? fy_submit_write(daemon, OUT + i * SPAN, store, SPAN, i % 5, i, &tickets[i])
                              : fy_submit_read(daemon, BACK + i * SPAN, store, SPAN, i % 5, i, &tickets[i]);
        CHECK_EQUAL(error, 0);
    }
}

static void client_waits(fy_daemon *daemon, const fy_ticket tickets[SPANS])
{
    const unsigned char *base = fy_arena_base(daemon->arena);
    for (uint32_t i = SPANS; i > 0; i--) { /* the last first */
        fy_result result;
        CHECK_EQUAL(testing_wait(daemon, tickets[i - 1], &result), 0);
        CHECK(result.data_sum == fy_checksum(base + OUT + (i - 1) * SPAN, SPAN, 0));
    }
}

static void one_step(fy_daemon *daemon, struct stage *stage, uint64_t step)
{
    const uint32_t side = (step - 1) % 2;
    unsigned char *base = fy_arena_base(daemon->arena);
    fy_ticket tickets[SPANS];
    fy_ticket ticket = 0;
    fy_result result;
    uint64_t reads[TENSOR_COUNT];
    fill_gradients(stage, 100 + step);
    stage_place_gradients(stage, daemon);
    stage_read_sums(stage, reads);
    testing_fill(base + OUT, SPANS * SPAN, step);
    memset(base + BACK, 0, SPANS * SPAN);
    const fy_update update = stage_update(stage, step, side);
    CHECK_EQUAL(fy_submit_update(daemon, &update, stage_segments, &ticket), 0);
    client_moves(daemon, FY_OP_WRITE, tickets);
    client_waits(daemon, tickets);
    client_moves(daemon, FY_OP_READ, tickets);
    client_waits(daemon, tickets);
    CHECK(memcmp(base + OUT, base + BACK, SPANS * SPAN) == 0);
    CHECK_EQUAL(testing_wait(daemon, ticket, &result), 0);
    CHECK_EQUAL(result.nonfinite, stage_step_plain(stage, &update));
    stage_check(stage, daemon, target_side(stage, side), &result);
    stage_check_reads(reads, &result);
}

static void run(uint32_t backend)
{
    struct stage stage = {
        .weights_dtype = FY_BFLOAT16, .gradients_dtype = FY_FLOAT32, .remainder = HOME_STORE, .momentum = HOME_STORE,
        .variance = HOME_STORE, .gradients_on_store = true, .weights_written = true};
    fy_arena *arena = testing_arena(BACK + SPANS * SPAN);
    fy_store *store = testing_store(2, 64 << 10, CLIENT_STORE + SPANS * SPAN);
    fy_options options = update_options(backend, 2, 16384, 3);
    options.block_size = 16 << 10;
    options.flags = FY_DAEMON_DATA_SUMS;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    atomic_store(&overtaken, 0);
    stage_create(&stage, 7);
    stage_place(&stage, daemon);
    for (uint64_t step = 1; step <= STEPS; step++)
        one_step(daemon, &stage, step);
    CHECK(atomic_load(&overtaken) > 0);
    stage_destroy(&stage);
    testing_close(daemon, arena, store);
}

int main(void)
{
    fy__system.pread = late_pread;
    fy__system.pwrite = late_pwrite;
    fy__system.ring_result = late_ring_result;
    fy__system.ring_next = any_next;
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++)
        run(*backend);
    return 0;
}
