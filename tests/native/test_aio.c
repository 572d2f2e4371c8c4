/* The I/O engine without Python: every backend on a real file, and every answer that a backend
 * can give, by a mock. Usage: test_aio DIRECTORY. Ends with 0 and says nothing, or with 1. */
#include "aio.h"
#include "check.h"
#include "mock.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>

#define BLOCK 4096u

static void *leaked[8]; /* what a stalled kernel would hold: reachable, so that LSan knows */
static int leaked_count;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int wait_for(aio_ticket *ticket) {
    int state;
    while ((state = aio_wait(ticket, 100)) == AIO_PENDING) {
    }
    return state;
}

static aio_options options(uint32_t depth) {
    return (aio_options){.block_bytes = BLOCK, .queue_depth = depth, .threads = 2, .deadline_ns = 20000000000u};
}

static aio_ring *open_mock(aio_options o) {
    aio_ring *ring;
    CHECK_EQUAL(aio_ring_open_with(&mock_backend, &o, &ring), 0);
    return ring;
}

static int close_ring(aio_ring *ring) {
    int error = aio_ring_shutdown(ring, 0);
    while ((error = aio_ring_shutdown(ring, 100)) == -EINPROGRESS) {
    }
    CHECK_EQUAL(aio_ring_shutdown(ring, 100), error);
    aio_ticket *late;
    aio_stats stats;
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, 4096, 1, 1, &late), -ESHUTDOWN);
    CHECK_EQUAL(aio_ring_buffer(ring, 4096, 4096, 1), 0);
    CHECK_EQUAL(aio_ring_file(ring, 0, 1), 0);
    CHECK_EQUAL(aio_ring_stats(ring, &stats), 0);
    aio_ring_release(ring);
    return error;
}

static aio_ticket *start(aio_ring *ring, int write, uint64_t offset, void *memory, uint64_t nbytes, int priority) {
    aio_ticket *ticket;
    CHECK_EQUAL(aio_submit(ring, write, 1000, 1000, offset, (uintptr_t)memory, nbytes, priority, &ticket), 0);
    return ticket;
}

static aio_ticket_info end(aio_ticket *ticket, int state) {
    aio_ticket_info info;
    CHECK_EQUAL(wait_for(ticket), state);
    CHECK_EQUAL(aio_ticket_describe(ticket, &info), 0);
    CHECK_EQUAL(info.state, state);
    aio_ticket_release(ticket);
    return info;
}

static void *page_memory(size_t nbytes) {
    void *at = aligned_alloc(BLOCK, nbytes);
    CHECK(at != NULL);
    memset(at, 0, nbytes);
    return at;
}

/* ---- checksums ------------------------------------------------------------------------------ */

static void test_crc(void) {
    CHECK_EQUAL(aio_crc32c((uintptr_t) "123456789", 9, 0), 0xE3069283u);
    CHECK_EQUAL(aio_crc32c((uintptr_t) "", 0, 0), 0);
    const size_t n = 200000;
    unsigned char *p = malloc(n);
    for (size_t k = 0; k < n; k++) p[k] = (unsigned char)(k * 2654435761u >> 11);
    for (size_t size = 0; size < n; size = size * 3 / 2 + 1) {
        const size_t at = size % 13 < n - size ? size % 13 : 0, cut = size / 3;
        aio_crc32c_force_table(1);
        uint32_t slow = aio_crc32c((uintptr_t)p + at, size, 0);
        aio_crc32c_force_table(0);
        uint32_t first = aio_crc32c((uintptr_t)p + at, cut, 0);
        CHECK_EQUAL(aio_crc32c((uintptr_t)p + at, size, 0), slow);
        CHECK_EQUAL(aio_crc32c((uintptr_t)p + at + cut, size - cut, first), slow);
        CHECK_EQUAL(aio_crc32c_combine(first, aio_crc32c((uintptr_t)p + at + cut, size - cut, 0), size - cut), slow);
    }
    memset(p, 0, n);
    for (size_t size = 0; size < n; size = size * 2 + 1) {
        CHECK_EQUAL(aio_crc32c_zeros(size), aio_crc32c((uintptr_t)p, size, 0));
    }
    free(p);
}

