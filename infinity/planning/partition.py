"""How units are cut: parameters → runs → slices → chunks → segments.

A *unit* is a list of parameters that are gathered and released together.

- Parameters are ordered into *runs* of equal (trainable, dtype), and by group within a run; each begins on a
  multiple of the alignment: SEGMENT_ELEMENTS, or MOMENT_BLOCK with moments in 8 bits, so that each of their
  blocks lies in one chunk. A parameter that is updated as a whole (by Muon) is a run of its
  own, so that its chunks have nothing else. Parameters whose moments stay fp32 are in runs of their own, too.
- A run is cut into as many equal *slices* as there are ranks, padded to the alignment. They lie side by
  side in the unit's gathered storage; rank r has the r-th slice. The slices of a rank from all runs are its
  shard (with one rank, the whole unit).
- A slice is cut into *chunks* of at most `chunk_elements`, so that a chunk has one dtype and is trainable
  as a whole or not at all, and the blocks of a norm lie on the same grid for every chunk size ([Note:
  norms]).

Frozen chunks have compute parameters and nothing else.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from infinity.core.errors import ConfigError
from infinity.core.sizes import ITEMSIZES, NORM_BLOCK, SEGMENT_ELEMENTS, ceil_to, torch_dtype

if TYPE_CHECKING:  # what is planned is not built: it has names of dtypes, `precision`, and needs no torch
    import torch


@dataclass(frozen=True)
class ParamSpec:
    """What planning knows of one parameter. `precision` is the dtype of its copy, as ``fp32``, ``bf16`` or
    ``fp16``; `group` is the index of its optimizer group, -1 if it is frozen. `matrix`:
    Muon updates it as a whole, in its shape (`planning/matrices.py`). `fp32_moments`: its moments are fp32,
    whatever form those of other parameters have."""

    name: str
    shape: tuple[int, ...]
    precision: str
    trainable: bool
    group: int
    matrix: bool = False
    fp32_moments: bool = False

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """`precision`, as torch has it."""
        return torch_dtype(self.precision)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its copy, and of its gradient as it is made."""
        return self.numel * ITEMSIZES[self.precision]


