/* The ring's thread: stage, submit, sleep, reap. */
#include "ring.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define SIDE_THREADS 2u
#define MOST_BACKOFF_MS 64u

/* ---- lanes ---------------------------------------------------------------------------------- */

static int watch(aio_ring *ring, int fd, uint32_t how) {
    struct epoll_event event = {.events = how, .data = {.fd = fd}};
    return epoll_ctl(ring->epoll, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static int open_lane(aio_ring *ring, aio_lane *lane, const aio_backend *backend, uint32_t threads) {
    aio_backend_options options = {ring->options.queue_depth, threads, ring->completion};
    lane->wake_fd = -1;
    if (lane->staged == NULL) lane->staged = calloc(ring->options.queue_depth, sizeof(aio_block *));
    if (lane->staged == NULL) return -ENOMEM;
    int error = backend->open(&options, &lane->state, &lane->wake_fd);
    if (error == 0 && lane->wake_fd >= 0) {
        error = watch(ring, lane->wake_fd, EPOLLIN);
        if (error != 0) backend->close(lane->state);
    }
    if (error == 0) lane->backend = backend;
    return error;
}

aio_lane *aio_lane_for(aio_ring *ring, const aio_ticket *ticket, const aio_block *block, int *error) {
    const int direct = ticket->fd != ticket->plain_fd && block->fd == ticket->fd;
    if (direct || ring->main.backend->takes_plain) return &ring->main;
    if (ring->side.backend == NULL) {
        *error = open_lane(ring, &ring->side, &aio_backend_threads, SIDE_THREADS);
        if (*error != 0) return NULL;
    }
    return &ring->side;
}

/* ---- delays of the test mode ---------------------------------------------------------------- */

static uint32_t draw(aio_ring *ring, uint32_t below) {
    ring->random ^= ring->random << 13;
    ring->random ^= ring->random >> 7;
    ring->random ^= ring->random << 17;
    return (uint32_t)(ring->random >> 33) % below;
}

static void delay(aio_ring *ring) {
    if (ring->random == 0 || draw(ring, 2) == 0) return;
    struct timespec pause = {0, draw(ring, 3000) * 1000L};
    nanosleep(&pause, NULL);
}

/* [Note: random delays] With a seed, submissions wait up to 3 ms at random, and results are kept
 * back and told out of order, so that a wait that is missing, or a buffer used too early, shows
 * in any test that compares bytes. */
static uint32_t shuffle(aio_ring *ring, uint32_t count) {
    for (uint32_t k = 0; k < count; k++) ring->limbo[ring->limbo_count++] = ring->events[k];
    uint32_t told = 0;
    for (uint32_t left = ring->limbo_count; left > 0; left--) {
        if (draw(ring, 2) == 0) continue;
        uint32_t other = draw(ring, ring->limbo_count);
        ring->events[told++] = ring->limbo[other];
        ring->limbo[other] = ring->limbo[--ring->limbo_count];
    }
    return told;
}

/* ---- the loop ------------------------------------------------------------------------------- */

static void reap(aio_ring *ring, aio_lane *lane) {
    uint32_t in_kernel = lane->in_kernel; /* only this thread changes it */
    uint32_t count = 0;
    if (in_kernel != 0) {
        int n;
        do {
            n = lane->backend->reap(lane->state, ring->events, ring->options.queue_depth);
        } while (n == -EINTR);
        if (n > 0) count = (uint32_t)n; /* an error is met again, or the deadline is */
    }
    if (count == 0 && ring->limbo_count == 0) return;
    uint32_t told = count;
    if (ring->random != 0) {
        delay(ring);
        told = shuffle(ring, count);
    }
    pthread_mutex_lock(&ring->lock);
    lane->in_kernel -= count;
    if (count != 0) lane->backoff_ms = 0;
    for (uint32_t k = 0; k < told; k++) aio_settle(ring, ring->events[k].slot, ring->events[k].result);
    aio_ticket *finished = aio_take_finished(ring);
    pthread_mutex_unlock(&ring->lock);
    aio_publish(finished);
}

static void count_submit(aio_ring *ring, uint64_t ns) {
    uint32_t bucket = 0;
    while (bucket < AIO_HISTOGRAM - 1 && ns >= (UINT64_C(1000) << bucket)) bucket++;
    ring->stats.submit_histogram[bucket]++;
    ring->stats.submits++;
    if (ns > ring->stats.submit_max_ns) ring->stats.submit_max_ns = ns;
}

/* Submits what is staged, as far as the kernel takes it. EAGAIN leaves the rest for after the next
 * completion, or after a pause that doubles; any other error is the first block's own. */
static void submit(aio_ring *ring, aio_lane *lane) {
    if (lane->staged_count != 0) delay(ring);
    while (lane->staged_count != 0 && !lane->paused) {
        uint64_t began = aio_now_ns();
        int n = lane->backend->submit(lane->state, lane->staged, lane->staged_count);
        uint64_t took = aio_now_ns() - began;

        pthread_mutex_lock(&ring->lock);
        count_submit(ring, took);
        if (n > 0) {
            lane->staged_count -= (uint32_t)n;
            lane->in_kernel += (uint32_t)n;
            memmove(lane->staged, lane->staged + n, lane->staged_count * sizeof *lane->staged);
        } else if (n == 0 || n == -EAGAIN || n == -EBUSY) {
            ring->stats.busy++;
            lane->paused = 1;
        } else if (n != -EINTR) {
            uint32_t slot = lane->staged[0]->slot;
            lane->staged_count--;
            memmove(lane->staged, lane->staged + 1, lane->staged_count * sizeof *lane->staged);
            aio_settle(ring, slot, n);
        }
        aio_ticket *finished = aio_take_finished(ring);
        pthread_mutex_unlock(&ring->lock);
        aio_publish(finished);
    }
}

static int back_off(aio_lane *lane, int timeout_ms) {
    if (!lane->paused) return timeout_ms;
    lane->paused = 0;
    lane->backoff_ms = lane->backoff_ms == 0                ? 1
                       : lane->backoff_ms < MOST_BACKOFF_MS ? 2 * lane->backoff_ms
                                                            : MOST_BACKOFF_MS;
    int pause = (int)lane->backoff_ms;
    return timeout_ms < 0 || timeout_ms > pause ? pause : timeout_ms;
}

/* Sleeps until a doorbell or a completion, or until deadlines are due to be looked at. The
 * eventfds are watched edge-triggered and never read: a signal since the last look wakes. */
static void sleep_until_called(aio_ring *ring) {
    struct epoll_event events[4];
    pthread_mutex_lock(&ring->lock);
    int timeout_ms = ring->main.in_kernel + ring->side.in_kernel != 0 ? AIO_MAX_WAIT_MS : -1;
    timeout_ms = back_off(&ring->side, back_off(&ring->main, timeout_ms));
    if (ring->limbo_count != 0) timeout_ms = 1;
    if (aio_can_stage(ring) || (ring->closing && ring->live == 0)) timeout_ms = 0;
    ring->asleep = timeout_ms != 0;
    pthread_mutex_unlock(&ring->lock);
    if (timeout_ms != 0) epoll_wait(ring->epoll, events, 4, timeout_ms);
}

static void end_lane(aio_lane *lane, uint64_t *cpu_ns) {
    if (lane->backend == NULL) return;
    if (lane->backend->cpu_ns != NULL) *cpu_ns += lane->backend->cpu_ns(lane->state);
    /* With a block in the kernel closing would wait for the device, perhaps for ever. */
    const aio_backend *backend = lane->backend;
    lane->backend = NULL; /* first: a fork must not end what this thread is ending */
    if (lane->in_kernel == 0) backend->close(lane->state);
}

static uint64_t thread_cpu_ns(clockid_t clock) {
    struct timespec cpu = {0, 0};
    clock_gettime(clock, &cpu);
    return (uint64_t)cpu.tv_sec * 1000000000u + (uint64_t)cpu.tv_nsec;
}

static void close_descriptors(aio_ring *ring) {
    int *fds[] = {&ring->epoll, &ring->doorbell, &ring->completion};
    for (int k = 0; k < 3; k++) {
        const int fd = *fds[k];
        *fds[k] = -1; /* first: in a fork that comes in between, the number may be another file's */
        if (fd >= 0) close(fd);
    }
}

static void *run(void *argument) {
    aio_ring *ring = argument;
    for (;;) {
        reap(ring, &ring->main);
        reap(ring, &ring->side);
        pthread_mutex_lock(&ring->lock);
        ring->asleep = 0;
        aio_expire(ring, aio_now_ns(), 0);
        aio_drop_dead(ring, &ring->main);
        aio_drop_dead(ring, &ring->side);
        aio_stage(ring);
        const int over = ring->closing && ring->live == 0 && ring->limbo_count == 0;
        aio_ticket *finished = aio_take_finished(ring);
        pthread_mutex_unlock(&ring->lock);
        aio_publish(finished);
        if (over) break;
        submit(ring, &ring->main);
        submit(ring, &ring->side);
        sleep_until_called(ring);
    }
    pthread_mutex_lock(&ring->lock);
    const int left = ring->main.in_kernel + ring->side.in_kernel != 0;
    ring->stats.cpu_ns = thread_cpu_ns(CLOCK_THREAD_CPUTIME_ID);
    end_lane(&ring->main, &ring->stats.cpu_ns);
    end_lane(&ring->side, &ring->stats.cpu_ns);
    if (!left) close_descriptors(ring);
    ring->stuck = left;
    pthread_mutex_unlock(&ring->lock);
    atomic_store(&ring->stopped, 1);
    aio_futex_wake(&ring->stopped);
    aio_ring_unref(ring);
    return NULL;
}

/* Only when the thread sleeps, and has room for what was queued. */
int aio_bell_needed(aio_ring *ring) { return ring->asleep && (ring->closing || aio_can_stage(ring)); }

void aio_bell(aio_ring *ring) {
    uint64_t one = 1;
    ring->asleep = 0;
    /* It fails only when the counter is full, and then the thread has been called. */
    ssize_t ignored = ring->doorbell < 0 ? 0 : write(ring->doorbell, &one, sizeof one);
    (void)ignored;
}

/* ---- opening and closing -------------------------------------------------------------------- */

static void free_ring(aio_ring *ring) {
    close_descriptors(ring);
    pthread_mutex_destroy(&ring->lock);
    free(ring->main.staged);
    free(ring->side.staged);
    free(ring->free);
    free(ring->slots);
    free(ring->events);
    free(ring->limbo);
    free(ring);
}

void aio_ring_unref(aio_ring *ring) {
    if (atomic_fetch_sub(&ring->refs, 1) == 1) free_ring(ring);
}

static int start(aio_ring *ring, const aio_backend *backend) {
    const uint32_t depth = ring->options.queue_depth;
    ring->free = calloc(depth, sizeof *ring->free);
    ring->slots = calloc(depth, sizeof *ring->slots);
    ring->events = calloc(depth, sizeof *ring->events);
    ring->limbo = calloc(depth, sizeof *ring->limbo);
    if (ring->free == NULL || ring->slots == NULL || ring->events == NULL || ring->limbo == NULL)
        return -ENOMEM;
    for (uint32_t k = 0; k < depth; k++) {
        ring->slots[k].block.slot = k;
        ring->free[ring->free_count++] = depth - 1 - k;
    }
    ring->epoll = epoll_create1(EPOLL_CLOEXEC);
    ring->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ring->completion = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ring->epoll < 0 || ring->doorbell < 0 || ring->completion < 0) return -errno;
    int error = watch(ring, ring->doorbell, EPOLLIN | EPOLLET);
    if (error == 0) error = watch(ring, ring->completion, EPOLLIN | EPOLLET);
    if (error == 0) error = open_lane(ring, &ring->main, backend, ring->options.threads);
    if (error != 0) return error;
    /* Signals are for the program's own threads: Ctrl-C must reach Python's. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    atomic_store(&ring->refs, 2);
    error = pthread_create(&ring->thread, NULL, run, ring);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error != 0) {
        ring->main.backend->close(ring->main.state);
        return -error;
    }
    pthread_setname_np(ring->thread, "infinity-aio");
    return 0;
}

int aio_ring_open_with(const aio_backend *backend, const aio_options *options, aio_ring **out) {
    if (options->block_bytes == 0 || options->block_bytes % AIO_ALIGN != 0 ||
        options->block_bytes > AIO_MAX_BLOCK || options->queue_depth == 0 ||
        options->queue_depth > AIO_MAX_DEPTH || options->threads == 0 || options->threads > AIO_MAX_DEPTH ||
        options->deadline_ns == 0) {
        return -EINVAL;
    }
    aio_ring *ring = calloc(1, sizeof *ring);
    if (ring == NULL) return -ENOMEM;
    pthread_mutex_init(&ring->lock, NULL);
    ring->pid = aio_pid();
    ring->options = *options;
    ring->random = options->delay_seed;
    ring->epoll = ring->doorbell = ring->completion = -1;
    int error = start(ring, backend);
    if (error != 0) {
        free_ring(ring);
        return error;
    }
    *out = ring;
    return 0;
}

int aio_ring_open(const char *backend, const aio_options *options, aio_ring **out) {
    static const aio_backend *const known[] = {&aio_backend_libaio, &aio_backend_syscall, &aio_backend_uring,
                                               &aio_backend_threads};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        if (strcmp(backend, known[k]->name) == 0) return aio_ring_open_with(known[k], options, out);
    }
    return -ENOENT;
}

static void begin_to_close(aio_ring *ring, int all) {
    pthread_mutex_lock(&ring->lock);
    ring->closing = 1;
    aio_expire(ring, aio_now_ns(), all);
    aio_ticket *finished = aio_take_finished(ring);
    aio_bell(ring);
    pthread_mutex_unlock(&ring->lock);
    aio_publish(finished);
}

int aio_ring_shutdown(aio_ring *ring, int timeout_ms) {
    if (ring->pid != aio_pid()) return -ECHILD;
    begin_to_close(ring, 0);
    if (timeout_ms > 0 && atomic_load(&ring->stopped) == 0) {
        aio_futex_wait(&ring->stopped, 0, timeout_ms < AIO_MAX_WAIT_MS ? timeout_ms : AIO_MAX_WAIT_MS);
    }
    if (atomic_load(&ring->stopped) == 0) return -EINPROGRESS;
    pthread_mutex_lock(&ring->lock);
    const int join = !ring->joined;
    const int expired = ring->stats.expired_tickets != 0;
    const int stuck = ring->stuck;
    ring->joined = 1;
    pthread_mutex_unlock(&ring->lock);
    if (join && stuck) {
        pthread_detach(ring->thread); /* its exit may wait for the device (io_uring does) */
    } else if (join) {
        pthread_join(ring->thread, NULL);
    }
    return expired ? -ETIMEDOUT : 0;
}