/* ---- real files ----------------------------------------------------------------------------- */

typedef struct {
    aio_ring *ring;
    int fd, plain_fd;
    uint64_t base;
} job;

static void *many_transfers(void *argument) {
    const job *j = argument;
    enum { COUNT = 12 };
    unsigned char *memory = page_memory(COUNT * 5 * BLOCK), *back = page_memory(COUNT * 5 * BLOCK);
    aio_ticket *tickets[COUNT];
    for (uint32_t k = 0; k < COUNT * 5 * BLOCK; k++) memory[k] = (unsigned char)(k * 31 + j->base / BLOCK * 7);
    /* Odd ones: heads, tails, address and offset not congruent. No two share a block of memory. */
    for (int round = 0; round < 2; round++) {
        for (uint64_t k = 0; k < COUNT; k++) {
            unsigned char *at = (round ? back : memory) + k * 5 * BLOCK + (k % 3 == 2 ? 100 : 0);
            uint64_t size = k % 2 ? 3 * BLOCK + 77 : 4 * BLOCK;
            CHECK_EQUAL(aio_submit(j->ring, !round, j->fd, j->plain_fd, j->base + k * 5 * BLOCK + (k % 4 == 3 ? 100 : 0),
                                   (uintptr_t)at, size, (int)(k % 3), &tickets[k]), 0);
        }
        for (int k = COUNT - 1; k >= 0; k--) end(tickets[k], AIO_DONE);
    }
    for (uint64_t k = 0; k < COUNT; k++) {
        uint64_t from = k * 5 * BLOCK + (k % 3 == 2 ? 100 : 0);
        CHECK(memcmp(memory + from, back + from, k % 2 ? 3 * BLOCK + 77 : 4 * BLOCK) == 0);
    }
    free(memory);
    free(back);
    return NULL;
}

static void test_files(const char *directory, const char *backend, uint64_t seed, int direct) {
    char path[4096];
    snprintf(path, sizeof path, "%s/aio-%s", directory, backend);
    int plain_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int fd = direct ? open(path, O_RDWR | O_DIRECT | O_CLOEXEC) : plain_fd;
    CHECK(fd >= 0 && plain_fd >= 0);
    aio_options o = options(8);
    o.delay_seed = seed;
    aio_ring *ring;
    CHECK_EQUAL(aio_ring_open(backend, &o, &ring), 0);
    unsigned char *registered = page_memory(16 * BLOCK);
    CHECK(aio_ring_buffer(ring, (uintptr_t)registered, 16 * BLOCK, 1) >= 0);
    CHECK(aio_ring_file(ring, fd, 1) >= 0);
    CHECK(aio_ring_file(ring, fd, 1) == 0);
    job jobs[3];
    pthread_t threads[3];
    for (uint64_t k = 0; k < 3; k++) {
        jobs[k] = (job){ring, fd, plain_fd, k * 64 * BLOCK};
        CHECK_EQUAL(pthread_create(&threads[k], NULL, many_transfers, &jobs[k]), 0);
    }
    for (int k = 0; k < 3; k++) pthread_join(threads[k], NULL);

    aio_ticket *ticket;
    unsigned char *memory = page_memory(16 * BLOCK);
    memset(registered, 0xA5, 16 * BLOCK);
    CHECK_EQUAL(aio_submit(ring, 1, fd, plain_fd, 0, (uintptr_t)registered, 16 * BLOCK, 1, &ticket), 0);
    CHECK_EQUAL(end(ticket, AIO_DONE).moved, 16 * BLOCK);
    CHECK_EQUAL(aio_submit(ring, 0, fd, plain_fd, 0, (uintptr_t)memory, 16 * BLOCK, 1, &ticket), 0);
    end(ticket, AIO_DONE);
    CHECK(memcmp(memory, registered, 16 * BLOCK) == 0);
    /* Past the end of the file: the part that is there comes, then an error says so. */
    CHECK_EQUAL(ftruncate(plain_fd, 2 * BLOCK + 10), 0);
    CHECK_EQUAL(aio_submit(ring, 0, fd, plain_fd, 0, (uintptr_t)memory, 16 * BLOCK, 1, &ticket), 0);
    aio_ticket_info info = end(ticket, AIO_FAILED);
    CHECK_EQUAL(info.error, -ENODATA);
    CHECK(info.short_transfer);
    /* A descriptor that is not open: the ticket fails, the ring works on. */
    CHECK_EQUAL(aio_submit(ring, 0, 1000, 1000, 0, (uintptr_t)memory, BLOCK, 1, &ticket), 0);
    CHECK_EQUAL(end(ticket, AIO_FAILED).error, -EBADF);
    CHECK_EQUAL(aio_submit(ring, 0, fd, plain_fd, 0, (uintptr_t)memory, BLOCK, 1, &ticket), 0);
    end(ticket, AIO_DONE);

    aio_stats stats;
    CHECK_EQUAL(aio_ring_stats(ring, &stats), 0);
    CHECK(stats.cpu_ns > 0 && stats.reads > 0 && stats.writes > 0 && stats.failed_tickets == 2);
    CHECK(aio_ring_file(ring, fd, 0) >= 0);
    CHECK(aio_ring_buffer(ring, (uintptr_t)registered, 16 * BLOCK, 0) >= 0);
    /* Given up by the caller at once: it goes on, and the ring frees itself. */
    CHECK_EQUAL(aio_submit(ring, 1, fd, plain_fd, 0, (uintptr_t)memory, BLOCK, 1, &ticket), 0);
    aio_ticket_release(ticket);
    CHECK_EQUAL(close_ring(ring), 0);
    free(memory);
    free(registered);
    if (direct) close(fd);
    close(plain_fd);
    unlink(path);
}

