/*
 * kernels.h - the arithmetic of the library: leaf functions over plain memory, no threads, no state, no allocation.
 *
 * Every function here gives the same bits on every machine, for every instruction set, split and number of threads:
 * the operations on one value never depend on its neighbours, or (sums) are ordered by the position of the value.
 * The build must keep -ffp-contract=off, and nothing here may be compiled with -ffast-math.
 */
#ifndef FUYOU_KERNELS_H
#define FUYOU_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

#include "fuyou.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the store's files are little-endian, and so must the machine be"
#endif

/* FY__LEVELS: functions may be compiled for an instruction set by their attributes and chosen by hand (int8_states.c). */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(FY_NO_CLONES)
#define FY__LEVELS 1
#endif

/*
 * FY__CLONES: compile a hot loop once per x86-64 level and let the loader choose. Left out (FY_NO_CLONES, or decided
 * here) under ThreadSanitizer, whose runtime is not ready when the loader calls the resolvers, off x86-64, without
 * ifunc (musl), and for compilers that do not know the x86-64-v4 level (gcc before 12, clang).
 */
#if !defined(FY_NO_CLONES) && (!defined(__x86_64__) || !defined(__gnu_linux__) || defined(__SANITIZE_THREAD__) || \
                               defined(__clang__) || !defined(__GNUC__) || __GNUC__ < 12)
#define FY_NO_CLONES 1
#endif
#ifdef FY_NO_CLONES
#define FY__CLONES
#else
#define FY__CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif

#define FY__CHECKSUM_BLOCK 4096u  /* bytes; pieces of a span meet at multiples of it */
#define FY__SQUARES_LEAF 16384u   /* values summed with one fixed tree; leaves are added in order */

/* By every entry: whether a caller's array is there (it may be missing where it is empty) and aligned to its values. */
static inline bool fy__array_good(const void *values, uint64_t count, size_t value_bytes)
{
    return count == 0 || (values != NULL && (uintptr_t)values % value_bytes == 0);
}

static inline size_t fy__value_bytes(uint32_t dtype)
{
    return dtype == FY_BFLOAT16 ? 2 : 4;
}

/* A run of consecutive parameters of a stage. Every pointer addresses parameter `first`; remainder is unused when the
 * weights are float32. The chunk's owner must be the only thread that touches the arrays. */
struct fy__chunk {
    uint64_t first;
    uint64_t count;
    void *weights;
    int16_t *remainder;
    void *momentum;
    void *variance;
    const void *gradients;
};

/* What fy__adamw_chunk() relies on: known dtypes and flags, a step to count from, sorted segments inside the stage. */
bool fy__update_good(const fy_update *update, const fy_segment *segments);

/* Bytes of the momentum, or of the variance, of an update's first `params` parameters: of int8, whole tiles or all. */
uint64_t fy__state_bytes(const fy_update *update, uint64_t params);

/* One AdamW step over the parameters of `chunk` that lie in a segment which is not frozen; all others keep their bits.
 * Returns how many new masters are not finite in the weights' dtype. Call fy__flush_denormals_off() on the thread
 * first. */
uint64_t fy__adamw_chunk(const fy_update *update, const fy_segment *segments, const struct fy__chunk *chunk);

/* Denormals are kept, as torch keeps them by default: a thread inherits its creator's mode, and a flushed variance
 * would change bits. For threads the library owns. */
void fy__flush_denormals_off(void);

/* The same for a caller's thread: returns the old mode, which fy__denormals_restore() puts back. */
uint64_t fy__denormals_keep(void);
void fy__denormals_restore(uint64_t mode);

/* The sum of a span grows piece by piece, in any order and on any thread: start at 0, add every piece once. `position`
 * is the piece's offset in the span, a multiple of FY__CHECKSUM_BLOCK; only the span's last piece may have a size that
 * is not. Partial sums made from 0 may also be added to each other. */
uint64_t fy__checksum_update(uint64_t state, uint64_t position, const void *data, uint64_t size);

#endif
