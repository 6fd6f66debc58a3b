/*
 * updating.h - a small stage with states on plain memory beside the same stage in an arena and a store, for the tests
 * of the update chain. The plain side runs fy_adamw(), the other goes through a daemon, and both must agree bit for
 * bit.
 */
#ifndef FUYOU_UPDATING_H
#define FUYOU_UPDATING_H

#include "testing.h"

#define PARAMS (UINT64_C(16384) * 5 + 2048 * 3)
#define EXTENT (PARAMS * 4) /* room for any tensor */
#define TENSOR_COUNT 5

_Static_assert(EXTENT % FY__PAGE == 0, "extents are aligned");

enum { W = 0, R, M, V, G }; /* weights, remainder, momentum, variance, gradients */
enum home { HOME_ARENA, HOME_COMMIT, HOME_STORE, HOME_ZERO }; /* COMMIT: in the arena, and written as well */

/* Arena: the five tensors, a place to read back to, scratch. Store: two extents per tensor. */
#define READ_BACK (TENSOR_COUNT * EXTENT)
#define SCRATCH ((TENSOR_COUNT + 1) * EXTENT)

struct stage {
    uint32_t weights_dtype;
    uint32_t gradients_dtype;
    uint32_t states_dtype;
    uint32_t rule; /* without a variance but for FY_ADAMW: it stays as it is, and no sum is made of it */
    enum home remainder;
    enum home momentum;
    enum home variance;
    bool gradients_on_store;
    bool weights_written;
    bool in_place; /* what is on the store is written where it was read */
    unsigned char *plain[TENSOR_COUNT];
};

/* Whether the update has the tensor. */
static inline bool stage_uses(const struct stage *stage, int tensor)
{
    return tensor == R ? stage->weights_dtype == FY_BFLOAT16 : tensor == V ? stage->rule == FY_ADAMW : true;
}

static inline uint64_t stage_bytes(const struct stage *stage, int tensor)
{
    if (tensor == W)
        return PARAMS * (stage->weights_dtype == FY_BFLOAT16 ? 2 : 4);
    if (tensor == G)
        return PARAMS * (stage->gradients_dtype == FY_BFLOAT16 ? 2 : 4);
    if (tensor == R)
        return PARAMS * 2;
    return fy__state_bytes(&(fy_update){.states_dtype = stage->states_dtype}, PARAMS);
}

static inline uint64_t extent_of(int tensor, uint32_t side)
{
    return ((uint64_t)tensor * 2 + side) * EXTENT;
}

/* Boundaries off any vector, a frozen tensor, gaps between, and the end left to no segment. */
static const fy_segment stage_segments[] = {
    {.first = 0, .count = 1000, .weight_decay = 0.1f, .lr_scale = 1.0f},
    {.first = 1003, .count = 30011, .weight_decay = 0.0f, .lr_scale = 0.5f},
    {.first = 31014, .count = 777, .weight_decay = 0.1f, .lr_scale = 1.0f, .flags = FY_SEGMENT_FROZEN},
    {.first = 32000, .count = PARAMS - 32000 - 33, .weight_decay = 0.01f, .lr_scale = 2.0f},
};
/* The same for int8 states, whose segments begin with a block. */
static const fy_segment block_segments[] = {
    {.first = 0, .count = 1000, .weight_decay = 0.1f, .lr_scale = 1.0f},
    {.first = 1024, .count = 29990, .weight_decay = 0.0f, .lr_scale = 0.5f},
    {.first = 31040, .count = 777, .weight_decay = 0.1f, .lr_scale = 1.0f, .flags = FY_SEGMENT_FROZEN},
    {.first = 32000, .count = PARAMS - 32000 - 33, .weight_decay = 0.01f, .lr_scale = 2.0f},
};
_Static_assert(sizeof block_segments == sizeof stage_segments, "as many of either");
#define STAGE_SEGMENTS ((uint32_t)(sizeof stage_segments / sizeof stage_segments[0]))

static inline const fy_segment *segments_of(const struct stage *stage)
{
    return stage->states_dtype == FY_INT8 ? block_segments : stage_segments;
}

static inline void fill_floats(float *values, double scale, uint64_t seed)
{
    for (uint64_t i = 0; i < PARAMS; i++)
        values[i] = (float)(((double)(testing_random(&seed) >> 11) / 9007199254740992.0 - 0.5) * scale);
}

static inline void fill_gradients(struct stage *stage, uint64_t seed)
{
    float *values = malloc(PARAMS * 4);
    int16_t *ignored = malloc(PARAMS * 2);
    uint64_t nonfinite = 0;
    CHECK(values != NULL && ignored != NULL);
    fill_floats(values, 0.02, seed);
    if (stage->gradients_dtype == FY_FLOAT32)
        memcpy(stage->plain[G], values, PARAMS * 4);
    else
        CHECK_EQUAL(fy_split(values, (uint16_t *)(void *)stage->plain[G], ignored, PARAMS, &nonfinite), 0);
    free(ignored);
    free(values);
}

