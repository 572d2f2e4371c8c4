"""Deferred sections: the engine changes its state on a thread that no signal handler interrupts.

[Note: an interrupt ends a wait] CPython runs Python's signal handlers on the main thread, between almost
any two lines of it, and a handler may raise: Ctrl-C does. So code that changes the engine's state over more
than one line is a *deferred section*: it runs on a thread of its own, and the user's thread only waits for
it. An interrupt ends the wait and not the section. The section goes on, and the next call of the engine,
whichever it is, waits for it first. So every call takes effect completely, or not at all.

On other threads (autograd's own, for a CUDA device) no handler runs, and the section runs there. Every
section holds the engine lock: [Note: the engine lock].

[Note: room on the stack] That thread has a stack of its own. A section on another thread has the
rest of that thread's stack: near the limit a RecursionError would come like an interrupt, in the middle of
changes. So the error comes before the first change, if the rest of the stack may be too small for the
section.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch

from infinity.core.engine_lock import EngineLock, Hold
from infinity.core.threads import start

from .streams import Task

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Calls within each other that a deferred one may be made of, torch's included: twice what was seen.
_NESTED: Final = 150


class _Here(threading.local):
    """Of a thread: whether a call on it has the room that it needs, and whether it comes from a backward."""

    has_room = False
    backward = False


_here = _Here()


def in_backward() -> bool:
    """Return whether a backward is under way on this thread, or on the one whose call it makes."""
    return _here.backward or torch._C._current_graph_task_id() != -1


class Deferral:
    """Runs calls for the user's thread as deferred sections, where no signal handler runs. See
    [Note: an interrupt ends a wait].

    Args:
        carry: called on the user's thread; returns what makes another thread's device work go where the
            user's would (its current stream).
        staged: whether the device is not the CPU: then autograd calls from threads of its own.
    """

    def __init__(
        self, carry: Callable[[], Callable[[], AbstractContextManager[Any]]], *, staged: bool = False
    ) -> None:
        self._carry = carry
        self._staged = staged
        self.lock = EngineLock()
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._closed = False
        self._under_way: Task | None = None
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._queue,), name="infinity-deferral", daemon=True
        )
        start(self._thread)
        # The thread holds the queue, not the deferral, so a forgotten one ends its thread.
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False  # the user's own handlers may save

    def run(self, call: Callable[[], _R], *, hold: float = 0.0, locked: bool = True) -> _R:
        """Return what `call` returns, or raise what it raises. An exception from a signal handler comes
        before the call begins, or does not stop it. The call runs without grad mode.

        `hold`: seconds for which an interrupt is deferred until the call has ended, for quick calls that
        read the user's objects (`p.grad`, param groups), which the user changes next. `locked`: the call
        holds the engine lock.
        """
        here, wait, backward = threading.get_ident(), self._waits(), in_backward()
        self.wait_interrupted()
        if os.getpid() != self._pid:
            with torch.no_grad():
                return call()
        if here != self._main or self._closed:
            who = self._main if here == self._thread.ident else here
            return self._make_here(call, who or here, locked, wait)
        task = Task(functools.partial(self._make, call, here, self._carry(), locked, wait, backward))
        try:
            # No handler runs between these two: what is known to be under way has been queued.
            self._under_way = task
            self._queue.put(task)
            result: _R = task.result()
            self._under_way = None
            return result
        except BaseException as error:
            if error is task.error:
                self._under_way = None
            elif hold:
                task.pause(hold)
            raise
        finally:
            del task  # its error holds this frame

    def begin(self, use: object) -> None:
        """Begin a forward or a backward of this thread; `lock.leave` or `lock.reset` ends it."""
        self.lock.enter(use, wait=self._waits())

    def _waits(self) -> bool:
        """Return whether this thread waits for the engine lock. In a backward on a device it does not:
        several threads run it, autograd's and the calling one, and each may hold the lock."""
        return not (self._staged and torch._C._current_graph_task_id() != -1)

    def _make_here(self, call: Callable[[], _R], who: int, locked: bool, wait: bool) -> _R:
        """Make a call on this thread; raise RecursionError before it begins, or not at all."""
        if _here.has_room:
            return self._make(call, who, torch.no_grad, locked, wait)
        _nest(_NESTED)
        _here.has_room = True
        try:
            return self._make(call, who, torch.no_grad, locked, wait)
        finally:
            _here.has_room = False

    def _make(
        self,
        call: Callable[[], _R],
        who: int,
        there: Callable[[], AbstractContextManager[Any]],
        locked: bool,
        wait: bool,
        backward: bool = False,
    ) -> _R:
        use = Hold()
        if locked:
            self.lock.enter(use, who=who, wait=wait)
        before, _here.backward = _here.backward, _here.backward or backward
        try:
            with there(), torch.no_grad():
                return call()
        finally:
            _here.backward = before
            if locked:
                self.lock.leave(use)

    def wait_interrupted(self, patience: float | None = None) -> None:
        """Wait for a section that an interrupt left running, for at most `patience` seconds if given; raise
        its error."""
        task = self._under_way
        if task is None or os.getpid() != self._pid or threading.get_ident() != self._main:
            return  # it is the main thread's; for others it has the lock, or waits for theirs
        try:
            if patience is not None and not task.pause(patience):
                return
            task.wait()
            self._under_way = None
        except BaseException as error:
            if error is task.error:
                self._under_way = None
            raise
        finally:
            del task

    def close(self, timeout: float = 30.0) -> bool:
        """Finish the running section and end the thread; return whether it ended within `timeout` seconds.
        From then on, calls run on their own threads."""
        self._closed = True
        self._finalizer.detach()
        self._queue.put(None)  # each time: an interrupt may have ended the last call before it came here
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()


def deferred(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a method a deferred section: it runs in the `deferral` of its object."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        deferral: Deferral = self.deferral
        return deferral.run(functools.partial(method, self, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def _nest(calls: int) -> None:
    """Raise RecursionError unless so many calls can be made within each other: no count of frames tells,
    for Python counts calls of C, too. See [Note: room on the stack]."""
    if calls:
        _nest(calls - 1)


def _serve(calls: queue.SimpleQueue[Task | None]) -> None:
    _here.has_room = True
    while (task := calls.get()) is not None:
        task.run()
        del task