/* ---- answers of a backend ------------------------------------------------------------------- */

static void script(const int *submits, int submit_count, const int64_t *results, int result_count, int64_t offset) {
    mock_reset();
    mock.submit_count = submit_count;
    mock.result_count = result_count;
    mock.result_offset = offset;
    for (int k = 0; k < submit_count; k++) mock.submit_script[k] = submits[k];
    for (int k = 0; k < result_count; k++) mock.result_script[k] = results[k];
}

/* One transfer of 4 blocks beside another that must come through whatever happens to the first. */
static aio_ticket_info with_answers(int write, int state) {
    aio_ring *ring = open_mock(options(8));
    unsigned char *memory = page_memory(4 * BLOCK), *other = page_memory(4 * BLOCK);
    memset(memory, 0x5A, 4 * BLOCK);
    CHECK_EQUAL(aio_ring_hold(ring, 1), 0);
    aio_ticket *first = start(ring, write, 0, memory, 4 * BLOCK, 1);
    aio_ticket *second = start(ring, 0, 64 * BLOCK, other, 4 * BLOCK, 1);
    CHECK_EQUAL(aio_ring_hold(ring, 0), 0);
    aio_ticket_info info = end(first, state);
    end(second, AIO_DONE);
    CHECK(memcmp(other, mock.device + 64 * BLOCK, 4 * BLOCK) == 0);
    if (state == AIO_DONE) CHECK(memcmp(memory, mock.device, 4 * BLOCK) == 0);
    CHECK_EQUAL(close_ring(ring), 0);
    free(memory);
    free(other);
    return info;
}

#define SCRIPT(offset, submits, ...)                                                               \
    do {                                                                                           \
        const int64_t results_[] = {__VA_ARGS__};                                                  \
        script(submits, sizeof(submits) / sizeof(int), results_, sizeof results_ / sizeof *results_, offset); \
    } while (0)

