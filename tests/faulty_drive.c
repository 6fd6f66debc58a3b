/*
 * faulty_drive.c - a FUSE file system over a folder, with faults: speaks the kernel's protocol on /dev/fuse, needs no libfuse.
 *
 *     faulty_drive FOLDER MOUNT_POINT RULES
 *
 * It behaves as libfuse's file systems do: a file that is removed while it is open stays as .fuse_hiddenXXXX until it is
 * closed, there is no SEEK_DATA, and the end of an open file is told after close() has returned. RULES is a file that is read
 * again before each request, one rule per line:
 *
 *     OPERATION NAME ERRNO [FIRST END]     fails (bytes FIRST to END of the file alone)
 *     OPERATION NAME -MILLISECONDS         waits first
 *
 * OPERATION is a name of the table below or `*`, NAME is the last part of the path, a pattern of fnmatch(3). It ends, and
 * unmounts, with its standard input. Ended by SIGKILL it leaves the mount without its server (ENOTCONN).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 20, ROOM = MOST + 4096, NODES = 1 << 16, THREADS = 6, PATH = 4096 };

static const struct {
    uint32_t code;
    const char *name;
} operations[] = {
    {FUSE_LOOKUP, "LOOKUP"}, {FUSE_GETATTR, "GETATTR"}, {FUSE_SETATTR, "SETATTR"}, {FUSE_MKDIR, "MKDIR"},
    {FUSE_UNLINK, "UNLINK"}, {FUSE_RMDIR, "RMDIR"}, {FUSE_RENAME, "RENAME"}, {FUSE_RENAME2, "RENAME"}, {FUSE_LINK, "LINK"},
    {FUSE_OPEN, "OPEN"}, {FUSE_READ, "READ"}, {FUSE_WRITE, "WRITE"}, {FUSE_STATFS, "STATFS"}, {FUSE_RELEASE, "RELEASE"},
    {FUSE_FSYNC, "FSYNC"}, {FUSE_FSYNCDIR, "FSYNCDIR"}, {FUSE_FLUSH, "FLUSH"}, {FUSE_OPENDIR, "OPENDIR"},
    {FUSE_READDIR, "READDIR"}, {FUSE_CREATE, "CREATE"}, {FUSE_FALLOCATE, "FALLOCATE"}, {FUSE_SETLK, "LOCK"},
    {FUSE_SETLKW, "LOCK"},
};

/* A file or folder that the kernel knows by its number. It has the name of `name` in `parent`. */
struct node {
    uint64_t parent;
    char *name;    /* NULL: gone */
    uint32_t open; /* handles */
    bool hidden;   /* removed while it was open */
};

static struct node nodes[NODES];
static uint64_t count = FUSE_ROOT_ID + 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *folder, *rules;
static int device;
static uint32_t hidden;

static void path_of(uint64_t node, char *path)
{
    if (node == FUSE_ROOT_ID) {
        snprintf(path, PATH, "%s", folder);
        return;
    }
    path_of(nodes[node].parent, path);
    const size_t length = strlen(path);
    snprintf(path + length, PATH - length, "/%s", nodes[node].name != NULL ? nodes[node].name : "\001gone");
}

static void path_in(uint64_t parent, const char *name, char *path)
{
    path_of(parent, path);
    const size_t length = strlen(path);
    snprintf(path + length, PATH - length, "/%s", name);
}

static uint64_t node_of(uint64_t parent, const char *name, bool make)
{
    for (uint64_t i = FUSE_ROOT_ID + 1; i < count; i++) {
        if (nodes[i].parent == parent && nodes[i].name != NULL && strcmp(nodes[i].name, name) == 0)
            return i;
    }
    if (!make)
        return 0;
    if (count == NODES)
        abort();
    nodes[count] = (struct node){.parent = parent, .name = strdup(name)};
    return count++;
}

static void answer(uint64_t unique, int error, const void *data, size_t size)
{
    struct fuse_out_header *out = malloc(sizeof *out + size);
    *out = (struct fuse_out_header){.unique = unique, .error = -error, .len = (uint32_t)(sizeof *out + (error ? 0 : size))};
    if (!error && size > 0)
        memcpy(out + 1, data, size);
    if (write(device, out, out->len) < 0 && errno != ENOENT && errno != ENODEV) /* ENOENT: nobody waits any more */
        perror("faulty_drive: answer");
    free(out);
}

