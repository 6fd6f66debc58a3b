/*
 * lock.c - the daemon's one lock, and who is woken when it is let go.
 *
 * Two kinds of sleepers depend on what was done under the lock: the backend, when there is work that it does not know of,
 * and threads in fy_wait() whose request settled. Both are woken by whoever lets go of it, so that nobody who changes the
 * tables has to think of them. Nothing here knows what a request is.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

uint64_t fy__now_ns(void)
{
    struct timespec now;
    const int error = clock_gettime(CLOCK_MONOTONIC, &now);
    assert(error == 0);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void fy__lock(fy_daemon *daemon)
{
    const int error = pthread_mutex_lock(&daemon->lock);
    assert(error == 0);
    assert(!daemon->locked);
    daemon->locked = true;
}

static void doorbell_ring(const fy_daemon *daemon)
{
    assert(daemon->locked);
    assert(daemon->doorbell >= 0);
    const uint64_t one = 1;
    ssize_t written = -1;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && written < 0; attempt++)
        written = write(daemon->doorbell, &one, sizeof one); /* fails only when a signal comes first */
    assert(written == (ssize_t)sizeof one);
}

/* Tells the backend of work that it does not know of. The bell too is rung under the lock: once that is free, a stop may
 * take the daemon away. It is one write to an eventfd, which never blocks. */
static void backend_wake(fy_daemon *daemon)
{
    assert(daemon->locked);
    const bool work[2] = {fy__channel_has_work(&daemon->channels[0]), fy__channel_has_work(&daemon->channels[1])};
    if (daemon->doorbell >= 0) {
        if (!daemon->ring_asleep || !(daemon->closing || work[0] || work[1]))
            return;
        daemon->ring_asleep = false; /* rung once; it says itself when it sleeps again */
        doorbell_ring(daemon);
        return;
    }
    for (uint32_t channel = 0; channel < 2; channel++) {
        if (daemon->pool_idle[channel] > 0 && work[channel])
            pthread_cond_signal(&daemon->work[channel]);
    }
}

void fy__wake_later(fy_daemon *daemon, pthread_cond_t *condition)
{
    assert(daemon->locked);
    assert(daemon->wakes_count <= FY__WAKES_MAX);
    if (daemon->wakes_count == FY__WAKES_MAX) {
        pthread_cond_broadcast(condition);
        return;
    }
    daemon->wakes[daemon->wakes_count++] = condition;
}

/* What is to be woken once the lock is free. */
static uint32_t wakes_take(fy_daemon *daemon, pthread_cond_t **wakes)
{
    assert(daemon->locked);
    const uint32_t count = daemon->wakes_count;
    assert(count <= FY__WAKES_MAX);
    for (uint32_t i = 0; i < count; i++)
        wakes[i] = daemon->wakes[i];
    daemon->wakes_count = 0;
    return count;
}

static void wake_all(pthread_cond_t *const *wakes, uint32_t count)
{
    assert(count <= FY__WAKES_MAX);
    for (uint32_t i = 0; i < count; i++)
        pthread_cond_broadcast(wakes[i]);
}

void fy__unlock(fy_daemon *daemon)
{
    assert(daemon->locked);
    pthread_cond_t *wakes[FY__WAKES_MAX];
    backend_wake(daemon);
    const uint32_t count = wakes_take(daemon, wakes);
    daemon->locked = false;
    const int error = pthread_mutex_unlock(&daemon->lock);
    assert(error == 0);
    wake_all(wakes, count);
}

void fy__sleep(fy_daemon *daemon, pthread_cond_t *condition)
{
    assert(daemon->locked);
    pthread_cond_t *wakes[FY__WAKES_MAX];
    backend_wake(daemon);
    wake_all(wakes, wakes_take(daemon, wakes));
    daemon->locked = false;
    const int error = pthread_cond_wait(condition, &daemon->lock);
    assert(error == 0);
    assert(!daemon->locked);
    daemon->locked = true;
}

bool fy__sleep_until(fy_daemon *daemon, pthread_cond_t *condition, const struct timespec *deadline)
{
    assert(daemon->locked);
    assert(daemon->wakes_count == 0); /* who changed something lets go of the lock first */
    daemon->locked = false;
    const int late = pthread_cond_timedwait(condition, &daemon->lock, deadline);
    assert(late == 0 || late == ETIMEDOUT);
    assert(!daemon->locked);
    daemon->locked = true;
    return late == 0;
}
