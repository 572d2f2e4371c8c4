"""How units are cut: parameters → segments → runs → chunks.

A *unit* is a list of parameters that are gathered and released together. Its elements form one
flat shard (the whole unit; the world is 1). Inside it

- parameters are ordered into *runs* of equal (trainable, dtype), and by group within a run;
- each parameter begins on a multiple of SEGMENT_ELEMENTS, each run on one of RUN_ELEMENTS;
- a run is cut into *chunks* of at most `chunk_elements`, so that a chunk has one dtype and is
  trainable as a whole or not at all, and the blocks of a norm lie on the same grid for every
  chunk size ([Note: norms]).

Frozen chunks have a copy and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from infinity.core.sizes import NORM_BLOCK, RUN_ELEMENTS, SEGMENT_ELEMENTS, ceil_to


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

    @property
    def nbytes(self) -> int:
        """Bytes of its copy, and of its gradient as it is made."""
        return self.numel * self.dtype.itemsize


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

    @functools.cached_property
    def norm_pieces(self) -> tuple[tuple[int, int, int], ...]:
        """What each parameter has of each norm block, as (parameter, first element within the chunk,
        elements), in ascending order. See [Note: norms]."""
        return tuple(
            (s.param, max(s.start, block), min(s.start + s.numel, block + NORM_BLOCK) - max(s.start, block))
            for s in self.segments
            for block in range(s.start // NORM_BLOCK * NORM_BLOCK, s.start + s.numel, NORM_BLOCK)
        )


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
