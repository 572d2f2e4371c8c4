/* io_uring by its three system calls. The structures are declared here, since the headers of the
 * machine that builds may be older than the kernel that runs it. */
#include "aio.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SYS_io_uring_setup
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

enum { READ_FIXED = 4, WRITE_FIXED = 5, READ = 22, WRITE = 23 };
enum { SQE_FIXED_FILE = 1, SETUP_COOP_TASKRUN = 1 << 8, FEAT_SINGLE_MMAP = 1 };
enum { REGISTER_FILES = 2, REGISTER_FILES_UPDATE = 6, REGISTER_BUFFERS2 = 15, BUFFERS_UPDATE = 16 };
enum { REGISTER_SPARSE = 1 };
#define OFFSET_RINGS 0
#define OFFSET_SQES 0x10000000

#define MOST_BUFFERS 256u
#define MOST_FILES 64u
#define MOST_BUFFER_BYTES (UINT64_C(1) << 30) /* the kernel's limit for one registered buffer */

typedef struct {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    uint64_t user_address;
} sq_offsets;

typedef struct {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    uint64_t user_address;
} cq_offsets;

typedef struct {
    uint32_t sq_entries, cq_entries, flags, thread_cpu, thread_idle, features, wq_fd, reserved[3];
    sq_offsets sq;
    cq_offsets cq;
} uring_params;

typedef struct {
    uint8_t opcode, flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset, address;
    uint32_t nbytes, rw_flags;
    uint64_t user_data;
    uint16_t buffer, personality;
    uint32_t file_index;
    uint64_t reserved[2];
} sqe;

typedef struct {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
} cqe;

typedef struct {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
} resource_register;

typedef struct {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
} resource_update;

typedef struct {
    uint32_t offset, reserved;
    uint64_t fds;
} files_update;

_Static_assert(sizeof(sqe) == 64 && sizeof(cqe) == 16 && sizeof(uring_params) == 120, "the kernel's layout");

typedef struct {
    pthread_mutex_t lock; /* of the two tables */
    int fd;
    void *rings; /* both queues in one mapping: every kernel that has READ and WRITE has that */
    size_t rings_nbytes, sqes_nbytes;
    sqe *sqes;
    _Atomic uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
    uint32_t *sq_array, sq_mask, cq_mask;
    cqe *cqes;
    int has_buffers, has_files;         /* the kernel has made the (sparse) tables */
    uint32_t used_buffers;              /* how far to look in the table */
    struct iovec buffers[MOST_BUFFERS]; /* length 0: free */
    int files[MOST_FILES];              /* -1: free */
} state_uring;

static int call_register(const state_uring *s, unsigned what, const void *argument, unsigned count) {
    return syscall(SYS_io_uring_register, s->fd, what, argument, count) < 0 ? -errno : 0;
}

static int uring_close(void *state) {
    state_uring *s = state;
    if (s->sqes != MAP_FAILED) munmap(s->sqes, s->sqes_nbytes);
    if (s->rings != MAP_FAILED) munmap(s->rings, s->rings_nbytes);
    if (s->fd >= 0) close(s->fd);
    pthread_mutex_destroy(&s->lock);
    free(s);
    return 0;
}

/* A child of fork() gets neither the mapping nor, a moment later, the descriptor. */
static void *map(const state_uring *s, size_t nbytes, off_t offset) {
    void *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, s->fd, offset);
    if (at != MAP_FAILED) madvise(at, nbytes, MADV_DONTFORK);
    return at;
}

