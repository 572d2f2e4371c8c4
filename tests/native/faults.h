/* System calls that fail when a test says so: linked with -Wl,--wrap=NAME for each. */
#ifndef FAULTS_H
#define FAULTS_H

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* `after` calls pass, then `times` calls fail with `error`. */
typedef struct {
    int after, times, error;
    long only; /* syscall: its number, else 0 */
} fault;

static fault fail_calloc, fail_mmap, fail_madvise, fail_dlopen, fail_dlsym, fail_syscall, fail_pthread_create,
    fail_epoll_create1, fail_eventfd, fail_epoll_ctl, fail_statx;

static int hit(fault *f) {
    if (__atomic_load_n(&f->times, __ATOMIC_SEQ_CST) <= 0) return 0;
    if (__atomic_fetch_sub(&f->after, 1, __ATOMIC_SEQ_CST) > 0) return 0;
    if (__atomic_fetch_sub(&f->times, 1, __ATOMIC_SEQ_CST) <= 0) return 0;
    errno = f->error;
    return 1;
}

#define WRAP(type, name, failed, parameters, arguments) \
    type __real_##name parameters;                      \
    type __wrap_##name parameters;                      \
    type __wrap_##name parameters {                     \
        return hit(&fail_##name) ? failed : __real_##name arguments; \
    }

WRAP(void *, calloc, NULL, (size_t n, size_t size), (n, size))
WRAP(void *, mmap, MAP_FAILED, (void *at, size_t n, int protection, int flags, int fd, off_t offset),
     (at, n, protection, flags, fd, offset))
WRAP(int, madvise, -1, (void *at, size_t n, int advice), (at, n, advice))
WRAP(void *, dlopen, NULL, (const char *name, int flags), (name, flags))
WRAP(void *, dlsym, NULL, (void *library, const char *name), (library, name))
WRAP(int, pthread_create, fail_pthread_create.error,
     (pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (thread, attributes, run, argument))
WRAP(int, epoll_create1, -1, (int flags), (flags))
WRAP(int, eventfd, -1, (unsigned initial, int flags), (initial, flags))
WRAP(int, epoll_ctl, -1, (int epoll, int operation, int fd, struct epoll_event *event),
     (epoll, operation, fd, event))
struct statx;
WRAP(int, statx, -1, (int fd, const char *path, int flags, unsigned mask, struct statx *out),
     (fd, path, flags, mask, out))

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (int k = 0; k < 6; k++) a[k] = va_arg(list, long);
    va_end(list);
    if (number == fail_syscall.only && hit(&fail_syscall)) return -1;
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#endif
