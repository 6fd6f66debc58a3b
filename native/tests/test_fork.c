/*
 * A forked child may not use anything of its parent's daemon and is told so; the arena is not in its memory; its copy
 * of the descriptors does not keep the store locked; and descriptors do not pass an exec.
 */
#include "testing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SIZE (UINT64_C(1) << 20)

static void child(fy_daemon *daemon, fy_arena *arena, fy_store *store, unsigned char *base)
{
    fy_ticket ticket = 0;
    fy_result result;
    fy_counters counters;
    fy_failure why;
    CHECK_EQUAL(fy_submit_read(daemon, 0, 0, SIZE, 0, 0, &ticket), -EPERM);
    CHECK_EQUAL(fy_submit_write(daemon, 0, 0, SIZE, 0, 0, &ticket), -EPERM);
    CHECK_EQUAL(fy_wait(daemon, 1, 0, &result), -EPERM);
    CHECK_EQUAL(fy_daemon_counters(daemon, &counters), -EPERM);
    CHECK_EQUAL(fy_daemon_stop(daemon), -EPERM);
    CHECK_EQUAL(fy_store_sync(store, &why), -EPERM);
    CHECK_EQUAL(fy_store_close(store), -EPERM);
    CHECK_EQUAL(fy_arena_destroy(arena), -EPERM);
    CHECK(fy_arena_base(arena) == NULL);
    unsigned char resident;
    CHECK(mincore(base, FY__PAGE, &resident) != 0 && errno == ENOMEM); /* not mapped here */
}

#define DESCRIPTORS 256

/* Descriptors that are open now and were not before: ours, and every one of them closes on exec. */
static void closed_on_exec(const bool before[DESCRIPTORS])
{
    uint32_t ours = 0;
    for (int fd = 0; fd < DESCRIPTORS; fd++) {
        const int flags = fcntl(fd, F_GETFD);
        if (flags < 0 || before[fd])
            continue;
        CHECK((flags & FD_CLOEXEC) != 0);
        ours++;
    }
    CHECK(ours > 0);
}

int main(void)
{
    bool before[DESCRIPTORS];
    for (int fd = 0; fd < DESCRIPTORS; fd++)
        before[fd] = fcntl(fd, F_GETFD) >= 0;
    fy_arena *arena = testing_arena(SIZE);
    fy_store *store = testing_store(1, SIZE, SIZE);
    const fy_options options = testing_options(FY_BACKEND_AUTO);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    unsigned char *base = fy_arena_base(arena);
    int hold[2];
    closed_on_exec(before);
    CHECK_EQUAL(pipe(hold), 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        char byte;
        child(daemon, arena, store, base);
        CHECK_EQUAL(close(hold[1]), 0);
        CHECK_EQUAL(read(hold[0], &byte, 1), 0); /* lives on until the parent has opened the store anew */
        _exit(0);
    }
    CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, NULL), 0);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    store = testing_store(1, SIZE, SIZE);
    CHECK_EQUAL(close(hold[1]), 0);
    int status = 0;
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQUAL(close(hold[0]), 0);
    testing_close(NULL, arena, store);
    return 0;
}
