/*
 * Where io_uring is refused, AUTO works with threads and says so; asked for by name it is an error. Kernels that do not
 * know newer set-up flags get a ring with fewer. A kernel that lets nobody enter any more fails what is there and
 * stops.
 */
#include "testing.h"

static int refused_with;
static unsigned refused_flags;
static int enter_error;
static _Atomic uint64_t enters_left;

static int refusing_setup(unsigned flags)
{
    return refused_flags == 0 || (flags & refused_flags) != 0 ? refused_with : 0;
}

static int refusing_enter(void)
{
    if (atomic_load(&enters_left) == 0)
        return enter_error;
    atomic_fetch_sub(&enters_left, 1);
    return 0;
}

static fy_arena *arena;
static fy_store *store;

static void works(fy_daemon *daemon)
{
    unsigned char *base = fy_arena_base(arena);
    testing_fill(base, 1 << 20, 9);
    CHECK_EQUAL(testing_write(daemon, 0, 0, 1 << 20, NULL), 0);
    CHECK_EQUAL(testing_read(daemon, 1 << 20, 0, 1 << 20, NULL), 0);
    CHECK(memcmp(base, base + (1 << 20), 1 << 20) == 0);
}

static void refused(int error, const char *said)
{
    refused_with = error;
    refused_flags = 0;
    fy_daemon *daemon = NULL;
    fy_failure why;
    fy_options options = testing_options(FY_BACKEND_IO_URING);
    CHECK_EQUAL(fy_daemon_start(&options, arena, store, &daemon, &why), error);
    CHECK_EQUAL(why.operation, FY_OP_SETUP);
    options.backend = FY_BACKEND_AUTO;
    daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(fy_daemon_backend(daemon), FY_BACKEND_THREADS);
    CHECK(strstr(fy_daemon_description(daemon), "io_uring refused") != NULL);
    CHECK(strstr(fy_daemon_description(daemon), said) != NULL);
    works(daemon);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
}

static void fewer_flags(unsigned flags, const char *said)
{
    refused_with = -EINVAL;
    refused_flags = flags;
    const fy_options options = testing_options(FY_BACKEND_IO_URING);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK(strstr(fy_daemon_description(daemon), said) != NULL);
    works(daemon);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
}

/* The kernel refuses to be entered from the n-th time on. */
static void enter_refused(int error, uint64_t enters, int reported)
{
    enter_error = error;
    atomic_store(&enters_left, enters);
    const fy_options options = testing_options(FY_BACKEND_IO_URING);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    fy_result result;
    int last = 0;
    for (uint32_t i = 0; i < 8 && last == 0; i++)
        last = testing_write(daemon, 0, 0, 1 << 20, &result);
    CHECK(last == reported || last == -EIO);
    CHECK_EQUAL(testing_read(daemon, 0, 0, 1 << 20, &result), reported);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    atomic_store(&enters_left, UINT64_MAX);
}

int main(void)
{
    const bool has_ring = testing_has_ring();
    arena = testing_arena(2 << 20);
    store = testing_store(1, 1 << 20, 1 << 20);
    fy__system.ring_setup = refusing_setup;
    fy__system.ring_enter = refusing_enter;
    atomic_store(&enters_left, UINT64_MAX);
    if (has_ring) {
        refused(-EPERM, "not permitted");
        refused(-ENOSYS, "not in this kernel or build");
        refused(-ENOMEM, "no memory");
        refused_with = 0;
        fewer_flags(1u << 13, "cooperative task work"); /* IORING_SETUP_DEFER_TASKRUN */
        fewer_flags((1u << 13) | (1u << 8), "plain ring");
        refused_with = 0;
        for (uint64_t enters = 1; enters < 6; enters++)
            enter_refused(-EBADF, enters, -EBADF);
        enter_refused(-EAGAIN, 3, -EIO);
    }
    testing_close(NULL, arena, store);
    return has_ring ? 0 : SKIPPED;
}
