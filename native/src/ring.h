/*
 * ring.h - the ring as its two files share it: ring_setup.c asks the kernel for it, ring.c moves blocks through it. They are
 * the only files that see liburing, and no_ring.c stands in for them in a build without it.
 */
#ifndef FUYOU_RING_H
#define FUYOU_RING_H

#include "internal.h"

#include <liburing.h>
#include <sys/uio.h>

#define FY__RING_BUFFER (UINT64_C(1) << 30) /* bytes of one registered buffer: the most that one registration takes */
#define FY__RING_BUFFERS_MAX 1024u
#define FY__RING_BLOCKS_MAX (2 * FY__DEPTH_MAX)

_Static_assert(FY__BLOCK_MAX <= FY__RING_BUFFER, "an I/O crosses at most one boundary between registered buffers");

struct fy__completion {
    uint32_t block;
    int32_t result;
};

/* Owned by the ring thread, but for the fields of the handshake (under the lock). */
struct fy__ring {
    struct io_uring uring;
    uint64_t doorbell_value;
    bool doorbell_armed;
    bool files_fixed;
    uint32_t buffers_fixed; /* registered; 0: none */
    uint32_t enter_failures; /* in a row */
    bool with_kernel[FY__RING_BLOCKS_MAX]; /* by a block's index */
    struct fy__completion completions[FY__RING_BLOCKS_MAX];
    uint32_t completions_count;
    struct fy__block *batch[FY__RING_BLOCKS_MAX];
    struct iovec buffers[FY__RING_BUFFERS_MAX];
    /* handshake */
    pthread_cond_t started;
    bool setup_done;
    int setup_error;
    char *note; /* features in use, or why others are not: the starting thread's */
    size_t note_size;
};

/* On the ring's own thread, before its loop: the ring with as many features as the kernel has, arena and files registered
 * where they may be. 0 or -errno. */
int fy__ring_setup(const fy_daemon *daemon, struct fy__ring *ring);

#endif
