/*
 * Waiting: a timeout leaves the ticket valid and comes neither early nor much too late; a ticket is good once; an
 * unknown one is said to be; a full table is -EAGAIN and free again after a wait. I/O is held back by a gate in the
 * system call.
 */
#include "testing.h"

#define SIZE (UINT64_C(64) << 10)

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static ssize_t gated_pread(int fd, void *data, size_t size, off_t offset)
{
    CHECK_EQUAL(pthread_mutex_lock(&gate), 0);
    CHECK_EQUAL(pthread_mutex_unlock(&gate), 0);
    return fy__system_real.pread(fd, data, size, offset);
}

static fy_daemon *daemon_now;
static fy_ticket ticket_now;

static void *wait_too(void *result)
{
    fy_result ignored;
    *(int *)result = fy_wait(daemon_now, ticket_now, WAIT_NS, &ignored);
    return NULL;
}

static void timeouts(fy_daemon *daemon)
{
    fy_ticket ticket = 0;
    fy_result result;
    CHECK_EQUAL(pthread_mutex_lock(&gate), 0);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, SIZE, 0, 1, &ticket), 0);
    CHECK(ticket != 0);
    CHECK_EQUAL(fy_wait(daemon, ticket, 0, &result), -ETIME);
    const uint64_t before = fy__now_ns();
    CHECK_EQUAL(fy_wait(daemon, ticket, 50000000, &result), -ETIME);
    const uint64_t waited = fy__now_ns() - before;
    CHECK(waited >= 50000000);
    CHECK(waited < UINT64_C(5000000000));
    CHECK_EQUAL(pthread_mutex_unlock(&gate), 0);
    CHECK_EQUAL(fy_wait(daemon, ticket, UINT64_MAX, &result), 0);
    CHECK_EQUAL(fy_wait(daemon, ticket, 0, &result), -ENOENT);
    CHECK_EQUAL(fy_wait(daemon, 0, 0, &result), -ENOENT);
    CHECK_EQUAL(fy_wait(daemon, UINT64_MAX, 0, &result), -ENOENT);
}

/* Two threads wait for one ticket: one gets the result, the other hears that there is none. */
static void two_waiters(fy_daemon *daemon)
{
    int results[2];
    pthread_t threads[2];
    daemon_now = daemon;
    CHECK_EQUAL(pthread_mutex_lock(&gate), 0);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, SIZE, 0, 1, &ticket_now), 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(pthread_create(&threads[i], NULL, wait_too, &results[i]), 0);
    CHECK_EQUAL(usleep(20000), 0);
    CHECK_EQUAL(pthread_mutex_unlock(&gate), 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    CHECK_EQUAL(results[0] + results[1], -ENOENT);
}

static void table_full(fy_daemon *daemon, uint32_t requests)
{
    fy_ticket tickets[16];
    fy_ticket more = 0;
    CHECK(requests <= 16);
    for (uint32_t i = 0; i < requests; i++) {
        CHECK_EQUAL(fy_submit_read(daemon, i * SIZE, 0, SIZE, 0, 1, &tickets[i]), 0);
        for (uint32_t k = 0; k < i; k++)
            CHECK(tickets[k] != tickets[i]);
    }
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, SIZE, 0, 1, &more), -EAGAIN);
    CHECK_EQUAL(testing_wait(daemon, tickets[0], NULL), 0);
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, SIZE, 0, 1, &more), 0);
    CHECK(more != tickets[0]); /* the row is used again, the ticket is not */
    CHECK_EQUAL(testing_wait(daemon, more, NULL), 0);
    for (uint32_t i = 1; i < requests; i++)
        CHECK_EQUAL(testing_wait(daemon, tickets[i], NULL), 0);
}

int main(void)
{
    fy__system.pread = gated_pread;
    fy_arena *arena = testing_arena(16 * SIZE);
    fy_store *store = testing_store(1, SIZE, SIZE);
    fy_options options = testing_options(FY_BACKEND_THREADS);
    options.requests = 5;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    timeouts(daemon);
    two_waiters(daemon);
    table_full(daemon, options.requests);
    testing_close(daemon, arena, store);
    return 0;
}
