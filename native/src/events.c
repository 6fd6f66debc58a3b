/*
 * events.c - a bounded log of what was busy when, for the timeline.
 *
 * Reads and writes that are requests, and updates, are an entry each. The I/O of an update's chunks is told as reads and
 * writes too, under the update's label: a chunk joins the entry of the one before it where the two follow each other
 * closely, so that a stage is a few entries and not one per chunk. Small reads join likewise: thousands of them are the
 * rows of a table. When the log is full the oldest entries are dropped and counted.
 *
 * Everything here runs under the daemon's lock.
 */
#include "internal.h"

void fy__events_add(struct fy__events *events, const fy_event *event)
{
    assert(event->operation == FY_OP_READ || event->operation == FY_OP_WRITE || event->operation == FY_OP_UPDATE ||
           event->operation == FY_OP_CHUNK);
    assert(event->begin_ns <= event->end_ns);
    assert(events->count <= FY__EVENTS_MAX);
    if (events->count == FY__EVENTS_MAX) {
        events->first = (events->first + 1) % FY__EVENTS_MAX;
        events->count--;
        events->dropped++;
    }
    events->entries[(events->first + events->count) % FY__EVENTS_MAX] = *event;
    events->count++;
}

/* What grew is an entry like any other from now on. */
static void grown(struct fy__events *events, fy_event *growing)
{
    if (growing->end_ns == 0)
        return;
    fy__events_add(events, growing);
    growing->end_ns = 0;
}

void fy__events_chunk(struct fy__events *events, const fy_event *event)
{
    assert(event->bytes > 0);
    assert(event->begin_ns <= event->end_ns);
    fy_event *growing = &events->growing[fy__channel_of(event->operation)];
    if (growing->end_ns != 0 && growing->label == event->label &&
        event->begin_ns <= growing->end_ns + FY__EVENTS_GAP_NS) {
        if (event->begin_ns < growing->begin_ns)
            growing->begin_ns = event->begin_ns;
        if (event->end_ns > growing->end_ns)
            growing->end_ns = event->end_ns;
        growing->bytes += event->bytes;
        return;
    }
    grown(events, growing);
    *growing = *event;
}

uint32_t fy__events_take(struct fy__events *events, fy_event *out, uint32_t capacity, uint64_t *dropped)
{
    assert(dropped != NULL);
    assert(out != NULL || capacity == 0);
    for (uint32_t i = 0; i < 2; i++)
        grown(events, &events->growing[i]);
    const uint32_t taken = events->count < capacity ? events->count : capacity;
    for (uint32_t i = 0; i < taken; i++)
        out[i] = events->entries[(events->first + i) % FY__EVENTS_MAX];
    events->first = (events->first + taken) % FY__EVENTS_MAX;
    events->count -= taken;
    *dropped = events->dropped;
    events->dropped = 0;
    return taken;
}
