/*
 * update.c - the read-update-write chain: one AdamW step over a stage whose states rest on the store.
 *
 * A stage is cut into chunks of parameters. A chunk on its way occupies a slot, whose scratch holds its states: it is
 * read, computed on an update thread, and written from where it lies (weights from their own span of the arena). There
 * are several slots, so chunk c + 1 is being read while c computes and c - 1 is written; reads and writes have their
 * own channels, and the read of the next chunk has always been queued before the write of this one.
 *
 * Slots belong to no update in particular: a free slot goes to the most urgent update that still has chunks, so the reads
 * of the next update begin while the last chunks of this one are still written, and neither direction of the disk idles
 * between updates. States that rest in the arena are updated where they are; states never written are zeros, made by
 * the update thread.
 *
 * An update all of whose tensors rest in the arena needs no scratch, so it takes slots of another lane, which have none; one
 * that also writes some of them, of a third. While one lane has the update threads, the disk reads and writes for the others;
 * while these wait for the disk, the threads have chunks of that one. Between lanes, as within them, the threads take the most
 * urgent chunk.
 *
 * The arithmetic is elementwise and the sums add up in any order, so the result does not depend on chunks or threads.
 *
 * Everything but slot_compute() runs under the daemon's lock. A slot being computed belongs to its update thread alone.
 */
#include "update.h"

#include <string.h>

/* ---- the chain ---- */

static uint64_t scratch_of(const fy_daemon *daemon, const struct fy__slot *slot, const struct tensor *tensor)
{
    assert(slot->lane == FY__STREAMED);
    assert(slot->index < daemon->slots_count);
    const uint64_t chunk_params = daemon->options.chunk_params;
    return daemon->options.scratch_offset + fy_scratch_size((uint32_t)chunk_params, 1) * slot->index +
           chunk_params * tensor->scratch;
}

/* The arena offset of a chunk's part of a tensor: where it rests, or its scratch. */
static uint64_t place_of(const fy_daemon *daemon, const struct fy__slot *slot, const struct tensor *tensor)
{
    assert(tensor->used);
    if (tensor->home.arena != FY_NOWHERE)
        return tensor->home.arena + tensor_bytes(&slot->request->update, tensor, slot->first);
    return scratch_of(daemon, slot, tensor);
}

static enum fy__lane_name lane_of(const fy_update *update)
{
    assert(update->params > 0);
    bool written = update->weights_target != FY_NOWHERE;
    for (uint32_t i = 0; i < TENSORS; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (tensor.used && tensor.home.arena == FY_NOWHERE)
            return FY__STREAMED;
        written = written || (tensor.used && tensor.home.target != FY_NOWHERE);
    }
    return written ? FY__WRITTEN : FY__RESTING;
}

static struct fy__order order_of(const struct fy__slot *slot)
{
    assert(slot->request != NULL);
    struct fy__order order = slot->request->order;
    order.position = slot->first;
    return order;
}

static void span_push(fy_daemon *daemon, struct fy__slot *slot, uint32_t operation, uint64_t arena, uint64_t store,
                      uint64_t size)
{
    assert(daemon->locked);
    assert(slot->phase == (operation == FY_OP_READ ? FY__READING : FY__WRITING));
    assert(slot->spans_left < FY__SLOT_SPANS);
    struct fy__span *span = &slot->spans[slot->spans_left++];
    *span = (struct fy__span){
        .operation = operation,
        .arena = arena,
        .store = store,
        .size = size,
        .request = slot->request,
        .slot = slot,
    };
    slot->io_bytes += size;
    fy__queue_push(daemon, span, order_of(slot));
}

static void slot_enter(struct fy__slot *slot, enum fy__phase phase)
{
    assert(slot->request != NULL);
    assert(slot->phase == (phase == FY__READING ? FY__FREE : FY__COMPUTING));
    slot->phase = phase;
    slot->spans_left = 0;
    slot->io_begin_ns = 0;
    slot->io_bytes = 0;
}

/* The phase's I/O is over and went well: for the timeline. */
static void slot_tell(fy_daemon *daemon, const struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(slot->io_begin_ns != 0);
    assert(slot->io_bytes > 0);
    fy__events_chunk(&daemon->events, &(fy_event){
                                          .operation = slot->phase == FY__READING ? FY_OP_READ : FY_OP_WRITE,
                                          .label = slot->request->label,
                                          .begin_ns = slot->io_begin_ns,
                                          .end_ns = fy__now_ns(),
                                          .bytes = slot->io_bytes,
                                      });
}

static void slot_ready(fy_daemon *daemon, struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(slot->phase == FY__READING);
    assert(slot->spans_left == 0);
    slot->phase = FY__READY;
    fy__heap_push(&daemon->computing, order_of(slot), slot);
    pthread_cond_signal(&daemon->ready);
}

