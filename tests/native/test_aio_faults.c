/* The I/O engine when the system refuses: memory, threads, descriptors, libraries, calls. Every
 * refusal is an error of the call that met it, or is made up for; nothing leaks, nothing hangs.
 * Usage: test_aio_faults DIRECTORY. Ends with 0 and says nothing, or with 1. */
#include "aio.h"
#include "check.h"
#include "faults.h"
#include "mock.h"

#include <fcntl.h>
#include <sys/wait.h>

#define BLOCK 4096u

static const char *const backends[] = {"libaio", "syscall", "uring", "threads"};
static const aio_options options = {
    .block_bytes = BLOCK, .queue_depth = 4, .threads = 2, .deadline_ns = 20000000000u};

static void set(fault *f, int after, int times, int error, long only) {
    f->error = error;
    f->only = only;
    __atomic_store_n(&f->after, after, __ATOMIC_SEQ_CST);
    __atomic_store_n(&f->times, times, __ATOMIC_SEQ_CST);
}

static void clear(fault *f) { __atomic_store_n(&f->times, 0, __ATOMIC_SEQ_CST); }

static void close_ring(aio_ring *ring) {
    while (aio_ring_shutdown(ring, 100) == -EINPROGRESS) {
    }
    aio_ring_release(ring);
}

static int wait_for(aio_ticket *ticket) {
    int state;
    aio_ticket_info info;
    while ((state = aio_wait(ticket, 100)) == AIO_PENDING) {
    }
    CHECK_EQUAL(aio_ticket_describe(ticket, &info), 0);
    aio_ticket_release(ticket);
    return state == AIO_DONE ? 0 : info.error;
}

static int move(aio_ring *ring, int write, int fd, int plain_fd, void *memory) {
    aio_ticket *ticket;
    int error = aio_submit(ring, write, fd, plain_fd, 0, (uintptr_t)memory, BLOCK, 1, &ticket);
    return error != 0 ? error : wait_for(ticket);
}

/* Opening fails with `error` at the first, second, … call, until it has made all of them. */
static int each_refusal(const char *backend, fault *f, int times, int error, long only, int expected) {
    int refused = 0;
    for (int after = 0;; after++) {
        aio_ring *ring;
        set(f, after, times, error, only);
        int result = aio_ring_open(backend, &options, &ring);
        const int met = __atomic_load_n(&f->times, __ATOMIC_SEQ_CST) < times;
        clear(f);
        if (result == 0) {
            close_ring(ring);
            if (!met) return refused;
        } else {
            CHECK_EQUAL(result, expected);
            refused++;
        }
    }
}

static void test_opening(void) {
    for (int k = 0; k < 4; k++) {
        CHECK(each_refusal(backends[k], &fail_calloc, 1, ENOMEM, 0, -ENOMEM) >= 6);
        CHECK_EQUAL(each_refusal(backends[k], &fail_epoll_create1, 1, EMFILE, 0, -EMFILE), 1);
        CHECK_EQUAL(each_refusal(backends[k], &fail_eventfd, 1, EMFILE, 0, -EMFILE), 2);
        CHECK(each_refusal(backends[k], &fail_epoll_ctl, 1, ENOSPC, 0, -ENOSPC) >= 2);
        CHECK(each_refusal(backends[k], &fail_pthread_create, 1, EAGAIN, 0, -EAGAIN) >= 1);
    }
    /* All of the workers refused, not only one of them. */
    CHECK(each_refusal("threads", &fail_pthread_create, 2, EAGAIN, 0, -EAGAIN) >= 1);
    CHECK_EQUAL(each_refusal("libaio", &fail_dlopen, 3, ENOENT, 0, -ELIBACC), 1);
    CHECK_EQUAL(each_refusal("libaio", &fail_dlsym, 1, ENOENT, 0, -ELIBBAD), 4);
    CHECK_EQUAL(each_refusal("syscall", &fail_syscall, 1, EAGAIN, SYS_io_setup, -EAGAIN), 1);
    CHECK_EQUAL(each_refusal("uring", &fail_syscall, 1, EPERM, SYS_io_uring_setup, -EPERM), 1);
    /* An older kernel knows fewer flags; one older still, none of the tables. */
    CHECK_EQUAL(each_refusal("uring", &fail_syscall, 1, EINVAL, SYS_io_uring_setup, 0), 0);
    CHECK_EQUAL(each_refusal("uring", &fail_syscall, 2, EINVAL, SYS_io_uring_setup, -EINVAL), 1);
    CHECK_EQUAL(each_refusal("uring", &fail_syscall, 2, EINVAL, SYS_io_uring_register, 0), 0);
    CHECK(each_refusal("uring", &fail_mmap, 1, ENOMEM, 0, -ENOMEM) >= 2);
}

