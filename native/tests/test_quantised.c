/*
 * test_quantised - threads that share a tensor at whole blocks or rows write what one call writes, every buffer being just as
 * long as it has to be; values that are not finite are counted; wrong arguments are refused.
 */
#include "testing.h"

#include <math.h>
#include <pthread.h>

#define COUNT (64u * 100u + 33u)
#define BLOCKS 101u
#define HALF_BLOCKS 50u
#define COLUMNS 77u
#define ROWS 31u
#define HALF_ROWS 15u

struct part {
    const float *values;
    uint64_t first, count; /* values, and of rows for int8 */
    uint8_t *packed;
    int8_t *codes;
    float *maxima, *row_maxima;
    uint16_t *decoded, *row_decoded;
};

static void *allocated(size_t size)
{
    void *memory = malloc(size);
    CHECK(memory != NULL);
    return memory;
}

static struct part whole_tensor(const float *values)
{
    return (struct part){
        .values = values, .count = COUNT, .packed = allocated((COUNT + 1) / 2), .codes = allocated(ROWS * COLUMNS),
        .maxima = allocated(BLOCKS * 4), .row_maxima = allocated(ROWS * 4), .decoded = allocated(COUNT * 2),
        .row_decoded = allocated(ROWS * COLUMNS * 2),
    };
}

static void released(struct part *tensor)
{
    free(tensor->packed);
    free(tensor->codes);
    free(tensor->maxima);
    free(tensor->row_maxima);
    free(tensor->decoded);
    free(tensor->row_decoded);
}

/* nf4 of values [first, first + count) and int8 of as many rows as half of all or the other half. */
static void *coded(void *argument)
{
    const struct part *part = argument;
    const uint64_t first = part->first, block = first / 64;
    const uint64_t row = first == 0 ? 0 : HALF_ROWS;
    const uint64_t rows = part->count == COUNT ? ROWS : first == 0 ? HALF_ROWS : ROWS - HALF_ROWS;
    const uint64_t at = row * COLUMNS;
    uint64_t lost = 0;
    CHECK_EQUAL(fy_nf4_encode(part->values + first, part->count, FY_FLOAT32, part->packed + first / 2,
                              part->maxima + block, &lost), 0);
    CHECK_EQUAL(fy_nf4_decode(part->packed + first / 2, part->maxima + block, part->count, FY_BFLOAT16,
                              part->decoded + first), 0);
    CHECK_EQUAL(fy_int8_encode(part->values + at, rows, COLUMNS, FY_FLOAT32, part->codes + at, part->row_maxima + row,
                               &lost), 0);
    CHECK_EQUAL(fy_int8_decode(part->codes + at, part->row_maxima + row, rows, COLUMNS, FY_BFLOAT16,
                               part->row_decoded + at), 0);
    CHECK_EQUAL(lost, 0);
    return NULL;
}

static void threads_write_what_one_call_writes(const float *values)
{
    struct part alone = whole_tensor(values), shared = whole_tensor(values);
    (void)coded(&alone);
    struct part low = shared, high = shared;
    low.count = HALF_BLOCKS * 64;
    high.first = low.count;
    high.count = COUNT - low.count;
    pthread_t other;
    CHECK_EQUAL(pthread_create(&other, NULL, coded, &low), 0);
    (void)coded(&high);
    CHECK_EQUAL(pthread_join(other, NULL), 0);
    CHECK(memcmp(alone.packed, shared.packed, (COUNT + 1) / 2) == 0);
    CHECK(memcmp(alone.maxima, shared.maxima, BLOCKS * 4) == 0);
    CHECK(memcmp(alone.decoded, shared.decoded, COUNT * 2) == 0);
    CHECK(memcmp(alone.codes, shared.codes, ROWS * COLUMNS) == 0);
    CHECK(memcmp(alone.row_maxima, shared.row_maxima, ROWS * 4) == 0);
    CHECK(memcmp(alone.row_decoded, shared.row_decoded, ROWS * COLUMNS * 2) == 0);
    released(&alone);
    released(&shared);
}

