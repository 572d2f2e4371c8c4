"""State and copies, parameter by parameter: for state dicts, and for the take-over in `wrap`.

Everything here goes chunk by chunk through leases, so that its own host memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity.core.errors import BudgetError
from infinity.core.sizes import ALIGNMENT, Tier, ceil_to, format_size
from infinity.hardware.shelter import Shelter, sheltered
from infinity.params.given import own
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit
from infinity.planning.partition import Chunk, Segment

from .chunk_io import ChunkIO, Tiers, open_chunk

_SLICE = 1 << 18  # elements compared at once: temporaries of about 1 MiB


class States:
    """Reads and writes masters, moments and copies of single parameters and whole units."""

    def __init__(
        self, tiers: Tiers, room: Callable[[], int], quiesce: Callable[[], None], shelter: Shelter
    ) -> None:
        self.shelter = shelter
        self._tiers = tiers
        self._quiesce = quiesce  # updates that are under way come first
        self._room = room  # host bytes that the budget leaves

    # -- wrap -------------------------------------------------------------------------------

    def take_over(self, unit: ParamUnit, moments: Mapping[int, Mapping[str, Any]]) -> None:
        """Put a unit's values on their tiers: copy, fp32 master, and the moments that an
        optimizer already had (by parameter index; zeros otherwise)."""
        sources = [p.param.detach().reshape(-1) for p in unit.params]
        if unit.resident:
            unit.make_resident()
        leaving: deque[ChunkIO] = deque()
        try:
            for chunk in unit.layout.chunks:
                here = self._open(chunk, "update" if chunk.trainable else "fetch", leaving)
                leaving.append(here)
                self._fill(unit, chunk, here, sources, moments)
        finally:
            while leaving:
                leaving.popleft().close()
        unit.bind()

    def _open(self, chunk: Chunk, quota: str, leaving: deque[ChunkIO]) -> ChunkIO:
        nbytes = self._tiers.lease_nbytes(chunk)
        while nbytes:
            lease = self._tiers.pool.try_lease(quota, nbytes)
            if lease is not None:
                return ChunkIO(self._tiers, chunk, lease)
            if not leaving:
                return open_chunk(self._tiers, chunk, quota)
            leaving.popleft().close()
        return ChunkIO(self._tiers, chunk, None)

    def _fill(
        self,
        unit: ParamUnit,
        chunk: Chunk,
        here: ChunkIO,
        sources: list[torch.Tensor],
        moments: Mapping[int, Mapping[str, Any]],
    ) -> None:
        targets = [here.copy] if not (chunk.trainable and here.copy_is_master) else []
        if unit.resident and self._tiers.device.staged:
            targets = [here.device_copy]
        zeroed = list(targets)
        if chunk.trainable:
            targets.append(here.master)
            zeroed += [here.master, *here.moments]
        for tensor in zeroed:
            tensor.zero_()
        for segment in chunk.segments:
            source = part_of(sources[segment.param], segment)
            for target in targets:
                target[segment.start : segment.start + segment.numel].copy_(source)
            values = moments.get(segment.param)
            if values and chunk.trainable:
                for target, key in zip(here.moments, ("exp_avg", "exp_avg_sq"), strict=True):
                    saved = values[key].detach().reshape(-1)
                    target[segment.start : segment.start + segment.numel].copy_(part_of(saved, segment))
        staged_copy = unit.resident and self._tiers.device.staged
        # What was never written reads as zeros: moments that are zero need no write.
        fresh = here.copy_is_master and not any(moments.get(s.param) for s in chunk.segments)
        here.write(state=chunk.trainable and not fresh, copy=not staged_copy)

    # -- state dicts ------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise `BudgetError` unless the whole optimizer state fits what the host budget leaves."""
        nbytes, room = (
            sum(p.parts["state"].nbytes for p in self._tiers.plans if p.state_tier is not None),
            self._room(),
        )
        if nbytes > room:
            raise _no_room(nbytes, room)

    @sheltered
    def make_room(self, params: Sequence[ShardedParam]) -> dict[ShardedParam, torch.Tensor]:
        """Return memory (uint8) for copies of some of `params`: leases that nobody uses, such as those for
        reading ahead, where copies of all of them do not fit what the host budget leaves. They are lent
        for as long as the copies live.

        Raises:
            BudgetError: that is not enough.
        """
        sizes = {s: s.spec.numel * s.spec.dtype.itemsize for s in params}
        total, room = sum(sizes.values()), self._room()
        if total <= room:
            return {}
        self._quiesce()
        lent = 0
        for wanted in (total - room + max(sizes.values()), total + self._tiers.pool.nbytes):
            runs, taken, rest = self._tiers.pool.borrow(wanted), {}, total
            lent = sum(run.numel() for run in runs)
            for sharded in sorted(sizes, key=lambda s: -sizes[s]):
                nbytes = sizes[sharded]
                fits = next((i for i, run in enumerate(runs) if run.numel() >= nbytes), None)
                if rest > room and fits is not None:
                    taken[sharded] = runs[fits][:nbytes]
                    runs[fits] = runs[fits][ceil_to(nbytes, ALIGNMENT) :]
                    rest -= nbytes
            if rest <= room:
                return taken
            del runs, taken
        raise _no_room(total, room + lent)

    @sheltered
    def read(self, sharded: ShardedParam) -> dict[str, torch.Tensor]:
        """Return step, exp_avg, exp_avg_sq (and master, unless the compute dtype is fp32)."""
        self._quiesce()
        numel = sharded.spec.numel
        keys = ("exp_avg", "exp_avg_sq", *(("master",) if sharded.spec.dtype is not torch.float32 else ()))
        values = {key: torch.empty(numel, dtype=torch.float32) for key in keys}
        for segment, here in self._chunks_of(sharded, write=False):
            for key, section in _sections(here, values):
                values[key][segment.offset : segment.offset + segment.numel].copy_(slice_of(section, segment))
        shaped = {k: v.view(sharded.spec.shape) for k, v in values.items()}
        return {"step": torch.tensor(sharded.step, dtype=torch.float32), **shaped}

    @sheltered
    def write(self, sharded: ShardedParam, values: Mapping[str, Any]) -> None:
        """Write step, moments (and master, where given) of one parameter; no values: zeros. Its copy
        follows the master. A unit that is not resident must be off the device."""
        self._quiesce()
        sharded.step = int(values.get("step", 0))
        unit = self._tiers.units[sharded.unit]
        flat = {
            k: values[k].detach().reshape(-1)
            for k in ("exp_avg", "exp_avg_sq", "master")
            if values.get(k) is not None
        }
        changed = False
        for segment, here in self._chunks_of(sharded, write=True, copy="master" in flat):
            for key, section in _sections(here, {"exp_avg": 0, "exp_avg_sq": 0, "master": 0}):
                target = slice_of(section, segment)
                if key in flat:
                    target.copy_(part_of(flat[key], segment))
                elif key != "master":
                    target.zero_()
            if "master" in flat:
                copy = slice_of(here.device_copy if unit.resident else here.copy, segment)
                new = part_of(flat["master"], segment).to(copy)
                changed = changed or not torch.equal(copy, new)
                copy.copy_(new)
        if changed and unit.resident:
            unit.looked({sharded.index})
        if changed:
            bump([sharded])

    def _chunks_of(
        self, sharded: ShardedParam, *, write: bool, copy: bool = False
    ) -> Iterator[tuple[Segment, ChunkIO]]:
        """Visit the parameter's chunks; `write` the state back, and the `copy`, which then is read, too."""
        unit = self._tiers.units[sharded.unit]
        for chunk in unit.layout.trainable_chunks:
            segments = [s for s in chunk.segments if s.param == sharded.index]
            if not segments:
                continue
            here = open_chunk(self._tiers, chunk)
            try:
                here.read(copy=copy)
                here.wait()
                for segment in segments:
                    yield segment, here
                if write:
                    # What is on the device was written there; a lease has nothing for it.
                    here.write(state=True, copy=copy and not unit.resident)
            finally:
                here.close()

    @sheltered
    def copy_of(self, sharded: ShardedParam, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the newest values of one parameter, in the compute dtype, on the host; `out`: bytes to put
        them into."""
        self._quiesce()
        unit, copies = self._tiers.units[sharded.unit], self._tiers.copies
        dtype = sharded.spec.dtype
        out = torch.empty(sharded.spec.numel, dtype=dtype) if out is None else out.view(dtype)
        for chunk in unit.layout.chunks:
            segments = [s for s in chunk.segments if s.param == sharded.index]
            if not segments:
                continue
            if unit.resident:
                source, lease = unit.chunk_view(chunk), None
                if copies.is_newer(chunk.id) and not unit.newest:
                    source = self._tiers.store.view(chunk.id, copies.newest(chunk.id), chunk.dtype)
            elif self._tiers.plans[chunk.id].copy_tier is Tier.HOST:
                source = self._tiers.store.view(chunk.id, copies.newest(chunk.id), chunk.dtype)
                lease = None
            else:
                lease = self._tiers.pool.lease("fetch", chunk.copy_nbytes)
                self._tiers.store.read(chunk.id, copies.newest(chunk.id), lease).wait()
                source = lease.tensor(chunk.dtype, 0, chunk.numel)
            try:
                for segment in segments:
                    out[segment.offset : segment.offset + segment.numel].copy_(slice_of(source, segment))
            finally:
                if lease is not None:
                    lease.release()
        return own(out.view(sharded.spec.shape))  # lent memory is a part of a lease

    @sheltered
    def value_of(self, sharded: ShardedParam) -> torch.Tensor:
        """Return the newest values of one parameter on the host, in the dtype that it had at `wrap`: those of
        the master, where that is more exact than the copy."""
        if not sharded.spec.trainable or sharded.spec.dtype in (torch.float32, sharded.given_dtype):
            return self.copy_of(sharded).to(sharded.given_dtype)
        out = torch.empty(sharded.spec.numel, dtype=sharded.given_dtype)
        for segment, here in self._chunks_of(sharded, write=False):
            out[segment.offset : segment.offset + segment.numel].copy_(slice_of(here.master, segment))
        return out.view(sharded.spec.shape)

    @sheltered
    def set_copy(self, sharded: ShardedParam, values: torch.Tensor) -> None:
        """Write new values of one parameter that is not on the device: the copy, and the master where it
        does not round to them."""
        self._quiesce()
        unit = self._tiers.units[sharded.unit]
        flat = values.detach().reshape(-1)
        for chunk in unit.layout.chunks:
            segments = [s for s in chunk.segments if s.param == sharded.index]
            if not segments:
                continue
            here = open_chunk(self._tiers, chunk, "update" if chunk.trainable else "fetch")
            try:
                here.read(copy=True)
                here.wait()
                for segment in segments:
                    target = slice_of(here.copy, segment)
                    target.copy_(part_of(flat, segment))
                    if chunk.trainable and not here.copy_is_master:
                        follow_copy(slice_of(here.master, segment), target)
                here.write(state=chunk.trainable, copy=True)
            finally:
                here.close()
        bump([sharded])


def bump(params: Sequence[ShardedParam]) -> None:
    """Tell autograd that the values of `params` changed: a graph from before fails, as in torch."""
    torch.autograd.graph.increment_version([s.param for s in params])
    for sharded in params:
        sharded.version = sharded.param._version


def _no_room(nbytes: int, room: int) -> BudgetError:
    return BudgetError(
        "a state dict does not fit the host memory that is left",
        expected=f"{format_size(nbytes)} ({nbytes} bytes)",
        found=f"{format_size(room)} ({room} bytes) left of host_memory",
        cure="raise host_memory, or read parameters one by one with `infinity.gathered`",
    )


def follow_copy(master: torch.Tensor, new: torch.Tensor) -> None:
    """Make the values of `master` those of the copy `new`. One that rounds to it already is kept: it has
    low bits that a copy cannot have."""
    if new.dtype is torch.float32:
        master.copy_(new)
        return
    for begin in range(0, new.numel(), _SLICE):
        part = slice(begin, begin + _SLICE)
        here, there = master[part], new[part].to(master.device)
        here.copy_(torch.where(here.to(there.dtype) == there, here, there.float()))


def part_of(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.offset : segment.offset + segment.numel]


def slice_of(section: torch.Tensor, segment: Segment) -> torch.Tensor:
    return section[segment.start : segment.start + segment.numel]


def _sections(here: ChunkIO, wanted: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    exp_avg, exp_avg_sq = here.moments
    pairs = [("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)]
    return [*pairs, ("master", here.master)] if "master" in wanted and not here.copy_is_master else pairs
