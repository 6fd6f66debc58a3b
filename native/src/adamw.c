/*
 * adamw.c - AdamW, and the lossless split of a float32 master into bfloat16 weights and an int16 remainder.
 *
 * The update is elementwise and written once, as plain C that the compiler vectorises; the four pairs of dtypes are
 * four instances of the same inline body. The operations and their order are those of torch.optim.AdamW with
 * foreach=False: scalars are computed in double and rounded to float once, everything else is float. (torch's own
 * kernels fuse some multiply-adds where the machine can; this file never does, so that every machine agrees.)
 *
 * Contract of the loops: weights, remainder, momentum, variance and gradients do not overlap; only that is what
 * `restrict` says here, and only this file says it.
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "adamw.h"

/* `narrow_weights` and `narrow_gradients` are constants in every instance: the branches on them are gone before the
 * loop is vectorised. */
INLINE uint64_t adamw_span(const struct fy__scalars *s, uint64_t count, int narrow_weights, uint16_t *restrict weights,
                           int16_t *restrict remainder, float *restrict master, float *restrict momentum,
                           float *restrict variance, int narrow_gradients, const uint16_t *restrict gradients16,
                           const float *restrict gradients32)
{
    const struct fy__scalars k = *s;
    uint32_t lost = 0; /* 32 bits keep the loop in 32-bit lanes; spans are shorter than 2^32 */
    for (uint64_t i = 0; i < count; i++) {
        float p = narrow_weights ? float_of(joined(weights[i], remainder[i])) : master[i];
        float g = narrow_gradients ? float_of((uint32_t)gradients16[i] << 16) : gradients32[i];
        adamw_step(&k, g, &p, &momentum[i], &variance[i]);
        uint32_t bits = bits_of(p);
        if (narrow_weights) {
            weights[i] = (uint16_t)((bits + 0x8000u) >> 16);
            remainder[i] = (int16_t)(uint16_t)bits;
            lost += lost_in_bfloat16(bits);
        } else {
            master[i] = p;
            lost += lost_in_float32(bits);
        }
    }
    return lost;
}

/* The instances. Weights first, gradients second. Each is compiled once per instruction set. */
FY__CLONES static uint64_t adamw_16_16(const struct fy__scalars *s, uint64_t n, uint16_t *w, int16_t *r, float *m, float *v,
                                       const uint16_t *g)
{
    return adamw_span(s, n, 1, w, r, NULL, m, v, 1, g, NULL);
}

FY__CLONES static uint64_t adamw_16_32(const struct fy__scalars *s, uint64_t n, uint16_t *w, int16_t *r, float *m, float *v,
                                       const float *g)
{
    return adamw_span(s, n, 1, w, r, NULL, m, v, 0, NULL, g);
}

FY__CLONES static uint64_t adamw_32_16(const struct fy__scalars *s, uint64_t n, float *p, float *m, float *v,
                                       const uint16_t *g)
{
    return adamw_span(s, n, 0, NULL, NULL, p, m, v, 1, g, NULL);
}

FY__CLONES static uint64_t adamw_32_32(const struct fy__scalars *s, uint64_t n, float *p, float *m, float *v,
                                       const float *g)
{
    return adamw_span(s, n, 0, NULL, NULL, p, m, v, 0, NULL, g);
}

/* Bytes of a momentum or variance of `params` parameters: of int8 whole tiles, or up to a stage's end. */
uint64_t fy__state_bytes(const fy_update *update, uint64_t params)
{
    assert(update->states_dtype <= FY_INT8);
    assert(params <= UINT64_MAX / 8); /* no size below overflows */
    const uint64_t page = FY__CHECKSUM_BLOCK;
    switch (update->states_dtype) {
    case FY_INT8:
        return page * ((params + FY_STATE_TILE - 1) / FY_STATE_TILE) + (params + page - 1) / page * page;
    case FY_BFLOAT16:
        return 2 * params;
    default:
        return 4 * params;
    }
}