static void test_answers(void) {
    static const int none[1] = {MOCK_DEPTH}, partial[] = {1, 2, 1, 1}, busy[] = {-EAGAIN, 0, -EBUSY, 3, -EAGAIN, -EINTR};
    script(partial, 4, NULL, 0, -1);
    with_answers(0, AIO_DONE);
    script(busy, 6, NULL, 0, -1);
    with_answers(1, AIO_DONE);
    static const int long_busy[] = {-EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN, -EAGAIN};
    script(long_busy, 8, NULL, 0, -1);
    with_answers(1, AIO_DONE);

    static const int bad_first[] = {-EBADF};
    script(bad_first, 1, NULL, 0, -1);
    aio_ticket_info info = with_answers(0, AIO_FAILED);
    CHECK_EQUAL(info.error, -EBADF);
    CHECK_EQUAL(info.offset, 0);

    for (int write = 0; write < 2; write++) {
        SCRIPT(BLOCK, none, 1000, 96, 1, 2999); /* short, four times over */
        CHECK_EQUAL(with_answers(write, AIO_DONE).moved, 4 * BLOCK);
        SCRIPT(BLOCK, none, -EINTR, -EAGAIN, -EINTR);
        with_answers(write, AIO_DONE);
        SCRIPT(BLOCK, none, 2 * BLOCK); /* more than asked for */
        CHECK_EQUAL(with_answers(write, AIO_FAILED).error, -EOVERFLOW);
        SCRIPT(BLOCK, none, 512, -ENOSPC);
        info = with_answers(write, AIO_FAILED);
        CHECK_EQUAL(info.error, -ENOSPC);
        CHECK_EQUAL(info.offset, BLOCK + 512);
        CHECK_EQUAL(info.moved, 3 * BLOCK + 512);
        CHECK(!info.short_transfer);
    }
    SCRIPT(0, none, -EIO, -EIO, -EIO); /* a read is tried again, three times */
    with_answers(0, AIO_DONE);
    SCRIPT(0, none, -EIO, -EIO, -EIO, -EIO);
    CHECK_EQUAL(with_answers(0, AIO_FAILED).error, -EIO);
    SCRIPT(0, none, -EIO); /* a write is not */
    CHECK_EQUAL(with_answers(1, AIO_FAILED).error, -EIO);
    SCRIPT(0, none, 100, 0); /* the end of the file */
    info = with_answers(0, AIO_FAILED);
    CHECK(info.error == -ENODATA && info.short_transfer);
    SCRIPT(0, none, 0, 0, 0); /* a write that moves nothing is tried again, a little */
    with_answers(1, AIO_DONE);
    SCRIPT(0, none, 0, 0, 0, 0);
    CHECK_EQUAL(with_answers(1, AIO_FAILED).error, -ENODATA);
    SCRIPT(-1, none, -EPERM, -EACCES, -ENXIO, -EIO); /* the first error is the one that is told */
    mock.result_offset = 0;
    CHECK_EQUAL(with_answers(0, AIO_FAILED).error, -EPERM);
    mock_reset();
    mock.reap_error = -EINTR;
    with_answers(0, AIO_DONE);
    mock_reset();
    mock.reap_error = -EINVAL;
    with_answers(0, AIO_DONE);
}

/* ---- order ---------------------------------------------------------------------------------- */

