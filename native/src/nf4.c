/*
 * nf4.c - frozen weights in 4.5 bits: the 4-bit NormalFloat of QLoRA (Dettmers et al. 2023, section 3), in blocks of 64 with
 * a float32 maximum each, laid out as bitsandbytes does.
 *
 * Decoding multiplies the sixteen levels by the block's maximum once, takes the products apart into planes of bytes, and
 * looks bytes up: a lookup among sixteen bytes is one instruction from SSSE3 on.
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>

#include "quantised.h"

#define BLOCK FY_NF4_BLOCK
#define LEVELS 16u
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

typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));

#if defined(__clang__) /* knows shuffles by constants alone */
INLINE bytes looked_up(bytes table, bytes places)
{
    bytes found;
    for (uint32_t i = 0; i < 16; i++) {
        found[i] = table[places[i] & 15u];
    }
    return found;
}
#define SHUFFLED(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
INLINE bytes looked_up(bytes table, bytes places)
{
    return __builtin_shuffle(table, places);
}
#define SHUFFLED(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

#define EVEN_BYTES(a, b) SHUFFLED(bytes, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_BYTES(a, b) SHUFFLED(bytes, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define LOW_BYTES(a, b) SHUFFLED(bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_BYTES(a, b) SHUFFLED(bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOW_HALVES(a, b) SHUFFLED(halves, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH_HALVES(a, b) SHUFFLED(halves, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_WORDS(a, b) SHUFFLED(words, a, b, 0, 4, 1, 5)
#define HIGH_WORDS(a, b) SHUFFLED(words, a, b, 2, 6, 3, 7)

/* Sixteen words from their four planes of bytes, the lowest first. */
INLINE void from_planes(const bytes *planes, words *out)
{
    const halves low = (halves)LOW_BYTES(planes[0], planes[1]), low_end = (halves)HIGH_BYTES(planes[0], planes[1]);
    const halves high = (halves)LOW_BYTES(planes[2], planes[3]), high_end = (halves)HIGH_BYTES(planes[2], planes[3]);
    out[0] = (words)LOW_HALVES(low, high);
    out[1] = (words)HIGH_HALVES(low, high);
    out[2] = (words)LOW_HALVES(low_end, high_end);
    out[3] = (words)HIGH_HALVES(low_end, high_end);
}

/* A block's 64 values as bfloat16: the first of two in a byte is its high half, and the low one of a word of two. */
INLINE void nf4_block_16(const uint8_t *packed, float maximum, uint16_t *out)
{
    uint16_t products[LEVELS];
    for (uint32_t k = 0; k < LEVELS; k++) {
        products[k] = narrowed(levels[k] * maximum);
    }
    bytes table[2];
    memcpy(table, products, sizeof table);
    const bytes low = EVEN_BYTES(table[0], table[1]), high = ODD_BYTES(table[0], table[1]);
    for (uint32_t half = 0; half < 2; half++) {
        bytes pairs;
        memcpy(&pairs, packed + 16 * half, sizeof pairs);
        const bytes first = pairs >> 4, second = pairs & 15;
        const bytes planes[4] = {looked_up(low, first), looked_up(high, first), looked_up(low, second),
                                 looked_up(high, second)};
        words found[4];
        from_planes(planes, found);
        for (uint32_t k = 0; k < 4; k++) { /* one by one: a copy of all four goes by way of the stack */
            memcpy(out + 32 * half + 8 * k, &found[k], sizeof found[k]);
        }
    }
}

INLINE void nf4_block_32(const uint8_t *packed, float maximum, float *out)
{
    float products[LEVELS];
    for (uint32_t k = 0; k < LEVELS; k++) {
        products[k] = levels[k] * maximum;
    }
    bytes table[4];
    memcpy(table, products, sizeof table);
    const bytes even = EVEN_BYTES(table[0], table[1]), even_end = EVEN_BYTES(table[2], table[3]);
    const bytes odd = ODD_BYTES(table[0], table[1]), odd_end = ODD_BYTES(table[2], table[3]);
    const bytes levels_of[4] = {EVEN_BYTES(even, even_end), EVEN_BYTES(odd, odd_end), ODD_BYTES(even, even_end),
                                ODD_BYTES(odd, odd_end)};
    for (uint32_t half = 0; half < 2; half++) {
        bytes pairs;
        memcpy(&pairs, packed + 16 * half, sizeof pairs);
        bytes first[4], second[4];
        for (uint32_t k = 0; k < 4; k++) {
            first[k] = looked_up(levels_of[k], pairs >> 4);
            second[k] = looked_up(levels_of[k], pairs & 15);
        }
        words firsts[4], seconds[4];
        from_planes(first, firsts);
        from_planes(second, seconds);
        for (uint32_t k = 0; k < 4; k++) {
            const words low = LOW_WORDS(firsts[k], seconds[k]), high = HIGH_WORDS(firsts[k], seconds[k]);
            memcpy(out + 32 * half + 8 * k, &low, sizeof low);
            memcpy(out + 32 * half + 8 * k + 4, &high, sizeof high);
        }
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