/* Mixes 64 bits: the finaliser of splitmix64. */
static uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static struct fy__scalars segment_scalars(const fy_update *update, const fy_segment *segment)
{
    assert(update->step > 0);
    const double lr = update->lr * (double)segment->lr_scale;
    const double step = (double)update->step;
    const double blend = 1.0 - update->beta1;
    const int from_gradient = fabs(blend) >= 0.5;
    return (struct fy__scalars){
        .scale = (float)update->gradient_scale,
        .decay = (float)(1.0 - lr * (double)segment->weight_decay),
        .blend = from_gradient ? (float)blend - 1.0f : (float)blend,
        .from_gradient = from_gradient,
        .beta2 = (float)update->beta2,
        .one_less_beta2 = (float)(1.0 - update->beta2),
        .correction = (float)sqrt(1.0 - pow(update->beta2, step)),
        .epsilon = (float)update->epsilon,
        .negative_step = (float)-(lr / (1.0 - pow(update->beta1, step))),
        .beta1 = (float)update->beta1,
        .one_less_beta1 = (float)(1.0 - update->beta1),
        .negative_lr = (float)-lr,
        .key = (uint32_t)mixed(mixed(mixed(update->seed) + update->step) + update->label),
    };
}

/* Parameters [at, at + count) of the chunk's own arrays, all in one segment. */
static uint64_t adamw_run(const fy_update *update, const struct fy__scalars *s, const struct fy__chunk *chunk, uint64_t at,
                          uint64_t count)
{
    assert(count > 0);
    assert(at + count <= chunk->count);
    assert(chunk->remainder != NULL || update->weights_dtype == FY_FLOAT32);
    float *momentum = (float *)chunk->momentum + at;
    float *variance = (float *)chunk->variance + at;
    const int narrow_gradients = update->gradients_dtype == FY_BFLOAT16;
    const uint16_t *gradients16 = (const uint16_t *)chunk->gradients + at;
    const float *gradients32 = (const float *)chunk->gradients + at;

    if (update->weights_dtype == FY_BFLOAT16) {
        uint16_t *weights = (uint16_t *)chunk->weights + at;
        int16_t *remainder = chunk->remainder + at;
        return narrow_gradients ? adamw_16_16(s, count, weights, remainder, momentum, variance, gradients16)
                                : adamw_16_32(s, count, weights, remainder, momentum, variance, gradients32);
    }
    float *master = (float *)chunk->weights + at;
    return narrow_gradients ? adamw_32_16(s, count, master, momentum, variance, gradients16)
                            : adamw_32_32(s, count, master, momentum, variance, gradients32);
}

/* A run whose momentum and variance begin `states` bytes into theirs. */
static struct fy__run run_of(const fy_update *update, const struct fy__chunk *chunk, uint64_t at, uint64_t count,
                             uint64_t states)
{
    assert(count > 0);
    assert(at + count <= chunk->count);
    const uint64_t weight_bytes = fy__value_bytes(update->weights_dtype);
    const uint64_t gradient_bytes = fy__value_bytes(update->gradients_dtype);
    return (struct fy__run){
        .first = chunk->first + at,
        .count = count,
        .weights = (char *)chunk->weights + at * weight_bytes,
        .remainder = chunk->remainder ? chunk->remainder + at : NULL,
        .momentum = (char *)chunk->momentum + states,
        .variance = chunk->variance ? (char *)chunk->variance + states : NULL,
        .gradients = (const char *)chunk->gradients + at * gradient_bytes,
    };
}

