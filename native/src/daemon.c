/*
 * daemon.c - start, stop, and what can be read off a running daemon.
 *
 * Start sizes and allocates every table, then makes the threads: one for the ring (or a pool of them where io_uring is
 * refused) and the update threads. After it nothing is allocated, opened or registered. Stop takes that back in
 * reverse: it refuses new requests, fails what is outstanding, lets the kernel and the update threads finish what they
 * hold, lets waiting threads leave, and joins.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

FY_API uint64_t fy_scratch_size(uint32_t chunk_params, uint32_t chunks)
{
    assert(chunk_params == 0 || chunks <= UINT64_MAX / FY__SCRATCH_PER_PARAM / chunk_params);
    return (uint64_t)chunk_params * FY__SCRATCH_PER_PARAM * chunks;
}

/* 0, or the index of the first option that cannot be (counted from 1, in the order of fy_options). */
static uint32_t options_wrong(const fy_options *options, const fy_arena *arena)
{
    const uint64_t one_chunk = fy_scratch_size(options->chunk_params, 1);
    const bool updates = options->update_threads > 0;
    if (options->backend > FY_BACKEND_THREADS)
        return 1;
    if (options->read_depth == 0 || options->read_depth > FY__DEPTH_MAX)
        return 2;
    if (options->write_depth == 0 || options->write_depth > FY__DEPTH_MAX)
        return 3;
    if (options->update_threads > FY__UPDATE_THREADS_MAX)
        return 4;
    if (options->requests == 0 || options->requests > FY__REQUESTS_MAX)
        return 5;
    if (updates && (options->chunk_params == 0 || options->chunk_params % FY__CHUNK_UNIT != 0))
        return 6;
    if (options->block_size == 0 || options->block_size % FY__PAGE != 0 || options->block_size > FY__BLOCK_MAX)
        return 7;
    if (options->scratch_offset % FY__PAGE != 0)
        return 8;
    if (!fy__inside(options->scratch_offset, options->scratch_size, arena->size))
        return 9;
    if (updates && options->scratch_size / 2 < one_chunk)
        return 9;
    if ((options->flags & ~(uint32_t)FY_DAEMON_DATA_SUMS) != 0)
        return 10;
    return options->reserved != 0 ? 11 : 0;
}

static int blocks_create(fy_daemon *daemon)
{
    assert(daemon->blocks == NULL);
    const uint32_t depths[2] = {daemon->options.read_depth, daemon->options.write_depth};
    daemon->blocks = fy__system.calloc(depths[0] + depths[1], sizeof *daemon->blocks);
    if (daemon->blocks == NULL)
        return -ENOMEM;
    uint32_t index = 0;
    for (uint32_t c = 0; c < 2; c++) {
        struct fy__channel *channel = &daemon->channels[c];
        channel->depth = depths[c];
        for (uint32_t i = 0; i < depths[c]; i++, index++) {
            daemon->blocks[index].index = index;
            daemon->blocks[index].next = channel->free;
            channel->free = &daemon->blocks[index];
        }
        const int error = fy__heap_create(&channel->spans,
                                          daemon->options.requests + FY__SLOT_SPANS * FY__LANES * daemon->slots_count);
        if (error != 0)
            return error;
    }
    return 0;
}

