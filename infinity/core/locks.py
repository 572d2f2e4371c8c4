"""Locks, and the one order in which a thread may take them.

[Note: the order of locks] A thread takes a lock only if every lock that it holds comes before it in `ORDER`
(or if it holds this very lock, and that is reentrant). It waits for no other thread's work while it holds
one. So there is no deadlock. The engine lock comes before all of these locks, and the native modules'
own mutexes after them; no Python runs under those. docs/architecture.md lists which threads take which lock,
and what each thread waits for. Tests have locks check this order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

#: The names of the locks: what the loader has to do; pending transfers and the chunk table; who has which
#: lease; which pieces of a heap are lent; which descriptors change.
ORDER: Final = ("loader", "store", "pool", "heap", "descriptor")

#: Of tests: makes of a plain lock one that checks the order; and what a thread calls before it waits.
check: Callable[[Any, str, bool], Lock] | None = None
before_wait: Callable[[], None] | None = None

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class Lock(AbstractContextManager[bool], Protocol):
    """What `lock` returns: a lock of `threading`."""

    def acquire(self, *, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


def _after_fork() -> None:
    """Reset the locks: their holders are not threads of this process, and would hold them for good."""
    for each in list(_locks):
        each._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork)


def reset_after_fork(plain: Any) -> Any:
    """Return a lock of `threading`, which is free in each fork."""
    _locks.add(plain)
    return plain


def lock(name: str, *, reentrant: bool = False) -> Lock:
    """Return a lock with a place in `ORDER`."""
    plain = reset_after_fork(threading.RLock() if reentrant else threading.Lock())
    return plain if check is None else check(plain, name, reentrant)
