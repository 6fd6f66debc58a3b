/*
 * small_states.c - AdamW with momentum and variance in bfloat16, and the way to int8_states.c.
 *
 * bfloat16 is rounded at random, up with the probability of the part that is cut off: rounding to nearest would swallow what
 * a step adds to a variance, a thousandth. A draw follows from seed, step, stage and the parameter's index alone, so results do
 * not depend on threads, chunks or where a run was resumed. So it is with int8.
 */
#include <assert.h>
#include <stddef.h>

#include "adamw.h"

/* A value that is not finite stays what it is. */
INLINE uint16_t narrowed_at_random(float value, uint32_t draw)
{
    const uint32_t bits = bits_of(value);
    return (uint16_t)((bits + (lost_in_float32(bits) ? 0u : draw)) >> 16);
}

INLINE uint64_t bfloat16_span(const struct fy__scalars *s, const struct fy__run *run, int narrow_weights,
                              int narrow_gradients)
{
    const struct fy__scalars k = *s;
    void *weights = run->weights;
    int16_t *remainder = run->remainder;
    uint16_t *momentum = run->momentum;
    uint16_t *variance = run->variance;
    const void *gradients = run->gradients;
    const uint32_t first = (uint32_t)run->first;
    const uint64_t count = run->count;
    uint32_t lost = 0;
#pragma GCC ivdep
    for (uint64_t i = 0; i < count; i++) {
        float p = master_of(narrow_weights, weights, remainder, i);
        float m = float_of((uint32_t)momentum[i] << 16);
        float v = float_of((uint32_t)variance[i] << 16);
        adamw_step(&k, gradient_of(narrow_gradients, gradients, i), &p, &m, &v);
        const uint32_t draw = drawn(k.key, first + (uint32_t)i);
        momentum[i] = narrowed_at_random(m, draw & 0xFFFFu);
        variance[i] = narrowed_at_random(v, draw >> 16);
        lost += master_put(narrow_weights, weights, remainder, i, p);
    }
    return lost;
}

/* ---- the instances: weights, gradients ---- */

#define INSTANCE(weights, gradients)                                                                                \
    FY__CLONES static uint64_t bfloat16_##weights##_##gradients(const struct fy__scalars *s, const struct fy__run *run) \
    {                                                                                                               \
        return bfloat16_span(s, run, weights == 16, gradients == 16);                                               \
    }
INSTANCE(32, 32)
INSTANCE(32, 16)
INSTANCE(16, 32)
INSTANCE(16, 16)

typedef uint64_t span_function(const struct fy__scalars *s, const struct fy__run *run);
static span_function *const spans[2][2] = {{bfloat16_32_32, bfloat16_32_16}, {bfloat16_16_32, bfloat16_16_16}};

uint64_t fy__adamw_small(const struct fy__scalars *s, const struct fy__run *run, uint32_t states, uint32_t weights,
                         uint32_t gradients)
{
    assert(states == FY_BFLOAT16 || states == FY_INT8);
    assert(weights <= FY_BFLOAT16);
    assert(gradients <= FY_BFLOAT16);
    return states == FY_INT8 ? fy__adamw_int8(s, run, weights, gradients) : spans[weights][gradients](s, run);
}
