"""State and compute parameters, parameter by parameter: for state dicts, and for the take-over in `wrap`.

Everything here works chunk by chunk through leases, so that its own host memory is bounded.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from infinity.core import handlers
from infinity.core.commits import Commits, commit
from infinity.core.errors import BudgetError
from infinity.core.sizes import ALIGNMENT, ceil_to, format_size
from infinity.hardware.ranks import Comm
from infinity.params.given import own
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit
from infinity.planning.partition import Chunk, ParamSpec, Segment
from infinity.planning.parts import Moment
from infinity.storage.pipeline import pipeline
from infinity.storage.store import Version
from infinity.storage.under_way import UnderWay

from .chunk_io import ChunkIO, Tiers, open_chunk
from .leaving import Visited
from .pieces import drop_low, follow_copy, part_of, read_moment, slice_of, write_moment
from .update import Updater
from .whole import of_first_rank, of_owners

_Segments: TypeAlias = Iterator[tuple[ShardedParam, Segment, dict[str, torch.Tensor]]]
_MOST = 2  # chunks whose tensors are on their way while others are yielded, and that are yielded or read


class Values(Protocol):
    """Values of parameters that are not in memory."""

    def read(self, name: str, first: int, out: torch.Tensor) -> None:
        """Put the elements of the parameter `name` from element `first` on into `out`, flat."""


class States:
    """Reads and writes masters, moments and copies of single parameters and whole units."""

    def __init__(
        self,
        tiers: Tiers,
        updater: Updater,
        residency: Residency,
        comm: Comm,
        room: int,
        commits: Commits,
    ) -> None:
        self.commits = commits
        self.room = room  # host bytes that the budget leaves
        #: What the optimizer has beside the master. By kind, of how many elements a value is that is kept of
        #: that: the scales of moments in 8 bits are kinds, too. All that a trainable parameter has.
        self.kept = {moment.name: moment.block for moment in tiers.moments}
        self.moments = tuple(name for name, block in self.kept.items() if block == 1)
        self.kinds = ("copy", "master", *self.kept)
        #: Those of each kind of parameters.
        self._of: dict[tuple[bool, bool], tuple[Moment, ...]] = {
            _kind_of(chunk): tiers.plans[chunk.id].moments
            for unit in tiers.units
            for chunk in unit.layout.trainable_chunks
        }
        self._tiers = tiers
        self._has_halves = any(plan.is_split for plan in tiers.plans)
        self._updater = updater
        self._residency = residency
        self._comm = comm

    def moments_of(self, sharded: ShardedParam) -> tuple[Moment, ...]:
        """Return what the state of a parameter has beside the master."""
        return self._of[_kind_of(sharded.spec)] if sharded.spec.trainable else ()

    def kinds_of(self, sharded: ShardedParam) -> tuple[str, ...]:
        """Return the names of the moments of a parameter, without their scales."""
        return tuple(moment.name for moment in self.moments_of(sharded) if moment.block == 1)

    @commit
    def quiesce(self) -> None:
        """Wait until every update is complete and nothing of the state is on its way."""
        self._updater.wait()
        self._updater.drop_ahead()
        self._residency.resume_all()

    # -- wrap -------------------------------------------------------------------------------

    def take_over(
        self, unit: ParamUnit, moments: Mapping[int, Mapping[str, Any]], values: Values | None = None
    ) -> None:
        """Put a unit's values on their tiers: copy, fp32 master, and the moments that an
        optimizer already had (by parameter index; zeros otherwise). `values`: of a frozen unit, where they
        are, if not in its parameters."""
        unit.place()
        if values is None:
            self._fill(unit, moments)
        else:
            kinds = ("copy",)
            for sharded, segment, tensors in self.segments(kinds, unit.params, written=kinds, fresh=True):
                values.read(sharded.name, segment.offset, tensors["copy"])
        unit.bind()  # counts who refers to the unit's memory, which nothing of ours must do now

    def _fill(self, unit: ParamUnit, moments: Mapping[int, Mapping[str, Any]]) -> None:
        # What was never written reads as zeros: moments that are zero need no write.
        written = self.kinds if moments else self.kinds[:2]
        sources = [of_first_rank(self._comm, p.param) for p in unit.params]
        flat = {
            i: {kind: of_first_rank(self._comm, saved[kind]) for kind in self.kinds_of(unit.params[i])}
            for i, saved in moments.items()
        }
        for sharded, segment, tensors in self.segments(self.kinds, unit.params, written=written, fresh=True):
            for kind, tensor in tensors.items():
                if kind in ("copy", "master"):
                    tensor.copy_(part_of(sources[sharded.index], segment))
                elif sharded.index in flat and kind in self.moments:
                    write_moment(kind, tensors, part_of(flat[sharded.index][kind], segment))

    # -- state dicts ------------------------------------------------------------------------

    @commit
    def with_front(self) -> list[ShardedParam]:
        """Return the parameters whose front may differ from their newest version: [Note: two versions]. No
        update may be under way."""
        versions = self._tiers.store.versions
        found: list[ShardedParam] = []
        for unit in self._tiers.units if versions.has_two("copy") else ():
            chunks = [c for c in unit.layout.trainable_chunks if versions.is_newer(c.id, "copy")]
            found += [unit.params[i] for i in sorted({s.param for c in chunks for s in c.segments})]
        return found

    def fronts(self, *, always: bool = False) -> list[ShardedParam]:
        """Return whose front a state dict has: every trainable parameter's, or none's. Which of them share a
        chunk with one that has two versions is nothing that a user can see. No update may be under way.
        `always`: also where every front is the newest version, if updates are delayed."""
        if not (always and self._residency.has_two_versions) and not self.with_front():
            return []
        return [p for unit in self._tiers.units for p in unit.params if p.spec.trainable]

    def check_room(self, *, always: bool = False) -> None:
        """Raise `BudgetError` unless the whole optimizer state (`always`: with all fronts) fits what the host
        budget leaves. No update may be under way."""
        nbytes = 0
        for chunk in (c for unit in self._tiers.units for c in unit.layout.trainable_chunks):
            plan = self._tiers.plans[chunk.id]
            sections = sum(m.block == 1 for m in plan.moments) + (not plan.copy_is_master)
            # In fp32, whatever they are kept in.
            nbytes += sections * ceil_to(chunk.section_nbytes, ALIGNMENT)
        nbytes += sum(s.spec.numel * s.spec.dtype.itemsize for s in self.fronts(always=always))
        if nbytes > self.room:
            raise _no_room(nbytes, self.room)

    @commit
    def make_room(self, params: Sequence[ShardedParam]) -> dict[ShardedParam, torch.Tensor]:
        """Return memory (uint8) for copies of some of `params`: leases that nobody uses, such as those for
        reading ahead, where copies of all of them do not fit what the host budget leaves. They are lent
        for as long as the copies live.

        Raises:
            BudgetError: that is not enough.
        """
        sizes = {s: s.spec.numel * s.spec.dtype.itemsize for s in params}
        total, room = sum(sizes.values()), self.room
        if total <= room:
            return {}
        self.quiesce()
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

    # -- segment by segment -----------------------------------------------------------------

    def segments(
        self,
        kinds: Collection[str],
        params: Iterable[ShardedParam],
        *,
        written: Collection[str] = (),
        fresh: bool = False,
        version: Version = Version.NEWEST,
        under_way: UnderWay | None = None,
        own: bool = False,
    ) -> _Segments:
        """Go through the state of `params` chunk by chunk, each chunk once, through one lease; where another
        is free, the next chunk is read meanwhile.

        Yields each segment with flat tensors of its elements, by kind, which stay valid until the next one is
        asked for. The caller is in a commit, and no update is under way.

        Args:
            kinds: some of `self.kinds`: "copy" (compute dtype), "master" (fp32) and the moments, in the dtype
                in which they are kept; scales have a value for each block. A frozen chunk has a copy alone.
                Where the copy is the master and both are asked for, "master" is left out. With "low", the
                lower half of a split master comes in place of it.
            params: in any order; what comes is in the order of units and chunks.
            written: which of `kinds` the caller changes: they are sent back when their chunk is over.
                A unit that is not placed on the device must be off the device then. Chunks that are read in
                place never come.
            fresh: every value of `params` is new: chunks that have no other parameters begin as zeros.
            version: of copies, where nothing else is asked for. To write the back, which then is newer
                than the front, name all parameters of each chunk.
            under_way: what the caller has under way from or into the tensors that it is given: it is waited
                for before a chunk's become invalid.
            own: of chunks that several ranks have, those alone that lie in this rank's slices.

        Raises:
            StorageError: a transfer failed.
        """
        self.quiesce()
        of: dict[int, set[int]] = {}
        for sharded in params:
            of.setdefault(sharded.unit, set()).add(sharded.index)
        chunks = [
            chunk
            for index in sorted(of)
            for chunk in self._tiers.units[index].layout.chunks
            if (chunk.trainable or "copy" in kinds)
            and any(s.param in of[index] for s in chunk.segments)
            and not (written and self._tiers.plans[chunk.id].place)
            and (not own or self._tiers.units[index].layout.owner(chunk) == self._comm.rank)
        ]
        under_way = UnderWay() if under_way is None else under_way
        yield from self._visits(chunks, of, kinds, written, fresh, version, under_way)

    def _each(
        self, chunk: Chunk, of: Mapping[int, set[int]], tensors: Mapping[str, torch.Tensor]
    ) -> _Segments:
        handlers.hear()  # where nothing is waited for, an interrupt comes between chunks
        params = self._tiers.units[chunk.unit].params
        for segment in chunk.segments:
            if segment.param in of[chunk.unit]:
                pieces = {k: slice_of(t, segment, self.kept.get(k, 1)) for k, t in tensors.items()}
                yield params[segment.param], segment, pieces

    def _visits(
        self,
        chunks: Iterable[Chunk],
        of: Mapping[int, set[int]],
        kinds: Collection[str],
        written: Collection[str],
        fresh: bool,
        version: Version,
        under_way: UnderWay,
    ) -> _Segments:
        leaving = deque[Visited]()
        number = self._updater.next_number() if written and version is Version.BACK else None

        def open_(chunk: Chunk, wait: bool) -> Visited | None:
            io = open_chunk(self._tiers, chunk, "update" if chunk.trainable else "load", wait=wait)
            return None if io is None else Visited(io, under_way)

        def begins(chunk: Chunk) -> bool:
            return fresh and all(s.param in of[chunk.unit] for s in chunk.segments)

        def read(chunk: Chunk, visited: Visited) -> None:
            visited.io.version = version
            if not begins(chunk):
                visited.io.read(state={*kinds} != {"copy"}, copy="copy" in kinds)

        passing = pipeline(iter(chunks), open_, read, closing=leaving, most=_MOST)
        with contextlib.closing(passing):  # here, and not when a collector finds it: a wait may raise
            for chunk, visited in passing:
                io = visited.io
                if written:
                    io.wait_unread()
                io.wait()
                tensors = self._tensors(io, kinds)
                if begins(chunk):
                    for tensor in self._tensors(io, kinds if number else self.kinds).values():
                        tensor.zero_()
                yield from self._each(chunk, of, tensors)
                # While its values are on their way, the next chunk's begin.
                for one in leaving:
                    if one is not visited:
                        one.send()
                state = any(kind != "copy" and kind in tensors for kind in written)
                visited.leave(state=state, copy="copy" in written, back=number)

    def _tensors(self, io: ChunkIO, kinds: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {}
        if "copy" in kinds:
            tensors["copy"] = io.copy
        if io.chunk.trainable and {*kinds} != {"copy"}:
            if "low" in kinds and io.low is not None:
                tensors["low"] = io.low
            elif "master" in kinds and not (io.place.copy_is_master and "copy" in kinds):
                tensors["master"] = io.master
            tensors.update((k, t) for k, t in zip(io.place.kinds, io.moments, strict=True) if k in kinds)
        return tensors

    @commit
    def read(
        self, params: Sequence[ShardedParam], fronts: Collection[ShardedParam] | None = None
    ) -> dict[ShardedParam, dict[str, torch.Tensor]]:
        """Return step, exp_avg, exp_avg_sq (and master, unless the compute dtype is fp32; and master and
        front, where that may not be the newest version: the two go together) of each. `fronts`: of which
        parameters it has a front, in place of those."""
        self.quiesce()
        fronts = {*(self.fronts() if fronts is None else fronts)}
        values: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        for sharded in params:
            more = ("master",) if sharded.spec.dtype is not torch.float32 or sharded in fronts else ()
            shape = sharded.spec.shape
            kinds = (*self.kinds_of(sharded), *more)
            values[sharded] = {k: torch.empty(shape, dtype=torch.float32) for k in kinds}
        for sharded, segment, tensors in self.segments((*self.kept, "master"), params):
            for kind, target in values[sharded].items():
                read_moment(kind, tensors, part_of(target.view(-1), segment))
        for kind in (*self.moments, "master"):
            of_owners(
                self._comm,
                self._tiers.units,
                kind,
                {s: v[kind].view(-1) for s, v in values.items() if kind in v},
            )
        for sharded in fronts & values.keys():
            values[sharded]["front"] = torch.empty(sharded.spec.shape, dtype=sharded.spec.dtype)
        for sharded, segment, tensors in self.segments(
            ("copy",), fronts & values.keys(), version=Version.FRONT
        ):
            part_of(values[sharded]["front"].view(-1), segment).copy_(tensors["copy"])
        return {s: {"step": torch.tensor(s.step, dtype=torch.float32), **v} for s, v in values.items()}

    @commit
    def write(
        self,
        pairs: Iterable[tuple[ShardedParam, Mapping[str, Any]]],
        steps: Callable[[Mapping[str, Any]], int],
    ) -> None:
        """Write step (`steps` of the values), moments (and master, where given) of parameters; no values:
        zeros. Copies follow the masters. Where a front is given, and there are two versions, it is the one in
        front then. A unit that is not placed on the device must be off the device, and no back newer than its
        front."""
        given: dict[ShardedParam, dict[str, torch.Tensor]] = {}
        fronts: dict[ShardedParam, torch.Tensor] = {}
        for sharded, values in pairs:
            sharded.step = steps(values)
            if not sharded.spec.trainable:
                continue  # it has no state, whatever the optimizer that was saved had
            kinds = (*self.kinds_of(sharded), "master")
            named = {k: v for k in kinds if (v := values.get(k)) is not None}
            given[sharded] = named
            if values.get("front") is not None:
                fronts[sharded] = values["front"]
        changed: dict[ShardedParam, None] = {}
        masters = [s for s, values in given.items() if "master" in values]
        for kinds, params in (
            (self.kinds, masters),
            ((*self.kept,), [s for s in given if s not in {*masters}]),
        ):
            flat: dict[str, torch.Tensor] = {}
            of: ShardedParam | None = None
            for sharded, segment, tensors in self.segments(kinds, params, written=kinds):
                if sharded is not of:  # one parameter's at a time: what is not contiguous is copied
                    of, flat = sharded, {k: v.detach().reshape(-1) for k, v in given[sharded].items()}
                for kind in (*self.kept, "master"):
                    if kind in flat and kind in tensors:
                        write_moment(kind, tensors, part_of(flat[kind], segment))
                    elif kind in self.moments and kind in tensors:
                        tensors[kind].zero_()
                if "copy" in tensors:
                    new = part_of(flat["master"], segment).to(tensors["copy"])
                    if not torch.equal(tensors["copy"], new):
                        changed[sharded] = None
                    tensors["copy"].copy_(new)
        bump(list(changed))
        if fronts and self._residency.has_two_versions:
            self._set_fronts(fronts)

    def _set_fronts(self, fronts: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Put other values in front of the newest. They are written where the next version is made, and then
        the slots change their roles: so the newest is never read."""
        units = [self._tiers.units[i] for i in sorted({s.unit for s in fronts})]
        params = [s for unit in units for s in unit.params if s.spec.trainable]
        values = {**self.copies_of([s for s in params if s not in fronts]), **fronts}
        flat, of = torch.empty(0), None
        try:
            for sharded, segment, tensors in self.segments(
                ("copy",), params, written=("copy",), fresh=True, version=Version.BACK
            ):
                if sharded is not of:
                    of, flat = sharded, values[sharded].detach().reshape(-1)
                tensors["copy"].copy_(part_of(flat, segment))
        finally:  # where it raised, too: what is in a back is the older version
            self._residency.change_roles(units)

    @commit
    def copies_of(
        self, params: Sequence[ShardedParam], out: Mapping[ShardedParam, torch.Tensor] | None = None
    ) -> dict[ShardedParam, torch.Tensor]:
        """Return the newest values of parameters, in the compute dtype, on the host; `out`: bytes to put some
        of them into."""
        values = {s: (out or {}).get(s) for s in params}
        flat = {
            s: torch.empty(s.spec.numel, dtype=s.spec.dtype) if v is None else v.view(s.spec.dtype)
            for s, v in values.items()
        }
        for sharded, segment, tensors in self.segments(("copy",), params):
            part_of(flat[sharded], segment).copy_(tensors["copy"])
        of_owners(self._comm, self._tiers.units, "values", flat)
        return {s: own(v.view(s.spec.shape)) for s, v in flat.items()}  # lent memory is a part of a lease

    @commit
    def values_of(self, params: Sequence[ShardedParam]) -> dict[ShardedParam, torch.Tensor]:
        """Return the newest values of parameters on the host, in the dtype that they had at `wrap`: those of
        the master, where that is more exact than the copy."""
        exact = [s for s in params if s.spec.trainable and s.spec.dtype not in (torch.float32, s.given_dtype)]
        values = {s: torch.empty(s.spec.shape, dtype=s.given_dtype) for s in params}
        for kind, chosen in (("master", exact), ("copy", [s for s in params if s not in {*exact}])):
            for sharded, segment, tensors in self.segments((kind,), chosen):
                part_of(values[sharded].view(-1), segment).copy_(tensors[kind])
        of_owners(self._comm, self._tiers.units, "values", {s: v.view(-1) for s, v in values.items()})
        return values

    @commit
    def set_copy(self, sharded: ShardedParam, values: torch.Tensor) -> None:
        """Write new values of one parameter that is not on the device: the copy, and the master where it
        does not round to them."""
        flat = values.detach().reshape(-1)
        kinds = ("copy", "master", "low")
        for _, segment, tensors in self.segments(kinds, [sharded], written=kinds):
            new = part_of(flat, segment)
            drop_low(tensors, new)
            tensors["copy"].copy_(new)
            if "master" in tensors:
                follow_copy(tensors["master"], tensors["copy"])
        bump([sharded])

    @commit
    def before_load(self, sharded: ShardedParam, values: torch.Tensor) -> None:
        """`values` are about to be loaded into a parameter that is placed on the device."""
        flat = values.detach().reshape(-1)
        for _, segment, tensors in (
            self.segments(("copy", "low"), [sharded], written=("low",)) if self._has_halves else ()
        ):
            drop_low(tensors, part_of(flat, segment))


def _kind_of(of: Chunk | ParamSpec) -> tuple[bool, bool]:
    return of.matrix, of.fp32_moments


def bump(params: Sequence[ShardedParam]) -> None:
    """Tell autograd that the values of `params` changed: a graph from before fails, as in torch."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version([s.param for s in params])
        for sharded in params:
            sharded.version = sharded.param._version


def _no_room(nbytes: int, room: int) -> BudgetError:
    return BudgetError(
        "a state dict does not fit the host memory that is left",
        expected=f"{format_size(nbytes)} ({nbytes} bytes)",
        found=f"{format_size(room)} ({room} bytes) left of host_memory",
        cure="write the model to files with `infinity.export(model, path)`, or the whole run with "
        "`infinity.save(optimizer, path)`, which work at any size; or raise host_memory",
    )
