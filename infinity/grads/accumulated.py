"""A unit's gradient on one rank, accumulated over backwards, before the ranks reduce it.

In ZeRO stages 0 and 1 every rank keeps its whole gradients until the step. The gradients of the first
backward stay in the compute dtype, as autograd made them; those of later backwards are added in fp32.
"""

from __future__ import annotations

import torch

from infinity.hardware.device import Device, Event
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.partition import Run

from .buffer import Arrival, UnitBuffer
from .gradient_chunks import ChunkGradients
from .sending import Sending


class Accumulated:
    """The gradients of one unit, of one backward and those that are `add`ed.

    All is done in the order of the stream that the first of them was made on.
    """

    def __init__(self, first: UnitBuffer, device: Device) -> None:
        self.layout = first.layout
        self.arrivals: dict[int, Arrival] = first.arrivals
        self.there = first.there
        self._first: UnitBuffer | None = first
        self._device = device
        self._wide: dict[int, torch.Tensor] = {}  # fp32, by the first byte of a run
        first.seal()

    @property
    def is_wide(self) -> bool:
        """Whether it is fp32, because more than one backward is in it."""
        return self._first is None

    def add(self, more: UnitBuffer) -> None:
        """Add what a later backward has made of it."""
        if not more.arrivals:
            return
        more.seal()
        if self._is_empty:
            for index, arrival in more.arrivals.items():
                self._note(index, arrival)
            self._first, self.there = more, more.there
            return
        made = more.mark()
        self.widen()
        with self.there(), torch.no_grad():
            self._device.wait_on_device(made)
            for index, arrival in more.arrivals.items():
                self._add(index, arrival, more)
            done = self._device.mark()
        with more.there():  # its memory may go to something else there
            self._device.wait_on_device(done)

    def _add(self, index: int, arrival: Arrival, more: UnitBuffer) -> None:
        before, mine = self.arrivals.get(index), self._place(index)
        if arrival.zero:
            mine.zero_()
        elif arrival.fresh or before is None:
            mine.copy_(more.values(index))
        else:
            if arrival.factor != 1.0:
                mine.mul_(arrival.factor)
            mine.add_(more.values(index))
        self._note(index, arrival)

    def _note(self, index: int, arrival: Arrival) -> None:
        before = self.arrivals.get(index)
        if before is not None and not arrival.fresh:
            arrival = Arrival(before.fresh, before.factor * arrival.factor)
        self.arrivals[index] = arrival

    def join(self, index: int, arrival: Arrival) -> None:
        """Take part in what has arrived of a parameter on another rank alone: with zeros."""
        before = self.arrivals.get(index)
        if before is not None and not before.zero and not self._is_empty:
            with self.there():
                mine = self._place(index)
                mine.zero_() if arrival.fresh else mine.mul_(arrival.factor)
        self._note(index, arrival)

    def widen(self) -> None:
        """Convert the gradient to fp32."""
        first, self._first = self._first, None
        if first is None:
            return
        with self.there():
            for run in self.layout.runs:
                if run.trainable:
                    narrow = first.run(run)
                    self._wide[run.begin] = narrow.to(torch.float32)

    def mark(self) -> Event | None:
        """Return an event of all that was done with it so far."""
        with self.there():
            return self._device.mark()

    def drop(self, index: int) -> None:
        """Forget what has arrived of a parameter."""
        arrival = self.arrivals.pop(index, None)
        if arrival is not None and not arrival.zero and not self._is_empty:
            with self.there():
                self._place(index).zero_()

    @property
    def _is_empty(self) -> bool:
        """Whether nothing but zeros has arrived on this rank, which take no memory."""
        return self._first is not None and not self._first.nbytes

    def _place(self, index: int) -> torch.Tensor:
        if self._first is not None:
            return self._first.values(index)
        run, begin = self.layout.place(index)
        return self._wide[run.begin][begin : begin + self.layout.params[index].numel]

    def run(self, run: Run) -> torch.Tensor:
        """Return a run of it, of trainable parameters: flat; zeros where nothing arrived on this rank."""
        return self._wide[run.begin] if self._first is None else self._first.run(run)


class Waiting:
    """The gradients of all units that wait until ranks add up theirs.

    Attributes:
        units: what there is, by unit.
        came: what has arrived in this backward, by unit.
    """

    def __init__(self, chunks: ChunkGradients, sending: Sending, updates: Updates, device: Device) -> None:
        self.units: dict[int, Accumulated] = {}
        self.came: dict[int, dict[int, Arrival]] = {}
        self._chunks = chunks
        self._sending = sending
        self._updates = updates
        self._device = device

    def add(self, unit: ParamUnit, buffer: UnitBuffer | None) -> None:
        """Add what a backward has brought of a unit."""
        if buffer is None or not buffer.arrivals:
            return
        came = self.came.setdefault(unit.index, {})
        # Of several in one backward, as of a layer that is recomputed reentrantly, the first one counts.
        came.update({i: a for i, a in buffer.arrivals.items() if i not in came or came[i].zero})
        if unit.index in self.units:
            self.units[unit.index].add(buffer)
        else:
            self._begin(unit, buffer)

    def join(self, unit: ParamUnit, index: int, arrival: Arrival) -> None:
        """Take part in what has arrived of a parameter on another rank alone."""
        if unit.index not in self.units:
            self._begin(unit, UnitBuffer(unit.layout, self._device))
        self.units[unit.index].join(index, arrival)

    def _begin(self, unit: ParamUnit, buffer: UnitBuffer) -> None:
        # What was reduced before makes way: of an update that reads it nothing is left, as a forward has
        # used the unit.
        self._sending.wait(unit.index)
        self._updates.wait_unit(unit.index)
        self._chunks.free(unit)
        self.units[unit.index] = Accumulated(buffer, self._device)
