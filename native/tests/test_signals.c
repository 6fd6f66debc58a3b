/*
 * Signals sent to the process while I/O is under way reach the caller's threads and never the daemon's, and disturb
 * nothing: every byte of a few hundred requests is right under a shower of them.
 */
#include "testing.h"

#include <signal.h>
#include <sys/time.h>

#define SIZE (UINT64_C(256) << 10)
#define ROUNDS 100

static pthread_t caller;
static _Atomic uint32_t signals;
static _Atomic uint32_t astray;

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&signals, 1);
    if (!pthread_equal(pthread_self(), caller))
        atomic_fetch_add(&astray, 1);
}

/* With the caller blocking the signal, it has nowhere to go but the daemon's threads, and must not go there. */
static void nowhere_to_go(fy_daemon *daemon, uint64_t size)
{
    sigset_t alarm_only;
    CHECK_EQUAL(sigemptyset(&alarm_only), 0);
    CHECK_EQUAL(sigaddset(&alarm_only, SIGALRM), 0);
    CHECK_EQUAL(pthread_sigmask(SIG_BLOCK, &alarm_only, NULL), 0);
    const uint32_t before = atomic_load(&signals);
    CHECK_EQUAL(kill(getpid(), SIGALRM), 0);
    CHECK_EQUAL(testing_read(daemon, 0, 0, size, NULL), 0);
    CHECK_EQUAL(usleep(20000), 0);
    CHECK_EQUAL(atomic_load(&signals), before);
    CHECK_EQUAL(pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL), 0);
    CHECK(atomic_load(&signals) > before);
}

int main(void)
{
    const uint32_t *backend = testing_backends();
    const struct itimerval every = {.it_interval = {.tv_usec = 500}, .it_value = {.tv_usec = 500}};
    const struct itimerval never = {.it_interval = {.tv_usec = 0}};
    struct sigaction action = {.sa_handler = on_signal};
    caller = pthread_self();
    CHECK_EQUAL(sigaction(SIGALRM, &action, NULL), 0);
    fy_arena *arena = testing_arena(2 * SIZE);
    fy_store *store = testing_store(2, 64 << 10, SIZE);
    unsigned char *base = fy_arena_base(arena);
    CHECK_EQUAL(setitimer(ITIMER_REAL, &every, NULL), 0);
    for (; *backend != FY_BACKEND_AUTO; backend++) {
        const fy_options options = testing_options(*backend);
        fy_daemon *daemon = testing_daemon(&options, arena, store);
        for (uint64_t round = 0; round < ROUNDS; round++) {
            testing_fill(base, SIZE, round);
            CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, NULL), 0);
            CHECK_EQUAL(testing_read(daemon, SIZE, 0, SIZE, NULL), 0);
            CHECK(memcmp(base, base + SIZE, SIZE) == 0);
        }
        nowhere_to_go(daemon, SIZE);
        CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    }
    CHECK_EQUAL(setitimer(ITIMER_REAL, &never, NULL), 0);
    CHECK(atomic_load(&signals) > 0);
    CHECK_EQUAL(atomic_load(&astray), 0);
    testing_close(NULL, arena, store);
    return 0;
}
