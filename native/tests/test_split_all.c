/*
 * test_split_all - every one of the 2^32 float32 patterns: what stays finite as bfloat16 comes back bit for bit, the
 * rest is counted. Under a sanitizer, one block in 64, spread over the whole range.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels.h"

#define BLOCK 65536u
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STRIDE 64u
#else
#define STRIDE 1u
#endif

static float master[BLOCK];
static float rebuilt[BLOCK];
static uint16_t weights[BLOCK];
static int16_t remainder16[BLOCK];

static int check_block(uint32_t first)
{
    uint64_t expected_lost = 0;
    for (uint32_t i = 0; i < BLOCK; i++) {
        const uint32_t bits = first + i;
        memcpy(&master[i], &bits, sizeof bits);
        expected_lost += (bits & 0x7FFFFFFFu) >= 0x7F7F8000u; /* half an ulp above the largest bfloat16, and up */
    }
    uint64_t lost = 0;
    if (fy_split(master, weights, remainder16, BLOCK, &lost) != 0 || lost != expected_lost) {
        fprintf(stderr, "block %08x: %llu lost, expected %llu\n", first, (unsigned long long)lost,
                (unsigned long long)expected_lost);
        return 1;
    }
    if (fy_join(weights, remainder16, rebuilt, BLOCK) != 0) {
        return 1;
    }
    if (memcmp(master, rebuilt, sizeof master) == 0) {
        return 0;
    }
    for (uint32_t i = 0; i < BLOCK; i++) {
        const uint32_t bits = first + i;
        if ((bits & 0x7FFFFFFFu) < 0x7F7F8000u && memcmp(&master[i], &rebuilt[i], 4) != 0) {
            fprintf(stderr, "pattern %08x did not come back\n", bits);
            return 1;
        }
    }
    return 0;
}

int main(void)
{
    for (uint32_t block = 0; block < UINT32_MAX / BLOCK + 1; block += STRIDE) {
        if (check_block(block * BLOCK)) {
            return 1;
        }
    }
    if (check_block(0x7F7F0000u) || check_block(0xFF7F0000u)) { /* the edges, whatever the stride */
        return 1;
    }
    return 0;
}