static void test_order(void) {
    mock_reset();
    aio_ring *ring = open_mock(options(1));
    unsigned char *memory = page_memory(64 * BLOCK);
    CHECK_EQUAL(aio_ring_hold(ring, 1), 0);
    aio_ticket *low = start(ring, 0, 0, memory, 2 * BLOCK, 0);
    aio_ticket *normal = start(ring, 0, 2 * BLOCK, memory + 2 * BLOCK, 2 * BLOCK, 1);
    aio_ticket *write = start(ring, 1, 4 * BLOCK, memory + 4 * BLOCK, BLOCK, 1);
    aio_ticket *high = start(ring, 0, 5 * BLOCK, memory + 5 * BLOCK, BLOCK, 2);
    aio_ticket *awaited = start(ring, 0, 6 * BLOCK, memory + 6 * BLOCK, 2 * BLOCK, 0);
    CHECK_EQUAL(aio_wait(awaited, 0), AIO_PENDING); /* promotes it above all */
    CHECK_EQUAL(aio_wait(awaited, 0), AIO_PENDING);
    CHECK_EQUAL(aio_ring_hold(ring, 0), 0);
    CHECK_EQUAL(end(awaited, AIO_DONE).order, 1);
    end(high, AIO_DONE); /* waited for in their own order: waiting promotes */
    end(normal, AIO_DONE);
    end(write, AIO_DONE);
    end(low, AIO_DONE);
    static const uint64_t expected[] = {6, 7, 5, 2, 3, 4, 0, 1};
    for (int k = 0; k < 8; k++) CHECK_EQUAL(mock.order[k], expected[k] * BLOCK);
    CHECK_EQUAL(mock.ordered, 8);
    CHECK_EQUAL(mock.most_kept, 1);

    /* A write that nobody waits for is passed by a bounded number of reads. */
    mock.ordered = 0;
    CHECK_EQUAL(aio_ring_hold(ring, 1), 0);
    write = start(ring, 1, 63 * BLOCK, memory + 63 * BLOCK, BLOCK, 0);
    aio_ticket *later = start(ring, 1, 62 * BLOCK, memory + 62 * BLOCK, BLOCK, 1);
    aio_ticket *reads = start(ring, 0, 0, memory, 40 * BLOCK, 2);
    CHECK_EQUAL(aio_ring_hold(ring, 0), 0);
    end(reads, AIO_DONE);
    end(write, AIO_DONE);
    end(later, AIO_DONE);
    CHECK_EQUAL(mock.order[AIO_WRITE_STARVATION], 63 * BLOCK);
    CHECK_EQUAL(mock.order[2 * AIO_WRITE_STARVATION + 1], 62 * BLOCK);
    /* Closing outweighs a hold. */
    CHECK_EQUAL(aio_ring_hold(ring, 1), 0);
    aio_ticket *held = start(ring, 0, 0, memory, BLOCK, 1);
    CHECK_EQUAL(close_ring(ring), 0);
    end(held, AIO_DONE);

    /* The depth holds, and odd pieces of a file that is not direct stay whole. */
    mock_reset();
    ring = open_mock(options(5));
    aio_ticket *odd = start(ring, 0, 1, memory + 7, 50 * BLOCK, 1);
    CHECK_EQUAL(end(odd, AIO_DONE).moved, 50 * BLOCK);
    CHECK(memcmp(memory + 7, mock.device + 1, 50 * BLOCK) == 0);
    CHECK_EQUAL(mock.ordered, 50);
    CHECK(mock.most_kept <= 5);
    CHECK_EQUAL(close_ring(ring), 0);
    free(memory);
}

/* ---- deadlines ------------------------------------------------------------------------------ */

static void test_deadline(int all_stall) {
    mock_reset();
    aio_options o = options(2);
    o.deadline_ns = 60000000;
    aio_ring *ring = open_mock(o);
    unsigned char *memory = page_memory(16 * BLOCK);
    if (all_stall) {
        mock.stall = 1;
    } else {
        mock.stall_offset = BLOCK;
    }
    aio_ticket *stalled = start(ring, 0, 0, memory, 12 * BLOCK, 1);
    aio_ticket_info info;
    do {
        CHECK_EQUAL(aio_ticket_describe(stalled, &info), 0);
    } while (info.order == 0);
    aio_ticket *queued = start(ring, 1, 12 * BLOCK, memory + 12 * BLOCK, BLOCK, 0);
    double began = now();
    if (all_stall) {
        CHECK_EQUAL(wait_for(queued), AIO_FAILED);
        CHECK_EQUAL(aio_ticket_describe(queued, &info), 0);
        CHECK_EQUAL(info.error, -ESHUTDOWN);
    } else {
        wait_for(queued);
    }
    CHECK_EQUAL(wait_for(stalled), AIO_EXPIRED);
    CHECK_EQUAL(aio_ticket_describe(stalled, &info), 0);
    CHECK_EQUAL(info.error, -ETIMEDOUT);
    CHECK(now() - began < 2);
    aio_ticket *late;
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, (uintptr_t)memory, BLOCK, 1, &late), -ESHUTDOWN);
    aio_stats stats;
    CHECK_EQUAL(aio_ring_stats(ring, &stats), 0);
    CHECK_EQUAL(stats.failed, 1);
    CHECK_EQUAL(stats.expired_tickets, 1);
    aio_ticket_release(queued);
    if (all_stall) { /* closed with blocks in the kernel: they and the ring stay, for good */
        leaked[leaked_count++] = ring;
        leaked[leaked_count++] = stalled;
        CHECK_EQUAL(close_ring(ring), -ETIMEDOUT);
        leaked[leaked_count++] = memory;
    } else { /* the device answers in the end: the buffer is still quarantined, all else freed */
        mock_release();
        do {
            CHECK_EQUAL(aio_ring_stats(ring, &stats), 0);
            usleep(1000);
        } while (stats.blocks_in_flight != 0);
        CHECK_EQUAL(aio_poll(stalled), AIO_EXPIRED);
        aio_ticket_release(stalled);
        CHECK_EQUAL(close_ring(ring), -ETIMEDOUT);
        free(memory);
    }
}

