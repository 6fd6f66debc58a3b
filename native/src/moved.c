/*
 * moved.c - checksums of what reads and writes moved, on the update threads.
 *
 * A request whose bytes have all been moved is not done before they are summed. It is cut into pieces, so that several
 * threads sum a large one, and whoever is to wait for it has nothing to do himself: with a device beside the processor
 * that is the thread which feeds it. A daemon without update threads leaves the sum to the thread that waits (request.c).
 */
#define _GNU_SOURCE
#include "internal.h"

#include <time.h>

static uint64_t thread_cpu_ns(void)
{
    struct timespec used;
    const int error = clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    assert(error == 0);
    return (uint64_t)used.tv_sec * 1000000000 + (uint64_t)used.tv_nsec;
}

bool fy__moved_wants_checksum(const fy_daemon *daemon, const struct fy__request *request)
{
    assert(daemon->locked);
    assert(request->ticket != 0);
    return (daemon->options.flags & FY_DAEMON_DATA_SUMS) != 0 && request->operation != FY_OP_UPDATE &&
           !fy__request_failed(request);
}

void fy__moved_begin(fy_daemon *daemon, struct fy__request *request)
{
    assert(daemon->locked);
    assert(daemon->options.update_threads > 0);
    assert(request->operation == FY_OP_READ || request->operation == FY_OP_WRITE);
    assert(request->parts == 1);
    assert(request->moved_ns == 0);
    request->moved_ns = fy__now_ns();
    request->next_byte = 0;
    fy__heap_push(&daemon->moved, request->order, request);
    pthread_cond_signal(&daemon->ready);
}

void fy__moved_drop(fy_daemon *daemon, struct fy__request *request)
{
    assert(daemon->locked);
    assert(fy__request_failed(request));
    for (uint32_t i = 0; i < daemon->moved.count; i++) {
        if (daemon->moved.items[i].item != request)
            continue;
        fy__heap_remove(&daemon->moved, i);
        fy__request_settle(daemon, request);
        return; /* it is there once */
    }
}

bool fy__moved_piece(fy_daemon *daemon)
{
    assert(daemon->locked);
    struct fy__request *request = fy__heap_top(&daemon->moved);
    if (request == NULL)
        return false;
    assert(request->next_byte < request->span.size);
    const uint64_t first = request->next_byte;
    const uint64_t left = request->span.size - first;
    const uint64_t size = left < FY__CHECKSUM_PIECE ? left : FY__CHECKSUM_PIECE;
    const unsigned char *data = daemon->arena->base + request->span.arena + first;
    request->next_byte += size;
    if (size == left)
        (void)fy__heap_pop(&daemon->moved); /* it is `request`; its own part is this piece's now */
    else
        request->parts++;
    if (daemon->moved.count > 0)
        pthread_cond_signal(&daemon->ready);
    fy__unlock(daemon);
    const uint64_t before_ns = thread_cpu_ns();
    const uint64_t sum = fy__checksum_update(0, first, data, size);
    const uint64_t used_ns = thread_cpu_ns() - before_ns;
    fy__lock(daemon);
    daemon->checksum_cpu_ns += used_ns;
    request->result.data_sum += sum;
    fy__request_settle(daemon, request);
    return true;
}
