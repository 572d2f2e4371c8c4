"""Ctrl-C ends a program within two seconds, whatever its drives do.

Closing, by the user or at exit, waits for what the drives still owe, for as long as their deadline
allows. Where an interrupt is ending the program there is nothing left to wait for.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from infinity.core.at_exit import at_end

#: Seconds that a drive has after an interrupt that ends the process.
GRACE: Final = 0.5


class GivesUp(Protocol):
    """What may be pending at exit."""

    def give_up(self, timeout: float) -> None:
        """Let what is pending have `timeout` seconds more."""


_watched: weakref.WeakSet[GivesUp] = weakref.WeakSet()
_last: list[Callable[[], None]] = []


def give_up_on_interrupt(thing: GivesUp) -> None:
    """Have `thing.give_up` called, before `before_exit`'s calls, if an interrupt ended the program."""
    _watched.add(thing)


def interrupted() -> bool:
    """Return whether an interrupt is on its way through the caller (in a ``finally``, an ``__exit__``)."""
    return isinstance(sys.exc_info()[1], KeyboardInterrupt)


def before_exit(call: Callable[[], None]) -> None:
    """Have `call`, which closes what was not closed, called at exit: after users' handlers and `give_up`."""
    _last.append(call)


def _at_exit() -> None:
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
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