static void nonfinite_values_are_counted(void)
{
    float values[300] = {0};
    values[3] = NAN;
    values[64] = INFINITY;
    values[299] = -INFINITY;
    uint8_t packed[150], codes[300];
    int8_t rows[300];
    float maxima[5], table[256] = {0};
    uint64_t lost = 0;
    CHECK_EQUAL(fy_nf4_encode(values, 300, FY_FLOAT32, packed, maxima, &lost), 0);
    CHECK_EQUAL(lost, 3);
    CHECK_EQUAL(fy_int8_encode(values, 3, 100, FY_FLOAT32, rows, maxima, &lost), 0);
    CHECK_EQUAL(lost, 3);
    CHECK_EQUAL(fy_dynamic_encode(values, 300, table, codes, maxima, &lost), 0);
    CHECK_EQUAL(lost, 3);
}

/* The reciprocal of a maximum is infinite. No value is cast to an integer that cannot hold it (UBSan looks). */
static void tiny_values_are_zero(void)
{
    const float values[4] = {1e-40f, 0.0f, -1e-40f, 5e-41f}, larger[4] = {1e-37f, 0.0f, -1e-37f, 5e-38f};
    const int8_t zeros[4] = {0};
    float maxima[1], table[256] = {0};
    int8_t rows[4];
    uint8_t codes[4];
    uint64_t lost = 1;
    CHECK_EQUAL(fy_int8_encode(values, 1, 4, FY_FLOAT32, rows, maxima, &lost), 0);
    CHECK(lost == 0 && maxima[0] == 1e-40f && memcmp(rows, zeros, 4) == 0);
    CHECK_EQUAL(fy_int8_encode(larger, 1, 4, FY_FLOAT32, rows, maxima, &lost), 0);
    CHECK(lost == 0 && maxima[0] == 1e-37f && memcmp(rows, zeros, 4) == 0);
    for (uint32_t i = 0; i < 256; i++)
        table[i] = (float)i / 127.5f - 1.0f;
    CHECK_EQUAL(fy_dynamic_encode(values, 4, table, codes, maxima, &lost), 0);
    CHECK(lost == 0 && codes[0] == 255 && codes[2] == 0);
}

/* Every code under both formats, in buffers that are just as long as they have to be. */
static void formats_that_are_only_read(void)
{
    uint8_t *pairs = allocated(256), *powers = allocated(16), *codes = allocated(129 * 2);
    float *wide = allocated(512 * 4), *squares = allocated(2 * 4);
    uint16_t *narrow = allocated(512 * 2);
    for (uint32_t i = 0; i < 256; i++) {
        pairs[i] = (uint8_t)i;
        powers[i / 16] = (uint8_t)(i / 16 * 16);
    }
    CHECK_EQUAL(fy_mxfp4_decode(pairs, powers, 16, FY_FLOAT32, wide), 0);
    CHECK_EQUAL(fy_mxfp4_decode(pairs, powers, 16, FY_BFLOAT16, narrow), 0);
    CHECK(wide[2] == 0x1p-128f && wide[3] == 0.0f && wide[14] == 6 * 0x1p-127f); /* codes 1, 0 and 7, scale 0 */
    CHECK(wide[32 * 8 + 31] == 0.0f && signbit(wide[32 * 8 + 31])); /* high half of 0x8F */
    CHECK(wide[32 * 8 + 30] == -12.0f && wide[32 * 15 + 28] == -4.0f * 0x1p113f); /* low halves of 0x8F and 0xFE */
    for (uint32_t i = 0; i < 512; i++) {
        uint32_t bits;
        memcpy(&bits, &wide[i], sizeof bits);
        CHECK(narrow[i] == bits >> 16 && (bits & 0xFFFFu) == 0);
    }
    for (uint32_t i = 0; i < 129 * 2; i++) {
        codes[i] = (uint8_t)i;
    }
    squares[0] = 2.0f;
    squares[1] = 0.5f;
    CHECK_EQUAL(fy_fp8_decode(codes, squares, 129, 2, FY_FLOAT32, wide), 0); /* the last row has a scale of its own */
    CHECK(wide[1] == 0x1p-8f && wide[7] == 7 * 0x1p-8f && wide[8] == 0x1p-5f && wide[0x7E] == 896.0f && isnan(wide[0x7F]));
    CHECK(wide[0x80] == 0.0f && signbit(wide[0x80]) && wide[0xFE] == -896.0f && isnan(wide[0xFF]) && wide[257] == 0x1p-10f);
    CHECK_EQUAL(fy_fp8_decode(codes, squares, 2, 129, FY_BFLOAT16, narrow), 0);
    CHECK(narrow[0x7E] == 0x4460 && narrow[0x80] == 0x8000 && narrow[129] == 0xBB80);
    free(pairs);
    free(powers);
    free(codes);
    free(wide);
    free(squares);
    free(narrow);
}

