"""What is done when a program ends, after all that others do then.

[Note: after the last handler] Of handlers, `atexit` calls the newest first. One that was registered before
infinity was imported comes after any that we register, and a user who saves there would find the engine
closed. So ours hang on an object that only `atexit` holds: CPython lets go of it when all handlers were
called, and before it stops the threads that we wait for. Once `weakref`'s own handler has run, no
`weakref.finalize` does anything any more, so what an open engine needs is none.

[Note: a thread that a drive keeps] An interrupt ends a program whose drive answers no more, and a thread of
ours is in the system then. If the drive answers while CPython takes the interpreter apart, that thread goes
on, asks for the interpreter inside of a call of torch's, is ended there (CPython up to 3.13 does so), and
C++ aborts the process. So such a program ends by its signal as soon as all handlers were called.
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
    """End as CPython does after an interrupt, but now, if a drive keeps one of our threads. See
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
    """Have `call` called when the program ends; `last`: after those that are not."""
    _ends.insert(len(_ends) if last else 0, call)
    arm()


def arm() -> None:
    """See to it that the calls will be made by this process: a fork may have lost what its parent had."""
    global _last
    there = _last() if _last is not None else None
    if there is None or there._pid != os.getpid():
        made = _Last()
        _last = weakref.ref(made)
        atexit.register(_hold, made)


def _hold(_: _Last) -> None:
    """Do nothing: the reference in its arguments is what counts."""
