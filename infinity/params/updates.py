"""Which updates run in the background, and how to wait for them.

The update runs on one worker thread, in the order of the forward. A thread that needs a unit waits for
that unit; a thread that needs everything waits for all units. A failure wakes every waiter, and each raises
the error, so no thread waits for an update that will not come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infinity.core.commits import in_backward
from infinity.core.errors import GradientError, InfinityError
from infinity.core.spans import Recorder, now
from infinity.core.waiting import Bell
from infinity.hardware.device import Event
from infinity.planning.partition import Chunk
from infinity.storage.transfer import copy_error

from .param import ShardedParam


class Updates:
    """Chunks whose update was posted and whose kernel has not run yet. Any thread may ask and wait; one
    posts, and one, the worker, finishes.

    Attributes:
        accumulation: the backwards of a step; None: nobody counts them.
        used: gradients that the step that is to come has used already, by unit, with their factors:
            [Note: behind the backward].
    """

    def __init__(self, recorder: Recorder, accumulation: int | None = None) -> None:
        self.accumulation = accumulation
        self.used: dict[int, Mapping[ShardedParam, tuple[Any, float]]] = {}
        self._recorder = recorder
        self.finished_at = 0  # when the last kernel had run, for traces
        self._changed = Bell()
        self._chunks: dict[int, int] = {}  # chunk → unit
        self._units: dict[int, int] = {}  # unit → chunks left
        self._copied: dict[int, Event] = {}  # unit → the last of its copies to the device, which are in order
        self._error: BaseException | None = None
        self._reported = False
        self._blocks_loads = True
        self._listeners: list[Callable[[int | None], None]] = []

    def listen(self, call: Callable[[int | None], None]) -> None:
        """Register `call`, which gets the id of each chunk that was updated, and None after a failure, on the
        thread that makes the change."""
        self._listeners.append(call)

    def post(self, chunks: Iterable[Chunk], *, blocks_loads: bool = True) -> None:
        """Note that the update of `chunks` is about to run; nothing else may be pending. `blocks_loads`: it
        makes the copies that the next forward uses, so loads wait for it."""
        posted = {chunk.id: chunk.unit for chunk in chunks}
        self._blocks_loads = blocks_loads
        self._units, self._chunks = dict(Counter(posted.values())), posted

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Note that the update of `chunks`, all that it has of their units, is about to run, too."""
        posted = {chunk.id: chunk.unit for chunk in chunks}
        self._units.update(Counter(posted.values()))
        self._chunks.update(posted)

    def use(self, unit: int, gradients: Mapping[ShardedParam, tuple[Any, float]]) -> None:
        """Note that an update of a unit has used its gradients before the `step()` that it belongs to."""
        self.used[unit] = gradients

    def forget_used(self) -> bool:
        """Forget what was used; return whether that was anything."""
        lost = bool(self.used)
        self.used.clear()
        return lost

    def check_use(self, unit: int, name: str) -> None:
        """Raise `GradientError` where a hook, a recomputation, or a function of the user's, uses a unit in
        the backward that has updated it, or behind that and before `step()`."""
        if unit in self.used:
            raise self.early(f"a use of the parameters of unit {name!r}", after=not in_backward())

    def early(self, what: str, *, after: bool) -> GradientError:
        """Return the error for `what` comes in the last backward of a step, or `after` that."""
        return GradientError(
            f"{what} before the `step()` whose update has begun in its last backward",
            expected='with update="backward", `step()` right after the last backward of a step, of '
            f"accumulation={self.accumulation}; each backward counts since the last step or "
            "`zero_grad()`, also one that raised, and one of `torch.autograd.grad`",
            found=f"{what} {'behind' if after else 'in'} that backward",
            cure="call `step()` first, after that backward"
            if after
            else 'move it after `step()`, or train with update="overlap"',
        )

    def finish(self, chunk: Chunk, copied: Event | None = None) -> None:
        """Note that `chunk` has its new values: reads from now on see them. `copied`: on a device those do
        that come after this event."""
        if copied is not None:
            self._copied[chunk.unit] = copied
        self.finished_at = now()
        unit = self._chunks.pop(chunk.id, None)
        if unit is not None:
            self._units[unit] -= 1
            if not self._units[unit]:
                del self._units[unit]
                self._changed.ring()  # who waits here waits for units: to wake for each chunk would cost more
        for call in self._listeners:
            call(chunk.id)

    def fail(self, error: BaseException) -> None:
        """Note that what is left will not be updated; every waiter raises `error`."""
        self._error = error
        self._changed.ring()
        for call in self._listeners:
            call(None)

    def check(self) -> None:
        """Raise the error of an update, if one failed."""
        error = self._error
        if error is not None:
            self._reported = True
            raise _copy_error(error)

    @property
    def failed(self) -> bool:
        """Whether an update failed."""
        return self._error is not None

    def check_once(self) -> None:
        """Raise the error of an update, if no call has raised it yet."""
        if not self._reported:
            self.check()

    def busy(self) -> bool:
        """Return whether anything still waits for its update."""
        return bool(self._chunks)

    def has_chunk(self, chunk: int) -> bool:
        """Return whether a chunk still waits for its update; raise if that failed."""
        if chunk not in self._chunks:
            return False
        self.check()
        return True

    def blocks_load(self, chunk: int) -> bool:
        """Return whether a load of a chunk has to wait for its update; raise if the update failed. This does
        not count as a report to the user, because no call may be waiting for the load."""
        if not self._blocks_loads or chunk not in self._chunks:
            return False
        if self._error is not None:
            raise _copy_error(self._error)
        return True

    @property
    def units(self) -> list[int]:
        """The units that still wait for their update, or never got it."""
        return list(self._units)

    def has_unit(self, unit: int) -> bool:
        """Return whether a unit still waits for its update."""
        return unit in self._units

    def wait_unit(self, unit: int) -> None:
        """Block until a unit is updated; raise if that failed."""
        if unit not in self._units:
            return
        wait = self._recorder.waits()
        self._wait(lambda: unit not in self._units)
        self._recorder.waited(wait, ("update", 0), unit=unit)

    def copied(self, unit: int) -> Event | None:
        """Return what the device has to wait for before it uses a unit that is placed there, and updated."""
        return self._copied.get(unit)

    def wait_all(self) -> None:
        """Block until nothing waits for its update; raise if that failed."""
        self._wait(lambda: not self._chunks)

    def _wait(self, over: Callable[[], bool]) -> None:
        while not over():
            self.check()
            self._changed.wait(lambda: self._error is not None or over())


def _copy_error(error: BaseException) -> BaseException:
    """Return `error` for another raise: one object must not gather the tracebacks of all."""
    if isinstance(error, InfinityError):
        copy = copy_error(error)
        copy.__cause__ = error
        return copy
    return error
