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
 * A group of blocks goes through three loops, whose hand-over stays in the nearest cache. One loop would be a chain of
 * operations too long for a processor to overlap with the next one's. Products and sums are fused, here alone: the number of
 * operations binds. A processor without the instruction (most before 2013) takes five times as long.
 */
#include <assert.h>
#include <stddef.h>

#include "adamw.h"
#include "int8_lanes.h"

#define GROUP 8u /* blocks: with 16 a cache of 32 KiB loses what the next loop needs */
#define MOMENTUM_MOST 127.0f
#define VARIANCE_MOST 255.0f
#define LEAST_STEP 0x1p-100f /* a shorter one is none: its reciprocal is finite */
#define LEAST_ROOT 0x1p-119f /* of a block that is not zero: the same */
_Static_assert(FY_STATE_TILE % (GROUP * BLOCK) == 0, "a tile is whole groups");

/* What a segment's parameters are multiplied with, as few times as possible. */
struct factors {
    float decay;
    float keep;      /* of the old momentum */
    float take;      /* of the gradient */
    float beta2;
    float root_take; /* of the gradient, before it is squared */
    float per_step;  /* of sqrt(v), in the divisor: a momentum is not multiplied by the step */
    float epsilon;   /* times the correction, per step */
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
    uint32_t most[2 * GROUP * LANES]; /* bits of the largest magnitudes of words: of momenta, then of variances */
    uint32_t most_of_quarters[2 * GROUP * 4];
    float per_momentum[GROUP]; /* codes per root */
    float per_variance[GROUP];
    float seen[2][LANES]; /* sums of eight times the masters: not finite once one is not, in any dtype of weights */
};

static struct factors factors_of(const struct fy__scalars *s)
{
    const float keep = s->from_gradient ? -s->blend : 1.0f - s->blend;
    const float step = s->negative_step * s->correction;
    const int still = fabsf(step) < LEAST_STEP; /* all is divided by infinity */
    return (struct factors){
        .decay = s->decay,
        .keep = keep,
        .take = (1.0f - keep) * s->scale,
        .beta2 = s->beta2,
        .root_take = sqrtf(s->one_less_beta2) * s->scale,
        .per_step = still ? -1.0f : 1.0f / step,
        .epsilon = still ? -INFINITY : s->epsilon * s->correction / step,
        .key = s->key,
    };
}

/* ---- the loops over a block ---- */

/* Its new moments from the old codes and the gradients. Stage by stage for the four of a lane: what stands side by side then
 * does not wait for each other, and a processor looks ahead less far than one lane's work. */
INLINE void block_moments(int fuses, const struct factors *factors, const struct fy__run *run, uint64_t at,
                          int narrow_gradients, struct block *block, uint32_t *most_momentum, uint32_t *most_variance)
{
    const struct factors k = *factors;
    const uint32_t walk = drawn(k.key, (uint32_t)((run->first + at) / BLOCK));
    const float one_m = float_of(bits_of(run->momentum_scales[at / BLOCK]) & ~3u); /* 384 times that is exact */
    const float one_v = run->variance_scales[at / BLOCK];
    const word *momentum = (const void *)((const char *)run->momentum + at);
    const word *variance = (const void *)((const char *)run->variance + at);
    const void *gradients = (const char *)run->gradients + at * (narrow_gradients ? 2 : 4);
#pragma GCC ivdep
    for (uint32_t i = 0; i < LANES; i++) {
        const uint32_t codes_m = momentum[i], codes_v = variance[i];
        const uint32_t fixed_m[4] = {codes_m << 15, codes_m << 7, codes_m >> 1, codes_m >> 9};
        const uint32_t fixed_v[4] = {codes_v << 15, codes_v << 7, codes_v >> 1, codes_v >> 9};
        uint32_t gradient[4], most_m = 0, most_v = 0;
        float m[4], v[4], small[4];
        four_read(narrow_gradients, gradients, i, gradient);
        for (uint32_t b = 0; b < 4; b++)
            v[b] = above(fuses, float_of((fixed_v[b] & INTEGER) | FIXED), 256.0f, one_v);
        for (uint32_t b = 0; b < 4; b++)
            m[b] = above(fuses, float_of((fixed_m[b] & INTEGER) ^ FIXED_SIGNED), 384.0f, one_m);
        for (uint32_t b = 0; b < 4; b++)
            v[b] = float_of(bits_of(v[b]) << 2) * k.beta2;
        for (uint32_t b = 0; b < 4; b++)
            small[b] = k.root_take * float_of(gradient[b]);
        for (uint32_t b = 0; b < 4; b++)
            v[b] = fused(fuses, small[b], small[b], v[b]);
        for (uint32_t b = 0; b < 4; b++)
            m[b] = fused(fuses, doubled(m[b]), k.keep, k.take * float_of(gradient[b]));
        for (uint32_t b = 0; b < 4; b++)
            block->root[i + b * LANES] = sqrtf(v[b]);
        block->draws[i] = draw_of(walk, i); /* for block_codes(): it costs less beside the square roots */
        for (uint32_t b = 0; b < 4; b++) {
            block->variance[i + b * LANES] = v[b];
            most_v = larger(most_v, bits_of(v[b]));
        }
        most_variance[i] = most_v;
        for (uint32_t b = 0; b < 4; b++) {
            block->momentum[i + b * LANES] = m[b];
            most_m = larger(most_m, bits_of(m[b]) & MAGNITUDE);
        }
        most_momentum[i] = most_m;
    }
}

