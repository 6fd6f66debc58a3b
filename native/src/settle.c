/*
 * settle.c - the end of a request: its parts settle one by one, the last of them finishes its ticket.
 *
 * A part is a span, a slot, a piece to sum, or a hold that somebody keeps on a request under his hands. Everything here
 * runs under the daemon's lock.
 */
#include "internal.h"

void fy__request_settle(fy_daemon *daemon, struct fy__request *request)
{
    assert(daemon->locked);
    assert(request->ticket != 0);
    assert(!request->done);
    assert(request->parts > 0);
    request->parts--;
    if (request->parts > 0)
        return;
    const uint64_t now_ns = fy__now_ns();
    const fy_event event = {
        .operation = request->operation,
        .label = request->label,
        .begin_ns = request->begin_ns != 0 ? request->begin_ns : now_ns,
        .end_ns = request->moved_ns != 0 ? request->moved_ns : now_ns,
        .bytes = request->operation == FY_OP_UPDATE ? 0 : request->bytes,
    };
    const int is_row = event.operation == FY_OP_READ && event.bytes > 0 && event.bytes <= FY__EVENTS_ROW;
    (is_row ? fy__events_chunk : fy__events_add)(&daemon->events, &event);
    request->done = true;
    assert(daemon->outstanding > 0);
    daemon->outstanding--;
    fy__wake_later(daemon, &request->finished);
    if (daemon->stopping && daemon->outstanding == 0)
        pthread_cond_broadcast(&daemon->idle);
}