static void test_moving(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/aio-faults", directory);
    const int fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    const int plain_fd = open(path, O_RDWR | O_CLOEXEC);
    void *memory = aligned_alloc(BLOCK, BLOCK);
    CHECK(fd >= 0 && plain_fd >= 0 && memory != NULL);
    memset(memory, 7, BLOCK);
    aio_ring *ring;

    /* Busy for a while, then not; an error that is not about being busy; results late. */
    CHECK_EQUAL(aio_ring_open("syscall", &options, &ring), 0);
    CHECK_EQUAL(move(ring, 1, fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 3, EAGAIN, SYS_io_submit);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 2, EINTR, SYS_io_submit);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 1, EBADF, SYS_io_submit);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), -EBADF);
    set(&fail_syscall, 0, 1, EINTR, SYS_io_getevents);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 1, EINVAL, SYS_io_getevents);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    set(&fail_calloc, 0, 1, ENOMEM, 0);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), -ENOMEM);
    /* The side lane cannot be opened: its ticket says so, and the next one tries again. */
    set(&fail_calloc, 1, 1, ENOMEM, 0);
    CHECK_EQUAL(move(ring, 0, plain_fd, plain_fd, memory), -ENOMEM);
    set(&fail_pthread_create, 0, 2, EAGAIN, 0);
    CHECK_EQUAL(move(ring, 0, plain_fd, plain_fd, memory), -EAGAIN);
    clear(&fail_pthread_create);
    CHECK_EQUAL(move(ring, 0, plain_fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 1, EINVAL, SYS_io_destroy);
    close_ring(ring);
    clear(&fail_syscall);

    CHECK_EQUAL(aio_ring_open("uring", &options, &ring), 0);
    set(&fail_syscall, 0, 1, ENOMEM, SYS_io_uring_register);
    CHECK_EQUAL(aio_ring_buffer(ring, (uintptr_t)memory, BLOCK, 1), 0);
    set(&fail_syscall, 0, 1, EBADF, SYS_io_uring_register);
    CHECK_EQUAL(aio_ring_file(ring, fd, 1), 0);
    set(&fail_syscall, 0, 2, EAGAIN, SYS_io_uring_enter);
    CHECK_EQUAL(move(ring, 1, fd, plain_fd, memory), 0);
    CHECK_EQUAL(aio_ring_buffer(ring, (uintptr_t)memory, BLOCK, 1), 1);
    CHECK_EQUAL(aio_ring_file(ring, fd, 1), 1);
    CHECK_EQUAL(move(ring, 1, fd, plain_fd, memory), 0);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    /* Even where the kernel keeps them, they are not used again. */
    set(&fail_syscall, 0, 2, EBADF, SYS_io_uring_register);
    CHECK_EQUAL(aio_ring_buffer(ring, (uintptr_t)memory, BLOCK, 0), 0);
    CHECK_EQUAL(aio_ring_file(ring, fd, 0), 0);
    CHECK_EQUAL(aio_ring_file(ring, fd, 0), 0);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    set(&fail_syscall, 0, 1, EPERM, SYS_io_uring_enter);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), -EPERM);
    for (int k = 0; k < 70; k++) aio_ring_file(ring, k, 1); /* more than the table holds */
    for (uintptr_t k = 0; k < 260; k++) aio_ring_buffer(ring, (uintptr_t)memory, BLOCK, 1);
    CHECK_EQUAL(aio_ring_buffer(ring, (uintptr_t)memory, BLOCK, 1), 0);
    CHECK_EQUAL(move(ring, 0, fd, plain_fd, memory), 0);
    close_ring(ring);

    uint32_t alignment[2];
    set(&fail_statx, 0, 1, ENOSYS, 0);
    CHECK_EQUAL(aio_dio_align(fd, &alignment[0], &alignment[1]), -ENOSYS);
    int known = aio_dio_align(fd, &alignment[0], &alignment[1]); /* since Linux 6.1 */
    CHECK(known == -ENOTSUP || (known == 0 && alignment[1] <= BLOCK));
    int pipes[2];
    CHECK_EQUAL(pipe(pipes), 0);
    CHECK_EQUAL(aio_dio_align(pipes[0], &alignment[0], &alignment[1]), -ENOTSUP);
    close(pipes[0]);
    close(pipes[1]);
    free(memory);
    close(fd);
    close(plain_fd);
    unlink(path);
}

/* Without the page that a fork wipes, every entry asks the kernel for the process id. */
static void test_process_id(fault *f) {
    pid_t child = fork();
    if (child == 0) {
        aio_ring *ring;
        set(f, 0, 1, ENOMEM, 0);
        mock_reset();
        CHECK_EQUAL(aio_ring_open_with(&mock_backend, &options, &ring), 0);
        clear(f);
        char byte = 0;
        aio_ticket *ticket;
        CHECK_EQUAL(aio_submit(ring, 0, 1, 1, 0, (uintptr_t)&byte, 1, 1, &ticket), 0);
        CHECK_EQUAL(wait_for(ticket), 0);
        close_ring(ring);
        exit(0); /* not _exit: coverage is written by exit */
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    test_process_id(&fail_mmap);
    test_process_id(&fail_madvise);
    test_opening();
    test_moving(arguments[1]);
    return 0;
}