/* The thread sits in a submit that does not return: those who wait see the deadline pass. */
static void test_stuck_submit(void) {
    mock_reset();
    aio_options o = options(2);
    o.deadline_ns = 60000000;
    aio_ring *ring = open_mock(o);
    unsigned char *memory = page_memory(4 * BLOCK);
    __atomic_store_n(&mock.block_submit, 1, __ATOMIC_SEQ_CST);
    aio_ticket *ticket = start(ring, 0, 0, memory, 4 * BLOCK, 1);
    CHECK_EQUAL(wait_for(ticket), AIO_EXPIRED);
    CHECK_EQUAL(aio_ring_shutdown(ring, 50), -EINPROGRESS);
    __atomic_store_n(&mock.block_submit, 0, __ATOMIC_SEQ_CST);
    aio_stats stats;
    do {
        CHECK_EQUAL(aio_ring_stats(ring, &stats), 0);
    } while (stats.blocks_in_flight != 0 && aio_ring_shutdown(ring, 20) == -EINPROGRESS);
    leaked[leaked_count++] = ring; /* the thread may have ended before it reaped */
    leaked[leaked_count++] = ticket;
    leaked[leaked_count++] = memory;
    CHECK_EQUAL(close_ring(ring), -ETIMEDOUT);
}

static void test_abandon(void) {
    mock_reset();
    mock.stall = 1;
    aio_ring *ring = open_mock(options(1));
    unsigned char *memory = page_memory(4 * BLOCK);
    aio_ticket *sent = start(ring, 0, 0, memory, BLOCK, 1);
    aio_ticket *queued = start(ring, 0, BLOCK, memory + BLOCK, BLOCK, 1);
    aio_ticket_info info;
    do {
        CHECK_EQUAL(aio_ticket_describe(sent, &info), 0);
    } while (info.order == 0);
    CHECK_EQUAL(aio_ring_shutdown(ring, 10), -EINPROGRESS);
    CHECK_EQUAL(aio_ring_abandon(ring), 0);
    CHECK_EQUAL(wait_for(sent), AIO_EXPIRED);
    CHECK_EQUAL(end(queued, AIO_FAILED).error, -ESHUTDOWN);
    mock_release();
    leaked[leaked_count++] = ring;
    leaked[leaked_count++] = sent;
    CHECK_EQUAL(close_ring(ring), -ETIMEDOUT);
    free(memory); /* the mock is no kernel: nothing writes to it any more */
}

/* ---- fork, arguments, lifetime -------------------------------------------------------------- */

static int in_child(aio_ring *ring, aio_ticket *ticket) {
    aio_stats stats;
    aio_ticket_info info;
    aio_ticket *other;
    char byte = 0;
    int ok = aio_submit(ring, 0, 1, 1, 0, (uintptr_t)&byte, 1, 1, &other) == -ECHILD;
    ok &= aio_wait(ticket, 100) == -ECHILD && aio_poll(ticket) == -ECHILD;
    ok &= aio_ticket_describe(ticket, &info) == -ECHILD && aio_ring_stats(ring, &stats) == -ECHILD;
    ok &= aio_ring_shutdown(ring, 100) == -ECHILD && aio_ring_abandon(ring) == -ECHILD;
    ok &= aio_ring_hold(ring, 1) == -ECHILD && aio_ring_buffer(ring, 4096, 4096, 1) == -ECHILD;
    ok &= aio_ring_file(ring, 0, 1) == -ECHILD;
    aio_ring_forked(ring);
    aio_ring_forked(ring);
    aio_ticket_release(ticket);
    aio_ring_release(ring);
    return ok ? 0 : 1;
}

/* Writes the coverage of a child that ends by _exit; there only in a build that measures it. */
extern void __gcov_dump(void) __attribute__((weak));

