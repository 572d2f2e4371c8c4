/* What the system says: the time, the process id, the file system. */
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

uint64_t aio_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static pthread_once_t pid_once = PTHREAD_ONCE_INIT;
static _Atomic pid_t *pid_page;

static void map_pid_page(void) {
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    if (madvise(page, 4096, MADV_WIPEONFORK) == 0) {
        pid_page = page;
    } else {
        munmap(page, 4096);
    }
}

pid_t aio_pid(void) {
    pthread_once(&pid_once, map_pid_page);
    if (pid_page == NULL) return getpid();
    pid_t pid = atomic_load_explicit(pid_page, memory_order_relaxed);
    if (pid == 0) { /* the kernel wiped it: this is the first look in a new process */
        pid = getpid();
        atomic_store_explicit(pid_page, pid, memory_order_relaxed);
    }
    return pid;
}

int64_t aio_filesystem(int fd) {
    struct statfs status;
    return fstatfs(fd, &status) < 0 ? -errno : (int64_t)status.f_type;
}

int aio_dio_align(int fd, uint32_t *memory, uint32_t *offset) {
#ifdef STATX_DIOALIGN
    struct statx status;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) < 0) return -errno;
    if (!(status.stx_mask & STATX_DIOALIGN)) return -ENOTSUP;
    *memory = status.stx_dio_mem_align;
    *offset = status.stx_dio_offset_align;
    return 0;
#else
    (void)fd, (void)memory, (void)offset;
    return -ENOTSUP;
#endif
}
