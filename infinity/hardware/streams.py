"""Host streams: a queue of calls that one thread runs in order, with events like those of a device.

With INFINITY_DELAY_SEED set, they sleep for a random time before each task, so that a missing wait shows on
a machine without a GPU.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from infinity.core.errors import OF_A_FORK, ClosedError
from infinity.core.threads import start
from infinity.core.waiting import POLL, Latch

__all__ = ["POLL", "Event", "HostStream", "Task", "is_over", "wait_over"]


class Event(Protocol):
    """Something that happens on a stream."""

    def done(self) -> bool:
        """Return whether it has happened; raise what went wrong."""

    def wait(self) -> None:
        """Block the host until it has happened; raise what went wrong."""


def is_over(event: Event) -> bool:
    """Return whether `event` has happened, or never will: who waits for it is told what went wrong."""
    if isinstance(event, Task):
        return event.is_over
    try:
        return event.done()
    except MemoryError:
        return False  # for the look, not of the event: what it uses may still be read
    except Exception:
        return True


def wait_over(event: Event) -> None:
    """Wait for `event`, whatever became of it: what it uses may be freed afterwards."""
    while True:
        try:
            event.wait()
            return
        except Exception as error:  # the event's own; or there was no memory to wait with, or a handler's
            if is_over(event):
                return
            if not isinstance(error, MemoryError):
                raise


class Task:
    """One call on a host stream; an `Event` that also carries the result or the error."""

    __slots__ = ("_call", "_error", "_finished", "_result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._error: BaseException | None = None
        self._result: Any = None
        self._finished = Latch()

    def run(self) -> None:
        """Run the call (on the stream's thread)."""
        call, self._call = self._call, None
        try:
            if call is not None:
                self._result = call()
        except BaseException as error:
            self._error = error
        finally:
            del call  # what it holds goes home before anyone is told
            self._finished.open()

    def fail(self, error: BaseException) -> None:
        """Finish without running."""
        self._call, self._error = None, error
        self._finished.open()

    @property
    def error(self) -> BaseException | None:
        """What the call has raised."""
        return self._error

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised."""
        return self._finished.is_open

    def done(self) -> bool:
        """Return whether the call has returned; raise its error."""
        if not self._finished.is_open:
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        """Block until the call has returned; raise its error."""
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def pause(self, seconds: float) -> bool:
        """Block until the call has returned, for `seconds` at most; return whether it has."""
        end = time.monotonic() + seconds
        while not self._finished.wait(POLL) and time.monotonic() < end:
            pass
        return self._finished.is_open

    def result(self) -> Any:
        """Wait, then return what the call returned."""
        self.wait()
        return self._result


class HostStream:
    """A queue of calls that one daemon thread runs in order, inside of what `there` returns, if given: of a
    device's `worker`, where these put work on a device."""

    def __init__(
        self,
        name: str,
        *,
        there: Callable[[], AbstractContextManager[Any]] = nullcontext,
        delay_seed: int | None = None,
    ) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._closed = False
        if delay_seed is None and os.environ.get("INFINITY_DELAY_SEED"):
            delay_seed = int(os.environ["INFINITY_DELAY_SEED"])
        delay = random.Random(f"{name}{delay_seed}") if delay_seed is not None else None
        self._thread = threading.Thread(
            target=_run_stream, args=(self._queue, delay, there), name=f"infinity-{name}", daemon=True
        )
        start(self._thread)
        # The thread holds the queue, not the stream, so a forgotten stream ends its thread.
        self._finalizer = weakref.finalize(self, self._queue.put, None)
        self._finalizer.atexit = False  # `close` does it, or it goes with the process

    def submit(self, call: Callable[[], Any]) -> Task:
        """Queue `call`; return its task.

        Raises:
            ClosedError: the stream was closed, or belongs to another process.
        """
        if self._closed or os.getpid() != self._pid:
            raise ClosedError(
                f"the stream {self.name!r} is not usable",
                expected="an open stream of this process",
                found="a closed one" if self._closed else "a forked process",
                cure="wrap a model again" if self._closed else OF_A_FORK,
            )
        task = Task(call)
        self._queue.put(task)
        return task

    def is_here(self) -> bool:
        """Return whether the caller is a call of this stream."""
        return threading.current_thread() is self._thread

    def synchronize(self) -> None:
        """Block until everything queued so far has run. Errors stay with their tasks."""
        self.submit(lambda: None).wait()

    @property
    def is_mine(self) -> bool:
        """Whether it is open, and this process has its thread."""
        return not self._closed and self._pid == os.getpid()

    def let_go(self) -> None:
        """`close`, without waiting for the end."""
        self._closed = True
        self._finalizer()

    def close(self) -> None:
        """Run what is queued, end the thread. What a task waits for has a deadline of its own."""
        self._closed = True
        self._finalizer.detach()
        self._queue.put(None)  # each time: an interrupt may have ended the last call before it came here
        while self._thread.is_alive() and os.getpid() == self._pid:
            self._thread.join(POLL)


def _run_stream(
    tasks: queue.SimpleQueue[Task | None],
    delay: random.Random | None,
    there: Callable[[], AbstractContextManager[Any]],
) -> None:
    with there():
        while (task := tasks.get()) is not None:
            if delay is not None and delay.random() < 0.5:
                time.sleep(delay.random() * 0.004)
            task.run()
            del task
