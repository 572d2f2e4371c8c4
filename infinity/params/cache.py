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
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from infinity.core.spans import Recorder
from infinity.hardware.device import Device
from infinity.planning.lookahead import Lookahead
from infinity.planning.schedule import Schedule

from .load import Loader
from .publish import Publisher
from .unit import IDLE_STATES, WHOLE_STATES, ParamUnit, UnitState
from .updates import Updates
from .uses import Uses

_T = TypeVar("_T")


class Cache:
    """Which units have memory on the device. `capacity`: bytes, for the units that are not placed there.

    It looks at a unit when that has another state, and not at all units at each visit (`Lookahead`).

    Attributes:
        away: the units that have to be loaded before their next use, by number.
        late: the loads that found no memory: [Note: late loads].
        allocated: bytes of the units that have their memory and are not placed on the device.
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
        self.late: deque[ParamUnit] = deque()  # some may have begun, or gone, meanwhile
        sizes = [u.layout.gathered_nbytes for u in units]
        self._ahead = Lookahead(self.schedule, sizes, {u.index for u in units if u.persistent})
        self.away = self._ahead.away
        self.allocated = sum(sizes[u.index] for u in units if not u.on_device)
        for unit in units:
            if not unit.on_device:
                unit.on_state = self._changed
                self._changed(unit)

    def _changed(self, unit: ParamUnit) -> None:
        """A unit has another state."""
        state, index = unit.state, unit.index
        away = state is UnitState.SHARDED and not (unit.kept and unit.waits_for_owner)
        if away != (index in self.away):
            self.allocated += -unit.layout.gathered_nbytes if away else unit.layout.gathered_nbytes
        there = not (unit.persistent or state is UnitState.SHARDED)
        self._ahead.put(index, away=away, there=there, gathered=state in WHOLE_STATES)

    def next_ungathered(self) -> ParamUnit | None:
        """Return the unit that comes next in this cycle, of those that are not gathered."""
        index = self._ahead.next_ungathered()
        return None if index is None else self.units[index]

    def lowest_ungathered(self, count: int) -> ParamUnit | None:
        """Return the first of the first `count` units that is not gathered."""
        index = self._ahead.lowest_ungathered(count)
        return None if index is None else self.units[index]

    def load(self, unit: ParamUnit, *, urgent: bool = False) -> None:
        """Start to load a unit, in the version that it is to show. Raises what `ParamUnit.load` raises."""
        self._device.trim()
        unit.load(self._loader, self._publisher.slots(unit), urgent=urgent)
        if unit.late is not None:
            self.late.append(unit)
        self.loads += 1
        self.peak = max(self.peak, self.allocated)

    def load_now(self, unit: ParamUnit) -> None:
        """Load a unit that is needed, and evict any units for it."""
        self._evict_for_use(unit)
        try:
            self.load(unit, urgent=True)
        except torch.OutOfMemoryError:  # what nobody uses yet gives way, within the budget or not
            self._evict(unit.missing_nbytes, lambda _: True, room=-math.inf)
            self.load(unit, urgent=True)

    def begin_late(self, unit: ParamUnit) -> None:
        """Begin the load of a unit whose gather comes now, if it is late: [Note: late loads]. Loads that
        come later give way. What they gather, and when, stays as it is on the other ranks.

        Raises:
            torch.OutOfMemoryError: the device has no room without them, either.
        """
        if unit.late is None:
            return
        try:
            unit.begin_late(urgent=True)
        except torch.OutOfMemoryError:
            self.late.extend(u for u in self.units if not u.in_use and u.put_off())
            unit.begin_late(urgent=True)

    def _try_late(self) -> None:
        """Try again to begin the loads that found no memory, in the order of their use."""
        while self.late:
            try:
                self.late[0].begin_late(urgent=False)
            except torch.OutOfMemoryError:
                return
            self.late.popleft()

    def invalidate(self, unit: ParamUnit) -> None:
        """Free the memory of an idle unit, whose values are about to change to another version."""
        if unit.state in IDLE_STATES:
            self.wait_for(unit, unit.invalidate)
            if unit.kept:
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
        if self.late:
            self._try_late()
        while self.away:
            found = self._ahead.next_away()
            if found is None or (newest and self._updates.has_unit(found[0])):
                return  # which version is the newest is not known yet
            unit, place = self.units[found[0]], found[1]
            need = unit.missing_nbytes
            if self.allocated + need > self._capacity and not self._evict_for_prefetch(need, place):
                return
            unit.newest = newest and self._publisher.is_newer(unit)
            try:
                self.load(unit)
            except torch.OutOfMemoryError:
                return  # what is loaded for later can be loaded later

    def _evict_for_prefetch(self, need: int, place: int) -> bool:
        """Free room for `need` bytes that are used next at a place of the schedule; return whether there is.
        See [Note: worth the wait]."""
        before = self._ahead.nbytes_before(self._uses.units())

        def goes(next_use: float) -> bool:
            if next_use <= place:
                return False
            return before < need or next_use == math.inf or self._ahead.come_again_before(next_use)

        return self._evict(need, goes)

    def _evict_for_use(self, unit: ParamUnit) -> None:
        need = unit.missing_nbytes
        if self.allocated + need <= self._capacity or self._evict(need, lambda _: True):
            return
        if not self._warned:
            self._warned = True
            unit.warn_room(self.allocated + need, self._capacity)

    def _evict(self, need: int, goes: Callable[[float], bool], *, room: float | None = None) -> bool:
        """Free idle units, the one needed last first, until there is room for `need` bytes; return whether
        there is. Only those of which `goes` says so, given the place of their next use."""
        room = self._capacity - self.allocated if room is None else room
        tried: list[int] = []
        try:
            while room < need:
                found = self._ahead.take_farthest(self._uses.units())
                if found is None:
                    break
                tried.append(found[0])
                if not goes(found[1]):
                    break
                other = self.units[found[0]]
                if self._drop(other):
                    room += other.layout.gathered_nbytes
        finally:
            for index in tried:
                self._ahead.put_back(index)
        return room >= need

    def _drop(self, unit: ParamUnit) -> bool:
        """Free an idle unit's memory; return whether that could be done."""
        gone = unit.state in IDLE_STATES and self.wait_for(unit, unit.reshard)
        if not gone and unit.state in IDLE_STATES and not self._uses.tasks:
            unit.warn_held()  # but a node of a backward lets go of what it unpacked
        return gone
