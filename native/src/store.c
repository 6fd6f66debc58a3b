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
 * Behind the store lie its sources: files of others that are only read, as a checkpoint's. They are neither locked nor ours, so
 * what they were when they were added is compared again with every sync.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

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

static struct fy__place place_in_source(const fy_store *store, uint64_t offset)
{
    const struct fy__file *file = source_of(store, offset);
    assert(file != NULL);
    const uint64_t within = offset - file->at;
    return (struct fy__place){
        .file = (uint32_t)(file - store->files), .offset = within, .room = (uint64_t)file->known.st_size - within};
}

bool fy__store_in_source(const fy_store *store, uint64_t offset, uint64_t size)
{
    const struct fy__file *file = source_of(store, offset);
    return file != NULL && fy__inside(offset - file->at, size, fy__whole_pages((uint64_t)file->known.st_size));
}

struct fy__place fy__store_place(const fy_store *store, uint64_t offset)
{
    assert(store->count > 0);
    if (offset >= FY_SOURCES_AT)
        return place_in_source(store, offset);
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

static int failed(fy_failure *why, int error, uint32_t operation, uint32_t file, uint64_t wanted, uint64_t got)
{
    assert(error < 0);
    if (why != NULL)
        *why = (fy_failure){
            .error = error, .operation = operation, .file = file, .wanted = wanted, .got = got};
    return error;
}

/* A new file is durable only when its name is: the folder is synced too. */
static int sync_folder(const char *path)
{
    assert(path != NULL);
    char *folder = strdup(path);
    if (folder == NULL)
        return -ENOMEM;
    char *slash = strrchr(folder, '/');
    if (slash == folder)
        slash[1] = '\0';
    else if (slash != NULL)
        *slash = '\0';
    const int fd = fy__system.open(slash != NULL ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    int error = fd < 0 ? -errno : 0;
    free(folder);
    if (error != 0)
        return error;
    if (fy__system.fsync(fd) != 0) /* a new name is no data that fdatasync has to write */
        error = -errno;
    (void)fy__system.close(fd); /* opened for reading: nothing to lose */
    return error == -EINVAL ? 0 : error; /* some file systems cannot sync folders, and need not */
}

/* Opens without O_DIRECT; make_direct() switches it on once the file is known to be ours. */
static int open_file(struct fy__file *file, uint32_t flags)
{
    assert(file->path != NULL);
    assert(!file->created);
    file->fd = -1;
    if ((flags & FY_STORE_CREATE) != 0) {
        file->fd = fy__system.open(file->path, O_RDWR | O_CLOEXEC | O_CREAT | O_EXCL, 0600);
        if (file->fd < 0 && errno != EEXIST)
            return -errno;
        file->created = file->fd >= 0;
    }
    const bool reads = (flags & FY_STORE_READ_ONLY) != 0;
    if (file->fd < 0) /* nobody waits for the writer of a pipe that lies there */
        file->fd = fy__system.open(file->path, (reads ? O_RDONLY | O_NONBLOCK : O_RDWR) | O_CLOEXEC | O_NOFOLLOW, 0);
    if (file->fd < 0)
        return -errno;
    if (fy__system.flock(file->fd, (reads ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0)
        return 0;
    if (errno != EWOULDBLOCK)
        return -errno;
    file->created = false; /* who was quicker to lock what we made has it now */
    return -EBUSY;
}

/* A file that was there already: a regular one of this user (-EPERM), which nobody else may open from now on. */
static int own_file(const struct fy__file *file, const struct stat *status, uint32_t flags)
{
    assert(file->fd >= 0);
    if (!S_ISREG(status->st_mode))
        return -EINVAL;
    if (file->created || (flags & FY_STORE_READ_ONLY) != 0)
        return 0;
    if (status->st_uid != geteuid())
        return -EPERM;
    if ((status->st_mode & 07777) == 0600 || fy__system.fchmod(file->fd, 0600) == 0)
        return 0;
    return errno == EPERM || errno == EOPNOTSUPP ? 0 : -errno; /* ours, so this file system keeps no modes */
}

/* Makes the file ours and as long as the store needs it, with its space taken where the file system can do that. */
static int size_file(fy_store *store, uint32_t index, uint32_t flags, fy_failure *why)
{
    assert(store->files[index].fd >= 0);
    const struct fy__file *file = &store->files[index];
    const uint64_t wanted = file_size(store, index);
    struct stat status;
    if (fy__system.fstat(file->fd, &status) != 0)
        return failed(why, -errno, FY_OP_OPEN, index, wanted, 0);
    const int foreign = own_file(file, &status, flags);
    if (foreign != 0)
        return failed(why, foreign, FY_OP_OPEN, index, wanted, 0);
    const uint64_t have = (uint64_t)status.st_size;
    if ((flags & FY_STORE_CREATE) == 0)
        return have >= wanted ? 0 : failed(why, -ENODATA, FY_OP_OPEN, index, wanted, have);
    if (wanted == 0)
        return 0; /* fewer stripes than files */
    int error = -EINTR;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && error == -EINTR; attempt++)
        error = fy__system.fallocate(file->fd, 0, 0, (off_t)wanted) != 0 ? -errno : 0;
    if (error == -EOPNOTSUPP || error == -ENOSYS) {
        error = 0;
        if (have < wanted && fy__system.ftruncate(file->fd, (off_t)wanted) != 0)
            error = -errno;
    }
    if (error != 0)
        return failed(why, error, FY_OP_ALLOCATE, index, wanted, have);
    return 0;
}

/* O_DIRECT counts only when a page can really be read with it: some file systems accept the flag and not the I/O. */
static int make_direct(struct fy__file *file)
{
    assert(file->fd >= 0);
    assert(!file->direct);
    _Alignas(FY__PAGE) unsigned char page[FY__PAGE];
    if (fy__system.set_flags(file->fd, O_DIRECT) != 0)
        return errno == EINVAL ? 0 : -errno; /* EINVAL: this file system has no direct I/O */
    int error = -EINTR;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && (error == -EINTR || error == -EAGAIN); attempt++)
        error = fy__system.pread(file->fd, page, sizeof page, 0) < 0 ? -errno : 0;
    if (error == 0) {
        file->direct = true;
        return 0;
    }
    if (error != -EINVAL)
        return error;
    return fy__system.set_flags(file->fd, 0) != 0 ? -errno : 0;
}

static int prepare_file(fy_store *store, uint32_t index, const char *path, uint32_t flags, fy_failure *why)
{
    assert(store->files[index].path == NULL);
    struct fy__file *file = &store->files[index];
    const uint64_t wanted = file_size(store, index);
    file->path = strdup(path);
    if (file->path == NULL)
        return failed(why, -ENOMEM, FY_OP_OPEN, index, wanted, 0);
    int error = open_file(file, flags);
    if (error != 0)
        return failed(why, error, FY_OP_OPEN, index, wanted, 0);
    error = size_file(store, index, flags, why);
    if (error != 0)
        return error;
    if (file->created)
        error = sync_folder(path);
    if (error != 0)
        return failed(why, error, FY_OP_SYNC, index, wanted, 0);
    if ((flags & FY_STORE_BUFFERED) == 0)
        error = make_direct(file);
    return error != 0 ? failed(why, error, FY_OP_READ, index, FY__PAGE, 0) : 0;
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
        return failed(why, -EINVAL, FY_OP_SETUP, 0, FY_MAX_DIRECTORIES, count);
    if (stripe == 0 || stripe % FY__PAGE != 0 || stripe > FY__SPAN_MAX)
        return failed(why, -EINVAL, FY_OP_SETUP, 0, FY__PAGE, stripe);
    if (size == 0 || size % FY__PAGE != 0 || size > FY__SPAN_MAX)
        return failed(why, -EINVAL, FY_OP_SETUP, 0, FY__PAGE, size);
    if ((flags & FY_STORE_READ_ONLY) != 0 && (flags & FY_STORE_CREATE) != 0)
        return failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    fy_store *store = fy__system.calloc(1, sizeof *store);
    if (store == NULL)
        return failed(why, -ENOMEM, FY_OP_SETUP, 0, sizeof *store, 0);
    store->count = count;
    store->stripe = stripe;
    store->size = size;
    store->process = getpid();
    atomic_init(&store->users, 0);
    for (uint32_t i = 0; i < count; i++) {
        const int error = paths[i] != NULL ? prepare_file(store, i, paths[i], flags, why)
                                           : failed(why, -EINVAL, FY_OP_OPEN, i, 0, 0);
        if (error != 0) {
            (void)release_files(store, true); /* the first error is the one to report */
            free(store);
            return error;
        }
    }
    *out = store;
    return 0;
}

FY_API uint64_t fy_store_size(const fy_store *store)
{
    assert(store->size > 0);
    assert(store->size % FY__PAGE == 0);
    return store->size;
}

FY_API uint32_t fy_store_alignment(const fy_store *store)
{
    assert(store->stripe % FY__PAGE == 0);
    return FY__PAGE;
}

FY_API int fy_store_is_direct(const fy_store *store)
{
    assert(store->count > 0);
    assert(store->count <= FY_MAX_DIRECTORIES);
    assert(store->sources <= FY_MAX_SOURCES);
    for (uint32_t i = 0; i < store->count + store->sources; i++) {
        if (!store->files[i].direct)
            return 0;
    }
    return 1;
}

/* The file's path still leads to it. Where a folder was removed or a drive unmounted meanwhile the open file is as good as
 * before, and nobody will find it again. */
static int still_there(const struct fy__file *file)
{
    assert(file->path != NULL);
    assert(file->fd >= 0);
    struct stat named;
    struct stat opened;
    if (fy__system.lstat(file->path, &named) != 0)
        return errno == ENOENT || errno == ENOTDIR ? -ESTALE : -errno;
    if (fy__system.fstat(file->fd, &opened) != 0)
        return -errno;
    return named.st_dev == opened.st_dev && named.st_ino == opened.st_ino ? 0 : -ESTALE;
}

FY_API int fy_store_sync(fy_store *store, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store->process != getpid())
        return failed(why, -EPERM, FY_OP_SYNC, 0, 0, 0);
    assert(store->count > 0);
    int first = 0;
    for (uint32_t i = 0; i < store->count; i++) {
        int error = -EINTR;
        for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && error == -EINTR; attempt++)
            error = fy__system.fdatasync(store->files[i].fd) != 0 ? -errno : 0;
        if (error == 0)
            error = still_there(&store->files[i]);
        if (error != 0 && first == 0)
            first = failed(why, error, FY_OP_SYNC, i, file_size(store, i), 0);
    }
    return first != 0 ? first : fy_store_check_sources(store, why);
}

