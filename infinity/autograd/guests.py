"""Threads that a forward starts: guests of the thread that holds the engine lock. See [Note: turns]."""

from __future__ import annotations

import threading
from types import FrameType

from infinity.core.stack import frames
from infinity.params.residency import Residency


class _Owner:
    """The owner of what one of these threads uses by itself."""


class Guests:
    """Lets them in, and has present for them what they use outside of the modules that load it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._turn = residency.shelter.turn
        self._used: dict[int, tuple[_Owner, tuple[int, ...]]] = {}  # by thread

    def join(self) -> FrameType | None:
        """Be a guest until the module call under way is over; return its frame for `part`, or None if no
        other thread has the turn."""
        for frame in frames():
            if frame.f_code.co_name == "_call_impl":
                break
        return frame if self._turn.join(frame) else None

    def part(self, frame: FrameType | None) -> None:
        """Undo `join`."""
        if frame is not None:
            self._turn.part(frame)

    def use(self, units: tuple[int, ...], *, newest: bool) -> bool:
        """Load `units` for this thread, and keep them until it uses other units or until `release`, because
        the forward's own thread goes on meanwhile. Return False, and do nothing, if no other thread holds the
        engine lock."""
        frame, me = next(frames()), threading.get_ident()
        if not self._turn.join(frame):
            return False
        try:
            owner, before = self._used.setdefault(me, (_Owner(), ()))
            if before != units:
                self._residency.release(before, owner)
                self._used[me] = owner, units
            self._residency.acquire(units, owner, newest=newest)
        finally:
            self._turn.part(frame)
        return True

    def release(self) -> None:
        """The forward is over."""
        while self._used:
            owner, units = self._used.popitem()[1]
            self._residency.release(units, owner)
