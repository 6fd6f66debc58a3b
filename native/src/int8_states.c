/*
 * int8_states.c - AdamW with momentum and variance in a byte each: the same step in one pass over memory.
 *
 * A block of 64 parameters has a float32 scale. A code is linear in a root of its value, so that small values get more of the
 * codes: the square root of a momentum, the fourth root of a variance. (Block-wise scales and codes denser near zero: Dettmers
 * et al. 2022, 8-bit Optimizers, section 2.) The root is read from the bits: half, or a quarter, of a float's bits, taken as a
 * float again. It is exact at powers of two up to a factor, which the scale takes up, straight in between, and its inverse is as
 * exact and as cheap: no square roots and no search. The code of a variance is never zero in a block that is not: a zero under a
 * momentum would make the step huge.
 *
 * A step changes a variance by a thousandth, and codes lie percents apart. So it is rounded at random (to the nearest, only rare
 * large gradients would move it), by the distance of its root: then 1 / sqrt(v) keeps its mean, which would grow with distances
 * of variances by 3/8 of their noise's square. A block's largest is exact. Momenta are rounded to the nearest.
 *
 * Byte b of a block's word i of 32 bits belongs to parameter 2i + b % 2 + 32 (b / 2). So a lane of 32 bits holds the codes of
 * four parameters and, in 16 bits, two pairs of their weights, remainders and gradients: they are taken apart by shifts alone.
 *
 * A group of blocks goes through three loops, whose hand-over stays in the nearest cache. One loop would be a chain of
 * operations too long for a processor to overlap with the next one's.
 */
#include <assert.h>
#include <stddef.h>

#include "adamw.h"

#define BLOCK FY_STATE_BLOCK
#define GROUP 16u          /* blocks */
#define LANES (BLOCK / 4u) /* words of a block's codes */
#define CACHE_LINE 64u
#define MOMENTUM_MOST 127.0f
#define VARIANCE_MOST 255.0f
#define LEAST_ROOT 0x1p-119f   /* of a block that is not zero: its reciprocal is finite */
#define TO_INTEGER 12582912.0f /* 1.5 * 2^23: a sum with it has the rounded integer, ties to even, in its lowest bits */
#define TO_FIXED 256.0f        /* a sum with it has the integer above the lowest 15 bits, and the fraction in them */
#define FRACTION 0x7FFFu
#define MAGNITUDE 0x7FFFFFFFu
#define HIGH_HALF 0xFFFF0000u
#define SIGNS 0x80808080u /* of four codes */
#define ALL_FINITE 0xFEFF0000u /* twice the bits of a master, without its sign, are below in every dtype of weights */
_Static_assert(BLOCK == 64, "a block is 16 words of codes, and 32 of pairs");
_Static_assert(FY_STATE_TILE % (GROUP * BLOCK) == 0, "a tile is whole groups");

/* Two or four neighbours in memory. */
typedef uint32_t __attribute__((may_alias, aligned(1))) word;

/* What a segment's parameters are multiplied with, as few times as possible. */
struct factors {
    float decay;
    float keep;      /* of the old momentum */
    float take;      /* of the gradient */
    float beta2;
    float root_take; /* of the gradient, before it is squared */
    float epsilon;   /* times the correction: sqrt(v) is not divided by it */
    float step;
    uint32_t key;    /* of the draws that variances are rounded with */
};

/* New moments, and the square root of the variance, by place: byte b of word i is at 16 b + i. */
struct block {
    float momentum[BLOCK];
    float variance[BLOCK];
    float root[BLOCK];
    uint32_t draws[LANES]; /* of the parameters of a word */
};

struct group {
    struct block blocks[GROUP];
    uint32_t most_momentum[GROUP]; /* bits of the largest magnitudes */
    uint32_t most_variance[GROUP];
    float per_momentum[GROUP];     /* codes per root */
    float per_variance[GROUP];
    uint32_t seen[LANES];          /* twice the bits of the largest masters */
};