int aio_ring_abandon(aio_ring *ring) {
    if (ring->pid != aio_pid()) return -ECHILD;
    begin_to_close(ring, 1);
    return 0;
}

void aio_ring_release(aio_ring *ring) {
    if (ring->pid != aio_pid()) return;
    begin_to_close(ring, 0);
    pthread_mutex_lock(&ring->lock);
    if (!ring->joined) pthread_detach(ring->thread);
    ring->joined = 1;
    pthread_mutex_unlock(&ring->lock);
    aio_ring_unref(ring);
}

void aio_ring_forked(aio_ring *ring) {
    if (ring->pid == aio_pid()) return;
    close_descriptors(ring);
    const aio_backend *backend = ring->main.backend;
    if (backend != NULL && backend->forked != NULL) backend->forked(ring->main.state);
    ring->main.backend = NULL;
}

int aio_ring_hold(aio_ring *ring, int hold) {
    if (ring->pid != aio_pid()) return -ECHILD;
    pthread_mutex_lock(&ring->lock);
    ring->held = hold != 0;
    if (!hold) aio_bell(ring);
    pthread_mutex_unlock(&ring->lock);
    return 0;
}

int aio_ring_stats(aio_ring *ring, aio_stats *out) {
    if (ring->pid != aio_pid()) return -ECHILD;
    pthread_mutex_lock(&ring->lock);
    *out = ring->stats;
    out->queued_tickets = ring->queued;
    out->blocks_in_flight = ring->options.queue_depth - ring->free_count;
    out->failed = ring->failed;
    if (out->blocks_in_flight != 0) out->active_ns += aio_now_ns() - ring->active_since;
    clockid_t clock;
    /* Before the thread ends it takes the lock to note its own time in ring->stats. */
    if (ring->main.backend != NULL && pthread_getcpuclockid(ring->thread, &clock) == 0) {
        out->cpu_ns = thread_cpu_ns(clock);
        aio_lane *lanes[] = {&ring->main, &ring->side};
        for (int k = 0; k < 2; k++) {
            const aio_backend *backend = lanes[k]->backend;
            if (backend != NULL && backend->cpu_ns != NULL) out->cpu_ns += backend->cpu_ns(lanes[k]->state);
        }
    }
    pthread_mutex_unlock(&ring->lock);
    return 0;
}

/* With the lock held: the thread cannot end meanwhile. Pinning takes about 0.1 s per GiB. */
int aio_ring_buffer(aio_ring *ring, uintptr_t address, uint64_t nbytes, int add) {
    if (ring->pid != aio_pid()) return -ECHILD;
    pthread_mutex_lock(&ring->lock);
    const aio_backend *backend = ring->main.backend;
    int taken = 0;
    if (backend != NULL && backend->buffer != NULL) {
        taken = backend->buffer(ring->main.state, address, nbytes, add);
    }
    pthread_mutex_unlock(&ring->lock);
    return taken;
}

int aio_ring_file(aio_ring *ring, int fd, int add) {
    if (ring->pid != aio_pid()) return -ECHILD;
    pthread_mutex_lock(&ring->lock);
    const aio_backend *backend = ring->main.backend;
    int taken = 0;
    if (backend != NULL && backend->file != NULL) taken = backend->file(ring->main.state, fd, add);
    pthread_mutex_unlock(&ring->lock);
    return taken;
}