static inline void stage_destroy(struct stage *stage)
{
    for (int i = 0; i < TENSOR_COUNT; i++)
        free(stage->plain[i]);
}

/* The side that an update writes which reads `side`. */
static inline uint32_t target_side(const struct stage *stage, uint32_t side)
{
    return stage->in_place ? side : 1 - side;
}

static inline fy_home home_of(enum home home, int tensor, uint32_t side, uint32_t target)
{
    const uint64_t arena = (uint64_t)tensor * EXTENT;
    switch (home) {
    case HOME_ARENA: return (fy_home){arena, FY_NOWHERE, FY_NOWHERE};
    case HOME_COMMIT: return (fy_home){arena, FY_NOWHERE, extent_of(tensor, target)};
    case HOME_STORE: return (fy_home){FY_NOWHERE, extent_of(tensor, side), extent_of(tensor, target)};
    default: return (fy_home){FY_NOWHERE, FY_NOWHERE, extent_of(tensor, target)};
    }
}

static inline enum home home_kind(const struct stage *stage, int tensor)
{
    return tensor == R ? stage->remainder : tensor == M ? stage->momentum : stage->variance;
}

/* The update that reads extents `side` and writes the other ones, or these where the stage is updated in place. */
static inline fy_update stage_update(const struct stage *stage, uint64_t step, uint32_t side)
{
    const uint32_t target = target_side(stage, side);
    return (fy_update){
        .params = PARAMS,
        .weights_dtype = stage->weights_dtype,
        .gradients_dtype = stage->gradients_dtype,
        .states_dtype = stage->states_dtype,
        .rule = stage->rule,
        .seed = 11,
        .weights = 0,
        .weights_target = stage->weights_written ? extent_of(W, target) : FY_NOWHERE,
        .gradients = stage->gradients_on_store ? FY_NOWHERE : G * EXTENT,
        .gradients_source = stage->gradients_on_store ? extent_of(G, 0) : FY_NOWHERE,
        .remainder = home_of(stage->remainder, R, side, target),
        .momentum = home_of(stage->momentum, M, side, target),
        .variance = home_of(stage->variance, V, side, target),
        .lr = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .epsilon = 1e-8,
        .gradient_scale = 0.7,
        .step = step,
        .priority = 3,
        .label = 42,
        .segment_count = STAGE_SEGMENTS,
    };
}

static inline uint64_t stage_step_plain(struct stage *stage, const fy_update *update)
{
    uint64_t nonfinite = 0;
    CHECK_EQUAL(fy_adamw(update, segments_of(stage), stage->plain[W], (int16_t *)(void *)stage->plain[R],
                         stage->plain[M], stage->plain[V], stage->plain[G], &nonfinite), 0);
    return nonfinite;
}

/* float32 states at random; small ones from a step, which changes masters as well. What rests nowhere is zero then. */
static inline void fill_states(struct stage *stage, uint64_t seed)
{
    if (stage->states_dtype == FY_FLOAT32) {
        fill_floats((float *)(void *)stage->plain[M], 0.01, seed + 1);
        fill_floats((float *)(void *)stage->plain[V], 0.0001, seed + 2);
        for (uint64_t i = 0; i < PARAMS; i++)
            stage->plain[V][4 * i + 3] &= 0x7F; /* a variance is not negative */
    } else {
        const fy_update update = stage_update(stage, 1, 0);
        CHECK_EQUAL(stage_step_plain(stage, &update), 0);
    }
    if (stage->remainder == HOME_ZERO)
        memset(stage->plain[R], 0, PARAMS * 4);
    if (stage->momentum == HOME_ZERO)
        memset(stage->plain[M], 0, PARAMS * 4);
    if (stage->variance == HOME_ZERO)
        memset(stage->plain[V], 0, PARAMS * 4);
}

static inline void stage_create(struct stage *stage, uint64_t seed)
{
    float *master = malloc(PARAMS * 4);
    uint64_t nonfinite = 0;
    CHECK(master != NULL);
    for (int i = 0; i < TENSOR_COUNT; i++) {
        stage->plain[i] = calloc(PARAMS, 4);
        CHECK(stage->plain[i] != NULL);
    }
    fill_floats(master, 0.2, seed);
    if (stage->weights_dtype == FY_FLOAT32)
        memcpy(stage->plain[W], master, PARAMS * 4);
    else
        CHECK_EQUAL(fy_split(master, (uint16_t *)(void *)stage->plain[W], (int16_t *)(void *)stage->plain[R], PARAMS,
                             &nonfinite), 0);
    fill_gradients(stage, seed + 3);
    fill_states(stage, seed);
    free(master);
}

