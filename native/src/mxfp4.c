/*
 * mxfp4.c - weights in 4.25 bits: e2m1 floats in blocks of 32 with a power of two each (OCP Microscaling Formats 1.0, sections
 * 5.3 and 6.1), laid out as gpt-oss' files are. All values are exact in float32 and bfloat16.
 */
#include <errno.h>

#include "planes.h"

#define BLOCK FY_MXFP4_BLOCK

_Static_assert(BLOCK == 32, "one vector of packed bytes");

/* The levels as bfloat16, and what of them is not zero. A float is the same with sixteen zeros behind. */
static const uint16_t levels[LEVELS] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0,
};
static const uint16_t nonzero[LEVELS] = {
    0, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF,
};

/* The levels times 2^(scale - 127) as planes. A scale is added to their exponents, but where there are denormals. */
INLINE struct planes_16 scaled_levels(uint8_t scale)
{
    if (scale < 2) {
        const float power = scale > 0 ? 0x1p-126f : 0x1p-127f;
        float products[LEVELS];
        for (uint32_t k = 0; k < LEVELS; k++) {
            products[k] = float_of((uint32_t)levels[k] << 16) * power;
        }
        return taken_apart_16(products);
    }
    halves table[2], mask[2];
    memcpy(table, levels, sizeof table);
    memcpy(mask, nonzero, sizeof mask);
    const uint16_t more = (uint16_t)(((uint32_t)scale - 127u) << 7);
    const bytes low = (bytes)(table[0] + (mask[0] & more)), high = (bytes)(table[1] + (mask[1] & more));
    return (struct planes_16){{EVEN_BYTES(low, high), ODD_BYTES(low, high)}};
}

/* The first of two values in a byte is in its low half. */
FY__CLONES static void decode_16(const uint8_t *packed, const uint8_t *scales, uint64_t blocks, uint16_t *out)
{
    for (uint64_t b = 0; b < blocks; b++) {
        const bytes pairs = pairs_at(packed + b * BLOCK / 2);
        put_16(scaled_levels(scales[b]), pairs & 15, pairs >> 4, out + b * BLOCK);
    }
}

FY__CLONES static void decode_32(const uint8_t *packed, const uint8_t *scales, uint64_t blocks, float *out)
{
    for (uint64_t b = 0; b < blocks; b++) {
        const bytes pairs = pairs_at(packed + b * BLOCK / 2);
        const struct planes_16 narrow = scaled_levels(scales[b]);
        const struct planes_32 wide = {{(bytes){0}, (bytes){0}, narrow.of[0], narrow.of[1]}};
        put_32(wide, pairs & 15, pairs >> 4, out + b * BLOCK);
    }
}

FY_API int fy_mxfp4_decode(const uint8_t *packed, const uint8_t *scales, uint64_t blocks, uint32_t dtype, void *values)
{
    uint64_t count;
    if (__builtin_mul_overflow(blocks, BLOCK * sizeof(float), &count) || dtype > FY_BFLOAT16 ||
        !fy__array_good(values, blocks, 1) || !fy__array_good(packed, blocks, 1) || !fy__array_good(scales, blocks, 1)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    if (dtype == FY_BFLOAT16) {
        decode_16(packed, scales, blocks, values);
    } else {
        decode_32(packed, scales, blocks, values);
    }
    fy__denormals_restore(mode);
    return 0;
}
