/*
 * pool.c - the backend for kernels, containers and builds without io_uring: threads that each do one pread or pwrite.
 *
 * Every thread serves one direction, so the two bounds hold by themselves; a thread is an I/O in flight. Judging,
 * retrying and order are the queue's, the same as for the ring. A thread owns its block while it is outside the lock.
 */
#include "internal.h"

#include <errno.h>

static int64_t block_move(const fy_daemon *daemon, const struct fy__block *block)
{
    assert(block->span != NULL);
    assert(block->done < block->wanted);
    unsigned char *data = daemon->arena->base + block->arena + block->done;
    const int fd = daemon->store->files[block->file].fd;
    const size_t size = (size_t)fy__whole_pages(block->wanted - block->done);
    const off_t offset = (off_t)(block->offset + block->done);
    const ssize_t moved = block->operation == FY_OP_READ ? fy__system.pread(fd, data, size, offset)
                                                         : fy__system.pwrite(fd, data, size, offset);
    return moved >= 0 ? moved : -errno;
}

static void *pool_thread(fy_daemon *daemon, uint32_t channel)
{
    assert(channel < 2);
    assert(daemon->doorbell < 0);
    fy__lock(daemon);
    while (!daemon->closing) { /* until stop: a pass sleeps or moves a block */
        struct fy__block *block = fy__queue_take(daemon, channel);
        if (block == NULL) {
            daemon->pool_idle[channel]++;
            fy__sleep(daemon, &daemon->work[channel]);
            daemon->pool_idle[channel]--;
            continue;
        }
        fy__unlock(daemon); /* wakes the next thread if there is more */
        const int64_t result = block_move(daemon, block);
        fy__lock(daemon);
        fy__queue_finish(daemon, block, result);
    }
    fy__unlock(daemon);
    return NULL;
}

static void *read_thread(void *daemon)
{
    return pool_thread(daemon, 0);
}

static void *write_thread(void *daemon)
{
    return pool_thread(daemon, 1);
}

int fy__pool_start(fy_daemon *daemon)
{
    assert(daemon->ring == NULL);
    assert(daemon->io_threads_count == 0);
    void *(*const bodies[2])(void *) = {read_thread, write_thread};
    for (uint32_t channel = 0; channel < 2; channel++) {
        const uint32_t depth = daemon->channels[channel].depth;
        const uint32_t threads = depth < FY__POOL_THREADS_MAX ? depth : FY__POOL_THREADS_MAX;
        for (uint32_t i = 0; i < threads; i++) {
            pthread_t *thread = &daemon->io_threads[daemon->io_threads_count];
            const int error = fy__system.thread_create(thread, NULL, bodies[channel], daemon);
            if (error != 0)
                return -error; /* the caller stops those that run */
            daemon->io_threads_count++;
        }
    }
    return 0;
}
