"""The arena: one preallocated file without a name per rank and NVMe directory.

The engine opens it with ``O_TMPFILE|O_CLOEXEC`` and mode 0600 in the directory that the user named, and reads
and writes it with ``O_DIRECT``. It allocates the space at once (``fallocate``), so a full disk is an error at
start-up and not in the middle of a run. A new arena reads as zeros.

[Note: no arena is left behind] Only descriptors refer to the file. The kernel frees its space when the last
of them is closed, whatever ends the process, and also if somebody removes the directory meanwhile. A child
after a fork closes its copies, because they would keep the space of a parent that died. Where a file
system has no ``O_TMPFILE``, the file has a random name for the moment in which the engine opens it
(`nameless_file`).

[Note: a key never becomes a path] No name from a user, a model or a checkpoint becomes part of a path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shlex
import stat
import warnings
from typing import Final

from infinity.core.errors import DirectoryError
from infinity.core.sizes import ALIGNMENT, ceil_to, format_size
from infinity.hardware.aio import DirectFile
from infinity.hardware.descriptor import Descriptor
from infinity.hardware.direct_file import dio_offset_align
from infinity.hardware.probe import make_direct, nameless_file

_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """An open arena of `nbytes` zeros.

    Args:
        directory: what the user named; it must exist.
        nbytes: size in bytes, made a multiple of 4096.

    Attributes:
        directory, nbytes: where it is, and its size in bytes.
        file: the open file, for rings.
        direct: whether it bypasses the page cache.

    Raises:
        DirectoryError: the directory is missing, no directory, read-only, closed to us or full.
    """

    def __init__(self, directory: str, nbytes: int) -> None:
        self.directory = os.path.abspath(directory)
        self.nbytes = max(ceil_to(nbytes, ALIGNMENT), ALIGNMENT)
        file: Descriptor | None = None
        try:
            self._check_directory()
            self._check_space()
            file = Descriptor(lambda: nameless_file(self.directory))
            self.direct = self._make_direct(file.number)
            self._allocate(file.number)
            self.file = DirectFile(self.directory, file, direct=self.direct)
        except BaseException as error:
            if file is not None:
                file.close()
            if isinstance(error, OSError) and not isinstance(error, DirectoryError):
                raise self._refused(error) from error
            raise

    @property
    def fd(self) -> int:
        """The arena's descriptor; -1 when it is closed, and in a fork."""
        return self.file.fd

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

    def _check_space(self) -> None:
        system = os.statvfs(self.directory)
        free = system.f_bavail * system.f_frsize
        if system.f_blocks and free < self.nbytes:  # ramfs and some network file systems do not know
            raise self._full(free)

    def _make_direct(self, fd: int) -> bool:
        """Give the file O_DIRECT, and return whether the file system has it."""
        direct = make_direct(fd)
        alignment = dio_offset_align(fd) if direct else None
        if alignment == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            return False
        if alignment is not None and (alignment > ALIGNMENT or ALIGNMENT % alignment):
            raise self._error(
                "needs an alignment that the format does not support",
                errno.EINVAL,
                expected=f"direct I/O in multiples of at most {ALIGNMENT} bytes",
                found=f"an alignment of {alignment} bytes",
                cure="name a directory on another file system",
            )
        return direct

    def _allocate(self, fd: int) -> None:
        number = _fallocate(fd, self.nbytes)
        if number in _UNSUPPORTED:
            # posix_fallocate would write every block instead, which can take an hour.
            os.ftruncate(fd, self.nbytes)
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

    def _full(self, free: int) -> DirectoryError:
        return self._error(
            "has not enough free space",
            errno.ENOSPC,
            expected=f"{format_size(self.nbytes)} ({self.nbytes} bytes)",
            found=f"{format_size(free)} ({free} bytes) free",
            cure="free space, add a directory to the setting nvme, or place less on nvme",
        )

    def _refused(self, error: OSError) -> DirectoryError:
        """Return the system's refusal as an error with a cure."""
        if error.errno == errno.EFBIG:
            return self._error(
                "cannot hold a file of this size",
                errno.EFBIG,
                expected=f"{self.nbytes} bytes in one file",
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
            path=self.directory,
            nbytes=self.nbytes,
            expected=expected,
            found=found,
            cure=cure,
        )

    def close(self, *, in_flight: bool = False) -> None:
        """Close the file, which frees its space. A second call, or one in a child, does nothing.

        Args:
            in_flight: the kernel still has transfers of it, past their deadline. On some file systems closing
                would wait for the drive: the file stays open until the process ends.
        """
        if in_flight:
            self.file.keep()
        with contextlib.suppress(OSError):  # it is closed all the same, and nobody needs its content
            self.file.close()


def _fallocate(fd: int, nbytes: int) -> int:
    """Reserve the first `nbytes` of a file; return 0 or an error number."""
    while True:
        if _libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return 0
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
