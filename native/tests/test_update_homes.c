/*
 * The update chain equals fy_adamw() on plain memory, bit for bit, wherever the states rest: every dtype of
 * weights, gradients and states, every combination of homes, gradients and weights in the arena or on the store, several chunk sizes, threads and
 * backends, to the other extents and in place. Segments have odd boundaries; padding and frozen parameters keep their bits.
 */
#include "updating.h"

/* Of the combinations, every how many-th is run: a sanitizer makes each one ten times as slow. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define EVERY 11
#define CASES_LEAST 80
#else
#define EVERY 3
#define CASES_LEAST 300
#endif

static uint32_t case_number;

static void one_update(struct stage stage, fy_store *store, uint32_t backend, uint32_t threads, uint32_t chunk_params)
{
    fy_arena *arena = testing_arena(SCRATCH + fy_scratch_size(chunk_params, 3));
    fy_options options = update_options(backend, threads, chunk_params, 3);
    if (case_number % 2 == 0)
        options.flags = FY_DAEMON_DATA_SUMS;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    stage_create(&stage, 1000 + case_number);
    stage_place(&stage, daemon);
    stage_place_gradients(&stage, daemon);
    const fy_update update = stage_update(&stage, 1 + case_number % 3, 0);
    uint64_t read_sums[TENSOR_COUNT] = {0};
    if (options.flags != 0)
        stage_read_sums(&stage, read_sums);
    fy_ticket ticket = 0;
    fy_result result;
    CHECK_EQUAL(fy_submit_update(daemon, &update, segments_of(&stage), &ticket), 0);
    CHECK_EQUAL(testing_wait(daemon, ticket, &result), 0);
    CHECK_EQUAL(result.nonfinite, stage_step_plain(&stage, &update));
    stage_check(&stage, daemon, target_side(&stage, 0), &result);
    stage_check_reads(read_sums, &result);
    stage_destroy(&stage);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    CHECK_EQUAL(fy_arena_destroy(arena), 0);
    case_number++;
}

int main(void)
{
    static const uint32_t chunk_sizes[] = {16384, 49152, 1 << 20};
    static const uint32_t tile_sizes[] = {FY_STATE_TILE, FY_STATE_TILE, 1 << 20}; /* int8: chunks of whole tiles */
    const uint32_t *backends = testing_backends();
    const uint32_t backends_count = backends[1] == FY_BACKEND_AUTO ? 1 : 2;
    fy_store *store = testing_store(2, 256 << 10, 2 * TENSOR_COUNT * EXTENT);
    for (uint32_t homes = 0; homes < 64; homes++) {
        for (uint32_t kinds = 0; kinds < 16; kinds++) {
            if ((homes + kinds) % EVERY != 0 && (homes % 21 != 0 || EVERY > 3))
                continue; /* a part of all, and everything where the three states rest alike */
            const struct stage stage = {
                .weights_dtype = kinds & 1,
                .gradients_dtype = (kinds >> 1) & 1,
                .states_dtype = case_number / 2 % 3,
                .gradients_on_store = (kinds & 4) != 0,
                .weights_written = (kinds & 8) != 0,
                .rule = case_number / 2 % 3 == FY_FLOAT32 ? case_number / 6 % 2 : FY_ADAMW,
                .in_place = case_number % 3 == 0,
                .remainder = (enum home)(homes & 3),
                .momentum = (enum home)((homes >> 2) & 3),
                .variance = (enum home)(homes >> 4),
            };
            one_update(stage, store, backends[case_number % backends_count], 1 + case_number / 2 % 2,
                       (stage.states_dtype == FY_INT8 ? tile_sizes : chunk_sizes)[case_number / 4 % 3]);
        }
    }
    CHECK(case_number > CASES_LEAST);
    CHECK_EQUAL(fy_store_close(store), 0);
    return 0;
}
