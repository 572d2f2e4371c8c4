"""Pieces of flat tensors: the part of a parameter in a chunk, and the part of a chunk in a parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import log_codes
from infinity.planning.in_place import InPlace
from infinity.planning.partition import Chunk, Segment
from infinity.planning.parts import SQUARES, scales_of
from infinity.storage.pinned import Lease

_SLICE = 1 << 18  # elements at once: temporaries of about 1 MiB


def put_together(chunk: Chunk, place: InPlace, lease: Lease) -> torch.Tensor:
    """Return a copy that was read in place as it is elsewhere; what is between parameters is zero."""
    copy = torch.zeros(chunk.numel, dtype=chunk.dtype)
    flat = copy.view(torch.uint8)
    for at, begin, nbytes in place.stretches:
        flat[begin : begin + nbytes].copy_(lease.tensor(torch.uint8, at, nbytes))
    return copy


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


def drop_low(tensors: Mapping[str, torch.Tensor], new: torch.Tensor) -> None:
    """Of a segment of a split master, drop the lower halves of values that a load changes: they are what is
    loaded then. The others keep their low bits, as those of a whole master do."""
    if "low" in tensors:
        low, copy = tensors["low"], tensors["copy"]
        low.masked_fill_((new.to(copy) != copy).to(low.device), 0)


def part_of(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.offset : segment.offset + segment.numel]


def slice_of(section: torch.Tensor, segment: Segment, block: int = 1) -> torch.Tensor:
    return section[segment.start // block : -(-(segment.start + segment.numel) // block)]


def read_moment(kind: str, tensors: Mapping[str, torch.Tensor], out: torch.Tensor, first: int = 0) -> None:
    """Put the values of a moment of a segment, whose `tensors` are by kind, into `out`. `first`: elements of
    its first block that lie before it."""
    here, scales = tensors[kind], tensors.get(scales_of(kind))
    if scales is None:
        out.copy_(here)
        return
    for begin in range(0, here.numel(), _SLICE):
        block, skipped = divmod(first + begin, MOMENT_BLOCK)
        codes, blocks = here[begin : begin + _SLICE], scales[block : block + _SLICE // MOMENT_BLOCK + 1]
        values = log_codes.decode(codes, blocks, squares=kind in SQUARES, first=skipped)
        out[begin : begin + _SLICE].copy_(values)


def write_moment(kind: str, tensors: Mapping[str, torch.Tensor], values: torch.Tensor) -> None:
    """Make the values of a moment of a segment, whose `tensors` are by kind, the nearest to `values`."""
    here, scales = tensors[kind], tensors.get(scales_of(kind))
    if scales is None:
        here.copy_(values)
        return
    for begin in range(0, here.numel(), _SLICE):
        part, block = slice(begin, begin + _SLICE), begin // MOMENT_BLOCK
        wide = values[part].to(here.device, torch.float32).contiguous()
        blocks = scales[block : block + _SLICE // MOMENT_BLOCK]
        log_codes.encode(wide, here[part], blocks, squares=kind in SQUARES)