static int tables_create(fy_daemon *daemon)
{
    assert(daemon->requests == NULL);
    assert((daemon->slots_count > 0) == (daemon->options.update_threads > 0));
    const uint32_t requests = daemon->options.requests;
    const uint32_t slots = daemon->slots_count;
    daemon->requests = fy__system.calloc(requests, sizeof *daemon->requests);
    daemon->events.entries = fy__system.calloc(FY__EVENTS_MAX, sizeof *daemon->events.entries);
    daemon->chunks.entries = fy__system.calloc(FY__EVENTS_MAX, sizeof *daemon->chunks.entries); /* no pages until it is used */
    if (daemon->requests == NULL || daemon->events.entries == NULL || daemon->chunks.entries == NULL)
        return -ENOMEM;
    if (slots > 0) {
        daemon->segments = fy__system.calloc((size_t)requests * FY_MAX_SEGMENTS, sizeof *daemon->segments);
        daemon->slots = fy__system.calloc((size_t)FY__LANES * slots, sizeof *daemon->slots);
        if (daemon->segments == NULL || daemon->slots == NULL)
            return -ENOMEM;
        for (uint32_t lane = 0; lane < FY__LANES; lane++)
            if (fy__heap_create(&daemon->lanes[lane].updates, requests) != 0)
                return -ENOMEM;
        if (fy__heap_create(&daemon->computing, FY__LANES * slots) != 0 || fy__heap_create(&daemon->moved, requests) != 0)
            return -ENOMEM;
    }
    for (uint32_t i = 0; i < FY__LANES * slots; i++) {
        struct fy__slot *slot = &daemon->slots[i];
        slot->lane = (enum fy__lane_name)(i / slots);
        slot->index = i % slots;
        slot->next = daemon->lanes[slot->lane].free;
        daemon->lanes[slot->lane].free = slot;
    }
    for (uint32_t i = requests; i > 0; i--) { /* from the end, so that the first row is the first used */
        struct fy__request *request = &daemon->requests[i - 1];
        request->index = i - 1;
        request->segments = slots > 0 ? &daemon->segments[(size_t)(i - 1) * FY_MAX_SEGMENTS] : NULL;
        request->next_free = daemon->requests_free;
        daemon->requests_free = request;
    }
    return blocks_create(daemon);
}

static void tables_destroy(fy_daemon *daemon)
{
    assert(daemon->ring == NULL); /* no thread is left */
    for (uint32_t c = 0; c < 2; c++)
        fy__heap_destroy(&daemon->channels[c].spans);
    fy__heap_destroy(&daemon->moved);
    fy__heap_destroy(&daemon->computing);
    for (uint32_t lane = 0; lane < FY__LANES; lane++)
        fy__heap_destroy(&daemon->lanes[lane].updates);
    free(daemon->blocks);
    free(daemon->slots);
    free(daemon->segments);
    free(daemon->chunks.entries);
    free(daemon->events.entries);
    free(daemon->requests);
}

/* Locks and conditions; waits are timed by the monotonic clock. */
static int sync_create(fy_daemon *daemon)
{
    pthread_condattr_t monotonic;
    int error = pthread_condattr_init(&monotonic);
    if (error != 0)
        return -error;
    error = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    if (error == 0)
        error = pthread_mutex_init(&daemon->lock, NULL);
    pthread_cond_t *const fixed[] = {&daemon->idle, &daemon->ready, &daemon->work[0], &daemon->work[1]};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0] && error == 0; i++)
        error = pthread_cond_init(fixed[i], &monotonic);
    for (uint32_t i = 0; i < daemon->options.requests && error == 0; i++)
        error = pthread_cond_init(&daemon->requests[i].finished, &monotonic);
    (void)pthread_condattr_destroy(&monotonic); /* cannot fail once made */
    return -error;
}

/* None of these can fail when nobody waits any more; on Linux they hold no resource of their own. */
static void sync_destroy(fy_daemon *daemon)
{
    assert(!daemon->locked);
    assert(daemon->waiters == 0);
    for (uint32_t i = 0; i < daemon->options.requests; i++)
        (void)pthread_cond_destroy(&daemon->requests[i].finished);
    pthread_cond_t *const fixed[] = {&daemon->idle, &daemon->ready, &daemon->work[0], &daemon->work[1]};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
        (void)pthread_cond_destroy(fixed[i]);
    (void)pthread_mutex_destroy(&daemon->lock);
}

static const char *why_refused(int error)
{
    assert(error < 0);
    switch (error) {
    case -EPERM: return "not permitted: a sysctl (kernel.io_uring_disabled), seccomp or a container forbids it";
    case -EACCES: return "access denied";
    case -ENOSYS: return "not in this kernel or build, or forbidden by seccomp";
    case -ENOMEM: return "no memory (RLIMIT_MEMLOCK?)";
    case -EMFILE: return "too many open files";
    default: return "set-up failed";
    }
}

