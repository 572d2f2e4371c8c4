"""Ctrl-C ends a program within two seconds, whatever its drives do.

`close`, by the user or at exit, waits for outstanding transfers as long as the drives' deadline
allows. If an interrupt is ending the program, nothing needs them any more.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from infinity.core.at_exit import at_end, interrupted_at_exit
from infinity.hardware.streams import POLL, Task

#: Seconds that a drive has after an interrupt that ends the process.
GRACE: Final = 0.5
#: Seconds that each of what is asked of a drive then has at least.
LEAST: Final = 0.2


class GivesUp(Protocol):
    """What may be pending at exit."""

    def give_up(self, timeout: float) -> None:
        """Let what is pending have `timeout` seconds more."""


_watched: weakref.WeakSet[GivesUp] = weakref.WeakSet()
_last: list[Callable[[], None]] = []


def give_up_on_interrupt(thing: GivesUp) -> None:
    """Register `thing.give_up`, which runs before the calls of `before_exit` if an interrupt ended the
    program."""
    _watched.add(thing)


def interrupted() -> bool:
    """Return whether an interrupt is on its way through the caller (in a ``finally``, an ``__exit__``)."""
    return isinstance(sys.exc_info()[1], KeyboardInterrupt)


def asked_apart(call: Callable[[], object], patience: Callable[[], float | None]) -> bool:
    """Make `call`, which asks a drive to remove or close something, on a thread of its own. Wait for its end
    while `patience` returns None, and then for so many seconds; return whether it has ended, or raise what
    it raises.

    A drive that answers no more keeps the thread that asks in the system, where it hears no interrupt.
    """
    task = Task(call)
    try:
        threading.Thread(target=task.run, name="infinity-ask", daemon=True).start()
    except RuntimeError:  # the interpreter ends, and CPython 3.12 has no new threads then
        task.run()
    while not task.pause(POLL):
        if (seconds := patience()) is not None:
            if not task.pause(seconds):
                return False
            break
    task.wait()
    return True


def before_exit(call: Callable[[], None]) -> None:
    """Register `call`, which closes open objects at exit: after users' handlers and `give_up`."""
    _last.append(call)


def _at_exit() -> None:
    if interrupted_at_exit():
        _give_up()
    try:
        for call in _last:
            call()
    except KeyboardInterrupt:  # while it waited
        _give_up()
        for call in _last:
            call()
        raise


def _give_up() -> None:
    for thing in list(_watched):
        thing.give_up(GRACE)


at_end(_at_exit)
