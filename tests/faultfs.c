/* A file system in memory that fails when it is told to. Tests only.
 *
 *   faultfs CONTROL MOUNTPOINT [sync]
 *
 * CONTROL is a file of at least sizeof(control) bytes that both sides map: the test writes into it
 * which operation fails, how and when; this side counts. A request that is to stall is never
 * answered: its caller waits until the mount is aborted (umount2 with MNT_FORCE, or the end of this
 * process). Requests are served one at a time, in the order in which the kernel sends them. Every
 * file is opened with direct_io, so each read and write of the test is a request here. With `sync`
 * the kernel waits for each request of an asynchronous call in the call; without, it calls a write
 * that is answered short EIO.
 *
 *   gcc tests/faultfs.c -o faultfs $(pkg-config --cflags --libs fuse3)
 */
#define FUSE_USE_VERSION 35
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { OP_NONE, OP_READ, OP_WRITE, OP_FSYNC, OP_FALLOCATE, OP_CREATE, OP_MKDIR, OP_TRUNCATE, OPS };
enum {
    FAULT_NONE,
    FAULT_ERROR,
    FAULT_SHORT,
    FAULT_STALL,
    FAULT_FLIP,
    FAULT_TORN,
    FAULT_LOST,
    FAULT_ELSEWHERE
};

/* tests/faults.py has the same table. */
typedef struct {
    _Atomic uint64_t ready; /* 1 when the mount answers */
    _Atomic uint64_t op, kind;
    _Atomic uint64_t value;          /* errno; bytes moved by a short one; bit to flip; bytes to be off */
    _Atomic uint64_t nth;            /* the first one to fail, from 1; 0: none */
    _Atomic uint64_t times;          /* how many from there on */
    _Atomic uint64_t fired;          /* how many did */
    _Atomic uint64_t capacity, used; /* bytes; a full file system says ENOSPC */
    _Atomic uint64_t seen[OPS];      /* how many of each there were; the test sets them to 0 */
} control;

#define NODES 256
#define MOST_BYTES (1u << 20)
#define NAME_BYTES 256
#define FOREVER 86400.0

typedef struct {
    int used, fd; /* fd: a memfd with the bytes of a file, -1 for a directory */
    uint64_t lookups, generation, parent, charged;
    struct stat attr;
    char name[NAME_BYTES]; /* "": unlinked */
} node;

static control *shared;
static node nodes[NODES];
static char buffer[MOST_BYTES];

/* What is to happen to this operation. */
static uint64_t fault(int op) {
    uint64_t n = ++shared->seen[op], nth = shared->nth;
    if (nth == 0 || shared->op != (uint64_t)op || n < nth || n - nth >= shared->times) return FAULT_NONE;
    shared->fired++;
    return shared->kind;
}

/* For operations that can only fail or stall. Returns 1 when the request is over. */
static int failed(fuse_req_t request, int op) {
    uint64_t kind = fault(op);
    if (kind == FAULT_ERROR) fuse_reply_err(request, (int)shared->value);
    return kind == FAULT_ERROR || kind == FAULT_STALL;
}

/* ---- inodes --------------------------------------------------------------------------------- */

static node *at(fuse_ino_t ino) { return &nodes[ino - FUSE_ROOT_ID]; }

static node *find(fuse_ino_t parent, const char *name) {
    for (int k = 0; k < NODES; k++) {
        if (nodes[k].used && nodes[k].parent == parent && strcmp(nodes[k].name, name) == 0) return &nodes[k];
    }
    return NULL;
}

static void charge(node *n, uint64_t bytes) {
    shared->used += bytes - n->charged;
    n->charged = bytes;
    n->attr.st_blocks = (blkcnt_t)((bytes + 511) / 512);
}

static void forget_if_over(node *n) {
    if (n->lookups != 0 || n->name[0] != 0) return;
    charge(n, 0);
    if (n->fd >= 0) close(n->fd);
    n->used = 0;
}

