/*
 * internal.h - what the files of the daemon share.
 *
 * One mutex guards all of the scheduler: requests, channels, blocks, slots. It is held for bookkeeping only, never
 * across a system call that moves data; a block is at least 4 KiB and usually 1 MiB, so the lock is taken some thousand
 * times a second and is not where time goes. A thread that ends up with a block in its hand (the ring thread, a pool
 * thread) or with a slot (an update thread) owns that datum until it gives it back under the lock.
 *
 * Who calls whom: file < sources < store. Heap, events, lock < settle < moved < queue <-> update < request, pool, ring
 * < daemon. Queue and update are one state machine in two files: a span that settles may be a chunk's, and a chunk pushes spans. A function whose
 * comment says "under the lock" asserts `locked`, which fy__lock() sets.
 *
 * Life of a byte: a request is one span, or for updates a series of slots with up to four spans to read and four to
 * write. A span waits in the heap of its channel (one per direction, each with its own bound, so that neither starves
 * the other) and is cut into blocks when the backend asks for work. Blocks come back with a result; when all of a
 * span's blocks are back the span settles; when all of a request's parts have settled its ticket is done.
 */
#ifndef FUYOU_INTERNAL_H
#define FUYOU_INTERNAL_H

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "fuyou.h"
#include "kernels.h"
#include "system.h"

#ifdef NDEBUG
#error "asserts stay on: build without NDEBUG"
#endif

/* ---- bounds: every queue, loop and retry of the library has one here ---- */
#define FY__PAGE 4096u                 /* what O_DIRECT, extents and blocks are aligned to */
#define FY__HUGE_PAGE (2u << 20)
#define FY__SPAN_MAX (UINT64_C(1) << 48)
#define FY__DEPTH_MAX 256u             /* I/Os in flight per direction */
#define FY__BLOCK_MAX (UINT64_C(1) << 30)
#define FY__REQUESTS_MAX 4096u
#define FY__SLOTS_MAX 1024u
#define FY__UPDATE_THREADS_MAX 64u
#define FY__POOL_THREADS_MAX 32u       /* per direction; a deeper queue does not make more threads */
#define FY__WAKES_MAX 8u               /* conditions kept until the lock is free; more are woken under it */
#define FY__RETRIES_MAX 64u            /* of one block without any progress, on EAGAIN, EINTR or a sliver */
#define FY__EVENTS_MAX 16384u
#define FY__EVENTS_GAP_NS UINT64_C(10000000) /* between I/O of chunks, or rows, that is one entry */
#define FY__EVENTS_ROW 32768u                /* bytes of a read at most that may be a row of a table */
#define FY__DESCRIPTION_MAX 512u
#define FY__SLOT_SPANS 4u              /* weights or gradients, remainder, momentum, variance */
#define FY__CHECKSUM_PIECE (UINT64_C(4) << 20) /* bytes that one thread sums at a time */
#define FY__CHUNK_UNIT 16384u
#define FY__PARAMS_UNIT 2048u
#define FY__SCRATCH_PER_PARAM 14u      /* remainder 2, momentum 4, variance 4, gradient up to 4 */
#define FY__WAIT_MAX_NS (UINT64_C(1000000000) * 86400 * 365)

_Static_assert((FY__PAGE & (FY__PAGE - 1)) == 0, "pages are a power of two");
_Static_assert(FY__CHUNK_UNIT * 2 % FY__PAGE == 0, "the smallest state of a chunk fills pages");
_Static_assert(FY__PARAMS_UNIT * 2 % FY__PAGE == 0, "the smallest state of a stage fills pages");
_Static_assert(sizeof(off_t) == 8, "files are larger than 2 GiB");
_Static_assert(FY__SPAN_MAX <= FY_SOURCES_AT, "a store ends before its sources begin");

/* Tells the caller what failed, where he wants to know; returns the error. */
static inline int fy__failed(fy_failure *why, int error, uint32_t operation, uint32_t file, uint64_t wanted, uint64_t got)
{
    assert(error < 0);
    if (why != NULL)
        *why = (fy_failure){.error = error, .operation = operation, .file = file, .wanted = wanted, .got = got};
    return error;
}

/* ---- arena and store ---- */
struct fy_arena {
    void *mapping;
    unsigned char *base;
    uint64_t size;
    pid_t process;
    atomic_uint users; /* daemons; start adds and stop takes away, nothing else is ordered by it */
};

struct fy__file {
    char *path;
    int fd; /* -1: not open */
    bool direct;
    bool created; /* by this open, and so to be unlinked if it fails */
    uint64_t at;  /* of a source: where it begins in the address space, */
    struct stat known; /* and what it was when it was added */
};