INLINE void block_weights(int fuses, const struct factors *factors, const struct fy__run *run, uint64_t at, int narrow,
                          const struct block *block, float *seen)
{
    const struct factors k = *factors;
    void *weights = (char *)run->weights + at * (narrow ? 2 : 4);
    void *remainder = narrow ? run->remainder + at : NULL;
#pragma GCC ivdep
    for (uint32_t i = 0; i < LANES; i++) {
        float sum = seen[i];
        uint32_t master[4];
        four_read(narrow, weights, i, master);
        if (narrow)
            four_join(remainder, i, master);
        for (uint32_t b = 0; b < 4; b++) {
            const float m = block->momentum[i + b * LANES];
            const float root = block->root[i + b * LANES];
            const float p = fused(fuses, float_of(master[b]), k.decay, m / fused(fuses, root, k.per_step, k.epsilon));
            master[b] = bits_of(p);
            sum = fuses ? __builtin_fmaf(p, 8.0f, sum) : p * 8.0f + sum; /* the same sort of number: more is not asked */
        }
        four_put(narrow, weights, remainder, i, master);
        seen[i] = sum;
    }
}

/* A word's draw is 15 bits for each of two parameters; two others take the complements. A fraction carries into the code with
 * what is drawn. The largest is nearer to 255 than the sum's last bit is wide, and so is exact. */
INLINE void block_codes(int fuses, const struct fy__run *run, uint64_t at, const struct block *block, float per_m, float per_v)
{
    word *momentum = (void *)((char *)run->momentum + at);
    word *variance = (void *)((char *)run->variance + at);
#pragma GCC ivdep
    for (uint32_t i = 0; i < LANES; i++) {
        const uint32_t low = block->draws[i];
        const uint32_t high = low >> 17;
        const uint32_t draws[4] = {(low & FRACTION) | FIXED, (high & FRACTION) | FIXED, (~low & FRACTION) | FIXED,
                                   (~high & FRACTION) | FIXED};
        uint32_t codes_m[4], codes_v[4];
        for (uint32_t b = 0; b < 4; b++) {
            const float root_v = float_of(bits_of(block->variance[i + b * LANES]) >> 2);
            codes_v[b] = larger(FIXED_ONE, bits_of(fused(fuses, root_v, per_v, float_of(draws[b]))));
            codes_m[b] = bits_of(fused(fuses, halved(block->momentum[i + b * LANES]), per_m, TO_INTEGER));
        }
        momentum[i] = four_bytes(codes_m);
        variance[i] = four_integers(codes_v);
    }
}

/* ---- groups and runs ---- */

/* Of every row the larger ones of its halves. */
INLINE void rows_halved(uint32_t half, const uint32_t *restrict rows, uint32_t *restrict halves)
{
    for (uint32_t row = 0; row < 2 * GROUP; row++)
        for (uint32_t i = 0; i < half; i++)
            halves[row * half + i] = larger(rows[2 * row * half + i], rows[(2 * row + 1) * half + i]);
}

INLINE uint32_t most_of_four(const uint32_t *values)
{
    return larger(larger(values[0], values[1]), larger(values[2], values[3]));
}

/* Scales are of one code each, in the space of roots. */
INLINE void group_scales(struct group *group, uint32_t blocks, float *momentum_scales, float *variance_scales)
{
    uint32_t halves[2 * GROUP * LANES / 2];
    rows_halved(LANES / 2, group->most, halves);
    rows_halved(LANES / 4, halves, group->most_of_quarters);
#pragma GCC ivdep
    for (uint32_t b = 0; b < blocks; b++) {
        const float m = float_of(most_of_four(group->most_of_quarters + 4 * b) >> 1);
        const float v = float_of(most_of_four(group->most_of_quarters + 4 * (GROUP + b)) >> 2);
        const float most_m = m > LEAST_ROOT ? m : LEAST_ROOT;
        const float most_v = v > LEAST_ROOT ? v : LEAST_ROOT;
        group->per_momentum[b] = MOMENTUM_MOST / most_m;
        group->per_variance[b] = VARIANCE_MOST / most_v;
        momentum_scales[b] = float_of(bits_of(m > 0.0f ? most_m * (1.0f / MOMENTUM_MOST) : 0.0f) & ~3u);
        variance_scales[b] = v > 0.0f ? most_v * (1.0f / VARIANCE_MOST) : 0.0f;
    }
}

