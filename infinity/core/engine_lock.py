"""The engine lock: one thread at a time uses an engine, and others wait.

[Note: the engine lock] A forward of the model, a backward, a `gathered` block, a state dict and every single
call of the engine hold the engine lock, and other threads wait before theirs. Between two of them other
threads can take it. So a thread that saves or evaluates beside the training thread never sees a forward, a
backward or a call half done. Threads that a forward itself starts (a block whose children run side by side)
are its *guests*: they do not wait when they call modules or use parameters. For `gathered` and backwards of
their own they wait like other threads. A reader of a parameter on the device waits only for the update of
that parameter.

The engine lock is not a mutex, because an exception from a signal handler could leave a mutex locked. It
belongs to a thread, by the thread's number. If an error or an interrupt leaves it held, it is released when
that thread comes back, or when another thread waits and finds that the holder has ended, or is in no use any
more. A use that has an end of its own (a block, a call) has a `Hold`. Only the frame or the object that will
end it refers to the `Hold`: when the `Hold` is gone, the use has ended, even if an error came before the call
of its end. A thread is a guest as long as the frame in which it joined is on its stack, because the system
reuses the numbers of threads that have ended.

On a device, autograd runs a backward on threads of its own. Python knows them only while a hook runs there:
their uses go on as long as some thread is inside a backward.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from .errors import ThreadError
from .stack import frames, frames_of_others, has_frames, is_backward, is_called, is_state_dict
from .waiting import POLL, Bell

_PAUSE: Final = 1e-4
#: Seconds that a thread waits for the engine lock.
LIMIT: Final = 300.0


class Hold:
    """A use of an engine that lasts until `leave`, or until there is no reference to it."""

    __slots__ = ("__weakref__",)


class EngineLock:
    """The engine lock: which thread may use an engine now. See [Note: the engine lock]."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._holder: dict[str, int] = {}  # "": a thread; setdefault is one step
        self._uses: set[int] = set()  # that `reset` ends, by id: what is left here keeps no model
        self._lasting: set[weakref.ref[Hold]] = set()
        self._guests: dict[int, list[FrameType]] = {}  # of each, the frames in which it joined
        self._bell = Bell()

    def enter(self, use: object, *, who: int | None = None, wait: bool = True) -> None:
        """Begin a use of the thread `who` (None: this thread). With `wait`, wait until it holds the engine
        lock. Does nothing for a guest, and for a use that has begun already. `reset` does not end a `Hold`.

        Raises:
            ThreadError: another thread has held the lock for `limit` seconds.
        """
        who = threading.get_ident() if who is None else who
        if self._holder.setdefault("", who) != who:
            if not wait or self._is_guest(who):
                return
            self._wait(who)
        if isinstance(use, Hold):
            self._lasting.add(weakref.ref(use))
        else:
            self._uses.add(id(use))

    def leave(self, use: object) -> None:
        """End a use."""
        self._uses.discard(id(use))
        if isinstance(use, Hold):
            self._lasting.discard(weakref.ref(use))
        self._pass_on()

    def _pass_on(self) -> None:
        if not (self._uses or self._lasts()):
            self._holder.clear()
            self._bell.ring()
            if any(lock is self for lock in tuple(_WAITING.values())):
                time.sleep(_PAUSE)  # who comes back at once would be before who has waited

    def reset(self) -> None:
        """End the uses of this thread that nothing else will end: a forward or a backward that raised."""
        if self.mine and self._uses:
            self._uses.clear()
            self._pass_on()

    def _lasts(self) -> bool:
        """Whether there is still a reference to a `Hold` that was begun."""
        for use in tuple(self._lasting):
            if use() is None:
                self._lasting.discard(use)
        return bool(self._lasting)

    @property
    def holder(self) -> int:
        """The number of the thread that holds the engine lock; 0: none."""
        return self._holder.get("", 0)

    @property
    def mine(self) -> bool:
        """Whether this thread holds the engine lock."""
        return self.holder == threading.get_ident()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the engine lock for a block."""
        use = Hold()
        self.enter(use)
        try:
            yield
        finally:
            self.leave(use)

    def join(self, frame: FrameType) -> bool:
        """Make this thread a guest of the thread that holds the engine lock, until `part`, or until `frame`
        of its stack has ended; return whether another thread holds the lock."""
        me = threading.get_ident()
        if self._holder.get("", me) == me:
            return False
        self._guests.setdefault(me, []).append(frame)
        return True

    def part(self, frame: FrameType) -> None:
        """Undo `join`."""
        frames = self._guests.get(threading.get_ident(), [])
        if frame in frames:
            frames.remove(frame)

    def _is_guest(self, who: int) -> bool:
        joined = self._guests.get(who)
        if not joined:
            return False
        if any(frame in joined for frame in frames(who)):
            return True
        self._guests.pop(who, None)  # what it joined in was ended by an error that torch calls no hook for
        return False

    def _wait(self, who: int) -> None:
        _WAITING[who] = self
        try:
            self._wait_long(who)
        finally:
            _WAITING.pop(who, None)

    def _wait_long(self, who: int) -> None:
        until, stale = time.monotonic() + self._limit, 0
        while (holder := self._holder.setdefault("", who)) != who:
            self._bell.wait(lambda: not self._holder, POLL)
            if self._holder.get("") != holder:
                continue
            ours = _is_started_here(holder)
            goes_on = is_inside(holder) or (not ours and _others_go_back(who))
            stale = 0 if self._lasts() or goes_on else stale + 1
            if stale > 1 or not (ours or goes_on or has_frames(holder)):
                # It has left what it began (a backward that raised), was interrupted between two lines of
                # `enter`, or has ended.
                self._uses.clear()
                self._lasting.clear()
                self._holder.clear()
            elif time.monotonic() > until:
                raise ThreadError(
                    "the model is in use by another thread",
                    expected=f"the engine lock within {self._limit:g} s",
                    found=f"{_name(holder)} is inside a forward, a backward, a `gathered` block or a call",
                    cure="use the model and its optimizer from one thread, or wait until that thread has "
                    "finished; if a forward starts threads that need `gathered`, gather before they start",
                )


#: The lock that each thread waits for, by its number.
_WAITING: dict[int, EngineLock] = {}


def is_inside(ident: int | None = None) -> bool:
    """Return whether a thread (None: this one) is inside of a forward, a backward or a state dict."""
    return is_called(ident) or any(is_backward(f) or is_state_dict(f) for f in frames(ident))


def _is_started_here(ident: int) -> bool:
    """Return whether a thread is one that Python has started, and goes on."""
    threads = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
    return any(thread.ident == ident for thread in threads)


def _others_go_back(who: int) -> bool:
    """Return whether another thread than `who` is inside of a backward."""
    return any(map(is_backward, frames_of_others(who)))


def _name(ident: int) -> str:
    names = [thread.name for thread in threading.enumerate() if thread.ident == ident]
    return f"the thread {names[0]!r}" if names else "a thread that has ended"