struct fy_store {
    struct fy__file files[FY_MAX_DIRECTORIES + FY_MAX_SOURCES];
    uint32_t count;
    uint32_t sources; /* files behind the first `count` that are only read */
    uint64_t stripe;
    uint64_t size;
    pid_t process;
    atomic_uint users;
};

/* Where a logical offset lies, and how many bytes follow before the next file's turn; of a source, before its end. */
struct fy__place {
    uint32_t file;
    uint64_t offset;
    uint64_t room;
};
struct fy__place fy__store_place(const fy_store *store, uint64_t offset);

/* ---- foreign_files.c ---- */
struct fy__place fy__source_place(const fy_store *store, uint64_t offset); /* of an offset from FY_SOURCES_AT on */
/* Whether these bytes are all of one source, its last page counted whole. */
bool fy__store_in_source(const fy_store *store, uint64_t offset, uint64_t size);

/* ---- file.c: one file. All but opening need it open; 0 or -errno. ---- */
int fy__file_open(struct fy__file *file, uint32_t flags); /* and locks it; without O_DIRECT. After an error `fd` may be open */
/* Looks at what was opened: -EINVAL, -EPERM where it cannot be ours. One that was there is nobody else's afterwards. */
int fy__file_own(const struct fy__file *file, uint32_t flags, uint64_t *size);
/* Takes back O_NONBLOCK, which is for opening alone: with it io_uring may fail a read that has to wait (Linux before 5.9, or a
 * drive that cannot say EAGAIN), or wait for it in the ring's own thread (a file system that cannot). */
int fy__file_may_wait(const struct fy__file *file);
int fy__file_allocate(const struct fy__file *file, uint64_t size, uint64_t wanted); /* from `size` bytes on; never shortens */
int fy__file_sync_folder(const struct fy__file *file); /* a new file is durable only when its name is */
/* Switches O_DIRECT on where the kernel says that it works, or where it does not tell and a page can be read with it: some file
 * systems accept the flag and not the I/O. */
int fy__file_make_direct(struct fy__file *file);
/* -ESTALE: the path does not lead to the file any more. Where a folder was removed or a drive unmounted meanwhile the open
 * file is as good as before, and nobody will find it again. */
int fy__file_still_there(const struct fy__file *file);

/* ---- heap: items by (priority, sequence, position), least first; bounded, no allocation after start ---- */
struct fy__order {
    uint64_t priority;
    uint64_t sequence; /* of acceptance */
    uint64_t position; /* within one request */
};
struct fy__heap_item {
    struct fy__order order;
    void *item;
};
struct fy__heap {
    struct fy__heap_item *items;
    uint32_t count;
    uint32_t capacity;
};
int fy__heap_create(struct fy__heap *heap, uint32_t capacity);
void fy__heap_destroy(struct fy__heap *heap);
void fy__heap_push(struct fy__heap *heap, struct fy__order order, void *item);
void *fy__heap_top(const struct fy__heap *heap); /* NULL when empty */
void *fy__heap_pop(struct fy__heap *heap);       /* NULL when empty */
void fy__heap_remove(struct fy__heap *heap, uint32_t index);

/* ---- requests, spans, blocks, slots ---- */
struct fy__request;
struct fy__slot;

/* A contiguous piece of arena to move from or to the store. Lives in its request or slot. */
struct fy__span {
    uint32_t operation; /* FY_OP_READ or FY_OP_WRITE */
    uint32_t blocks;    /* with the backend now */
    uint64_t arena;
    uint64_t store;
    uint64_t size;
    uint64_t issued;
    struct fy__request *request;
    struct fy__slot *slot; /* NULL: the span is the whole request */
};

/* One I/O. Owned by the backend between take and finish. */
struct fy__block {
    struct fy__span *span;
    struct fy__block *next; /* in a free or a retry list */
    uint32_t operation;
    uint32_t file;
    uint32_t retries; /* since the last progress */
    uint32_t index;   /* in the daemon's table: io_uring's user_data */
    uint64_t arena;
    uint64_t offset; /* in the file */
    uint64_t wanted; /* whole pages are asked for; only a source's end is none */
    uint64_t done;
};

/* One direction. */
struct fy__channel {
    struct fy__heap spans;   /* with bytes still to issue */
    struct fy__block *free;
    struct fy__block *retry; /* still counted in flight */
    struct fy__block *retry_last;
    uint32_t in_flight;
    uint32_t depth;
    uint64_t busy_since_ns;
    uint64_t busy_ns;
    uint64_t bytes;
    uint64_t finished;
};

enum fy__phase { FY__FREE = 0, FY__READING, FY__READY, FY__COMPUTING, FY__WRITING };

/* Updates whose chunks go through scratch, and those whose tensors all rest in the arena: of these, first those that also write
 * some of them to the store, as a chunk keeps its slot until it is written. Each lane has slots of its own. */
