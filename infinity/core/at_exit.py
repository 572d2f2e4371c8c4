"""Work at the end of a program: after the exit handlers that the program has registered since infinity was
imported, since Python's `atexit` calls the newest first.

[Note: a thread that a drive keeps] An interrupt ends a program whose drive no longer answers, while a thread
of infinity is in a system call. If the drive answers while CPython shuts the interpreter down, that thread
goes on and asks for the GIL inside a call of torch's. CPython (up to 3.13) ends the thread there, and C++
aborts the process. So such a program ends by its signal as soon as all handlers have run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

#: How the names of our threads begin, which the end of the program waits for.
THREADS: Final = "infinity-"

_ends: list[Callable[[], None]] = []


def interrupted_at_exit() -> bool:
    """Return whether an interrupt has ended the program."""
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)


def _leave() -> None:
    """If a drive keeps one of infinity's threads, end now as CPython does after an interrupt. See
    [Note: a thread that a drive keeps]."""
    kept = any(thread.name.startswith(THREADS) for thread in threading.enumerate())
    if not (kept and interrupted_at_exit()):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it takes no more
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # it is blocked


_armed = 0  # the number of the process that makes the calls


def at_end(call: Callable[[], None], *, last: bool = False) -> None:
    """Register `call` for the end of the program; `last`: after all calls that are not `last`."""
    _ends.insert(len(_ends) if last else 0, call)
    arm()


def arm() -> None:
    """Make sure that this process makes the calls: a fork may have lost the registration of its parent."""
    global _armed
    if _armed != os.getpid():
        _armed = os.getpid()
        atexit.register(_end, _armed)


def _end(pid: int) -> None:
    if pid != os.getpid():
        return  # a fork, which `multiprocessing` has forget its parent's handlers
    with contextlib.ExitStack() as stack:  # each is called, whatever others raise
        stack.callback(_leave)
        for call in reversed(_ends):
            stack.callback(call)