static int make(fuse_ino_t parent, const char *name, mode_t mode, const struct fuse_ctx *by, node **out) {
    if (strlen(name) >= NAME_BYTES) return ENAMETOOLONG;
    if (find(parent, name) != NULL) return EEXIST;
    for (int k = 1; k < NODES; k++) {
        node *n = &nodes[k];
        if (n->used) continue;
        uint64_t generation = n->generation + 1;
        memset(n, 0, sizeof *n);
        n->fd = S_ISREG(mode) ? memfd_create("faultfs", MFD_CLOEXEC) : -1;
        if (S_ISREG(mode) && n->fd < 0) return errno;
        n->used = 1;
        n->generation = generation;
        n->parent = parent;
        n->attr.st_ino = (ino_t)k + FUSE_ROOT_ID;
        n->attr.st_mode = mode;
        n->attr.st_nlink = 1;
        n->attr.st_uid = by->uid;
        n->attr.st_gid = by->gid;
        n->attr.st_blksize = 4096;
        strcpy(n->name, name);
        *out = n;
        return 0;
    }
    return ENFILE;
}

static struct fuse_entry_param entry(node *n) {
    struct fuse_entry_param e = {.ino = n->attr.st_ino, .generation = n->generation, .attr = n->attr};
    e.attr_timeout = e.entry_timeout = FOREVER; /* nobody but this mount changes anything */
    n->lookups++;
    return e;
}

static void on_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    node *n = find(parent, name);
    if (n == NULL) {
        fuse_reply_err(request, ENOENT);
        return;
    }
    struct fuse_entry_param e = entry(n);
    fuse_reply_entry(request, &e);
}

static void on_forget(fuse_req_t request, fuse_ino_t ino, uint64_t lookups) {
    node *n = at(ino);
    n->lookups -= lookups < n->lookups ? lookups : n->lookups;
    if (ino != FUSE_ROOT_ID) forget_if_over(n);
    fuse_reply_none(request);
}

static void on_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)file;
    fuse_reply_attr(request, &at(ino)->attr, FOREVER);
}

static void on_setattr(fuse_req_t request, fuse_ino_t ino, struct stat *attr, int what,
                       struct fuse_file_info *file) {
    (void)file;
    node *n = at(ino);
    if (what & FUSE_SET_ATTR_MODE) n->attr.st_mode = (n->attr.st_mode & S_IFMT) | (attr->st_mode & 07777);
    if (what & FUSE_SET_ATTR_UID) n->attr.st_uid = attr->st_uid;
    if (what & FUSE_SET_ATTR_GID) n->attr.st_gid = attr->st_gid;
    if (what & FUSE_SET_ATTR_SIZE) {
        if (failed(request, OP_TRUNCATE)) return;
        if (ftruncate(n->fd, attr->st_size) < 0) {
            fuse_reply_err(request, errno);
            return;
        }
        n->attr.st_size = attr->st_size;
        if ((uint64_t)attr->st_size < n->charged) charge(n, (uint64_t)attr->st_size);
    }
    fuse_reply_attr(request, &n->attr, FOREVER);
}

static void on_mkdir(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode) {
    node *n = NULL;
    if (failed(request, OP_MKDIR)) return;
    int error = make(parent, name, S_IFDIR | mode, fuse_req_ctx(request), &n);
    if (error != 0) {
        fuse_reply_err(request, error);
        return;
    }
    struct fuse_entry_param e = entry(n);
    fuse_reply_entry(request, &e);
}

static void on_create(fuse_req_t request, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *file) {
    node *n = NULL;
    if (failed(request, OP_CREATE)) return;
    int error = make(parent, name, S_IFREG | mode, fuse_req_ctx(request), &n);
    if (error != 0) {
        fuse_reply_err(request, error);
        return;
    }
    struct fuse_entry_param e = entry(n);
    file->direct_io = 1;
    fuse_reply_create(request, &e, file);
}

static void remove_entry(fuse_req_t request, fuse_ino_t parent, const char *name, int directory) {
    node *n = find(parent, name);
    int error = n == NULL ? ENOENT : 0;
    for (int k = 0; directory && n != NULL && k < NODES; k++) {
        if (nodes[k].used && nodes[k].name[0] != 0 && nodes[k].parent == n->attr.st_ino) error = ENOTEMPTY;
    }
    if (error == 0) {
        n->name[0] = 0;
        n->attr.st_nlink = 0;
        forget_if_over(n);
    }
    fuse_reply_err(request, error);
}

