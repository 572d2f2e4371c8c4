"""Locks, and the one order in which a thread may take them.

[Note: the order of locks] A thread takes a lock only if every lock that it holds comes before it in `ORDER`
(or if it holds this very lock, and that is reentrant). It waits for no other thread's work while it holds
one. So there is no deadlock. The engine lock comes before all of these locks, and the native modules'
own mutexes after them; no Python runs under those. docs/architecture.md lists which threads take which lock,
and what each thread waits for. While `checking` is set, new locks check this order.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Protocol

#: The names of the locks: which units' values have arrived; which units are away or idle; what the loader has
#: to do; pending transfers and the chunk table; who has which lease; which pieces of a heap are lent; which
#: descriptors change.
ORDER: Final = ("residency", "cache", "loader", "store", "pool", "heap", "descriptor")

#: For tests: whether `lock` returns locks that check the order. An interrupt may leave such a lock taken.
checking = False

_held = threading.local()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class Lock(AbstractContextManager[bool], Protocol):
    """What `lock` returns: a lock of `threading`."""

    def acquire(self, *, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


def _after_fork() -> None:
    """Reset the locks: their holders are not threads of this process, and would hold them for good."""
    for each in list(_locks):
        each._at_fork_reinit()
    _mine().clear()


os.register_at_fork(after_in_child=_after_fork)


class LockOrderError(AssertionError):
    """A lock was taken out of order, or a thread waited while it held one."""


def lock(name: str, *, reentrant: bool = False) -> Lock:
    """Return a lock with a place in `ORDER`."""
    plain: Any = threading.RLock() if reentrant else threading.Lock()
    _locks.add(plain)
    return _Checked(plain, name, reentrant) if checking else plain


def may_wait() -> None:
    """Raise LockOrderError if this thread holds a lock that checks."""
    if names := [lock.name for lock in _mine()]:
        raise LockOrderError(f"a wait while holding {names}")


def _mine() -> list[_Checked]:
    if not hasattr(_held, "locks"):
        _held.locks = []
    return _held.locks  # type: ignore[no-any-return]


class _Checked:
    def __init__(self, plain: Any, name: str, reentrant: bool) -> None:
        self.name = name
        self._plain = plain
        self._reentrant = reentrant
        self._place = ORDER.index(name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self, *, timeout: float = -1) -> bool:
        mine = _mine()
        if not (self._reentrant and self in mine):
            above = [lock.name for lock in mine if lock._place >= self._place]
            if above:
                raise LockOrderError(f"the lock {self.name!r} is taken while holding {above}; see `ORDER`")
        taken: bool = self._plain.acquire(timeout=timeout)
        if taken:
            mine.append(self)
        return taken

    def release(self) -> None:
        _mine().remove(self)
        self._plain.release()
