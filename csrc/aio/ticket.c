/* Tickets: the queues they wait in, the blocks they are cut into, and what a result means. */
#include "ring.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- the queues ----------------------------------------------------------------------------- */

static void enqueue(aio_ring *ring, aio_ticket *ticket) {
    aio_queue *queue = &ring->queue[ticket->level][ticket->write];
    ticket->sequence = ++ring->sequence;
    ticket->before = queue->tail;
    ticket->after = NULL;
    if (queue->tail != NULL) {
        queue->tail->after = ticket;
    } else {
        queue->head = ticket;
    }
    queue->tail = ticket;
    ticket->queued = 1;
    ring->queued++;
}

static void dequeue(aio_ring *ring, aio_ticket *ticket) {
    if (!ticket->queued) return;
    aio_queue *queue = &ring->queue[ticket->level][ticket->write];
    if (ticket->before != NULL) {
        ticket->before->after = ticket->after;
    } else {
        queue->head = ticket->after;
    }
    if (ticket->after != NULL) {
        ticket->after->before = ticket->before;
    } else {
        queue->tail = ticket->before;
    }
    ticket->before = ticket->after = NULL;
    ticket->queued = 0;
    ring->queued--;
}

/* The next ticket: the highest level first, the oldest in it. A write that reads have passed
 * AIO_WRITE_STARVATION times goes first whatever its level. */
static aio_ticket *pick(aio_ring *ring) {
    aio_ticket *best = NULL, *oldest_write = NULL;
    for (int level = LEVELS - 1; level >= 0; level--) {
        aio_ticket *read = ring->queue[level][0].head, *write = ring->queue[level][1].head;
        if (write != NULL && (oldest_write == NULL || write->sequence < oldest_write->sequence)) {
            oldest_write = write;
        }
        if (best == NULL) {
            best = read == NULL || (write != NULL && write->sequence < read->sequence) ? write : read;
        }
    }
    if (oldest_write == NULL || (best != NULL && best->write)) {
        ring->passed = 0;
    } else if (ring->passed++ >= AIO_WRITE_STARVATION) {
        ring->passed = 0;
        best = oldest_write;
    }
    return best;
}

int aio_can_stage(const aio_ring *ring) {
    return ring->queued != 0 && ring->free_count != 0 && (!ring->held || ring->closing);
}

/* ---- from ticket to blocks ------------------------------------------------------------------ */

/* [Note: odd heads and tails] O_DIRECT wants whole aligned blocks. What is odd (a head, a tail, or
 * all of it where address and offset are not congruent) goes through a second descriptor without
 * O_DIRECT. A bounce buffer with read-modify-write would lose a neighbour's bytes when two
 * tickets meet in one block; the page cache locks the page, and the kernel writes back and drops
 * cached pages before direct blocks of the same range. */
static void cut_block(const aio_ring *ring, aio_ticket *ticket, aio_block *block) {
    uint64_t left = ticket->nbytes - ticket->cut;
    block->write = ticket->write;
    block->offset = ticket->offset + ticket->cut;
    block->address = ticket->address + ticket->cut;
    block->nbytes = left < ring->options.block_bytes ? left : ring->options.block_bytes;
    if (ticket->fd != ticket->plain_fd && ((block->offset ^ block->address) & (AIO_ALIGN - 1)) == 0) {
        uint64_t head = -block->offset & (AIO_ALIGN - 1);
        if (head != 0) {
            block->nbytes = left < head ? left : head;
        } else if (block->nbytes >= AIO_ALIGN) {
            block->nbytes &= ~(uint64_t)(AIO_ALIGN - 1);
        }
    }
    ticket->cut += block->nbytes;
}