/* ---- sources ---- */

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
    return 0;
}

FY_API int fy_store_attach(fy_store *store, const char *path, uint64_t size, uint64_t changed_ns, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store == NULL || path == NULL || size == 0 || size > FY__SPAN_MAX || store->sources == FY_MAX_SOURCES)
        return failed(why, -EINVAL, FY_OP_SETUP, 0, size, 0);
    if (store->process != getpid())
        return failed(why, -EPERM, FY_OP_SETUP, 0, size, 0);
    if (atomic_load(&store->users) != 0)
        return failed(why, -EBUSY, FY_OP_SETUP, 0, size, 0);
    const uint32_t index = store->count + store->sources;
    struct fy__file *file = &store->files[index];
    *file = (struct fy__file){.path = strdup(path), .fd = -1, .at = FY_SOURCES_AT};
    if (file->path == NULL)
        return failed(why, -ENOMEM, FY_OP_OPEN, index, size, 0);
    if (store->sources > 0) {
        const struct fy__file *before = file - 1;
        file->at = before->at + fy__whole_pages((uint64_t)before->known.st_size);
    }
    int error = open_source(file, size, changed_ns);
    if (error == 0)
        error = make_direct(file);
    if (error == 0) {
        store->sources++;
        return 0;
    }
    if (file->fd >= 0)
        (void)fy__system.close(file->fd); /* opened for reading: nothing to lose */
    free(file->path);
    *file = (struct fy__file){.fd = -1};
    return failed(why, error, FY_OP_OPEN, index, size, 0);
}

FY_API int fy_store_check_sources(fy_store *store, fy_failure *why)
{
    if (why != NULL)
        *why = (fy_failure){0};
    if (store == NULL)
        return failed(why, -EINVAL, FY_OP_SETUP, 0, 0, 0);
    if (store->process != getpid())
        return failed(why, -EPERM, FY_OP_SYNC, 0, 0, 0);
    for (uint32_t i = store->count; i < store->count + store->sources; i++) {
        const struct fy__file *file = &store->files[i];
        const struct stat *known = &file->known;
        struct stat now;
        int error = still_there(file);
        if (error == 0 && fy__system.fstat(file->fd, &now) != 0)
            error = -errno;
        if (error == 0 && (now.st_size != known->st_size || now.st_mtim.tv_sec != known->st_mtim.tv_sec ||
                           now.st_mtim.tv_nsec != known->st_mtim.tv_nsec))
            error = -ESTALE;
        if (error != 0)
            return failed(why, error, FY_OP_SYNC, i, (uint64_t)known->st_size, 0);
    }
    return 0;
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
