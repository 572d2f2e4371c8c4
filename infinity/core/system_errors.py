"""The system's text for a failure, with the limit that caused it, if a limit did."""

from __future__ import annotations

import errno
import os
from typing import Final

from .errors import InfinityError

_LIMITS: Final = {
    errno.EFBIG: "the limit on the size of a file: ulimit -f",
    errno.EMFILE: "the limit on open files of a process: ulimit -n",
    errno.ENFILE: "the limit on open files of the system: sysctl fs.file-max",
    errno.EDQUOT: "the quota of this user on that file system",
}


def reason(number: int | None) -> str:
    """Return the system's text for an error number, and the limit that it names, if it names one."""
    text = os.strerror(number or 0)
    return f"{text} ({_LIMITS[number]})" if number in _LIMITS else text


def cure(number: int | None, usual: str) -> str:
    """Return what to change: the limit, if the error number names one, else `usual`."""
    return f"raise {_LIMITS[number]}" if number in _LIMITS else usual


def name_limit(error: InfinityError) -> None:
    """Make a system error name the limit that caused it, if a limit did."""
    error.cure = cure(getattr(error, "errno", None), error.cure or "") or None
