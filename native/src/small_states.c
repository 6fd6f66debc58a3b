/*
 * small_states.c - AdamW with momentum and variance in bfloat16 or int8: the same step in the same one pass.
 *
 * bfloat16 is rounded at random, up with the probability of the part that is cut off: rounding to nearest would swallow what
 * a step adds to a variance, a thousandth. A draw follows from seed, step, stage and the parameter's index alone, so
 * results do not depend on threads, chunks or where a run was resumed.
 *
 * int8 keeps a float32 scale per block of 64. A code is linear in a root, so that small values get more of the codes: the
 * square root of a momentum, the fourth root of a variance. (Block-wise scales and codes denser near zero: Dettmers et al. 2022,
 * 8-bit Optimizers, section 2; roots in place of a table, because they vectorise.) The code of a variance that is not zero
 * never is: a zero under a momentum would make the step huge.
 */
#include <assert.h>
#include <stddef.h>

#include "adamw.h"

#define BLOCK FY_STATE_BLOCK
#define GROUP 1024u /* parameters; what a group needs stays in the nearest cache */
#define MOMENTUM_MOST 127.0f
#define VARIANCE_MOST 255.0f

/* ---- bfloat16 ---- */

/* 32 bits that look random: a multiplicative walk over the indices, and a finaliser with full avalanche. */
INLINE uint32_t drawn(uint32_t key, uint32_t index)
{
    uint32_t x = index * 0x9E3779B9u + key;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

/* A value that is not finite stays what it is. */
INLINE uint16_t narrowed_at_random(float value, uint32_t draw)
{
    const uint32_t bits = bits_of(value);
    return (uint16_t)((bits + (lost_in_float32(bits) ? 0u : draw)) >> 16);
}

INLINE uint64_t bfloat16_span(const struct fy__scalars *s, const struct fy__run *run, int narrow_weights,
                              int narrow_gradients)
{
    const struct fy__scalars k = *s;
    void *weights = run->weights;
    int16_t *remainder = run->remainder;
    uint16_t *momentum = run->momentum;
    uint16_t *variance = run->variance;
    const void *gradients = run->gradients;
    const uint32_t first = (uint32_t)run->first;
    const uint64_t count = run->count;
    uint32_t lost = 0;
#pragma GCC ivdep
    for (uint64_t i = 0; i < count; i++) {
        float p = master_of(narrow_weights, weights, remainder, i);
        float m = float_of((uint32_t)momentum[i] << 16);
        float v = float_of((uint32_t)variance[i] << 16);
        (void)adamw_step(&k, gradient_of(narrow_gradients, gradients, i), &p, &m, &v);
        const uint32_t draw = drawn(k.key, first + (uint32_t)i);
        momentum[i] = narrowed_at_random(m, draw & 0xFFFFu);
        variance[i] = narrowed_at_random(v, draw >> 16);
        lost += master_put(narrow_weights, weights, remainder, i, p);
    }
    return lost;
}

/* ---- int8 ---- */

/* A root as a code; what is not a number becomes 0. Rounds to nearest, halves up. */
INLINE int32_t code_of(float root, float per_code, float most)
{
    const float code = root * per_code + 0.5f;
    return (int32_t)(code <= most + 1.0f ? code : 0.0f);
}

/* What a group of blocks hands from one loop to the next: new moments as roots, a momentum's sign apart. Loops over many blocks
 * overlap in the processor where those of one would wait for its maximum. */
struct group {
    float signs[GROUP];
    float momentum[GROUP];
    float variance[GROUP];
};

/* The step of up to a block. `scales` are of one code each, in the space of roots. No two arrays overlap. */
INLINE uint32_t block_step(const struct fy__scalars *s, const struct fy__run *run, uint64_t at, uint32_t count,
                           int narrow_weights, int narrow_gradients, struct group *group)
{
    const struct fy__scalars k = *s;
    const float one_m = run->momentum_scales[at / BLOCK];
    const float one_v = run->variance_scales[at / BLOCK];
    const int8_t *momentum = (const int8_t *)run->momentum + at;
    const uint8_t *variance = (const uint8_t *)run->variance + at;
    void *weights = (char *)run->weights + at * (narrow_weights ? 2 : 4);
    int16_t *remainder = narrow_weights ? run->remainder + at : NULL;
    const void *gradients = (const char *)run->gradients + at * (narrow_gradients ? 2 : 4);
    float *signs = group->signs + at % GROUP;
    float *roots_m = group->momentum + at % GROUP;
    float *roots_v = group->variance + at % GROUP;
    uint32_t lost = 0;
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; i++) {
        float p = master_of(narrow_weights, weights, remainder, i);
        const float t = (float)momentum[i] * one_m;
        const float u = (float)variance[i] * one_v;
        float m = t * fabsf(t);
        float v = (u * u) * (u * u);
        const float root = adamw_step(&k, gradient_of(narrow_gradients, gradients, i), &p, &m, &v);
        signs[i] = m;
        roots_m[i] = sqrtf(fabsf(m));
        roots_v[i] = sqrtf(root);
        lost += master_put(narrow_weights, weights, remainder, i, p);
    }
    return lost;
}

