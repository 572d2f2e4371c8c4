"""The arena: one preallocated, locked file per rank and NVMe directory.

It is in a subdirectory that the engine owns (``infinity``, mode 0700) in the directory that the user named.
The engine opens it with ``O_DIRECT|O_CLOEXEC|O_NOFOLLOW``, mode 0600. It allocates the space at once
(``fallocate``), so a full disk is an error at start-up and not in the middle of a run. A new arena reads
as zeros.

[Note: one run per arena] The lock (``flock``) is on the arena's own descriptor, which the kernel
keeps open while a write of a killed process is still in flight, so the lock is free only when
nothing can write any more. If a file was unlinked between open and lock, it is not the file at
the path: the engine compares both. A child after a fork closes its copies of the descriptors, because it
would otherwise keep the lock of a parent that died.

[Note: no arena is left behind] A `close` unlinks the arena of a run. A killed run leaves its arena without a
lock (`leftovers.py`); the next run in that directory removes it, whatever its own size, and uses the space.
The last run that ends removes the subdirectory, too; a run that begins at that moment creates it again. If a
file has the arena's name and does not belong to the engine, the engine leaves it alone and raises an error.

[Note: a key never becomes a path] The engine chooses the names in the directory: a constant and the rank's
number. No name from a user, a model or a checkpoint becomes part of a path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shlex
import stat
import struct
import time
import warnings
from collections.abc import Iterator
from typing import Final

from infinity.core.errors import DirectoryError
from infinity.core.sizes import ALIGNMENT, ceil_to, format_size
from infinity.hardware.aio import DirectFile
from infinity.hardware.descriptor import Descriptor

from .leftovers import MARK_NBYTES, SUBDIRECTORY, arenas, mark, remove_folder, why_foreign

_ATTEMPTS: Final = 100
_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_LOCK_SECONDS: Final = 2.0


class Arena:
    """An open, locked arena of `nbytes` zeros, and a page behind them that says whose it is.

    Args:
        directory: what the user named; it must exist.
        nbytes: size in bytes, made a multiple of 4096.
        rank: number of the rank that the arena belongs to.

    Attributes:
        path, fd, direct: the file, its descriptor, and whether it bypasses the page cache.
        file: the same, for rings.

    Raises:
        DirectoryError: the directory is missing, no directory, read-only, closed to us, full or in
            use by another run, or something else stands where the arena belongs; that is left as it is.
    """

    def __init__(self, directory: str, nbytes: int, *, rank: int = 0) -> None:
        self._name(directory, nbytes, rank)
        self.direct = True
        self._pid = os.getpid()
        self._file: Descriptor | None = None
        self._folder: Descriptor | None = None
        self._ours = False  # locked, and seen to be an arena or empty
        try:
            self._check_directory()
            self._folder = self._open_folder()
            self._open_locked()
            self._allocate()
            self.file = DirectFile(self.path, self.fd, direct=self.direct)
        except OSError as error:
            self._abandon()
            if isinstance(error, DirectoryError):
                raise
            raise self._refused(error) from error
        except BaseException:
            self._abandon()
            raise

    @property
    def fd(self) -> int:
        """The arena's descriptor; -1 when it is closed, and in a fork."""
        return -1 if self._file is None else self._file.number

    def _name(self, directory: str, nbytes: int, rank: int) -> None:
        self.directory = os.path.abspath(directory)
        self.nbytes = max(ceil_to(nbytes, ALIGNMENT), ALIGNMENT)
        self.name = f"rank{int(rank)}.arena"
        self.path = os.path.join(self.directory, SUBDIRECTORY, self.name)

    @classmethod
    def check_way(cls, directory: str, *, rank: int = 0) -> None:
        """Raise the `DirectoryError` that an arena there would for what stands in its place; make nothing.
        Another run's lock is not looked at: that run may end."""
        arena = cls.__new__(cls)
        arena._name(directory, 0, rank)
        try:
            arena._look_into_folder().close()
            there = [each for each in arenas(directory) if each.path == arena.path]
        except FileNotFoundError:
            return
        except OSError as error:
            raise error if isinstance(error, DirectoryError) else arena._refused(error) from error
        if there and there[0].state == "foreign":
            expected = "an arena of ours, or nothing"
            raise arena._in_the_way(arena.path, expected, errno.EEXIST, there[0].why)

    def _check_directory(self) -> None:
        try:
            found = os.stat(self.directory)
        except NotADirectoryError as error:
            raise self._error(
                "cannot be there",
                errno.ENOTDIR,
                expected="a directory on an NVMe drive",
                found="a file in the place of a directory above it",
                cure="name another directory in the setting nvme",
            ) from error
        except FileNotFoundError as error:
            variable = "$" in self.directory  # of a shell; which does not expand it in a file of settings
            raise self._error(
                "is missing",
                errno.ENOENT,
                expected="a directory on an NVMe drive",
                found="nothing at this path",
                cure="write the directory itself into the setting nvme: $NAME is not replaced in it"
                if variable
                else f"create it (mkdir -p {shlex.quote(self.directory)}), or correct the setting nvme",
            ) from error
        if not stat.S_ISDIR(found.st_mode):
            raise self._error(
                "is not a directory",
                errno.ENOTDIR,
                expected="a directory on an NVMe drive",
                found="a file",
                cure="name a directory in the setting nvme",
            )
        self._check_space(self.directory, 0)

    def _open_folder(self) -> Descriptor:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):  # of an earlier run, or of another rank
                os.mkdir(os.path.dirname(self.path), 0o700)
            with contextlib.suppress(FileNotFoundError):  # a run that has just ended removed it
                return self._look_into_folder()
        return self._look_into_folder()

    def _look_into_folder(self) -> Descriptor:
        folder = os.path.dirname(self.path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            opened = Descriptor(lambda: os.open(folder, flags))
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise self._in_the_way(folder, "a directory of our own", error.errno) from error
            raise
        found = os.fstat(opened.number)
        if found.st_uid != os.geteuid():
            opened.close()
            raise self._in_the_way(folder, "a directory of our own", errno.EPERM, "another user's directory")
        return opened

    def _open_locked(self) -> None:
        """Open the arena and lock it; see [Note: one run per arena]."""
        assert self._folder is not None
        for _ in range(_ATTEMPTS):
            try:
                self._file = Descriptor(self._open_file)
            except FileNotFoundError:  # the folder that is open is none any more
                self._folder.close()
                self._folder = self._open_folder()
                continue
            held = os.fstat(self.fd)
            if not stat.S_ISREG(held.st_mode):
                raise self._in_the_way(self.path, "a regular file of our own", errno.EEXIST)
            self._lock()
            held = os.fstat(self.fd)
            try:
                there = os.stat(self.name, dir_fd=self._folder.number, follow_symlinks=False)
            except FileNotFoundError:
                there = None
            if there is not None and (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                with self._buffered():
                    why = why_foreign(held, self.fd)
                if why:
                    raise self._in_the_way(self.path, "an arena of ours, or nothing", errno.EEXIST, why)
                self._ours = True
                return
            self._file.close()
        raise self._in_use()

    def _lock(self) -> None:
        # io_uring lets go of a killed process's files a moment after the process is gone.
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise self._in_use() from error
                time.sleep(0.02)
            else:
                return

    def _open_file(self) -> int:
        assert self._folder is not None
        folder = self._folder.number
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.name, flags | os.O_DIRECT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._in_the_way(self.path, "a regular file of our own", error.errno) from error
            if error.errno != errno.EINVAL:
                raise
            fd = os.open(self.name, flags, 0o600, dir_fd=folder)
            self.direct = False
            return fd
        alignment = _direct_alignment(fd)
        if alignment == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False
        elif alignment is not None and (alignment > ALIGNMENT or ALIGNMENT % alignment):
            os.close(fd)
            raise self._error(
                "needs an alignment that the format does not support",
                errno.EINVAL,
                expected=f"direct I/O in multiples of at most {ALIGNMENT} bytes",
                found=f"an alignment of {alignment} bytes",
                cure="name a directory on another file system",
            )
        return fd

    def _allocate(self) -> None:
        """Take the space. What was there is gone before: a fresh extent reads as zeros."""
        assert self._folder is not None
        self._check_space(self._folder.number, os.fstat(self.fd).st_blocks * 512)
        os.ftruncate(self.fd, 0)
        with self._buffered():
            left = memoryview(mark(self.nbytes))
            while left:
                moved = os.pwritev(self.fd, [left], self.nbytes + MARK_NBYTES - len(left))
                if not moved:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                left = left[moved:]
            os.fsync(self.fd)  # or after a power failure the size would be there and the mark not
        number = _fallocate(self.fd, self.nbytes + MARK_NBYTES)
        if number in _UNSUPPORTED:
            # posix_fallocate would write every block instead, which can take an hour.
            warnings.warn(
                f"{self.directory}: the file system cannot reserve space (fallocate); "
                "the disk may become full during the run",
                stacklevel=4,
            )
        elif number:
            raise OSError(number, os.strerror(number))
        if not self.direct:
            warnings.warn(
                f"{self.directory}: the file system has no direct I/O (O_DIRECT); transfers go "
                "through the page cache, which uses host memory outside the budget",
                stacklevel=4,
            )

    @contextlib.contextmanager
    def _buffered(self) -> Iterator[None]:
        """Read and write the mark without O_DIRECT: a short write can go on where it ended."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            yield
        finally:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)

    def _check_space(self, where: str | int, reclaimed: int) -> None:
        system = os.statvfs(where)
        if system.f_blocks == 0:  # a file system that does not know (ramfs, some network ones)
            return
        free = system.f_bavail * system.f_frsize + reclaimed
        # A stale arena's space is counted once the file is open; until then any file may be it.
        if isinstance(where, str):
            with contextlib.suppress(OSError):  # none there
                free += os.lstat(self.path).st_blocks * 512
        if free < self.nbytes + MARK_NBYTES:
            raise self._full(free)

    def _full(self, free: int) -> DirectoryError:
        needed = self.nbytes + MARK_NBYTES
        return self._error(
            "has not enough free space",
            errno.ENOSPC,
            expected=f"{format_size(needed)} ({needed} bytes)",
            found=f"{format_size(free)} ({free} bytes) free",
            cure="free space, add a directory to the setting nvme, or place less on nvme",
        )

    def _in_use(self) -> DirectoryError:
        return self._error(
            "is in use by another run",
            errno.EWOULDBLOCK,
            expected=f"no lock on {self.path}",
            found="a lock that another process, or another model of this process, holds",
            cure="wait for that run to end, `infinity.close` that model, or name another directory",
        )

    def _in_the_way(self, path: str, expected: str, number: int, found: str = "") -> DirectoryError:
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            mode = 0
        kind = "a symbolic link" if stat.S_ISLNK(mode) else found or "something else"
        return self._error(
            "has another file in the place of the arena",
            number,
            expected=f"{path}: {expected}",
            found=kind,
            cure=f"move {path} away, or name another directory",
        )

    def _refused(self, error: OSError) -> DirectoryError:
        """Return the system's refusal as an error with a cure."""
        if error.errno == errno.EFBIG:
            return self._error(
                "cannot hold a file of this size",
                errno.EFBIG,
                expected=f"{self.nbytes + MARK_NBYTES} bytes in one file",
                found="a smaller limit on the size of a file: `ulimit -f`, or the file system's own",
                cure="raise the limit (ulimit -f unlimited), or name a directory on another file system",
            )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            system = os.statvfs(self.directory)
            return self._full(system.f_bavail * system.f_frsize)
        if error.errno == errno.EROFS:
            return self._error(
                "is read-only",
                errno.EROFS,
                expected="a directory that can be written",
                found="a read-only file system",
                cure="mount it read-write, or name another directory",
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return self._error(
                "does not let this user write",
                error.errno,
                expected=f"permission to write for user {os.geteuid()}",
                found=str(error.strerror),
                cure=f"chown or chmod {self.directory}, or name another directory",
            )
        return self._error(
            "cannot hold an arena",
            error.errno or 0,
            expected="a local file system",
            found=f"{error.strerror} (errno {error.errno})",
            cure="name another directory",
        )

    def _error(self, problem: str, number: int, *, expected: str, found: str, cure: str) -> DirectoryError:
        return DirectoryError(
            f"the NVMe directory {self.directory} {problem}",
            errno=number,
            path=self.path,
            nbytes=self.nbytes,
            expected=expected,
            found=found,
            cure=cure,
        )

    def _abandon(self) -> None:
        if self._ours:
            with contextlib.suppress(OSError):  # what went wrong before is what is told
                self._unlink()
        self._close_descriptors()

    def _unlink(self) -> None:
        assert self._folder is not None
        with contextlib.suppress(FileNotFoundError):  # someone removed it already
            os.unlink(self.name, dir_fd=self._folder.number)

    def close(self, *, in_flight: bool = False) -> None:
        """Unlink the arena and let its lock go; see [Note: no arena is left behind].

        A second call, or one in a child, does nothing.

        Args:
            in_flight: the kernel still has transfers of it, past their deadline. A write of them
                holds the file's lock in the kernel, so unlinking, and on some file systems closing,
                would wait for the drive: the file stays, locked and open, until the process ends.

        Raises:
            DirectoryError: the file cannot be removed; it is closed.
        """
        if self.fd >= 0 and self._pid == os.getpid():
            if in_flight:
                self.file.keep()
                for descriptor in (self._file, self._folder):
                    assert descriptor is not None
                    descriptor.forget()
                return
            try:
                self._unlink()
            except OSError as error:
                raise self._error(
                    "does not allow the removal of the arena",
                    error.errno or 0,
                    expected=f"the removal of {self.path}",
                    found=str(error.strerror),
                    cure=f"check the file system (dmesg), then remove {self.path}",
                ) from error
            finally:
                self.file.close()
                self._close_descriptors()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._folder is not None:
            remove_folder(self._folder.number, os.path.dirname(self.path))
            self._folder.close()


def _fallocate(fd: int, nbytes: int) -> int:
    """Reserve the first `nbytes` of a file; return 0 or an error number."""
    while True:
        if _libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return 0
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number


def _direct_alignment(fd: int) -> int | None:
    """Return the alignment in bytes that direct I/O on this file needs, 0 if it has none, or None
    where the system does not say (before Linux 6.1)."""
    if not hasattr(_libc, "statx"):
        return None
    answer = ctypes.create_string_buffer(256)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    alignments: tuple[int, int] = struct.unpack_from("=II", answer, 152)  # of memory, of offsets
    return max(alignments)
