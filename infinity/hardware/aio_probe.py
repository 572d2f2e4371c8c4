"""Which I/O backend a directory gets, and why.

The order of `auto`, each step with its reason in the answer:

1. ``threads`` if the directory has no O_DIRECT, or a file system whose asynchronous I/O is
   synchronous (tmpfs, FUSE, network file systems): a kernel queue would only block the ring.
2. ``libaio``: the library, if it can be loaded, the calls are allowed and the kernel has contexts
   left (``aio-max-nr``).
3. ``syscall``: the same calls without the library.
4. ``uring``: io_uring, where Linux AIO is refused.
5. ``threads``: always works.

With `auto`, a backend works if it has written and read back a block in the directory; otherwise, if it can be
opened. The environment variable INFINITY_AIO selects a backend and overrides the argument.
"""

from __future__ import annotations

import difflib
import errno as numbers
import logging
import mmap
import os
import threading
from typing import Any, Final

from infinity.core.errors import BackendError, DirectoryError
from infinity.core.system_errors import THREAD_LIMITS

from .aio_native import ALIGNMENT, ffi, lib
from .direct_file import DirectFile, dio_offset_align
from .probe import make_direct, nameless_file

__all__ = ["BACKENDS", "available_backends", "choose_backend"]

#: In the order in which ``auto`` tries them.
BACKENDS: Final = ("libaio", "syscall", "uring", "threads")
ENVIRONMENT: Final = "INFINITY_AIO"
#: f_type of statfs(2) of file systems whose asynchronous direct I/O is synchronous, or none.
SYNCHRONOUS: Final = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x2FC12FC1: "ZFS",
}
_REASONS: Final = {
    numbers.ENOSYS: "the kernel does not have it, or seccomp refuses it",
    numbers.EPERM: "refused (seccomp, or kernel.io_uring_disabled)",
    numbers.EACCES: "refused (seccomp or a security module)",
    numbers.EAGAIN: "no contexts left: fs.aio-nr has reached fs.aio-max-nr",
    numbers.ENOMEM: "not enough memory, or locked memory (ulimit -l)",
    numbers.ELIBACC: "libaio.so.1 is not installed",
    numbers.ELIBBAD: "the libaio.so.1 found lacks a call",
    numbers.EMFILE: "no descriptors left (ulimit -n)",
    numbers.EOPNOTSUPP: "this kernel's version of it is too old",
    numbers.ENOENT: "not built in",
}
_log = logging.getLogger("infinity.aio")
_told: set[tuple[str, str, str | None]] = set()


def ring_options(block_bytes: int, queue_depth: int, threads: int, deadline: float, delay_seed: int) -> Any:
    """Return a C `aio_options`."""
    return ffi.new(
        "aio_options *",
        {
            "block_bytes": block_bytes,
            "queue_depth": queue_depth,
            "threads": threads,
            "deadline_ns": min(int(deadline * 1e9), (1 << 63) - 1),
            "delay_seed": delay_seed,
        },
    )


def _scratch(path: str) -> DirectFile:
    """Return a nameless file of one block in the directory, or raise DirectoryError."""
    try:
        fd = nameless_file(path)
        try:
            make_direct(fd)
            os.ftruncate(fd, ALIGNMENT)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise DirectoryError(
            f"cannot create a file in {path}",
            errno=error.errno,
            path=path,
            expected="a writable directory",
            found=error.strerror,
            cure="name an existing directory that this user may write to",
        ) from error
    return DirectFile(path, fd, owned=True)  # from its first line on it is the one that closes


def _describe(error: int) -> str:
    return _REASONS.get(-error, os.strerror(-error))


def _starts_threads() -> bool:
    """Return whether a thread can be started: then a ring lacks something else."""
    thread = threading.Thread(target=bool)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def _try(backend: str, file: DirectFile | None) -> str:
    """Return "ok", or why this backend does not work (in this file's directory)."""
    out = ffi.new("aio_ring **")
    error = lib.aio_ring_open(backend.encode(), ring_options(ALIGNMENT, 2, 1, 10.0, 0), out)
    if error == -numbers.EAGAIN and (backend in ("uring", "threads") or not _starts_threads()):
        return "no thread can be started (ulimit -v, ulimit -u)"
    if error < 0:
        return _describe(error)
    ring = ffi.gc(out[0], lib.aio_ring_release)
    try:
        return "ok" if file is None else _write_and_read(ring, file)
    finally:
        while lib.aio_ring_shutdown(ring, 100) == -numbers.EINPROGRESS:
            pass