/* The codes of up to a block, and its scales. */
INLINE void block_code(const struct group *group, const struct fy__run *run, uint64_t at, uint32_t count)
{
    const float *signs = group->signs + at % GROUP;
    const float *roots_m = group->momentum + at % GROUP;
    const float *roots_v = group->variance + at % GROUP;
    int8_t *momentum = (int8_t *)run->momentum + at;
    uint8_t *variance = (uint8_t *)run->variance + at;
    const float most_m = largest(roots_m, count);
    const float most_v = largest(roots_v, count);
    const float per_code_m = most_m > 0.0f ? MOMENTUM_MOST / most_m : 0.0f;
    const float per_code_v = most_v > 0.0f ? VARIANCE_MOST / most_v : 0.0f;
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; i++) {
        const int32_t m = code_of(roots_m[i], per_code_m, MOMENTUM_MOST);
        const int32_t v = code_of(roots_v[i], per_code_v, VARIANCE_MOST);
        momentum[i] = (int8_t)(signs[i] < 0.0f ? -m : m);
        variance[i] = (uint8_t)(v > 0 ? v : roots_v[i] > 0.0f ? 1 : 0);
    }
    run->momentum_scales[at / BLOCK] = most_m * (1.0f / MOMENTUM_MOST);
    run->variance_scales[at / BLOCK] = most_v * (1.0f / VARIANCE_MOST);
}

INLINE uint64_t int8_span(const struct fy__scalars *s, const struct fy__run *run, int narrow_weights, int narrow_gradients)
{
    assert(run->first % BLOCK == 0);
    struct group group;
    uint64_t lost = 0;
    for (uint64_t begin = 0; begin < run->count; begin += GROUP) {
        const uint64_t end = run->count - begin < GROUP ? run->count : begin + GROUP;
        const uint64_t whole = end - (end - begin) % BLOCK; /* a constant count: loops without tails */
        for (uint64_t at = begin; at < whole; at += BLOCK)
            lost += block_step(s, run, at, BLOCK, narrow_weights, narrow_gradients, &group);
        for (uint64_t at = begin; at < whole; at += BLOCK)
            block_code(&group, run, at, BLOCK);
        if (whole < end) {
            lost += block_step(s, run, whole, (uint32_t)(end - whole), narrow_weights, narrow_gradients, &group);
            block_code(&group, run, whole, (uint32_t)(end - whole));
        }
    }
    return lost;
}

/* ---- the instances: states, weights, gradients ---- */

#define INSTANCE(states, weights, gradients)                                                                          \
    FY__CLONES static uint64_t states##_##weights##_##gradients(const struct fy__scalars *s, const struct fy__run *run) \
    {                                                                                                                 \
        return states##_span(s, run, weights == 16, gradients == 16);                                                 \
    }
INSTANCE(bfloat16, 32, 32)
INSTANCE(bfloat16, 32, 16)
INSTANCE(bfloat16, 16, 32)
INSTANCE(bfloat16, 16, 16)
INSTANCE(int8, 32, 32)
INSTANCE(int8, 32, 16)
INSTANCE(int8, 16, 32)
INSTANCE(int8, 16, 16)

typedef uint64_t span_function(const struct fy__scalars *s, const struct fy__run *run);
static span_function *const spans[2][2][2] = {
    {{bfloat16_32_32, bfloat16_32_16}, {bfloat16_16_32, bfloat16_16_16}},
    {{int8_32_32, int8_32_16}, {int8_16_32, int8_16_16}},
};

uint64_t fy__adamw_small(const struct fy__scalars *s, const struct fy__run *run, uint32_t states, uint32_t weights,
                         uint32_t gradients)
{
    assert(states == FY_BFLOAT16 || states == FY_INT8);
    assert(weights <= FY_BFLOAT16);
    assert(gradients <= FY_BFLOAT16);
    return spans[states == FY_INT8][weights][gradients](s, run);
}
