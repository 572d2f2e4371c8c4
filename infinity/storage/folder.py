"""A directory of files that is whole, or has nothing in it; and what every directory of files needs.

[Note: incomplete files] Files of a `Folder` are written as ``<name>.<word>.incomplete``. When all of them
would survive a power failure they are renamed, in the order in which they were named; the last one when the
others are known to have their names. So what says that a directory is whole, an index or a configuration, is
named last. Whoever is killed leaves files that nobody takes for more than they are, and the next one removes
them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from typing import Final

from infinity.core.errors import DirectoryError

_LEFT: Final = re.compile(r".*\.[0-9a-f]{8}\.incomplete", re.DOTALL)
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system that has none


class Folder:
    """A new directory under way: a `with` block, which ends in `commit` or leaves nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._word = secrets.token_hex(4)
        self._files: dict[str, str] = {}  # name → where it is written; in the order of the renames
        self._made: list[str] = []  # directories, the outer ones first
        self._lock = -1
        self._done = False

    def __enter__(self) -> Folder:
        """Take the directory, and remove what a killed process has left in it.

        Raises:
            DirectoryError: it is not empty, cannot be made or written, or another process writes into it.
        """
        try:
            self._make(self.path)
            self._lock = lock_directory(self.path, "export")
            for name in os.listdir(self.path):
                if _LEFT.fullmatch(name):
                    os.unlink(os.path.join(self.path, name))
            there = sorted(os.listdir(self.path))
            if there:
                raise DirectoryError(
                    f"{self.path} is not empty",
                    errno=errno.ENOTEMPTY,
                    path=self.path,
                    expected="a new directory, or an empty one: nothing that is there is ever replaced",
                    found=", ".join(there[:8]) + " …" * (len(there) > 8),
                    cure="name another directory, or remove this one first",
                )
        except BaseException as error:
            self._end()
            if isinstance(error, OSError) and not isinstance(error, DirectoryError):
                raise failed("write", self.path, error) from error
            raise
        return self

    def file(self, name: str) -> str:
        """Return where the file that will be called `name` (which may name a directory in this one) is to be
        written; nothing is there yet."""
        self._files[name] = os.path.join(self.path, f"{name.replace('/', '-')}.{self._word}.incomplete")
        return self._files[name]

    def write(self, name: str, text: str) -> None:
        """Write a file of text.

        Raises:
            DirectoryError: that failed.
        """
        path = self.file(name)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                pwrite(fd, text.encode(), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise failed("write", path, error) from error

    def copy(self, name: str, source: str) -> None:
        """Copy the file `source`. Raises as `write`."""
        path = self.file(name)
        try:
            shutil.copyfile(source, path)
            sync(path)
        except OSError as error:
            raise failed("write", path, error) from error

    def commit(self) -> None:
        """Give every file its name: each is complete, and synced.

        Raises:
            DirectoryError: that failed, and nothing is left.
        """
        try:
            *others, last = self._files
            for name in others:
                self._rename(name)
            sync(self.path)
            self._rename(last)
            for path in {self.path, *self._made, *map(os.path.dirname, self._made)}:
                sync(path)
        except OSError as error:
            raise failed("write", self.path, error) from error
        self._done = True

    def _rename(self, name: str) -> None:
        target = os.path.join(self.path, name)
        self._make(os.path.dirname(target))
        os.rename(self._files[name], target)

    def _make(self, path: str) -> None:
        if os.path.isdir(path):
            return
        self._make(os.path.dirname(path))
        os.mkdir(path)
        self._made.append(path)

    def __exit__(self, *_: object) -> None:
        try:
            if not self._done:  # what raised is told, and not what cannot be removed
                for name in reversed(self._files):
                    for path in (os.path.join(self.path, name), self._files[name]):
                        with contextlib.suppress(OSError):
                            os.unlink(path)
        finally:
            self._end()

    def _end(self) -> None:
        if not self._done:
            for path in reversed(self._made):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def lock_directory(path: str, what: str) -> int:
    """Return a descriptor of a directory, which has its lock for as long as it is open.

    Raises:
        DirectoryError: another one has it: a `what` is under way.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise DirectoryError(
                f"another {what} into {path} is under way",
                errno=error.errno,
                path=path,
                expected=f"one process at a time that writes a {what} into a directory",
                found="one that holds its lock",
                cure="wait for it, or give each a directory of its own",
            ) from error
    return fd


def sync(path: str) -> None:
    """Block until a file, or the names in a directory, would survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system on which directories are not synced
            raise
    finally:
        os.close(fd)


def pwrite(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


_OF_PATHS: Final = {
    errno.EEXIST: "name a directory: a file has this name",
    errno.ENOTDIR: "name a directory: a file has this name, or that of a folder above",
    errno.ELOOP: "name a directory, not links that lead in a circle",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOSPC: "make room on the drive, or write elsewhere",
}


def failed(what: str, path: str, error: OSError) -> DirectoryError:
    """Return the error of what could not be done with a directory or a file in it."""
    return DirectoryError(
        f"cannot {what} {path}",
        errno=error.errno,
        path=path,
        found=error.strerror or str(error),
        cure=_OF_PATHS.get(error.errno or 0, "check the directory's permissions and the room on its drive"),
    )
