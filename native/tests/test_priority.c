/*
 * Order within a channel is (priority, submission), between blocks and not only between requests; and the two channels
 * do not hold each other up. The first read is held in the kernel while the others queue behind it.
 */
#include "testing.h"

#define BLOCK (UINT64_C(16) << 10)

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static uint64_t order[16];
static _Atomic uint32_t seen;

static ssize_t noting_pread(int fd, void *data, size_t size, off_t offset)
{
    const uint32_t at = atomic_fetch_add(&seen, 1);
    CHECK(at < 16);
    order[at] = (uint64_t)offset / BLOCK;
    CHECK_EQUAL(pthread_mutex_lock(&gate), 0);
    CHECK_EQUAL(pthread_mutex_unlock(&gate), 0);
    return fy__system_real.pread(fd, data, size, offset);
}

int main(void)
{
    fy__system.pread = fy__system_real.pread;
    fy_arena *arena = testing_arena(16 * BLOCK);
    fy_store *store = testing_store(1, 16 * BLOCK, 16 * BLOCK);
    fy__system.pread = noting_pread;
    fy_options options = testing_options(FY_BACKEND_THREADS);
    options.read_depth = 1;
    options.block_size = BLOCK;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(pthread_mutex_lock(&gate), 0);
    fy_ticket tickets[4];
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, 3 * BLOCK, 5, 0, &tickets[0]), 0); /* blocks 0, 1, 2 */
    while (atomic_load(&seen) == 0)
        CHECK_EQUAL(usleep(100), 0);
    CHECK_EQUAL(fy_submit_read(daemon, 4 * BLOCK, 4 * BLOCK, BLOCK, 9, 0, &tickets[1]), 0);     /* last */
    CHECK_EQUAL(fy_submit_read(daemon, 5 * BLOCK, 5 * BLOCK, 2 * BLOCK, 1, 0, &tickets[2]), 0); /* overtakes */
    CHECK_EQUAL(fy_submit_read(daemon, 8 * BLOCK, 8 * BLOCK, BLOCK, 5, 0, &tickets[3]), 0);     /* behind its equal */
    CHECK_EQUAL(testing_write(daemon, 9 * BLOCK, 9 * BLOCK, BLOCK, NULL), 0); /* writes pass while reads stand */
    fy_counters counters;
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), 0);
    CHECK_EQUAL(counters.in_flight, 1);
    CHECK_EQUAL(counters.queued, 4);
    CHECK_EQUAL(pthread_mutex_unlock(&gate), 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK_EQUAL(testing_wait(daemon, tickets[i], NULL), 0);
    static const uint64_t expected[] = {0, 5, 6, 1, 2, 8, 4};
    CHECK_EQUAL(atomic_load(&seen), 7);
    for (uint32_t i = 0; i < 7; i++)
        CHECK_EQUAL(order[i], expected[i]);
    testing_close(daemon, arena, store);
    return 0;
}