static struct factors factors_of(const struct fy__scalars *s)
{
    const float keep = s->from_gradient ? -s->blend : 1.0f - s->blend;
    return (struct factors){
        .decay = s->decay,
        .keep = keep,
        .take = (1.0f - keep) * s->scale,
        .beta2 = s->beta2,
        .root_take = sqrtf(s->one_less_beta2) * s->scale,
        .epsilon = s->epsilon * s->correction,
        .step = s->negative_step * s->correction,
        .key = s->key,
    };
}

/* ---- roots ---- */

INLINE float halved(float momentum)
{
    return float_of((uint32_t)((int32_t)bits_of(momentum) >> 1) & 0xBFFFFFFFu); /* the sign stays, alone */
}

INLINE float doubled(float root)
{
    return float_of(bits_of(root) + (bits_of(root) & MAGNITUDE));
}

/* ---- a lane's four parameters ---- */

/* As the bits of floats. */
INLINE void four_read(int narrow, const void *values, uint32_t i, uint32_t *bits)
{
    const word *words = values;
    for (uint32_t pair = 0; pair < 2; pair++) {
        const uint32_t at = i + pair * LANES;
        bits[2 * pair] = narrow ? words[at] << 16 : words[2 * at];
        bits[2 * pair + 1] = narrow ? words[at] & HIGH_HALF : words[2 * at + 1];
    }
}

INLINE void four_join(const void *remainder, uint32_t i, uint32_t *bits)
{
    const word *words = remainder;
    for (uint32_t pair = 0; pair < 2; pair++) {
        bits[2 * pair] += (uint32_t)((int32_t)(words[i + pair * LANES] << 16) >> 16);
        bits[2 * pair + 1] += (uint32_t)((int32_t)words[i + pair * LANES] >> 16);
    }
}

INLINE void four_put(int narrow, void *weights, void *remainder, uint32_t i, const uint32_t *bits)
{
    word *high = weights;
    word *low = remainder;
    for (uint32_t pair = 0; pair < 2; pair++) {
        const uint32_t at = i + pair * LANES;
        const uint32_t *two = bits + 2 * pair;
        word *first = high + (narrow ? at : 2 * at);
        word *second = narrow ? low + at : first + 1;
        *first = narrow ? (two[0] + 0x8000u) >> 16 | ((two[1] + 0x8000u) & HIGH_HALF) : two[0];
        *second = narrow ? (two[0] & 0xFFFFu) | two[1] << 16 : two[1];
    }
}

/* Codes in the lowest bytes, under the bits of TO_INTEGER, which add up to a constant. */
INLINE uint32_t four_codes(const uint32_t *codes)
{
    return codes[0] + (codes[1] << 8) + (codes[2] << 16) + (codes[3] << 24) - 0x8B400000u;
}

/* Codes above the lowest 15 bits, under the exponent of TO_FIXED. */
INLINE uint32_t four_fixed(const uint32_t *fixed)
{
    return (fixed[0] >> 15 & 0xFFu) | (fixed[1] >> 7 & 0xFF00u) | (fixed[2] << 1 & 0xFF0000u) | (fixed[3] << 9 & 0xFF000000u);
}

/* ---- the loops over a block ---- */

/* Asks for a block's weights and remainders while moments are computed: memory would be idle meanwhile. */
INLINE void block_announced(const struct fy__run *run, uint64_t at, int narrow)
{
    const char *weights = (const char *)run->weights + at * (narrow ? 2 : 4);
    for (uint32_t line = 0; line < BLOCK * (narrow ? 2 : 4); line += CACHE_LINE)
        __builtin_prefetch(weights + line, 1);
    for (uint32_t line = 0; narrow && line < BLOCK * 2; line += CACHE_LINE)
        __builtin_prefetch((const char *)run->remainder + at * 2 + line, 1);
}

