/*
 * file.c - one file of a store, or one source: opened, taken over, sized, probed for direct I/O, looked for again.
 *
 * Everything here runs in the thread that opens, adds to, syncs or closes a store, before or beside the daemon; the daemon's
 * threads only use descriptors. Functions return 0 or -errno; store.c and foreign_files.c say which file it was.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

int fy__file_sync_folder(const struct fy__file *file)
{
    assert(file->path != NULL);
    assert(file->fd >= 0);
    char *folder = strdup(file->path);
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

int fy__file_open(struct fy__file *file, uint32_t flags)
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

/* One that was there already must be a regular file of this user (-EPERM), and nobody else may open it from now on. */
static int take_over(const struct fy__file *file, const struct stat *status)
{
    assert(!file->created);
    if (status->st_uid != geteuid())
        return -EPERM;
    if ((status->st_mode & 07777) == 0600 || fy__system.fchmod(file->fd, 0600) == 0)
        return 0;
    return errno == EPERM || errno == EOPNOTSUPP ? 0 : -errno; /* ours, so this file system keeps no modes */
}

int fy__file_own(const struct fy__file *file, uint32_t flags, uint64_t *size)
{
    assert(file->fd >= 0);
    struct stat status;
    if (fy__system.fstat(file->fd, &status) != 0)
        return -errno;
    if (!S_ISREG(status.st_mode))
        return -EINVAL;
    *size = (uint64_t)status.st_size;
    if ((flags & FY_STORE_READ_ONLY) != 0)
        return fy__file_may_wait(file);
    return file->created ? 0 : take_over(file, &status);
}

int fy__file_may_wait(const struct fy__file *file)
{
    assert(file->fd >= 0);
    return fy__system.set_flags(file->fd, 0) != 0 ? -errno : 0;
}

int fy__file_allocate(const struct fy__file *file, uint64_t size, uint64_t wanted)
{
    assert(file->fd >= 0);
    assert(wanted > 0);
    assert(wanted <= FY__SPAN_MAX);
    int error = -EINTR;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && error == -EINTR; attempt++)
        error = fy__system.fallocate(file->fd, 0, 0, (off_t)wanted) != 0 ? -errno : 0;
    if (error != -EOPNOTSUPP && error != -ENOSYS)
        return error;
    return size < wanted && fy__system.ftruncate(file->fd, (off_t)wanted) != 0 ? -errno : 0;
}

/* Whether an error of a read is about the block that was read, and not about how it was read. */
static bool is_of_one_block(int error)
{
    return error == -EIO || error == -ENODATA || error == -EREMOTEIO || error == -EBADMSG || error == -EILSEQ;
}

int fy__file_make_direct(struct fy__file *file)
{
    assert(file->fd >= 0);
    assert(!file->direct);
    _Alignas(FY__PAGE) unsigned char page[FY__PAGE];
    const int alignment = fy__system.direct_alignment(file->fd);
    if (alignment == 0 || alignment > (int)FY__PAGE)
        return 0; /* the flag may be accepted all the same, and all goes through the page cache (ext4 with data=journal) */
    if (fy__system.set_flags(file->fd, O_DIRECT) != 0)
        return errno == EINVAL ? 0 : -errno; /* EINVAL: this file system has no direct I/O */
    int error = alignment > 0 ? 0 : -EINTR;
    for (uint32_t attempt = 0; attempt < FY__RETRIES_MAX && (error == -EINTR || error == -EAGAIN); attempt++)
        error = fy__system.pread(file->fd, page, sizeof page, 0) < 0 ? -errno : 0;
    if (error == 0 || is_of_one_block(error)) {
        file->direct = true;
        return 0;
    }
    if (error != -EINVAL)
        return error;
    return fy__system.set_flags(file->fd, 0) != 0 ? -errno : 0;
}

int fy__file_still_there(const struct fy__file *file)
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
