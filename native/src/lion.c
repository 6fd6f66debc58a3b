/*
 * lion.c - Lion, which keeps a momentum and no variance.
 *
 * The operations and their order are those its authors print (arXiv 2302.06675, algorithm 2, with decoupled weight decay).
 * None is fused with another, as in adamw.c.
 */
#include <assert.h>
#include <stddef.h>

#include "adamw.h"

/* The sign: 0 of 0, and not a number of what is none. */
INLINE float sign_of(float value)
{
    return value > 0.0f ? 1.0f : value < 0.0f ? -1.0f : value;
}

/* Lion moves a master as far whatever the gradient. A momentum that is not finite would go unseen, so `m - m` is added: 0, or
 * not a number. */
INLINE void lion_step(const struct fy__scalars *k, float gradient, float *master, float *momentum)
{
    const float g = gradient * k->scale;
    const float sign = sign_of(*momentum * k->beta1 + k->one_less_beta1 * g);
    const float m = *momentum * k->beta2 + k->one_less_beta2 * g;
    *master = (*master * k->decay + k->negative_lr * sign) + (m - m);
    *momentum = m;
}

INLINE uint64_t span(const struct fy__scalars *s, const struct fy__run *run, int narrow_weights, int narrow_gradients)
{
    const struct fy__scalars k = *s;
    void *weights = run->weights;
    int16_t *remainder = run->remainder;
    float *momentum = run->momentum;
    const void *gradients = run->gradients;
    const uint64_t count = run->count;
    uint32_t lost = 0;
#pragma GCC ivdep
    for (uint64_t i = 0; i < count; i++) {
        float p = master_of(narrow_weights, weights, remainder, i);
        float m = momentum[i];
        const float g = gradient_of(narrow_gradients, gradients, i);
        lion_step(&k, g, &p, &m);
        momentum[i] = m;
        lost += master_put(narrow_weights, weights, remainder, i, p);
    }
    return lost;
}

/* ---- the instances: weights, gradients ---- */

#define INSTANCE(weights, gradients)                                                                                      \
    FY__CLONES static uint64_t lion_##weights##_##gradients(const struct fy__scalars *s, const struct fy__run *run)       \
    {                                                                                                                     \
        return span(s, run, weights == 16, gradients == 16);                                                              \
    }
INSTANCE(32, 32)
INSTANCE(32, 16)
INSTANCE(16, 32)
INSTANCE(16, 16)

typedef uint64_t span_function(const struct fy__scalars *s, const struct fy__run *run);
static span_function *const spans[2][2] = {{lion_32_32, lion_32_16}, {lion_16_32, lion_16_16}};

uint64_t fy__lion(const struct fy__scalars *s, const struct fy__run *run, uint32_t weights, uint32_t gradients)
{
    assert(weights <= FY_BFLOAT16);
    assert(gradients <= FY_BFLOAT16);
    return spans[weights][gradients](s, run);
}
