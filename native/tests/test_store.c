/*
 * A store's files: missing, short, locked, full, without fallocate, without O_DIRECT. Each error names the file, what
 * was wanted and what was there; a failed open leaves what it found and nothing else. A file that was there is taken over
 * only from this user, and nobody else can open it afterwards; a symbolic link is not followed. Readers share files, which
 * are left as they are. What is not found by its path any more cannot be made durable.
 */
#include "testing.h"

#include <fcntl.h>
#include <sys/stat.h>

#define SIZE (UINT64_C(1) << 20)

static int fallocate_error;

static int failing_fallocate(int fd, int mode, off_t offset, off_t size)
{
    (void)fd;
    (void)mode;
    (void)offset;
    (void)size;
    errno = fallocate_error;
    return -1;
}

static int no_direct(int fd, int flags)
{
    if ((flags & O_DIRECT) == 0)
        return fy__system_real.set_flags(fd, flags);
    errno = EINVAL;
    return -1;
}

static int open_store(uint32_t count, uint64_t size, uint32_t flags, fy_store **out, fy_failure *why)
{
    const char *const paths[3] = {testing_path(0), testing_path(1), testing_path(2)};
    return fy_store_open(paths, count, 64 << 10, size, flags, out, why);
}

static off_t length_of(uint32_t index)
{
    struct stat status;
    CHECK_EQUAL(stat(testing_path(index), &status), 0);
    CHECK_EQUAL(status.st_mode & 0777, 0600);
    return status.st_size;
}

