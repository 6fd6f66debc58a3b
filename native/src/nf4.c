/*
 * nf4.c - frozen weights in 4.5 bits: the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, section 3), in blocks of 64 with
 * a float32 maximum each, laid out as bitsandbytes does.
 *
 * Decoding multiplies the sixteen levels by the block's maximum once and looks the products up (planes.h).
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>

#include "planes.h"

#define BLOCK FY_NF4_BLOCK
#define LEAST_MAXIMUM 1e-38f /* a block of zeros is divided by this */

_Static_assert(BLOCK == 64, "two vectors of packed bytes");

/* The levels of NormalFloat4: quantiles of a normal distribution, scaled so that the outermost are -1 and 1. */
static const float levels[LEVELS] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

/* The number of bounds below each value; values beyond -1 and 1 get the outermost levels. */
INLINE void nearest_levels(const float *scaled, uint8_t *codes)
{
    for (uint32_t i = 0; i < BLOCK; i++) {
        uint32_t code = 0;
        for (uint32_t k = 0; k + 1 < LEVELS; k++) {
            code += scaled[i] > (levels[k] + levels[k + 1]) / 2.0f;
        }
        codes[i] = (uint8_t)code;
    }
}

/* One block, or the tensor's short last one, which bitsandbytes divides by its maximum instead of multiplying by the
 * reciprocal. An odd last value is packed with the code of zero. */
INLINE uint32_t nf4_block(const void *values, uint64_t at, uint32_t count, int narrow, uint8_t *packed, float *maximum)
{
    float scaled[BLOCK] = {0};
    uint8_t codes[BLOCK];
    const uint32_t lost = loaded(values, at, count, narrow, scaled);
    const float most = largest(scaled, BLOCK);
    const float least = most > LEAST_MAXIMUM ? most : LEAST_MAXIMUM;
    *maximum = count < BLOCK ? least : most;
    if (count < BLOCK) {
        for (uint32_t i = 0; i < count; i++) {
            scaled[i] = scaled[i] / least;
        }
    } else {
        const float reciprocal = 1.0f / least;
        for (uint32_t i = 0; i < BLOCK; i++) {
            scaled[i] = scaled[i] * reciprocal;
        }
    }
    nearest_levels(scaled, codes);
    for (uint32_t i = 0; i < (count + 1) / 2; i++) {
        packed[i] = (uint8_t)((uint32_t)codes[2 * i] << 4 | codes[2 * i + 1]);
    }
    return lost;
}

INLINE uint64_t nf4_blocks(const void *values, uint64_t count, int narrow, uint8_t *packed, float *maxima)
{
    uint64_t lost = 0;
    for (uint64_t at = 0; at < count; at += BLOCK) {
        const uint32_t here = (uint32_t)(count - at < BLOCK ? count - at : BLOCK);
        lost += nf4_block(values, at, here, narrow, packed + at / 2, maxima + at / BLOCK);
    }
    return lost;
}

FY__CLONES static uint64_t nf4_encode_16(const void *values, uint64_t count, uint8_t *packed, float *maxima)
{
    return nf4_blocks(values, count, 1, packed, maxima);
}

FY__CLONES static uint64_t nf4_encode_32(const void *values, uint64_t count, uint8_t *packed, float *maxima)
{
    return nf4_blocks(values, count, 0, packed, maxima);
}

static bool nf4_good(const uint8_t *packed, const float *maxima, uint64_t count, uint32_t dtype, const void *values)
{
    return dtype <= FY_BFLOAT16 && fy__array_good(values, count, 1) &&
           fy__array_good(packed, count, sizeof *packed) && fy__array_good(maxima, count, sizeof *maxima);
}

FY_API int fy_nf4_encode(const void *values, uint64_t count, uint32_t dtype, uint8_t *packed, float *maxima,
                         uint64_t *nonfinite)
{
    if (!nonfinite || !nf4_good(packed, maxima, count, dtype, values)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    *nonfinite = dtype == FY_BFLOAT16 ? nf4_encode_16(values, count, packed, maxima)
                                      : nf4_encode_32(values, count, packed, maxima);
    fy__denormals_restore(mode);
    assert(*nonfinite <= count);
    return 0;
}

/* The first of two values in a byte is in its high half. */
INLINE void nf4_block_16(const uint8_t *packed, float maximum, uint16_t *out)
{
    float products[LEVELS];
    for (uint32_t k = 0; k < LEVELS; k++) {
        products[k] = levels[k] * maximum;
    }
    const struct planes_16 planes = taken_apart_16(products);
    for (uint32_t half = 0; half < 2; half++) {
        const bytes pairs = pairs_at(packed + 16 * half);
        put_16(planes, pairs >> 4, pairs & 15, out + 32 * half);
    }
}

INLINE void nf4_block_32(const uint8_t *packed, float maximum, float *out)
{
    float products[LEVELS];
    for (uint32_t k = 0; k < LEVELS; k++) {
        products[k] = levels[k] * maximum;
    }
    const struct planes_32 planes = taken_apart_32(products);
    for (uint32_t half = 0; half < 2; half++) {
        const bytes pairs = pairs_at(packed + 16 * half);
        put_32(planes, pairs >> 4, pairs & 15, out + 32 * half);
    }
}

FY__CLONES static void nf4_decode_16(const uint8_t *packed, const float *maxima, uint64_t blocks, uint16_t *out)
{
    for (uint64_t b = 0; b < blocks; b++) {
        nf4_block_16(packed + b * BLOCK / 2, maxima[b], out + b * BLOCK);
    }
}

FY__CLONES static void nf4_decode_32(const uint8_t *packed, const float *maxima, uint64_t blocks, float *out)
{
    for (uint64_t b = 0; b < blocks; b++) {
        nf4_block_32(packed + b * BLOCK / 2, maxima[b], out + b * BLOCK);
    }
}

FY_API int fy_nf4_decode(const uint8_t *packed, const float *maxima, uint64_t count, uint32_t dtype, void *values)
{
    if (!nf4_good(packed, maxima, count, dtype, values)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    const uint64_t whole = count / BLOCK;
    const uint32_t rest = (uint32_t)(count % BLOCK);
    const size_t item = fy__value_bytes(dtype);
    assert(whole * BLOCK + rest == count);
    assert(item * BLOCK <= sizeof(float[BLOCK]));
    uint8_t last[BLOCK / 2] = {0};
    float block[BLOCK]; /* room for either dtype */
    if (rest > 0) {
        memcpy(last, packed + whole * BLOCK / 2, (rest + 1) / 2);
    }
    if (dtype == FY_BFLOAT16) {
        nf4_decode_16(packed, maxima, whole, values);
        nf4_decode_16(last, maxima + whole, rest > 0, (uint16_t *)block);
    } else {
        nf4_decode_32(packed, maxima, whole, values);
        nf4_decode_32(last, maxima + whole, rest > 0, block);
    }
    if (rest > 0) {
        memcpy((char *)values + whole * BLOCK * item, block, rest * item);
    }
    fy__denormals_restore(mode);
    return 0;
}