static int map_queues(state_uring *s, const uring_params *p) {
    if (!(p->features & FEAT_SINGLE_MMAP)) return -EOPNOTSUPP;
    const size_t sq_nbytes = p->sq.array + p->sq_entries * sizeof(uint32_t);
    const size_t cq_nbytes = p->cq.cqes + p->cq_entries * sizeof(cqe);
    s->rings_nbytes = sq_nbytes > cq_nbytes ? sq_nbytes : cq_nbytes;
    s->sqes_nbytes = p->sq_entries * sizeof(sqe);
    s->rings = map(s, s->rings_nbytes, OFFSET_RINGS);
    if (s->rings == MAP_FAILED) return -errno;
    s->sqes = map(s, s->sqes_nbytes, OFFSET_SQES);
    if (s->sqes == MAP_FAILED) return -errno;
    char *sq = s->rings, *cq = s->rings;
    s->sq_head = (void *)(sq + p->sq.head);
    s->sq_tail = (void *)(sq + p->sq.tail);
    s->sq_mask = *(uint32_t *)(void *)(sq + p->sq.ring_mask);
    s->sq_array = (void *)(sq + p->sq.array);
    s->cq_head = (void *)(cq + p->cq.head);
    s->cq_tail = (void *)(cq + p->cq.tail);
    s->cq_mask = *(uint32_t *)(void *)(cq + p->cq.ring_mask);
    s->cqes = (void *)(cq + p->cq.cqes);
    for (uint32_t k = 0; k < p->sq_entries; k++) s->sq_array[k] = k;
    return 0;
}

static void make_tables(state_uring *s) {
    resource_register buffers = {.count = MOST_BUFFERS, .flags = REGISTER_SPARSE};
    s->has_buffers = call_register(s, REGISTER_BUFFERS2, &buffers, sizeof buffers) == 0;
    for (uint32_t k = 0; k < MOST_FILES; k++) s->files[k] = -1;
    s->has_files = call_register(s, REGISTER_FILES, s->files, MOST_FILES) == 0;
}

static int uring_open(const aio_backend_options *options, void **state, int *wake_fd) {
    state_uring *s = calloc(1, sizeof *s);
    if (s == NULL) return -ENOMEM;
    pthread_mutex_init(&s->lock, NULL);
    s->rings = MAP_FAILED;
    s->sqes = MAP_FAILED;
    uring_params params = {.flags = SETUP_COOP_TASKRUN};
    s->fd = (int)syscall(SYS_io_uring_setup, options->depth, &params);
    if (s->fd < 0 && errno == EINVAL) { /* before Linux 5.19 */
        memset(&params, 0, sizeof params);
        s->fd = (int)syscall(SYS_io_uring_setup, options->depth, &params);
    }
    int error = s->fd < 0 ? -errno : map_queues(s, &params);
    if (error != 0) {
        uring_close(s);
        return error;
    }
    make_tables(s);
    *state = s;
    *wake_fd = s->fd; /* it polls readable while results are there */
    return 0;
}

static int buffer_of(const state_uring *s, uintptr_t address, uint64_t nbytes) {
    for (int k = 0; k < (int)s->used_buffers; k++) {
        uintptr_t base = (uintptr_t)s->buffers[k].iov_base;
        size_t size = s->buffers[k].iov_len;
        if (size >= nbytes && address >= base && address - base <= size - nbytes) return k;
    }
    return -1;
}

static int file_of(const state_uring *s, int fd) {
    for (int k = 0; k < (int)MOST_FILES; k++) {
        if (s->files[k] == fd) return k;
    }
    return -1;
}

static void fill(const state_uring *s, sqe *entry, const aio_block *block) {
    const int buffer = buffer_of(s, block->address, block->nbytes), file = file_of(s, block->fd);
    memset(entry, 0, sizeof *entry);
    entry->opcode = buffer >= 0 ? (block->write ? WRITE_FIXED : READ_FIXED) : block->write ? WRITE : READ;
    entry->buffer = buffer >= 0 ? (uint16_t)buffer : 0;
    entry->flags = file >= 0 ? SQE_FIXED_FILE : 0;
    entry->fd = file >= 0 ? file : block->fd;
    entry->offset = block->offset;
    entry->address = block->address;
    entry->nbytes = (uint32_t)block->nbytes;
    entry->user_data = block->slot;
}

