"""The native I/O module, found or explained; the open files that rings read and write, and the tickets
of these transfers, with every error that one can end with."""

from __future__ import annotations

import enum
import errno as numbers
import fcntl
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

from infinity.core.errors import (
    BuildError,
    ClosedError,
    DeadlineError,
    DirectoryError,
    ShortTransferError,
    StorageError,
    TransferError,
)

try:
    from infinity._aio import ffi, lib
except ImportError as error:  # pragma: no cover - only without the native part
    raise BuildError(
        "the native I/O engine is missing or was built for another Python",
        expected="infinity._aio",
        found=str(error),
        cure="pip install . (or: python setup.py build_ext --inplace)",
    ) from error

__all__ = ["ALIGNMENT", "CURES", "POLL_MS", "DirectFile", "Priority", "Ticket", "ffi", "lib"]

#: What offset, length and address of a direct block are multiples of, in bytes.
ALIGNMENT: Final = int(lib.AIO_ALIGN)

_open_files: weakref.WeakSet[DirectFile] = weakref.WeakSet()


class DirectFile:
    """An open file for rings, with O_DIRECT where the file system has it.

    Transfers may have any offset, length and address: what of them is not whole aligned blocks
    goes through a second descriptor without O_DIRECT ([Note: odd heads and tails] in
    csrc/aio/ticket.c), so it is right, but slower, and passes through the page cache.

    Args:
        path: of the file; for messages, and to open the second descriptor if /proc is missing.
        fd: an open descriptor of it; stays the caller's to close, unless `owned`.
        direct: whether `fd` is O_DIRECT. Default: looked up.
        owned: whether `close` closes `fd`.

    Raises:
        DirectoryError: the file at `path` is not the one behind `fd`.
    """

    def __init__(self, path: str, fd: int, *, direct: bool | None = None, owned: bool = False) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.path = os.fspath(path)
        self.fd = fd
        self.direct = bool(flags & os.O_DIRECT) if direct is None else direct
        self.plain_fd = fd
        self._owned = owned
        self._pid = os.getpid()
        self._on_close: list[Callable[[int], object]] = []
        if self.direct:
            self.plain_fd = _reopen(self.path, fd, flags & os.O_ACCMODE)
        _open_files.add(self)

    @classmethod
    def open(cls, path: str, flags: int = os.O_RDWR, mode: int = 0o600) -> DirectFile:
        """Open `path` with `flags` and, where the file system takes it, O_DIRECT.

        Raises:
            DirectoryError: it cannot be opened; `errno` says why.
        """
        flags |= os.O_CLOEXEC
        try:
            try:
                fd = os.open(path, flags | os.O_DIRECT, mode)
            except OSError as error:
                if error.errno != numbers.EINVAL:  # this file system has no O_DIRECT
                    raise
                fd = os.open(path, flags, mode)
        except OSError as error:
            raise DirectoryError(
                f"cannot open {path}",
                errno=error.errno,
                path=path,
                found=error.strerror,
                cure="check that the path exists and that its permissions let this user in",
            ) from error
        try:
            if dio_offset_align(fd) not in (None, *(1 << k for k in range(13))):
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return cls(path, fd, owned=True)
        except BaseException:
            os.close(fd)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        self.check()
        return os.fstat(self.fd).st_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a child of the process that opened it."""
        return self.fd < 0

    def check(self) -> None:
        """Raise ClosedError if the file is closed or belongs to another process."""
        if self.fd < 0:
            raise ClosedError(
                f"{self.path} is closed"
                if self._pid == os.getpid()
                else f"{self.path} was opened before a fork",
                expected="an open file of this process",
                found="a closed one",
                cure="open it in this process",
            )

    def on_close(self, forget: Callable[[int], object]) -> None:
        """Call `forget(fd)` before the descriptor is closed."""
        self._on_close.append(forget)

    def close(self) -> None:
        """Close what this object opened. Transfers must be complete."""
        for forget in self._on_close:
            forget(self.fd)
        self._on_close = []
        _open_files.discard(self)
        self._drop(self._owned)

    def _drop(self, owned: bool) -> None:
        fd, plain_fd, self.fd, self.plain_fd = self.fd, self.plain_fd, -1, -1
        if plain_fd not in (-1, fd):
            os.close(plain_fd)
        if owned and fd >= 0:
            os.close(fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "plain_fd", -1) >= 0 and self._pid == os.getpid():
            self._drop(self._owned)

    def __repr__(self) -> str:
        return f"DirectFile({self.path!r}, fd={self.fd}, direct={self.direct})"


def dio_offset_align(fd: int) -> int | None:
    """Return the alignment in bytes of direct I/O on this file: 0 if it has none, None if the
    kernel does not say (before Linux 6.1, or no answer from the file system)."""
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    return None if lib.aio_dio_align(fd, memory, offset) < 0 else int(offset[0])


def _reopen(path: str, fd: int, access: int) -> int:
    """Return a descriptor without O_DIRECT on the file behind `fd`."""
    try:
        return os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
    except FileNotFoundError:  # no /proc; the name may have changed hands, so compare
        plain_fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW)
    ours, found = os.fstat(fd), os.fstat(plain_fd)
    if (ours.st_dev, ours.st_ino) != (found.st_dev, found.st_ino):
        os.close(plain_fd)
        raise DirectoryError(
            f"{path} is not the file that was opened",
            path=path,
            expected=f"inode {ours.st_ino}",
            found=f"inode {found.st_ino}",
            cure="do not rename files below a run's directory",
        )
    return plain_fd


def _close_in_child() -> None:
    """After a fork: close the child's copies, so that the parent's locks end with the parent."""
    for file in list(_open_files):
        file._on_close = []
        file._drop(file._owned)


os.register_at_fork(after_in_child=_close_in_child)


POLL_MS: Final = int(lib.AIO_MAX_WAIT_MS)
CURES: Final = {
    numbers.EIO: "the drive could not do it: look at dmesg and smartctl, use another drive",
    numbers.ENOSPC: "free space on that drive, or name a larger one",
    numbers.EDQUOT: "raise the quota, or name a directory without one",
    numbers.EFBIG: "raise the limit on file sizes (ulimit -f)",
    numbers.EROFS: "mount the file system for writing",
    numbers.EBADF: "keep the file open, for this direction, until its transfers are complete",
    numbers.EFAULT: "keep the buffer mapped until its transfers are complete",
    numbers.EINVAL: "INFINITY_AIO=threads shows whether direct I/O is at fault; use another file system",
    numbers.ENODATA: "the file is shorter than what was asked for, or takes no more bytes",
    numbers.ESHUTDOWN: "see the first error of this directory; its drive did not answer in time",
    numbers.ETIMEDOUT: "look at dmesg; use another drive, or raise io_deadline",
}


class Priority(enum.IntEnum):
    """Which ticket's blocks go to the kernel first; waiting for a ticket outweighs all."""

    BACKGROUND = 0
    NORMAL = 1
    URGENT = 2


