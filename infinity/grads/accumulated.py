"""Units' gradients on one rank, accumulated over backwards, before the ranks reduce them.

In ZeRO stages 0 and 1 every rank keeps its whole gradients until the step. The gradients of the first
backward stay in the compute dtype, as autograd made them; those of later backwards are added in fp32.
"""

from __future__ import annotations

from infinity.hardware.device import Device
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates

from .buffer import Arrival, UnitBuffer
from .gradient_chunks import ChunkGradients
from .sending import Sending


class Waiting:
    """The gradients of all units that wait until ranks add up theirs.

    Attributes:
        units: what there is, by unit.
        came: what has arrived in this backward, by unit.
    """

    def __init__(self, chunks: ChunkGradients, sending: Sending, updates: Updates, device: Device) -> None:
        self.units: dict[int, UnitBuffer] = {}
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
        buffer.seal()
        mine = self.units.get(unit.index)
        if mine is None:
            self._begin(unit, buffer)
        elif mine.is_empty:
            for index, arrival in buffer.arrivals.items():
                mine.note(index, arrival)
            buffer.arrivals = mine.arrivals
            self.units[unit.index] = buffer
        else:
            mine.merge(buffer)

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
        self.units[unit.index] = buffer
