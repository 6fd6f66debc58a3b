/*
 * arena.c - one span of host memory that everything the daemon moves lives in.
 *
 * Anonymous memory, advised to huge pages (fewer faults, cheaper pinning per I/O) and away from forked children: a
 * child that inherited pages under direct I/O would copy them on write and the parent's I/O would land in the wrong
 * copy. Pages appear when first touched, so an arena costs what is used of it.
 *
 * Any thread may ask for base and size. `users` counts the daemons in it; the arena goes only when none is left.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Slack so that the base falls on a huge page whatever mmap returns. */
static uint64_t mapped_size(uint64_t size)
{
    assert(size > 0);
    assert(size <= FY__SPAN_MAX);
    return size + FY__HUGE_PAGE;
}

static int arena_map(fy_arena *arena, uint64_t size)
{
    assert(arena->mapping == NULL);
    const size_t whole = (size_t)mapped_size(size);
    void *mapping = fy__system.mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                    -1, 0);
    if (mapping == MAP_FAILED)
        return -errno;
    if (fy__system.madvise(mapping, whole, MADV_DONTFORK) != 0) {
        const int error = -errno;
        (void)fy__system.munmap(mapping, whole); /* already failing: the first error is the one to report */
        return error;
    }
    /* A kernel without huge pages refuses this, and everything still works on small ones. */
    (void)fy__system.madvise(mapping, whole, MADV_HUGEPAGE);
    const uintptr_t aligned = ((uintptr_t)mapping + FY__HUGE_PAGE - 1) & ~(uintptr_t)(FY__HUGE_PAGE - 1);
    arena->mapping = mapping;
    arena->base = (unsigned char *)aligned;
    arena->size = size;
    return 0;
}

FY_API int fy_arena_create(uint64_t size, fy_arena **out)
{
    if (out == NULL || size == 0 || size > FY__SPAN_MAX)
        return -EINVAL;
    fy_arena *arena = fy__system.calloc(1, sizeof *arena);
    if (arena == NULL)
        return -ENOMEM;
    const int error = arena_map(arena, size);
    if (error != 0) {
        free(arena);
        return error;
    }
    assert(((uintptr_t)arena->base & (FY__HUGE_PAGE - 1)) == 0);
    arena->process = getpid();
    atomic_init(&arena->users, 0);
    *out = arena;
    return 0;
}

FY_API void *fy_arena_base(const fy_arena *arena)
{
    assert(arena != NULL);
    assert(arena->base != NULL);
    return arena->process == getpid() ? arena->base : NULL;
}

FY_API uint64_t fy_arena_size(const fy_arena *arena)
{
    assert(arena != NULL);
    assert(arena->size > 0);
    return arena->size;
}

FY_API int fy_arena_destroy(fy_arena *arena)
{
    if (arena == NULL)
        return 0;
    if (arena->process != getpid())
        return -EPERM;
    if (atomic_load(&arena->users) != 0)
        return -EBUSY;
    assert(arena->mapping != NULL);
    if (fy__system.munmap(arena->mapping, (size_t)mapped_size(arena->size)) != 0)
        return -errno;
    free(arena);
    return 0;
}
