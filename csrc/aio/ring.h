/* What ring.c (the thread) and ticket.c (the queues) share. Everything of a ring is guarded by
 * its lock unless it says otherwise. */
#ifndef INFINITY_RING_H
#define INFINITY_RING_H

#include "aio.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define LEVELS (AIO_PRIORITIES + 1) /* the highest: somebody waits for it */

struct aio_ticket {
    _Atomic int state; /* set last; whoever reads AIO_DONE or AIO_FAILED owns the buffer again */
    _Atomic uint32_t refs, waiters;
    aio_ring *ring;
    int write, fd, plain_fd, level, queued;
    uint64_t offset, nbytes;
    uintptr_t address;
    uint64_t cut;       /* bytes that were given to blocks; nbytes when nothing is to come */
    uint32_t in_flight; /* blocks in slots: staged, in the kernel, or done and not yet settled */
    uint64_t sequence;
    aio_ticket_info info;
    aio_ticket *before, *after; /* in its queue, or (after) in the list of finished tickets */
};

typedef struct {
    aio_block block; /* what is left of it; changed by the ring's thread only */
    aio_ticket *ticket;
    uint64_t started_ns;
    uint32_t tries;
} aio_slot;

/* A backend in use. Lists belong to the ring's thread; counts change under the lock. */
typedef struct {
    const aio_backend *backend; /* NULL: not open */
    void *state;
    int wake_fd;
    int paused; /* a result said EAGAIN: sleep once before the next submit */
    uint32_t backoff_ms, staged_count, in_kernel;
    aio_block **staged;
} aio_lane;

typedef struct {
    aio_ticket *head, *tail;
} aio_queue;

struct aio_ring {
    pthread_mutex_t lock;
    pid_t pid;
    pthread_t thread;
    _Atomic uint32_t refs; /* the caller's, the thread's, and one per ticket */
    _Atomic int stopped;   /* the thread has ended */
    aio_options options;
    int doorbell, completion, epoll;
    int asleep, held, closing, failed, joined, stuck;
    aio_lane main, side; /* side: threads, for what main would do synchronously */
    aio_queue queue[LEVELS][2];
    uint64_t sequence, order;
    uint32_t passed; /* reads since the oldest waiting write could have gone */
    uint32_t queued, live, free_count;
    uint64_t active_since; /* when the first of the blocks in flight was cut */
    uint32_t *free;        /* indices of free slots */
    aio_slot *slots;
    aio_event *events, *limbo; /* limbo: results kept back by the delays of the test mode */
    uint32_t limbo_count;
    uint64_t random;
    aio_ticket *finished; /* complete, to be published when the lock is released */
    aio_stats stats;
};

/* ticket.c; all but the last three with the lock held */
void aio_stage(aio_ring *ring);
void aio_settle(aio_ring *ring, uint32_t slot, int64_t result);
void aio_expire(aio_ring *ring, uint64_t now, int all);
void aio_drop_dead(aio_ring *ring, aio_lane *lane);
int aio_can_stage(const aio_ring *ring);
aio_ticket *aio_take_finished(aio_ring *ring);
void aio_publish(aio_ticket *finished);
void aio_futex_wait(_Atomic int *word, int value, int timeout_ms);
void aio_futex_wake(_Atomic int *word);

/* ring.c */
aio_lane *aio_lane_for(aio_ring *ring, const aio_ticket *ticket, const aio_block *block, int *error);
int aio_bell_needed(aio_ring *ring);
void aio_bell(aio_ring *ring);
void aio_ring_unref(aio_ring *ring);

/* system.c */
uint64_t aio_now_ns(void);
pid_t aio_pid(void); /* getpid(2) without the system call */

#endif
