"""Threads that the system may refuse, and the limits that make it do so."""

from __future__ import annotations

import threading

from .errors import OutOfMemoryError
from .system_errors import THREAD_LIMITS


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        OutOfMemoryError: the system refuses it; the error names the limits of this process.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # the interpreter ends
            raise
        raise OutOfMemoryError(
            f"the system refused the thread {thread.name!r}",
            expected="room for its stack, and one thread more",
            found=str(error),
            cure=f"raise the limit that this process has reached: {THREAD_LIMITS}",
        ) from error