static void fill(struct fuse_attr *attr, const struct stat *s)
{
    *attr = (struct fuse_attr){
        .ino = s->st_ino, .size = (uint64_t)s->st_size, .blocks = (uint64_t)s->st_blocks, .mode = s->st_mode,
        .nlink = (uint32_t)s->st_nlink, .uid = s->st_uid, .gid = s->st_gid, .rdev = (uint32_t)s->st_rdev,
        .blksize = (uint32_t)s->st_blksize, .atime = (uint64_t)s->st_atim.tv_sec, .mtime = (uint64_t)s->st_mtim.tv_sec,
        .ctime = (uint64_t)s->st_ctim.tv_sec, .atimensec = (uint32_t)s->st_atim.tv_nsec,
        .mtimensec = (uint32_t)s->st_mtim.tv_nsec, .ctimensec = (uint32_t)s->st_ctim.tv_nsec,
    };
}

static int entry_of(uint64_t parent, const char *name, struct fuse_entry_out *out)
{
    char path[PATH];
    struct stat status;
    path_in(parent, name, path);
    if (lstat(path, &status) != 0)
        return errno;
    *out = (struct fuse_entry_out){.nodeid = node_of(parent, name, true)};
    fill(&out->attr, &status);
    return 0;
}

/* What a rule says of this request: 0, an errno, or a wait in `pause` (milliseconds). */
static int ruled(uint32_t code, const char *name, uint64_t first, uint64_t end, int *pause)
{
    const char *operation = "";
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        operation = operations[i].code == code ? operations[i].name : operation;
    FILE *file = fopen(rules, "r");
    char line[PATH], which[64], pattern[256];
    int found = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        int what = 0;
        unsigned long long from = 0, to = UINT64_MAX;
        if (sscanf(line, "%63s %255s %d %llu %llu", which, pattern, &what, &from, &to) < 3 || operation[0] == '\0')
            continue;
        if ((strcmp(which, "*") != 0 && strcmp(which, operation) != 0) || fnmatch(pattern, name, 0) != 0)
            continue;
        if (first >= to || end <= from)
            continue;
        if (what < 0)
            *pause = -what;
        else if (found == 0)
            found = what;
    }
    if (file != NULL)
        fclose(file);
    return found;
}

/* Gives a file that is open another name instead of removing it. Returns whether it was. */
static bool hide(uint64_t parent, const char *name)
{
    const uint64_t node = node_of(parent, name, false);
    if (node == 0 || nodes[node].open == 0)
        return false;
    char from[PATH], to[PATH], other[64];
    path_of(node, from);
    snprintf(other, sizeof other, ".fuse_hidden%08x%08x", (uint32_t)node, ++hidden);
    path_in(parent, other, to);
    if (rename(from, to) != 0)
        return false;
    free(nodes[node].name);
    nodes[node].name = strdup(other);
    nodes[node].hidden = true;
    return true;
}

static void forget_name(uint64_t parent, const char *name)
{
    const uint64_t node = node_of(parent, name, false);
    if (node != 0) {
        free(nodes[node].name);
        nodes[node].name = NULL;
    }
}

static int renamed(uint64_t parent, const char *name, uint64_t other, const char *to)
{
    char from[PATH], target[PATH];
    path_in(parent, name, from);
    path_in(other, to, target);
    (void)hide(other, to);
    if (rename(from, target) != 0)
        return errno;
    forget_name(other, to);
    const uint64_t node = node_of(parent, name, true);
    free(nodes[node].name);
    nodes[node].name = strdup(to);
    nodes[node].parent = other;
    return 0;
}

static int set(uint64_t node, const struct fuse_setattr_in *in)
{
    char path[PATH];
    path_of(node, path);
    if ((in->valid & FATTR_MODE) && chmod(path, in->mode) != 0)
        return errno;
    if ((in->valid & (FATTR_UID | FATTR_GID)) &&
        lchown(path, in->valid & FATTR_UID ? in->uid : (uid_t)-1, in->valid & FATTR_GID ? in->gid : (gid_t)-1) != 0)
        return errno;
    if ((in->valid & FATTR_SIZE) && truncate(path, (off_t)in->size) != 0)
        return errno;
    if (in->valid & (FATTR_ATIME | FATTR_MTIME)) {
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
        if (in->valid & FATTR_ATIME)
            times[0] = (struct timespec){(time_t)in->atime, in->valid & FATTR_ATIME_NOW ? UTIME_NOW : in->atimensec};
        if (in->valid & FATTR_MTIME)
            times[1] = (struct timespec){(time_t)in->mtime, in->valid & FATTR_MTIME_NOW ? UTIME_NOW : in->mtimensec};
        return utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW) != 0 ? errno : 0;
    }
    return 0;
}

