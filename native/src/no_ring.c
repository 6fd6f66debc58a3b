/*
 * no_ring.c - stands in for ring.c where the library is built without io_uring: the pool does all I/O.
 */
#include "internal.h"

#include <errno.h>

int fy__ring_start(fy_daemon *daemon, char *note, size_t note_size)
{
    assert(daemon->ring == NULL);
    (void)note; /* there is no feature to tell of */
    (void)note_size;
    return -ENOSYS;
}

void fy__ring_destroy(fy_daemon *daemon)
{
    assert(daemon->ring == NULL);
}
