"""Locks that hold their users to the order: [Note: the order of locks]."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from infinity.core import locks
from infinity.core.locks import ORDER

_held = threading.local()


def _mine() -> list[Checked]:
    if not hasattr(_held, "locks"):
        _held.locks = []
    return _held.locks  # type: ignore[no-any-return]


os.register_at_fork(after_in_child=lambda: _mine().clear())


def check() -> None:
    """Make new locks check the order, and waits look for locks that are held. An interrupt may leave such a
    lock taken."""
    locks.check, locks.before_wait = Checked, _may_wait


class LockOrderError(AssertionError):
    """A lock was taken out of order, or a thread waited while it held one."""


def _may_wait() -> None:
    if names := [lock.name for lock in _mine()]:
        raise LockOrderError(f"a wait while holding {names}")


class Checked:
    def __init__(self, plain: Any, name: str, reentrant: bool) -> None:
        self.name = name
        self.plain = plain
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
        taken: bool = self.plain.acquire(timeout=timeout)
        if taken:
            mine.append(self)
        return taken

    def release(self) -> None:
        _mine().remove(self)
        self.plain.release()
