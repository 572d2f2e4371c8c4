"""The system's text for a failure, with the limit that caused it, if a limit did."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

#: By error number: a limit, and which resource it is of if a process may also be without it.
_LIMITS: Final = {
    errno.EFBIG: ("the limit on the size of a file: ulimit -f", resource.RLIMIT_FSIZE),
    errno.ENOMEM: ("the limit on address space of a process: ulimit -v", resource.RLIMIT_AS),
    errno.EMFILE: ("the limit on open files of a process: ulimit -n", None),
    errno.ENFILE: ("the limit on open files of the system: sysctl fs.file-max", None),
    errno.EDQUOT: ("the quota of this user on that file system", None),
}
#: Those that keep a process from starting a thread.
THREAD_LIMITS: Final = "ulimit -u, ulimit -v, or the pids.max of its cgroup"


def _limit(number: int | None) -> str:
    """Return the limit that an error number names; "": it names none, or this process has none."""
    text, of = _LIMITS.get(number or 0, ("", None))
    return "" if of is not None and resource.getrlimit(of)[0] == resource.RLIM_INFINITY else text


def reason(number: int | None) -> str:
    """Return the system's text for an error number, and the limit that it names, if it names one."""
    limit = _limit(number)
    return os.strerror(number or 0) + (f" ({limit})" if limit else "")


def cure(number: int | None, usual: str) -> str:
    """Return what to change: the limit, if the error number names one, else `usual`."""
    return f"raise {limit}" if (limit := _limit(number)) else usual