static void test_fork(const char *backend) {
    aio_options o = options(4);
    aio_ring *ring;
    CHECK_EQUAL(aio_ring_open(backend, &o, &ring), 0);
    unsigned char *memory = page_memory(BLOCK);
    CHECK_EQUAL(aio_ring_hold(ring, 1), 0);
    aio_ticket *ticket = start(ring, 0, 0, memory, BLOCK, 1);
    aio_ring_forked(ring); /* not a child: nothing happens */
    pid_t child = fork();
    if (child == 0) {
        int status = in_child(ring, ticket);
        if (__gcov_dump) __gcov_dump();
        _exit(status);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(aio_ring_hold(ring, 0), 0);
    end(ticket, AIO_FAILED); /* descriptor 1000 is not open */
    CHECK_EQUAL(close_ring(ring), 0);
    free(memory);
}

static void test_arguments(void) {
    mock_reset();
    aio_ring *ring;
    aio_options good = options(4), bad[8];
    for (int k = 0; k < 8; k++) bad[k] = good;
    bad[0].block_bytes = 0;
    bad[1].block_bytes = 1000;
    bad[2].block_bytes = 2u << 30;
    bad[3].queue_depth = 0;
    bad[4].queue_depth = AIO_MAX_DEPTH + 1;
    bad[5].threads = 0;
    bad[6].threads = AIO_MAX_DEPTH + 1;
    bad[7].deadline_ns = 0;
    for (int k = 0; k < 8; k++) CHECK_EQUAL(aio_ring_open("threads", &bad[k], &ring), -EINVAL);
    CHECK_EQUAL(aio_ring_open("none", &good, &ring), -ENOENT);
    ring = open_mock(good);
    CHECK_EQUAL(aio_ring_buffer(ring, 4096, 4096, 1), 0);
    CHECK_EQUAL(aio_ring_file(ring, 0, 1), 0);
    aio_ticket *ticket;
    char byte = 0;
    const uintptr_t at = (uintptr_t)&byte;
    CHECK_EQUAL(aio_submit(ring, 0, -1, 1, 0, at, 1, 1, &ticket), -EBADF);
    CHECK_EQUAL(aio_submit(ring, 0, 1, -1, 0, at, 1, 1, &ticket), -EBADF);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, at, 1, -1, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, at, 1, AIO_PRIORITIES, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, UINT64_MAX, at, 1, 1, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, INT64_MAX, at, 1, 1, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, UINTPTR_MAX, 10, 1, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, 0, 1, 1, &ticket), -EINVAL);
    CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, 0, 0, 1, &ticket), 0);
    end(ticket, AIO_DONE); /* nothing to move: complete at once */
    ticket = start(ring, 0, 0, &byte, 1, 1); /* never waited for */
    aio_ticket_release(ticket);
    ticket = start(ring, 0, 0, &byte, 1, 1); /* outlives the ring's handle */
    aio_ring_release(ring);
    end(ticket, AIO_DONE);
    uint32_t memory_align = 0, offset_align = 0;
    CHECK(aio_filesystem(0) != 0);
    CHECK_EQUAL(aio_filesystem(-1), -EBADF);
    CHECK(aio_dio_align(-1, &memory_align, &offset_align) < 0);
}

int main(int count, char **arguments) {
    static const char *const backends[] = {"libaio", "syscall", "uring", "threads"};
    /* QEMU, as it runs a program of another processor, has neither Linux AIO nor io_uring, and lets
     * MADV_WIPEONFORK pass without doing it. */
    const int emulated = count == 3 && strcmp(arguments[2], "emulated") == 0;
    CHECK(count == 2 || emulated);
    if (emulated) CHECK_EQUAL(aio_crc32c_force_table(0), 1); /* it has the instruction */
    test_crc();
    test_arguments();
    test_answers();
    test_order();
    for (int k = emulated ? 3 : 0; k < 4; k++) {
        test_files(arguments[1], backends[k], 0, 1);
        test_files(arguments[1], backends[k], 0, 0);
        test_files(arguments[1], backends[k], 1234567, 1);
        if (!emulated) test_fork(backends[k]);
    }
    test_deadline(0);
    test_deadline(1);
    test_stuck_submit();
    test_abandon();
    return 0;
}
