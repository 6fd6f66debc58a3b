/*
 * test_levels - the arithmetic gives the same bits on every instruction set this machine has: the library as built
 * (clones or not) against copies of its sources compiled for one x86-64 level each. CMakeLists.txt renames their
 * public functions.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "int8_lanes.h"
#include "kernels.h"

#define COUNT 20479u /* odd: bodies and tails of every vector width */
#define STEPS 4u
#define BLOCKS (COUNT / 32u) /* of mxfp4 */
#define SIDE 143u            /* of a matrix in fp8 */

struct level {
    const char *name;
    int usable;
    int (*adamw)(const fy_update *, const fy_segment *, void *, int16_t *, void *, void *, const void *, uint64_t *);
    int (*sum_squares)(const void *, uint64_t, uint32_t, double *, uint64_t *);
    int (*split)(const float *, uint16_t *, int16_t *, uint64_t, uint64_t *);
    int (*join)(const uint16_t *, const int16_t *, float *, uint64_t);
    uint64_t (*checksum)(const void *, uint64_t, uint64_t);
    int (*nf4_encode)(const void *, uint64_t, uint32_t, uint8_t *, float *, uint64_t *);
    int (*nf4_decode)(const uint8_t *, const float *, uint64_t, uint32_t, void *);
    int (*int8_encode)(const void *, uint64_t, uint64_t, uint32_t, int8_t *, float *, uint64_t *);
    int (*int8_decode)(const int8_t *, const float *, uint64_t, uint64_t, uint32_t, void *);
    int (*mxfp4_decode)(const uint8_t *, const uint8_t *, uint64_t, uint32_t, void *);
    int (*fp8_decode)(const uint8_t *, const float *, uint64_t, uint64_t, uint32_t, void *);
};

#define DECLARE(level)                                                                                                \
    int fy_adamw_##level(const fy_update *, const fy_segment *, void *, int16_t *, void *, void *, const void *,      \
                         uint64_t *);                                                                                 \
    int fy_sum_squares_##level(const void *, uint64_t, uint32_t, double *, uint64_t *);                               \
    int fy_split_##level(const float *, uint16_t *, int16_t *, uint64_t, uint64_t *);                                 \
    int fy_join_##level(const uint16_t *, const int16_t *, float *, uint64_t);                                        \
    uint64_t fy_checksum_##level(const void *, uint64_t, uint64_t);                                                   \
    int fy_nf4_encode_##level(const void *, uint64_t, uint32_t, uint8_t *, float *, uint64_t *);                      \
    int fy_nf4_decode_##level(const uint8_t *, const float *, uint64_t, uint32_t, void *);                            \
    int fy_int8_encode_##level(const void *, uint64_t, uint64_t, uint32_t, int8_t *, float *, uint64_t *);            \
    int fy_int8_decode_##level(const int8_t *, const float *, uint64_t, uint64_t, uint32_t, void *);                  \
    int fy_mxfp4_decode_##level(const uint8_t *, const uint8_t *, uint64_t, uint32_t, void *);                        \
    int fy_fp8_decode_##level(const uint8_t *, const float *, uint64_t, uint64_t, uint32_t, void *)

#define LEVEL(label, level, test)                                                                                     \
    {                                                                                                                 \
        .name = label, .usable = test, .adamw = fy_adamw_##level, .sum_squares = fy_sum_squares_##level,              \
        .split = fy_split_##level, .join = fy_join_##level, .checksum = fy_checksum_##level,                          \
        .nf4_encode = fy_nf4_encode_##level, .nf4_decode = fy_nf4_decode_##level,                                     \
        .int8_encode = fy_int8_encode_##level, .int8_decode = fy_int8_decode_##level,                                 \
        .mxfp4_decode = fy_mxfp4_decode_##level, .fp8_decode = fy_fp8_decode_##level                                  \
    }

#ifdef FY_TEST_LEVELS
DECLARE(v2);
DECLARE(v3);
DECLARE(v4);
#endif

