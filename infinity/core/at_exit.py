"""What is done when a program ends, after all that others do then.

[Note: after the last handler] Of handlers, `atexit` calls the newest first. One that was registered before
infinity was imported comes after any that we register, and a user who saves there would find the engine
closed. So ours hang on an object that only `atexit` holds: CPython lets go of it when all handlers were
called, and before it stops the threads that we wait for. Once `weakref`'s own handler has run, no
`weakref.finalize` does anything any more, so what an open engine needs is none.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable

_ends: list[Callable[[], None]] = []


class _Last:
    """Makes the calls when it goes."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid != os.getpid():
            return  # a fork, which `multiprocessing` has forget its parent's handlers
        with contextlib.ExitStack() as stack:  # each is called, whatever others raise
            for call in reversed(_ends):
                stack.callback(call)


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