def _write_and_read(ring: Any, file: DirectFile) -> str:
    memory = mmap.mmap(-1, 2 * ALIGNMENT)  # goes with the last that refers to it, also in an interrupt
    pattern = os.urandom(ALIGNMENT)
    memory[:ALIGNMENT] = pattern
    view = ffi.from_buffer(memory)
    address = int(ffi.cast("uintptr_t", view))
    verdict = "ok"
    for write in (1, 0):
        out = ffi.new("aio_ticket **")
        at = address + (0 if write else ALIGNMENT)
        error = lib.aio_submit(ring, write, file.fd, file.plain_fd, 0, at, ALIGNMENT, 1, out)
        if error < 0:
            verdict = _describe(error)
            break
        ticket = ffi.gc(out[0], lib.aio_ticket_release)
        while (state := lib.aio_wait(ticket, 100)) == lib.AIO_PENDING:
            pass
        if state != lib.AIO_DONE:
            info = ffi.new("aio_ticket_info *")
            lib.aio_ticket_describe(ticket, info)
            verdict = f"a trial {'write' if write else 'read'} failed: {_describe(info.error)}"
            break
    if verdict == "ok" and memory[ALIGNMENT:] != pattern:
        verdict = "a trial block came back different"
    return verdict


def _why_not_direct(file: DirectFile) -> str | None:
    """Return why a kernel queue is of no use for this file, or None."""
    kind = SYNCHRONOUS.get(int(lib.aio_filesystem(file.fd)) & 0xFFFFFFFF)
    if kind is not None:
        return f"asynchronous I/O is synchronous on {kind}"
    if not file.direct:
        return "the file system has no O_DIRECT"
    align = dio_offset_align(file.fd)
    if align is not None and not 0 < align <= ALIGNMENT:
        return f"direct I/O needs an alignment of {align} bytes there" if align else "no O_DIRECT there"
    return None


def available_backends(path: str | None = None) -> dict[str, str]:
    """Return for each backend "ok", or the reason why it does not work (in directory `path`).

    Raises:
        DirectoryError: `path` is not a directory in which a file can be made.
    """
    if path is None:
        return {name: _try(name, None) for name in BACKENDS}
    with _scratch(path) as file:
        found = {name: _try(name, file) for name in BACKENDS}
        why_not = _why_not_direct(file)
    if why_not is not None:
        for name in ("libaio", "syscall"):
            if found[name] == "ok":
                found[name] = f"no use here: {why_not}"
    return found


def choose_backend(backend: str, path: str | None) -> tuple[str, str]:
    """Return the name of the backend for directory `path`, and the reason.

    Raises:
        BackendError: the name is unknown, or the backend that is asked for does not work here.
        DirectoryError: `path` is not a directory in which a file can be made.
    """
    forced = os.environ.get(ENVIRONMENT, "")
    wanted, by = (forced, f"{ENVIRONMENT}={forced}") if forced else (backend, f"backend={backend!r}")
    if wanted not in ("auto", *BACKENDS):
        close = difflib.get_close_matches(wanted, BACKENDS, n=1)
        raise BackendError(
            f"unknown I/O backend ({by})",
            expected=", ".join(("auto", *BACKENDS)),
            found=repr(wanted),
            cure=f"did you mean {close[0]!r}?" if close else "auto",
        )
    if wanted != "auto":
        verdict = _try(wanted, None)
        if verdict != "ok":
            raise BackendError(
                f"the I/O backend {wanted!r} does not work here ({by})",
                expected="a backend that works",
                found=verdict,
                cure="use auto, which takes the best backend that works",
            )
        chosen, reason = wanted, f"asked for by {by}"
    else:
        chosen, reason = _choose_auto(path)
    if (chosen, reason, path) not in _told:
        _told.add((chosen, reason, path))
        _log.log(
            logging.INFO if chosen == BACKENDS[0] or wanted != "auto" else logging.WARNING,
            "%s: I/O backend %s (%s)",
            path or "no directory",
            chosen,
            reason,
        )
    return chosen, reason


def _choose_auto(path: str | None) -> tuple[str, str]:
    if path is None:
        return _first_that_works(None)
    with _scratch(path) as file:
        why_not = _why_not_direct(file)
        return ("threads", why_not) if why_not is not None else _first_that_works(file)


def _first_that_works(file: DirectFile | None) -> tuple[str, str]:
    refused: list[str] = []
    for name in BACKENDS:
        verdict = _try(name, file)
        if verdict == "ok":
            return name, "; ".join(refused) if refused else "the first choice works"
        refused.append(f"{name}: {verdict}")
    raise BackendError(
        "no I/O backend works here",
        expected="one of " + ", ".join(BACKENDS),
        found="; ".join(refused),
        cure=f"raise the limit that is named above; of threads, it is {THREAD_LIMITS}",
    )
