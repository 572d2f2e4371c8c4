"""Signal handlers of the program wait for the end of a commit.

CPython runs Python's signal handlers on the main thread, between almost any two lines of it, and a handler
may raise: Ctrl-C does. So each handler of the program gets a wrapper, which asks whether the main thread is
in a commit ([Note: commits], commits.py). If it is, the handler runs when the commit ends, or where the
commit waits (`Bell.wait`, `Ticket.wait`), within `waiting.POLL`: an exception of the handler then comes out
of that wait. A commit costs nothing for this.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, Protocol
from weakref import WeakSet

from . import waiting


class HasCommits(Protocol):
    """What handlers wait for (see `Commits`)."""

    def is_mine(self) -> bool:
        """Whether this thread is in a commit."""


class _Deferring:
    """A handler of the program, which waits for commits to end. It equals the handler."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if state.waits or _in_commit():
            deferred.append((number, self.handler))
            return None
        return self.handler(number, frame)

    def __eq__(self, other: object) -> bool:
        return bool(self.handler == (other.handler if type(other) is _Deferring else other))

    def __hash__(self) -> int:
        return hash(self.handler)


#: Signals that came in a commit, with their handlers. Asked after each commit, and nearly always empty.
deferred: list[tuple[int, Callable[..., Any]]] = []
_watched: WeakSet[HasCommits] = WeakSet()
_NUMBERS: Final = tuple(signal.valid_signals())


class _State:
    """What the main thread is in."""

    whole = 0  # `whole` blocks
    runs = False  # a handler, in the middle of a commit
    waits = False  # in a commit, for another thread to give the engine back
    raised = 0  # the number of the last exception that a handler has raised in a commit


state = _State()


def watch(commits: HasCommits) -> None:
    """Have handlers wait for the commits of one more engine."""
    _watched.add(commits)
    wrap()


def wrap() -> None:
    """Wrap the handlers that the program has set since the last call. Other threads than the main one do
    nothing."""
    if _is_main():
        for number in _NUMBERS:
            handler = _signal.getsignal(number)  # without the enumerations of `signal`: each call comes here
            if type(handler) is not _Deferring and callable(handler):
                signal.signal(number, _Deferring(handler))


def unwatch(commits: HasCommits) -> None:
    """Undo `watch`. After the last one the program has its own handlers back; unless another thread than the
    main one makes this call."""
    _watched.discard(commits)
    if not _watched and _is_main():
        for number in _NUMBERS:
            if type(handler := signal.getsignal(number)) is _Deferring:
                signal.signal(number, handler.handler)


def of_program(number: int) -> Any:
    """Return the handler that the program has set for a signal, as `signal.getsignal` without the wrapper."""
    handler = signal.getsignal(number)
    return handler.handler if type(handler) is _Deferring else handler


def _in_commit() -> bool:
    return any(commits.is_mine() for commits in tuple(_watched))


def run_deferred() -> None:
    """Run the handlers of the signals that came meanwhile; one may raise. A commit has ended."""
    if _is_main() and not _in_commit():
        _run()


def _run() -> None:
    while deferred:
        number, handler = deferred.pop(0)
        try:
            handler(number, None)
        except BaseException:
            rest = [number for number, _ in deferred]
            deferred.clear()
            for number in rest:  # they come again, as after any handler that raises; in a commit they wait
                signal.raise_signal(number)
            raise


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def hear() -> None:
    """This thread is about to wait, or goes on to: the main thread maybe in a commit."""
    if deferred and _is_main() and not state.whole and not state.runs:
        state.runs = True
        try:
            _run()
        except BaseException as error:
            state.raised = id(error)
            raise
        finally:
            state.runs = False


def has_raised(error: BaseException) -> bool:
    """Return whether a handler has just raised `error` where a commit waits, and not what it waits for."""
    return state.raised == id(error)


def in_handler() -> bool:
    """Whether a handler that came in the middle of a commit makes this call."""
    return state.runs and _is_main()


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """A part of a commit in which no handler ends a wait. Its waits are short. The caller is in a commit."""
    main = _is_main()
    state.whole += main
    try:
        yield
    finally:
        state.whole -= main


def _after_fork() -> None:
    deferred.clear()
    state.whole, state.runs, state.waits = 0, False, False


waiting.hear = hear
os.register_at_fork(after_in_child=_after_fork)