static void slot_read(fy_daemon *daemon, struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(slot->count > 0);
    assert(slot->count <= daemon->options.chunk_params);
    const fy_update *update = &slot->request->update;
    slot_enter(slot, FY__READING);
    for (uint32_t i = 0; i < TENSORS; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (!tensor.used || tensor.home.source == FY_NOWHERE)
            continue;
        span_push(daemon, slot, FY_OP_READ, scratch_of(daemon, slot, &tensor),
                  tensor.home.source + tensor_bytes(update, &tensor, slot->first), tensor_bytes(update, &tensor, slot->count));
    }
    if (slot->spans_left == 0)
        slot_ready(daemon, slot);
}

/* Gives a lane's free slots to the updates that want them, most urgent first. */
static void slots_fill(fy_daemon *daemon, struct fy__lane *lane)
{
    assert(daemon->locked);
    while (lane->free != NULL && lane->updates.count > 0) { /* every round uses up a slot */
        struct fy__request *request = fy__heap_top(&lane->updates);
        struct fy__slot *slot = lane->free;
        const uint64_t left = request->update.params - request->next_param;
        assert(left > 0);
        assert(slot->phase == FY__FREE);
        assert(slot->lane == request->lane);
        lane->free = slot->next;
        slot->next = NULL;
        slot->request = request;
        slot->first = request->next_param;
        slot->count = left < daemon->options.chunk_params ? left : daemon->options.chunk_params;
        request->next_param += slot->count;
        request->parts++;
        if (slot->count == left) {
            (void)fy__heap_pop(&lane->updates); /* it is `request` */
            request->parts--;                   /* its place among the updates; the slot's part is left */
        }
        assert(request->parts > 0);
        slot_read(daemon, slot);
    }
}

static void slot_free(fy_daemon *daemon, struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(slot->phase != FY__FREE);
    assert(slot->spans_left == 0);
    struct fy__request *request = slot->request;
    struct fy__lane *lane = &daemon->lanes[slot->lane];
    slot->phase = FY__FREE;
    slot->request = NULL;
    slot->next = lane->free;
    lane->free = slot;
    fy__request_settle(daemon, request);
    slots_fill(daemon, lane);
}

void fy__update_begin(fy_daemon *daemon, struct fy__request *request)
{
    assert(daemon->locked);
    assert(request->operation == FY_OP_UPDATE);
    assert(request->parts == 1);
    request->next_param = 0;
    request->lane = lane_of(&request->update);
    struct fy__lane *lane = &daemon->lanes[request->lane];
    fy__heap_push(&lane->updates, request->order, request);
    slots_fill(daemon, lane);
}

void fy__update_span_settled(fy_daemon *daemon, struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(slot->spans_left > 0);
    assert(slot->phase == FY__READING || slot->phase == FY__WRITING);
    slot->spans_left--;
    if (slot->spans_left > 0)
        return;
    if (!fy__request_failed(slot->request))
        slot_tell(daemon, slot);
    if (slot->phase == FY__READING && !fy__request_failed(slot->request))
        slot_ready(daemon, slot);
    else
        slot_free(daemon, slot);
}

void fy__update_drop(fy_daemon *daemon, struct fy__request *request)
{
    assert(daemon->locked);
    assert(request->operation == FY_OP_UPDATE);
    assert(fy__request_failed(request));
    struct fy__heap *updates = &daemon->lanes[request->lane].updates;
    for (uint32_t i = 0; i < updates->count; i++) {
        if (updates->items[i].item != request)
            continue;
        fy__heap_remove(updates, i);
        fy__request_settle(daemon, request);
        break; /* it is there once */
    }
    uint32_t index = 0;
    while (index < daemon->computing.count) { /* every round passes an item or removes one */
        struct fy__slot *slot = daemon->computing.items[index].item;
        if (slot->request != request) {
            index++;
            continue;
        }
        fy__heap_remove(&daemon->computing, index);
        index = 0; /* the item that took its place may have risen */
        slot_free(daemon, slot);
    }
}

/* ---- the update threads ---- */

/* Sums of what the chunk read and of what it will write, and its non-finite masters. */
struct outcome {
    uint64_t nonfinite;
    uint64_t weights_sum;
    uint64_t read_sums[TENSORS];
    uint64_t sums[TENSORS];
};

