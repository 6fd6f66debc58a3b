/*
 * checksum.c - a 64-bit sum of a span that can be made piece by piece, in any order.
 *
 * The span is cut into blocks of 4096 bytes. A block's hash is keyed by its position, so that a block read from the
 * wrong place counts as wrong, and the hashes are added, so that order does not matter. Inside a block, word i goes to
 * lane i mod 16; a lane adds the word and rotates. Each such step can be undone, so a difference confined to one lane
 * (a flipped bit, a torn word) always changes the result; any other slips through once in about 2^64 blocks.
 * It guards against disks, not against people.
 *
 * Additions and rotations of 64-bit lanes are what every vector unit has: one thread reads faster than memory delivers.
 */
#include <assert.h>
#include <string.h>

#include "kernels.h"

#define LANES 16u
#define STRIPE (LANES * 8u) /* bytes that all lanes take at once */
#define WIDTH 4u            /* lanes of one vector: 32 bytes suit all instruction sets */
#define VECTORS (LANES / WIDTH)

_Static_assert(FY__CHECKSUM_BLOCK % STRIPE == 0, "a block is whole stripes");

typedef uint64_t vector __attribute__((vector_size(WIDTH * 8)));

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15) /* 2^64 / golden ratio */
#define ROTATE 23                           /* odd: all 64 places are visited before one returns */

/* A bijection that spreads every bit over all others (two rounds of multiply and shift). */
static inline __attribute__((always_inline)) uint64_t mixed(uint64_t x)
{
    x ^= x >> 32;
    x *= UINT64_C(0xD6E8FEB86659FD93);
    x ^= x >> 32;
    x *= UINT64_C(0xD6E8FEB86659FD93);
    return x ^ (x >> 32);
}

static inline __attribute__((always_inline)) uint64_t block_hash(const unsigned char *data, uint64_t key)
{
    vector lanes[VECTORS];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        lanes[lane / WIDTH][lane % WIDTH] = key + GOLDEN * (lane + 1);
    }
    for (uint32_t at = 0; at < FY__CHECKSUM_BLOCK; at += STRIPE) {
        for (uint32_t k = 0; k < VECTORS; k++) {
            vector words;
            memcpy(&words, data + at + k * sizeof words, sizeof words);
            lanes[k] += words;
            lanes[k] = (lanes[k] << ROTATE) | (lanes[k] >> (64 - ROTATE));
        }
    }
    uint64_t hash = key;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        hash = (hash ^ lanes[lane / WIDTH][lane % WIDTH]) * UINT64_C(0x9FB21C651E98DF25);
        hash ^= hash >> 35;
    }
    return mixed(hash);
}

FY__CLONES static uint64_t blocks_hash(const unsigned char *data, uint64_t first_block, uint64_t blocks)
{
    assert(data != NULL || blocks == 0);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < blocks; i++) {
        sum += block_hash(data + i * FY__CHECKSUM_BLOCK, mixed((first_block + i + 1) * GOLDEN));
    }
    return sum;
}

uint64_t fy__checksum_update(uint64_t state, uint64_t position, const void *data, uint64_t size)
{
    assert(position % FY__CHECKSUM_BLOCK == 0);
    assert(data || size == 0);
    const unsigned char *bytes = data;
    const uint64_t first_block = position / FY__CHECKSUM_BLOCK;
    const uint64_t whole = size / FY__CHECKSUM_BLOCK;
    const uint64_t rest = size % FY__CHECKSUM_BLOCK;

    state += blocks_hash(bytes, first_block, whole);
    if (rest > 0) {
        /* Zeros fill the last block; its length goes into the key, so that trailing zeros count. */
        unsigned char last[FY__CHECKSUM_BLOCK] = {0};
        memcpy(last, bytes + whole * FY__CHECKSUM_BLOCK, rest);
        state += block_hash(last, mixed((first_block + whole + 1) * GOLDEN + rest));
    }
    return state;
}

FY_API uint64_t fy_checksum(const void *data, uint64_t size, uint64_t position)
{
    assert(position % FY__CHECKSUM_BLOCK == 0);
    assert(data != NULL || size == 0);
    return fy__checksum_update(0, position, data, size);
}
