"""The system's text for a failure, with the limit that caused it, if a limit did."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

_LIMITS: Final = {
    # In the unit of bash. A process without this limit has met that of the file system.
    errno.EFBIG: ("the limit on the size of a file: ulimit -f", resource.RLIMIT_FSIZE, 1024),
    errno.EMFILE: ("the limit on open files of a process: ulimit -n", resource.RLIMIT_NOFILE, 1),
    errno.ENFILE: ("the limit on open files of the system: sysctl fs.file-max", None, 1),
    errno.EDQUOT: ("the quota of this user on that file system", None, 1),
}
_MEMORY: Final = ("the limit on address space of a process: ulimit -v", resource.RLIMIT_AS, 1024)


def _now(limit: int, unit: int) -> str:
    """Return how much a limit allows, in the unit of `ulimit`; "": as much as the process likes."""
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY:
        return ""
    most = (
        ""
        if hard == soft
        else ", without root at most "
        + ("unlimited" if hard == resource.RLIM_INFINITY else str(hard // unit))
    )
    return f", now {soft // unit}{most}"


def _limit(number: int | None) -> str:
    """Return the limit that an error number names, and what it is now; "": it names none."""
    if number == errno.ENOMEM and _now(*_MEMORY[1:]):
        return _MEMORY[0] + _now(*_MEMORY[1:])
    if number == errno.EFBIG and not _now(*_LIMITS[errno.EFBIG][1:]):  # type: ignore[arg-type]
        return ""
    text, limit, unit = _LIMITS.get(number or 0, ("", None, 1))
    return text if limit is None else text + _now(limit, unit)


def reason(number: int | None) -> str:
    """Return the system's text for an error number, and the limit that it names, if it names one."""
    limit = _limit(number)
    return os.strerror(number or 0) + (f" ({limit})" if limit else "")


def cure(number: int | None, usual: str) -> str:
    """Return what to change: the limit, if the error number names one, else `usual`."""
    return f"raise {limit}" if (limit := _limit(number)) else usual


def thread_limits() -> str:
    """Return the limits that keep a process from starting a thread, with what they are now."""
    threads, memory = _now(resource.RLIMIT_NPROC, 1), _now(*_MEMORY[1:])
    return (f"ulimit -v{memory}; " if memory else "") + f"ulimit -u{threads}; or the pids.max of its cgroup"
