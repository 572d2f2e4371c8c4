"""Waits that an interrupt may end at any point without leaving anything locked.

CPython runs Python's signal handlers on the main thread wherever a function begins, a call returns or a
loop goes back, and a handler may raise there. `threading.Condition` and `threading.Event` are written in
Python: an exception right after they take their lock leaves it locked for good. Here every waiter sleeps
on a lock of its own, which no other thread ever takes, and a thread that wakes others only releases locks.

A fork has none of the threads that ring. So a wait in a fork for work of its parent raises ClosedError.
"""

from __future__ import annotations

import _thread
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from . import locks
from .errors import OF_A_FORK, ClosedError

#: No sleep is longer than this, so that an interrupt arrives (seconds).
POLL: Final = 0.1


#: Called before each sleep; may raise what ends the wait (handlers.py).
hear: Callable[[], None] | None = None


class Bell:
    """Wakes all waiting threads. `ring` takes no lock: finalizers and signal handlers may call it."""

    __slots__ = ("_pid", "_sleepers")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._sleepers: deque[_thread.LockType] = deque()

    def ring(self) -> None:
        """Wake all waiting threads. The caller makes their condition true before this call."""
        sleepers = self._sleepers
        for _ in range(len(sleepers)):  # no longer: who wakes may sleep again at once
            try:
                sleeper = sleepers.popleft()
            except IndexError:  # another thread rings, too
                return
            sleeper.release()

    def wait(self, until: Callable[[], object], timeout: float = POLL) -> None:
        """Sleep until another thread rings, for at most `timeout` seconds. Return at once if `until` is true.

        Raises:
            ClosedError: this process is a fork of the process that made the bell, and has no thread that
                rings.
        """
        if os.getpid() != self._pid and not until():
            raise ClosedError(
                "this process cannot wait for work of its parent process",
                expected="a call in the process that wrapped the model",
                found=f"process {os.getpid()}, a fork of process {self._pid}",
                cure=f"{OF_A_FORK}; or fork while no update is under way, after `infinity.flush(optimizer)`: "
                "then a fork reads parameters that are on the device",
            )
        if locks.before_wait is not None:
            locks.before_wait()
        if hear is not None:
            hear()
        sleeper = _thread.allocate_lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)  # before the look: who rings after it finds the sleeper
        if until() or sleeper.acquire(True, timeout):
            return
        try:
            self._sleepers.remove(sleeper)
        except (ValueError, IndexError):  # somebody rings at this moment
            return


class Latch:
    """Closed until `open`, then open for good."""

    __slots__ = ("_bell", "_open")

    def __init__(self) -> None:
        self._open = False
        self._bell = Bell()

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._open

    def open(self) -> None:
        """Wake all waiting threads; later waits return at once. A second call does nothing."""
        self._open = True
        if self._bell._sleepers:  # who lies down after this finds it open
            self._bell.ring()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is open, or for `timeout` seconds; return whether it is."""
        if timeout is None:
            while not self._open:
                self._bell.wait(self._is_open)
        elif not self._open:
            self._bell.wait(self._is_open, timeout)
        return self._open

    def _is_open(self) -> bool:
        return self._open