/* The same as adamw_run() with small states; a run of int8 stays within a tile, which begins with the scales. */
static uint64_t small_run(const fy_update *update, const struct fy__scalars *s, const struct fy__chunk *chunk, uint64_t at,
                          uint64_t count)
{
    const int tiled = update->states_dtype == FY_INT8;
    const uint64_t in_tile = at % FY_STATE_TILE;
    const uint64_t tile = fy__state_bytes(update, at - in_tile);
    const uint64_t scales = tiled ? tile + in_tile / FY_STATE_BLOCK * sizeof(float) : 0;
    struct fy__run run = run_of(update, chunk, at, count, tiled ? tile + FY__CHECKSUM_BLOCK + in_tile : 2 * at);
    run.momentum_scales = (float *)(void *)((char *)chunk->momentum + scales);
    run.variance_scales = (float *)(void *)((char *)chunk->variance + scales);
    return fy__adamw_small(s, &run, update->states_dtype, update->weights_dtype, update->gradients_dtype);
}

/* Parameters of one segment, cut where its kernel wants it. */
static uint64_t segment_run(const fy_update *update, const fy_segment *segment, const struct fy__chunk *chunk, uint64_t at,
                            uint64_t count)
{
    const struct fy__scalars s = segment_scalars(update, segment);
    if (update->rule != FY_ADAMW) {
        const struct fy__run run = run_of(update, chunk, at, count, sizeof(float) * at);
        return fy__lion(&s, &run, update->weights_dtype, update->gradients_dtype);
    }
    if (update->states_dtype == FY_FLOAT32) {
        return adamw_run(update, &s, chunk, at, count);
    }
    uint64_t lost = 0;
    while (count > 0) { /* every round is a tile, or what there is of it */
        const uint64_t left = FY_STATE_TILE - at % FY_STATE_TILE;
        const uint64_t here = count < left ? count : left;
        lost += small_run(update, &s, chunk, at, here);
        at += here;
        count -= here;
    }
    return lost;
}

uint64_t fy__adamw_chunk(const fy_update *update, const fy_segment *segments, const struct fy__chunk *chunk)
{
    assert(chunk->weights != NULL);
    assert(chunk->momentum != NULL);
    assert(chunk->variance != NULL || update->rule != FY_ADAMW);
    assert(chunk->gradients != NULL);
    assert(segments != NULL || update->segment_count == 0);
    const uint64_t begin = chunk->first;
    const uint64_t end = chunk->first + chunk->count;
    assert(end >= begin);
    assert(chunk->count < UINT32_MAX); /* the loops count in 32 bits */
    assert(update->states_dtype != FY_INT8 || begin % FY_STATE_TILE == 0);

    uint64_t lost = 0;
    for (uint32_t i = 0; i < update->segment_count; i++) {
        const fy_segment *segment = &segments[i];
        const uint64_t from = segment->first > begin ? segment->first : begin;
        const uint64_t segment_end = segment->first + segment->count;
        const uint64_t to = segment_end < end ? segment_end : end;
        if (segment->first >= end) {
            break; /* sorted: nothing further overlaps */
        }
        if (from >= to || (segment->flags & FY_SEGMENT_FROZEN)) {
            continue;
        }
        lost += segment_run(update, segment, chunk, from - begin, to - from);
    }
    return lost;
}

bool fy__update_good(const fy_update *update, const fy_segment *segments)
{
    assert(update != NULL);
    if (update->weights_dtype > FY_BFLOAT16 || update->gradients_dtype > FY_BFLOAT16 || update->step == 0 ||
        update->states_dtype > FY_INT8 || update->rule > FY_LION) {
        return false;
    }
    if (update->rule != FY_ADAMW && update->states_dtype != FY_FLOAT32) {
        return false;
    }
    if (update->segment_count > 0 && !segments) {
        return false;
    }
    uint64_t previous_end = 0;
    for (uint32_t i = 0; i < update->segment_count; i++) {
        const fy_segment *segment = &segments[i];
        if (segment->first < previous_end || segment->first > update->params ||
            segment->count > update->params - segment->first) {
            return false;
        }
        if ((segment->flags & ~(uint32_t)FY_SEGMENT_FROZEN) != 0 || segment->reserved != 0) {
            return false;
        }
        if (update->states_dtype == FY_INT8 && segment->first % FY_STATE_BLOCK != 0) {
            return false; /* a block has one scale, and two segments would each make it */
        }
        previous_end = segment->first + segment->count;
        assert(previous_end <= update->params);
    }
    return true;
}

