/*
 * quantised.h - what the codecs of nf4.c and int8.c share: values in, values out, and a block's maximum.
 *
 * Blocks and rows are independent, so any threads may take a run of whole ones each; only a tensor's last block may be
 * short. Additions, products and comparisons are single float operations in the order of bitsandbytes' CPU kernels, so
 * the bytes are the same. A value that is not finite has no place in a block: it is counted, and the caller refuses the
 * tensor.
 */
#ifndef FUYOU_QUANTISED_H
#define FUYOU_QUANTISED_H

#include <string.h>

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define INFINITE 0x7F800000u

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* To bfloat16 as torch casts: nearest, ties to even, not a number stays one. */
INLINE uint16_t narrowed(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > INFINITE ? 0x7FC0u : rounded);
}

/* Values as floats; returns how many are not finite. */
INLINE uint32_t loaded(const void *values, uint64_t at, uint32_t count, int narrow, float *out)
{
    const uint16_t *values16 = (const uint16_t *)values + (narrow ? at : 0);
    const float *values32 = (const float *)values + (narrow ? 0 : at);
    uint32_t lost = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t bits = narrow ? (uint32_t)values16[i] << 16 : bits_of(values32[i]);
        out[i] = float_of(bits);
        lost += (bits & INFINITE) == INFINITE;
    }
    return lost;
}

/* The bits of floats without their sign are ordered as the floats are. */
INLINE float largest(const float *values, uint32_t count)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t bits = bits_of(values[i]) & 0x7FFFFFFFu;
        most = bits > most ? bits : most;
    }
    return float_of(most);
}

#endif