INLINE void group_step(int fuses, const struct factors *k, const struct fy__run *run, uint64_t at, uint32_t blocks,
                       int narrow_weights, int narrow_gradients, struct group *group)
{
    assert(blocks > 0);
    assert(blocks <= GROUP);
    for (uint32_t b = 0; b < blocks; b++)
        block_moments(fuses, k, run, at + b * BLOCK, narrow_gradients, &group->blocks[b], group->most + b * LANES,
                      group->most + (GROUP + b) * LANES);
    group_scales(group, blocks, run->momentum_scales + at / BLOCK, run->variance_scales + at / BLOCK);
    for (uint32_t b = 0; b < blocks; b++)
        block_weights(fuses, k, run, at + b * BLOCK, narrow_weights, &group->blocks[b], group->seen[b % 2]);
    for (uint32_t b = 0; b < blocks; b++)
        block_codes(fuses, run, at + b * BLOCK, &group->blocks[b], group->per_momentum[b], group->per_variance[b]);
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
INLINE uint64_t blocks_step(int fuses, const struct factors *k, const struct fy__run *run, int narrow_weights,
                            int narrow_gradients)
{
    assert(run->count % BLOCK == 0);
    struct group group;
    memset(group.most, 0, sizeof group.most);
    memset(group.seen, 0, sizeof group.seen);
    for (uint64_t at = 0; at < run->count; at += (uint64_t)GROUP * BLOCK) {
        const uint64_t left = (run->count - at) / BLOCK;
        group_step(fuses, k, run, at, left < GROUP ? (uint32_t)left : GROUP, narrow_weights, narrow_gradients, &group);
    }
    float nothing = 0;
    for (uint32_t i = 0; i < LANES; i++)
        nothing += (group.seen[0][i] + group.seen[1][i]) * 0.0f;
    return nothing == 0.0f ? 0 : lost_of(run, narrow_weights);
}

/* A block that a segment ends in: a copy with zeros behind it. Its codes are whole in a tile, and those behind are nobody's. */
INLINE uint64_t part_step(int fuses, const struct factors *k, const struct fy__run *run, int narrow_weights,
                          int narrow_gradients)
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
    (void)blocks_step(fuses, k, &whole, narrow_weights, narrow_gradients); /* counts what is behind as well */
    memcpy(run->weights, weights, weights_size);
    if (narrow_weights)
        memcpy(run->remainder, remainder, remainder_size);
    return lost_of(run, narrow_weights);
}

INLINE uint64_t int8_span(int fuses, const struct fy__scalars *s, const struct fy__run *run, int narrow_weights,
                          int narrow_gradients)
{
    const struct factors k = factors_of(s);
    const uint64_t part = run->count % BLOCK;
    struct fy__run blocks = *run;
    blocks.count -= part;
    uint64_t lost = blocks_step(fuses, &k, &blocks, narrow_weights, narrow_gradients);
    if (part > 0) {
        const struct fy__run last = run_from(run, blocks.count, narrow_weights, narrow_gradients);
        lost += part_step(fuses, &k, &last, narrow_weights, narrow_gradients);
    }
    return lost;
}

/* ---- the instances: weights, gradients, instructions ---- */

typedef uint64_t span_function(const struct fy__scalars *s, const struct fy__run *run);

#define INSTANCE(level, target, fuses, weights, gradients)                                                                  \
    target static uint64_t level##_##weights##_##gradients(const struct fy__scalars *s, const struct fy__run *run)          \
    {                                                                                                                       \
        return int8_span(fuses, s, run, weights == 16, gradients == 16);                                                    \
    }
#define INSTANCES(level, target, fuses)                                                                                     \
    INSTANCE(level, target, fuses, 32, 32)                                                                                  \
    INSTANCE(level, target, fuses, 32, 16)                                                                                  \
    INSTANCE(level, target, fuses, 16, 32)                                                                                  \
    INSTANCE(level, target, fuses, 16, 16)                                                                                  \
    static span_function *const level[2][2] = {{level##_32_32, level##_32_16}, {level##_16_32, level##_16_16}};

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
INSTANCES(any, , 1)
#else
INSTANCES(any, , 0)
#endif
#ifdef FY__LEVELS
INSTANCES(avx2, __attribute__((target("avx2,fma"))), 1)
INSTANCES(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), 1)
#endif

static span_function *span_of(uint32_t weights, uint32_t gradients)
{
#ifdef FY__LEVELS
    const int good = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (good && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return avx512[weights][gradients];
    if (good)
        return avx2[weights][gradients];
#endif
    return any[weights][gradients];
}

uint64_t fy__adamw_int8(const struct fy__scalars *s, const struct fy__run *run, uint32_t weights, uint32_t gradients)
{
    assert(run->first % BLOCK == 0);
    assert(run->count > 0);
    assert(weights <= FY_BFLOAT16);
    assert(gradients <= FY_BFLOAT16);
    assert(weights == FY_FLOAT32 || run->remainder != NULL);
    return span_of(weights, gradients)(s, run);
}
