/*
 * adamw.h - what the update's loops share: its scalars, one parameter's step, and how a master is taken apart.
 */
#ifndef FUYOU_ADAMW_H
#define FUYOU_ADAMW_H

#include <math.h>

#include "quantised.h"

_Static_assert(sizeof(float) == 4 && sizeof(double) == 8, "IEEE 754 binary32 and binary64");

/* The scalars of one segment, rounded as torch rounds them. */
struct fy__scalars {
    float scale;         /* multiplies the gradient */
    float decay;         /* 1 - lr * weight_decay */
    float blend;         /* lerp weight: 1 - beta1, or -beta1 when from_gradient */
    int from_gradient;   /* lerp starts at the gradient (beta1 <= 0.5), as torch's does, to stay monotonic */
    float beta2;
    float one_less_beta2;
    float correction;    /* sqrt(1 - beta2^step) */
    float epsilon;
    float negative_step; /* -lr / (1 - beta1^step) */
    uint32_t key;        /* of the draws that small states are rounded with */
    float beta1;         /* of Lion, as it is */
    float one_less_beta1;
    float negative_lr;
};

/* 1 when the master is not finite, or becomes infinite when rounded to bfloat16. */
INLINE uint32_t lost_in_bfloat16(uint32_t bits)
{
    return ((bits & 0x7FFFFFFFu) + 0x8000u) >= 0x7F800000u;
}

INLINE uint32_t lost_in_float32(uint32_t bits)
{
    return (bits & 0x7F800000u) == 0x7F800000u;
}

INLINE uint32_t joined(uint16_t weight, int16_t remainder)
{
    return ((uint32_t)weight << 16) + (uint32_t)(int32_t)remainder;
}

/* A run of parameters of one segment: momentum and variance are the codes of int8 states, `*_scales` those of their blocks. */
struct fy__run {
    uint64_t first; /* in the stage: keys the draws */
    uint64_t count;
    void *weights;
    int16_t *remainder;
    void *momentum;
    void *variance;
    float *momentum_scales;
    float *variance_scales;
    const void *gradients;
};

/* 32 bits that look random, to round states with: a multiplicative walk over the indices, and a finaliser with full avalanche. */
INLINE uint32_t drawn(uint32_t key, uint32_t index)
{
    uint32_t x = index * 0x9E3779B9u + key;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = (x ^ (x >> 15)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

/* One parameter's step. */
INLINE void adamw_step(const struct fy__scalars *k, float gradient, float *master, float *momentum, float *variance)
{
    const float g = gradient * k->scale;
    const float p = *master * k->decay;
    const float m = (k->from_gradient ? g : *momentum) + k->blend * (g - *momentum);
    const float v = *variance * k->beta2 + (k->one_less_beta2 * g) * g;
    *momentum = m;
    *variance = v;
    *master = p + (k->negative_step * m) / (sqrtf(v) / k->correction + k->epsilon);
}

/* `narrow` is a constant in every instance: the branches on it are gone before a loop is vectorised. */
INLINE float master_of(int narrow, const void *restrict weights, const int16_t *restrict remainder, uint64_t i)
{
    return narrow ? float_of(joined(((const uint16_t *)weights)[i], remainder[i])) : ((const float *)weights)[i];
}

/* Returns 1 where the new master is lost in the weights' dtype. */
INLINE uint32_t master_put(int narrow, void *restrict weights, int16_t *restrict remainder, uint64_t i, float master)
{
    const uint32_t bits = bits_of(master);
    if (narrow) {
        ((uint16_t *)weights)[i] = (uint16_t)((bits + 0x8000u) >> 16);
        remainder[i] = (int16_t)(uint16_t)bits;
        return lost_in_bfloat16(bits);
    }
    ((float *)weights)[i] = master;
    return lost_in_float32(bits);
}

INLINE float gradient_of(int narrow, const void *restrict gradients, uint64_t i)
{
    return narrow ? float_of((uint32_t)((const uint16_t *)gradients)[i] << 16) : ((const float *)gradients)[i];
}

/* Lion, in float32 (lion.c). */
uint64_t fy__lion(const struct fy__scalars *s, const struct fy__run *run, uint32_t weights, uint32_t gradients);

/* AdamW with states in bfloat16 or int8 (small_states.c). Dtypes are those of enum fy_dtype. */
uint64_t fy__adamw_small(const struct fy__scalars *s, const struct fy__run *run, uint32_t states, uint32_t weights,
                         uint32_t gradients);

/* With states in int8 (int8_states.c). The run begins with a block, and all codes of the block that it ends in are its own. */
uint64_t fy__adamw_int8(const struct fy__scalars *s, const struct fy__run *run, uint32_t weights, uint32_t gradients);

#endif