/* Its new moments from the old codes and the gradients. */
INLINE void block_moments(const struct factors *factors, const struct fy__run *run, uint64_t at, int narrow_gradients,
                          struct block *block, uint32_t *most_momentum, uint32_t *most_variance)
{
    const struct factors k = *factors;
    const uint32_t words = (uint32_t)((run->first + at) / 4); /* of codes, before this block */
    const float one_m = run->momentum_scales[at / BLOCK];
    const float one_v = run->variance_scales[at / BLOCK];
    const word *momentum = (const void *)((const char *)run->momentum + at);
    const word *variance = (const void *)((const char *)run->variance + at);
    const void *gradients = (const char *)run->gradients + at * (narrow_gradients ? 2 : 4);
    uint32_t most_m = 0;
    uint32_t most_v = 0;
#pragma GCC ivdep
#pragma GCC unroll 2
    for (uint32_t i = 0; i < LANES; i++) {
        const uint32_t m = momentum[i], v = variance[i];
        const int32_t codes_m[4] = {(int32_t)(m << 24) >> 24, (int32_t)(m << 16) >> 24, (int32_t)(m << 8) >> 24,
                                    (int32_t)m >> 24};
        const int32_t codes_v[4] = {(int32_t)(v & 255u), (int32_t)(v >> 8 & 255u), (int32_t)(v >> 16 & 255u),
                                    (int32_t)(v >> 24)};
        uint32_t gradient[4];
        four_read(narrow_gradients, gradients, i, gradient);
        block->draws[i] = drawn(k.key, words + i); /* for block_codes(): it costs less beside the square roots */
        for (uint32_t b = 0; b < 4; b++) {
            const float g = float_of(gradient[b]);
            const float small = k.root_take * g;
            const float old_v = float_of(bits_of((float)codes_v[b] * one_v) << 2);
            const float new_m = doubled((float)codes_m[b] * one_m) * k.keep + k.take * g;
            const float new_v = old_v * k.beta2 + small * small;
            block->momentum[i + b * LANES] = new_m;
            block->variance[i + b * LANES] = new_v;
            block->root[i + b * LANES] = sqrtf(new_v);
            const uint32_t size_m = bits_of(new_m) & MAGNITUDE;
            const uint32_t size_v = bits_of(new_v) & MAGNITUDE;
            most_m = size_m > most_m ? size_m : most_m;
            most_v = size_v > most_v ? size_v : most_v;
        }
    }
    *most_momentum = most_m;
    *most_variance = most_v;
}

INLINE void block_weights(const struct factors *factors, const struct fy__run *run, uint64_t at, int narrow,
                          const struct block *block, uint32_t *seen)
{
    const struct factors k = *factors;
    void *weights = (char *)run->weights + at * (narrow ? 2 : 4);
    void *remainder = narrow ? run->remainder + at : NULL;
#pragma GCC ivdep
    for (uint32_t i = 0; i < LANES; i++) {
        uint32_t most = seen[i];
        uint32_t master[4];
        four_read(narrow, weights, i, master);
        if (narrow)
            four_join(remainder, i, master);
        for (uint32_t b = 0; b < 4; b++) {
            const float m = block->momentum[i + b * LANES];
            const float root = block->root[i + b * LANES];
            master[b] = bits_of(float_of(master[b]) * k.decay + (k.step * m) / (root + k.epsilon));
            most = master[b] << 1 > most ? master[b] << 1 : most;
        }
        four_put(narrow, weights, remainder, i, master);
        seen[i] = most;
    }
}

/* A word's draw is 15 bits for each of two parameters; two others take the complements. A fraction carries into the code with
 * what is drawn. That of the largest, within an ulp of 255, is rounded away by the sum. */
INLINE void block_codes(const struct fy__run *run, uint64_t at, const struct block *block, float per_m, float per_v)
{
    word *momentum = (void *)((char *)run->momentum + at);
    word *variance = (void *)((char *)run->variance + at);
#pragma GCC ivdep
    for (uint32_t i = 0; i < LANES; i++) {
        const uint32_t low = block->draws[i] & FRACTION;
        const uint32_t high = block->draws[i] >> 17;
        const uint32_t draws[4] = {low, high, low ^ FRACTION, high ^ FRACTION};
        uint32_t codes_m[4];
        uint32_t fixed_v[4];
        for (uint32_t b = 0; b < 4; b++) {
            const float root_v = float_of(bits_of(block->variance[i + b * LANES]) >> 2);
            codes_m[b] = bits_of(halved(block->momentum[i + b * LANES]) * per_m + (TO_INTEGER + 128.0f));
            fixed_v[b] = bits_of(root_v * per_v + TO_FIXED) + draws[b];
        }
        momentum[i] = four_codes(codes_m) ^ SIGNS;
        variance[i] = four_fixed(fixed_v);
    }
}

