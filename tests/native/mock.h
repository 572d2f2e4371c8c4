/* A backend in memory whose every answer a test decides. */
#ifndef MOCK_H
#define MOCK_H

#include "aio.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define MOCK_BYTES (1u << 20)
#define MOCK_DEPTH 64

typedef struct {
    pthread_mutex_t lock;
    unsigned char device[MOCK_BYTES];
    int completion_fd;
    aio_block kept[MOCK_DEPTH]; /* taken, not answered yet */
    uint32_t kept_count, most_kept, offers;
    int stall;         /* keep what is taken */
    int stall_offset;  /* -1, or: keep only the block at this offset */
    int block_submit;  /* submit does not return while this is set */
    int submit_script[16], submit_at, submit_count;   /* n >= 0: take n; < 0: this error */
    int64_t result_script[16];                        /* for the blocks at result_offset */
    int result_at, result_count;
    int64_t result_offset; /* -1: every block */
    int reap_error;        /* once */
    uint64_t order[256];   /* offsets, as submitted */
    uint32_t ordered;
} mock_device;

static mock_device mock = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void mock_signal(void) {
    uint64_t one = 1;
    ssize_t n = write(mock.completion_fd, &one, sizeof one);
    (void)n;
}

static int mock_open(const aio_backend_options *options, void **state, int *wake_fd) {
    (void)wake_fd;
    mock.completion_fd = options->completion_fd;
    *state = &mock;
    return 0;
}

static int mock_submit(void *state, aio_block *const *blocks, uint32_t count) {
    mock_device *m = state;
    while (__atomic_load_n(&m->block_submit, __ATOMIC_SEQ_CST)) usleep(1000);
    pthread_mutex_lock(&m->lock);
    m->offers++;
    int most = (int)count;
    if (m->submit_at < m->submit_count) most = m->submit_script[m->submit_at++];
    if (most > (int)count) most = (int)count;
    for (int k = 0; k < most; k++) {
        m->kept[m->kept_count++] = *blocks[k];
        if (m->ordered < 256) m->order[m->ordered++] = blocks[k]->offset;
    }
    if (m->kept_count > m->most_kept) m->most_kept = m->kept_count;
    pthread_mutex_unlock(&m->lock);
    if (most > 0) mock_signal();
    return most;
}

static int64_t mock_answer(mock_device *m, const aio_block *block) {
    int64_t n = (int64_t)block->nbytes;
    if (m->result_at < m->result_count &&
        (m->result_offset < 0 || (uint64_t)m->result_offset == block->offset)) {
        n = m->result_script[m->result_at++];
        if (m->result_offset >= 0 && n > 0) m->result_offset += n; /* the remainder's turn */
    }
    if (n > 0 && n <= (int64_t)block->nbytes) {
        if (block->write) {
            memcpy(m->device + block->offset, (void *)block->address, (size_t)n);
        } else {
            memcpy((void *)block->address, m->device + block->offset, (size_t)n);
        }
    }
    return n;
}

static int mock_reap(void *state, aio_event *events, uint32_t count) {
    mock_device *m = state;
    uint32_t n = 0, left = 0;
    pthread_mutex_lock(&m->lock);
    if (m->reap_error != 0) {
        int error = m->reap_error;
        m->reap_error = 0;
        pthread_mutex_unlock(&m->lock);
        return error;
    }
    for (uint32_t k = 0; k < m->kept_count; k++) {
        const aio_block block = m->kept[k];
        if (n == count || m->stall || (m->stall_offset >= 0 && (uint64_t)m->stall_offset == block.offset)) {
            m->kept[left++] = block;
        } else {
            events[n++] = (aio_event){block.slot, mock_answer(m, &block)};
        }
    }
    m->kept_count = left;
    pthread_mutex_unlock(&m->lock);
    return (int)n;
}

static int mock_close(void *state) {
    (void)state;
    return 0;
}

static const aio_backend mock_backend = {
    .name = "mock",
    .takes_plain = 1,
    .open = mock_open,
    .submit = mock_submit,
    .reap = mock_reap,
    .close = mock_close,
};

static void mock_reset(void) {
    pthread_mutex_lock(&mock.lock);
    for (uint32_t k = 0; k < MOCK_BYTES; k++) mock.device[k] = (unsigned char)(k * 2654435761u >> 13);
    mock.kept_count = mock.most_kept = mock.offers = mock.ordered = 0;
    mock.stall = mock.block_submit = mock.submit_at = mock.submit_count = 0;
    mock.result_at = mock.result_count = mock.reap_error = 0;
    mock.stall_offset = -1;
    mock.result_offset = -1;
    pthread_mutex_unlock(&mock.lock);
}

/* Lets go of what is stalled. */
static inline void mock_release(void) {
    pthread_mutex_lock(&mock.lock);
    mock.stall = 0;
    mock.stall_offset = -1;
    pthread_mutex_unlock(&mock.lock);
    mock_signal();
}

#endif