static void finish_if_over(aio_ring *ring, aio_ticket *ticket) {
    if (ticket->in_flight != 0 || ticket->cut != ticket->nbytes) return;
    ticket->info.finished_ns = aio_now_ns();
    if (atomic_load(&ticket->state) == AIO_PENDING) {
        ring->live--;
        if (ticket->info.error != 0) ring->stats.failed_tickets++;
    }
    ticket->after = ring->finished;
    ring->finished = ticket;
}

static void fail(aio_ring *ring, aio_ticket *ticket, int error, uint64_t offset) {
    if (ticket->info.error == 0) {
        ticket->info.error = error;
        ticket->info.offset = offset;
    }
    dequeue(ring, ticket);
    ticket->cut = ticket->nbytes;
}

static void free_slot(aio_ring *ring, uint32_t slot) {
    aio_ticket *ticket = ring->slots[slot].ticket;
    ring->slots[slot].ticket = NULL;
    ring->free[ring->free_count++] = slot;
    if (ring->free_count == ring->options.queue_depth) {
        ring->stats.active_ns += aio_now_ns() - ring->active_since;
    }
    ticket->in_flight--;
    finish_if_over(ring, ticket);
}

static void stage_block(aio_ring *ring, uint32_t slot) {
    aio_slot *at = &ring->slots[slot];
    int error = 0;
    const int odd = ((at->block.offset | at->block.address | at->block.nbytes) & (AIO_ALIGN - 1)) != 0;
    at->block.fd = odd ? at->ticket->plain_fd : at->ticket->fd;
    aio_lane *lane = aio_lane_for(ring, at->ticket, &at->block, &error);
    if (at->ticket->info.error != 0 || lane == NULL) {
        fail(ring, at->ticket, error, at->block.offset);
        free_slot(ring, slot);
    } else {
        lane->staged[lane->staged_count++] = &at->block;
    }
}

void aio_stage(aio_ring *ring) {
    while (aio_can_stage(ring)) {
        aio_ticket *ticket = pick(ring);
        const uint64_t now = aio_now_ns();
        if (ring->free_count == ring->options.queue_depth) ring->active_since = now;
        uint32_t slot = ring->free[--ring->free_count];
        aio_slot *at = &ring->slots[slot];
        at->ticket = ticket;
        at->tries = 0;
        at->started_ns = now;
        if (ticket->info.order == 0) {
            ticket->info.order = ++ring->order;
            ticket->info.started_ns = at->started_ns;
        }
        ticket->in_flight++;
        cut_block(ring, ticket, &at->block);
        if (ticket->cut == ticket->nbytes) dequeue(ring, ticket);
        stage_block(ring, slot);
    }
}

/* ---- completion ----------------------------------------------------------------------------- */

static void submit_again(aio_ring *ring, uint32_t slot) {
    ring->stats.retries++;
    stage_block(ring, slot);
}

/* [Note: complete means complete] Every result, of every backend, a failed submit included, comes
 * here and nowhere else. A block is over when all of its bytes were moved, or when its ticket has
 * failed; a remainder is submitted again; all else is an error of the ticket. */
void aio_settle(aio_ring *ring, uint32_t slot, int64_t result) {
    aio_slot *at = &ring->slots[slot];
    aio_ticket *ticket = at->ticket;
    aio_block *block = &at->block;
    if (result > 0 && (uint64_t)result <= block->nbytes) {
        uint64_t moved = (uint64_t)result;
        *(block->write ? &ring->stats.bytes_written : &ring->stats.bytes_read) += moved;
        ticket->info.moved += moved;
        block->offset += moved;
        block->address += moved;
        block->nbytes -= moved;
        at->tries = 0;
        if (block->nbytes == 0) {
            (*(block->write ? &ring->stats.writes : &ring->stats.reads))++;
            free_slot(ring, slot);
        } else {
            ring->stats.short_transfers++;
            submit_again(ring, slot);
        }
        return;
    }
    const int again = result == -EINTR || result == -EAGAIN;
    const int retry = (result == 0 && block->write) || (result == -EIO && !block->write);
    if (again || (retry && at->tries++ < AIO_READ_RETRIES)) {
        /* EAGAIN: the kernel was short of something; one sleep before the next submit. */
        if (result == -EAGAIN) ring->main.paused = ring->side.paused = 1;
        submit_again(ring, slot);
        return;
    }
    /* More than was asked for is memory overwritten: an error, not a success. */
    const int error = result > 0 ? -EOVERFLOW : result == 0 ? -ENODATA : (int)result;
    if (ticket->info.error == 0) ticket->info.short_transfer = result == 0;
    fail(ring, ticket, error, block->offset);
    free_slot(ring, slot);
}

