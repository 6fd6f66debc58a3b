/*
 * store.c - one preallocated file per path, seen as one address space.
 *
 * Striping: logical block b lies in file b % count at offset (b / count) * stripe. Files are opened, locked, sized and
 * probed for O_DIRECT once; afterwards their descriptors only move bytes, from any thread, so there is no lock here.
 *
 * A file is ours alone: locked (flock; a second opener gets -EBUSY), mode 0600, closed on exec. One that was there must
 * be a regular file of this user and no symbolic link: what a run writes is worth protecting, and a folder that others
 * may write to could hold anything. Space is taken at creation, so that a full disk is met before the first step and not
 * in the middle of a run. A file that this open created is removed when the open fails; one that was there is never
 * shortened or removed.
 *
 * Behind the store, from FY_SOURCES_AT on, lie its sources (foreign_files.c).
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

struct fy__place fy__store_place(const fy_store *store, uint64_t offset)
{
    assert(store->count > 0);
    if (offset >= FY_SOURCES_AT)
        return fy__source_place(store, offset);
    assert(offset < store->size);
    const uint64_t block = offset / store->stripe;
    const uint64_t within = offset % store->stripe;
    struct fy__place place = {
        .file = (uint32_t)(block % store->count),
        .offset = block / store->count * store->stripe + within,
        .room = store->stripe - within,
    };
    if (store->count == 1)
        place.room = store->size - offset; /* no next file's turn: blocks may cross stripes */
    if (place.room > store->size - offset)
        place.room = store->size - offset;
    assert(place.room > 0);
    return place;
}

/* Bytes of file `index`: its whole stripes, and the tail if it is the tail's turn. */
static uint64_t file_size(const fy_store *store, uint32_t index)
{
    assert(index < store->count);
    const uint64_t full = store->size / store->stripe;
    const uint64_t tail = store->size % store->stripe;
    const uint64_t rounds = full / store->count;
    const uint64_t left = full % store->count;
    return (rounds + (index < left ? 1 : 0)) * store->stripe + (index == left ? tail : 0);
}

/* Makes the file as long as the store needs it, with its space taken where the file system can do that. */
static int size_file(const fy_store *store, uint32_t index, uint32_t flags, fy_failure *why)
{
    assert(store->files[index].fd >= 0);
    const struct fy__file *file = &store->files[index];
    const uint64_t wanted = file_size(store, index);
    uint64_t have = 0;
    int error = fy__file_own(file, flags, &have);
    if (error != 0)
        return fy__failed(why, error, FY_OP_OPEN, index, wanted, 0);
    if ((flags & FY_STORE_CREATE) == 0)
        return have >= wanted ? 0 : fy__failed(why, -ENODATA, FY_OP_OPEN, index, wanted, have);
    if (wanted == 0)
        return 0; /* fewer stripes than files */
    error = fy__file_allocate(file, have, wanted);
    return error != 0 ? fy__failed(why, error, FY_OP_ALLOCATE, index, wanted, have) : 0;
}

static int prepare_file(fy_store *store, uint32_t index, const char *path, uint32_t flags, fy_failure *why)
{
    assert(store->files[index].path == NULL);
    assert(path != NULL);
    struct fy__file *file = &store->files[index];
    const uint64_t wanted = file_size(store, index);
    file->path = strdup(path);
    if (file->path == NULL)
        return fy__failed(why, -ENOMEM, FY_OP_OPEN, index, wanted, 0);
    int error = fy__file_open(file, flags);
    if (error != 0)
        return fy__failed(why, error, FY_OP_OPEN, index, wanted, 0);
    error = size_file(store, index, flags, why);
    if (error != 0)
        return error;
    if (file->created)
        error = fy__file_sync_folder(file);
    if (error != 0)
        return fy__failed(why, error, FY_OP_SYNC, index, wanted, 0);
    if ((flags & FY_STORE_BUFFERED) == 0)
        error = fy__file_make_direct(file);
    return error != 0 ? fy__failed(why, error, FY_OP_READ, index, FY__PAGE, 0) : 0;
}

