/*
 * update.h - the tensors of an update: what they are, their sizes and where they rest.
 */
#ifndef FUYOU_UPDATE_H
#define FUYOU_UPDATE_H

#include "internal.h"

/* The four tensors that a chunk may read or write, in the order of the scratch. GRADIENTS are only read; their place
 * among a slot's spans is the weights' when it comes to writing. */
enum { REMAINDER = 0, MOMENTUM, VARIANCE, GRADIENTS, TENSORS };
_Static_assert(TENSORS == FY__SLOT_SPANS, "a slot has a span per tensor");

static inline uint64_t weight_bytes(const fy_update *update)
{
    assert(update->weights_dtype <= FY_BFLOAT16);
    return update->weights_dtype == FY_BFLOAT16 ? 2 : 4;
}

static inline uint64_t gradient_bytes(const fy_update *update)
{
    assert(update->gradients_dtype <= FY_BFLOAT16);
    return update->gradients_dtype == FY_BFLOAT16 ? 2 : 4;
}

/* Where a tensor of the update rests, its bytes per parameter (0: of the states' layout) and its place in a slot's scratch, per
 * parameter, which has room for float32 states. */
struct tensor {
    fy_home home;
    uint64_t bytes;
    uint64_t scratch;
    bool used;
};

/* Bytes of a tensor's first `params` parameters. */
static inline uint64_t tensor_bytes(const fy_update *update, const struct tensor *tensor, uint64_t params)
{
    return tensor->bytes > 0 ? params * tensor->bytes : fy__state_bytes(update, params);
}

static inline struct tensor tensor_of(const fy_update *update, uint32_t which)
{
    assert(which < TENSORS);
    switch (which) {
    case REMAINDER:
        return (struct tensor){update->remainder, 2, 0, update->weights_dtype == FY_BFLOAT16};
    case MOMENTUM:
        return (struct tensor){update->momentum, 0, 2, true};
    case VARIANCE:
        return (struct tensor){update->variance, 0, 6, update->rule == FY_ADAMW};
    default: /* GRADIENTS */
        return (struct tensor){
            {update->gradients, update->gradients_source, FY_NOWHERE}, gradient_bytes(update), 10, true};
    }
}

#endif