FY_API int fy_adamw(const fy_update *update, const fy_segment *segments, void *weights, int16_t *remainder,
                    void *momentum, void *variance, const void *gradients, uint64_t *nonfinite)
{
    if (!update || !nonfinite || !fy__update_good(update, segments)) {
        return -EINVAL;
    }
    const uint64_t weight_bytes = fy__value_bytes(update->weights_dtype);
    const uint64_t gradient_bytes = fy__value_bytes(update->gradients_dtype);
    const size_t state_bytes = fy__value_bytes(update->states_dtype); /* int8 states begin with float32 scales */
    if (!fy__array_good(weights, update->params, weight_bytes) || !fy__array_good(momentum, update->params, state_bytes) ||
        !fy__array_good(gradients, update->params, gradient_bytes)) {
        return -EINVAL;
    }
    if (update->rule == FY_ADAMW && !fy__array_good(variance, update->params, state_bytes)) {
        return -EINVAL;
    }
    if (update->weights_dtype == FY_BFLOAT16 && !fy__array_good(remainder, update->params, sizeof *remainder)) {
        return -EINVAL;
    }

    const uint64_t chunk_params = 1u << 30; /* any size gives the same bits; this one fits the loops' counters */
    const uint64_t mode = fy__denormals_keep();
    uint64_t lost = 0;
    for (uint64_t first = 0; first < update->params; first += chunk_params) {
        const uint64_t left = update->params - first;
        const struct fy__chunk chunk = {
            .first = first,
            .count = left < chunk_params ? left : chunk_params,
            .weights = (char *)weights + first * weight_bytes,
            .remainder = remainder ? remainder + first : NULL,
            .momentum = (char *)momentum + fy__state_bytes(update, first),
            .variance = variance ? (char *)variance + fy__state_bytes(update, first) : NULL,
            .gradients = (const char *)gradients + first * gradient_bytes,
        };
        lost += fy__adamw_chunk(update, segments, &chunk);
    }
    fy__denormals_restore(mode);
    assert(lost <= update->params);
    *nonfinite = lost;
    return 0;
}

FY__CLONES static uint64_t split_span(const float *restrict master, uint16_t *restrict weights,
                                      int16_t *restrict remainder, uint64_t count)
{
    uint32_t lost = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(master[i]);
        weights[i] = (uint16_t)((bits + 0x8000u) >> 16);
        remainder[i] = (int16_t)(uint16_t)bits;
        lost += lost_in_bfloat16(bits);
    }
    return lost;
}

FY__CLONES static void join_span(const uint16_t *restrict weights, const int16_t *restrict remainder,
                                 float *restrict master, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        master[i] = float_of(joined(weights[i], remainder[i]));
    }
}

static bool split_good(const float *master, const uint16_t *weights, const int16_t *remainder, uint64_t count)
{
    return fy__array_good(master, count, sizeof *master) && fy__array_good(weights, count, sizeof *weights) &&
           fy__array_good(remainder, count, sizeof *remainder);
}

FY_API int fy_split(const float *master, uint16_t *weights, int16_t *remainder, uint64_t count, uint64_t *nonfinite)
{
    if (!split_good(master, weights, remainder, count) || !nonfinite) {
        return -EINVAL;
    }
    const uint64_t run = 1u << 30;
    uint64_t lost = 0;
    for (uint64_t at = 0; at < count; at += run) {
        lost += split_span(master + at, weights + at, remainder + at, count - at < run ? count - at : run);
    }
    assert(lost <= count);
    *nonfinite = lost;
    return 0;
}

FY_API int fy_join(const uint16_t *weights, const int16_t *remainder, float *master, uint64_t count)
{
    if (!split_good(master, weights, remainder, count)) {
        return -EINVAL;
    }
    join_span(weights, remainder, master, count);
    return 0;
}