/* Closes what is open. After a failed open `discard` also removes the files that it made. */
static int release_files(fy_store *store, bool discard)
{
    assert(atomic_load(&store->users) == 0);
    int first = 0;
    for (uint32_t i = 0; i < store->count + store->sources; i++) {
        struct fy__file *file = &store->files[i];
        if (file->path == NULL)
            continue;
        if (discard && file->created)
            (void)fy__system.unlink(file->path); /* already failing: the first error is the one to report */
        if (file->fd >= 0) {
            /* A forked child may hold the description open; unlocking it here frees the file all the same. */
            (void)fy__system.flock(file->fd, LOCK_UN); /* close unlocks too, unless there is such a child */
            if (fy__system.close(file->fd) != 0 && first == 0)
                first = -errno;
        }
        free(file->path);
        file->path = NULL;
        file->fd = -1;
    }
    return first;
}

FY_API int fy_store_open(const char *const *paths, uint32_t count, uint64_t stripe, uint64_t size, uint32_t flags,
                         fy_store **out, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (paths == NULL || out == NULL || count == 0 || count > FY_MAX_DIRECTORIES)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, FY_MAX_DIRECTORIES, count);
    if (stripe == 0 || stripe % FY__PAGE != 0 || stripe > FY__SPAN_MAX)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, FY__PAGE, stripe);
    if (size == 0 || size % FY__PAGE != 0 || size > FY__SPAN_MAX)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, FY__PAGE, size);
    const uint32_t known = FY_STORE_CREATE | FY_STORE_BUFFERED | FY_STORE_READ_ONLY;
    if ((flags & ~known) != 0 || ((flags & FY_STORE_READ_ONLY) != 0 && (flags & FY_STORE_CREATE) != 0))
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    fy_store *store = fy__system.calloc(1, sizeof *store);
    if (store == NULL)
        return fy__failed(why, -ENOMEM, FY_OP_SETUP, 0, sizeof *store, 0);
    store->count = count;
    store->stripe = stripe;
    store->size = size;
    store->process = getpid();
    atomic_init(&store->users, 0);
    for (uint32_t i = 0; i < count; i++) {
        const int error = paths[i] != NULL ? prepare_file(store, i, paths[i], flags, why)
                                           : fy__failed(why, -EINVAL, FY_OP_OPEN, i, 0, 0);
        if (error != 0) {
            (void)release_files(store, true); /* the first error is the one to report */
            free(store);
            return error;
        }
    }
    assert(store->files[0].fd >= 0 && store->files[count - 1].fd >= 0);
    assert(store->sources == 0); /* they are attached later */
    *out = store;
    return 0;
}

FY_API uint64_t fy_store_size(const fy_store *store)
{
    assert(store != NULL);
    assert(store->size > 0);
    assert(store->size % FY__PAGE == 0);
    return store->size;
}

FY_API uint32_t fy_store_alignment(const fy_store *store)
{
    assert(store != NULL);
    assert(store->stripe % FY__PAGE == 0);
    return FY__PAGE;
}

FY_API int fy_store_is_direct(const fy_store *store)
{
    assert(store != NULL);
    assert(store->count > 0);
    assert(store->count <= FY_MAX_DIRECTORIES);
    assert(store->sources <= FY_MAX_SOURCES);
    for (uint32_t i = 0; i < store->count + store->sources; i++) {
        if (!store->files[i].direct)
            return 0;
    }
    return 1;
}

FY_API int fy_store_sync(fy_store *store, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store == NULL)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    if (store->process != getpid())
        return fy__failed(why, -EPERM, FY_OP_SYNC, 0, 0, 0);
    assert(store->count > 0);
    int first = 0;
    for (uint32_t i = 0; i < store->count; i++) {
        int error = -EINTR;
        for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && error == -EINTR; attempt++)
            error = fy__system.fdatasync(store->files[i].fd) != 0 ? -errno : 0;
        if (error == 0)
            error = fy__file_still_there(&store->files[i]);
        if (error != 0 && first == 0)
            first = fy__failed(why, error, FY_OP_SYNC, i, file_size(store, i), 0);
    }
    return first != 0 ? first : fy_store_check_sources(store, why);
}

FY_API int fy_store_close(fy_store *store)
{
    if (store == NULL)
        return 0;
    if (store->process != getpid())
        return -EPERM;
    if (atomic_load(&store->users) != 0)
        return -EBUSY;
    assert(store->count > 0);
    const int error = release_files(store, false);
    free(store);
    return error;
}
