/*
 * int8_lanes.h - the arithmetic of int8_states.c: floats from codes and back, four parameters in a lane of 32 bits.
 *
 * Byte b of a block's word i of 32 bits belongs to parameter 2i + b % 2 + 32 (b / 2). So a lane holds the codes of four
 * parameters and, in 16 bits, two pairs of their weights, remainders and gradients: they are taken apart by shifts alone.
 */
#ifndef FUYOU_INT8_LANES_H
#define FUYOU_INT8_LANES_H

#include <math.h>

#include "quantised.h"

#define BLOCK FY_STATE_BLOCK
#define LANES (BLOCK / 4u)       /* words of a block's codes */
#define TO_INTEGER 12582912.0f   /* 1.5 * 2^23: a sum with it has the rounded integer, ties to even, in its lowest bits */
#define FIXED 0x43800000u        /* bits of 256: a sum with it has an integer from 0 in 8 bits above a fraction of 15 */
#define FIXED_ONE 0x43808000u    /*   of 257 */
#define FIXED_SIGNED 0x43C00000u /*   of 384: the same from -128, but for the highest of the 8 bits, which is turned */
#define INTEGER 0x7F8000u
#define FRACTION 0x7FFFu
#define MAGNITUDE 0x7FFFFFFFu
#define HIGH_HALF 0xFFFF0000u
_Static_assert(BLOCK == 64, "a block is 16 words of codes, and 32 of pairs");

/* Two or four neighbours in memory. */
typedef uint32_t __attribute__((may_alias, aligned(1))) word;

/* ---- arithmetic ---- */

/* Without an instruction for it: the product is exact in double, and a sum that is not is cut to an odd one, which lies on the
 * right side of all that a float is rounded at. */
INLINE float fused_in_double(float a, float b, float c)
{
    const double product = (double)a * b;
    const double sum = product + c;
    const double added = sum - product;
    const double lost = (product - (sum - added)) + (c - added);
    const double least = fabs(lost) > 0.0 ? 0x1p-1074 : 0.0; /* its bits are 1, or 0: so a loop is vectorised */
    uint64_t bits, lost_bits, inexact;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&lost_bits, &lost, sizeof lost_bits);
    memcpy(&inexact, &least, sizeof inexact);
    bits = (bits - (inexact & (bits ^ lost_bits) >> 63)) | inexact;
    double cut;
    memcpy(&cut, &bits, sizeof cut);
    return (float)cut;
}

INLINE float fused(int fuses, float a, float b, float c)
{
    return fuses ? __builtin_fmaf(a, b, c) : fused_in_double(a, b, c);
}

/* (x - base) * one, where the product of the latter is exact: rounded once either way. */
INLINE float above(int fuses, float x, float base, float one)
{
    return fuses ? __builtin_fmaf(x, one, -base * one) : (x - base) * one;
}

INLINE uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Bits of `ones` where the mask has ones. */
INLINE uint32_t chosen(uint32_t mask, uint32_t ones, uint32_t zeros)
{
    return (ones & mask) | (zeros & ~mask);
}

/* 32 bits that look random, for a word of a block: a block's walk begins where drawn() says, so half of that is enough. */
INLINE uint32_t draw_of(uint32_t walk, uint32_t word_of_block)
{
    uint32_t x = walk + word_of_block * 0x9E3779B9u;
    x = (x ^ (x >> 16)) * 0x735A2D97u;
    return x ^ (x >> 15);
}

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

/* Lowest bytes. */
INLINE uint32_t four_bytes(const uint32_t *x)
{
    return chosen(0xFFFFu, chosen(0xFFu, x[0], x[1] << 8), chosen(0xFF0000u, x[2] << 16, x[3] << 24));
}

/* Integers of sums with FIXED. */
INLINE uint32_t four_integers(const uint32_t *x)
{
    return chosen(0xFFFFu, chosen(0xFFu, x[0] >> 15, x[1] >> 7), chosen(0xFF0000u, x[2] << 1, x[3] << 9));
}

#endif