static void list(uint64_t unique, uint64_t node, const struct fuse_read_in *in)
{
    char path[PATH], *data = malloc(in->size);
    size_t used = 0;
    uint64_t number = 0;
    path_of(node, path);
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory != NULL && (entry = readdir(directory)) != NULL;) {
        if (number++ < in->offset)
            continue;
        const size_t length = strlen(entry->d_name), size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + length);
        if (used + size > in->size)
            break;
        struct fuse_dirent *out = (struct fuse_dirent *)(data + used);
        memset(out, 0, size);
        *out = (struct fuse_dirent){
            .ino = entry->d_ino, .off = number, .namelen = (uint32_t)length, .type = entry->d_type};
        memcpy(out->name, entry->d_name, length);
        used += size;
    }
    const int error = directory == NULL ? errno : 0;
    if (directory != NULL)
        closedir(directory);
    answer(unique, error, data, used);
    free(data);
}

/* Opens or creates. O_DIRECT and O_APPEND are the kernel's: what comes here is not aligned, and has its place. */
static int opened(uint64_t node, uint32_t flags, mode_t mode, uint64_t *handle)
{
    char path[PATH];
    path_of(node, path);
    const int fd = open(path, ((int)flags & ~(O_DIRECT | O_APPEND | O_EXCL | O_NOFOLLOW)) | O_CLOEXEC, mode);
    if (fd < 0)
        return errno;
    nodes[node].open++;
    *handle = (uint64_t)fd;
    return 0;
}

static void released(uint64_t node, uint64_t handle)
{
    close((int)handle);
    pthread_mutex_lock(&lock);
    if (--nodes[node].open == 0 && nodes[node].hidden) {
        char path[PATH];
        path_of(node, path);
        unlink(path);
        free(nodes[node].name);
        nodes[node].name = NULL;
    }
    pthread_mutex_unlock(&lock);
}

static void created(const struct fuse_in_header *in, const struct fuse_create_in *create, const char *name)
{
    struct {
        struct fuse_entry_out entry;
        struct fuse_open_out open;
    } out = {0};
    char path[PATH];
    path_in(in->nodeid, name, path);
    const int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, create->mode & 07777);
    int error = fd < 0 ? errno : 0;
    if (fd >= 0) {
        if (fchmod(fd, create->mode & 07777) != 0 || fchown(fd, in->uid, in->gid) != 0)
            error = errno;
        close(fd);
    }
    if (error == EEXIST && (create->flags & O_EXCL) == 0)
        error = 0;
    if (error == 0)
        error = entry_of(in->nodeid, name, &out.entry);
    if (error == 0)
        error = opened(out.entry.nodeid, create->flags & ~(uint32_t)O_CREAT, 0, &out.open.fh);
    answer(in->unique, error, &out, sizeof out);
}

static int locked(const struct fuse_lk_in *in)
{
    const int kind = in->lk.type == F_RDLCK ? LOCK_SH : in->lk.type == F_WRLCK ? LOCK_EX : LOCK_UN;
    if ((in->lk_flags & FUSE_LK_FLOCK) == 0)
        return ENOLCK;
    return flock((int)in->fh, kind | LOCK_NB) != 0 ? errno : 0; /* nobody here waits for a lock */
}

static void transfer(const struct fuse_in_header *in, void *body)
{
    if (in->opcode == FUSE_READ) {
        const struct fuse_read_in *read = body;
        char *data = malloc(read->size);
        const ssize_t got = pread((int)read->fh, data, read->size, (off_t)read->offset);
        answer(in->unique, got < 0 ? errno : 0, data, got < 0 ? 0 : (size_t)got);
        free(data);
        return;
    }
    const struct fuse_write_in *written = body;
    const ssize_t put = pwrite((int)written->fh, written + 1, written->size, (off_t)written->offset);
    const struct fuse_write_out out = {.size = put < 0 ? 0 : (uint32_t)put};
    answer(in->unique, put < 0 ? errno : 0, &out, sizeof out);
}

