/*
 * Registered and unregistered buffers move the same bytes, and the description says which are in use: registered when
 * RLIMIT_MEMLOCK covers the arena, unregistered when it does not.
 */
#include "testing.h"

#include <sys/resource.h>

#define SIZE (UINT64_C(1) << 20)

static void with_limit(rlim_t bytes, const char *said)
{
    struct rlimit limit;
    CHECK_EQUAL(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
    limit.rlim_cur = bytes;
    CHECK_EQUAL(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    fy_arena *arena = testing_arena(2 * SIZE);
    fy_store *store = testing_store(2, 64 << 10, SIZE);
    const fy_options options = testing_options(FY_BACKEND_IO_URING);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK(strstr(fy_daemon_description(daemon), said) != NULL);
    unsigned char *base = fy_arena_base(arena);
    testing_fill(base, SIZE, bytes);
    CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, NULL), 0);
    CHECK_EQUAL(testing_read(daemon, SIZE, 0, SIZE, NULL), 0);
    CHECK(memcmp(base, base + SIZE, SIZE) == 0);
    testing_close(daemon, arena, store);
}

int main(void)
{
    struct rlimit limit;
    if (!testing_has_ring())
        return SKIPPED;
    CHECK_EQUAL(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
    if (limit.rlim_max >= 4 * SIZE)
        with_limit(4 * SIZE, ", registered buffers");
    with_limit(SIZE, "unregistered buffers");
    return 0;
}
