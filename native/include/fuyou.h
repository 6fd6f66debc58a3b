/*
 * fuyou.h - the whole public interface of the native library.
 *
 * The library moves bytes between an arena (host memory) and a store (files on one or several SSDs) and runs AdamW
 * over them, chunk by chunk, while somebody else computes. It never prints, exits or allocates after start. Every
 * function returns 0 or a negative errno; outputs are written on success only, unless a comment says otherwise.
 *
 * Rules of use
 *  1. Memory is named by arena offsets and files by store offsets (one logical address space, striped by the library).
 *  2. From acceptance until fy_wait() returns anything but -ETIME, the spans of a request belong to the daemon.
 *     A request that failed has been drained like any other, with one exception: when the kernel lets nobody into the
 *     ring any more, every request fails, and what was in flight may still reach its span, for closing a ring does not
 *     wait. From then on no span may be used again, after fy_daemon_stop() neither: the arena is to be destroyed. A
 *     caller that does not tell this failure from others treats all of them so.
 *  3. Every ticket is waited for exactly once. A ticket is never 0.
 *  4. Arena and store outlive the daemon that uses them. Everything is sized at start.
 *  5. Any thread may submit and wait. No call may be made in a forked child.
 *  6. Offsets and sizes of I/O are multiples of fy_store_alignment(); the caller pads.
 *
 * The text between the two markers is read by build_ffi.py as the cffi declarations.
 */
#ifndef FUYOU_H
#define FUYOU_H

#include <stdint.h>

#define FY_API __attribute__((visibility("default")))

/* cffi: begin */
#define FY_ABI_VERSION 3
#define FY_MAX_DIRECTORIES 16
#define FY_MAX_SOURCES 1024
#define FY_SOURCES_AT 0x1000000000000 /* 2^48: where sources begin in a store's address space */
#define FY_NF4_BLOCK 64
#define FY_MXFP4_BLOCK 32
#define FY_FP8_BLOCK 128
#define FY_DYNAMIC_BLOCK 256
#define FY_DYNAMIC_LEVELS 256
#define FY_STATE_BLOCK 64
#define FY_STATE_TILE 65536
#define FY_MAX_SEGMENTS 1024
#define FY_SEGMENT_FROZEN 1
#define FY_STORE_CREATE 1
#define FY_STORE_BUFFERED 2
#define FY_STORE_READ_ONLY 4
#define FY_DAEMON_DATA_SUMS 1

typedef struct fy_arena fy_arena;
typedef struct fy_store fy_store;
typedef struct fy_daemon fy_daemon;
typedef uint64_t fy_ticket;

enum fy_backend { FY_BACKEND_AUTO = 0, FY_BACKEND_IO_URING = 1, FY_BACKEND_THREADS = 2 };
enum fy_dtype { FY_FLOAT32 = 0, FY_BFLOAT16 = 1, FY_INT8 = 2 };
enum fy_rule { FY_ADAMW = 0, FY_LION = 1 };
enum fy_operation { FY_OP_NONE = 0, FY_OP_OPEN = 1, FY_OP_READ = 2, FY_OP_WRITE = 3, FY_OP_SYNC = 4, FY_OP_UPDATE = 5,
                    FY_OP_ALLOCATE = 6, FY_OP_SETUP = 7, FY_OP_CHUNK = 8 };

/* What failed: enough for a message naming the file, the place and the difference. `file` indexes the paths given to
 * fy_store_open(), then those given to fy_store_attach(). */
typedef struct {
    int32_t error;         /* negative errno; 0 when nothing failed */
    uint32_t operation;    /* enum fy_operation */
    uint32_t file;
    uint32_t label;        /* the caller's own number for the request (a stage) */
    uint64_t file_offset;
    uint64_t wanted;       /* bytes asked for */
    uint64_t got;          /* bytes moved before the failure */
} fy_failure;

/* ---- arena: anonymous, hugepage-advised, not inherited by fork ---- */
int fy_arena_create(uint64_t size, fy_arena **out);
void *fy_arena_base(const fy_arena *arena);
uint64_t fy_arena_size(const fy_arena *arena);
int fy_arena_destroy(fy_arena *arena); /* NULL is fine; -EBUSY while a daemon uses it */

/* ---- store: one preallocated file per path, striped; O_DIRECT where the file system allows it ----
 * A file that is there already must be a regular one of this user (-EPERM), not a symbolic link (-ELOOP), and is mode
 * 0600 from then on. With FY_STORE_READ_ONLY files are opened for reading, shared with other readers, and left as they are:
 * a write to the store fails then. */
