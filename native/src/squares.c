/*
 * squares.c - the sum of squares behind the gradient norm, and the floating-point mode of a thread.
 *
 * The order of additions is part of the result, so it is fixed: a leaf of 16384 values goes through 16 lanes in double
 * (the lane follows from i mod 16), the lanes are folded in halves, and leaves are added one after the other. So the sum of a
 * span equals the sums of its leaves added in order, whoever computed each of them; two halves of several leaves added
 * up are another order. The square of a float is exact in double. Leaves of one call start at its first value.
 */
#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"

#define LANES 16u

_Static_assert(FY__SQUARES_LEAF % LANES == 0, "every lane gets the same number of values");
_Static_assert(LANES == 16, "the fold at the end of a leaf is written out for sixteen");

#if defined(__x86_64__)
#include <xmmintrin.h>
#define MXCSR_FLUSH_TO_ZERO 0x8000u
#define MXCSR_DENORMALS_ARE_ZERO 0x0040u

uint64_t fy__denormals_keep(void)
{
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode & ~(MXCSR_FLUSH_TO_ZERO | MXCSR_DENORMALS_ARE_ZERO));
    assert((_mm_getcsr() & (MXCSR_FLUSH_TO_ZERO | MXCSR_DENORMALS_ARE_ZERO)) == 0);
    return mode;
}

void fy__denormals_restore(uint64_t mode)
{
    assert(mode <= UINT32_MAX); /* what fy__denormals_keep returned */
    _mm_setcsr((unsigned int)mode);
}
#elif defined(__aarch64__)
#define FPCR_FLUSH_TO_ZERO (UINT64_C(1) << 24)

uint64_t fy__denormals_keep(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode & ~FPCR_FLUSH_TO_ZERO));
    return mode;
}

void fy__denormals_restore(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
#else
uint64_t fy__denormals_keep(void)
{
    return 0; /* no such mode, or none that a program sets by habit */
}

void fy__denormals_restore(uint64_t mode)
{
    (void)mode;
}
#endif

void fy__flush_denormals_off(void)
{
    (void)fy__denormals_keep(); /* the thread is ours: nobody wants the old mode back */
}

/* Four lanes. GCC's vector types make the order of additions explicit and leave the instructions to each clone. */
#define WIDTH 4u
#define VECTORS (LANES / WIDTH)
typedef double doubles __attribute__((vector_size(WIDTH * 8)));
typedef float floats __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t words __attribute__((vector_size(WIDTH * 4)));

#define EXPONENT 0x7F800000u /* all ones: infinite or not a number */

/* Four of a row's sixteen values. A pair of bfloat16 is taken apart in place, even ones to one vector and odd ones to
 * the next: any fixed lane will do, and nothing has to be shuffled. */
static inline __attribute__((always_inline)) words loaded(const void *row, uint32_t k, int narrow)
{
    const uint32_t at = narrow ? k / 2 : k;
    words bits;
    memcpy(&bits, (const char *)row + at * sizeof bits, sizeof bits);
    if (!narrow) {
        return bits;
    }
    return k % 2 == 0 ? bits << 16 : bits & 0xFFFF0000u;
}

/* One leaf, or the shorter last one: what is missing from its last row of lanes counts as zeros. */
static inline __attribute__((always_inline)) double leaf_sum(const void *values, uint32_t count, int narrow,
                                                             uint32_t *lost)
{
    doubles sums[VECTORS] = {0};
    words bad = {0};
    const uint32_t whole = count - count % LANES;
    const size_t value_bytes = narrow ? 2 : 4;
    unsigned char last[LANES * 4] = {0};
    memcpy(last, (const char *)values + whole * value_bytes, (count - whole) * value_bytes);

    for (uint32_t i = 0; i <= whole; i += LANES) {
        const void *row = i < whole ? (const char *)values + i * value_bytes : (const char *)last;
        for (uint32_t k = 0; k < VECTORS; k++) {
            const words bits = loaded(row, k, narrow);
            floats value;
            memcpy(&value, &bits, sizeof value);
            const doubles wide = __builtin_convertvector(value, doubles);
            sums[k] += wide * wide;
            bad -= (words)((bits & EXPONENT) == EXPONENT); /* true is all ones: minus one */
        }
    }
    const doubles folded = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    *lost = bad[0] + bad[1] + bad[2] + bad[3];
    return (folded[0] + folded[2]) + (folded[1] + folded[3]);
}

FY__CLONES static double leaf_sum_16(const uint16_t *values, uint32_t count, uint32_t *lost)
{
    return leaf_sum(values, count, 1, lost);
}

FY__CLONES static double leaf_sum_32(const float *values, uint32_t count, uint32_t *lost)
{
    return leaf_sum(values, count, 0, lost);
}

FY_API int fy_sum_squares(const void *values, uint64_t count, uint32_t dtype, double *sum, uint64_t *nonfinite)
{
    if (!sum || !nonfinite || dtype > FY_BFLOAT16 || !fy__array_good(values, count, 1)) {
        return -EINVAL;
    }
    const uint64_t mode = fy__denormals_keep();
    double total = 0.0;
    uint64_t lost = 0;
    for (uint64_t at = 0; at < count; at += FY__SQUARES_LEAF) {
        const uint32_t leaf = (uint32_t)(count - at < FY__SQUARES_LEAF ? count - at : FY__SQUARES_LEAF);
        uint32_t leaf_lost = 0;
        total += dtype == FY_BFLOAT16 ? leaf_sum_16((const uint16_t *)values + at, leaf, &leaf_lost)
                                      : leaf_sum_32((const float *)values + at, leaf, &leaf_lost);
        assert(leaf_lost <= leaf);
        lost += leaf_lost;
    }
    fy__denormals_restore(mode);
    *sum = total;
    *nonfinite = lost;
    return 0;
}
