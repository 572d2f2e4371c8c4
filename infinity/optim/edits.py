"""Edits of parameters by users: which edits the engine finds, which it keeps, and which it refuses.

[Note: edits] If a parameter is placed on the device and its master elsewhere, the next update overwrites the
parameter, from the master. An edit that torch counts shows in the parameter's version: before the next
update, save or state dict the master takes it over. But while an update is delayed, newer values are about to
replace the edited ones, and the edit is an error. The next update overwrites an edit that torch does not
count (`p.data.mul_()`, numpy), unless a `gathered` block for the parameter is open. If the compute parameters
are the master, there is nothing to take over.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

from infinity.core.commits import Commits, Hold, commit
from infinity.core.errors import ParameterChangedError
from infinity.hardware.ranks import Comm
from infinity.params.given import Given
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit, UnitState
from infinity.params.uses import Use, UseKind

from .chunk_io import Tiers
from .pieces import follow_copy, part_of
from .state_io import States, bump
from .whole import agree_on_edits

#: The units of blocks that edit, of any engine. An error may leave one, which does no harm.
_EDITED: weakref.WeakSet[ParamUnit] = weakref.WeakSet()


class Block(Use):
    """A `gathered` block, and what its end is about.

    Attributes:
        named: by unit, the parameters that the block is for, by index.
        source: on several ranks, the one whose edits count.
        moved: by unit, the parameters that were given other data and are bound again, not adopted yet.
        refused: those of them whose data could not be taken.
        versions: on several ranks, by unit, torch's counts of the parameters' edits when they were compared.
    """

    def __init__(self, hold: Hold, named: dict[int, set[int]], source: int) -> None:
        super().__init__(UseKind.BLOCK)
        self.writes: set[int] = set()
        self._hold = weakref.ref(hold)
        self.named = named
        self.source = source
        self.moved: dict[int, set[int]] = {unit: set() for unit in named}
        self.refused: dict[int, set[int]] = {unit: set() for unit in named}
        self.versions: dict[int, list[int]] = {}

    @property
    def is_left(self) -> bool:
        """Whether its `with` statement is over, which has the only reference to its hold of the lock."""
        return self._hold() is None


class Edits:
    """Finds edits, and makes them the values that count: in the copy and, where they differ, in the master.

    Attributes:
        given: what state dicts gave out.
    """

    def __init__(self, tiers: Tiers, states: States, comm: Comm, commits: Commits) -> None:
        self.commits = commits
        self._comm = comm
        self._tiers = tiers
        self._states = states
        self.given = Given(staged=tiers.device.staged)

    def check_delayed(self) -> None:
        """Raise if a parameter on the device was edited in place while a newer version of it waits to
        come to the front: the edit was made to values that are about to go."""
        for unit in self._tiers.units if self._tiers.publisher.has_two_versions else ():
            if not (unit.on_device and self._tiers.publisher.is_newer(unit)):
                continue
            if edited := [p for p in unit.params if p.param._version != p.version]:
                raise ParameterChangedError(
                    f"the parameter {edited[0].name!r} was edited in place while its update was delayed",
                    expected="edits inside `with infinity.gathered(params, write=True):`",
                    found="an in-place edit of values that the last update has replaced",
                    cure="call `infinity.flush`, which drops the edit, then edit inside such a block",
                )

    def found(self) -> list[ShardedParam]:
        """Return the parameters on the device that were edited."""
        here = [unit for unit in self._tiers.units if unit.on_device]
        return [p for unit in here for p in unit.params if p.param._version != p.version]

    @commit
    def agree(self, edited: Sequence[ShardedParam], residency: Residency) -> None:
        """Raise unless all ranks have `edited` the same parameters, to the same values, and no copies of what
        they have slices of. Collective.

        Raises:
            DivergenceError: they have not the same values.
            ParameterChangedError: a parameter was edited of which each rank keeps a slice; all have the same
                values again, each slice as its rank has made it.
        """
        if self._comm.world == 1:
            return
        copies = residency.edited_copies()
        values = {s.name: self._tiers.units[s.unit].values(s) for s in edited}
        found = agree_on_edits(self._comm, values, [u.layout.name for u in copies])
        if found:
            residency.drop_copies(u for u in self._tiers.units if u.layout.name in found)
            raise ParameterChangedError(
                f"parameters of unit {min(found)!r} were edited on another rank",
                expected="edits inside a `gathered` block: in this ZeRO stage each rank keeps slices of the "
                "parameters",
                found="an edit on that rank only",
                cure="edit inside `with infinity.gathered(params, write=True, source=0):` on all ranks",
            )

    @commit
    def check_unseen(self, *, unwraps: bool = False) -> None:
        """Raise if a parameter was edited where its next update would not see it: it would go on from the
        master, without the edit. Or if a copy was edited that a state dict gave out. `unwraps`: data of
        another shape, as of a resized layer, is no edit: the cure for it is to unwrap the model."""
        self.given.check()
        for unit in self._tiers.units:
            if not unit.on_device:
                unit.check_edited()
                continue
            for sharded in unit.params if not unit.writers else ():
                if not unwraps or sharded.param.shape == sharded.spec.shape:
                    sharded.check(unit.storage)

    @commit
    def adopt_all(self, units: Collection[ParamUnit] | None = None) -> None:
        """Take over edits of parameters on the device, of all units or of `units`, and all so far of a block
        that keeps them."""
        for unit in self._tiers.units if units is None else units:
            if unit.on_device and (blocks := [b for b in unit.writers if isinstance(b, Block)]):
                self._take(unit, blocks[-1], {p.index for p in unit.params})
            elif unit.on_device and (edited := _edited(unit)):
                self.adopt(unit, edited)

    @commit
    def adopt(self, unit: ParamUnit, edited: set[int]) -> None:
        """Make the values on the device, of the parameters in `edited`, the ones that count.

        Where a value still is the master rounded, the master stays: an edit of one element does
        not cost the others their low bits. Of a split master nobody knows which values were edited: all keep
        their lower halves, and are within half a place of their copies; but zeros and Infs are exact.
        """
        kinds = ("copy", "master", "low")
        for sharded, segment, tensors in self._states.segments(
            kinds, [unit.params[i] for i in sorted(edited)], written=kinds
        ):
            new = part_of(unit.values(sharded), segment)
            if "master" in tensors:
                follow_copy(tensors["master"], new)
            elif (low := tensors.get("low")) is not None:
                low.masked_fill_(((new == 0) | ~new.isfinite()).to(low.device), 0)
            if not unit.on_device:
                tensors["copy"].copy_(new)
        for index in edited:
            unit.params[index].version = unit.params[index].param._version
        self.given.forget(unit.params[index] for index in edited)

    def _take(self, unit: ParamUnit, block: Block, named: set[int]) -> None:
        """Adopt the parameters in `named`, those that were given other data, and those that torch knows were
        edited; with several ranks, those of the block's source. Raise `ParameterChangedError` after that if
        data have another shape, or another rank has edited what the source has not. Another error may end
        it anywhere: the next call goes on."""
        units = tuple(_EDITED)
        written = {u.storage._cdata for u in units}
        for each in units:
            each.own_data(written)
        moved, refused = block.moved[unit.index], block.refused[unit.index]
        apart = [p for p in unit.params if not p.in_place(unit.storage)]
        refused.update(p.index for p in apart if p.param.shape != p.spec.shape)
        moved.update(p.index for p in apart)
        unit.rebind()
        edited = _edited(unit) | moved
        lost = None
        if self._comm.world > 1:
            named, lost = self._agree(unit, block, edited, named)
            edited = set()
        self.adopt(unit, edited | named)
        moved.clear()
        if refused:
            first = unit.params[min(refused)]
            refused.clear()
            raise ParameterChangedError(
                f"the parameter {first.name!r} got data that do not fit it",
                expected=f"shape {first.spec.shape}",
                found="another shape; the parameter keeps its previous values",
                cure="assign data of the same shape, or copy_() into the parameter; for another shape, "
                "`infinity.unwrap(model)`, change it, and wrap it again",
            )
        if lost is not None:
            raise lost

    def _agree(
        self, unit: ParamUnit, block: Block, edited: set[int], named: set[int]
    ) -> tuple[set[int], ParameterChangedError | None]:
        """Give all ranks the values of the block's source. Return the parameters to adopt; and
        an error, if another rank has changed one that the source has not edited. Collective."""
        source, before = block.source, block.versions[unit.index]
        changed = {i for i, (a, b) in enumerate(zip(before, _versions(unit), strict=True)) if a != b}
        changed |= block.moved[unit.index]
        kinds = named, edited | changed, changed
        mine = bytes(sum((i in kind) << bit for bit, kind in enumerate(kinds)) for i in range(len(before)))
        told = self._comm.exchange(f"the edits of unit {unit.layout.name!r}", mine)
        found = {i for i, of in enumerate(told[source]) if of}
        self._comm.broadcast(unit.view(0, unit.layout.gathered_nbytes), source)
        bump([p for p in unit.params if p.index in found])
        block.versions[unit.index] = _versions(unit)
        for rank, of_rank in enumerate(told):
            for index, of in enumerate(of_rank):
                if of & 4 and not told[source][index] & 2:
                    return found, ParameterChangedError(
                        f"the parameter {unit.params[index].name!r} was edited on rank {rank} alone, in a "
                        f"block that keeps the edits of rank {source}",
                        expected=f"edits that rank {source} makes, too: all ranks take its values",
                        found=f"an edit on rank {rank}; it is lost, and the values of rank {source} stay",
                        cure=f"edit on rank {source}, or `gathered(params, write=True, source={rank})`",
                    )
        return found, None

    @commit
    def begin(self, block: Block) -> None:
        """Make `end` adopt the parameters that the block names, in whatever way they are edited, and other
        edits that torch counts. The block keeps the units, which are unsharded."""
        for index in block.named:
            unit = self._tiers.units[index]
            assert unit.state is UnitState.UNSHARDED
            if self._comm.world > 1:
                block.versions[index] = _versions(unit)
            _EDITED.add(unit)
            block.writes.add(index)

    @commit
    def end(self, block: Block, index: int) -> None:
        """Adopt what the block has edited of a unit; nothing if that was done. After another error than the
        one below it can be called again, and goes on.

        Raises:
            ParameterChangedError: a parameter was given data of another shape; the rest is kept.
        """
        unit = self._tiers.units[index]
        if index not in block.writes:
            return
        try:
            self._take(unit, block, block.named[index])
        except ParameterChangedError:
            self.drop(block, index)
            raise
        self.drop(block, index)

    def drop(self, block: Block, index: int) -> None:
        """End the block's edits of a unit. An edit that was not adopted is an edit outside of a block."""
        unit = self._tiers.units[index]
        if not any(other is not block for other in unit.writers):
            _EDITED.discard(unit)
        block.writes.discard(index)  # last: `end` goes by it


def _versions(unit: ParamUnit) -> list[int]:
    """Return how often torch has counted a change of each of a unit's parameters."""
    return [sharded.param._version for sharded in unit.params]


def _edited(unit: ParamUnit) -> set[int]:
    """Return the indices of the parameters that were edited: [Note: edits]."""
    return {p.index for p in unit.params if p.param._version != p.version}
