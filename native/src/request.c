/*
 * request.c - the edge: requests come in and are checked once, results go out.
 *
 * Any thread may call. Everything a caller passes is copied or named by offset, and every offset is checked here, so
 * that the inside may assert instead of checking. A request is one row of a table sized at start; its ticket carries
 * the row and how often the row was used, so that a ticket waited for twice is unknown and never somebody else's.
 */
#include "internal.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define INDEX_BITS 16u

_Static_assert(FY__REQUESTS_MAX < (1u << INDEX_BITS), "a ticket's low bits hold the row plus one");

static struct fy__request *request_of(fy_daemon *daemon, fy_ticket ticket)
{
    assert(daemon->locked);
    const uint64_t row = ticket & ((1u << INDEX_BITS) - 1);
    if (row == 0 || row > daemon->options.requests)
        return NULL;
    struct fy__request *request = &daemon->requests[row - 1];
    assert(request->index == row - 1);
    return request->ticket == ticket ? request : NULL;
}

/* Under the lock. NULL: *error says why. */
static struct fy__request *request_take(fy_daemon *daemon, uint32_t operation, uint64_t priority, uint32_t label,
                                        int *error)
{
    assert(daemon->locked);
    assert(operation == FY_OP_READ || operation == FY_OP_WRITE || operation == FY_OP_UPDATE);
    struct fy__request *request = daemon->requests_free;
    *error = daemon->stopping ? -ECANCELED : request == NULL ? -EAGAIN : 0;
    if (*error != 0)
        return NULL;
    daemon->requests_free = request->next_free;
    assert(request->ticket == 0);
    request->generation++;
    request->ticket = (request->generation << INDEX_BITS) | (request->index + 1);
    request->operation = operation;
    request->label = label;
    request->done = false;
    request->parts = 1;
    request->next_free = NULL;
    request->order = (struct fy__order){.priority = priority, .sequence = daemon->sequence++};
    request->begin_ns = 0;
    request->moved_ns = 0;
    request->bytes = 0;
    request->result = (fy_result){0};
    daemon->outstanding++;
    return request;
}

static int submit_span(fy_daemon *daemon, const struct fy__span *span, uint64_t priority, uint32_t label,
                       fy_ticket *out)
{
    assert(span->operation == FY_OP_READ || span->operation == FY_OP_WRITE);
    assert(span->request == NULL); /* not one yet */
    if (daemon == NULL || out == NULL)
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    const fy_options *options = &daemon->options;
    if (span->size == 0 || span->size % FY__PAGE != 0 || span->arena % FY__PAGE != 0 || span->store % FY__PAGE != 0)
        return -EINVAL;
    const bool from_source = span->operation == FY_OP_READ && fy__store_in_source(daemon->store, span->store, span->size);
    if (!fy__inside(span->arena, span->size, daemon->arena->size) ||
        !(from_source || fy__inside(span->store, span->size, daemon->store->size)))
        return -ERANGE;
    if (fy__overlap(span->arena, span->size, options->scratch_offset, options->scratch_size))
        return -EINVAL;
    int error;
    fy__lock(daemon);
    struct fy__request *request = request_take(daemon, span->operation, priority, label, &error);
    if (request != NULL) {
        request->span = *span;
        request->span.request = request;
        fy__queue_push(daemon, &request->span, request->order);
        *out = request->ticket;
    }
    fy__unlock(daemon);
    return error;
}

FY_API int fy_submit_read(fy_daemon *daemon, uint64_t arena_offset, uint64_t store_offset, uint64_t size,
                          uint64_t priority, uint32_t label, fy_ticket *out)
{
    const struct fy__span span = {
        .operation = FY_OP_READ, .arena = arena_offset, .store = store_offset, .size = size};
    return submit_span(daemon, &span, priority, label, out);
}

FY_API int fy_submit_write(fy_daemon *daemon, uint64_t arena_offset, uint64_t store_offset, uint64_t size,
                           uint64_t priority, uint32_t label, fy_ticket *out)
{
    const struct fy__span span = {
        .operation = FY_OP_WRITE, .arena = arena_offset, .store = store_offset, .size = size};
    return submit_span(daemon, &span, priority, label, out);
}

