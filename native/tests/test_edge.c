/*
 * What the edge refuses: spans outside the arena or the store, off the alignment, inside the scratch; updates whose new
 * state would rest nowhere, whose source and target overlap in part, whose segments overlap; options that cannot be. Nothing that
 * was refused leaves a ticket or an I/O behind.
 */
#include "updating.h"

static fy_daemon *daemon_now;

static int update_with(void (*change)(fy_update *update))
{
    static const struct stage stage = {
        .weights_dtype = FY_BFLOAT16, .momentum = HOME_STORE, .variance = HOME_ARENA, .weights_written = true};
    fy_update update = stage_update(&stage, 1, 0);
    fy_ticket ticket = 0;
    change(&update);
    const int error = fy_submit_update(daemon_now, &update, stage_segments, &ticket);
    if (error == 0)
        (void)testing_wait(daemon_now, ticket, NULL);
    return error;
}

static void as_it_is(fy_update *u) { (void)u; }
static void no_params(fy_update *u) { u->params = 0; }
static void odd_params(fy_update *u) { u->params = 2047; }
static void huge_params(fy_update *u) { u->params = UINT64_MAX - 2047; }
static void step_zero(fy_update *u) { u->step = 0; }
static void dtype_unknown(fy_update *u) { u->weights_dtype = 2; }
static void weights_outside(fy_update *u) { u->weights = SCRATCH * 4; }
static void weights_in_scratch(fy_update *u) { u->weights = SCRATCH; }
static void weights_unaligned(fy_update *u) { u->weights = 64; }
static void target_outside(fy_update *u) { u->weights_target = UINT64_MAX - 8191; }
static void target_unaligned(fy_update *u) { u->weights_target += 512; }
static void gradients_nowhere(fy_update *u) { u->gradients = FY_NOWHERE; }
static void gradients_twice(fy_update *u) { u->gradients_source = 0; }
static void momentum_lost(fy_update *u) { u->momentum.target = FY_NOWHERE; }
static void momentum_in_place(fy_update *u) { u->momentum.target = u->momentum.source; }
static void momentum_half_in_place(fy_update *u) { u->momentum.target = u->momentum.source + FY__PAGE; }
static void momentum_twice(fy_update *u) { u->momentum.arena = M * EXTENT; }
static void variance_over_weights(fy_update *u) { u->variance.arena = u->weights; }
static void gradients_over_variance(fy_update *u) { u->gradients = u->variance.arena + FY__PAGE; }
static void segments_missing(fy_update *u) { u->params = 30720; } /* the segments reach beyond */

static int update_with_segment(fy_segment segment)
{
    static const struct stage stage = {.momentum = HOME_ARENA, .variance = HOME_ARENA};
    fy_update update = stage_update(&stage, 1, 0);
    fy_ticket ticket = 0;
    update.segment_count = 1;
    return fy_submit_update(daemon_now, &update, &segment, &ticket);
}

static void segments_refused(void)
{
    CHECK_EQUAL(update_with_segment((fy_segment){.count = PARAMS + 1}), -EINVAL);
    CHECK_EQUAL(update_with_segment((fy_segment){.first = PARAMS, .count = 1}), -EINVAL);
    CHECK_EQUAL(update_with_segment((fy_segment){.count = 1, .flags = 2}), -EINVAL);
    CHECK_EQUAL(update_with_segment((fy_segment){.count = 1, .reserved = 1}), -EINVAL);
}

static void updates_refused(void)
{
    static void (*const wrong[])(fy_update *) = {
        no_params, odd_params, huge_params, step_zero, dtype_unknown, weights_outside, weights_in_scratch,
        weights_unaligned, target_outside, target_unaligned, gradients_nowhere, gradients_twice, momentum_lost,
        momentum_half_in_place, momentum_twice, variance_over_weights, gradients_over_variance, segments_missing};
    CHECK_EQUAL(update_with(as_it_is), 0);
    CHECK_EQUAL(update_with(momentum_in_place), 0);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        CHECK_EQUAL(update_with(wrong[i]), -EINVAL);
}

static void spans_refused(fy_daemon *daemon, uint64_t arena_size, uint64_t store_size)
{
    fy_ticket ticket = 0;
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, 0, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, 100, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, 512, 0, 4096, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 512, 4096, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, arena_size, 0, 4096, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, 0, store_size, 4096, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_write(daemon, 0, store_size - 4096, 8192, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_write(daemon, UINT64_MAX - 4095, 0, 8192, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_write(daemon, 4096, 0, UINT64_MAX - 4095, 0, 0, &ticket), -ERANGE);
    CHECK_EQUAL(fy_submit_read(daemon, SCRATCH, 0, 4096, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, SCRATCH - 4096, 0, 8192, 0, 0, &ticket), -EINVAL);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, 4096, 0, 0, NULL), -EINVAL);
    CHECK_EQUAL(ticket, 0);
}

static void options_refused(fy_arena *arena, fy_store *store)
{
    const fy_options good = update_options(FY_BACKEND_THREADS, 1, 16384, 2);
    for (uint32_t wrong = 1; wrong <= 11; wrong++) {
        fy_options options = good;
        switch (wrong) {
        case 1: options.backend = 3; break;
        case 2: options.read_depth = 0; break;
        case 3: options.write_depth = 100000; break;
        case 4: options.update_threads = 1000; break;
        case 5: options.requests = 0; break;
        case 6: options.chunk_params = 1000; break;
        case 7: options.block_size = 1000; break;
        case 8: options.scratch_offset = 64; break;
        case 9: options.scratch_size = fy_scratch_size(16384, 1); break;
        case 10: options.flags = 4; break;
        default: options.reserved = 1; break;
        }
        fy_daemon *daemon = NULL;
        fy_failure why;
        CHECK_EQUAL(fy_daemon_start(&options, arena, store, &daemon, &why), -EINVAL);
        CHECK_EQUAL(why.wanted, wrong);
        CHECK(daemon == NULL);
    }
}

int main(void)
{
    const uint64_t arena_size = SCRATCH + fy_scratch_size(16384, 2) + 4096;
    const uint64_t store_size = 2 * TENSOR_COUNT * EXTENT;
    fy_arena *arena = testing_arena(arena_size);
    fy_store *store = testing_store(1, 1 << 20, store_size);
    options_refused(arena, store);
    const fy_options options = update_options(FY_BACKEND_AUTO, 1, 16384, 2);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    daemon_now = daemon;
    spans_refused(daemon, arena_size, store_size);
    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.read_bytes + counters.written_bytes + counters.in_flight + counters.queued, 0);
    updates_refused();
    segments_refused();
    testing_close(daemon, arena, store);
    return 0;
}