class Segment(NamedTuple):
    """The part of one parameter that lies in one chunk. Counted in elements."""

    param: int  # index into the unit's parameters
    offset: int  # first element within the parameter
    start: int  # first element within the chunk
    numel: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a unit's shard. `start` and `numel` count elements of the shard (padding
    included), `copy_offset` bytes of the unit's gathered storage. `matrix`: it is a piece of one parameter,
    and of nothing else, that Muon updates as a whole. `fp32_moments`: as all of its parameters have it."""

    id: int
    unit: int
    start: int
    numel: int
    precision: str
    trainable: bool
    copy_offset: int
    segments: tuple[Segment, ...]
    matrix: bool = False
    fp32_moments: bool = False

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """`precision`, as torch has it."""
        return torch_dtype(self.precision)

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the compute-dtype copy of this chunk."""
        return self.numel * ITEMSIZES[self.precision]

    @property
    def section_nbytes(self) -> int:
        """Bytes of the fp32 master of this chunk, and of its gradient in fp32."""
        return self.numel * 4

    @functools.cached_property
    def norm_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """What each parameter has of each norm block, as (parameter, first element within the chunk,
        elements), in ascending order. See [Note: norms]."""
        return tuple(
            (s.param, max(s.start, block), min(s.start + s.numel, block + NORM_BLOCK) - max(s.start, block))
            for s in self.segments
            for block in range(s.start // NORM_BLOCK * NORM_BLOCK, s.start + s.numel, NORM_BLOCK)
        )


class GatherRun(NamedTuple):
    """A run in a unit's gathered storage: its first byte, and as many slices as there are ranks, each of
    `slice_numel` elements."""

    begin: int
    slice_numel: int
    world: int
    precision: str
    trainable: bool

    @property
    def dtype(self) -> torch.dtype:
        """`precision`, as torch has it."""
        return torch_dtype(self.precision)

    @property
    def slice_nbytes(self) -> int:
        """Bytes of one slice."""
        return self.slice_numel * ITEMSIZES[self.precision]

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return self.slice_nbytes * self.world

    def sent_nbytes(self, *, wide: bool = False) -> int:
        """Bytes that a rank sends where the run is gathered, or its gradient is reduced; `wide`: in fp32."""
        return self.slice_numel * (4 if wide else ITEMSIZES[self.precision]) * (self.world - 1)


@dataclass(frozen=True)
class UnitLayout:
    """Where each parameter of a unit lies. `byte_offsets[i]` is the place of parameter i in the unit's
    gathered storage; `chunks` are those of this rank's shard, or, if it has the `whole`, of all of them."""

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    byte_offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    runs: tuple[GatherRun, ...]
    whole: bool

    @functools.cached_property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole unit's copy, as forward and backward use it."""
        return sum(r.nbytes for r in self.runs)

    @functools.cached_property
    def world(self) -> int:
        """How many ranks have a slice of each run."""
        return self.runs[0].world

    def place(self, index: int) -> tuple[GatherRun, int]:
        """Return the run of parameter `index`, and its first element in there."""
        return self.at(self.byte_offsets[index])

    def at(self, offset: int) -> tuple[GatherRun, int]:
        """Return the run of byte `offset` of the gathered storage, and the element of it there."""
        run = next(r for r in self.runs if r.begin <= offset < r.begin + r.nbytes)
        return run, (offset - run.begin) // ITEMSIZES[run.precision]

    def owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield who has which elements of parameter `index`: (rank, first, end), in order."""
        spec, (run, at) = self.params[index], self.place(index)
        for rank in range(at // run.slice_numel, run.world):
            first = max(0, rank * run.slice_numel - at)
            end = min(spec.numel, (rank + 1) * run.slice_numel - at)
            if first < end:
                yield rank, first, end

    @functools.cached_property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shard of it."""
        return self.gathered_nbytes if self.whole else sum(r.slice_nbytes for r in self.runs)

    def owner(self, chunk: Chunk) -> int:
        """Return the rank in whose slices a chunk lies."""
        run, begin = self.at(chunk.copy_offset)
        return begin // run.slice_numel

    def chunks_in(self, run: GatherRun) -> Iterator[Chunk]:
        """Yield the chunks that lie in a run."""
        return (c for c in self.chunks if run.begin <= c.copy_offset < run.begin + run.nbytes)

    def chunks_of(self, rank: int) -> Iterator[tuple[GatherRun, Chunk]]:
        """Yield those of the trainable chunks that lie in the slices of one rank, and the run of each."""
        for run in self.runs:
            begin = run.begin + rank * run.slice_nbytes
            for chunk in self.trainable_chunks:
                if begin <= chunk.copy_offset < begin + run.slice_nbytes:
                    yield run, chunk

    @functools.cached_property
    def trainable_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that have optimizer state."""
        return tuple(c for c in self.chunks if c.trainable)

    @functools.cached_property
    def gradient_sizes(self) -> dict[int, int]:
        """Bytes of the gradient of each trainable parameter, as autograd makes it."""
        return {index: param.nbytes for index, param in enumerate(self.params) if param.trainable}

    @functools.cached_property
    def trainable_runs(self) -> tuple[GatherRun, ...]:
        """The runs that have gradients: they come first in the gathered storage."""
        return tuple(r for r in self.runs if r.trainable)

    def reduction_nbytes(self, *, wide: bool) -> int:
        """Bytes that adding up the gradients of all ranks takes at most beside those of this one and of the
        next unit: what is still leaving, `wide` in fp32, and sums in fp32; and where each rank has the whole,
        all slices of that."""
        runs = [r for r in self.trainable_runs if r.world > 1]
        sizes = (r.slice_numel * r.world * (4 if wide else ITEMSIZES[r.precision]) for r in runs)
        came = max(sizes, default=0)
        return came + sum(r.slice_numel * 4 * (1 + r.world * self.whole) for r in runs)

    @functools.cached_property
    def accumulated_nbytes(self) -> int:
        """Bytes of the whole unit's gradients in fp32."""
        return sum(r.slice_numel * r.world * 4 for r in self.trainable_runs)

    @functools.cached_property
    def gradient_nbytes(self) -> int:
        """Bytes of the whole unit's gradients in the compute dtype."""
        return sum(r.nbytes for r in self.trainable_runs)


def matched(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """Return those of `names`, of trainable parameters, that match one of the shell patterns of
    `Config.optimizer_state_fp32`.

    Raises:
        ConfigError: a pattern matches none of them.
    """
    found: set[str] = set()
    for pattern in patterns:
        these = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not these:
            raise ConfigError(
                f"the pattern {pattern!r} of the setting optimizer_state_fp32 matches no trainable parameter",
                expected="shell patterns for names of trainable parameters, as in `named_parameters()`",
                found=f"{pattern!r}, and names such as {', '.join(map(repr, names[:3]))}",
                cure=f"correct {pattern!r}, or leave it out",
            )
        found.update(these)
    return frozenset(found)


def partition(
    units: Sequence[tuple[str, Sequence[ParamSpec]]],
    chunk_elements: int,
    *,
    rank: int = 0,
    world: int = 1,
    replicated: bool = False,
    alignment: int = SEGMENT_ELEMENTS,
) -> tuple[UnitLayout, ...]:
    """Cut `units` (name, parameters) into the chunks of one of `world` ranks, or, where every rank has all,
    `replicated`, of all of them; chunk ids count up over all units, in order, and are the same on all
    ranks. Parameters and slices begin on multiples of `alignment` elements."""
    layouts = []
    next_id = 0
    shards = range(world) if replicated else range(rank, rank + 1)
    for index, (name, params) in enumerate(units):
        layout = _cut(index, name, tuple(params), chunk_elements, next_id, shards, world, alignment)
        next_id += len(layout.chunks)
        layouts.append(layout)
    return tuple(layouts)


def _cut(
    index: int,
    name: str,
    params: tuple[ParamSpec, ...],
    chunk_elements: int,
    first_id: int,
    shards: range,
    world: int,
    alignment: int,
) -> UnitLayout:
    # Wide dtypes first, trainable before frozen: runs are few, and the order depends on nothing
    # but the specs. The sort is stable, so registration order decides within a group.
    def run_key(i: int) -> tuple[bool, int, str, bool, int]:
        p = params[i]
        matrix = i if p.matrix else -1
        return (not p.trainable, -ITEMSIZES[p.precision], p.precision, p.fp32_moments, matrix)

    order = sorted(range(len(params)), key=lambda i: (*run_key(i), params[i].group))
    byte_offsets = [0] * len(params)
    chunks: list[Chunk] = []
    runs: list[GatherRun] = []
    start = copy_offset = 0  # of the run: in elements of the shard, and in bytes
    position = 0
    while position < len(order):
        key = run_key(order[position])
        places: list[tuple[int, int]] = []  # (parameter, first element within the run)
        length = 0
        while position < len(order) and run_key(order[position]) == key:
            i = order[position]
            places.append((i, length))
            length = ceil_to(length + params[i].numel, alignment)
            position += 1
        slice_numel = ceil_to(-(-max(length, 1) // world), alignment)
        first = params[places[0][0]]
        run = GatherRun(copy_offset, slice_numel, world, first.precision, first.trainable)
        runs.append(run)
        for i, at in places:
            byte_offsets[i] = copy_offset + at * ITEMSIZES[first.precision]
        for rank, begin in itertools.product(shards, range(0, slice_numel, chunk_elements)):
            numel = min(chunk_elements, slice_numel - begin)
            at = rank * slice_numel + begin
            chunks.append(
                Chunk(
                    id=first_id + len(chunks),
                    unit=index,
                    start=start + (rank - shards[0]) * slice_numel + begin,
                    numel=numel,
                    precision=first.precision,
                    trainable=first.trainable,
                    copy_offset=copy_offset + at * ITEMSIZES[first.precision],
                    segments=tuple(_segments(params, places, at, at + numel)),
                    matrix=first.matrix,
                    fp32_moments=first.fp32_moments,
                )
            )
        start += slice_numel * len(shards)
        copy_offset += run.nbytes
    whole = len(shards) == world
    return UnitLayout(index, name, params, tuple(byte_offsets), tuple(chunks), tuple(runs), whole)


def _segments(
    params: Sequence[ParamSpec], places: Sequence[tuple[int, int]], begin: int, end: int
) -> Iterator[Segment]:
    for i, at in places:
        low, high = max(at, begin), min(at + params[i].numel, end)
        if low < high:
            yield Segment(i, low - at, low - begin, high - low)
