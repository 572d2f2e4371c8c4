"""How units are cut: parameters → segments → runs → chunks.

A *unit* is a list of parameters that are gathered and released together. Its elements form one
flat shard (the whole unit; the world is 1). Inside it

- parameters are ordered into *runs* of equal (trainable, dtype), and by group within a run;
- each parameter begins on a multiple of SEGMENT_ELEMENTS, each run on one of RUN_ELEMENTS;
- a run is cut into *chunks* of at most `chunk_elements`, so that a chunk has one dtype and is
  trainable as a whole or not at all, and the spans of a norm lie on the same grid for every
  chunk size ([Note: norms]).

Frozen chunks have a copy and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infinity.core.sizes import RUN_ELEMENTS, SEGMENT_ELEMENTS, SPAN, Tier, ceil_to

#: The parts of a chunk in the store that its copy, and its gradient, can be in.
COPY_PARTS = ("copy", "spare")
GRADIENT_PARTS = ("gradient", "next gradient")


class ParamSpec(NamedTuple):
    """What planning knows of one parameter. `dtype` is that of its copy; `group` is the index of
    its optimizer group, -1 if it is frozen."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    group: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class Segment(NamedTuple):
    """The part of one parameter that lies in one chunk. Counted in elements."""

    param: int  # index into the unit's parameters
    offset: int  # first element within the parameter
    start: int  # first element within the chunk
    numel: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a unit's shard. `start` and `numel` count elements of the shard (padding
    included), `copy_offset` bytes of the unit's copy."""

    id: int
    unit: int
    start: int
    numel: int
    dtype: torch.dtype
    trainable: bool
    copy_offset: int
    segments: tuple[Segment, ...]

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the compute-dtype copy of this chunk."""
        return self.numel * self.dtype.itemsize

    @property
    def section_nbytes(self) -> int:
        """Bytes of one fp32 section (master, exp_avg or exp_avg_sq) of this chunk."""
        return self.numel * 4

    @property
    def spans(self) -> int:
        """Number of norm spans of this chunk."""
        return -(-self.numel // SPAN)


@dataclass(frozen=True)
class UnitLayout:
    """Where each parameter of a unit lies. `byte_offsets[i]` is the place of parameter i in the
    unit's copy."""

    index: int
    name: str
    params: tuple[ParamSpec, ...]
    byte_offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    copy_nbytes: int

    @functools.cached_property
    def trainable_chunks(self) -> tuple[Chunk, ...]:
        """The chunks that have optimizer state."""
        return tuple(c for c in self.chunks if c.trainable)

    @functools.cached_property
    def gradient_nbytes(self) -> int:
        """Bytes of the unit's gradients in the compute dtype."""
        return sum(c.copy_nbytes for c in self.chunks if c.trainable)


def partition(
    units: Sequence[tuple[str, Sequence[ParamSpec]]], chunk_elements: int
) -> tuple[UnitLayout, ...]:
    """Cut `units` (name, parameters) into chunks; chunk ids count up over all units, in order."""
    layouts = []
    next_id = 0
    for index, (name, params) in enumerate(units):
        layout = _cut(index, name, tuple(params), chunk_elements, next_id)
        next_id += len(layout.chunks)
        layouts.append(layout)
    return tuple(layouts)


def _cut(
    index: int, name: str, params: tuple[ParamSpec, ...], chunk_elements: int, first_id: int
) -> UnitLayout:
    # Wide dtypes first, trainable before frozen: runs are few, and the order depends on nothing
    # but the specs. The sort is stable, so registration order decides within a group.
    def run_key(i: int) -> tuple[bool, int, str]:
        p = params[i]
        return (not p.trainable, -p.dtype.itemsize, str(p.dtype))

    order = sorted(range(len(params)), key=lambda i: (*run_key(i), params[i].group))
    byte_offsets = [0] * len(params)
    chunks: list[Chunk] = []
    start = copy_offset = 0  # of the run, in elements and bytes
    position = 0
    while position < len(order):
        key = run_key(order[position])
        places: list[tuple[int, int]] = []  # (parameter, first element within the run)
        length = 0
        while position < len(order) and run_key(order[position]) == key:
            i = order[position]
            places.append((i, length))
            length = ceil_to(length + params[i].numel, SEGMENT_ELEMENTS)
            position += 1
        length = ceil_to(max(length, 1), RUN_ELEMENTS)
        first = params[places[0][0]]
        for i, at in places:
            byte_offsets[i] = copy_offset + at * first.dtype.itemsize
        for begin in range(0, length, chunk_elements):
            numel = min(chunk_elements, length - begin)
            chunks.append(
                Chunk(
                    id=first_id + len(chunks),
                    unit=index,
                    start=start + begin,
                    numel=numel,
                    dtype=first.dtype,
                    trainable=first.trainable,
                    copy_offset=copy_offset + begin * first.dtype.itemsize,
                    segments=tuple(_segments(params, places, begin, begin + numel)),
                )
            )
        start += length
        copy_offset += length * first.dtype.itemsize
    return UnitLayout(index, name, params, tuple(byte_offsets), tuple(chunks), copy_offset)


def _segments(
    params: Sequence[ParamSpec], places: Sequence[tuple[int, int]], begin: int, end: int
) -> Iterator[Segment]:
    for i, at in places:
        low, high = max(at, begin), min(at + params[i].numel, end)
        if low < high:
            yield Segment(i, low - at, low - begin, high - low)