/* ---- groups and runs ---- */

/* Scales are of one code each, in the space of roots. */
INLINE void group_scales(struct group *group, uint32_t blocks, float *momentum_scales, float *variance_scales)
{
#pragma GCC ivdep
    for (uint32_t b = 0; b < blocks; b++) {
        const float m = float_of(group->most_momentum[b] >> 1);
        const float v = float_of(group->most_variance[b] >> 2);
        const float most_m = m > LEAST_ROOT ? m : m > 0.0f ? LEAST_ROOT : 0.0f;
        const float most_v = v > LEAST_ROOT ? v : v > 0.0f ? LEAST_ROOT : 0.0f;
        group->per_momentum[b] = most_m > 0.0f ? MOMENTUM_MOST / most_m : 0.0f;
        group->per_variance[b] = most_v > 0.0f ? VARIANCE_MOST / most_v : 0.0f;
        momentum_scales[b] = most_m * (1.0f / MOMENTUM_MOST);
        variance_scales[b] = most_v * (1.0f / VARIANCE_MOST);
    }
}

INLINE void group_step(const struct factors *k, const struct fy__run *run, uint64_t at, uint32_t blocks, int narrow_weights,
                       int narrow_gradients, struct group *group)
{
    assert(blocks > 0);
    assert(blocks <= GROUP);
    for (uint32_t b = 0; b < blocks; b++) {
        const uint64_t next = at + (uint64_t)(b + GROUP) * BLOCK; /* the same block of the next group */
        if (next < run->count)
            block_announced(run, next, narrow_weights);
        block_moments(k, run, at + b * BLOCK, narrow_gradients, &group->blocks[b], &group->most_momentum[b],
                      &group->most_variance[b]);
    }
    for (uint32_t b = 0; b < blocks; b++)
        block_weights(k, run, at + b * BLOCK, narrow_weights, &group->blocks[b], group->seen);
    group_scales(group, blocks, run->momentum_scales + at / BLOCK, run->variance_scales + at / BLOCK);
    for (uint32_t b = 0; b < blocks; b++)
        block_codes(run, at + b * BLOCK, &group->blocks[b], group->per_momentum[b], group->per_variance[b]);
    uint8_t *codes = (uint8_t *)run->variance + at;
    for (uint32_t i = 0; i < blocks * BLOCK; i++)
        codes[i] = codes[i] > 0 ? codes[i] : 1;
}

/* The run's parameters from `at` on. */
INLINE struct fy__run run_from(const struct fy__run *run, uint64_t at, int narrow_weights, int narrow_gradients)
{
    assert(at % BLOCK == 0);
    assert(at < run->count);
    return (struct fy__run){
        .first = run->first + at,
        .count = run->count - at,
        .weights = (char *)run->weights + at * (narrow_weights ? 2 : 4),
        .remainder = narrow_weights ? run->remainder + at : NULL,
        .momentum = (char *)run->momentum + at,
        .variance = (char *)run->variance + at,
        .momentum_scales = run->momentum_scales + at / BLOCK,
        .variance_scales = run->variance_scales + at / BLOCK,
        .gradients = (const char *)run->gradients + at * (narrow_gradients ? 2 : 4),
    };
}

/* How many masters are not finite in the weights' dtype. */
INLINE uint32_t lost_of(const struct fy__run *run, int narrow)
{
    uint32_t lost = 0;
    for (uint64_t i = 0; i < run->count; i++) {
        const uint32_t bits = bits_of(master_of(narrow, run->weights, run->remainder, i));
        lost += narrow ? lost_in_bfloat16(bits) : lost_in_float32(bits);
    }
    return lost;
}