int fy_store_open(const char *const *paths, uint32_t count, uint64_t stripe, uint64_t size, uint32_t flags,
                  fy_store **out, fy_failure *why);
uint64_t fy_store_size(const fy_store *store);
uint32_t fy_store_alignment(const fy_store *store);
int fy_store_is_direct(const fy_store *store);
/* Every file's data on stable storage. -ESTALE: a file's path does not lead to it any more. */
int fy_store_sync(fy_store *store, fy_failure *why);
int fy_store_close(fy_store *store);                 /* NULL is fine; -EBUSY while a daemon uses it */

/* Adds a file of somebody else, which is only ever read, behind the sources added before: the first begins at FY_SOURCES_AT,
 * each takes its size up to whole pages. What follows a file's end in its last page reads as zeros. The file must have this
 * size and time of change (-ESTALE). Before a daemon starts. */
int fy_store_attach(fy_store *store, const char *path, uint64_t size, uint64_t changed_ns, fy_failure *why);
/* -ESTALE: a source has changed since it was added, or its path does not lead to it any more. fy_store_sync() asks this too. */
int fy_store_check_sources(fy_store *store, fy_failure *why);

/* ---- daemon ---- */
typedef struct {
    uint32_t backend;         /* enum fy_backend */
    uint32_t read_depth;      /* reads in flight at most */
    uint32_t write_depth;     /* writes in flight at most */
    uint32_t update_threads;
    uint32_t requests;        /* accepted and not yet waited for, at most; more is -EAGAIN */
    uint32_t chunk_params;    /* parameters of one update chunk; a multiple of 16384 */
    uint64_t block_size;      /* bytes of one I/O at most; a multiple of 4096 */
    uint64_t scratch_offset;  /* arena span for update chunks, the daemon's own until stop; size from */
    uint64_t scratch_size;    /*   fy_scratch_size(); two chunks at least, more overlap better. 0 and 0: no updates */
    uint32_t flags;           /* FY_DAEMON_DATA_SUMS: what a read or write moved is summed, and what updates read, by the
                               * update threads; where there are none, by the thread in fy_wait() */
    uint32_t reserved;
} fy_options;

/* Bytes of scratch that `chunks` chunks of `chunk_params` parameters take, all states and a float32 gradient included. */
uint64_t fy_scratch_size(uint32_t chunk_params, uint32_t chunks);

int fy_daemon_start(const fy_options *options, fy_arena *arena, fy_store *store, fy_daemon **out, fy_failure *why);
int fy_daemon_backend(const fy_daemon *daemon);           /* the enum fy_backend in use */
const char *fy_daemon_description(const fy_daemon *daemon); /* features in use, and why others are not */
/* Drains the kernel; outstanding tickets fail with -ECANCELED. Threads in fy_wait() come out first, sums taken; no other
 * call may be under way or begin. NULL is fine. */
int fy_daemon_stop(fy_daemon *daemon);

/* Priority: lower runs first; equal priorities run in order of submission. `label` comes back in fy_failure. */
int fy_submit_read(fy_daemon *daemon, uint64_t arena_offset, uint64_t store_offset, uint64_t size, uint64_t priority,
                   uint32_t label, fy_ticket *out);
int fy_submit_write(fy_daemon *daemon, uint64_t arena_offset, uint64_t store_offset, uint64_t size, uint64_t priority,
                    uint32_t label, fy_ticket *out);

/* Where one state tensor of an update rests. FY_NOWHERE marks what does not apply.
 *   arena != FY_NOWHERE: rests in RAM, updated in place (source and target are then FY_NOWHERE, or target names a copy
 *                        to be written as well: a commit).
 *   source             : store offset read from; FY_NOWHERE with arena FY_NOWHERE means "all zero, never written".
 *   target             : store offset written to: another extent than source, or source itself (in place: after a
 *                        crash it holds parts of both). They never overlap otherwise. */
#define FY_NOWHERE 0xFFFFFFFFFFFFFFFF
typedef struct {
    uint64_t arena;
    uint64_t source;
    uint64_t target;
} fy_home;

/* Parameters [first, first + count) share these settings. Segments are sorted and do not overlap; parameters of no
 * segment (padding) keep every value they have. Boundaries may lie anywhere. */
typedef struct {
    uint64_t first;
    uint64_t count;
    float weight_decay;
    float lr_scale;
    uint32_t flags; /* FY_SEGMENT_FROZEN */
    uint32_t reserved;
} fy_segment;

