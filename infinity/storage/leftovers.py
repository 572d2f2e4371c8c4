"""Arenas in a directory: which of them killed runs have left, the space they hold, and their removal.

[Note: whose an arena is] The last page of an arena is its mark: a fixed text and the arena's size. Writing
the mark gives the file its size, so an arena of the engine is empty or marked, whenever its run was killed. A
file that is not marked, has a second name or is not a regular file belongs to somebody else: the engine never
writes, empties or removes it.

[Note: an arena is dead when nobody has locked it] A run holds a lock (`flock`) on its arena for as long as
the run, or one of its writes in the kernel, can touch the file. Code that removes an arena holds that lock
meanwhile, and has checked that the path still names the locked file. A run that opened the file before
and gets the lock afterwards sees that the path names another file, and creates a new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from infinity.core.sizes import ALIGNMENT

#: The engine's own subdirectory of a directory that the user named.
SUBDIRECTORY: Final = "infinity"
MARK_NBYTES: Final = ALIGNMENT
_WORDS: Final = b"infinity arena 1\n"
_NAME: Final = re.compile(r"rank\d+\.arena")
_log = logging.getLogger("infinity.storage")


class Leftover(NamedTuple):
    """A file that has an arena's name.

    `nbytes` is what it takes on the drive. `state`: ``"live"``, a run has it; ``"dead"``, a killed run
    has left it; ``"foreign"``, it is not an arena, and `why` says what it is.
    """

    path: str
    nbytes: int
    state: str
    why: str = ""


def mark(nbytes: int) -> bytes:
    """Return the last page of an arena of `nbytes`."""
    return (_WORDS + b"%d\n" % nbytes).ljust(MARK_NBYTES, b"\0")


def why_foreign(found: os.stat_result, fd: int) -> str:
    """Return why a file is not an arena of ours, or nothing; see [Note: whose an arena is].

    Args:
        fd: of the file, without O_DIRECT; not looked at unless it is a regular file.
    """
    if not stat.S_ISREG(found.st_mode):
        return "no regular file"
    if found.st_nlink > 1:
        return f"a file with {found.st_nlink} names (hard links)"
    nbytes = found.st_size - MARK_NBYTES
    if found.st_size and (nbytes <= 0 or os.pread(fd, MARK_NBYTES, nbytes) != mark(nbytes)):
        return f"a file of {found.st_size} bytes that no run of infinity made"
    return ""


def arenas(directory: str, *, remove: bool = False) -> list[Leftover]:
    """Return what has an arena's name in `directory`; with `remove`, the dead ones were removed.

    Raises:
        OSError: the directory, or a file of our own in it, cannot be looked at or removed.
    """
    folder = os.path.join(directory, SUBDIRECTORY)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        with os.scandir(directory):  # a missing directory is an error, one without arenas is not
            return []
    with _closing(fd):
        try:
            names = sorted(name for name in os.listdir(fd) if _NAME.fullmatch(name))
        except FileNotFoundError:  # the last run that had an arena there has just ended
            return []
        looked = [_look(fd, name, os.path.join(folder, name), remove) for name in names]
        found = [each for each in looked if each is not None]
        if any(remove and each.state == "dead" for each in found):
            remove_folder(fd, folder)
        return found


def remove_folder(fd: int, path: str) -> None:
    """Remove our subdirectory, which is open as `fd`, where nothing is in it, unless a user made it: ours has
    the mode 0700. Does nothing where `fd` is not open."""
    with contextlib.suppress(OSError):  # an arena of another run is there
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700:
            os.rmdir(path)


def reclaim(directories: Iterable[str]) -> None:
    """Remove what killed runs have left in `directories`: a run needs the space. Says nothing of what it
    may not: whoever needs that space, or that name, will."""
    for directory in directories:
        with contextlib.suppress(OSError):
            for each in arenas(directory, remove=True):
                if each.state == "dead":
                    _log.info("%s: removed, its run was killed", each.path)


def dead_nbytes(directory: str) -> int:
    """Return the bytes that killed runs hold in `directory`, as far as this user sees: they count as free."""
    with contextlib.suppress(OSError):
        return sum(each.nbytes for each in arenas(directory) if each.state == "dead")
    return 0


def _look(folder: int, name: str, path: str, remove: bool) -> Leftover | None:
    """Return what is at `name`, or None: it went meanwhile."""
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(there.st_mode):
            return Leftover(path, 0, "foreign", "a symbolic link")
        nbytes = there.st_blocks * 512
        if not stat.S_ISREG(there.st_mode):
            return Leftover(path, nbytes, "foreign", "no regular file")
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_RDWR if remove else os.O_RDONLY)
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    with _closing(fd):
        try:
            # Shared, where nothing is removed: two that only look do not take each other for runs.
            fcntl.flock(fd, (fcntl.LOCK_EX if remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return Leftover(path, nbytes, "live")
        held = os.fstat(fd)
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            return None
        why = why_foreign(held, fd)
        if why:
            return Leftover(path, nbytes, "foreign", why)
        if remove:
            os.unlink(name, dir_fd=folder)
        return Leftover(path, held.st_blocks * 512, "dead")


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