static void sizes_and_locks(void)
{
    fy_store *store = NULL;
    fy_store *second = NULL;
    fy_failure why;
    CHECK_EQUAL(open_store(3, SIZE, 0, &store, &why), -ENOENT);
    CHECK_EQUAL(why.operation, FY_OP_OPEN);
    CHECK_EQUAL(open_store(3, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_size(store), SIZE);
    CHECK_EQUAL(fy_store_alignment(store), 4096);
    /* 16 stripes over three files: 6, 5, 5. */
    CHECK_EQUAL(length_of(0), 6 << 16);
    CHECK_EQUAL(length_of(1), 5 << 16);
    CHECK_EQUAL(length_of(2), 5 << 16);
    CHECK_EQUAL(open_store(3, SIZE, 0, &second, &why), -EBUSY);
    CHECK_EQUAL(open_store(3, SIZE, FY_STORE_CREATE, &second, &why), -EBUSY);
    CHECK(second == NULL);
    CHECK_EQUAL(fy_store_sync(store, &why), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    CHECK_EQUAL(open_store(3, SIZE, 0, &store, &why), 0); /* closed is unlocked */
    CHECK_EQUAL(fy_store_close(store), 0);

    CHECK_EQUAL(open_store(3, 2 * SIZE, 0, &store, &why), -ENODATA); /* too short: says which and by how much */
    CHECK_EQUAL(why.file, 0);
    CHECK_EQUAL(why.wanted, 11 << 16);
    CHECK_EQUAL(why.got, 6 << 16);
    CHECK_EQUAL(unlink(testing_path(2)), 0);
    CHECK_EQUAL(open_store(3, SIZE, 0, &store, &why), -ENOENT);
    CHECK_EQUAL(why.file, 2);
    CHECK_EQUAL(open_store(3, 2 * SIZE, FY_STORE_CREATE, &store, &why), 0); /* grown */
    CHECK_EQUAL(length_of(0), 11 << 16);
    CHECK_EQUAL(fy_store_close(store), 0);
}

static void full_disk(void)
{
    fy_store *store = NULL;
    fy_failure why;
    fy__system.fallocate = failing_fallocate;
    fallocate_error = ENOSPC;
    CHECK_EQUAL(unlink(testing_path(1)), 0);
    CHECK_EQUAL(open_store(3, 4 * SIZE, FY_STORE_CREATE, &store, &why), -ENOSPC);
    CHECK_EQUAL(why.operation, FY_OP_ALLOCATE);
    CHECK_EQUAL(why.wanted, 22 << 16);
    CHECK_EQUAL(why.got, 11 << 16);
    CHECK_EQUAL(length_of(0), 11 << 16); /* what was there stays */
    CHECK(access(testing_path(1), F_OK) != 0);
    fallocate_error = EOPNOTSUPP; /* then length alone must do */
    CHECK_EQUAL(open_store(3, 4 * SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(length_of(1), 21 << 16);
    CHECK_EQUAL(fy_store_close(store), 0);
    fy__system = fy__system_real;
}

static int none(int fd)
{
    (void)fd;
    return 0;
}

static int too_large(int fd)
{
    (void)fd;
    return 1 << 16;
}

static int untold(int fd)
{
    (void)fd;
    return -1;
}

static ssize_t bad_block(int fd, void *data, size_t size, off_t offset)
{
    errno = EIO;
    return offset == 0 ? -1 : fy__system_real.pread(fd, data, size, offset);
}

static void buffered(void)
{
    fy_store *store = NULL;
    fy_failure why;
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE | FY_STORE_BUFFERED, &store, &why), 0);
    CHECK_EQUAL(fy_store_is_direct(store), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    fy__system.direct_alignment = none; /* ext4 with data=journal: the flag is accepted */
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_is_direct(store), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    fy__system.direct_alignment = too_large; /* a drive with sectors of 64 KiB */
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_is_direct(store), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    fy__system.direct_alignment = untold; /* before Linux 6.1; and the first block is bad, which says nothing of the others */
    fy__system.pread = bad_block;
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_is_direct(store), 1);
    CHECK_EQUAL(fy_store_close(store), 0);
    fy__system.pread = fy__system_real.pread;
    fy__system.set_flags = no_direct; /* a file system without direct I/O */
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_is_direct(store), 0);
    fy_arena *arena = testing_arena(2 * SIZE);
    const fy_options options = testing_options(FY_BACKEND_AUTO);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK(strstr(fy_daemon_description(daemon), "no O_DIRECT") != NULL);
    unsigned char *base = fy_arena_base(arena);
    testing_fill(base, SIZE, 3);
    CHECK_EQUAL(testing_write(daemon, 0, 0, SIZE, NULL), 0);
    CHECK_EQUAL(testing_read(daemon, SIZE, 0, SIZE, NULL), 0);
    CHECK(memcmp(base, base + SIZE, SIZE) == 0);
    CHECK_EQUAL(fy_store_close(store), -EBUSY);
    CHECK_EQUAL(fy_arena_destroy(arena), -EBUSY);
    testing_close(daemon, arena, store);
    fy__system = fy__system_real;
}

static int fstat_of_another(int fd, struct stat *out)
{
    const int result = fy__system_real.fstat(fd, out);
    out->st_uid++;
    return result;
}

static int fchmod_error;

static int failing_fchmod(int fd, mode_t mode)
{
    (void)fd;
    (void)mode;
    errno = fchmod_error;
    return -1;
}

static mode_t mode_of(const char *path)
{
    struct stat status;
    CHECK_EQUAL(stat(path, &status), 0);
    return status.st_mode & 07777;
}

static void foreign_files(void)
{
    static const uint32_t ways[] = {0, FY_STORE_CREATE};
    fy_store *store = NULL;
    fy_failure why;
    char link[400];
    (void)snprintf(link, sizeof link, "%s-link", testing_path(0));
    const char *const linked[2] = {testing_path(1), link};
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(fy_store_close(store), 0);
    CHECK_EQUAL(symlink(testing_path(0), link), 0);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQUAL(fy_store_open(linked, 2, 64 << 10, SIZE, ways[i], &store, &why), -ELOOP);
        CHECK_EQUAL(why.operation, FY_OP_OPEN);
        CHECK_EQUAL(why.file, 1);

        CHECK_EQUAL(chmod(testing_path(1), 0666), 0); /* readable to all by now: not any more */
        CHECK_EQUAL(open_store(2, SIZE, ways[i], &store, &why), 0);
        CHECK_EQUAL(mode_of(testing_path(1)), 0600);
        CHECK_EQUAL(fy_store_close(store), 0);

        fy__system.fstat = fstat_of_another;
        CHECK_EQUAL(open_store(2, SIZE, ways[i], &store, &why), -EPERM);
        CHECK_EQUAL(why.operation, FY_OP_OPEN);
        CHECK_EQUAL(mode_of(testing_path(0)), 0600); /* and there it stays */
        fy__system = fy__system_real;

        CHECK_EQUAL(chmod(testing_path(1), 0640), 0);
        fy__system.fchmod = failing_fchmod;
        fchmod_error = EIO;
        CHECK_EQUAL(open_store(2, SIZE, ways[i], &store, &why), -EIO);
        CHECK_EQUAL(why.file, 1);
        fchmod_error = EPERM; /* a file system without modes */
        CHECK_EQUAL(open_store(2, SIZE, ways[i], &store, &why), 0);
        CHECK_EQUAL(fy_store_close(store), 0);
        fy__system = fy__system_real;
        CHECK_EQUAL(chmod(testing_path(1), 0600), 0);
    }
    CHECK_EQUAL(unlink(link), 0);
}