/* Whole blocks. */
INLINE uint64_t blocks_step(const struct factors *k, const struct fy__run *run, int narrow_weights, int narrow_gradients)
{
    assert(run->count % BLOCK == 0);
    struct group group;
    memset(group.seen, 0, sizeof group.seen);
    for (uint64_t at = 0; at < run->count; at += (uint64_t)GROUP * BLOCK) {
        const uint64_t left = (run->count - at) / BLOCK;
        group_step(k, run, at, left < GROUP ? (uint32_t)left : GROUP, narrow_weights, narrow_gradients, &group);
    }
    uint32_t most = 0;
    for (uint32_t i = 0; i < LANES; i++)
        most = group.seen[i] > most ? group.seen[i] : most;
    return most < ALL_FINITE ? 0 : lost_of(run, narrow_weights);
}

/* A block that a segment ends in: a copy with zeros behind it. Its codes are whole in a tile, and those behind are nobody's. */
INLINE uint64_t part_step(const struct factors *k, const struct fy__run *run, int narrow_weights, int narrow_gradients)
{
    assert(run->count > 0);
    assert(run->count < BLOCK);
    float weights[BLOCK] = {0.0f};
    int16_t remainder[BLOCK] = {0};
    float gradients[BLOCK] = {0.0f};
    const size_t weights_size = run->count * (narrow_weights ? 2 : 4);
    const size_t remainder_size = narrow_weights ? run->count * 2 : 0;
    memcpy(weights, run->weights, weights_size);
    if (narrow_weights)
        memcpy(remainder, run->remainder, remainder_size);
    memcpy(gradients, run->gradients, run->count * (narrow_gradients ? 2 : 4));
    struct fy__run whole = *run;
    whole.count = BLOCK;
    whole.weights = weights;
    whole.remainder = remainder;
    whole.gradients = gradients;
    (void)blocks_step(k, &whole, narrow_weights, narrow_gradients); /* counts what is behind as well */
    memcpy(run->weights, weights, weights_size);
    if (narrow_weights)
        memcpy(run->remainder, remainder, remainder_size);
    return lost_of(run, narrow_weights);
}

INLINE uint64_t int8_span(const struct fy__scalars *s, const struct fy__run *run, int narrow_weights, int narrow_gradients)
{
    const struct factors k = factors_of(s);
    const uint64_t part = run->count % BLOCK;
    struct fy__run blocks = *run;
    blocks.count -= part;
    uint64_t lost = blocks_step(&k, &blocks, narrow_weights, narrow_gradients);
    if (part > 0) {
        const struct fy__run last = run_from(run, blocks.count, narrow_weights, narrow_gradients);
        lost += part_step(&k, &last, narrow_weights, narrow_gradients);
    }
    return lost;
}

/* ---- the instances: weights, gradients ---- */

#define INSTANCE(weights, gradients)                                                                            \
    FY__CLONES static uint64_t int8_##weights##_##gradients(const struct fy__scalars *s, const struct fy__run *run) \
    {                                                                                                           \
        return int8_span(s, run, weights == 16, gradients == 16);                                               \
    }
INSTANCE(32, 32)
INSTANCE(32, 16)
INSTANCE(16, 32)
INSTANCE(16, 16)

typedef uint64_t span_function(const struct fy__scalars *s, const struct fy__run *run);
static span_function *const spans[2][2] = {{int8_32_32, int8_32_16}, {int8_16_32, int8_16_16}};

uint64_t fy__adamw_int8(const struct fy__scalars *s, const struct fy__run *run, uint32_t weights, uint32_t gradients)
{
    assert(run->first % BLOCK == 0);
    assert(run->count > 0);
    assert(weights <= FY_BFLOAT16);
    assert(gradients <= FY_BFLOAT16);
    assert(weights == FY_FLOAT32 || run->remainder != NULL);
    return spans[weights][gradients](s, run);
}