/* One step of an optimizer over one stage. Lion keeps float32 momentum and no variance; `variance` is unused then.
 * weights: arena offset of `params` weights, old on entry, new when the ticket completes. With weights_dtype bfloat16
 * the master is (weights << 16) + remainder; with float32 the weights are the master and remainder is unused.
 * weights_target: store offset the new weights are written to, or FY_NOWHERE.
 * gradients: arena offset when they rest in RAM; else FY_NOWHERE and gradients_source names the store.
 * What rests in the arena is apart from the scratch and from each other.
 * States of FY_BFLOAT16, and variances of FY_INT8, are rounded at random: draws follow from seed, step, label and the parameter's
 * index. States of FY_INT8 are a row of tiles: a page with the float32 scales of 1,024 blocks of FY_STATE_BLOCK, then
 * FY_STATE_TILE codes (the last tile's in whole pages; int8_states.c says what a code means). Segments then begin at multiples of
 * a block, chunks of the daemon at multiples of a tile. */
typedef struct {
    uint64_t params; /* a multiple of 2048: extents stay aligned */
    uint32_t weights_dtype;
    uint32_t gradients_dtype;
    uint64_t weights;
    uint64_t weights_target;
    uint64_t gradients;
    uint64_t gradients_source;
    fy_home remainder; /* int16 */
    fy_home momentum;  /* of states_dtype */
    fy_home variance;  /* AdamW's */
    double lr;
    double beta1;
    double beta2;
    double epsilon;
    double gradient_scale; /* multiplies every gradient (clipping); 1.0 leaves the bits alone */
    uint64_t step;         /* 1 for the first update: bias corrections */
    uint64_t priority;     /* the lower, the more urgent */
    uint32_t label;        /* the stage: also a key of the draws */
    uint32_t segment_count;
    uint64_t seed;         /* of the draws that round small states */
    uint32_t states_dtype; /* of momentum and variance */
    uint32_t rule;         /* enum fy_rule */
} fy_update;
/* The update and its segments (at most FY_MAX_SEGMENTS, else -E2BIG) are copied: both may go once this returns. */
int fy_submit_update(fy_daemon *daemon, const fy_update *update, const fy_segment *segments, fy_ticket *out);

/* What a finished request leaves behind. Sums are of the bytes written to the store (0 where nothing was). */
typedef struct {
    fy_failure failure;
    uint64_t nonfinite; /* updates: parameters whose new master is not finite in the weights' dtype */
    uint64_t weights_sum;
    uint64_t remainder_sum;
    uint64_t momentum_sum;
    uint64_t variance_sum;
    /* With FY_DAEMON_DATA_SUMS, else 0: fy_checksum() of the span of a read or write that worked, and of what an update read
     * of each tensor. */
    uint64_t data_sum;
    uint64_t remainder_read;
    uint64_t momentum_read;
    uint64_t variance_read;
    uint64_t gradients_read;
} fy_result;

/* 0: done, `result` filled. -ETIME: not yet, the ticket stays valid. Any other negative: the request failed, `result`
 * filled, the ticket is spent. -ENOENT: no such ticket. timeout_ns 0 polls. */
int fy_wait(fy_daemon *daemon, fy_ticket ticket, uint64_t timeout_ns, fy_result *result);

/* Totals since start. Nanoseconds are sums over threads; *_busy_ns is the time at least one I/O of that direction was
 * in flight. */
typedef struct {
    uint64_t read_bytes;
    uint64_t written_bytes;
    uint64_t reads;
    uint64_t writes;
    uint64_t read_busy_ns;
    uint64_t write_busy_ns;
    uint64_t update_params;
    uint64_t update_cpu_ns; /* CPU time of the update threads, but for sums of what reads and writes moved */
    uint64_t ring_cpu_ns;   /* CPU time of the ring thread, or of the pool's threads, and of these sums */
    uint64_t short_resubmitted;
    uint64_t in_flight; /* I/Os with the kernel now */
    uint64_t queued;    /* spans with I/Os still to be issued */
} fy_counters;
int fy_daemon_counters(fy_daemon *daemon, fy_counters *out);

/* A bounded log of what was busy when, for the timeline: one entry per finished request. The I/O of an update is told as
 * reads and writes with the update's label, joined where pauses between chunks are under 10 ms; the update's own entry,
 * from its first chunk computed to its last byte written, has no bytes. The caller drains the log; when it is full the
 * oldest entries are dropped and counted. CLOCK_MONOTONIC nanoseconds. */
typedef struct {
    uint32_t operation; /* FY_OP_READ, FY_OP_WRITE, FY_OP_UPDATE, FY_OP_CHUNK */
    uint32_t label;
    uint64_t begin_ns;  /* first byte asked of the kernel, or first chunk computed */
    uint64_t end_ns;
    uint64_t bytes;
} fy_event;
int fy_daemon_events(fy_daemon *daemon, fy_event *out, uint32_t capacity, uint32_t *count, uint64_t *dropped);
/* From now on each chunk of an update that is computed is an entry too (FY_OP_CHUNK, no bytes), for a trace. They have a log of
 * their own, as long as the other one, and fy_daemon_events() gives them after the others. */