/* Everything the kernels wrote, in one place to compare. */
struct outcome {
    float master[COUNT];
    uint16_t weights[COUNT];
    int16_t remainder16[COUNT];
    float momentum[2][COUNT];
    float variance[2][COUNT];
    float small_masters[2][COUNT];
    float small_momentum[2][COUNT]; /* floats for their alignment; bfloat16 and int8 take less */
    float small_variance[2][COUNT];
    float lion_master[COUNT];
    float lion_momentum[COUNT];
    double sums[2];
    uint8_t packed[2][(COUNT + 1) / 2];
    int8_t codes[2][COUNT];
    float maxima[2][COUNT / 64 + 1];
    float row_maximum[2];
    float decoded32[2][COUNT];
    uint16_t decoded16[2][COUNT];
    float read32[2][COUNT]; /* mxfp4 and fp8 */
    uint16_t read16[2][COUNT];
    uint64_t checksum;
    uint64_t lost;
};

static float gradients32[COUNT];
static uint16_t gradients16[COUNT];

/* A fixed sequence of floats of many sizes, signs and exponents. */
static float next_float(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const uint32_t mantissa = (uint32_t)(*state >> 40);
    const int exponent = (int)((*state >> 33) % 24);
    const float value = (float)mantissa / 16777216.0f / (float)(1u << exponent);
    return (*state >> 32) & 1 ? -value : value;
}

/* The gradients as nf4 and as one row of int8, of either dtype and back to either. */
static int quantised(const struct level *level, struct outcome *out)
{
    const void *const values[2] = {gradients32, gradients16};
    const uint32_t dtypes[2] = {FY_FLOAT32, FY_BFLOAT16};
    uint64_t lost = 0;
    int bad = 0;
    for (uint32_t i = 0; i < 2; i++) {
        bad |= level->nf4_encode(values[i], COUNT, dtypes[i], out->packed[i], out->maxima[i], &lost);
        bad |= level->int8_encode(values[i], 1, COUNT, dtypes[i], out->codes[i], &out->row_maximum[i], &lost);
    }
    bad |= level->nf4_decode(out->packed[0], out->maxima[0], COUNT, FY_FLOAT32, out->decoded32[0]);
    bad |= level->nf4_decode(out->packed[1], out->maxima[1], COUNT, FY_BFLOAT16, out->decoded16[0]);
    bad |= level->int8_decode(out->codes[0], &out->row_maximum[0], 1, COUNT, FY_FLOAT32, out->decoded32[1]);
    bad |= level->int8_decode(out->codes[1], &out->row_maximum[1], 1, COUNT, FY_BFLOAT16, out->decoded16[1]);
    const float squares[4] = {0.3f, -1e-3f, 2.5f, 7e-20f};
    uint8_t powers[BLOCKS];
    for (uint32_t i = 0; i < BLOCKS; i++) {
        powers[i] = (uint8_t)(i * 37u % 253u);
    }
    const uint8_t *bytes = (const uint8_t *)out->codes[0];
    bad |= level->mxfp4_decode(out->packed[0], powers, BLOCKS, FY_FLOAT32, out->read32[0]);
    bad |= level->mxfp4_decode(out->packed[0], powers, BLOCKS, FY_BFLOAT16, out->read16[0]);
    bad |= level->fp8_decode(bytes, squares, SIDE, SIDE, FY_FLOAT32, out->read32[1]);
    bad |= level->fp8_decode(bytes, squares, SIDE, SIDE, FY_BFLOAT16, out->read16[1]);
    return bad;
}

/* The same step with the small states, on float32 masters and gradients. */
static int small_states(const struct level *level, fy_update update, const fy_segment *segments, struct outcome *out)
{
    const uint32_t dtypes[2] = {FY_BFLOAT16, FY_INT8};
    int bad = 0;
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t lost = 0;
        update.states_dtype = dtypes[i];
        bad |= level->adamw(&update, segments, out->small_masters[i], NULL, out->small_momentum[i],
                            out->small_variance[i], gradients32, &lost);
        out->lost += lost;
    }
    return bad;
}

/* The same step by Lion. */
static int lion(const struct level *level, fy_update update, const fy_segment *segments, struct outcome *out)
{
    uint64_t lost = 0;
    update.rule = FY_LION;
    const int bad = level->adamw(&update, segments, out->lion_master, NULL, out->lion_momentum, NULL, gradients32, &lost);
    out->lost += lost;
    return bad;
}

