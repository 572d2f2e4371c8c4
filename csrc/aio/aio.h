/* Asynchronous block I/O: rings, tickets and backends.
 *
 * A ring is one I/O thread with its kernel queue. A ticket is one transfer; the ring cuts it into
 * blocks of at most `block_bytes` and keeps at most `queue_depth` of them in the kernel. Every
 * function returns 0 (or a count) or a negative errno, prints nothing, and calls no Python.
 *
 * [Note: what a fork may do] Every entry looks at the process id before it takes a lock. In a
 * child of fork() a ring of the parent answers -ECHILD and nothing of it is touched: the thread
 * does not exist there, and its lock may have been held at the moment of the fork.
 */
#ifndef INFINITY_AIO_H
#define INFINITY_AIO_H

#include <stddef.h>
#include <stdint.h>

#define AIO_ALIGN 4096u          /* of offset, length and address of a direct block */
#define AIO_PRIORITIES 3         /* 0 background, 1 normal, 2 urgent */
#define AIO_WRITE_STARVATION 16u /* reads that may pass a waiting write */
#define AIO_READ_RETRIES 3u      /* of one block after EIO, and of a write that moved nothing */
#define AIO_MAX_WAIT_MS 100      /* no wait of a caller is longer */
#define AIO_HISTOGRAM 24         /* bucket i: submit calls of less than 2^i microseconds */
#define AIO_MAX_DEPTH 4096u
#define AIO_MAX_BLOCK (1u << 30)

typedef struct aio_ring aio_ring;
typedef struct aio_ticket aio_ticket;

/* ---- tickets -------------------------------------------------------------------------------- */

enum aio_state {
    AIO_PENDING = 0, /* some block is queued or in the kernel */
    AIO_DONE = 1,    /* every byte was moved */
    AIO_FAILED = 2,  /* an error; no block is queued or in the kernel any more */
    AIO_EXPIRED = 3  /* past its deadline; the kernel may still touch the buffer, for good */
};

typedef struct {
    int state;          /* enum aio_state */
    int error;          /* negative errno of the first error, 0 if none */
    int short_transfer; /* 1: the end of the file, or a write that moves nothing more */
    uint64_t offset;    /* of the block that failed, in the file, in bytes */
    uint64_t moved;     /* bytes that were moved in all */
    uint64_t order;     /* number of its first block in the order of submission; 0: not yet */
    uint64_t queued_ns, started_ns, finished_ns; /* CLOCK_MONOTONIC; 0: not yet */
} aio_ticket_info;

/* ---- rings ---------------------------------------------------------------------------------- */

typedef struct {
    uint64_t block_bytes; /* a multiple of AIO_ALIGN, at most AIO_MAX_BLOCK */
    uint32_t queue_depth; /* blocks in the kernel at once, at most AIO_MAX_DEPTH */
    uint32_t threads;     /* of the backend `threads` */
    uint64_t deadline_ns; /* age at which a block in the kernel expires its ticket */
    uint64_t delay_seed;  /* not 0: random delays and completions out of order (for tests) */
} aio_options;

typedef struct {
    uint64_t bytes_read, bytes_written; /* of completed blocks and parts of blocks */
    uint64_t reads, writes;             /* completed blocks */
    uint64_t retries;                   /* blocks submitted again: short, EIO, EINTR, EAGAIN */
    uint64_t short_transfers;           /* completions that moved less than asked */
    uint64_t busy;                      /* times the kernel took none of the blocks (EAGAIN) */
    uint64_t failed_tickets, expired_tickets;
    uint64_t submits; /* calls of the backend's submit */
    uint64_t submit_max_ns;
    uint64_t submit_histogram[AIO_HISTOGRAM];
    uint64_t cpu_ns;    /* of the ring's thread and its workers */
    uint64_t active_ns; /* in which there were blocks in flight */
    uint32_t queued_tickets, blocks_in_flight;
    int failed; /* 1: a deadline was missed; it takes no more tickets */
} aio_stats;

int aio_ring_open(const char *backend, const aio_options *options, aio_ring **out);
/* Ends the ring when all of its tickets are complete. Returns 0 when it has ended,
 * -EINPROGRESS after `timeout_ms` (at most AIO_MAX_WAIT_MS), -ETIMEDOUT when all that is left are
 * tickets past their deadline. Call it again until it is 0 or -ETIMEDOUT. */
