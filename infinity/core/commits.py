"""Commits: changes of an engine's state, one at a time, and which thread may make them.

[Note: commits] All state of an engine changes in commits: calls that hold one reentrant lock. A handler of a
signal runs at the end of a commit (handlers.py), or where the commit waits, for the end of a transfer or of
an update. A handler that raises there ends the commit as an error of what it waits for would, and the next
forward, or step, tidies up what was abandoned.

[Note: the engine lock] A forward of the model, a backward, a `gathered` block and a state dict of the model
consist of many commits, and belong to one thread, the *holder*. Another thread waits before its own. But
beside a forward or a backward a module that another thread calls raises ThreadError at once, as the threads
may wait for each other. So a thread that saves beside the training thread never sees anything half done.

torch calls no hook when an interrupt ends a forward, or an error a backward. So what was abandoned is over
when its thread comes back, when that thread has ended, or when another thread finds that the holder is in no
call of torch's that runs a module or a backward. A `gathered` block has a `Hold`, to which only its `with`
statement refers: when that is gone, the block is over.

On a device, autograd runs a backward on threads of its own, which Python does not know: a backward whose
first commit comes from one of them goes on as long as some thread waits for a backward. Their commits take
the lock, and wait for no holder.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch

from . import handlers
from .errors import ThreadError
from .locks import reset_after_fork
from .stack import is_any_in_backward, is_inside
from .waiting import POLL, Bell

_is_grad_enabled: Final = torch.is_grad_enabled
_set_grad_enabled: Final = torch._C._set_grad_enabled
_len_modes: Final = torch._C._len_torch_function_stack

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Seconds that a call waits for the engine.
LIMIT: Final = 300.0
#: Looks in a row, with so many seconds in between, that find the holder in no call of torch's. One look may
#: miss it: a frame that returns while another thread walks the stack no longer leads to the frames below it.
_LOOKS: Final = 5
_BETWEEN: Final = 0.002


def in_backward() -> bool:
    """Return whether this thread is in a backward."""
    return torch._C._current_graph_task_id() != -1


class Hold:
    """A use of an engine that lasts until `leave`, or until there is no reference to it."""

    __slots__ = ("__weakref__",)


class Commits:
    """The lock of one engine, and its holder: [Note: commits], [Note: the engine lock].

    Args:
        staged: whether the device is not the CPU: then autograd calls from threads of its own.
        carry: returns what makes another thread's device work go where that of this thread would.
        limit: seconds that a call waits for the engine.
    """

    def __init__(
        self,
        *,
        staged: bool = False,
        carry: Callable[[], Callable[[], AbstractContextManager[Any]]] = lambda: contextlib.nullcontext,
        limit: float = LIMIT,
    ) -> None:
        self._limit = limit
        self._carry = carry
        self._for: dict[int, int] = {}  # a thread that makes a call of `for_caller`, and for whom
        self.ends: list[Callable[[], object]] = []  # what `close` calls
        self._staged = staged
        self._lock: Any = reset_after_fork(threading.RLock())
        self.holder = 0  # the number of a thread
        #: Of the holder, by id, since what is left is to keep no model: forwards and backwards; state dicts.
        self._passes: set[int] = set()
        self._dicts: set[int] = set()
        self._lasting: set[weakref.ref[Hold]] = set()
        self._bell = Bell()
        handlers.watch(self)

    def close(self) -> None:
        """There are no more commits of other threads that a handler would wait for."""
        handlers.unwatch(self)
        for end in self.ends:
            end()
        self.ends.clear()

    def is_mine(self) -> bool:
        """Whether this thread is in a commit."""
        return bool(self._lock._is_owned())

    @property
    def mine(self) -> bool:
        """Whether this thread is in a forward, a backward or a block."""
        return self.holder == self._who()

    def for_caller(self, call: Callable[[], _R]) -> Callable[[], _R]:
        """Return `call` as a commit that another thread makes for this one, which waits for it."""
        me, there = self._who(), self._carry()

        def work() -> _R:
            self._for[threading.get_ident()] = me
            try:
                with there():
                    return self.run(call)
            finally:
                del self._for[threading.get_ident()]

        return work

    def _who(self) -> int:
        """Return the number of the thread that this one works for: its own, but in `for_caller`."""
        me = threading.get_ident()
        return self._for.get(me, me)

    def __enter__(self) -> None:
        """Begin a commit of the root's hooks, with the grad mode that there is."""
        if handlers.state.runs or not self._lock.acquire(timeout=self._limit):
            self._take(True)  # says why not

    def run(self, call: Callable[[], _R], *, beside: bool = False) -> _R:
        """Return what `call` returns, as a commit, without grad mode. `beside`: also while another thread is
        in a forward, a backward or a block.

        Raises:
            ThreadError: another thread has used the engine for too long; or a handler of a signal that came
                in a commit makes this call.
        """
        if not self._lock._is_owned():
            handlers.wrap()  # those that were set since
        grad = _is_grad_enabled()
        self._take(beside)
        _set_grad_enabled(False)
        try:
            if _len_modes():
                with torch.device("cpu"):  # whatever torch.set_default_device says
                    return call()
            return call()
        finally:
            _set_grad_enabled(grad)
            self._give_back()

    def check_handler(self) -> None:
        """Raise `ThreadError` in a signal's handler that came in the middle of a commit."""
        if handlers.in_handler():
            raise ThreadError(
                "the handler of a signal calls the engine in the middle of one of its calls",
                expected="a handler that sets a flag, and a call of the engine between steps",
                found="a call in a handler",
                cure="set a flag in the handler, and look at it after `optimizer.step()`; or train with "
                "`infinity.Run`, which saves on SIGTERM",
            )

    def _take(self, beside: bool, *, at_once: bool = False) -> None:
        if handlers.state.runs:
            self.check_handler()
        if not self._lock.acquire(timeout=self._limit):
            raise self._in_use()
        if beside or self.holder in (0, self._who()) or (self._staged and in_backward()):
            return
        try:
            self._wait_for_holder(at_once)
        except BaseException:
            self._lock.release()
            raise

    def _wait_for_holder(self, at_once: bool) -> None:
        """Wait until no other thread holds the engine, with the lock free meanwhile, of outer commits too."""
        until = time.monotonic() + self._limit
        looks, holder = 0, self.holder
        while self.holder:
            looks = looks + 1 if self.holder == holder and not self._goes_on() else 0
            holder = self.holder
            if looks == _LOOKS or not (self._passes or self._dicts or self._lasts()):
                self._free()
            elif not looks and (time.monotonic() > until or (at_once and self._passes)):
                raise self._in_use()
            else:
                main = threading.current_thread() is threading.main_thread()
                handlers.state.waits = handlers.state.waits or main  # no handler runs between these lines
                taken = self._lock._release_save()
                try:
                    self._bell.wait(lambda: not self.holder, POLL if not looks else _BETWEEN)
                finally:
                    self._lock._acquire_restore(taken)
                    handlers.state.waits = handlers.state.waits and not main

    def _give_back(self, *_: object) -> None:
        if self._lasting:
            self._pass_on()
        self._lock.release()
        if handlers.deferred:
            handlers.run_deferred()

    __exit__ = _give_back

    # -- the holder -------------------------------------------------------------------------

    def begin(self, use: object) -> None:
        """Begin a forward or a backward of this thread; `leave` or `reset` ends it.

        Raises:
            ThreadError: another thread is in one; or it has been in a block or a call for too long.
        """
        self._take(False, at_once=True)
        if self.holder in (0, self._who()):
            self.holder = self._who()
            self._passes.add(id(use))
        self._give_back()

    def enter(self, use: object) -> None:
        """Begin a use of this thread, when no other thread holds the engine; `leave` ends it. A `Hold` lasts
        only as long as there is a reference to it.

        Raises:
            ThreadError: another thread has held the engine for too long.
        """
        handlers.wrap()
        self._take(False)
        self.holder = self.holder or self._who()
        if isinstance(use, Hold):
            self._lasting.add(weakref.ref(use))
        else:
            self._dicts.add(id(use))
        self._give_back()

    def check_thread(self) -> None:
        """Raise `ThreadError` if another thread is in a forward, a backward or a block, and this one in no
        backward on a device."""
        if not (self.holder in (0, self._who()) or (self._staged and in_backward())):
            raise self._in_use()

    def leave(self, use: object) -> None:
        """End a use."""
        if id(use) not in self._passes and id(use) not in self._dicts and not self._lasting:
            return
        self._take(True)
        self._passes.discard(id(use))
        self._dicts.discard(id(use))
        if isinstance(use, Hold):
            self._lasting.discard(weakref.ref(use))
        self._pass_on()
        self._give_back()

    def reset(self) -> None:
        """End the uses of this thread that nothing else will end: a forward or a backward that raised."""
        if self.mine and (self._passes or self._dicts):
            self._take(True)
            self._passes.clear()
            self._dicts.clear()
            self._pass_on()
            self._give_back()

    def _pass_on(self) -> None:
        if not (self._passes or self._dicts or self._lasts()):
            self.holder = 0
            self._bell.ring()

    def _free(self) -> None:
        self._passes.clear()
        self._dicts.clear()
        self._lasting.clear()
        self.holder = 0

    def _lasts(self) -> bool:
        """Whether there is still a reference to a `Hold` that was begun."""
        self._lasting = {hold for hold in self._lasting if hold() is not None}
        return bool(self._lasting)

    def _goes_on(self) -> bool:
        """Whether the holder is in what it has begun."""
        if self._lasts():
            return True
        threads = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]
        of_python = any(thread.ident == self.holder for thread in threads)
        return is_inside(self.holder) if of_python else is_any_in_backward()

    def _in_use(self) -> ThreadError:
        names = [thread.name for thread in threading.enumerate() if thread.ident == self.holder]
        who = f"the thread {names[0]!r}" if names else "another thread"
        return ThreadError(
            "the model is in use by another thread",
            expected="one thread at a time in forwards, backwards and `gathered` blocks, and calls beside "
            f"them that wait for at most {self._limit:g} s",
            found=f"{who} is inside a forward, a backward, a `gathered` block or a call",
            cure="use the model and its optimizer from one thread, or wait until that thread has finished; "
            "a forward must not start threads that call modules of the model",
        )


def commit(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a method a commit: it runs in the `commits` of its object."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        commits: Commits = self.commits
        plain = not (_is_grad_enabled() or _len_modes() or handlers.state.runs)
        if plain and commits._lock._is_owned():
            return method(self, *args, **kwargs)
        return commits.run(functools.partial(method, self, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def hook(method: Callable[..., _R]) -> Callable[..., _R]:
    """Make a method one that torch calls for a unit: a commit, beside the holder's, without grad mode. Its
    first argument is whether that was on. The lock is taken here, without calls: each unit comes here."""

    def call(self: Any, /, *args: Any) -> _R:
        commits: Commits = self.commits
        grad = _is_grad_enabled()
        if handlers.state.runs or not commits._lock.acquire(True, commits._limit):
            commits._take(True)  # says why not
        _set_grad_enabled(False)
        try:
            if _len_modes():
                with torch.device("cpu"):  # whatever torch.set_default_device says
                    return method(self, grad, *args)
            return method(self, grad, *args)
        finally:
            _set_grad_enabled(grad)
            if commits._lasting:
                commits._pass_on()
            commits._lock.release()
            if handlers.deferred:
                handlers.run_deferred()

    functools.update_wrapper(call, method)
    return call
