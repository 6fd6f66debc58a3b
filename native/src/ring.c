/*
 * ring.c - the io_uring backend: blocks go to the kernel and come back.
 *
 * One thread owns the ring: it alone makes submissions and reaps completions, so the kernel can be told so
 * (SINGLE_ISSUER), completions are run when we ask and not by interrupting us (DEFER_TASKRUN), and the ring needs no
 * lock. A pass of the loop is: under the daemon's lock judge what came back and take what may leave; outside it fill
 * submissions and enter the kernel once, for all of them and for at least one answer.
 *
 * Other threads wake it by writing to an eventfd whose read is kept armed in the ring, and only when it sleeps although
 * there is something it could send: under load its own completions wake it and the doorbell stays silent.
 */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define DOORBELL UINT64_MAX      /* user_data of the doorbell's read; blocks use their index */
#define ENTER_FAILURES_MAX 2000u /* in a row, a millisecond apart, before the ring is given up */
#define ENTER_PAUSE_NS 1000000

static struct io_uring_sqe *next_sqe(struct fy__ring *ring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    assert(sqe != NULL); /* the ring has room for every block and the doorbell */
    return sqe;
}

static void submit_block(const fy_daemon *daemon, struct fy__ring *ring, const struct fy__block *block)
{
    assert(block->done < block->wanted);
    assert(!ring->with_kernel[block->index]);
    struct io_uring_sqe *sqe = next_sqe(ring);
    const uint64_t at = block->arena + block->done;
    const unsigned size = (unsigned)fy__whole_pages(block->wanted - block->done);
    const uint64_t offset = block->offset + block->done;
    const uint64_t buffer = at / FY__RING_BUFFER;
    const bool fixed = ring->buffers_fixed > 0 && (at + size - 1) / FY__RING_BUFFER == buffer;
    const int fd = ring->files_fixed ? (int)block->file : daemon->store->files[block->file].fd;
    void *data = daemon->arena->base + at;
    assert(size % FY__PAGE == 0);
    if (block->operation == FY_OP_READ && fixed)
        io_uring_prep_read_fixed(sqe, fd, data, size, offset, (int)buffer);
    else if (block->operation == FY_OP_READ)
        io_uring_prep_read(sqe, fd, data, size, offset);
    else if (fixed)
        io_uring_prep_write_fixed(sqe, fd, data, size, offset, (int)buffer);
    else
        io_uring_prep_write(sqe, fd, data, size, offset);
    if (ring->files_fixed)
        io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, block->index);
    ring->with_kernel[block->index] = true;
}

static void arm_doorbell(const fy_daemon *daemon, struct fy__ring *ring)
{
    assert(daemon->doorbell >= 0);
    if (ring->doorbell_armed)
        return;
    struct io_uring_sqe *sqe = next_sqe(ring);
    io_uring_prep_read(sqe, daemon->doorbell, &ring->doorbell_value, sizeof ring->doorbell_value, 0);
    io_uring_sqe_set_data64(sqe, DOORBELL);
    ring->doorbell_armed = true;
}

static void collect(const fy_daemon *daemon, struct fy__ring *ring)
{
    assert(ring->completions_count == 0);
    struct io_uring_cqe *cqe;
    unsigned head;
    unsigned seen = 0;
    io_uring_for_each_cqe(&ring->uring, head, cqe) { /* at most what is in flight */
        seen++;
        const uint64_t data = io_uring_cqe_get_data64(cqe);
        if (data == DOORBELL) {
            ring->doorbell_armed = false; /* whatever its result: it is armed again and rings again */
            continue;
        }
        assert(data < FY__RING_BLOCKS_MAX);
        assert(ring->with_kernel[data]);
        assert(ring->completions_count < FY__RING_BLOCKS_MAX);
        const struct fy__block *block = &daemon->blocks[data];
        ring->with_kernel[data] = false;
        ring->completions[ring->completions_count++] = (struct fy__completion){
            .block = (uint32_t)data,
            .result = fy__system.ring_result(block->operation, cqe->res, (uint32_t)(block->wanted - block->done)),
        };
    }
    io_uring_cq_advance(&ring->uring, seen);
}

/* Sends what is filled in and sleeps until something comes back. False: the kernel refuses for good. */
static bool enter(struct fy__ring *ring, int *error)
{
    assert(ring->doorbell_armed); /* or nobody could wake us */
    assert(ring->enter_failures <= ENTER_FAILURES_MAX);
    int result = fy__system.ring_enter();
    if (result == 0)
        result = io_uring_submit_and_wait(&ring->uring, 1);
    if (result >= 0) {
        ring->enter_failures = 0;
        return true;
    }
    *error = result;
    if (result == -EINTR)
        return true; /* a signal; the next pass goes on */
    ring->enter_failures++;
    /* Short of memory or of room (EAGAIN, EBUSY, ENOMEM) passes with time; anything else will not. */
    if ((result != -EAGAIN && result != -EBUSY && result != -ENOMEM) || ring->enter_failures > ENTER_FAILURES_MAX)
        return false;
    const struct timespec pause = {.tv_nsec = ENTER_PAUSE_NS};
    (void)nanosleep(&pause, NULL); /* woken early is as good */
    return true;
}

