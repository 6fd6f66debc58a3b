/*
 * Containers forbid io_uring with a seccomp filter. AUTO finds that out when it starts, works with threads and says why; asked
 * for by name io_uring is an error. The filter is real, so each case is a process of its own.
 */
#include "testing.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define SIZE (UINT64_C(1) << 20)

/* The system call `number` fails with `error` from now on. False: this kernel has no filters, or forbids them. */
static bool forbid(uint32_t number, uint32_t error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int with_threads(uint32_t number, int error, const char *said)
{
    if (!testing_has_ring() || !forbid(number, (uint32_t)error))
        return SKIPPED;
    fy_arena *arena = testing_arena(2 * SIZE);
    fy_store *store = testing_store(1, SIZE, SIZE);
    fy_daemon *daemon = NULL;
    fy_options options = testing_options(FY_BACKEND_IO_URING);
    CHECK_EQUAL(fy_daemon_start(&options, arena, store, &daemon, NULL), -error);
    options.backend = FY_BACKEND_AUTO;
    daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(fy_daemon_backend(daemon), FY_BACKEND_THREADS);
    CHECK(strstr(fy_daemon_description(daemon), said) != NULL);
    unsigned char *base = fy_arena_base(arena);
    testing_fill(base, SIZE, 9);
    CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, NULL), 0);
    CHECK_EQUAL(testing_read(daemon, SIZE, 0, SIZE, NULL), 0);
    CHECK(memcmp(base, base + SIZE, SIZE) == 0);
    testing_close(daemon, arena, store);
    return 0;
}

static int in_a_process(uint32_t number, int error, const char *said)
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        exit(with_threads(number, error, said));
    int status;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

int main(void)
{
    const int first = in_a_process(SYS_io_uring_setup, EPERM, "not permitted");
    if (first != 0)
        return first;
    CHECK_EQUAL(in_a_process(SYS_io_uring_setup, ENOSYS, "forbidden by seccomp"), 0);
    CHECK_EQUAL(in_a_process(SYS_io_uring_enter, EPERM, "not permitted"), 0); /* a ring, and nobody may enter it */
    return 0;
}