@dataclass(frozen=True)
class Assignment:
    """The tier of every unit's copy, and of every trainable chunk's state and gradient."""

    copies: tuple[Tier, ...]  # by unit index
    states: Mapping[int, Tier]  # by chunk id
    gradients: Mapping[int, Tier]  # by chunk id


def assign(
    layouts: Sequence[UnitLayout],
    parameters: Mapping[Tier, float],
    optimizer_state: Mapping[Tier, float],
    gradients: Mapping[Tier, float],
) -> Assignment:
    """Spread units and chunks over tiers in the given shares of bytes.

    Each goes to the tier that is furthest behind its share, so that a split is even along the
    model and every stretch of the schedule uses both tiers' bandwidth.
    """
    chunks = [c for u in layouts for c in u.trainable_chunks]
    copies = _spread([u.copy_nbytes for u in layouts], parameters)
    states = _spread([c.numel for c in chunks], optimizer_state)
    grads = _spread([c.numel for c in chunks], gradients)
    return Assignment(
        tuple(copies),
        {c.id: t for c, t in zip(chunks, states, strict=True)},
        {c.id: t for c, t in zip(chunks, grads, strict=True)},
    )


def _spread(sizes: Sequence[int], shares: Mapping[Tier, float]) -> list[Tier]:
    if len(shares) == 1:
        return list(shares) * len(sizes)
    given = dict.fromkeys(shares, 0)
    total = 0
    result = []
    for size in sizes:
        total += size
        tier = max(shares, key=lambda t: (shares[t] * total - given[t], -list(Tier).index(t)))
        given[tier] += size
        result.append(tier)
    return result


def spread_over_directories(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Give each chunk (its bytes on NVMe) to the directory that is furthest behind its share, so that
    every stretch of the chunks keeps all directories busy; return the directory of each. A chunk of 0
    bytes counts to none."""
    given = [0] * len(weights)
    total = 0
    result = [0] * len(sizes)
    whole = sum(weights)
    for number, size in enumerate(sizes):
        if size == 0:
            continue
        total += size
        behind = [weight / whole * total - had for weight, had in zip(weights, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += size
        result[number] = chosen
    return result


class ChunkPlan(NamedTuple):
    """The parts of one chunk, in bytes, and their tiers. A part of None does not exist.

    [Note: the copy is the master] Where the compute dtype is fp32 and a chunk's copy and state
    are on the same tier, the copy serves as the master and `state` has two sections, not three:
    12 instead of 16 bytes per parameter are written when all is on NVMe.
    """

    copy_tier: Tier
    copy_nbytes: int
    state_tier: Tier | None
    state_sections: tuple[int, ...]  # [master,] exp_avg, exp_avg_sq
    gradient_tier: Tier | None
    gradient_nbytes: int  # room for fp32: a gradient is fp32 once it accumulates
    spare_tier: Tier | None = None  # of a second copy, of the same size, into which delayed updates write
    gradient_slots: int = 1  # two when a backward runs beside the update before it

    @property
    def copy_is_master(self) -> bool:
        """See [Note: the copy is the master]."""
        return len(self.state_sections) == 2

    @property
    def nvme_nbytes(self) -> int:
        """Bytes of its parts on NVMe, one version of each."""
        parts = (
            (self.copy_tier, self.copy_nbytes),
            (self.spare_tier, self.copy_nbytes),
            (self.state_tier, sum(self.state_sections)),
            (self.gradient_tier, self.gradient_nbytes * self.gradient_slots),
        )
        return sum(nbytes for tier, nbytes in parts if tier is Tier.NVME)


def plan_chunks(
    layouts: Sequence[UnitLayout], assignment: Assignment, *, delayed: bool = False
) -> tuple[ChunkPlan, ...]:
    """Return the parts of every chunk, by chunk id. `delayed`: updates are one step behind, which
    takes a second copy and a second gradient."""
    made: dict[object, ChunkPlan] = {}  # nearly all chunks are alike
    plans = []
    for unit in layouts:
        copy_tier = assignment.copies[unit.index]
        for chunk in unit.chunks:
            state_tier = assignment.states.get(chunk.id)
            key = chunk.numel, chunk.dtype, copy_tier, state_tier, assignment.gradients.get(chunk.id)
            if key not in made:
                made[key] = _plan_chunk(chunk, *key[2:], delayed=delayed)
            plans.append(made[key])
    return tuple(plans)


def _plan_chunk(
    chunk: Chunk, copy_tier: Tier, state_tier: Tier | None, gradient_tier: Tier | None, *, delayed: bool
) -> ChunkPlan:
    if state_tier is None:  # frozen
        return ChunkPlan(copy_tier, chunk.copy_nbytes, None, (), None, 0)
    shared = chunk.dtype is torch.float32 and copy_tier is state_tier
    # What forward and backward use on the device must stay as it is beside an update.
    shared = shared and not (delayed and copy_tier is Tier.DEVICE)
    spare_tier = Tier.HOST if copy_tier is Tier.DEVICE else copy_tier
    return ChunkPlan(
        copy_tier,
        chunk.copy_nbytes,
        state_tier,
        (chunk.section_nbytes,) * (2 if shared else 3),
        gradient_tier,
        chunk.section_nbytes,
        spare_tier if delayed else None,
        2 if delayed else 1,
    )
