/* Blocks by pread(2) and pwrite(2) in a few threads: works on every file system, and never blocks
 * the ring. Any other ring sends it what its own kernel queue would do synchronously. */
#include "aio.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    aio_block *todo; /* two circular queues of `depth` entries: no block waits for memory */
    aio_event *done;
    uint32_t depth, first_todo, todo_count, first_done, done_count;
    int completion_fd, stop;
    uint32_t threads;
    uint64_t ended_cpu_ns; /* of threads that have ended */
    pthread_t thread[];
} state_threads;

static int64_t transfer(const aio_block *block) {
    ssize_t n = block->write
                    ? pwrite(block->fd, (const void *)block->address, block->nbytes, (off_t)block->offset)
                    : pread(block->fd, (void *)block->address, block->nbytes, (off_t)block->offset);
    return n < 0 ? -errno : n;
}

static void *work(void *argument) {
    state_threads *s = argument;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->todo_count == 0 && !s->stop) pthread_cond_wait(&s->work, &s->lock);
        if (s->todo_count == 0) break;
        aio_block block = s->todo[s->first_todo];
        s->first_todo = (s->first_todo + 1) % s->depth;
        s->todo_count--;
        pthread_mutex_unlock(&s->lock);

        aio_event event = {block.slot, transfer(&block)};

        pthread_mutex_lock(&s->lock);
        s->done[(s->first_done + s->done_count++) % s->depth] = event;
        uint64_t one = 1;
        /* It fails only when the counter is full, and then the ring is awake anyway. */
        ssize_t ignored = write(s->completion_fd, &one, sizeof one);
        (void)ignored;
    }
    struct timespec cpu;
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu) == 0) {
        s->ended_cpu_ns += (uint64_t)cpu.tv_sec * 1000000000u + (uint64_t)cpu.tv_nsec;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static int threads_close(void *state) {
    state_threads *s = state;
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (uint32_t k = 0; k < s->threads; k++) pthread_join(s->thread[k], NULL);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    free(s->todo);
    free(s->done);
    free(s);
    return 0;
}

static int threads_open(const aio_backend_options *options, void **state, int *wake_fd) {
    (void)wake_fd;
    state_threads *s = calloc(1, sizeof *s + options->threads * sizeof(pthread_t));
    if (s == NULL) return -ENOMEM;
    s->depth = options->depth;
    s->completion_fd = options->completion_fd;
    s->todo = calloc(s->depth, sizeof *s->todo);
    s->done = calloc(s->depth, sizeof *s->done);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    int error = s->todo == NULL || s->done == NULL ? ENOMEM : 0;
    while (error == 0 && s->threads < options->threads) {
        error = pthread_create(&s->thread[s->threads], NULL, work, s);
        if (error == 0) s->threads++;
    }
    if (error != 0 && s->threads == 0) { /* one thread is enough to go on with */
        threads_close(s);
        return -error;
    }
    *state = s;
    return 0;
}

static int threads_submit(void *state, aio_block *const *blocks, uint32_t count) {
    state_threads *s = state;
    uint32_t taken = 0;
    pthread_mutex_lock(&s->lock);
    for (; taken < count; taken++) { /* the ring never has more than `depth` blocks under way */
        s->todo[(s->first_todo + s->todo_count++) % s->depth] = *blocks[taken];
    }
    if (taken == 1) {
        pthread_cond_signal(&s->work);
    } else {
        pthread_cond_broadcast(&s->work);
    }
    pthread_mutex_unlock(&s->lock);
    return (int)taken;
}

static int threads_reap(void *state, aio_event *events, uint32_t count) {
    state_threads *s = state;
    uint32_t n = 0;
    pthread_mutex_lock(&s->lock);
    for (; n < count && s->done_count != 0; n++) {
        events[n] = s->done[s->first_done];
        s->first_done = (s->first_done + 1) % s->depth;
        s->done_count--;
    }
    pthread_mutex_unlock(&s->lock);
    return (int)n;
}

static uint64_t threads_cpu_ns(void *state) {
    state_threads *s = state;
    uint64_t total = 0;
    pthread_mutex_lock(&s->lock);
    total = s->ended_cpu_ns;
    for (uint32_t k = 0; k < s->threads; k++) {
        clockid_t clock;
        struct timespec cpu;
        if (pthread_getcpuclockid(s->thread[k], &clock) == 0 && clock_gettime(clock, &cpu) == 0) {
            total += (uint64_t)cpu.tv_sec * 1000000000u + (uint64_t)cpu.tv_nsec;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return total;
}

const aio_backend aio_backend_threads = {
    .name = "threads",
    .takes_plain = 1,
    .open = threads_open,
    .submit = threads_submit,
    .reap = threads_reap,
    .close = threads_close,
    .cpu_ns = threads_cpu_ns,
};