static void wrong_arguments(void)
{
    fy_store *store = NULL;
    fy_failure why;
    const char *const paths[2] = {testing_path(0), testing_path(0)};
    CHECK_EQUAL(fy_store_open(paths, 0, 4096, 4096, FY_STORE_CREATE, &store, &why), -EINVAL);
    CHECK_EQUAL(fy_store_open(paths, FY_MAX_DIRECTORIES + 1, 4096, 4096, FY_STORE_CREATE, &store, &why), -EINVAL);
    CHECK_EQUAL(fy_store_open(paths, 1, 512, 4096, FY_STORE_CREATE, &store, &why), -EINVAL);
    CHECK_EQUAL(fy_store_open(paths, 1, 4096, 100, FY_STORE_CREATE, &store, &why), -EINVAL);
    CHECK_EQUAL(fy_store_open(paths, 1, 4096, 4096, FY_STORE_CREATE | 8, &store, &why), -EINVAL); /* no such flag */
    CHECK_EQUAL(fy_store_sync(NULL, &why), -EINVAL);
    CHECK_EQUAL(fy_store_open(paths, 2, 4096, 8192, FY_STORE_CREATE, &store, &why), -EBUSY); /* the same file twice */
    CHECK_EQUAL(why.file, 1);
    const char *const folder[1] = {"/"};
    CHECK_EQUAL(fy_store_open(folder, 1, 4096, 8192, 0, &store, &why), -EISDIR);
    CHECK(store == NULL);
}

static void readers(void)
{
    fy_store *store = NULL;
    fy_store *second = NULL;
    fy_failure why;
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_READ_ONLY, &second, &why), -EBUSY); /* a run has it */
    CHECK_EQUAL(fy_store_close(store), 0);
    CHECK_EQUAL(chmod(testing_path(1), 0640), 0);
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_READ_ONLY, &store, &why), 0);
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_READ_ONLY, &second, &why), 0);
    CHECK_EQUAL(fy_store_close(second), 0);
    CHECK_EQUAL(open_store(2, SIZE, 0, &second, &why), -EBUSY); /* somebody reads it */

    fy_arena *arena = testing_arena(1 << 20);
    const fy_options options = testing_options(FY_BACKEND_THREADS);
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    CHECK_EQUAL(testing_read(daemon, 0, 0, 64 << 10, NULL), 0);
    CHECK_EQUAL(testing_write(daemon, 0, 0, 64 << 10, NULL), -EBADF);
    CHECK_EQUAL(fy_daemon_stop(daemon), 0);
    CHECK_EQUAL(fy_arena_destroy(arena), 0);
    CHECK_EQUAL(fy_store_close(store), 0);

    struct stat status;
    CHECK_EQUAL(stat(testing_path(1), &status), 0);
    CHECK_EQUAL(status.st_mode & 0777, 0640);
    CHECK_EQUAL(chmod(testing_path(1), 0600), 0);
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_READ_ONLY | FY_STORE_CREATE, &store, &why), -EINVAL);
    CHECK_EQUAL(unlink(testing_path(1)), 0);
    CHECK_EQUAL(mkfifo(testing_path(1), 0600), 0); /* nobody waits for who would write to it */
    CHECK_EQUAL(open_store(2, SIZE, FY_STORE_READ_ONLY, &store, &why), -EINVAL);
    CHECK_EQUAL(unlink(testing_path(1)), 0);
}

static int lstat_refused(const char *path, struct stat *out)
{
    (void)path;
    (void)out;
    errno = EACCES;
    return -1;
}

/* The file of index 1 is renamed away, and another is put in its place. */
static void gone_by_its_path(void)
{
    fy_store *store = NULL;
    fy_failure why;
    char away[400];
    (void)snprintf(away, sizeof away, "%s-away", testing_path(1));
    CHECK_EQUAL(open_store(3, SIZE, FY_STORE_CREATE, &store, &why), 0);
    CHECK_EQUAL(rename(testing_path(1), away), 0);
    CHECK_EQUAL(fy_store_sync(store, &why), -ESTALE);
    CHECK_EQUAL(why.operation, FY_OP_SYNC);
    CHECK_EQUAL(why.file, 1);
    CHECK_EQUAL(link(testing_path(0), testing_path(1)), 0);
    CHECK_EQUAL(fy_store_sync(store, &why), -ESTALE);
    CHECK_EQUAL(unlink(testing_path(1)), 0);
    CHECK_EQUAL(symlink(away, testing_path(1)), 0); /* which opening would refuse */
    CHECK_EQUAL(fy_store_sync(store, &why), -ESTALE);
    CHECK_EQUAL(rename(away, testing_path(1)), 0);
    CHECK_EQUAL(fy_store_sync(store, &why), 0);
    fy__system.lstat = lstat_refused;
    CHECK_EQUAL(fy_store_sync(store, &why), -EACCES);
    CHECK_EQUAL(why.file, 0);
    fy__system = fy__system_real;
    CHECK_EQUAL(fy_store_close(store), 0);
}

int main(void)
{
    const uint32_t descriptors = testing_descriptors();
    sizes_and_locks();
    full_disk();
    buffered();
    foreign_files();
    wrong_arguments();
    readers();
    gone_by_its_path();
    CHECK_EQUAL(testing_descriptors(), descriptors);
    return 0;
}
