/* Linux AIO: by libaio, bound with dlopen(3) so that no header is needed to build, or the same
 * four calls directly. The structures are the kernel's own (linux/aio_abi.h); libaio's are equal
 * to them on every 64-bit little-endian machine. */
#include "aio.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int (*setup)(int depth, aio_context_t *context);
    int (*destroy)(aio_context_t context);
    int (*submit)(aio_context_t context, long count, struct iocb **blocks);
    int (*getevents)(aio_context_t context, long least, long most, struct io_event *events,
                     struct timespec *timeout);
} aio_calls;

static int call_setup(int depth, aio_context_t *context) {
    return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

static int call_destroy(aio_context_t context) { return syscall(SYS_io_destroy, context) < 0 ? -errno : 0; }

static int call_submit(aio_context_t context, long count, struct iocb **blocks) {
    long n = syscall(SYS_io_submit, context, count, blocks);
    return n < 0 ? -errno : (int)n;
}

static int call_getevents(aio_context_t context, long least, long most, struct io_event *events,
                          struct timespec *timeout) {
    long n = syscall(SYS_io_getevents, context, least, most, events, timeout);
    return n < 0 ? -errno : (int)n;
}

static const aio_calls direct_calls = {call_setup, call_destroy, call_submit, call_getevents};

typedef struct {
    aio_calls calls;
    void *library;
    aio_context_t context;
    int completion_fd;
    uint32_t depth;
    struct iocb **list;
    struct io_event *events;
    struct iocb blocks[]; /* one per slot */
} state_libaio;

/* A function pointer from dlsym(3) without the cast that ISO C does not define. */
static int bind_call(void *library, const char *name, void *pointer, size_t size) {
    void *found = dlsym(library, name);
    if (found == NULL) return -ELIBBAD;
    memcpy(pointer, &found, size);
    return 0;
}

static int bind_library(state_libaio *s) {
    /* libaio.so.1t64 is Debian's name for it since 2024. */
    static const char *const names[] = {"libaio.so.1", "libaio.so.1t64", "libaio.so"};
    for (size_t k = 0; k < sizeof names / sizeof *names && s->library == NULL; k++) {
        s->library = dlopen(names[k], RTLD_NOW | RTLD_LOCAL);
    }
    if (s->library == NULL) return -ELIBACC;
    int error = bind_call(s->library, "io_setup", &s->calls.setup, sizeof s->calls.setup);
    if (error == 0) error = bind_call(s->library, "io_destroy", &s->calls.destroy, sizeof s->calls.destroy);
    if (error == 0) error = bind_call(s->library, "io_submit", &s->calls.submit, sizeof s->calls.submit);
    if (error == 0)
        error = bind_call(s->library, "io_getevents", &s->calls.getevents, sizeof s->calls.getevents);
    return error;
}

static void release(state_libaio *s) {
    if (s->library != NULL) dlclose(s->library);
    free(s->list);
    free(s->events);
    free(s);
}

static int open_with(const aio_calls *calls, const aio_backend_options *options, void **state) {
    state_libaio *s = calloc(1, sizeof *s + options->depth * sizeof(struct iocb));
    if (s == NULL) return -ENOMEM;
    s->depth = options->depth;
    s->completion_fd = options->completion_fd;
    s->list = calloc(s->depth, sizeof *s->list);
    s->events = calloc(s->depth, sizeof *s->events);
    int error = s->list == NULL || s->events == NULL ? -ENOMEM : 0;
    if (error == 0 && calls != NULL) s->calls = *calls;
    if (error == 0 && calls == NULL) error = bind_library(s);
    if (error == 0) error = s->calls.setup((int)s->depth, &s->context);
    if (error != 0) {
        release(s);
        return error;
    }
    *state = s;
    return 0;
}

static int libaio_open(const aio_backend_options *options, void **state, int *wake_fd) {
    (void)wake_fd;
    return open_with(NULL, options, state);
}

static int syscall_open(const aio_backend_options *options, void **state, int *wake_fd) {
    (void)wake_fd;
    return open_with(&direct_calls, options, state);
}

static int libaio_submit(void *state, aio_block *const *blocks, uint32_t count) {
    state_libaio *s = state;
    for (uint32_t k = 0; k < count; k++) {
        const aio_block *block = blocks[k];
        struct iocb *iocb = &s->blocks[block->slot];
        memset(iocb, 0, sizeof *iocb);
        iocb->aio_data = block->slot;
        iocb->aio_lio_opcode = block->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        iocb->aio_fildes = (uint32_t)block->fd;
        iocb->aio_buf = block->address;
        iocb->aio_nbytes = block->nbytes;
        iocb->aio_offset = (int64_t)block->offset;
        iocb->aio_flags = IOCB_FLAG_RESFD;
        iocb->aio_resfd = (uint32_t)s->completion_fd;
        s->list[k] = iocb;
    }
    return s->calls.submit(s->context, (long)count, s->list);
}

static int libaio_reap(void *state, aio_event *events, uint32_t count) {
    state_libaio *s = state;
    struct timespec none = {0, 0};
    int n = s->calls.getevents(s->context, 0, (long)count, s->events, &none);
    for (int k = 0; k < n; k++) {
        events[k].slot = (uint32_t)s->events[k].data;
        events[k].result = s->events[k].res;
    }
    return n;
}

static int libaio_close(void *state) {
    state_libaio *s = state;
    int error = s->calls.destroy(s->context);
    release(s);
    return error;
}

const aio_backend aio_backend_libaio = {
    .name = "libaio",
    .open = libaio_open,
    .submit = libaio_submit,
    .reap = libaio_reap,
    .close = libaio_close,
};

const aio_backend aio_backend_syscall = {
    .name = "syscall",
    .open = syscall_open,
    .submit = libaio_submit,
    .reap = libaio_reap,
    .close = libaio_close,
};
