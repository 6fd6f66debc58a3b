/*
 * ring_setup.c - what is asked of the kernel once: a ring, and that it remembers our files and the arena.
 *
 * SINGLE_ISSUER and DEFER_TASKRUN suit a thread that alone submits and reaps. Kernels without them get fewer flags; never
 * SQPOLL, which burns a core and is not faster.
 *
 * Registered files save a reference count per I/O. Registered buffers pin the arena, so they are tried only when
 * RLIMIT_MEMLOCK covers all of it; unregistered buffers are the ordinary case. At most 1 GiB fits one registration.
 */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define FEATURES_NEEDED (IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS) /* 5.6: nothing lost, plain READ and WRITE */

static void note_add(struct fy__ring *ring, const char *text)
{
    assert(!ring->setup_done); /* the note is the starting thread's from then on */
    const size_t used = strlen(ring->note);
    assert(used < ring->note_size);
    (void)snprintf(ring->note + used, ring->note_size - used, "%s%s", used > 0 ? ", " : "", text);
}

/* Whether the kernel lets us in, asked with a request that does nothing: a filter may allow a ring and forbid to enter it. */
static int answers(struct fy__ring *ring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    assert(sqe != NULL); /* the ring is empty */
    io_uring_prep_nop(sqe);
    int entered = -EINTR;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && entered == -EINTR; attempt++)
        entered = io_uring_submit_and_wait(&ring->uring, 1);
    if (entered < 0)
        return entered;
    struct io_uring_cqe *cqe = NULL;
    const int error = io_uring_peek_cqe(&ring->uring, &cqe);
    if (error != 0)
        return error;
    const int result = cqe->res;
    io_uring_cqe_seen(&ring->uring, cqe);
    return result;
}

static int try_flags(struct fy__ring *ring, unsigned entries, unsigned flags)
{
    assert(entries > 0);
    assert(entries <= FY__RING_BLOCKS_MAX + 1);
    const int refused = fy__system.ring_setup(flags);
    if (refused != 0)
        return refused;
    struct io_uring_params params = {.flags = flags};
    int error = io_uring_queue_init_params(entries, &ring->uring, &params);
    if (error != 0)
        return error;
    error = (params.features & FEATURES_NEEDED) == FEATURES_NEEDED ? answers(ring) : -ENOSYS;
    if (error != 0)
        io_uring_queue_exit(&ring->uring);
    return error;
}

/* The ladder: each rung asks for less of the kernel. Only "I do not know these flags" (EINVAL) leads to the next. */
static int queues_setup(struct fy__ring *ring, unsigned entries)
{
    static const struct {
        unsigned flags;
        const char *note;
    } rungs[] = {
        {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, "single issuer, deferred task work"},
        {IORING_SETUP_COOP_TASKRUN, "cooperative task work (the kernel has no deferred task work)"},
        {0, "plain ring (the kernel has no cooperative task work)"},
    };
    int error = -EINVAL;
    for (size_t i = 0; i < sizeof rungs / sizeof rungs[0] && error == -EINVAL; i++) {
        error = try_flags(ring, entries, rungs[i].flags);
        if (error == 0)
            note_add(ring, rungs[i].note);
    }
    return error;
}

static void register_files(const fy_daemon *daemon, struct fy__ring *ring)
{
    assert(daemon->store->count > 0);
    assert(daemon->store->count <= FY_MAX_DIRECTORIES);
    const uint32_t count = daemon->store->count + daemon->store->sources;
    int fds[FY_MAX_DIRECTORIES + FY_MAX_SOURCES];
    for (uint32_t i = 0; i < count; i++)
        fds[i] = daemon->store->files[i].fd;
    ring->files_fixed = io_uring_register_files(&ring->uring, fds, count) == 0;
    note_add(ring, ring->files_fixed ? "registered files" : "unregistered files (refused by the kernel)");
}

static void register_buffers(const fy_daemon *daemon, struct fy__ring *ring)
{
    assert(ring->buffers_fixed == 0);
    const uint64_t size = daemon->arena->size;
    char text[128];
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        limit.rlim_cur = 0;
    const uint64_t count = (size + FY__RING_BUFFER - 1) / FY__RING_BUFFER;
    if (size > limit.rlim_cur || count > FY__RING_BUFFERS_MAX) {
        (void)snprintf(text, sizeof text, "unregistered buffers (arena of %llu MiB, RLIMIT_MEMLOCK %llu MiB)",
                       (unsigned long long)(size >> 20), (unsigned long long)(limit.rlim_cur >> 20));
        note_add(ring, text);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t left = size - i * FY__RING_BUFFER;
        ring->buffers[i] = (struct iovec){
            .iov_base = daemon->arena->base + i * FY__RING_BUFFER,
            .iov_len = (size_t)(left < FY__RING_BUFFER ? left : FY__RING_BUFFER),
        };
    }
    const int error = io_uring_register_buffers(&ring->uring, ring->buffers, (unsigned)count);
    ring->buffers_fixed = error == 0 ? (uint32_t)count : 0;
    (void)snprintf(text, sizeof text, error == 0 ? "registered buffers" : "unregistered buffers (refused: errno %d)",
                   -error);
    note_add(ring, text);
}

int fy__ring_setup(const fy_daemon *daemon, struct fy__ring *ring)
{
    assert(!ring->setup_done);
    const int error = queues_setup(ring, daemon->options.read_depth + daemon->options.write_depth + 1);
    if (error != 0)
        return error;
    (void)io_uring_ring_dontfork(&ring->uring);    /* a child may not call us anyway */
    (void)io_uring_register_ring_fd(&ring->uring); /* saves a descriptor lookup; older kernels lack it */
    register_files(daemon, ring);
    register_buffers(daemon, ring);
    return 0;
}