/* Staged blocks of tickets that have failed are not submitted any more. */
void aio_drop_dead(aio_ring *ring, aio_lane *lane) {
    uint32_t kept = 0, count = lane->staged_count;
    lane->staged_count = 0;
    for (uint32_t k = 0; k < count; k++) {
        aio_block *block = lane->staged[k];
        if (ring->slots[block->slot].ticket->info.error != 0) {
            free_slot(ring, block->slot);
        } else {
            lane->staged[kept++] = block;
        }
    }
    lane->staged_count = kept;
}

/* [Note: deadlines] A block that the kernel keeps longer than the deadline expires its ticket:
 * the buffer is lost for the life of the process, since no call takes a block back from a device
 * (io_cancel is not implemented, io_destroy waits). The ring is failed with it, and what is
 * queued fails at once. Waiters run this too: the ring's own thread may be stuck in a submit. */
void aio_expire(aio_ring *ring, uint64_t now, int all) {
    for (uint32_t k = 0; k < ring->options.queue_depth; k++) {
        aio_ticket *ticket = ring->slots[k].ticket;
        if (ticket == NULL || atomic_load(&ticket->state) != AIO_PENDING) continue;
        if (!all && (now < ring->slots[k].started_ns ||
                     now - ring->slots[k].started_ns < ring->options.deadline_ns)) {
            continue;
        }
        ring->failed = 1;
        ring->live--;
        ring->stats.expired_tickets++;
        ticket->info.error = 0; /* the deadline outweighs an earlier error of another block */
        fail(ring, ticket, -ETIMEDOUT, ring->slots[k].block.offset);
        ticket->info.short_transfer = 0;
        atomic_store(&ticket->state, AIO_EXPIRED);
        aio_futex_wake(&ticket->state);
    }
    if (!ring->failed && !all) return;
    for (int level = 0; level < LEVELS; level++) {
        for (int write = 0; write < 2; write++) {
            for (aio_ticket *ticket; (ticket = ring->queue[level][write].head) != NULL;) {
                fail(ring, ticket, -ESHUTDOWN, ticket->offset + ticket->cut);
                finish_if_over(ring, ticket);
            }
        }
    }
}

aio_ticket *aio_take_finished(aio_ring *ring) {
    aio_ticket *list = ring->finished;
    ring->finished = NULL;
    return list;
}

static void unref(aio_ticket *ticket) {
    if (atomic_fetch_sub(&ticket->refs, 1) != 1) return;
    aio_ring *ring = ticket->ring;
    free(ticket);
    aio_ring_unref(ring);
}

void aio_publish(aio_ticket *finished) {
    while (finished != NULL) {
        aio_ticket *ticket = finished;
        finished = ticket->after;
        if (atomic_load(&ticket->state) == AIO_PENDING) {
            atomic_store(&ticket->state, ticket->info.error != 0 ? AIO_FAILED : AIO_DONE);
            if (atomic_load(&ticket->waiters) != 0) aio_futex_wake(&ticket->state);
        }
        unref(ticket);
    }
}

/* ---- the caller's side ---------------------------------------------------------------------- */

