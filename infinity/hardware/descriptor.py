"""Descriptors that are closed once, by the process that opened them, and by each fork of it at its start.

[Note: forget, then close] The system reuses a closed number for the next file that any code opens. So the
engine drops a descriptor's number before it closes it: a second `close` or a fork never closes a number
twice. A fork waits while a descriptor is being opened or closed, so that the child gets no copy that it does
not know: such a copy would keep the lock of a parent that died. The wait lasts at most `_PATIENCE`, because a
drive may never answer; then the fork keeps that one copy.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from infinity.core.locks import lock

#: Seconds that a fork, or another descriptor, waits for one that is being opened or closed.
_PATIENCE: Final = 1.0


class Descriptor:
    """An open descriptor.

    Args:
        opened: calls what opens it (`os.open`, for one) and returns its number; or a number.
        owned: whether `close`, and a fork, close it. Else both only forget it.

    Attributes:
        number: what the system knows it by; -1 when it was closed, and in a fork.
    """

    __slots__ = ("__weakref__", "_owned", "number")

    def __init__(self, opened: Callable[[], int] | int, *, owned: bool = True) -> None:
        self.number = -1
        self._owned = owned
        with _alone():
            _descriptors.add(self)
            self.number = opened if isinstance(opened, int) else opened()

    def forget(self) -> int:
        """Return the number, which is the caller's to close from here on."""
        number, self.number = self.number, -1
        return number

    def close(self) -> None:
        """Close it. A second call does nothing, nor does one in a fork.

        Raises:
            OSError: the system reported an error; it is closed.
        """
        with _alone():
            number, self.number = self.number, -1
            if number >= 0 and self._owned:
                os.close(number)


_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()
_changing = lock("descriptor", reentrant=True)  # a signal handler may open a file, or fork
_held: list[bool] = []


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    taken = _changing.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if taken:
            _changing.release()


def _before_fork() -> None:
    _held.append(_changing.acquire(timeout=_PATIENCE))


def _after_in_parent() -> None:
    if _held and _held.pop():
        _changing.release()


def _after_in_child() -> None:
    _held.clear()
    for descriptor in list(_descriptors):
        with contextlib.suppress(OSError):  # what the system says of it is the parent's to hear
            descriptor.close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
