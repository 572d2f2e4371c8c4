"""Open files that rings read and write, with O_DIRECT where the file system has it."""

from __future__ import annotations

import errno as numbers
import fcntl
import os
from collections.abc import Callable

from infinity.core.errors import (
    ClosedError,
    DirectoryError,
)

from .aio_native import ffi, lib
from .descriptor import Descriptor


class DirectFile:
    """An open file for rings, with O_DIRECT where the file system has it.

    Transfers may have any offset, length and address: what of them is not whole aligned blocks
    goes through a second descriptor without O_DIRECT ([Note: odd heads and tails] in
    csrc/aio/ticket.c), so it is right, but slower, and passes through the page cache.

    Args:
        path: of the file, or the directory of a file without a name; for messages, and to open the second
            descriptor of a file that has a name if /proc is missing.
        fd: an open descriptor of it; stays the caller's to close, unless `owned` or a `Descriptor`.
        direct: whether `fd` is O_DIRECT. Default: looked up.
        owned: whether `close` closes `fd`.

    Raises:
        DirectoryError: the file at `path` is not the one behind `fd`.
    """

    def __init__(
        self, path: str, fd: int | Descriptor, *, direct: bool | None = None, owned: bool = False
    ) -> None:
        self._file = self._plain = fd if isinstance(fd, Descriptor) else Descriptor(fd, owned=owned)
        self._pid = os.getpid()
        self._on_close: list[Callable[[int], object]] = []
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        self.path = os.fspath(path)
        self.direct = bool(flags & os.O_DIRECT) if direct is None else direct
        if self.direct:
            self._plain = Descriptor(lambda: _reopen(self.path, self.fd, flags & os.O_ACCMODE))

    @classmethod
    def open(cls, path: str, flags: int = os.O_RDWR, mode: int = 0o600) -> DirectFile:
        """Open `path` with `flags` and, where the file system takes it, O_DIRECT.

        Raises:
            DirectoryError: it cannot be opened; `errno` says why.
        """
        flags |= os.O_CLOEXEC

        def opened() -> int:
            try:
                return os.open(path, flags | os.O_DIRECT, mode)
            except OSError as error:
                if error.errno != numbers.EINVAL:  # this file system has no O_DIRECT
                    raise
                return os.open(path, flags, mode)

        try:
            file = Descriptor(opened)
        except OSError as error:
            raise DirectoryError(
                f"cannot open {path}",
                errno=error.errno,
                path=path,
                found=error.strerror,
                cure="check that the path exists and that this user has permission to open it",
            ) from error
        try:
            fd = file.number
            if dio_offset_align(fd) not in (None, *(1 << k for k in range(13))):
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return cls(path, file)
        except BaseException:
            file.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor; -1 when it is closed, and in a fork."""
        return self._file.number

    @property
    def plain_fd(self) -> int:
        """One of the same file without O_DIRECT; `fd`, where that has none."""
        return self._plain.number

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
        for forget in self._on_close if self.fd >= 0 else ():
            forget(self.fd)
        self._on_close = []
        self._drop()

    def keep(self) -> None:
        """Forget the descriptors, which stay open until the process ends."""
        self._plain.forget()
        self._file.forget()

    def _drop(self) -> None:
        try:
            self._plain.close()
        finally:
            self._file.close()

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_plain"):
            self._drop()

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
    except OSError as error:
        if error.errno != numbers.ENOENT or not os.fstat(fd).st_nlink:
            raise DirectoryError(
                f"cannot open a file without a name a second time in {path}",
                errno=error.errno,
                path=path,
                expected="a file system that allows this through /proc/self/fd, such as ext4, XFS and btrfs",
                found=error.strerror,
                cure="mount /proc, or name a directory on another file system",
            ) from error
        # No /proc; the name may have changed hands, so compare.
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