static int run(const struct level *level, struct outcome *out)
{
    uint64_t state = 42;
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < COUNT; i++) {
        out->master[i] = next_float(&state);
        out->small_masters[0][i] = out->small_masters[1][i] = out->master[i];
        out->lion_master[i] = out->master[i];
    }
    int bad = level->split(out->master, out->weights, out->remainder16, COUNT, &out->lost);
    const fy_segment segments[2] = {
        {.first = 0, .count = 1001, .weight_decay = 0.1f, .lr_scale = 1.0f},
        {.first = 1024, .count = COUNT - 1024, .weight_decay = 0.0f, .lr_scale = 0.3f},
    };
    for (uint64_t step = 1; step <= STEPS; step++) {
        for (uint32_t i = 0; i < COUNT; i++) {
            gradients32[i] = next_float(&state);
            gradients16[i] = (uint16_t)(0x3C00u + (i * 7u) % 1024u + (i % 2 ? 0x8000u : 0u));
        }
        fy_update update = {.params = COUNT, .weights_dtype = FY_FLOAT32, .gradients_dtype = FY_FLOAT32, .lr = 1e-2,
                            .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .gradient_scale = 0.7, .step = step,
                            .segment_count = 2};
        uint64_t lost = 0;
        bad |= level->adamw(&update, segments, out->master, NULL, out->momentum[0], out->variance[0], gradients32,
                            &lost);
        bad |= small_states(level, update, segments, out);
        bad |= lion(level, update, segments, out);
        update.weights_dtype = FY_BFLOAT16;
        update.gradients_dtype = step % 2 ? FY_BFLOAT16 : FY_FLOAT32;
        bad |= level->adamw(&update, segments, out->weights, out->remainder16, out->momentum[1], out->variance[1],
                            step % 2 ? (const void *)gradients16 : (const void *)gradients32, &lost);
        out->lost += lost;
    }
    uint64_t lost = 0;
    bad |= level->sum_squares(gradients32, COUNT, FY_FLOAT32, &out->sums[0], &lost);
    bad |= level->sum_squares(gradients16, COUNT, FY_BFLOAT16, &out->sums[1], &lost);
    bad |= quantised(level, out);
    out->checksum = level->checksum(out->momentum, sizeof out->momentum, 0);
    return bad;
}

/* Sums that lie nearer to the middle between two floats than a double is fine. */
static int is_fused_once(void)
{
    for (uint32_t i = 0; i < 16; i++) {
        const float tiny = i & 1 ? 0x1p-20f : -0x1p-20f;
        const float c = (i & 2 ? 1.0f : 1.0f + 0x1p-23f) * (i & 4 ? 1.0f : -1.0f);
        const float a = (i & 8 ? 0x1p-12f : -0x1p-12f) * (1.0f + 0x1p-20f);
        const float b = 0x1p-12f * (1.0f + tiny);
        const float ours = fused(0, a, b, c);
        const float exact = fmaf(a, b, c);
        if (memcmp(&ours, &exact, sizeof ours) != 0) {
            fprintf(stderr, "%a * %a + %a is %a, not %a\n", (double)a, (double)b, (double)c, (double)exact, (double)ours);
            return 0;
        }
    }
    return 1;
}

int main(void)
{
    if (!is_fused_once()) {
        return 1;
    }
#ifdef FY_TEST_LEVELS
    const struct level levels[] = {
        LEVEL("x86-64-v2", v2, __builtin_cpu_supports("sse4.2") != 0),
        LEVEL("x86-64-v3", v3, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")),
        LEVEL("x86-64-v4", v4, __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")),
    };
    const struct level built = {.name = "as built", .usable = 1, .adamw = fy_adamw, .sum_squares = fy_sum_squares,
                                .split = fy_split, .join = fy_join, .checksum = fy_checksum,
                                .nf4_encode = fy_nf4_encode, .nf4_decode = fy_nf4_decode,
                                .int8_encode = fy_int8_encode, .int8_decode = fy_int8_decode,
                                .mxfp4_decode = fy_mxfp4_decode, .fp8_decode = fy_fp8_decode};
    static struct outcome expected;
    static struct outcome got;
    if (run(&built, &expected) != 0 || expected.sums[0] <= 0.0) {
        fprintf(stderr, "the library as built refused\n");
        return 1;
    }
    int compared = 0;
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        if (!levels[i].usable) {
            continue;
        }
        if (run(&levels[i], &got) != 0 || memcmp(&expected, &got, sizeof got) != 0) {
            fprintf(stderr, "%s differs from the library as built\n", levels[i].name);
            return 1;
        }
        compared++;
    }
    return compared > 0 ? 0 : 77;
#else
    return 77; /* not x86-64, or a compiler without the levels */
#endif
}
