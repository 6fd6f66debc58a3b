/*
 * planes.h - decodes codes of four bits by lookup: the sixteen values that they stand for are taken apart into planes of bytes,
 * as a lookup among sixteen bytes is one instruction from SSSE3 on.
 */
#ifndef FUYOU_PLANES_H
#define FUYOU_PLANES_H

#include "quantised.h"

#define LEVELS 16u

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

/* Sixteen bfloat16 and sixteen floats in planes, the lowest first. */
struct planes_16 {
    bytes of[2];
};

struct planes_32 {
    bytes of[4];
};

INLINE struct planes_16 taken_apart_16(const float *values)
{
    uint16_t narrow[LEVELS];
    for (uint32_t k = 0; k < LEVELS; k++) {
        narrow[k] = narrowed(values[k]);
    }
    bytes table[2];
    memcpy(table, narrow, sizeof table);
    return (struct planes_16){{EVEN_BYTES(table[0], table[1]), ODD_BYTES(table[0], table[1])}};
}

INLINE struct planes_32 taken_apart_32(const float *values)
{
    bytes table[4];
    memcpy(table, values, sizeof table);
    const bytes even = EVEN_BYTES(table[0], table[1]), even_end = EVEN_BYTES(table[2], table[3]);
    const bytes odd = ODD_BYTES(table[0], table[1]), odd_end = ODD_BYTES(table[2], table[3]);
    return (struct planes_32){{EVEN_BYTES(even, even_end), EVEN_BYTES(odd, odd_end), ODD_BYTES(even, even_end),
                               ODD_BYTES(odd, odd_end)}};
}

INLINE bytes pairs_at(const uint8_t *packed)
{
    bytes pairs;
    memcpy(&pairs, packed, sizeof pairs);
    return pairs;
}

/* Writes 32 values: of sixteen pairs the first and the second, in turn. */
INLINE void put_16(struct planes_16 table, bytes first, bytes second, uint16_t *out)
{
    const bytes planes[4] = {looked_up(table.of[0], first), looked_up(table.of[1], first),
                             looked_up(table.of[0], second), looked_up(table.of[1], second)};
    words found[4];
    from_planes(planes, found);
    for (uint32_t k = 0; k < 4; k++) { /* one by one: a copy of all four goes by way of the stack */
        memcpy(out + 8 * k, &found[k], sizeof found[k]);
    }
}

INLINE void put_32(struct planes_32 table, bytes first, bytes second, float *out)
{
    bytes of_first[4], of_second[4];
    for (uint32_t k = 0; k < 4; k++) {
        of_first[k] = looked_up(table.of[k], first);
        of_second[k] = looked_up(table.of[k], second);
    }
    words firsts[4], seconds[4];
    from_planes(of_first, firsts);
    from_planes(of_second, seconds);
    for (uint32_t k = 0; k < 4; k++) {
        const words low = LOW_WORDS(firsts[k], seconds[k]), high = HIGH_WORDS(firsts[k], seconds[k]);
        memcpy(out + 8 * k, &low, sizeof low);
        memcpy(out + 8 * k + 4, &high, sizeof high);
    }
}

#endif
