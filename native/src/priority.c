/*
 * priority.c - the one priority queue: spans to issue, updates to begin, chunks to compute.
 *
 * A binary heap over an array sized at start. Callers hold the daemon's lock. A full heap is a programmer error: the
 * tables its items come from are smaller than it.
 */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>

static bool before(const struct fy__order *a, const struct fy__order *b)
{
    assert(a != b);
    if (a->priority != b->priority)
        return a->priority < b->priority;
    if (a->sequence != b->sequence)
        return a->sequence < b->sequence;
    return a->position < b->position;
}

int fy__heap_create(struct fy__heap *heap, uint32_t capacity)
{
    assert(capacity > 0);
    heap->items = fy__system.calloc(capacity, sizeof *heap->items);
    heap->capacity = heap->items != NULL ? capacity : 0;
    heap->count = 0;
    return heap->items != NULL ? 0 : -ENOMEM;
}

void fy__heap_destroy(struct fy__heap *heap)
{
    assert(heap->count <= heap->capacity);
    free(heap->items);
    heap->items = NULL;
}

/* Moves the item at `index` towards the root until its parent goes before it. */
static void rise(struct fy__heap *heap, uint32_t index)
{
    assert(index < heap->count);
    const struct fy__heap_item moved = heap->items[index];
    while (index > 0) {
        const uint32_t parent = (index - 1) / 2;
        if (!before(&moved.order, &heap->items[parent].order))
            break;
        heap->items[index] = heap->items[parent];
        index = parent;
    }
    heap->items[index] = moved;
}

/* Moves the item at `index` away from the root until it goes before its children. */
static void sink(struct fy__heap *heap, uint32_t index)
{
    assert(index < heap->count);
    const struct fy__heap_item moved = heap->items[index];
    for (;;) { /* at most log2(capacity) rounds: index doubles */
        uint32_t child = 2 * index + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && before(&heap->items[child + 1].order, &heap->items[child].order))
            child++;
        if (!before(&heap->items[child].order, &moved.order))
            break;
        heap->items[index] = heap->items[child];
        index = child;
    }
    heap->items[index] = moved;
}

void fy__heap_push(struct fy__heap *heap, struct fy__order order, void *item)
{
    assert(heap->count < heap->capacity);
    assert(item != NULL);
    heap->items[heap->count] = (struct fy__heap_item){.order = order, .item = item};
    heap->count++;
    rise(heap, heap->count - 1);
}

void *fy__heap_top(const struct fy__heap *heap)
{
    assert(heap->count <= heap->capacity);
    return heap->count > 0 ? heap->items[0].item : NULL;
}

void fy__heap_remove(struct fy__heap *heap, uint32_t index)
{
    assert(index < heap->count);
    heap->count--;
    if (index == heap->count)
        return;
    heap->items[index] = heap->items[heap->count];
    sink(heap, index);
    rise(heap, index);
}

void *fy__heap_pop(struct fy__heap *heap)
{
    void *top = fy__heap_top(heap);
    assert((top != NULL) == (heap->count > 0));
    if (top != NULL)
        fy__heap_remove(heap, 0);
    return top;
}