/* Without the lock: the slot and its arena spans are this thread's. */
static struct outcome slot_compute(const fy_daemon *daemon, const struct fy__slot *slot)
{
    assert(slot->phase == FY__COMPUTING);
    const fy_update *update = &slot->request->update;
    unsigned char *base = daemon->arena->base;
    const bool sum_reads = (daemon->options.flags & FY_DAEMON_DATA_SUMS) != 0;
    struct outcome outcome = {0};
    void *data[TENSORS] = {NULL};
    for (uint32_t i = 0; i < TENSORS; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (!tensor.used)
            continue;
        data[i] = base + place_of(daemon, slot, &tensor);
        if (tensor.home.arena == FY_NOWHERE && tensor.home.source == FY_NOWHERE)
            memset(data[i], 0, (size_t)tensor_bytes(update, &tensor, slot->count));
        if (sum_reads && tensor.home.source != FY_NOWHERE)
            outcome.read_sums[i] =
                fy__checksum_update(0, tensor_bytes(update, &tensor, slot->first), data[i],
                                    tensor_bytes(update, &tensor, slot->count));
    }
    unsigned char *weights = base + update->weights + slot->first * weight_bytes(update);
    outcome.nonfinite = fy__adamw_chunk(update, slot->request->segments, &(struct fy__chunk){
        .first = slot->first,
        .count = slot->count,
        .weights = weights,
        .remainder = data[REMAINDER],
        .momentum = data[MOMENTUM],
        .variance = data[VARIANCE],
        .gradients = data[GRADIENTS],
    });
    if (update->weights_target != FY_NOWHERE)
        outcome.weights_sum = fy__checksum_update(0, slot->first * weight_bytes(update), weights,
                                                  slot->count * weight_bytes(update));
    for (uint32_t i = REMAINDER; i <= VARIANCE; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (tensor.used && tensor.home.target != FY_NOWHERE)
            outcome.sums[i] =
                fy__checksum_update(0, tensor_bytes(update, &tensor, slot->first), data[i],
                                    tensor_bytes(update, &tensor, slot->count));
    }
    return outcome;
}

static void slot_write(fy_daemon *daemon, struct fy__slot *slot)
{
    assert(daemon->locked);
    assert(!fy__request_failed(slot->request));
    const fy_update *update = &slot->request->update;
    slot_enter(slot, FY__WRITING);
    if (update->weights_target != FY_NOWHERE) {
        const uint64_t bytes = weight_bytes(update);
        span_push(daemon, slot, FY_OP_WRITE, update->weights + slot->first * bytes,
                  update->weights_target + slot->first * bytes, slot->count * bytes);
    }
    for (uint32_t i = REMAINDER; i <= VARIANCE; i++) {
        const struct tensor tensor = tensor_of(update, i);
        if (!tensor.used || tensor.home.target == FY_NOWHERE)
            continue;
        span_push(daemon, slot, FY_OP_WRITE, place_of(daemon, slot, &tensor),
                  tensor.home.target + tensor_bytes(update, &tensor, slot->first), tensor_bytes(update, &tensor, slot->count));
    }
    if (slot->spans_left == 0)
        slot_free(daemon, slot);
}

/* For a trace: the chunk was computed from `begin_ns` on, until now. */
static void chunk_tell(fy_daemon *daemon, const struct fy__slot *slot, uint64_t begin_ns)
{
    assert(daemon->locked);
    assert(slot->phase == FY__COMPUTING);
    fy__events_add(&daemon->chunks, &(fy_event){.operation = FY_OP_CHUNK,
                                                .label = slot->request->label,
                                                .begin_ns = begin_ns,
                                                .end_ns = fy__now_ns()});
}

static void slot_computed(fy_daemon *daemon, struct fy__slot *slot, const struct outcome *outcome)
{
    assert(daemon->locked);
    assert(slot->phase == FY__COMPUTING);
    assert(outcome->nonfinite <= slot->count);
    fy_result *result = &slot->request->result;
    result->nonfinite += outcome->nonfinite;
    result->weights_sum += outcome->weights_sum;
    result->remainder_sum += outcome->sums[REMAINDER];
    result->momentum_sum += outcome->sums[MOMENTUM];
    result->variance_sum += outcome->sums[VARIANCE];
    result->remainder_read += outcome->read_sums[REMAINDER];
    result->momentum_read += outcome->read_sums[MOMENTUM];
    result->variance_read += outcome->read_sums[VARIANCE];
    result->gradients_read += outcome->read_sums[GRADIENTS];
    daemon->update_params += slot->count;
    if (fy__request_failed(slot->request))
        slot_free(daemon, slot); /* failed while computing: nothing more of it is written */
    else
        slot_write(daemon, slot);
}

void *fy__update_thread(void *argument)
{
    fy_daemon *daemon = argument;
    assert(daemon->slots_count > 0);
    fy__flush_denormals_off();
    fy__lock(daemon);
    while (!daemon->closing) { /* until stop: a pass sleeps, sums a piece or computes a chunk */
        if (fy__moved_piece(daemon))
            continue; /* before chunks: somebody may be waiting for it, and it takes a millisecond */
        struct fy__slot *slot = fy__heap_pop(&daemon->computing);
        if (slot == NULL) {
            fy__sleep(daemon, &daemon->ready);
            continue;
        }
        assert(slot->phase == FY__READY);
        assert(!fy__request_failed(slot->request));
        slot->phase = FY__COMPUTING;
        slot->spans_left = 0;
        if (slot->request->begin_ns == 0)
            slot->request->begin_ns = fy__now_ns();
        const uint64_t begin_ns = daemon->log_chunks ? fy__now_ns() : 0;
        fy__unlock(daemon);
        const struct outcome outcome = slot_compute(daemon, slot);
        fy__lock(daemon);
        if (begin_ns != 0)
            chunk_tell(daemon, slot, begin_ns);
        slot_computed(daemon, slot, &outcome);
    }
    fy__unlock(daemon);
    return NULL;
}