/* Under the lock: judges what came back, takes what may leave. */
static uint32_t exchange(fy_daemon *daemon, struct fy__ring *ring)
{
    assert(daemon->locked);
    assert(ring->completions_count <= FY__RING_BLOCKS_MAX);
    for (uint32_t i = 0; i < ring->completions_count; i++) {
        const uint32_t next = i + fy__system.ring_next(ring->completions_count - i);
        assert(next < ring->completions_count);
        const struct fy__completion completion = ring->completions[next];
        ring->completions[next] = ring->completions[i];
        fy__queue_finish(daemon, &daemon->blocks[completion.block], completion.result);
    }
    ring->completions_count = 0;
    uint32_t count = 0;
    for (uint32_t channel = 0; channel < 2; channel++) {
        struct fy__block *block = fy__queue_take(daemon, channel);
        while (block != NULL) { /* the channel's bound ends it */
            assert(count < FY__RING_BLOCKS_MAX);
            ring->batch[count++] = block;
            block = fy__queue_take(daemon, channel);
        }
    }
    return count;
}

/* The kernel does not let us in any more. The ring is closed, which cancels what it can and does not wait for the rest: an
 * I/O under way may still reach its span of the arena, even after stop, whence rule 2 of fuyou.h. Everything in flight fails
 * with EIO and everything to come with the kernel's own error, so nothing is computed on such a span. */
static void refuse_everything(fy_daemon *daemon, struct fy__ring *ring, int error)
{
    assert(error < 0);
    io_uring_queue_exit(&ring->uring);
    fy__lock(daemon);
    for (uint32_t i = 0; i < FY__RING_BLOCKS_MAX; i++) {
        if (ring->with_kernel[i])
            ring->completions[ring->completions_count++] = (struct fy__completion){.block = i, .result = -EIO};
        ring->with_kernel[i] = false;
    }
    while (!daemon->closing) { /* until stop */
        const uint32_t count = exchange(daemon, ring);
        for (uint32_t i = 0; i < count; i++)
            fy__queue_finish(daemon, ring->batch[i], error == -EAGAIN ? -EIO : error);
        if (count > 0)
            continue;
        daemon->ring_asleep = true;
        fy__unlock(daemon);
        uint64_t value;
        (void)!read(daemon->doorbell, &value, sizeof value); /* wakes; what it says does not matter */
        fy__lock(daemon);
        daemon->ring_asleep = false;
    }
    fy__unlock(daemon);
}

static void ring_loop(fy_daemon *daemon, struct fy__ring *ring)
{
    for (;;) { /* until stop: a pass sleeps in the kernel or moves blocks */
        fy__lock(daemon);
        daemon->ring_asleep = false;
        const uint32_t count = exchange(daemon, ring);
        const bool leave = daemon->closing;
        daemon->ring_asleep = true;
        fy__unlock(daemon);
        if (leave) {
            assert(count == 0);
            io_uring_queue_exit(&ring->uring);
            return;
        }
        for (uint32_t i = 0; i < count; i++)
            submit_block(daemon, ring, ring->batch[i]);
        arm_doorbell(daemon, ring);
        int error = 0;
        const bool usable = enter(ring, &error);
        collect(daemon, ring);
        if (!usable) {
            refuse_everything(daemon, ring, error);
            return;
        }
    }
}

static void *ring_thread(void *argument)
{
    fy_daemon *daemon = argument;
    struct fy__ring *ring = daemon->ring;
    assert(ring != NULL);
    const int error = fy__ring_setup(daemon, ring);
    fy__lock(daemon);
    ring->setup_done = true;
    ring->setup_error = error;
    pthread_cond_signal(&ring->started);
    fy__unlock(daemon);
    if (error == 0)
        ring_loop(daemon, ring);
    return NULL;
}

/* Makes the ring's thread and hears from it how the set-up went: a single issuer must be the one who sets up. */
static int launch(fy_daemon *daemon, struct fy__ring *ring)
{
    assert(daemon->ring == ring);
    assert(!ring->setup_done);
    const int error = fy__system.thread_create(&daemon->io_threads[0], NULL, ring_thread, daemon);
    if (error != 0)
        return -error;
    fy__lock(daemon);
    while (!ring->setup_done)
        fy__sleep(daemon, &ring->started);
    fy__unlock(daemon);
    if (ring->setup_error != 0)
        (void)pthread_join(daemon->io_threads[0], NULL); /* it is leaving */
    else
        daemon->io_threads_count = 1;
    return ring->setup_error;
}

int fy__ring_start(fy_daemon *daemon, char *note, size_t note_size)
{
    assert(note_size > 0);
    assert(daemon->ring == NULL);
    assert(daemon->doorbell < 0);
    assert(daemon->io_threads_count == 0);
    struct fy__ring *ring = fy__system.calloc(1, sizeof *ring);
    if (ring == NULL)
        return -ENOMEM;
    ring->note = note;
    ring->note_size = note_size;
    /* Not EFD_NONBLOCK: an armed read of a non-blocking eventfd would come back with EAGAIN at once. */
    const int doorbell = fy__system.eventfd(0, EFD_CLOEXEC);
    int error = doorbell < 0 ? -errno : 0;
    if (error != 0) {
        free(ring);
        return error;
    }
    error = -pthread_cond_init(&ring->started, NULL);
    if (error != 0) {
        (void)fy__system.close(doorbell); /* already failing */
        free(ring);
        return error;
    }
    daemon->ring = ring;
    daemon->doorbell = doorbell;
    error = launch(daemon, ring);
    if (error != 0)
        fy__ring_destroy(daemon);
    return error;
}

void fy__ring_destroy(fy_daemon *daemon)
{
    struct fy__ring *ring = daemon->ring;
    assert((ring != NULL) == (daemon->doorbell >= 0));
    if (ring == NULL)
        return;
    (void)fy__system.close(daemon->doorbell); /* an eventfd has nothing to lose */
    (void)pthread_cond_destroy(&ring->started);
    free(ring);
    daemon->ring = NULL;
    daemon->doorbell = -1;
}
