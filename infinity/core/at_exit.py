"""Work at the end of a program, after all other exit handlers.

[Note: after the last handler] Python's `atexit` calls the newest handlers first. A handler from before the
import of infinity runs after any handler that infinity registers, and a user who saves there would find the
engine closed. So infinity's calls hang on an object that only `atexit` holds: CPython drops it after it has
called all handlers, and before it stops the threads that infinity waits for. After `weakref`'s own handler
has run, no `weakref.finalize` has any effect, so an open engine does not depend on one.

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
import weakref
from collections.abc import Callable
from typing import Final

#: How the names of our threads begin, which the end of the program waits for.
THREADS: Final = "infinity-"

_ends: list[Callable[[], None]] = []


class _Last:
    """Makes the calls when it goes."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid != os.getpid():
            return  # a fork, which `multiprocessing` has forget its parent's handlers
        with contextlib.ExitStack() as stack:  # each is called, whatever others raise
            stack.callback(_leave)
            for call in reversed(_ends):
                stack.callback(call)


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


_last: weakref.ref[_Last] | None = None


def at_end(call: Callable[[], None], *, last: bool = False) -> None:
    """Register `call` for the end of the program; `last`: after all calls that are not `last`."""
    _ends.insert(len(_ends) if last else 0, call)
    arm()


def arm() -> None:
    """Make sure that this process makes the calls: a fork may have lost the registration of its parent."""
    global _last
    there = _last() if _last is not None else None
    if there is None or there._pid != os.getpid():
        made = _Last()
        _last = weakref.ref(made)
        atexit.register(_hold, made)


def _hold(_: _Last) -> None:
    """Do nothing: the reference in its arguments is what counts."""