static int uring_submit(void *state, aio_block *const *blocks, uint32_t count) {
    state_uring *s = state;
    /* No other thread moves head or tail: what was not taken last time was taken back. */
    const uint32_t first = atomic_load_explicit(s->sq_tail, memory_order_relaxed);
    pthread_mutex_lock(&s->lock);
    for (uint32_t k = 0; k < count; k++) fill(s, &s->sqes[(first + k) & s->sq_mask], blocks[k]);
    pthread_mutex_unlock(&s->lock);
    atomic_store_explicit(s->sq_tail, first + count, memory_order_release);
    long n = syscall(SYS_io_uring_enter, s->fd, count, 0, 0, NULL, 0);
    const int error = n < 0 ? -errno : 0;
    const uint32_t taken = atomic_load_explicit(s->sq_head, memory_order_acquire) - first;
    atomic_store_explicit(s->sq_tail, first + taken, memory_order_release);
    return taken != 0 ? (int)taken : error;
}

static int uring_reap(void *state, aio_event *events, uint32_t count) {
    state_uring *s = state;
    uint32_t head = atomic_load_explicit(s->cq_head, memory_order_relaxed), n = 0;
    const uint32_t tail = atomic_load_explicit(s->cq_tail, memory_order_acquire);
    for (; n < count && head != tail; n++, head++) {
        const cqe *entry = &s->cqes[head & s->cq_mask];
        events[n].slot = (uint32_t)entry->user_data;
        events[n].result = entry->result;
    }
    atomic_store_explicit(s->cq_head, head, memory_order_release);
    return (int)n;
}

static int update_buffer(state_uring *s, uint32_t index, struct iovec buffer) {
    resource_update update = {.offset = index, .data = (uintptr_t)&buffer, .count = 1};
    int error = call_register(s, BUFFERS_UPDATE, &update, sizeof update);
    /* What the kernel does not let go of here must still never be used again. */
    if (error == 0 || buffer.iov_len == 0) s->buffers[index] = buffer;
    if (index >= s->used_buffers) s->used_buffers = index + 1;
    return error;
}

/* Memory that may not be locked, or a full table, only means plain transfers: no error. */
static int uring_buffer(void *state, uintptr_t address, uint64_t nbytes, int add) {
    state_uring *s = state;
    int taken = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t k = 0; k < MOST_BUFFERS && s->has_buffers && nbytes != 0; k++) {
        const uintptr_t base = (uintptr_t)s->buffers[k].iov_base;
        const size_t size = s->buffers[k].iov_len;
        if (add && size == 0) {
            uint64_t piece = nbytes < MOST_BUFFER_BYTES ? nbytes : MOST_BUFFER_BYTES;
            if (update_buffer(s, k, (struct iovec){(void *)address, piece}) < 0) break;
            address += piece;
            nbytes -= piece;
            taken = 1;
        } else if (!add && size != 0 && base < address + nbytes && address < base + size) {
            taken |= update_buffer(s, k, (struct iovec){NULL, 0}) == 0;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return taken;
}

static int uring_file(void *state, int fd, int add) {
    state_uring *s = state;
    int taken = 0;
    pthread_mutex_lock(&s->lock);
    const int index = file_of(s, add ? -1 : fd);
    if (s->has_files && index >= 0 && (!add || file_of(s, fd) < 0)) {
        int value = add ? fd : -1;
        files_update update = {.offset = (uint32_t)index, .fds = (uintptr_t)&value};
        taken = call_register(s, REGISTER_FILES_UPDATE, &update, 1) == 0;
        if (taken || !add) s->files[index] = value;
    }
    pthread_mutex_unlock(&s->lock);
    return taken;
}

static void uring_forked(void *state) {
    state_uring *s = state;
    close(s->fd);
    s->fd = -1;
}

const aio_backend aio_backend_uring = {
    .name = "uring",
    .takes_plain = 1,
    .open = uring_open,
    .submit = uring_submit,
    .reap = uring_reap,
    .close = uring_close,
    .buffer = uring_buffer,
    .file = uring_file,
    .forked = uring_forked,
};