FY_API int fy_submit_update(fy_daemon *daemon, const fy_update *update, const fy_segment *segments, fy_ticket *out)
{
    if (daemon == NULL || update == NULL || out == NULL)
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    int error = fy__update_check(daemon, update, segments);
    if (error != 0)
        return error;
    fy__lock(daemon);
    struct fy__request *request = request_take(daemon, FY_OP_UPDATE, update->priority, update->label, &error);
    if (request != NULL) {
        request->update = *update;
        if (update->segment_count > 0)
            memcpy(request->segments, segments, update->segment_count * sizeof *segments);
        fy__update_begin(daemon, request);
        *out = request->ticket;
    }
    fy__unlock(daemon);
    return error;
}

static struct timespec deadline_after(uint64_t timeout_ns)
{
    if (timeout_ns > FY__WAIT_MAX_NS)
        timeout_ns = FY__WAIT_MAX_NS;
    const uint64_t at_ns = fy__now_ns() + timeout_ns;
    assert(at_ns >= timeout_ns);
    return (struct timespec){.tv_sec = (time_t)(at_ns / 1000000000), .tv_nsec = (long)(at_ns % 1000000000)};
}

/* Under the lock, which it lets go of. 0: the request is done. */
static int wait_done(fy_daemon *daemon, struct fy__request *request, fy_ticket ticket, uint64_t timeout_ns)
{
    assert(daemon->locked);
    assert(daemon->waiters > 0);
    assert(request->ticket == ticket);
    if (request->done)
        return 0;
    if (timeout_ns == 0)
        return -ETIME;
    const struct timespec deadline = deadline_after(timeout_ns);
    bool in_time = true;
    while (request->ticket == ticket && !request->done && in_time)
        in_time = fy__sleep_until(daemon, &request->finished, &deadline);
    if (request->ticket != ticket)
        return -ENOENT; /* another thread waited for it too, and was first */
    return request->done ? 0 : -ETIME;
}

/* Under the lock, which it lets go of to sum the data where nobody else does. The ticket is spent and the row free. */
static void result_take(fy_daemon *daemon, struct fy__request *request, fy_result *result)
{
    assert(daemon->locked);
    assert(daemon->waiters > 0);
    assert(request->done);
    assert(request->parts == 0);
    const struct fy__span span = request->span;
    const bool sums = fy__moved_wants_checksum(daemon, request) && daemon->options.update_threads == 0;
    *result = request->result;
    request->ticket = 0;
    request->next_free = daemon->requests_free;
    daemon->requests_free = request;
    if (!sums)
        return;
    fy__unlock(daemon);
    result->data_sum = fy_checksum(daemon->arena->base + span.arena, span.size, 0);
    fy__lock(daemon);
}

FY_API int fy_wait(fy_daemon *daemon, fy_ticket ticket, uint64_t timeout_ns, fy_result *result)
{
    if (daemon == NULL || result == NULL)
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    fy__lock(daemon);
    daemon->waiters++; /* until the end: a stop meanwhile leaves daemon and arena to us */
    struct fy__request *request = request_of(daemon, ticket);
    int error = request != NULL ? wait_done(daemon, request, ticket, timeout_ns) : -ENOENT;
    if (error == 0) {
        result_take(daemon, request, result);
        error = result->failure.error;
    }
    daemon->waiters--;
    if (daemon->waiters == 0 && daemon->stopping)
        pthread_cond_broadcast(&daemon->idle);
    fy__unlock(daemon);
    return error;
}

FY_API int fy_daemon_events(fy_daemon *daemon, fy_event *out, uint32_t capacity, uint32_t *count, uint64_t *dropped)
{
    if (daemon == NULL || count == NULL || dropped == NULL || (out == NULL && capacity > 0))
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    fy__lock(daemon);
    uint64_t chunks_dropped;
    *count = fy__events_take(&daemon->events, out, capacity, dropped);
    *count += fy__events_take(&daemon->chunks, out != NULL ? out + *count : NULL, capacity - *count, &chunks_dropped);
    *dropped += chunks_dropped;
    fy__unlock(daemon);
    return 0;
}

FY_API int fy_daemon_log_chunks(fy_daemon *daemon)
{
    if (daemon == NULL)
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    fy__lock(daemon);
    daemon->log_chunks = true;
    fy__unlock(daemon);
    return 0;
}
