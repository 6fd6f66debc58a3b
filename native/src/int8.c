/*
 * int8.c - eight bits a value, laid out as bitsandbytes does: rows of int8 with a float32 maximum each (Dettmers et al. 2022,
 * LLM.int8(), section 2), and the dynamic codes that double quantisation keeps the maxima of nf4 in.
 */
#include <assert.h>
#include <errno.h>

#include "quantised.h"

#define DYNAMIC FY_DYNAMIC_BLOCK
#define PIECE 64u              /* values of a row that are worked on at once */
#define STEPS 65535.0f         /* dynamic codes are looked up at one of 65,536 places between -1 and 1 */
#define LARGEST 0x1.fffffep127f
#define ONE_127TH 7.874015718698502e-3f
#define TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even */

/* ---- dynamic codes ---- */

/* The code of the level nearest to one of 65,536 places: how bitsandbytes' CPU kernel looks it up. */
INLINE uint8_t nearest_code(float scaled, const float *table)
{
    const float inside = scaled > 1.0f ? 1.0f : scaled > -1.0f ? scaled : -1.0f; /* so is what is not a number */
    const uint32_t place = (uint32_t)((inside + 1.0f) * 0.5f * STEPS + 0.5f);
    const float value = -1.0f + 2.0f * (float)place / STEPS;
    uint32_t low = 0;
    for (uint32_t width = 128; width > 0; width /= 2) {
        const uint32_t at = low + width - 1;
        low += 0.5f * (table[at] + table[at + 1]) < value ? width : 0;
    }
    return (uint8_t)low;
}

static bool dynamic_good(const float *values, uint64_t count, const float *table, const uint8_t *codes, const float *maxima)
{
    return table != NULL && fy__array_good(table, FY_DYNAMIC_LEVELS, sizeof *table) &&
           fy__array_good(values, count, sizeof *values) && fy__array_good(codes, count, sizeof *codes) &&
           fy__array_good(maxima, count, sizeof *maxima);
}