static int backend_start(fy_daemon *daemon)
{
    assert(daemon->io_threads_count == 0);
    char note[FY__DESCRIPTION_MAX / 2] = "";
    const fy_options *options = &daemon->options;
    const char *direct = fy_store_is_direct(daemon->store) ? "O_DIRECT" : "buffered I/O (no O_DIRECT on this store)";
    int error = 0;
    if (options->backend != FY_BACKEND_THREADS) {
        error = fy__ring_start(daemon, note, sizeof note);
        if (error == 0) {
            daemon->backend = FY_BACKEND_IO_URING;
            (void)snprintf(daemon->description, sizeof daemon->description,
                           "io_uring: %s; %s; %u reads and %u writes in flight", note, direct, options->read_depth,
                           options->write_depth);
            return 0;
        }
        if (options->backend == FY_BACKEND_IO_URING)
            return error;
        (void)snprintf(note, sizeof note, "io_uring refused: errno %d, %s", -error, why_refused(error));
    } else {
        (void)snprintf(note, sizeof note, "asked for");
    }
    daemon->backend = FY_BACKEND_THREADS;
    error = fy__pool_start(daemon);
    (void)snprintf(daemon->description, sizeof daemon->description, "threads (%s): %u threads; %s", note,
                   daemon->io_threads_count, direct);
    return error;
}

static int updates_start(fy_daemon *daemon)
{
    assert(daemon->update_threads_count == 0);
    for (uint32_t i = 0; i < daemon->options.update_threads; i++) {
        const int error = fy__system.thread_create(&daemon->update_threads[i], NULL, fy__update_thread, daemon);
        if (error != 0)
            return -error;
        daemon->update_threads_count++;
    }
    return 0;
}

/* Threads inherit the creator's mask: signals are the host's business and go to the host's threads. Those that a thread
 * raises itself by a fault stay, or a crash would leave no trace. */
static int threads_start(fy_daemon *daemon)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigset_t blocked;
    sigset_t before;
    int error = sigfillset(&blocked) != 0 ? -errno : 0;
    for (size_t i = 0; i < sizeof own / sizeof own[0] && error == 0; i++)
        error = sigdelset(&blocked, own[i]) != 0 ? -errno : 0;
    if (error == 0)
        error = -pthread_sigmask(SIG_SETMASK, &blocked, &before);
    if (error != 0)
        return error;
    error = backend_start(daemon);
    if (error == 0)
        error = updates_start(daemon);
    const int restored = -pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error != 0 ? error : restored;
}

/* Sends all threads home and waits for them. Nothing is outstanding. */
static void threads_join(fy_daemon *daemon)
{
    fy__lock(daemon);
    assert(daemon->outstanding == 0);
    assert(daemon->channels[0].in_flight == 0);
    assert(daemon->channels[1].in_flight == 0);
    assert(!daemon->closing);
    daemon->closing = true;
    pthread_cond_broadcast(&daemon->ready);
    for (uint32_t channel = 0; channel < 2; channel++)
        pthread_cond_broadcast(&daemon->work[channel]);
    fy__unlock(daemon);
    for (uint32_t i = 0; i < daemon->update_threads_count; i++)
        (void)pthread_join(daemon->update_threads[i], NULL); /* ours, never detached */
    for (uint32_t i = 0; i < daemon->io_threads_count; i++)
        (void)pthread_join(daemon->io_threads[i], NULL); /* ours, never detached */
    fy__ring_destroy(daemon);
}

FY_API int fy_daemon_start(const fy_options *options, fy_arena *arena, fy_store *store, fy_daemon **out,
                           fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (options == NULL || arena == NULL || store == NULL || out == NULL)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    if (arena->process != getpid() || store->process != getpid())
        return fy__failed(why, -EPERM, FY_OP_SETUP, 0, 0, 0);
    const uint32_t wrong = options_wrong(options, arena);
    if (wrong != 0)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, wrong, 0);
    fy_daemon *daemon = fy__system.calloc(1, sizeof *daemon);
    if (daemon == NULL)
        return fy__failed(why, -ENOMEM, FY_OP_SETUP, 0, 0, 0);
    daemon->options = *options;
    daemon->arena = arena;
    daemon->store = store;
    daemon->process = getpid();
    daemon->doorbell = -1;
    if (options->update_threads > 0) {
        const uint64_t slots = options->scratch_size / fy_scratch_size(options->chunk_params, 1);
        daemon->slots_count = slots < FY__SLOTS_MAX ? (uint32_t)slots : FY__SLOTS_MAX;
    }
    int error = tables_create(daemon);
    if (error == 0)
        error = sync_create(daemon);
    if (error != 0)
        goto fail_tables;
    error = threads_start(daemon);
    if (error != 0)
        goto fail_threads;
    assert(daemon->io_threads_count > 0);
    assert(daemon->update_threads_count == options->update_threads);
    atomic_fetch_add(&arena->users, 1);
    atomic_fetch_add(&store->users, 1);
    *out = daemon;
    return 0;