int fy_daemon_log_chunks(fy_daemon *daemon);

/* ---- arithmetic on plain memory, for the caller's own threads ----
 * -EINVAL: an array that is not empty is missing, or a dtype is unknown, or an array is not aligned to its values. `values` given
 * as void * may lie anywhere, as a tensor in a file does. Arrays of one call do not overlap. */
/* Sum of squares in double, and the number of values that are not finite. Leaves of 16384 values are summed with a fixed
 * tree and added in order, so a span's sum has the bits of its leaves' sums, one call for each, added in order by whatever
 * threads. Sums of longer parts added up are another order of additions, and may differ in the last bits. */
int fy_sum_squares(const void *values, uint64_t count, uint32_t dtype, double *sum, uint64_t *nonfinite);
/* float32 master <-> (bfloat16 weights, int16 remainder). Lossless for finite values that do not round to infinity;
 * the others are counted in nonfinite. */
int fy_split(const float *master, uint16_t *weights, int16_t *remainder, uint64_t count, uint64_t *nonfinite);
int fy_join(const uint16_t *weights, const int16_t *remainder, float *master, uint64_t count);
/* A 64-bit sum of a span; order-sensitive, not cryptographic; the same on every machine. A longer span's sum is that of its
 * parts added up (modulo 2^64), each told its `position`, a multiple of 4096. */
uint64_t fy_checksum(const void *data, uint64_t size, uint64_t position);
/* The update's own kernel on plain memory (the reference for tests and benchmarks). Arrays hold update->params values, int8
 * states their tiles; arena and store offsets of `update` are ignored. With weights_dtype float32 `weights` is the master and
 * remainder is unused. */
int fy_adamw(const fy_update *update, const fy_segment *segments, void *weights, int16_t *remainder, void *momentum,
             void *variance, const void *gradients, uint64_t *nonfinite);

/* ---- quantised weights in the layouts of bitsandbytes ----
 * Blocks and rows are independent: a tensor may be cut between them, for several threads. Values of `dtype`; decoding rounds
 * a float32 product to it, ties to even. Encoding counts values that are not finite; what it wrote is of no use then. */
/* nf4: two values to a byte, the first in its high half, (count + 1) / 2 bytes; `maxima` of blocks of FY_NF4_BLOCK. */
int fy_nf4_encode(const void *values, uint64_t count, uint32_t dtype, uint8_t *packed, float *maxima, uint64_t *nonfinite);
int fy_nf4_decode(const uint8_t *packed, const float *maxima, uint64_t count, uint32_t dtype, void *values);
/* Codes of 8 bits: places in a rising `table` of FY_DYNAMIC_LEVELS levels in [-1, 1]; `maxima` of blocks of FY_DYNAMIC_BLOCK. `offset` is
 * added to what is decoded. Double quantisation keeps the maxima of nf4 so, less their mean. */
int fy_dynamic_encode(const float *values, uint64_t count, const float *table, uint8_t *codes, float *maxima,
                      uint64_t *nonfinite);
int fy_dynamic_decode(const uint8_t *codes, const float *maxima, uint64_t count, const float *table, float offset,
                      float *values);
/* int8: a row's largest value is 127; `maxima` of rows. */
int fy_int8_encode(const void *values, uint64_t rows, uint64_t columns, uint32_t dtype, int8_t *codes, float *maxima,
                   uint64_t *nonfinite);
int fy_int8_decode(const int8_t *codes, const float *maxima, uint64_t rows, uint64_t columns, uint32_t dtype, void *values);
/* mxfp4: whole blocks of FY_MXFP4_BLOCK values, two to a byte, the first in its low half. A scale is 127 more than the exponent of
 * two; from 253 on there are values that no float holds. */
int fy_mxfp4_decode(const uint8_t *packed, const uint8_t *scales, uint64_t blocks, uint32_t dtype, void *values);
/* fp8: e4m3; `scales` of squares of FY_FP8_BLOCK rows and columns, in the order of rows. At the ends squares may be cut. */
int fy_fp8_decode(const uint8_t *codes, const float *scales, uint64_t rows, uint64_t columns, uint32_t dtype, void *values);

const char *fy_build_info(void); /* compiler, liburing version or "no io_uring", clones */
uint32_t fy_abi_version(void);
/* cffi: end */

#endif