int aio_ring_shutdown(aio_ring *ring, int timeout_ms);
/* Fails what is queued; what is in the kernel is given up as past its deadline. */
int aio_ring_abandon(aio_ring *ring);
/* The caller's last use. What is in flight goes on and is freed when it is complete. */
void aio_ring_release(aio_ring *ring);
/* In a child of fork(): closes the inherited descriptors; takes no lock. */
void aio_ring_forked(aio_ring *ring);
int aio_ring_stats(aio_ring *ring, aio_stats *out);
/* While held nothing is submitted: a batch, or a test of the order of submission. */
int aio_ring_hold(aio_ring *ring, int hold);
/* Hints: 1 taken, 0 of no use to this backend, or a negative errno. Before memory is unmapped or
 * a descriptor closed that was registered, it must be forgotten. */
int aio_ring_buffer(aio_ring *ring, uintptr_t address, uint64_t nbytes, int add);
int aio_ring_file(aio_ring *ring, int fd, int add);

/* Queues one transfer of `nbytes` between `offset` of the file and `address`.
 * `fd` is the descriptor for blocks whose offset, length and address are multiples of AIO_ALIGN;
 * `plain_fd` one without O_DIRECT on the same file, for all others. They are equal for a file
 * that is not opened O_DIRECT. */
int aio_submit(aio_ring *ring, int write, int fd, int plain_fd, uint64_t offset, uintptr_t address,
               uint64_t nbytes, int priority, aio_ticket **out);
/* Returns the state, after at most `timeout_ms` (and AIO_MAX_WAIT_MS), or -ECHILD. A ticket that
 * is complete costs no system call; one that is not goes to the front of the queue. */
int aio_wait(aio_ticket *ticket, int timeout_ms);
int aio_poll(aio_ticket *ticket);
int aio_ticket_describe(aio_ticket *ticket, aio_ticket_info *out);
void aio_ticket_release(aio_ticket *ticket);

/* ---- checksums ------------------------------------------------------------------------------ */

uint32_t aio_crc32c(uintptr_t address, uint64_t nbytes, uint32_t crc);  /* crc: of what precedes */
uint32_t aio_crc32c_combine(uint32_t a, uint32_t b, uint64_t nbytes_b); /* of a's bytes then b's */
uint32_t aio_crc32c_zeros(uint64_t nbytes);                             /* without reading any */
int aio_crc32c_force_table(int on); /* for tests; returns 1 if the hardware path exists */

/* ---- probing -------------------------------------------------------------------------------- */

int64_t aio_filesystem(int fd);                                /* f_type of statfs(2), or a negative errno */
int aio_dio_align(int fd, uint32_t *memory, uint32_t *offset); /* statx(2), STATX_DIOALIGN */

/* ---- backends: a table of functions each, so that a test can plug in its own ---------------- */

typedef struct {
    uint32_t slot; /* the backend hands it back with the result */
    int write;
    int fd;
    uint64_t offset, nbytes;
    uintptr_t address;
} aio_block;

typedef struct {
    uint32_t slot;
    int64_t result; /* bytes moved or a negative errno */
} aio_event;

typedef struct {
    uint32_t depth; /* most blocks in it at once */
    uint32_t threads;
    int completion_fd; /* an eventfd to signal, unless `wake_fd` of the state is used */
} aio_backend_options;

typedef struct {
    const char *name;
    int takes_plain; /* 1: never blocks on files without O_DIRECT */
    /* `*wake_fd` may be replaced by a descriptor that polls readable when results are there. */
    int (*open)(const aio_backend_options *options, void **state, int *wake_fd);
    /* Takes blocks from the front; returns how many, or a negative errno about the first one. */
    int (*submit)(void *state, aio_block *const *blocks, uint32_t count);
    /* Never waits; returns how many events it wrote, at most `count`. */
    int (*reap)(void *state, aio_event *events, uint32_t count);
    int (*close)(void *state); /* only when none of its blocks is in the kernel */
    /* The rest may be NULL. */
    int (*buffer)(void *state, uintptr_t address, uint64_t nbytes, int add);
    int (*file)(void *state, int fd, int add);
    uint64_t (*cpu_ns)(void *state);
    void (*forked)(void *state);
} aio_backend;

extern const aio_backend aio_backend_libaio, aio_backend_syscall, aio_backend_uring, aio_backend_threads;
int aio_ring_open_with(const aio_backend *backend, const aio_options *options, aio_ring **out);

#endif