static void begin(const struct fuse_in_header *in, const struct fuse_init_in *init)
{
    const struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION, .minor = init->minor < 31 ? init->minor : 31, .max_readahead = init->max_readahead,
        .flags = init->flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_FLOCK_LOCKS | FUSE_MAX_PAGES | FUSE_PARALLEL_DIROPS),
        .max_background = 64, .congestion_threshold = 48, .max_write = MOST, .time_gran = 1, .max_pages = MOST / 4096,
    };
    answer(in->unique, 0, &out, sizeof out);
}

/* Answers what goes by names, under the lock. Returns whether it has answered; `error` is the answer otherwise. */
static bool by_name(const struct fuse_in_header *in, void *body, int *error)
{
    const char *name = body;
    char path[PATH];
    struct fuse_entry_out entry = {0};
    switch (in->opcode) {
    case FUSE_LOOKUP:
        *error = entry_of(in->nodeid, name, &entry);
        break;
    case FUSE_MKDIR: {
        const struct fuse_mkdir_in *made = body;
        path_in(in->nodeid, (const char *)(made + 1), path);
        *error = mkdir(path, made->mode) != 0 || lchown(path, in->uid, in->gid) != 0 ? errno : 0;
        if (*error == 0)
            *error = entry_of(in->nodeid, (const char *)(made + 1), &entry);
        break;
    }
    case FUSE_LINK: {
        const struct fuse_link_in *linked = body;
        char from[PATH];
        path_of(linked->oldnodeid, from);
        path_in(in->nodeid, (const char *)(linked + 1), path);
        *error = link(from, path) != 0 ? errno : entry_of(in->nodeid, (const char *)(linked + 1), &entry);
        break;
    }
    case FUSE_CREATE: {
        const struct fuse_create_in *create = body;
        created(in, create, (const char *)(create + 1));
        return true;
    }
    case FUSE_UNLINK:
        path_in(in->nodeid, name, path);
        *error = hide(in->nodeid, name) ? 0 : unlink(path) != 0 ? errno : 0;
        if (*error == 0)
            forget_name(in->nodeid, name);
        return false;
    case FUSE_RMDIR:
        path_in(in->nodeid, name, path);
        *error = rmdir(path) != 0 ? errno : 0;
        if (*error == 0)
            forget_name(in->nodeid, name);
        return false;
    case FUSE_RENAME: {
        const struct fuse_rename_in *rename = body;
        const char *from = (const char *)(rename + 1);
        *error = renamed(in->nodeid, from, rename->newdir, from + strlen(from) + 1);
        return false;
    }
    case FUSE_RENAME2: {
        const struct fuse_rename2_in *rename = body;
        const char *from = (const char *)(rename + 1);
        *error = rename->flags ? EINVAL : renamed(in->nodeid, from, rename->newdir, from + strlen(from) + 1);
        return false;
    }
    default:
        *error = ENOSYS;
        return false;
    }
    answer(in->unique, *error, &entry, sizeof entry);
    return true;
}

static bool by_node(const struct fuse_in_header *in, void *body, int *error)
{
    char path[PATH];
    struct stat status;
    struct fuse_attr_out attr = {0};
    struct fuse_open_out open = {0};
    path_of(in->nodeid, path);
    switch (in->opcode) {
    case FUSE_SETATTR:
        *error = set(in->nodeid, body);
        if (*error != 0)
            return false;
        /* fall through */
    case FUSE_GETATTR:
        *error = lstat(path, &status) != 0 ? errno : 0;
        if (*error == 0)
            fill(&attr.attr, &status);
        answer(in->unique, *error, &attr, sizeof attr);
        return true;
    case FUSE_OPEN:
        *error = opened(in->nodeid, ((const struct fuse_open_in *)body)->flags, 0, &open.fh);
        answer(in->unique, *error, &open, sizeof open);
        return true;
    case FUSE_OPENDIR:
        answer(in->unique, 0, &open, sizeof open);
        return true;
    case FUSE_STATFS: {
        struct statvfs s;
        *error = statvfs(path, &s) != 0 ? errno : 0;
        const struct fuse_statfs_out out = {.st = {
            .blocks = s.f_blocks, .bfree = s.f_bfree, .bavail = s.f_bavail, .files = s.f_files, .ffree = s.f_ffree,
            .bsize = (uint32_t)s.f_bsize, .namelen = (uint32_t)s.f_namemax, .frsize = (uint32_t)s.f_frsize}};
        answer(in->unique, *error, &out, sizeof out);
        return true;
    }
    default:
        return by_name(in, body, error);
    }
}