enum fy__lane_name { FY__STREAMED = 0, FY__WRITTEN, FY__RESTING, FY__LANES };

/* One chunk of one update on its way through: read, computed, written. Its scratch is its own by index; only those of the
 * lane that streams have one. */
struct fy__slot {
    enum fy__phase phase;
    enum fy__lane_name lane;
    uint32_t index; /* in its lane */
    uint32_t spans_left;
    struct fy__request *request;
    struct fy__slot *next; /* free list */
    uint64_t first;        /* parameter */
    uint64_t count;
    uint64_t io_begin_ns;  /* of the phase's first block; 0: none taken yet */
    uint64_t io_bytes;     /* of the phase */
    struct fy__span spans[FY__SLOT_SPANS];
};

struct fy__request {
    fy_ticket ticket; /* 0: free */
    uint32_t index;
    uint32_t operation;
    uint32_t label;
    uint64_t generation; /* of the place in the table: an old ticket never fits a new request */
    bool done;
    uint32_t parts; /* not yet settled; 0 means done */
    struct fy__request *next_free;
    struct fy__order order;
    uint64_t begin_ns; /* 0: nothing begun */
    uint64_t bytes;
    fy_result result;
    struct fy__span span; /* reads and writes, */
    uint64_t moved_ns;    /*   since when they only wait for their sums; 0: they do not, */
    uint64_t next_byte;   /*   first byte that nobody sums yet */
    fy_update update;     /* updates: as submitted, */
    fy_segment *segments; /*   FY_MAX_SEGMENTS of room, */
    uint64_t next_param;  /*   first parameter not yet in a slot, */
    enum fy__lane_name lane;
    pthread_cond_t finished;
};

struct fy__ring;

struct fy__events {
    fy_event *entries; /* FY__EVENTS_MAX */
    uint32_t first;
    uint32_t count;
    uint64_t dropped;
    fy_event growing[2]; /* by channel: chunks' I/O that the next chunk may join; end_ns 0: none */
};

struct fy__lane {
    struct fy__slot *free;
    struct fy__heap updates; /* requests with chunks not yet in a slot */
};

struct fy_daemon {
    fy_options options;
    fy_arena *arena;
    fy_store *store;
    pid_t process;
    uint32_t backend;
    uint32_t slots_count; /* of each lane */
    char description[FY__DESCRIPTION_MAX];

    pthread_mutex_t lock; /* everything below, but for what says otherwise */
    bool locked;          /* somebody holds it */
    pthread_cond_t idle;  /* the last waiter has left, or the last request has settled while stopping */
    pthread_cond_t ready; /* a slot to compute, bytes to sum, or stopping */
    pthread_cond_t work[2]; /* pool: a block to move, by channel */
    struct fy__channel channels[2];
    struct fy__block *blocks;
    struct fy__request *requests;
    struct fy__request *requests_free;
    fy_segment *segments;
    struct fy__slot *slots;
    struct fy__lane lanes[FY__LANES];
    struct fy__heap computing; /* slots whose reads are done */
    struct fy__heap moved;     /* reads and writes with bytes that nobody sums yet */
    struct fy__events events;
    struct fy__events chunks; /* computed, where log_chunks says so */
    bool log_chunks;
    uint64_t sequence;
    uint32_t outstanding; /* tickets neither done nor failed */
    pthread_cond_t *wakes[FY__WAKES_MAX]; /* of requests that settled since the lock was taken */
    uint32_t wakes_count;
    uint32_t waiters;     /* threads in fy_wait(): stop leaves them daemon and arena until they are out */
    uint32_t pool_idle[2];
    bool stopping;
    bool closing; /* all requests have settled: threads leave */
    bool ring_asleep;
    uint64_t update_params;
    uint64_t checksum_cpu_ns; /* of the update threads, on what reads and writes moved */
    uint64_t short_resubmitted;

    struct fy__ring *ring; /* written before its thread runs; NULL: a pool */
    int doorbell;          /* an eventfd that wakes the ring's thread; -1: a pool */
    pthread_t update_threads[FY__UPDATE_THREADS_MAX];
    uint32_t update_threads_count;
    pthread_t io_threads[2 * FY__POOL_THREADS_MAX]; /* the ring's one thread, or the pool's */
    uint32_t io_threads_count;
};

/* ---- lock.c: the lock, and who is woken when it is let go ---- */
uint64_t fy__now_ns(void);
void fy__lock(fy_daemon *daemon);
/* Under the lock: `condition` is broadcast once the lock is free, so that who wakes need not wait for it. Only for threads
 * that a stop joins, and the one that stops, before it takes conditions away. */
