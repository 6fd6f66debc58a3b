/*
 * queue.c - what goes to the disk next, and what its answers mean.
 *
 * Two channels, reads and writes, each with its own heap of spans and its own bound of blocks in flight: a disk that is
 * slow in one direction, or held at a rate, cannot keep the other idle. Within a channel the order is (priority, order
 * of submission); a span is cut into blocks only as they leave, so a late request of higher priority overtakes between
 * two blocks and not between two requests.
 *
 * An answer is always compared with the question. Negative fails the request, but for EAGAIN and EINTR, which are tried
 * again a bounded number of times; short goes out again for the rest, from the last page boundary; zero is the end of
 * the file. Whole pages are asked for: only a source's last page comes back shorter, by exactly what its file lacks of it. The
 * first error of a request is kept with the place it happened; its other blocks are let drain, because
 * until then the kernel may still write into the arena.
 *
 * Everything here runs under the daemon's lock, on whichever thread holds it.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>

static void span_settle(fy_daemon *daemon, struct fy__span *span)
{
    assert(daemon->locked);
    assert(span->blocks == 0);
    assert(span->issued == span->size);
    if (span->slot != NULL)
        fy__update_span_settled(daemon, span->slot);
    else if (fy__moved_wants_checksum(daemon, span->request) && daemon->options.update_threads > 0)
        fy__moved_begin(daemon, span->request);
    else
        fy__request_settle(daemon, span->request);
}

void fy__queue_push(fy_daemon *daemon, struct fy__span *span, struct fy__order order)
{
    assert(daemon->locked);
    assert(span->request != NULL);
    assert(!fy__request_failed(span->request));
    assert(span->size > 0);
    assert(span->size % FY__PAGE == 0);
    assert(span->arena % FY__PAGE == 0);
    assert(span->store % FY__PAGE == 0);
    assert(fy__inside(span->arena, span->size, daemon->arena->size));
    assert(fy__inside(span->store, span->size, daemon->store->size) ||
           (span->operation == FY_OP_READ && fy__store_in_source(daemon->store, span->store, span->size)));
    span->blocks = 0;
    span->issued = 0;
    fy__heap_push(&daemon->channels[fy__channel_of(span->operation)].spans, order, span);
}

/* Spans of a failed request that still have bytes to issue will not issue them. */
static void drop_spans(fy_daemon *daemon, struct fy__channel *channel, const struct fy__request *request)
{
    assert(daemon->locked);
    assert(fy__request_failed(request));
    uint32_t index = 0;
    while (index < channel->spans.count) { /* every round passes an item or removes one */
        struct fy__span *span = channel->spans.items[index].item;
        if (span->request != request) {
            index++;
            continue;
        }
        fy__heap_remove(&channel->spans, index);
        index = 0; /* the item that took its place may have risen */
        span->issued = span->size;
        if (span->blocks == 0)
            span_settle(daemon, span);
    }
}

void fy__request_fail(fy_daemon *daemon, struct fy__request *request, const fy_failure *failure)
{
    assert(daemon->locked);
    assert(failure->error < 0);
    assert(request->ticket != 0);
    assert(!request->done);
    if (fy__request_failed(request))
        return;
    request->result.failure = *failure;
    request->result.failure.label = request->label;
    if (failure->error == -ETIME)
        request->result.failure.error = -EIO; /* from a block device; to the waiter ETIME means "not yet" */
    request->parts++; /* so that it cannot finish under our hands */
    if (request->operation == FY_OP_UPDATE)
        fy__update_drop(daemon, request); /* first, or the slots that the spans give back would go to it again */
    fy__moved_drop(daemon, request);
    for (uint32_t i = 0; i < 2; i++)
        drop_spans(daemon, &daemon->channels[i], request);
    fy__request_settle(daemon, request);
}

static void block_release(fy_daemon *daemon, struct fy__block *block)
{
    assert(daemon->locked);
    assert(block->span != NULL);
    struct fy__channel *channel = &daemon->channels[fy__channel_of(block->operation)];
    struct fy__span *span = block->span;
    assert(channel->in_flight > 0);
    assert(span->blocks > 0);
    channel->in_flight--;
    if (channel->in_flight == 0)
        channel->busy_ns += fy__now_ns() - channel->busy_since_ns;
    block->span = NULL;
    block->next = channel->free;
    channel->free = block;
    span->blocks--;
    if (span->blocks == 0 && span->issued == span->size)
        span_settle(daemon, span);
}

static struct fy__block *take_retry(fy_daemon *daemon, struct fy__channel *channel)
{
    assert(daemon->locked);
    assert((channel->retry == NULL) == (channel->retry_last == NULL));
    while (channel->retry != NULL) { /* every round takes one off */
        struct fy__block *block = channel->retry;
        channel->retry = block->next;
        if (channel->retry == NULL)
            channel->retry_last = NULL;
        block->next = NULL;
        if (!fy__request_failed(block->span->request))
            return block;
        block_release(daemon, block);
    }
    return NULL;
}

