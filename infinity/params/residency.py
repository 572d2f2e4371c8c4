"""Which units are on the device for whom, in which version, and the changes of values under them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

from infinity.core.commits import Commits, commit
from infinity.core.errors import ParameterChangedError, ParameterError
from infinity.core.spans import Recorder, now
from infinity.hardware.device import Device, Event

from .cache import Cache
from .param import ShardedParam
from .publish import Publisher
from .unit import ParamUnit, UnitState
from .updates import Updates
from .uses import Use, UseKind, Uses


class Residency:
    """Loads units for uses ([Note: uses]). A unit in use is UNSHARDED; units that are not in use belong to
    the cache.

    `stage`: of ZeRO; 0 if each rank has the whole units. In stage 1 the engine gathers units in the order of
    their numbers, first those before the needed one. Then ranks may use different units, as long as all come
    to the same `gather_all`. In stages 2 and 3, while a unit is in use, the engine gathers the next one
    ([Note: behind compute]); then all ranks use the same units.

    Attributes:
        wanted: the units that are used outside of their scope, since a scope began or ended.
        has_two_versions: whether there ever are two: [Note: two versions].
        hits: units that were loaded, or being loaded, when they were needed.
        missed: units that were needed before their load had begun.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        uses: Uses,
        cache: Cache,
        device: Device,
        updates: Updates,
        publisher: Publisher,
        recorder: Recorder,
        commits: Commits,
        *,
        stage: int,
    ) -> None:
        self.units = units
        self.uses = uses
        self._in_order = stage == 1
        self._ahead = stage > 1
        self.cache = cache
        self.schedule = cache.schedule
        self.commits = commits
        self.hits = self.missed = 0
        self.wanted: tuple[int, ...] = ()
        self._addressed: set[int] = set()  # units in whose memory the program has an address
        self._operator = Use(UseKind.OPERATOR)
        self._device = device
        self._staged = device.staged
        self.has_two_versions = publisher.has_two_versions
        self._updates = updates
        self._publisher = publisher
        self._recorder = recorder
        self.end_left: Callable[[], None] = lambda: None  # ends the blocks that were left
        self._awaited: set[ParamUnit] = set()  # held, and placed on the device: `refresh` waits for them
        self._published: dict[int, Sequence[Event]] = {}  # copies to units on the device, by unit: the last
        for unit in units:
            for sharded in unit.params if unit.on_device else ():
                sharded.on_wait = functools.partial(self.resume, unit)

    def held(self) -> list[ParamUnit]:
        """Return the held units, of those that are not in use and not being written."""
        there = (u for u in self.units if (u.kept or not u.is_away) and u.arriving is None)
        return [u for u in there if not u.in_use and u.load_is_over() and u.is_held()]

    # -- use --------------------------------------------------------------------------------

    def acquire(
        self,
        indices: Collection[int],
        use: Use,
        *,
        newest: bool,
        note: bool = True,
    ) -> None:
        """Make units UNSHARDED and keep them for `use` until `release`. The caller is in a commit.

        `newest`: in the newest version, and not the one in front: [Note: two versions]. `note`: record it in
        the schedule, and load what comes next.

        Raises:
            ParameterError: another use keeps another version of one of them.
            GradientError: the last backward of a step has updated one of them, and `step()` has not run.
        """
        units, cache = self.units, self.cache
        newest = newest and self.has_two_versions
        if self._updates.used:
            for index in indices:
                self._updates.check_use(index, units[index].layout.name)
        for index in indices:
            if units[index].newest is not newest:
                self._change_version(units[index], use, newest)
        self.uses.begin(use, indices)
        for index in indices:
            unit = units[index]
            if note:
                self.schedule.note(index)
            state = unit.state
            if state is UnitState.SHARDED:
                self.missed += 1
                cache.load_now(unit)
            elif state is not UnitState.UNSHARDED and not unit.persistent:
                self.hits += 1
        if note and (cache.away or cache.late):
            cache.prefetch(newest=newest)
        if self._in_order:
            self._gather_first(max((index + 1 for index in indices), default=0))
        for index in indices:
            unit = units[index]
            if self._staged:
                unit.used()
            if unit.on_device:
                if self._staged or unit.arriving is not None:
                    self._resume(unit)
            elif unit.state is not UnitState.UNSHARDED:
                if self._staged or unit.state is not UnitState.GATHERED:
                    self._wait_loaded(unit)  # each time: this stream has not waited for it, maybe
                    unit.gather()
                unit.unshard()
                if self._recorder.log is not None:
                    self._record_unshard(unit)
        if note and self._ahead:
            self._gather_ahead()

    def _gather_ahead(self) -> None:
        """Begin to gather what comes next, if its load has begun: that is so on all ranks, or on none."""
        unit = self.cache.next_ungathered()
        if unit is not None:
            self.cache.begin_late(unit)
            unit.gather_ahead()

    def _wait_loaded(self, unit: ParamUnit) -> None:
        self.cache.begin_late(unit)
        self.cache.wait_for(unit, unit.wait_loaded)

    @commit
    def gather_all(self) -> None:
        """In stage 1, gather the units that this rank did not need."""
        self._gather_first(len(self.units))

    @commit
    def use_all(self) -> None:
        """In stage 1, bring every unit to its state after a use: ranks may have used different units."""
        if self._in_order:
            everything, once = range(len(self.units)), Use(UseKind.OPERATOR)
            self.acquire(everything, once, newest=False, note=False)
            self.release(once)

    def _gather_first(self, count: int) -> None:
        while self._in_order and (unit := self.cache.lowest_ungathered(count)) is not None:
            if unit.is_away:
                self.cache.load_now(unit)
            self._wait_loaded(unit)
            unit.gather()

    @commit
    def prefetch(self) -> None:
        """Load what comes next, for a forward of training."""
        self.cache.prefetch(newest=False)

    def release(self, use: Use) -> None:
        """End a use; a unit that no other one keeps becomes idle. The caller is in a commit."""
        self._idle(self.uses.end(use))

    def want(self, indices: Sequence[int], *, newest: bool, note: bool, address: bool = False) -> None:
        """Acquire units that autograd or an operator needs outside of their scope, until others are wanted or
        a scope begins or ends; with `address`, until a scope begins or ends: the program has an address in
        their memory. The caller is in a commit."""
        wanted = tuple(dict.fromkeys(indices))
        if address:  # and what was wanted just before: a kernel may take several
            self._addressed.update(self.wanted, wanted)
        if self.wanted != wanted:
            gone = self._operator.units.difference(self._addressed)
            self.uses.drop_units(self._operator, gone)
            self._idle(gone)
            self.wanted = wanted
        self.acquire(wanted, self._operator, note=note, newest=newest)

    def release_wanted(self) -> None:
        """Let go of what was wanted; what was unpacked of it holds it as long as it lives."""
        self.wanted = ()
        self._addressed.clear()
        self.release(self._operator)

    @commit
    def drop(self, *kinds: UseKind) -> None:
        """Drop uses that nothing will end (an exception, an abandoned graph), and what is wanted. What an
        interrupt has left between two states is put right."""
        self.wanted = ()
        self._addressed.clear()
        self.uses.drop(UseKind.OPERATOR, *kinds)
        for unit in self.units:
            if unit.kept:
                unit.free_unused()
        self._idle(range(len(self.units)))

    def _idle(self, indices: Iterable[int], *, persistent: bool = False) -> None:
        """Make all units of `indices` idle that are not in use, then raise the error of any of them; with
        `persistent` also persistent units. Free units that were edited in place at once, so that no code sees
        the edit."""
        error: ParameterChangedError | None = None
        for index in indices:
            unit = self.units[index]
            if unit.users or unit.state is not UnitState.UNSHARDED:
                continue
            if unit.on_device or (unit.persistent and not persistent):
                continue
            try:
                unit.idle()
            except ParameterChangedError as found:
                error = error or found
                self.cache.invalidate(unit)
        if error is not None:
            raise error

    def _record_unshard(self, unit: ParamUnit) -> None:
        log, load = self._recorder.log, unit.last_load
        if log is not None and load is not None and load.began:
            log.add("unshard", load.began, now(), unit=unit.index, nbytes=unit.layout.gathered_nbytes)
            load.began = 0  # when it is used again, it is there already

    # -- values that change -----------------------------------------------------------------

    @commit
    def reshard_all(self, indices: Iterable[int] | None = None) -> None:
        """Free every unit that is not placed on the device (its copy is about to change). `refresh` comes
        after the change.

        Raises:
            ParameterError: one of them is inside a `gathered` block.
        """
        chosen = range(len(self.units)) if indices is None else [*indices]
        self.check_blocks(chosen)
        self.uses.forget_units(chosen)
        self._idle(chosen, persistent=True)
        for index in chosen:
            unit = self.units[index]
            if unit.on_device:
                (self._awaited.add if unit.is_held() else self._awaited.discard)(unit)
            else:
                self.cache.invalidate(unit)

    def check_blocks(self, indices: Iterable[int]) -> None:
        """Raise `ParameterError` if the copy of one of these units must not change now: it is inside a
        `gathered` block."""
        for index in indices:
            unit = self.units[index]
            if self._is_in_block(unit):
                self.end_left()  # another thread has left the block, and may not have ended it yet
            if self._is_in_block(unit):
                raise ParameterError(
                    f"a call would change the parameters of unit {unit.layout.name!r} inside a `gathered` "
                    "block",
                    expected="step() and load_state_dict() outside the block",
                    found="a block that is still open",
                    cure="leave `with infinity.gathered(...)` first",
                )

    def _is_in_block(self, unit: ParamUnit) -> bool:
        """Return whether a block shows values of a unit that must not change now. A unit that is placed on
        the device has its update in the block, unless that is delayed."""
        return bool(unit.users and unit.keepers and (self.has_two_versions or not unit.on_device))

    def edited_copies(self) -> list[ParamUnit]:
        """Return the units of which each rank has a copy from its first use on, and of which this one was
        edited."""
        stay = [u for u in self.units if u.persistent and not u.on_device and u.state is UnitState.UNSHARDED]
        return [u for u in stay if not u.in_use and u.edited()]

    @commit
    def drop_copies(self, units: Iterable[ParamUnit]) -> None:
        """Make the next use of units gather them again. Raises the errors of edits."""
        for unit in units:
            self._idle([unit.index], persistent=True)
            self.cache.invalidate(unit)

    @commit
    def refresh(self) -> None:
        """Write the new values into the memory of changed units that are held; when this returns, an alias
        shows them. With several ranks an alias shows them at the next use of its unit, because held units
        differ between ranks."""
        held = [u for u in self.units if u.kept and u.waits_for_owner]
        for unit in [u for u in self.units if u in self._awaited] if self._awaited else ():
            self._resume(unit)
            self._awaited.discard(unit)
        for unit in held:
            unit.free_unused()
            if unit.waits_for_owner:
                self.cache.load(unit, urgent=True)
        for unit in held:
            if not unit.is_away:
                self.cache.wait_for(unit, unit.wait_loaded)

    @commit
    def expect_updates(self, indices: Iterable[int]) -> None:
        """Make every read of the values of units on the device wait for the posted update."""
        for index in indices:
            unit = self.units[index]
            if unit.on_device:
                unit.expect(functools.partial(self._wait_updated, index))

    def resume(self, unit: ParamUnit) -> None:
        """Wait for the values of a unit on the device, then let them be used. Any thread may, also beside a
        forward of another.

        Raises:
            GradientError: they are of a step that is to come.
        """
        self._updates.check_use(unit.index, unit.layout.name)
        self.commits.run(functools.partial(self._resume, unit), beside=True)

    def _resume(self, unit: ParamUnit) -> None:
        if (wait := unit.arriving) is not None:
            wait()
            if unit.arriving is wait:  # no other thread was quicker
                unit.arrived()
        else:  # who was first has waited on another stream, maybe; nobody has for slices that lie there
            for event in (*self._published.get(unit.index, ()), self._updates.copied(unit.index)):
                if event is not None:
                    self._device.wait_on_device(event)

    @commit
    def renew_classes(self, unit: ParamUnit) -> None:
        """Choose the classes of a unit's parameters again, with its values there: a state dict has begun to
        answer for them, or has ended."""
        self._resume(unit)
        unit.renew_classes()

    @commit
    def wait_loaded(self, indices: Iterable[int]) -> None:
        """Wait for the loads of units that are under way."""
        for load in (self.units[i].last_load for i in indices):
            if load is not None:
                load.wait()

    @commit
    def resume_all(self) -> None:
        """Wait for the values of every unit, or of this rank's slices, on the device."""
        for unit in self.units:
            if unit.placed:
                self._resume(unit)

    # -- versions: [Note: two versions] -----------------------------------------------------

    @commit
    def publish(self) -> list[ShardedParam]:
        """Make forward and backward use the newest compute parameters from now on. No update may be running.
        Return the parameters that changed."""
        if not self.has_two_versions:
            return []
        changed = [u for u in self.cache.forward_order() if self._publisher.is_newer(u)]
        if not changed:
            return []
        self.reshard_all({u.index for u in changed if not u.newest})  # the others have it already
        for unit in changed:
            self._resume(unit)
            if events := self._publisher.publish(unit):
                self._published[unit.index] = events
                unit.expect(functools.partial(self._wait_on_device, events))
        for unit in self.units:
            unit.newest = False
        return [p for u in changed for p in u.params]

    @commit
    def show(self, *, newest: bool) -> None:
        """Make the units that are placed on the device, and not in use, show one version: the engine does not
        see a read of such a unit by a graph or a user's function, and no claim comes before it."""
        for unit in self.units if self.has_two_versions else ():
            if unit.on_device and not unit.in_use:
                self._change_version(unit, None, newest)

    @commit
    def differs(self, unit: ParamUnit) -> bool:
        """Wait for a unit's update; return whether it has two versions now."""
        if not self.has_two_versions:
            return False
        self._updates.wait_unit(unit.index)
        return self._publisher.is_newer(unit)

    @commit
    def change_roles(self, units: Iterable[ParamUnit]) -> None:
        """Exchange the roles of the slots of units, off the device or placed there: the backs that were
        written become the fronts, and the fronts become the newest versions."""
        for unit in units:
            self._publisher.change_roles(unit)

    def _wait_updated(self, unit: int) -> None:
        self._updates.wait_unit(unit)
        if (copied := self._updates.copied(unit)) is not None:
            self._wait_on_device((copied,))

    def _wait_on_device(self, events: Sequence[Event]) -> None:
        wait = self._recorder.waits()
        for event in events:
            self._device.wait_on_device(event)
        self._recorder.waited(wait, ("h2d", 0))

    def _change_version(self, unit: ParamUnit, use: Use | None, newest: bool) -> None:
        """Make `unit` show the requested version."""
        if unit.newest == newest:
            return
        if newest:
            self._updates.wait_unit(unit.index)
        if not self._publisher.is_newer(unit):
            return  # there is but one
        if any(other is not use for other in unit.users):
            raise ParameterError(
                f"the program needs two versions of unit {unit.layout.name!r} at once",
                expected="a training forward or backward outside of `gathered` blocks, which show the "
                "newest parameters",
                found="a training forward or backward inside such a block, with delayed updates",
                cure="leave `with infinity.gathered(...)` first, or call `infinity.flush` before it",
            )
        if unit.on_device:
            self._resume(unit)
            self._publisher.swap(unit)
        else:
            self._idle([unit.index], persistent=True)
            self.cache.invalidate(unit)
        unit.newest = newest
