/*
 * foreign_files.c - files of somebody else behind a store, which are only ever read: a checkpoint's.
 *
 * The first begins at FY_SOURCES_AT and each takes its size up to whole pages, so an offset names one file. They are neither
 * locked nor ours: what they were when they were added is compared again with every sync, and a read that finds one longer or
 * shorter fails (queue.c). They are added before a daemon starts and stay until the store is closed.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(FY_SOURCES_AT + FY_MAX_SOURCES * FY__SPAN_MAX < UINT64_MAX / 2, "every source has its offsets");

/* The source that holds a logical offset; NULL: there is none. */
static const struct fy__file *source_of(const fy_store *store, uint64_t offset)
{
    for (uint32_t i = store->count; i < store->count + store->sources; i++) {
        const struct fy__file *file = &store->files[i];
        if (offset >= file->at && offset - file->at < (uint64_t)file->known.st_size)
            return file;
    }
    return NULL;
}

struct fy__place fy__source_place(const fy_store *store, uint64_t offset)
{
    const struct fy__file *file = source_of(store, offset);
    assert(file != NULL);
    const uint64_t within = offset - file->at;
    return (struct fy__place){
        .file = (uint32_t)(file - store->files), .offset = within, .room = (uint64_t)file->known.st_size - within};
}

bool fy__store_in_source(const fy_store *store, uint64_t offset, uint64_t size)
{
    assert(store->sources <= FY_MAX_SOURCES);
    assert(size > 0);
    const struct fy__file *file = source_of(store, offset);
    return file != NULL && fy__inside(offset - file->at, size, fy__whole_pages((uint64_t)file->known.st_size));
}

/* Opens a source as it is expected to be; the caller closes what is open after an error. */
static int open_source(struct fy__file *file, uint64_t size, uint64_t changed_ns)
{
    assert(file->path != NULL);
    file->fd = fy__system.open(file->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW, 0);
    if (file->fd < 0)
        return -errno;
    if (fy__system.fstat(file->fd, &file->known) != 0)
        return -errno;
    if (!S_ISREG(file->known.st_mode))
        return -EINVAL;
    const struct timespec changed = file->known.st_mtim;
    if ((uint64_t)file->known.st_size != size ||
        (uint64_t)changed.tv_sec * 1000000000 + (uint64_t)changed.tv_nsec != changed_ns)
        return -ESTALE;
    return fy__file_may_wait(file);
}

FY_API int fy_store_attach(fy_store *store, const char *path, uint64_t size, uint64_t changed_ns, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store == NULL || path == NULL || size == 0 || size > FY__SPAN_MAX || store->sources == FY_MAX_SOURCES)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, size, 0);
    if (store->process != getpid())
        return fy__failed(why, -EPERM, FY_OP_SETUP, 0, size, 0);
    if (atomic_load(&store->users) != 0)
        return fy__failed(why, -EBUSY, FY_OP_SETUP, 0, size, 0);
    assert(store->count > 0 && store->count <= FY_MAX_DIRECTORIES);
    assert(store->sources < FY_MAX_SOURCES);
    const uint32_t index = store->count + store->sources;
    struct fy__file *file = &store->files[index];
    *file = (struct fy__file){.path = strdup(path), .fd = -1, .at = FY_SOURCES_AT};
    if (file->path == NULL)
        return fy__failed(why, -ENOMEM, FY_OP_OPEN, index, size, 0);
    if (store->sources > 0) {
        const struct fy__file *before = file - 1;
        file->at = before->at + fy__whole_pages((uint64_t)before->known.st_size);
    }
    int error = open_source(file, size, changed_ns);
    if (error == 0)
        error = fy__file_make_direct(file);
    if (error == 0) {
        assert(file->fd >= 0 && file->at % FY__PAGE == 0);
        store->sources++;
        return 0;
    }
    if (file->fd >= 0)
        (void)fy__system.close(file->fd); /* opened for reading: nothing to lose */
    free(file->path);
    *file = (struct fy__file){.fd = -1};
    return fy__failed(why, error, FY_OP_OPEN, index, size, 0);
}

FY_API int fy_store_check_sources(fy_store *store, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store == NULL)
        return fy__failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    if (store->process != getpid())
        return fy__failed(why, -EPERM, FY_OP_SYNC, 0, 0, 0);
    for (uint32_t i = store->count; i < store->count + store->sources; i++) {
        const struct fy__file *file = &store->files[i];
        const struct stat *known = &file->known;
        assert(file->fd >= 0 && file->at >= FY_SOURCES_AT);
        struct stat now;
        int error = fy__file_still_there(file);
        if (error == 0 && fy__system.fstat(file->fd, &now) != 0)
            error = -errno;
        if (error == 0 && (now.st_size != known->st_size || now.st_mtim.tv_sec != known->st_mtim.tv_sec ||
                           now.st_mtim.tv_nsec != known->st_mtim.tv_nsec))
            error = -ESTALE;
        if (error != 0)
            return fy__failed(why, error, FY_OP_SYNC, i, (uint64_t)known->st_size, 0);
    }
    return 0;
}