void fy__wake_later(fy_daemon *daemon, pthread_cond_t *condition);
void fy__unlock(fy_daemon *daemon); /* and wakes the backend when there is work it does not know of */
/* Lets go of the lock until `condition` is signalled, or for no reason. Wakes the backend like fy__unlock(): whoever
 * pushed work and then waits must not keep it to himself. */
void fy__sleep(fy_daemon *daemon, pthread_cond_t *condition);
/* The same by whoever has changed nothing, until `deadline` (CLOCK_MONOTONIC) at most. False: it is late. */
bool fy__sleep_until(fy_daemon *daemon, pthread_cond_t *condition, const struct timespec *deadline);

/* ---- events.c: what was busy when. Under the lock. ---- */
void fy__events_add(struct fy__events *events, const fy_event *event);
/* A read or write of an update's chunk: joins the entry of the chunk before it, if that is of the same label. */
void fy__events_chunk(struct fy__events *events, const fy_event *event);
uint32_t fy__events_take(struct fy__events *events, fy_event *out, uint32_t capacity, uint64_t *dropped);

/* ---- settle.c: under the lock, takes one part off a request; the last one finishes the ticket ---- */
void fy__request_settle(fy_daemon *daemon, struct fy__request *request);

/* ---- moved.c: checksums of what reads and writes moved. Under the lock, but for the arithmetic itself. ---- */
bool fy__moved_wants_checksum(const fy_daemon *daemon, const struct fy__request *request);
void fy__moved_begin(fy_daemon *daemon, struct fy__request *request);
void fy__moved_drop(fy_daemon *daemon, struct fy__request *request); /* of a failed request: what nobody sums yet */
bool fy__moved_piece(fy_daemon *daemon); /* by an update thread, which lets go of the lock meanwhile; false: there is none */

/* ---- queue.c: spans in, blocks out, results in. All under the lock. ---- */
void fy__queue_push(fy_daemon *daemon, struct fy__span *span, struct fy__order order);
struct fy__block *fy__queue_take(fy_daemon *daemon, uint32_t channel); /* NULL: nothing to do, or no room */
/* `result`: bytes moved or negative errno, as the kernel said it. */
void fy__queue_finish(fy_daemon *daemon, struct fy__block *block, int64_t result);
/* First error wins; unissued parts are dropped, what is with the backend drains. */
void fy__request_fail(fy_daemon *daemon, struct fy__request *request, const fy_failure *failure);

/* ---- update.c: the read-update-write chain. Under the lock, but for the check and the thread. ---- */
int fy__update_check(const fy_daemon *daemon, const fy_update *update, const fy_segment *segments);
void fy__update_begin(fy_daemon *daemon, struct fy__request *request);
void fy__update_span_settled(fy_daemon *daemon, struct fy__slot *slot);
void fy__update_drop(fy_daemon *daemon, struct fy__request *request); /* of a failed request: what has not begun */
void *fy__update_thread(void *daemon);

/* ---- pool.c and ring.c: the two backends ---- */
int fy__pool_start(fy_daemon *daemon);
int fy__ring_start(fy_daemon *daemon, char *note, size_t note_size); /* note: empty before, features in use after */
void fy__ring_destroy(fy_daemon *daemon);                            /* after its thread was joined */

/* By every public call, once its arguments are known to be right: what a running daemon is. */
static inline void fy__assert_running(const fy_daemon *daemon)
{
    assert(daemon->arena != NULL);
    assert(daemon->store != NULL);
    assert(daemon->requests != NULL);
    assert(daemon->io_threads_count > 0);
}

/* Up to whole pages: what is asked of a file that has so many bytes left. */
static inline uint64_t fy__whole_pages(uint64_t size)
{
    assert(size <= FY__SPAN_MAX);
    return (size + FY__PAGE - 1) & ~(uint64_t)(FY__PAGE - 1);
}

/* Whether bytes [offset, offset + size) lie in [0, limit), without overflow. */
static inline bool fy__inside(uint64_t offset, uint64_t size, uint64_t limit)
{
    return size <= limit && offset <= limit - size;
}

/* Whether two spans share bytes; both were found inside something: no overflow. */
static inline bool fy__overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size)
{
    return a < b + b_size && b < a + a_size;
}

static inline bool fy__request_failed(const struct fy__request *request)
{
    assert(request->result.failure.error <= 0);
    return request->result.failure.error != 0;
}

static inline uint32_t fy__channel_of(uint32_t operation)
{
    assert(operation == FY_OP_READ || operation == FY_OP_WRITE);
    return operation == FY_OP_READ ? 0 : 1;
}

/* Under the lock: whether a block could leave now. */
static inline bool fy__channel_has_work(const struct fy__channel *channel)
{
    assert(channel->in_flight <= channel->depth);
    return channel->retry != NULL || (channel->free != NULL && channel->spans.count > 0);
}

#endif
