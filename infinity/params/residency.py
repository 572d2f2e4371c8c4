"""Which units are on the device, within a number of bytes, and what is fetched next."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch

from infinity.core.errors import ParameterChangedError, ParameterError
from infinity.core.locks import lock
from infinity.core.spans import Recorder, now
from infinity.hardware.device import Device, Event
from infinity.hardware.shelter import Shelter, sheltered
from infinity.planning.schedule import Schedule

from .fetch import Fetcher
from .param import ShardedParam
from .publish import Publisher
from .unit import ParamState, ParamUnit
from .updates import Updates

_T = TypeVar("_T")


class Residency:
    """Decides which units are on the device, within a number of bytes.

    A unit that nobody uses stays while there is room; when room is needed, the one whose next
    use is farthest away goes first. One whose memory somebody else holds stays as long as that lasts,
    over the budget if need be: [Note: held units].
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        fetcher: Fetcher,
        capacity: int,
        device: Device,
        updates: Updates,
        publisher: Publisher,
        recorder: Recorder,
        shelter: Shelter,
    ) -> None:
        self.units = units
        self.shelter = shelter
        self._recorder = recorder
        self._newest = False
        self.schedule = Schedule()
        self.fetches = self.hits = 0
        self.missed = 0  # units that were needed before their fetch had begun
        self.peak = 0  # bytes
        self._capacity = capacity
        self._fetcher = fetcher
        self._device = device
        self._updates = updates
        self._publisher = publisher
        # Resident units whose values are on their way, and how to wait for them.
        self._suspended: dict[int, Callable[[], None]] = {}
        self._suspending = lock("residency")
        self._warned = False
        self.in_backward = False
        self._last: tuple[int, float] | None = None  # the unit that is in use, and since when

    def show(self, newest: bool) -> None:
        """Have `acquire` and `prefetch` bring the newest version, or the one in front."""
        self._newest = newest and self.has_two_versions

    @property
    def shows_newest(self) -> bool:
        """Which version they bring: [Note: two versions]."""
        return self._newest

    @property
    def has_two_versions(self) -> bool:
        """Whether there ever are two: [Note: two versions]."""
        return self._publisher.has_two_versions

    @property
    def allocated(self) -> int:
        """Bytes of the units that have their memory and are not resident."""
        return sum(u.layout.copy_nbytes for u in self.units if u.filled and not u.resident)

    def held(self) -> list[ParamUnit]:
        """Return the units whose memory somebody else holds, of those that nobody uses or writes."""
        idle = (u for u in self.units if u.filled and not u.in_use and u.fetch_is_over())
        return [u for u in idle if u.index not in self._suspended and u.is_held()]

    @sheltered
    def acquire(
        self,
        indices: Iterable[int],
        user: object,
        *,
        note: bool = True,
        keep: bool = False,
        newest: bool | None = None,
    ) -> None:
        """Make units UNSHARDED and keep them for `user` until `release`. Idempotent per user.

        `note`: record it in the schedule. `keep`: the claim outlives `forget_users`. `newest`: which
        version, if another one than `show` said.

        Raises:
            ParameterError: somebody else uses another version of one of them.
        """
        wanted = [self.units[i] for i in indices]
        if note and wanted and self._last is not None:
            before, since = self._last
            self._fetcher.pace.used(before, time.monotonic() - since)
        for unit in wanted:
            self._show(unit, user, self._newest if newest is None else newest and self.has_two_versions)
        for unit in wanted:
            (unit.keepers if keep else unit.users).add(user)
            if note:
                self.schedule.note(unit.index)
        for unit in wanted:
            if unit.state is ParamState.SHARDED:
                self._make_room(unit)
                self.missed += 1
                self._start_now(unit)
            elif not unit.resident and unit.state is ParamState.FETCHING:
                self.hits += 1
        if note:
            self.prefetch()
        for unit in wanted:
            if unit.state is ParamState.FETCHING:
                self._wait_for(unit, unit.unshard)
                self._record_unshard(unit)
            elif unit.index in self._suspended:
                self.resume(unit)
        if note and wanted:
            self._last = (wanted[-1].index, time.monotonic())

    @sheltered
    def suspend(self, indices: Iterable[int]) -> None:
        """Make the values of resident units wait for the update that was posted."""
        for i in indices:
            if self.units[i].resident:
                self._suspend(self.units[i], functools.partial(self._updates.wait_unit, i))

    def _suspend(self, unit: ParamUnit, wait: Callable[[], None]) -> None:
        with self._suspending:
            self._suspended[unit.index] = wait
            unit.changes()
            unit.suspend(functools.partial(self.resume, unit))

    @sheltered
    def is_suspended(self, unit: ParamUnit) -> bool:
        """Return whether a resident unit's values are on their way."""
        return unit.index in self._suspended

    def resume(self, unit: ParamUnit) -> None:
        """Wait for a resident unit's values, then let them be used. Any thread may, out of turn: who has the
        turn may wait for this very thread, which its forward has started."""
        self.shelter.run(functools.partial(self._resume, unit), turn=False)

    def _resume(self, unit: ParamUnit) -> None:
        if (wait := self._suspended.get(unit.index)) is not None:
            wait()
            with self._suspending:
                if self._suspended.get(unit.index) is wait:  # no other thread was quicker
                    unit.resume()
                    del self._suspended[unit.index]

    @sheltered
    def resume_all(self) -> None:
        """Wait for every resident unit's values."""
        for i in sorted(self._suspended):
            self._resume(self.units[i])

    @sheltered
    def publish(self) -> list[ShardedParam]:
        """Have forward and backward use the newest copies from now on, with no update under way; return
        the parameters that changed. See [Note: two versions]."""
        changed = [u for u in self.forward_order() if self._publisher.is_newer(u)]
        if not changed:
            return []
        self.reshard_all({u.index for u in changed if not u.newest})  # the others have it already
        for unit in changed:
            self.resume(unit)
            if events := self._publisher.publish(unit):
                self._suspend(unit, functools.partial(self._wait_on_device, events))
        for unit in self.units:
            unit.newest = False
        return [p for u in changed for p in u.params]

    @sheltered
    def differs(self, unit: ParamUnit) -> bool:
        """Wait for a unit's update; return whether it has two versions now."""
        if not self.has_two_versions:
            return False
        self._updates.wait_unit(unit.index)
        return self._publisher.is_newer(unit)

    @sheltered
    def ask(self, unit: ParamUnit) -> None:
        """Have a resident unit's parameters ask before their values are used, until `answer`; waiting
        for updates does not end that."""
        self.resume(unit)
        unit.suspend(unit.resume)

    @sheltered
    def answer(self, unit: ParamUnit) -> None:
        """Undo `ask`."""
        self.resume(unit)
        if unit.resident:
            unit.resume()

    def _wait_on_device(self, events: Sequence[Event]) -> None:
        wait = self._recorder.waits()
        for event in events:
            self._device.wait_on_device(event)
        self._recorder.waited(wait, ("h2d", 0))

    def _show(self, unit: ParamUnit, user: object, newest: bool) -> None:
        """Have `unit` show the version that is wanted."""
        if unit.newest == newest:
            return
        if newest:
            self._updates.wait_unit(unit.index)
        if not self._publisher.is_newer(unit):
            return  # there is but one
        if (unit.users | unit.keepers) - {user}:
            raise ParameterError(
                f"two versions of unit {unit.layout.name!r} are wanted at once",
                expected="a training forward or backward outside of `gathered` blocks, which show the "
                "newest parameters",
                found="one inside such a block, with delayed updates",
                cure="leave `with infinity.gathered(...)` first, or call `infinity.flush` before it",
            )
        if unit.resident:
            self.resume(unit)
            unit.check_edited(newer=True)
            self._publisher.swap(unit)
            unit.looked()
        else:
            self._idle([unit])
            self._invalidate(unit)
        unit.newest = newest

    @sheltered
    def release(self, indices: Iterable[int], user: object) -> None:
        """Take back `user`'s claim; a unit without users becomes idle."""
        units = [self.units[i] for i in indices]
        for unit in units:
            for claims in (unit.users, unit.keepers, unit.writers):
                claims.discard(user)
        self._idle(units)

    @sheltered
    def forget_users(self, keep: Collection[object] = ()) -> None:
        """Drop claims whose owner will never release them (an exception, an abandoned graph); those of
        `keep` stay. What an interrupt has left between two states is put right."""
        for unit in self.units:
            unit.users.intersection_update(keep)
            unit.free_unused()
        self._idle(self.units)

    def _idle(self, units: Sequence[ParamUnit]) -> None:
        """Make those of `units` idle that nobody uses, all of them, then raise what one of them raised.
        What was edited in place goes at once, so that nobody sees the edit."""
        error: ParameterChangedError | None = None
        for unit in units:
            if unit.in_use or unit.resident or unit.state is not ParamState.UNSHARDED:
                continue
            try:
                unit.idle()
            except ParameterChangedError as found:
                error = error or found
                self._invalidate(unit)
        if error is not None:
            raise error

    @sheltered
    def reshard_all(self, indices: Iterable[int] | None = None) -> None:
        """Free every unit that is not resident (its copy is about to change). `refresh` comes after the
        change.

        Raises:
            ParameterError: one of them is inside a `gathered` block.
        """
        chosen = self.units if indices is None else [self.units[i] for i in indices]
        self.check_blocks(u.index for u in chosen)
        for unit in chosen:
            unit.users.clear()
        self._idle(chosen)
        for unit in chosen:
            if unit.resident:
                unit.stale = unit.is_held()
            else:
                self._invalidate(unit)

    def check_blocks(self, indices: Iterable[int]) -> None:
        """Raise `ParameterError` if the copy of one of these units must not change now: it is inside a
        `gathered` block."""
        for unit in (self.units[i] for i in indices):
            # A resident unit in a block has its update in it, unless that is delayed.
            if unit.keepers and (self.has_two_versions or not unit.resident):
                raise ParameterError(
                    f"the parameters of unit {unit.layout.name!r} are about to change inside a "
                    "`gathered` block",
                    expected="step() and load_state_dict() outside the block",
                    found="a block that is still open",
                    cure="leave `with infinity.gathered(...)` first",
                )

    @sheltered
    def refresh(self) -> None:
        """Give the memory of changed units that somebody holds its new values; when this returns, an
        alias shows them."""
        stale = [u for u in self.units if u.stale]
        for unit in stale:
            if unit.resident:
                self.resume(unit)
                unit.stale = False
            else:
                unit.free_unused()
                if unit.stale:
                    self._start(unit, urgent=True)
        for unit in stale:
            if not unit.resident and unit.filled:
                self._wait_for(unit, unit.wait_loaded)

    def _start(self, unit: ParamUnit, *, urgent: bool = False) -> None:
        self._device.trim()
        unit.prefetch(self._fetcher, self._publisher.slots(unit), urgent=urgent)
        self.fetches += 1
        self.peak = max(self.peak, self.allocated)

    def _start_now(self, unit: ParamUnit) -> None:
        try:
            self._start(unit, urgent=True)
        except torch.OutOfMemoryError:  # what nobody uses yet gives way, within the budget or not
            for other in self._unused(self._ranks()):
                self._drop(other)
            self._start(unit, urgent=True)

    def _drop(self, unit: ParamUnit) -> bool:
        """Free an idle unit's memory; return whether that could be done."""
        gone = unit.state is not ParamState.FETCHING or self._wait_for(unit, unit.reshard)
        if not gone and not self.in_backward:
            unit.warn_held()  # a node of a backward lets go of what it unpacked
        return gone

    def _invalidate(self, unit: ParamUnit) -> None:
        if unit.state is ParamState.FETCHING:
            self._wait_for(unit, unit.invalidate)
            if unit.stale:
                unit.warn_held()

    def _wait_for(self, unit: ParamUnit, call: Callable[[], _T]) -> _T:
        """Do what waits for a unit's fetch; if that is under way, the user's thread stalls."""
        fetch = unit.fetch
        if fetch is None or fetch.is_over():
            return call()
        wait = self._recorder.waits()
        result = call()
        self._recorder.waited(wait, *fetch.causes(), unit=unit.index)
        return result

    def _record_unshard(self, unit: ParamUnit) -> None:
        log, fetch = self._recorder.log, unit.fetch
        if log is not None and fetch is not None and fetch.began:
            log.add("unshard", fetch.began, now(), unit=unit.index, nbytes=unit.layout.copy_nbytes)
            fetch.began = 0  # when it is used again, it is there already

    def forward_order(self) -> list[ParamUnit]:
        """Return all units in the order of the last forward; those it did not use come last."""
        order = dict.fromkeys([*self.schedule.recorded(), *range(len(self.units))])
        return [self.units[i] for i in order]

    def _ranks(self) -> dict[int, int]:
        ranks: dict[int, int] = {}
        for rank, index in enumerate(self.schedule.upcoming()):
            ranks.setdefault(index, rank)
        return ranks

    def _unused(self, ranks: dict[int, int]) -> list[ParamUnit]:
        """Units that may go, the one needed last first."""
        units = [u for u in self.units if not u.resident and not u.in_use and u.state is ParamState.FETCHING]
        return sorted(units, key=lambda u: -ranks.get(u.index, len(ranks) + 1))

    def _make_room(self, unit: ParamUnit) -> None:
        need = 0 if unit.filled else unit.layout.copy_nbytes
        allocated = self.allocated
        if allocated + need <= self._capacity:
            return
        for other in self._unused(self._ranks()):
            if self._drop(other):
                allocated -= other.layout.copy_nbytes
                if allocated + need <= self._capacity:
                    return
        if not self._warned:
            self._warned = True
            unit.warn_room(allocated + need, self._capacity)

    def prefetch(self) -> None:
        """Start what comes next, nearest first, as far as there is room.

        What would come in time also if it were begun later is left for later ([Note: the horizon]): a
        wrong guess costs less then, and the drives are free for updates and gradients. Not so what is
        being updated: it comes straight from there, or not at all.
        """
        ranks: dict[int, int] | None = None
        seen: set[int] = set()
        pace = self._fetcher.pace
        # Seconds between the next use, when this is asked again, and that of a unit; bytes that are on
        # their way before it.
        lead, begun = 0.0, 0
        for index in self.schedule.upcoming():
            unit = self.units[index]
            lead_here, lead = lead, lead + pace.seconds(index)
            if index in seen or unit.stale or unit.state is not ParamState.SHARDED:
                if index not in seen and not unit.fetch_is_over():
                    begun += unit.layout.copy_nbytes
                seen.add(index)
                continue
            seen.add(index)
            need = 0 if unit.filled else unit.layout.copy_nbytes
            if pace.can_wait(lead_here, begun + need) and not self._updates.has_unit(index):
                return
            begun += need
            if self._newest and self._updates.has_unit(index):
                return  # which version is the newest is not known yet
            allocated = self.allocated
            if allocated + need > self._capacity:
                ranks = ranks if ranks is not None else self._ranks()
                for other in self._unused(ranks):
                    later = ranks.get(other.index, len(ranks) + 1) > ranks[index]
                    if not later or not other.fetch_is_over():
                        break
                    if self._drop(other):
                        allocated -= other.layout.copy_nbytes
                        if allocated + need <= self._capacity:
                            break
                if allocated + need > self._capacity:
                    return
            unit.newest = self._newest and self._publisher.is_newer(unit)
            try:
                self._start(unit)
            except torch.OutOfMemoryError:
                return  # what is fetched for later can be fetched later