/* Cuts the next block off a span. */
static void block_cut(const fy_daemon *daemon, struct fy__span *span, struct fy__block *block)
{
    assert(block->span == NULL);
    assert(span->issued < span->size);
    const struct fy__place place = fy__store_place(daemon->store, span->store + span->issued);
    uint64_t size = span->size - span->issued;
    if (size > daemon->options.block_size)
        size = daemon->options.block_size;
    const uint64_t pages = fy__whole_pages(place.room);
    if (size > pages)
        size = pages;
    assert(size > 0);
    assert(size % FY__PAGE == 0);
    block->span = span;
    block->next = NULL;
    block->operation = span->operation;
    block->file = place.file;
    block->retries = 0;
    block->arena = span->arena + span->issued;
    block->offset = place.offset;
    block->wanted = size < place.room ? size : place.room;
    block->done = 0;
    span->issued += size;
    span->blocks++;
}

struct fy__block *fy__queue_take(fy_daemon *daemon, uint32_t index)
{
    assert(daemon->locked);
    assert(index < 2);
    struct fy__channel *channel = &daemon->channels[index];
    struct fy__block *block = take_retry(daemon, channel);
    if (block != NULL)
        return block;
    struct fy__span *span = fy__heap_top(&channel->spans);
    block = channel->free;
    if (span == NULL || block == NULL)
        return NULL;
    assert(!fy__request_failed(span->request));
    assert(channel->in_flight < channel->depth);
    channel->free = block->next;
    block_cut(daemon, span, block);
    if (span->issued == span->size)
        (void)fy__heap_pop(&channel->spans); /* it is `span` */
    if (channel->in_flight == 0)
        channel->busy_since_ns = fy__now_ns();
    channel->in_flight++;
    struct fy__request *request = span->request;
    if (request->begin_ns == 0 && request->operation != FY_OP_UPDATE)
        request->begin_ns = fy__now_ns();
    if (span->slot != NULL && span->slot->io_begin_ns == 0)
        span->slot->io_begin_ns = fy__now_ns();
    return block;
}

/* What `result` means for the block: 0 all bytes are there, 1 ask again, negative: failed. */
static int block_judge(fy_daemon *daemon, struct fy__block *block, int64_t result)
{
    assert(block->done < block->wanted);
    assert(block->done % FY__PAGE == 0); /* so whole pages of what is left end where the block's own pages end */
    assert(block->retries <= FY__RETRIES_MAX);
    const uint64_t left = block->wanted - block->done;
    if (result == -EAGAIN || result == -EINTR) {
        block->retries++;
        return block->retries <= FY__RETRIES_MAX ? 1 : (int)result;
    }
    if (result < 0)
        return result >= -4095 ? (int)result : -EIO;
    if (result == 0)
        return -ENODATA;
    if ((uint64_t)result > left) /* a source has grown, or more came than was asked for and nothing it says can be trusted */
        return (uint64_t)result <= fy__whole_pages(left) ? -ESTALE : -EIO;
    if ((uint64_t)result == left) {
        block->done = block->wanted;
        return 0;
    }
    const uint64_t reached = (block->done + (uint64_t)result) & ~(uint64_t)(FY__PAGE - 1);
    block->retries = reached > block->done ? 0 : block->retries + 1;
    block->done = reached;
    daemon->short_resubmitted++;
    if (block->retries <= FY__RETRIES_MAX)
        return 1;
    return block->file >= daemon->store->count ? -ENODATA : -EIO; /* a source was cut within a page */
}

void fy__queue_finish(fy_daemon *daemon, struct fy__block *block, int64_t result)
{
    assert(daemon->locked);
    assert(block->span != NULL);
    assert(block->next == NULL);
    struct fy__channel *channel = &daemon->channels[fy__channel_of(block->operation)];
    struct fy__request *request = block->span->request;
    const int verdict = block_judge(daemon, block, result);
    if (verdict == 1 && !fy__request_failed(request)) {
        block->next = NULL;
        if (channel->retry_last != NULL)
            channel->retry_last->next = block;
        else
            channel->retry = block;
        channel->retry_last = block;
        return;
    }
    if (verdict == 0) {
        const uint64_t moved = fy__whole_pages(block->wanted);
        memset(daemon->arena->base + block->arena + block->wanted, 0, moved - block->wanted);
        channel->bytes += moved;
        channel->finished++;
        request->bytes += moved;
    } else if (verdict < 0) {
        fy__request_fail(daemon, request, &(fy_failure){
                                              .error = verdict,
                                              .operation = block->operation,
                                              .file = block->file,
                                              .file_offset = block->offset,
                                              .wanted = block->wanted,
                                              .got = block->done,
                                          });
    }
    block_release(daemon, block);
}
