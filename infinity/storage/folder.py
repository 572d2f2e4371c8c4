"""A directory of files that is complete or empty; and helpers for every directory of files.

[Note: incomplete files] The files of a `Folder` are written as ``<name>.<word>.incomplete``. When all of them
would survive a power failure, the folder renames them in the order of their creation; the last one after the
renames of the others are durable. So the file that marks a directory as complete, an index or a
configuration, comes last. A writer that is killed leaves files that are recognisably incomplete, and the next
writer removes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from typing import Final

from infinity.core.errors import DirectoryError
from infinity.hardware.descriptor import Descriptor

_LEFT: Final = re.compile(r".*\.[0-9a-f]{8}\.incomplete", re.DOTALL)
_CLAIM: Final = ".run.lock"
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system that has none


class Folder:
    """A new directory under way: a `with` block, which ends in `commit` or leaves nothing. `word`: the one of
    another rank, of whose directory files are named here."""

    def __init__(self, path: str, word: str | None = None) -> None:
        self.path = path
        self.word = word or secrets.token_hex(4)
        self._files: dict[str, str] = {}  # name → where it is written; in the order of the renames
        self._made: list[str] = []  # directories, the outer ones first
        self._lock: Descriptor | None = None
        self._done = False

    def __enter__(self) -> Folder:
        """Take the directory, and remove what a killed process has left in it.

        Raises:
            DirectoryError: it is not empty, cannot be made or written, or another process writes into it.
        """
        try:
            _make(self.path, self._made)
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
                    expected="a new directory, or an empty one: infinity never replaces files that exist",
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
        self._files[name] = os.path.join(self.path, f"{name.replace('/', '-')}.{self.word}.incomplete")
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
        _make(os.path.dirname(target), self._made)
        os.rename(self._files[name], target)

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
            _remove(self._made)
        unlock(self._lock)


class Claim:
    """A directory that belongs to one run for a `with` block, even if others save into it meanwhile.

    The lock is on a hidden file, which is removed with the claim. A file that a killed run left has no lock,
    and has no effect. The end of the block removes directories that the block has created and that are empty.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.path.join(path, _CLAIM)
        self._made: list[str] = []
        self._lock: Descriptor | None = None

    def __enter__(self) -> Claim:
        """Take the directory.

        Raises:
            DirectoryError: another run has it, or it cannot be made or written.
        """
        try:
            while self._lock is None:
                _make(self.path, self._made)
                opened = Descriptor(self._open)
                _lock(opened, self.path, "run")
                if _is_at(opened.number, self._file):
                    self._lock = opened
                else:  # whoever had it has just removed it
                    opened.close()
        except OSError as error:
            _remove(self._made)
            if isinstance(error, DirectoryError):
                raise
            raise failed("write", self.path, error) from error
        return self

    def _open(self) -> int:
        return os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._file)
        unlock(self._lock)
        _remove(self._made)


def _make(path: str, made: list[str]) -> None:
    """Make a directory and those above it; add to `made` what was not there."""
    if os.path.isdir(path):
        return
    _make(os.path.dirname(path), made)
    os.mkdir(path)
    made.append(path)


def _remove(made: list[str]) -> None:
    for path in reversed(made):
        with contextlib.suppress(OSError):  # something is in it
            os.rmdir(path)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def lock_directory(path: str, what: str) -> Descriptor:
    """Return a descriptor of a directory, which has its lock for as long as it is open; no fork keeps it.

    Raises:
        DirectoryError: another one has it: a `what` is under way.
        OSError: it cannot be opened.
    """
    opened = Descriptor(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    _lock(opened, path, what)
    return opened


def _lock(opened: Descriptor, path: str, what: str) -> None:
    """Lock what is `opened`, or close it and raise."""
    try:
        fcntl.flock(opened.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            opened.close()
            raise DirectoryError(
                f"another {what} into {path} is under way",
                errno=error.errno,
                path=path,
                expected=f"one process at a time that writes a {what} into a directory",
                found="another process, or a run of this one, that holds the lock of the directory",
                cure="wait for its end, or use a separate directory for each",
            ) from error


def unlock(opened: Descriptor | None) -> None:
    """Let go of a lock, also where a fork that has just begun still has a copy of its descriptor."""
    if opened is not None and opened.number >= 0:
        with contextlib.suppress(OSError):  # of a file system that has none
            fcntl.flock(opened.number, fcntl.LOCK_UN)
        opened.close()


def kind_of(mode: int) -> str:
    """Return what a file of this `st_mode` is, in words."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


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
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f unlimited), or write elsewhere",
    errno.ENOSPC: "make room on the drive, or write elsewhere",
    errno.EROFS: "mount its file system for writing (mount -o remount,rw), or write elsewhere",
}


def cure_of_path(number: int | None) -> str:
    """Return what to change where a directory, or a file in it, cannot be written, with this error number."""
    return _OF_PATHS.get(number or 0, "check the directory's permissions and the room on its drive")


def failed(what: str, path: str, error: OSError) -> DirectoryError:
    """Return the error of what could not be done with a directory or a file in it."""
    return DirectoryError(
        f"cannot {what} {path}",
        errno=error.errno,
        path=path,
        found=error.strerror or str(error),
        cure=cure_of_path(error.errno),
    )