static void on_unlink(fuse_req_t request, fuse_ino_t parent, const char *name) {
    remove_entry(request, parent, name, 0);
}

static void on_rmdir(fuse_req_t request, fuse_ino_t parent, const char *name) {
    remove_entry(request, parent, name, 1);
}

static void on_rename(fuse_req_t request, fuse_ino_t parent, const char *name, fuse_ino_t to, const char *as,
                      unsigned flags) {
    node *n = find(parent, name), *old = find(to, as);
    int error = n == NULL ? ENOENT : flags != 0 || strlen(as) >= NAME_BYTES ? EINVAL : 0;
    if (error == 0 && old != NULL && old != n) {
        old->name[0] = 0;
        old->attr.st_nlink = 0;
        forget_if_over(old);
    }
    if (error == 0) {
        n->parent = to;
        strcpy(n->name, as);
    }
    fuse_reply_err(request, error);
}

static void on_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info *file) {
    (void)ino;
    file->direct_io = 1;
    fuse_reply_open(request, file);
}

static void on_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset,
                       struct fuse_file_info *file) {
    (void)file;
    char *entries = malloc(size);
    size_t filled = 0;
    for (off_t k = offset; entries != NULL && k < NODES; k++) {
        const node *n = &nodes[k];
        if (!n->used || n->name[0] == 0 || n->parent != ino) continue;
        size_t more = fuse_add_direntry(request, entries + filled, size - filled, n->name, &n->attr, k + 1);
        if (more > size - filled) break;
        filled += more;
    }
    fuse_reply_buf(request, entries, filled);
    free(entries);
}

static void on_statfs(fuse_req_t request, fuse_ino_t ino) {
    (void)ino;
    uint64_t capacity = shared->capacity, used = shared->used;
    struct statvfs fs = {.f_bsize = 4096, .f_frsize = 4096, .f_namemax = NAME_BYTES - 1};
    fs.f_blocks = capacity / 4096;
    fs.f_bfree = fs.f_bavail = used < capacity ? (capacity - used) / 4096 : 0;
    fs.f_files = fs.f_ffree = fs.f_favail = NODES;
    fuse_reply_statfs(request, &fs);
}

/* ---- bytes ---------------------------------------------------------------------------------- */

static uint64_t at_most(size_t size, uint64_t most) { return most < size ? most : size; }

