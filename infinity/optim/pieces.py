"""Pieces of flat tensors: the part of a parameter in a chunk, and the part of a chunk in a parameter."""

from __future__ import annotations

import torch

from infinity.planning.in_place import InPlace
from infinity.planning.partition import Chunk, Segment
from infinity.storage.pinned import Lease

_SLICE = 1 << 18  # elements compared at once: temporaries of about 1 MiB


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


def part_of(flat: torch.Tensor, segment: Segment) -> torch.Tensor:
    return flat[segment.offset : segment.offset + segment.numel]


def slice_of(section: torch.Tensor, segment: Segment) -> torch.Tensor:
    return section[segment.start : segment.start + segment.numel]