static inline void put_on_store(fy_daemon *daemon, const unsigned char *data, uint64_t bytes, uint64_t extent)
{
    memcpy((unsigned char *)fy_arena_base(daemon->arena) + READ_BACK, data, bytes);
    CHECK_EQUAL(testing_write(daemon, READ_BACK, extent, bytes, NULL), 0);
}

/* Puts the stage where its homes say, side 0; the arena's unused tensors get bytes that would show. */
static inline void stage_place(const struct stage *stage, fy_daemon *daemon)
{
    unsigned char *base = fy_arena_base(daemon->arena);
    memset(base, 0x5A, SCRATCH);
    memcpy(base, stage->plain[W], stage_bytes(stage, W));
    for (int i = R; i <= V; i++) {
        if (home_kind(stage, i) == HOME_STORE)
            put_on_store(daemon, stage->plain[i], stage_bytes(stage, i), extent_of(i, 0));
        else if (home_kind(stage, i) != HOME_ZERO)
            memcpy(base + (uint64_t)i * EXTENT, stage->plain[i], stage_bytes(stage, i));
    }
}

static inline void stage_place_gradients(const struct stage *stage, fy_daemon *daemon)
{
    unsigned char *base = fy_arena_base(daemon->arena);
    if (stage->gradients_on_store)
        put_on_store(daemon, stage->plain[G], stage_bytes(stage, G), extent_of(G, 0));
    else
        memcpy(base + G * EXTENT, stage->plain[G], stage_bytes(stage, G));
}

static inline void check_extent(fy_daemon *daemon, const struct stage *stage, int tensor, uint32_t side, uint64_t sum)
{
    const uint64_t bytes = stage_bytes(stage, tensor);
    unsigned char *base = fy_arena_base(daemon->arena);
    CHECK(sum == fy_checksum(stage->plain[tensor], bytes, 0));
    CHECK_EQUAL(testing_read(daemon, READ_BACK, extent_of(tensor, side), bytes, NULL), 0);
    CHECK(memcmp(base + READ_BACK, stage->plain[tensor], bytes) == 0);
}

/* After a step whose target was `side`: arena, store and sums equal the plain side. */
static inline void stage_check(const struct stage *stage, fy_daemon *daemon, uint32_t side, const fy_result *result)
{
    const unsigned char *base = fy_arena_base(daemon->arena);
    const uint64_t sums[] = {result->weights_sum, result->remainder_sum, result->momentum_sum, result->variance_sum};
    CHECK(memcmp(base, stage->plain[W], stage_bytes(stage, W)) == 0);
    if (stage->weights_written)
        check_extent(daemon, stage, W, side, sums[W]);
    else
        CHECK_EQUAL(sums[W], 0);
    for (int i = R; i <= V; i++) {
        const enum home home = home_kind(stage, i);
        if (!stage_uses(stage, i)) {
            CHECK_EQUAL(sums[i], 0);
            continue;
        }
        if (home == HOME_ARENA || home == HOME_COMMIT)
            CHECK(memcmp(base + (uint64_t)i * EXTENT, stage->plain[i], stage_bytes(stage, i)) == 0);
        if (home == HOME_ARENA)
            CHECK_EQUAL(sums[i], 0);
        else
            check_extent(daemon, stage, i, side, sums[i]);
    }
}

/* What a step reads of each tensor from the store, summed before the step; 0 where it reads nothing. */
static inline void stage_read_sums(const struct stage *stage, uint64_t sums[TENSOR_COUNT])
{
    for (int i = W; i <= G; i++) {
        const bool read = i == G ? stage->gradients_on_store : i != W && stage_uses(stage, i) && home_kind(stage, i) == HOME_STORE;
        sums[i] = read ? fy_checksum(stage->plain[i], stage_bytes(stage, i), 0) : 0;
    }
}

static inline void stage_check_reads(const uint64_t wanted[TENSOR_COUNT], const fy_result *result)
{
    CHECK(result->remainder_read == wanted[R]);
    CHECK(result->momentum_read == wanted[M]);
    CHECK(result->variance_read == wanted[V]);
    CHECK(result->gradients_read == wanted[G]);
}

static inline fy_options update_options(uint32_t backend, uint32_t threads, uint32_t chunk_params, uint32_t chunks)
{
    fy_options options = testing_options(backend);
    options.update_threads = threads;
    options.chunk_params = chunk_params;
    options.scratch_offset = SCRATCH;
    options.scratch_size = fy_scratch_size(chunk_params, chunks);
    return options;
}

#endif
