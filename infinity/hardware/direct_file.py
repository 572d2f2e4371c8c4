"""Open files that rings read and write, with O_DIRECT where the file system has it."""

from __future__ import annotations

import errno as numbers
import fcntl
import os
import weakref
from collections.abc import Callable

from infinity.core.errors import (
    ClosedError,
    DirectoryError,
)

from .aio_native import ffi, lib

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
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, owned=True)  # from here on it is the one that closes, also if this raises

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