static void serve(const struct fuse_in_header *in, void *body)
{
    int error = 0;
    switch (in->opcode) {
    case FUSE_READ:
    case FUSE_WRITE:
        transfer(in, body);
        return;
    case FUSE_READDIR:
        list(in->unique, in->nodeid, body);
        return;
    case FUSE_FSYNC:
        error = fsync((int)((const struct fuse_fsync_in *)body)->fh) != 0 ? errno : 0;
        break;
    case FUSE_FALLOCATE: {
        const struct fuse_fallocate_in *wanted = body;
        error = fallocate((int)wanted->fh, (int)wanted->mode, (off_t)wanted->offset, (off_t)wanted->length) != 0 ? errno : 0;
        break;
    }
    case FUSE_SETLK:
    case FUSE_SETLKW:
        error = locked(body);
        break;
    case FUSE_RELEASE:
        released(in->nodeid, ((const struct fuse_release_in *)body)->fh);
        break;
    case FUSE_FLUSH:
    case FUSE_FSYNCDIR:
    case FUSE_RELEASEDIR:
        break;
    default: {
        pthread_mutex_lock(&lock);
        const bool is_answered = by_node(in, body, &error);
        pthread_mutex_unlock(&lock);
        if (is_answered)
            return;
    }
    }
    answer(in->unique, error, NULL, 0);
}

/* The name that a request is about. */
static void name_in(const struct fuse_in_header *in, const char *body, char *name)
{
    size_t skip = in->opcode == FUSE_MKDIR    ? sizeof(struct fuse_mkdir_in)
                  : in->opcode == FUSE_CREATE  ? sizeof(struct fuse_create_in)
                  : in->opcode == FUSE_LINK    ? sizeof(struct fuse_link_in)
                  : in->opcode == FUSE_RENAME  ? sizeof(struct fuse_rename_in)
                  : in->opcode == FUSE_RENAME2 ? sizeof(struct fuse_rename2_in)
                                               : 0;
    if (skip > 0 || in->opcode == FUSE_LOOKUP || in->opcode == FUSE_UNLINK || in->opcode == FUSE_RMDIR) {
        snprintf(name, 256, "%s", body + skip);
        return;
    }
    pthread_mutex_lock(&lock);
    const char *own = in->nodeid < count && nodes[in->nodeid].name != NULL ? nodes[in->nodeid].name : "";
    snprintf(name, 256, "%s", own);
    pthread_mutex_unlock(&lock);
}

static void *work(void *unused)
{
    (void)unused;
    char *request = aligned_alloc(4096, ROOM);
    for (;;) {
        const ssize_t got = read(device, request, ROOM);
        if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (got < (ssize_t)sizeof(struct fuse_in_header))
            return NULL; /* unmounted */
        const struct fuse_in_header *in = (const struct fuse_in_header *)request;
        char *body = request + sizeof *in, name[256];
        if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET || in->opcode == FUSE_INTERRUPT)
            continue; /* no answer */
        if (in->opcode == FUSE_INIT) {
            begin(in, (const struct fuse_init_in *)body);
            continue;
        }
        uint64_t first = 0, end = UINT64_MAX;
        if (in->opcode == FUSE_READ || in->opcode == FUSE_WRITE) { /* their first three fields are the same */
            const struct fuse_read_in *moved = (const struct fuse_read_in *)body;
            first = moved->offset;
            end = first + moved->size;
        }
        int pause = 0;
        name_in(in, body, name);
        const int error = ruled(in->opcode, name, first, end, &pause);
        if (pause > 0)
            nanosleep(&(struct timespec){pause / 1000, pause % 1000 * 1000000L}, NULL);
        if (error != 0 && in->opcode != FUSE_RELEASE)
            answer(in->unique, error, NULL, 0);
        else
            serve(in, body);
    }
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    folder = argv[1];
    rules = argv[3];
    umask(0);
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", device);
    if (device < 0 || mount("faulty_drive", argv[2], "fuse.faulty", MS_NOSUID | MS_NODEV, options) != 0) {
        perror("faulty_drive");
        return 77; /* not possible here */
    }
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, work, NULL) != 0)
            return 1;
    }
    puts("ready");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    umount2(argv[2], MNT_DETACH);
    return 0;
}