int aio_submit(aio_ring *ring, int write, int fd, int plain_fd, uint64_t offset, uintptr_t address,
               uint64_t nbytes, int priority, aio_ticket **out) {
    if (ring->pid != aio_pid()) return -ECHILD;
    if (fd < 0 || plain_fd < 0) return -EBADF;
    if (priority < 0 || priority >= AIO_PRIORITIES || offset > INT64_MAX || nbytes > INT64_MAX - offset ||
        nbytes > UINTPTR_MAX - address || (address == 0 && nbytes != 0)) {
        return -EINVAL;
    }
    aio_ticket *ticket = calloc(1, sizeof *ticket);
    if (ticket == NULL) return -ENOMEM;
    atomic_store(&ticket->refs, 2);
    ticket->ring = ring;
    ticket->write = write != 0;
    ticket->fd = fd;
    ticket->plain_fd = plain_fd;
    ticket->offset = offset;
    ticket->address = address;
    ticket->nbytes = nbytes;
    ticket->level = priority;
    ticket->info.queued_ns = aio_now_ns();

    int error = 0, bell = 0;
    pthread_mutex_lock(&ring->lock);
    if (ring->closing || ring->failed) {
        error = -ESHUTDOWN;
    } else {
        atomic_fetch_add(&ring->refs, 1);
        ring->live++;
        if (nbytes == 0) {
            finish_if_over(ring, ticket);
        } else {
            enqueue(ring, ticket);
            bell = aio_bell_needed(ring);
        }
    }
    aio_ticket *finished = aio_take_finished(ring);
    if (bell) aio_bell(ring);
    pthread_mutex_unlock(&ring->lock);
    aio_publish(finished);
    if (error != 0) {
        free(ticket);
        return error;
    }
    *out = ticket;
    return 0;
}

int aio_poll(aio_ticket *ticket) {
    if (ticket->ring->pid != aio_pid()) return -ECHILD;
    return atomic_load(&ticket->state);
}

static int look_at_deadlines(aio_ticket *ticket, int promote) {
    aio_ring *ring = ticket->ring;
    pthread_mutex_lock(&ring->lock);
    if (promote && ticket->queued && ticket->level < LEVELS - 1) {
        dequeue(ring, ticket);
        ticket->level = LEVELS - 1;
        enqueue(ring, ticket);
    }
    aio_expire(ring, aio_now_ns(), 0);
    aio_ticket *finished = aio_take_finished(ring);
    pthread_mutex_unlock(&ring->lock);
    aio_publish(finished);
    return atomic_load(&ticket->state);
}

int aio_wait(aio_ticket *ticket, int timeout_ms) {
    int state = aio_poll(ticket);
    if (state != AIO_PENDING) return state;
    state = look_at_deadlines(ticket, 1);
    if (state != AIO_PENDING || timeout_ms <= 0) return state;
    atomic_fetch_add(&ticket->waiters, 1);
    aio_futex_wait(&ticket->state, AIO_PENDING, timeout_ms < AIO_MAX_WAIT_MS ? timeout_ms : AIO_MAX_WAIT_MS);
    atomic_fetch_sub(&ticket->waiters, 1);
    state = atomic_load(&ticket->state);
    return state != AIO_PENDING ? state : look_at_deadlines(ticket, 0);
}

int aio_ticket_describe(aio_ticket *ticket, aio_ticket_info *out) {
    if (ticket->ring->pid != aio_pid()) return -ECHILD;
    pthread_mutex_lock(&ticket->ring->lock);
    *out = ticket->info;
    out->state = atomic_load(&ticket->state);
    pthread_mutex_unlock(&ticket->ring->lock);
    return 0;
}

void aio_ticket_release(aio_ticket *ticket) {
    if (ticket->ring->pid == aio_pid()) unref(ticket);
}

/* ---- futex: a wait that a completed ticket never enters -------------------------------------- */

void aio_futex_wait(_Atomic int *word, int value, int timeout_ms) {
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &timeout, NULL, 0);
}

void aio_futex_wake(_Atomic int *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