class Owner(Protocol):
    """What a ticket needs of its ring."""

    deadline: float

    def foreign(self) -> ClosedError:
        """Return the error for a use after `close`, or in a fork."""
        ...


class Ticket:
    """One transfer. Its buffer belongs to the ring until `done`, and for good if `quarantined`.

    Attributes:
        nbytes: bytes to be moved.
        offset: in the file, in bytes.
        path: of the file.
    """

    __slots__ = ("__weakref__", "_handle", "_ring", "_write", "nbytes", "offset", "path")

    def __init__(self, ring: Owner, handle: Any, path: str, offset: int, nbytes: int, write: bool) -> None:
        self._ring = ring
        self._handle = handle
        self._write = write
        self.path = path
        self.offset = offset
        self.nbytes = nbytes

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
        return self._state(lib.aio_poll(self._handle)) != lib.AIO_PENDING

    @property
    def quarantined(self) -> bool:
        """Whether the deadline passed with blocks in the kernel: the buffer must never be used,
        or its memory returned, as long as the process lives."""
        return self._state(lib.aio_poll(self._handle)) == lib.AIO_EXPIRED

    @property
    def order(self) -> int:
        """Its number, from 1, in the order of submission to the kernel; 0: not submitted yet."""
        return int(self._describe().order)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds in the queue, and from the first submission to completion; NaN until then."""
        queued, started, finished = self.times
        nan = float("nan")
        return (
            (started - queued) * 1e-9 if started else nan,
            (finished - started) * 1e-9 if started and finished else nan,
        )

    @property
    def times(self) -> tuple[int, int, int]:
        """When it was queued, first given to the kernel, and complete: ns of CLOCK_MONOTONIC; 0: not yet."""
        info = self._describe()
        return int(info.queued_ns), int(info.started_ns), int(info.finished_ns)

    def wait(self, timeout: float | None = None) -> None:
        """Block until every byte is moved; its unsent blocks go to the front of the queue.

        Args:
            timeout: seconds; None: as long as it takes (its deadline bounds that).

        Raises:
            ShortTransferError: the file ended, or takes no more bytes.
            DeadlineError: it missed its deadline, and `quarantined` is true; or `timeout` passed
                first: then `done` is false and it may be waited for again.
            TransferError: the system reported an error, or the ring failed before it was sent.
            ClosedError: this process is a fork of the one that started it.
        """
        state = lib.aio_wait(self._handle, POLL_MS if timeout is None else _slice(timeout))
        if state == lib.AIO_DONE:
            return
        until = None if timeout is None else time.monotonic() + timeout
        while self._state(state) == lib.AIO_PENDING:
            left = 0.1 if until is None else until - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"the {self._name} is not complete",
                    **self._where(),
                    expected=f"{timeout} s at most",
                    found="still under way",
                    cure="wait again: the transfer goes on",
                )
            state = lib.aio_wait(self._handle, _slice(left))
        if state != lib.AIO_DONE:
            raise self._error(state)

    @property
    def _name(self) -> str:
        kind = "write" if self._write else "read"
        return f"{kind} of {self.nbytes} bytes at offset {self.offset} of {self.path}"

    def _where(self) -> dict[str, Any]:
        return {"path": self.path, "offset": self.offset, "nbytes": self.nbytes}

    def _state(self, state: int) -> int:
        if state < 0:
            raise self._ring.foreign()
        return state

    def _describe(self) -> Any:
        info = ffi.new("aio_ticket_info *")
        self._state(lib.aio_ticket_describe(self._handle, info))
        return info

    def _error(self, state: int) -> StorageError:
        info = self._describe()
        number = -int(info.error)
        kind: type[TransferError] = TransferError
        if state == lib.AIO_EXPIRED:
            kind = DeadlineError
            what = f"the {self._name} missed its deadline; the buffer is quarantined and the directory failed"
        elif number == numbers.ESHUTDOWN:
            what = f"the {self._name} was not sent: its directory has failed or was closed"
        else:
            what = f"the {self._name} failed"
            if info.short_transfer:
                kind = ShortTransferError
        name = numbers.errorcode.get(number, str(number))
        return kind(
            what,
            errno=number,
            **self._where(),
            expected=f"{self.nbytes} bytes"
            + (f" within {self._ring.deadline} s" if kind is DeadlineError else ""),
            found=f"{os.strerror(number)} ({name}) at offset {int(info.offset)}, "
            f"{int(info.moved)} bytes moved",
            cure=CURES.get(number, "look at dmesg for what the drive or file system reported"),
        )

    def __repr__(self) -> str:
        return f"<Ticket: {self._name}>"


def _slice(seconds: float) -> int:
    """Return milliseconds for one native wait: at least 1 of what is left, at most 100."""
    return 0 if seconds <= 0 else max(1, min(POLL_MS, int(seconds * 1000)))