fail_threads:
    threads_join(daemon);
    sync_destroy(daemon);
fail_tables:
    tables_destroy(daemon);
    free(daemon);
    return fy__failed(why, error, FY_OP_SETUP, 0, 0, 0);
}

FY_API int fy_daemon_backend(const fy_daemon *daemon)
{
    assert(daemon != NULL);
    assert(daemon->backend == FY_BACKEND_IO_URING || daemon->backend == FY_BACKEND_THREADS);
    return (int)daemon->backend;
}

FY_API const char *fy_daemon_description(const fy_daemon *daemon)
{
    assert(daemon != NULL);
    assert(daemon->description[0] != '\0');
    return daemon->description;
}

FY_API int fy_daemon_stop(fy_daemon *daemon)
{
    if (daemon == NULL)
        return 0;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    fy__lock(daemon);
    assert(!daemon->stopping);
    daemon->stopping = true;
    const fy_failure canceled = {.error = -ECANCELED};
    for (uint32_t i = 0; i < daemon->options.requests; i++) {
        struct fy__request *request = &daemon->requests[i];
        if (request->ticket != 0 && !request->done)
            fy__request_fail(daemon, request, &canceled);
    }
    /* The kernel and the update threads give back what they hold; threads in fy_wait() take their results and go. */
    while (daemon->outstanding > 0 || daemon->waiters > 0)
        fy__sleep(daemon, &daemon->idle);
    fy__unlock(daemon);
    threads_join(daemon);
    atomic_fetch_sub(&daemon->arena->users, 1);
    atomic_fetch_sub(&daemon->store->users, 1);
    sync_destroy(daemon);
    tables_destroy(daemon);
    free(daemon);
    return 0;
}

static uint64_t cpu_ns(const pthread_t *threads, uint32_t count)
{
    assert(count == 0 || threads != NULL);
    uint64_t total_ns = 0;
    for (uint32_t i = 0; i < count; i++) {
        clockid_t clock;
        struct timespec used = {0};
        if (pthread_getcpuclockid(threads[i], &clock) == 0 && clock_gettime(clock, &used) == 0)
            total_ns += (uint64_t)used.tv_sec * 1000000000 + (uint64_t)used.tv_nsec;
    }
    return total_ns;
}

static uint64_t busy_ns(const struct fy__channel *channel, uint64_t now_ns)
{
    assert(channel->in_flight == 0 || channel->busy_since_ns <= now_ns);
    return channel->busy_ns + (channel->in_flight > 0 ? now_ns - channel->busy_since_ns : 0);
}

FY_API int fy_daemon_counters(fy_daemon *daemon, fy_counters *out)
{
    if (daemon == NULL || out == NULL)
        return -EINVAL;
    if (daemon->process != getpid())
        return -EPERM;
    fy__assert_running(daemon);
    fy__lock(daemon);
    const uint64_t now_ns = fy__now_ns();
    const struct fy__channel *reads = &daemon->channels[0];
    const struct fy__channel *writes = &daemon->channels[1];
    *out = (fy_counters){
        .read_bytes = reads->bytes,
        .written_bytes = writes->bytes,
        .reads = reads->finished,
        .writes = writes->finished,
        .read_busy_ns = busy_ns(reads, now_ns),
        .write_busy_ns = busy_ns(writes, now_ns),
        .update_params = daemon->update_params,
        .short_resubmitted = daemon->short_resubmitted,
        .in_flight = reads->in_flight + writes->in_flight,
        .queued = reads->spans.count + writes->spans.count,
        .update_cpu_ns = cpu_ns(daemon->update_threads, daemon->update_threads_count) - daemon->checksum_cpu_ns,
        .ring_cpu_ns = cpu_ns(daemon->io_threads, daemon->io_threads_count) + daemon->checksum_cpu_ns,
    };
    fy__unlock(daemon);
    return 0;
}