FY_API int fy_dynamic_encode(const float *values, uint64_t count, const float *table, uint8_t *codes, float *maxima,
                             uint64_t *nonfinite)
{
    if (!nonfinite || !dynamic_good(values, count, table, codes, maxima)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    uint64_t lost = 0;
    for (uint64_t at = 0; at < count; at += DYNAMIC) {
        float block[DYNAMIC];
        const uint32_t here = (uint32_t)(count - at < DYNAMIC ? count - at : DYNAMIC);
        const uint32_t bad = loaded(values, at, here, 0, block);
        const float most = bad > 0 ? 0.0f : largest(block, here);
        lost += bad;
        maxima[at / DYNAMIC] = most;
        const float reciprocal = most > 0.0f ? 1.0f / most : 0.0f;
        for (uint32_t i = 0; i < here; i++) {
            codes[at + i] = most > 0.0f ? nearest_code(block[i] * reciprocal, table) : 0;
        }
    }
    fy__denormals_restore(mode);
    assert(lost <= count);
    *nonfinite = lost;
    return 0;
}

FY_API int fy_dynamic_decode(const uint8_t *codes, const float *maxima, uint64_t count, const float *table,
                             float offset, float *values)
{
    if (!dynamic_good(values, count, table, codes, maxima)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    for (uint64_t i = 0; i < count; i++) {
        values[i] = table[codes[i]] * maxima[i / DYNAMIC] + offset;
    }
    fy__denormals_restore(mode);
    return 0;
}

/* ---- rows of int8 ---- */

INLINE uint64_t int8_row(const void *values, uint64_t at, uint64_t columns, int narrow, int8_t *codes, float *maximum)
{
    float piece[PIECE];
    uint64_t lost = 0;
    float most = 0.0f;
    for (uint64_t c = 0; c < columns; c += PIECE) {
        const uint32_t here = (uint32_t)(columns - c < PIECE ? columns - c : PIECE);
        lost += loaded(values, at + c, here, narrow, piece);
        const float found = largest(piece, here);
        most = found > most ? found : most;
    }
    *maximum = most;
    const float exact = lost == 0 && most > 0.0f ? 1.0f / most * 127.0f : 0.0f; /* in this order */
    const float scale = exact <= LARGEST ? exact : 0.0f; /* below 4e-37 all of a row is zero: no integer holds infinity */
    for (uint64_t c = 0; c < columns; c += PIECE) {
        const uint32_t here = (uint32_t)(columns - c < PIECE ? columns - c : PIECE);
        const uint32_t bad = loaded(values, at + c, here, narrow, piece);
        for (uint32_t i = 0; i < here; i++) {
            const float rounded = (piece[i] * scale + TO_INTEGER) - TO_INTEGER;
            codes[c + i] = (int8_t)(bad > 0 ? 0.0f : rounded);
        }
    }
    return lost;
}

FY__CLONES static uint64_t int8_encode_16(const void *values, uint64_t at, uint64_t columns, int8_t *codes, float *maximum)
{
    return int8_row(values, at, columns, 1, codes, maximum);
}

FY__CLONES static uint64_t int8_encode_32(const void *values, uint64_t at, uint64_t columns, int8_t *codes, float *maximum)
{
    return int8_row(values, at, columns, 0, codes, maximum);
}

/* `count`: of all values. */
static bool int8_good(const int8_t *codes, const float *maxima, uint64_t rows, uint64_t columns, uint32_t dtype,
                      const void *values, uint64_t *count)
{
    return !__builtin_mul_overflow(rows, columns, count) && dtype <= FY_BFLOAT16 &&
           fy__array_good(values, *count, 1) && fy__array_good(codes, *count, sizeof *codes) &&
           fy__array_good(maxima, *count, sizeof *maxima);
}

FY_API int fy_int8_encode(const void *values, uint64_t rows, uint64_t columns, uint32_t dtype, int8_t *codes,
                          float *maxima, uint64_t *nonfinite)
{
    uint64_t count;
    if (!nonfinite || !int8_good(codes, maxima, rows, columns, dtype, values, &count)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    uint64_t lost = 0;
    for (uint64_t row = 0; count > 0 && row < rows; row++) {
        const uint64_t at = row * columns;
        lost += dtype == FY_BFLOAT16 ? int8_encode_16(values, at, columns, codes + at, maxima + row)
                                     : int8_encode_32(values, at, columns, codes + at, maxima + row);
    }
    fy__denormals_restore(mode);
    assert(lost <= count);
    *nonfinite = lost;
    return 0;
}

FY__CLONES static void int8_decode_16(const int8_t *restrict codes, float maximum, uint64_t columns,
                                      uint16_t *restrict out)
{
    for (uint64_t i = 0; i < columns; i++) {
        out[i] = narrowed((float)codes[i] * maximum * ONE_127TH);
    }
}

FY__CLONES static void int8_decode_32(const int8_t *restrict codes, float maximum, uint64_t columns,
                                      float *restrict out)
{
    for (uint64_t i = 0; i < columns; i++) {
        out[i] = (float)codes[i] * maximum * ONE_127TH;
    }
}

FY_API int fy_int8_decode(const int8_t *codes, const float *maxima, uint64_t rows, uint64_t columns, uint32_t dtype,
                          void *values)
{
    uint64_t count;
    if (!int8_good(codes, maxima, rows, columns, dtype, values, &count)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    for (uint64_t row = 0; count > 0 && row < rows; row++) {
        const uint64_t at = row * columns;
        if (dtype == FY_BFLOAT16) {
            int8_decode_16(codes + at, maxima[row], columns, (uint16_t *)values + at);
        } else {
            int8_decode_32(codes + at, maxima[row], columns, (float *)values + at);
        }
    }
    fy__denormals_restore(mode);
    return 0;
}
