"""Reductions that overlap with the backward: [Note: behind compute]."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from infinity.hardware.device import Device, Task
from infinity.hardware.ranks import Comm
from infinity.params.unit import ParamUnit

from .buffer import Arrival, UnitBuffer
from .reduction import agree, reduce


class Reduced(NamedTuple):
    """A unit's gradient, added up: what of it had arrived on this rank, and all of it."""

    unit: ParamUnit
    mine: dict[int, Arrival]
    buffer: UnitBuffer


class Reducing:
    """Adds up what has arrived of units on all ranks, in the order in which that is begun."""

    def __init__(self, comm: Comm, device: Device) -> None:
        self._comm = comm
        self._device = device
        self._under_way: deque[tuple[ParamUnit, UnitBuffer, Task]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def has(self, unit: int) -> bool:
        """Return whether a unit's is under way."""
        return any(u.index == unit for u, *_ in self._under_way)

    def begin(self, unit: ParamUnit, mine: UnitBuffer) -> None:
        """Begin with a unit, of which `mine` has arrived on this rank; it is sealed."""
        made = mine.mark()

        def sums() -> UnitBuffer:
            arrivals, is_wide = agree(self._comm, mine.layout, mine.arrivals, is_wide=mine.is_wide)
            if all(arrival.zero for arrival in arrivals.values()):
                zeros = UnitBuffer(mine.layout, self._device)
                zeros.arrivals = arrivals
                return zeros
            with self._device.aside():
                self._device.wait_on_device(made)
                if is_wide:
                    mine.widen()
                    self._device.wait_on_device(mine.mark())
                return reduce(self._comm, mine, arrivals, self._device, is_wide=is_wide)

        self._under_way.append((unit, mine, self._comm.begin(sums)))

    def next(self) -> Reduced:
        """Wait for the oldest.

        Raises:
            DivergenceError: a gradient replaces another one here, and is added to it elsewhere.
            RankError: another rank failed, or does something else.
        """
        unit, mine, task = self._under_way.popleft()
        self._comm.finish(task)
        return Reduced(unit, mine.arrivals, task.result())
