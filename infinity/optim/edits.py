"""Edits of parameters by users: which are found, which become the values that count, which are refused."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from infinity.core.errors import ParameterChangedError
from infinity.hardware.ranks import Comm
from infinity.hardware.shelter import Shelter, sheltered
from infinity.params.given import Given
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit, UnitState

from .chunk_io import Tiers
from .pieces import follow_copy, part_of
from .state_io import States, bump

#: The units of blocks that edit, of any engine. An interrupt may leave one, which does no harm.
_EDITED: weakref.WeakValueDictionary[object, ParamUnit] = weakref.WeakValueDictionary()


class Edits:
    """Finds edits, and makes them the values that count: in the copy and, where they differ, in the master.

    Attributes:
        given: what state dicts gave out.
    """

    def __init__(self, tiers: Tiers, states: States, comm: Comm, shelter: Shelter) -> None:
        self.shelter = shelter
        self._comm = comm
        self._tiers = tiers
        self._states = states
        self.given = Given(staged=tiers.device.staged)

    def check_delayed(self) -> None:
        """Raise if a parameter on the device was edited in place while a newer version of it waits to
        come to the front: the edit was made to values that are about to go."""
        for unit in self._tiers.units:
            if not unit.on_device or not self._tiers.publisher.is_newer(unit):
                continue
            unit.check_edited(newer=True)
            if edited := [p for p in unit.params if p.param._version != p.version]:
                raise ParameterChangedError(
                    f"the parameter {edited[0].name!r} was edited in place while its update was delayed",
                    expected="edits inside `with infinity.gathered(params, write=True):`",
                    found="an in-place edit of values that the last update has replaced",
                    cure="call `infinity.flush`, which drops the edit, then edit inside such a block",
                )

    def found(self) -> list[ShardedParam]:
        """Return the parameters on the device that were edited, as far as torch counts it."""
        return [unit.params[i] for unit in self._tiers.units if unit.on_device for i in sorted(_edited(unit))]

    @sheltered
    def check_unseen(self) -> None:
        """Raise if a parameter was edited where its next update would not see it: it would go on from the
        master, without the edit. Most are found only with ``Config(check_edits=True)``. Or if a copy was
        that a state dict gave out."""
        self.given.check()
        for unit in self._tiers.units:
            unit.check_edited(newer=self._tiers.publisher.is_newer(unit))

    @sheltered
    def adopt_all(self, units: Collection[ParamUnit] | None = None) -> None:
        """Take over edits of parameters on the device, of all units or of `units`: those that torch counts
        (their version tells), and all so far of a block that keeps them."""
        for unit in self._tiers.units if units is None else units:
            if unit.on_device and unit.writers:
                self._take(unit, {p.index for p in unit.params})
            elif unit.on_device and (edited := _edited(unit)):
                self.adopt(unit, edited)

    @sheltered
    def adopt(self, unit: ParamUnit, edited: set[int]) -> None:
        """Make the values on the device, of the parameters in `edited`, the ones that count.

        Where a value still is the master rounded, the master stays: an edit of one element does
        not cost the others their low bits.
        """
        kinds = ("copy", "master")
        for sharded, segment, tensors in self._states.segments(
            kinds, [unit.params[i] for i in sorted(edited)], written=kinds
        ):
            new = part_of(unit.values(sharded), segment)
            if "master" in tensors:
                follow_copy(tensors["master"], new)
            if not unit.on_device:
                tensors["copy"].copy_(new)
        for index in edited:
            unit.params[index].version = unit.params[index].param._version
        self.given.forget(unit.params[index] for index in edited)
        unit.looked(edited)

    def _take(self, unit: ParamUnit, named: set[int], source: int = 0) -> None:
        """Adopt the parameters in `named`, those that were given other data, and those that torch knows were
        edited; with several ranks, those of `source`. Raise `ParameterChangedError` after that if data have
        another shape."""
        units = tuple(_EDITED.values())
        written = {u.storage._cdata for u in units}
        for each in units:
            each.own_data(written)
        moved = {p.index for p in unit.params if not p.in_place(unit.storage)}
        refused = unit.rebind()
        edited = _edited(unit) | moved | named
        if self._comm.world > 1:
            mine = bytes(i in edited for i in range(len(unit.params)))
            told = self._comm.exchange(f"the edits of unit {unit.layout.name!r}", mine)
            edited = {i for i, changed in enumerate(told[source]) if changed}
            self._comm.broadcast(unit.view(0, unit.layout.gathered_nbytes), source)
            bump([p for p in unit.params if p.index in edited])
        self.adopt(unit, edited)
        if refused:
            raise ParameterChangedError(
                f"the parameter {refused[0].name!r} was given data that do not fit it",
                expected=f"shape {refused[0].spec.shape}",
                found="another shape; the parameter has the values that it had",
                cure="assign data of the same shape, or copy_() into the parameter; for another shape, "
                "`infinity.unwrap(model)`, change it, and wrap it again",
            )

    @contextmanager
    def editing(self, unit: ParamUnit, named: set[int], owner: object, source: int = 0) -> Iterator[None]:
        """Adopt the parameters in `named` of an unsharded unit at the end of the block, however they were
        edited, and others that torch knows were; also when the block raises. `owner` keeps the unit.

        Raises:
            ParameterChangedError: a parameter was given data of another shape; the rest is kept.
        """
        assert unit.state is UnitState.UNSHARDED
        block = object()
        _EDITED[block] = unit
        unit.writers.add(owner)
        try:
            yield
        finally:
            try:
                self._take(unit, named, source)
            finally:
                _EDITED.pop(block, None)
                unit.writers.discard(owner)


def _edited(unit: ParamUnit) -> set[int]:
    return {p.index for p in unit.params if p.param._version != p.version}
