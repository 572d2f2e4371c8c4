"""The units' memory on the device, within a number of bytes: which unit to load next, and which to evict.

A unit that is not in use stays while there is room. When the engine needs room, it evicts the unit whose next
use is farthest away first: [Note: load and gather]. A held unit stays as long as it is held, over the budget
if necessary: [Note: held units].

[Note: worth the wait] A prefetched unit may take the place of a unit whose next use is later. But a unit that
is used until then, and whose next use is later still, would be the better victim. A cache that never waits
for it loads a whole model in each cycle, although a part could have stayed. So the cache waits for the better
victim, but not until a drive has nothing to do: if fewer bytes are used before a unit than the unit has
itself, it takes the room that there is (P. Cao et al., "A study of integrated prefetching and caching
strategies", 1995: this is between their two strategies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import torch

from infinity.core.spans import Recorder
from infinity.hardware.device import Device
from infinity.planning.schedule import Schedule

from .load import Loader
from .publish import Publisher
from .unit import IDLE_STATES, ParamUnit, UnitState
from .updates import Updates
from .uses import UseKind, Uses

_T = TypeVar("_T")
#: The rank of what no record has.
_NEVER: Final = math.inf


class Cache:
    """Which units have memory on the device. `capacity`: bytes, for the units that are not placed there.

    Attributes:
        loads: number of loads that were begun.
        peak: largest number of bytes that were in use at once.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        uses: Uses,
        loader: Loader,
        capacity: int,
        device: Device,
        updates: Updates,
        publisher: Publisher,
        recorder: Recorder,
    ) -> None:
        self.units = units
        self._uses = uses
        self.schedule = Schedule()
        self.loads = self.peak = 0
        self._loader = loader
        self._capacity = capacity
        self._device = device
        self._updates = updates
        self._publisher = publisher
        self._recorder = recorder
        self._warned = False

    @property
    def allocated(self) -> int:
        """Bytes of the units that have their memory and are not placed on the device."""
        return sum(u.nbytes for u in self.units if not u.on_device)

    def load(self, unit: ParamUnit, *, urgent: bool = False) -> None:
        """Start to load a unit, in the version that it is to show. Raises what `ParamUnit.load` raises."""
        self._device.trim()
        unit.load(self._loader, self._publisher.slots(unit), urgent=urgent)
        self.loads += 1
        self.peak = max(self.peak, self.allocated)

    def load_now(self, unit: ParamUnit) -> None:
        """Load a unit that is needed, and evict any units for it."""
        self._make_room(unit)
        try:
            self.load(unit, urgent=True)
        except torch.OutOfMemoryError:  # what nobody uses yet gives way, within the budget or not
            for other in self._idle(_first(self.schedule.upcoming())):
                self._drop(other)
            self.load(unit, urgent=True)

    def invalidate(self, unit: ParamUnit) -> None:
        """Free the memory of an idle unit, whose values are about to change to another version."""
        if unit.state in IDLE_STATES:
            self.wait_for(unit, unit.invalidate)
            if unit.state is UnitState.FILLED:
                unit.warn_held()

    def wait_for(self, unit: ParamUnit, call: Callable[[], _T]) -> _T:
        """Do what waits for a unit's load; if that is under way, the user's thread stalls."""
        load = unit.last_load
        if load is None or load.is_over():
            return call()
        wait = self._recorder.waits()
        result = call()
        self._recorder.waited(wait, *load.causes(), unit=unit.index)
        return result

    def forward_order(self) -> list[ParamUnit]:
        """Return all units in the order of the last forward; those it did not use come last."""
        order = dict.fromkeys([*self.schedule.recorded(), *range(len(self.units))])
        return [self.units[i] for i in order]

    def prefetch(self, *, newest: bool) -> None:
        """Load what comes next, nearest first, as far as there is room without what comes before it;
        `newest`: in the newest version. What is being updated comes straight from there."""
        if not any(u.is_away for u in self.units):
            return  # the usual answer, and it is asked for at each use of a unit
        order = list(self.schedule.upcoming())
        before = 0  # bytes that are used before it, not counting what is in use now
        for index in dict.fromkeys(order):
            unit = self.units[index]
            nbytes = unit.layout.gathered_nbytes
            if not unit.is_away or unit.waits_for_owner:
                before += 0 if unit.in_use else nbytes
                continue
            if newest and self._updates.has_unit(index):
                return  # which version is the newest is not known yet
            need = unit.missing_nbytes
            rank = order.index(index)
            if self.allocated + need > self._capacity and not self._make_way(need, order, rank, before):
                return
            unit.newest = newest and self._publisher.is_newer(unit)
            try:
                self.load(unit)
            except torch.OutOfMemoryError:
                return  # what is loaded for later can be loaded later
            before += nbytes

    def _make_way(self, need: int, order: Sequence[int], rank: int, before: int) -> bool:
        """Free room for `need` bytes that are used next at `order[rank]`, after `before` others; return
        whether there is. See [Note: worth the wait]."""
        sooner = {i for i in order[:rank] if not self.units[i].persistent}

        def goes(next_use: float) -> bool:
            if next_use <= rank:
                return False
            return before < need or next_use == _NEVER or sooner.issubset(order[rank + 1 : int(next_use)])

        return self._evict(need, _first(order), goes)

    def _make_room(self, unit: ParamUnit) -> None:
        need = unit.missing_nbytes
        if self.allocated + need <= self._capacity or self._evict(need, _first(self.schedule.upcoming())):
            return
        if not self._warned:
            self._warned = True
            unit.warn_room(self.allocated + need, self._capacity)

    def _evict(
        self, need: int, ranks: Mapping[int, int], goes: Callable[[float], bool] = lambda _: True
    ) -> bool:
        """Free idle units, the one needed last first, until there is room for `need` bytes; return whether
        there is. Only those of which `goes` says so, given the rank of their next use."""
        room = self._capacity - self.allocated
        for other in self._idle(ranks):
            if room >= need or not goes(ranks.get(other.index, _NEVER)):
                break
            if self._drop(other):
                room += other.layout.gathered_nbytes
        return room >= need

    def _drop(self, unit: ParamUnit) -> bool:
        """Free an idle unit's memory; return whether that could be done."""
        gone = unit.state not in IDLE_STATES or self.wait_for(unit, unit.reshard)
        if not gone and not self._uses.has(UseKind.TASK):
            unit.warn_held()  # but a node of a backward lets go of what it unpacked
        return gone

    def _idle(self, ranks: Mapping[int, int]) -> list[ParamUnit]:
        """Units that may go, the one needed last first."""
        units = [u for u in self.units if not u.persistent and not u.in_use and u.state in IDLE_STATES]
        return sorted(units, key=lambda u: -ranks.get(u.index, _NEVER))


def _first(order: Iterable[int]) -> dict[int, int]:
    """Return where each unit comes first in an order, nearest first."""
    ranks: dict[int, int] = {}
    for rank, index in enumerate(order):
        ranks.setdefault(index, rank)
    return ranks