static void on_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *file) {
    (void)file;
    uint64_t kind = fault(OP_READ);
    if (kind == FAULT_STALL) return;
    if (kind == FAULT_ERROR) {
        fuse_reply_err(request, (int)shared->value);
        return;
    }
    if (size > sizeof buffer) size = sizeof buffer;
    if (kind == FAULT_SHORT) size = at_most(size, shared->value);
    if (kind == FAULT_ELSEWHERE) offset += (off_t)shared->value;
    ssize_t n = pread(at(ino)->fd, buffer, size, offset);
    if (n < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    if (kind == FAULT_FLIP && n > 0)
        buffer[shared->value / 8 % (uint64_t)n] ^= (char)(1u << (shared->value % 8));
    fuse_reply_buf(request, buffer, (size_t)n);
}

static void on_write(fuse_req_t request, fuse_ino_t ino, const char *bytes, size_t size, off_t offset,
                     struct fuse_file_info *file) {
    (void)file;
    node *n = at(ino);
    uint64_t kind = fault(OP_WRITE);
    if (kind == FAULT_STALL) return;
    if (kind == FAULT_ERROR) {
        fuse_reply_err(request, (int)shared->value);
        return;
    }
    size_t told = size;
    if (kind == FAULT_SHORT) told = size = at_most(size, shared->value);
    if (kind == FAULT_TORN) size = at_most(size, shared->value);
    if (kind == FAULT_LOST) size = 0;
    if (kind == FAULT_ELSEWHERE) offset += (off_t)shared->value;
    if (kind == FAULT_FLIP && size != 0 && size <= sizeof buffer) {
        memcpy(buffer, bytes, size);
        buffer[shared->value / 8 % size] ^= (char)(1u << (shared->value % 8));
        bytes = buffer;
    }
    uint64_t end = (uint64_t)offset + size;
    if (end > n->charged && shared->used + end - n->charged > shared->capacity) {
        fuse_reply_err(request, ENOSPC);
        return;
    }
    ssize_t done = size == 0 ? 0 : pwrite(n->fd, bytes, size, offset);
    if (done != (ssize_t)size) {
        fuse_reply_err(request, done < 0 ? errno : EIO);
        return;
    }
    if (end > n->charged) charge(n, end);
    if ((off_t)end > n->attr.st_size) n->attr.st_size = (off_t)end;
    fuse_reply_write(request, told);
}

static void on_fallocate(fuse_req_t request, fuse_ino_t ino, int mode, off_t offset, off_t length,
                         struct fuse_file_info *file) {
    (void)file;
    node *n = at(ino);
    if (failed(request, OP_FALLOCATE)) return;
    uint64_t end = (uint64_t)(offset + length);
    int error = mode != 0 ? EOPNOTSUPP : 0;
    if (error == 0 && end > n->charged && shared->used + end - n->charged > shared->capacity) error = ENOSPC;
    if (error == 0 && (off_t)end > n->attr.st_size && ftruncate(n->fd, (off_t)end) < 0) error = errno;
    if (error == 0) {
        if (end > n->charged) charge(n, end);
        if ((off_t)end > n->attr.st_size) n->attr.st_size = (off_t)end;
    }
    fuse_reply_err(request, error);
}

static void on_fsync(fuse_req_t request, fuse_ino_t ino, int only_data, struct fuse_file_info *file) {
    (void)ino;
    (void)only_data;
    (void)file;
    if (!failed(request, OP_FSYNC)) fuse_reply_err(request, 0);
}

static void on_init(void *user, struct fuse_conn_info *connection) {
    if (user != NULL) connection->want &= ~(unsigned)FUSE_CAP_ASYNC_DIO;
    connection->max_write = MOST_BYTES;
    shared->ready = 1;
}

static const struct fuse_lowlevel_ops operations = {
    .init = on_init,
    .lookup = on_lookup,
    .forget = on_forget,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .mkdir = on_mkdir,
    .create = on_create,
    .unlink = on_unlink,
    .rmdir = on_rmdir,
    .rename = on_rename,
    .open = on_open,
    .readdir = on_readdir,
    .statfs = on_statfs,
    .read = on_read,
    .write = on_write,
    .fallocate = on_fallocate,
    .fsync = on_fsync,
    .fsyncdir = on_fsync,
};

int main(int count, char **arguments) {
    char *sync = count == 4 && strcmp(arguments[3], "sync") == 0 ? arguments[3] : NULL;
    if (count != 3 && sync == NULL) {
        fputs("faultfs CONTROL MOUNTPOINT [sync]\n", stderr);
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* no mount outlives the test that made it */
    int fd = open(arguments[1], O_RDWR | O_CLOEXEC);
    shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) {
        perror(arguments[1]);
        return 1;
    }
    nodes[0].used = 1;
    nodes[0].fd = -1;
    nodes[0].lookups = 1;
    nodes[0].attr.st_ino = FUSE_ROOT_ID;
    nodes[0].attr.st_mode = S_IFDIR | 0755;
    nodes[0].attr.st_nlink = 1;

    char *options[] = {arguments[0], "-ofsname=faultfs,default_permissions"};
    struct fuse_args args = FUSE_ARGS_INIT(2, options);
    struct fuse_session *session = fuse_session_new(&args, &operations, sizeof operations, sync);
    if (session == NULL) return 1;
    if (fuse_set_signal_handlers(session) != 0 || fuse_session_mount(session, arguments[2]) != 0) return 1;
    fuse_session_loop(session);
    fuse_session_unmount(session);
    _exit(0); /* with requests unanswered there is nothing to tidy up */
}