static void wrong_arguments_are_refused(void)
{
    float values[64] = {0}, maxima[1];
    uint8_t packed[32];
    uint64_t lost = 0;
    CHECK_EQUAL(fy_nf4_encode(values, 64, 2, packed, maxima, &lost), -EINVAL);
    CHECK_EQUAL(fy_nf4_encode(values, 64, FY_FLOAT32, packed, maxima, NULL), -EINVAL);
    CHECK_EQUAL(fy_nf4_decode(NULL, maxima, 64, FY_FLOAT32, values), -EINVAL);
    CHECK_EQUAL(fy_dynamic_encode(values, 64, NULL, packed, maxima, &lost), -EINVAL);
    CHECK_EQUAL(fy_dynamic_decode(packed, maxima, 64, NULL, 0.0f, values), -EINVAL);
    CHECK_EQUAL(fy_int8_encode(NULL, 1, 64, FY_FLOAT32, (int8_t *)packed, maxima, &lost), -EINVAL);
    CHECK_EQUAL(fy_int8_decode((const int8_t *)packed, maxima, 1, 32, 7, values), -EINVAL);
    CHECK_EQUAL(fy_int8_decode((const int8_t *)packed, maxima, UINT64_MAX / 2, 3, FY_FLOAT32, values), -EINVAL);
    CHECK_EQUAL(fy_mxfp4_decode(packed, NULL, 2, FY_FLOAT32, values), -EINVAL);
    CHECK_EQUAL(fy_mxfp4_decode(packed, packed, 2, 2, values), -EINVAL);
    CHECK_EQUAL(fy_mxfp4_decode(packed, packed, UINT64_MAX / 32, FY_BFLOAT16, values), -EINVAL);
    CHECK_EQUAL(fy_fp8_decode(packed, NULL, 1, 32, FY_FLOAT32, values), -EINVAL);
    CHECK_EQUAL(fy_fp8_decode(packed, maxima, UINT64_MAX / 2, 3, FY_FLOAT32, values), -EINVAL);
    CHECK_EQUAL(fy_fp8_decode(packed, maxima, 0, 3, FY_FLOAT32, values), 0);
    const void *off = (const char *)values + 2; /* halfway through a float */
    double sum;
    CHECK_EQUAL(fy_dynamic_encode(off, 63, values, packed, maxima, &lost), -EINVAL);
    CHECK_EQUAL(fy_sum_squares(off, 63, FY_FLOAT32, &sum, &lost), 0); /* a tensor in a file lies anywhere */
}

int main(void)
{
    float *values = allocated(COUNT * 4);
    uint32_t state = 7;
    for (uint32_t i = 0; i < COUNT; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = ((float)(state >> 8) / 8388608.0f - 1.0f) / (float)(1u << (i % 20));
    }
    threads_write_what_one_call_writes(values);
    nonfinite_values_are_counted();
    tiny_values_are_zero();
    formats_that_are_only_read();
    wrong_arguments_are_refused();
    free(values);
    return 0;
}
