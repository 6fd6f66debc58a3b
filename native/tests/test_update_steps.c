/*
 * Steps follow each other from extent A to B and back: six steps equal six fy_adamw() calls, with the update waited for
 * as soon as it is sent, and the first step starting from zeros that were never written.
 */
#include "updating.h"

#define STEPS 6
#define CHUNK FY_STATE_TILE /* int8 needs whole tiles */

static void steps(uint32_t backend, uint32_t weights_dtype, uint32_t states_dtype, uint32_t rule)
{
    struct stage stage = {
        .weights_dtype = weights_dtype,
        .gradients_dtype = FY_BFLOAT16,
        .states_dtype = states_dtype,
        .rule = rule,
        .remainder = HOME_ZERO,
        .momentum = HOME_ZERO,
        .variance = HOME_ZERO,
        .gradients_on_store = true,
        .weights_written = true,
    };
    fy_arena *arena = testing_arena(SCRATCH + fy_scratch_size(CHUNK, 4));
    fy_store *store = testing_store(3, 64 << 10, 2 * TENSOR_COUNT * EXTENT);
    const fy_options options = update_options(backend, 2, states_dtype == FY_INT8 ? CHUNK : 16384, 4);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    stage_create(&stage, 5);
    stage_place(&stage, daemon);
    for (uint64_t step = 1; step <= STEPS; step++) {
        const uint32_t side = (step - 1) % 2;
        fill_gradients(&stage, 100 + step);
        stage_place_gradients(&stage, daemon);
        const fy_update update = stage_update(&stage, step, side);
        fy_ticket ticket = 0;
        fy_result result;
        CHECK_EQUAL(fy_submit_update(daemon, &update, segments_of(&stage), &ticket), 0);
        CHECK_EQUAL(testing_wait(daemon, ticket, &result), 0);
        CHECK_EQUAL(result.nonfinite, stage_step_plain(&stage, &update));
        stage_check(&stage, daemon, 1 - side, &result);
        stage.remainder = stage.momentum = stage.variance = HOME_STORE;
    }
    stage_destroy(&stage);
    testing_close(daemon, arena, store);
}

int main(void)
{
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++) {
        steps(*backend, FY_FLOAT32, FY_FLOAT32, FY_ADAMW);
        steps(*backend, FY_BFLOAT16, FY_FLOAT32, FY_ADAMW);
        steps(*backend, FY_FLOAT32, FY_INT8, FY_ADAMW);
        steps(*backend, FY_BFLOAT16, FY_INT8, FY_ADAMW);
        steps(*backend, FY_BFLOAT16, FY_BFLOAT16, FY_ADAMW);
        steps(*backend, FY_FLOAT32, FY_FLOAT32, FY_LION);
        steps(*backend, FY_BFLOAT16, FY_FLOAT32, FY_LION);
    }
    return 0;
}
