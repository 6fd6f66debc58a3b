/*
 * update_check.c - whether an update may be accepted: its spans lie in the arena and on the store, apart from the scratch and,
 * in the arena, from each other: the kernels are compiled as if nothing overlapped. Runs in the thread that asks, without the
 * daemon's lock.
 */
#include "update.h"

#include <errno.h>

static bool arena_span_good(const fy_daemon *daemon, uint64_t offset, uint64_t size, uint64_t unit)
{
    assert(size > 0);
    assert(unit > 0);
    return offset % unit == 0 && fy__inside(offset, size, daemon->arena->size) &&
           !fy__overlap(offset, size, daemon->options.scratch_offset, daemon->options.scratch_size);
}

static bool store_span_good(const fy_daemon *daemon, uint64_t offset, uint64_t size)
{
    assert(size > 0);
    assert(size % FY__PAGE == 0);
    return offset % FY__PAGE == 0 && fy__inside(offset, size, daemon->store->size);
}

static bool home_good(const fy_daemon *daemon, const fy_home *home, uint64_t size)
{
    const bool in_arena = home->arena != FY_NOWHERE;
    const bool has_source = home->source != FY_NOWHERE;
    const bool has_target = home->target != FY_NOWHERE;
    /* Written from the arena, a span is under direct I/O and must lie on pages. */
    if (in_arena && (has_source || !arena_span_good(daemon, home->arena, size, has_target ? FY__PAGE : 64)))
        return false;
    if (!in_arena && !has_target)
        return false; /* the new state would rest nowhere */
    if (has_source && !store_span_good(daemon, home->source, size))
        return false;
    if (has_target && !store_span_good(daemon, home->target, size))
        return false;
    /* In place or apart: in place a chunk is read before it is written, and no other chunk touches it. */
    return !has_source || home->source == home->target || !fy__overlap(home->source, size, home->target, size);
}

/* The arena spans of an update, each found to be inside: weights and whichever tensors rest there. */
static bool apart(const fy_update *update)
{
    uint64_t offsets[TENSORS + 1] = {update->weights};
    uint64_t sizes[TENSORS + 1] = {update->params * weight_bytes(update)};
    uint32_t count = 1;
    for (uint32_t i = 0; i < TENSORS; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (!tensor.used || tensor.home.arena == FY_NOWHERE)
            continue;
        const uint64_t size = tensor_bytes(update, &tensor, update->params);
        for (uint32_t k = 0; k < count; k++) {
            if (fy__overlap(tensor.home.arena, size, offsets[k], sizes[k]))
                return false;
        }
        offsets[count] = tensor.home.arena;
        sizes[count++] = size;
    }
    return true;
}

int fy__update_check(const fy_daemon *daemon, const fy_update *update, const fy_segment *segments)
{
    assert(daemon->slots_count <= FY__SLOTS_MAX);
    assert(update != NULL);
    if (daemon->slots_count == 0)
        return -EINVAL; /* started without update threads */
    if (update->params == 0 || update->params % FY__PARAMS_UNIT != 0 || update->params > FY__SPAN_MAX / 4)
        return -EINVAL;
    if (update->segment_count > FY_MAX_SEGMENTS)
        return -E2BIG;
    if (!fy__update_good(update, segments))
        return -EINVAL;
    if (update->states_dtype == FY_INT8 && daemon->options.chunk_params % FY_STATE_TILE != 0 &&
        update->params > daemon->options.chunk_params)
        return -EINVAL; /* a chunk would begin inside a tile */
    const uint64_t weights_size = update->params * weight_bytes(update);
    const bool written = update->weights_target != FY_NOWHERE;
    if (!arena_span_good(daemon, update->weights, weights_size, written ? FY__PAGE : 64))
        return -EINVAL;
    if (written && !store_span_good(daemon, update->weights_target, weights_size))
        return -EINVAL;
    const uint64_t gradients_size = update->params * gradient_bytes(update);
    if ((update->gradients == FY_NOWHERE) == (update->gradients_source == FY_NOWHERE))
        return -EINVAL;
    if (update->gradients != FY_NOWHERE ? !arena_span_good(daemon, update->gradients, gradients_size, 64)
                                        : !store_span_good(daemon, update->gradients_source, gradients_size))
        return -EINVAL;
    for (uint32_t i = REMAINDER; i <= VARIANCE; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (tensor.used && !home_good(daemon, &tensor.home, tensor_bytes(update, &tensor, update->params)))
            return -EINVAL;
    }
    return apart(update) ? 0 : -EINVAL;
}
