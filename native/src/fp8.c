/*
 * fp8.c - weights in eight bits: e4m3 floats (Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 3) in squares of
 * 128 rows and columns with a float32 scale each, laid out as DeepSeek-V3's files are. A value is one float32 product.
 */
#include <errno.h>

#include "quantised.h"

#define SQUARE FY_FP8_BLOCK
#define NOT_A_NUMBER 0x7Fu
#define SIGN 0x80u

/* An exponent of 0 means denormals: multiples of 2^-9. Behind an exponent of -6 they are 2^-6 too large. */
INLINE float of_code(uint32_t code)
{
    const uint32_t bits = code & NOT_A_NUMBER;
    const float normal = float_of((bits << 20) + (120u << 23));
    const float denormal = float_of((bits << 20) + (121u << 23)) - 0.015625f;
    const uint32_t found = bits == NOT_A_NUMBER ? 0x7FC00000u : bits_of(bits < 8 ? denormal : normal);
    return float_of(found | (code & SIGN) << 24);
}

INLINE void part_16(const uint8_t *restrict codes, float scale, uint32_t count, uint16_t *restrict out)
{
    for (uint32_t i = 0; i < count; i++) {
        out[i] = narrowed(of_code(codes[i]) * scale);
    }
}

INLINE void part_32(const uint8_t *restrict codes, float scale, uint32_t count, float *restrict out)
{
    for (uint32_t i = 0; i < count; i++) {
        out[i] = of_code(codes[i]) * scale;
    }
}

FY__CLONES static void row_16(const uint8_t *codes, const float *scales, uint64_t columns, uint16_t *out)
{
    const uint64_t whole = columns / SQUARE;
    for (uint64_t square = 0; square < whole; square++) {
        part_16(codes + square * SQUARE, scales[square], SQUARE, out + square * SQUARE);
    }
    if (columns % SQUARE > 0) {
        part_16(codes + whole * SQUARE, scales[whole], (uint32_t)(columns % SQUARE), out + whole * SQUARE);
    }
}

FY__CLONES static void row_32(const uint8_t *codes, const float *scales, uint64_t columns, float *out)
{
    const uint64_t whole = columns / SQUARE;
    for (uint64_t square = 0; square < whole; square++) {
        part_32(codes + square * SQUARE, scales[square], SQUARE, out + square * SQUARE);
    }
    if (columns % SQUARE > 0) {
        part_32(codes + whole * SQUARE, scales[whole], (uint32_t)(columns % SQUARE), out + whole * SQUARE);
    }
}

FY_API int fy_fp8_decode(const uint8_t *codes, const float *scales, uint64_t rows, uint64_t columns, uint32_t dtype,
                         void *values)
{
    uint64_t count;
    if (__builtin_mul_overflow(rows, columns, &count) || dtype > FY_BFLOAT16 || !fy__array_good(values, count, 1) ||
        !fy__array_good(codes, count, 1) || !fy__array_good(scales, count, sizeof *scales)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    const uint64_t across = columns / SQUARE + (columns % SQUARE > 0);
    for (uint64_t row = 0; count > 0 && row < rows; row++) {
        const float *of_row = scales + row / SQUARE * across;
        if (dtype == FY_BFLOAT16) {
            row_16(codes + row * columns, of_row, columns, (uint16_t *)values + row * columns);
        } else {
            row_32(codes + row * columns, of_row, columns, (float *)values + row * columns);
        }
    }
    fy__denormals_restore(mode);
    return 0;
}
