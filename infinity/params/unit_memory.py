"""A unit's memory on the device: its gathered storage, and where in it each parameter and each chunk lies."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from infinity.core.sizes import SEGMENT_ELEMENTS, ceil_to
from infinity.hardware.aio import crc32c
from infinity.hardware.device import Device
from infinity.planning.partition import Chunk, UnitLayout

from .param import ShardedParam


class UnitMemory:
    """The gathered storage of one unit.

    Args:
        kept_apart: this rank's shard is placed on the device, in memory of its own: the whole is there only
            while it is used.
        in_place: this rank's shard is placed on the device, in the storage, which has its memory for good.
    """

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ShardedParam],
        device: Device,
        *,
        kept_apart: bool,
        in_place: bool,
    ) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.in_place = in_place
        self._staged = device.staged
        self._memory = device.memory(layout.gathered_nbytes)
        self.storage = self._memory.storage
        self._shard = device.zeros(layout.shard_nbytes) if kept_apart else None
        begins = itertools.accumulate((c.copy_nbytes for c in layout.chunks), initial=0)
        self._begins = {c.id: begin for c, begin in zip(layout.chunks, begins, strict=False)}  # in the shard
        places = sorted((at, i) for i, at in enumerate(layout.byte_offsets))
        self._starts = [at for at, _ in places]
        self._order = [i for _, i in places]

    def view(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a flat view of the unit's storage; `offset` and `nbytes` in bytes."""
        with torch.inference_mode(False):  # the thread that fills it is not in that mode
            tensor = torch.empty(0, dtype=dtype, device=self.storage.device)
            size = dtype.itemsize
            return tensor.set_(self.storage, offset // size, (nbytes // size,), (1,))

    def runs(self) -> list[torch.Tensor]:
        """Return the unit's runs, as bytes."""
        return [self.view(run.begin, run.nbytes) for run in self.layout.runs]

    def checksums(self, indices: Iterable[int]) -> dict[int, int | torch.Tensor]:
        """Return a checksum of the values in the storage of each of the parameters with these `indices`. On a
        device of its own it is still being made there when this returns."""
        sums: dict[int, int | torch.Tensor] = {}
        if self._staged:
            return self._digests_of(chosen) if (chosen := tuple(indices)) else sums
        for index in indices:
            spec, at = self.params[index].spec, self.layout.byte_offsets[index]
            nbytes = spec.numel * spec.dtype.itemsize
            sums[index] = crc32c(self.view(at, nbytes).data_ptr(), nbytes)
        return sums

    def _digests_of(self, indices: tuple[int, ...]) -> dict[int, int | torch.Tensor]:
        words = []
        for index in indices:
            # With what follows it up to the next parameter, which changes only where a chunk does.
            spec = self.params[index].spec
            nbytes = ceil_to(spec.numel, SEGMENT_ELEMENTS) * spec.dtype.itemsize
            words.append(self.view(self.layout.byte_offsets[index], nbytes, torch.int64))
        return dict(zip(indices, _digests(words).unbind(), strict=True))

    def chunk_view(self, chunk: Chunk) -> torch.Tensor:
        """Return the memory on the device where a chunk's copy is placed, in its compute dtype."""
        if self._shard is None:
            return self.view(chunk.copy_offset, chunk.copy_nbytes, chunk.dtype)
        begin = self._begins[chunk.id]
        return self._shard[begin : begin + chunk.copy_nbytes].view(chunk.dtype)

    def used(self) -> None:
        """Whatever the caller computes in is about to use the storage."""
        if not self.in_place:
            self._memory.used()

    def drop(self) -> None:
        """Give the storage's memory back, unless it has it for good."""
        if not self.in_place:
            self._memory.drop()

    def here(self) -> dict[int, torch.Tensor]:
        """Return the copies that are placed on the device, as bytes, by chunk id."""
        chunks = self.layout.chunks if self._shard is not None or self.in_place else ()
        return {chunk.id: self.chunk_view(chunk).view(torch.uint8) for chunk in chunks}

    def values(self, sharded: ShardedParam) -> torch.Tensor:
        """Return the flat values of one of the unit's parameters, in the storage."""
        spec = sharded.spec
        return self.view(
            self.layout.byte_offsets[sharded.index], spec.numel * spec.dtype.itemsize, spec.dtype
        )

    def param_at(self, offset: int) -> ShardedParam:
        """Return the parameter that lies at byte `offset` of the storage."""
        return self.params[self._order[max(0, bisect.bisect_right(self._starts, offset) - 1)]]


def _digests(words: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return numbers, int64, of flat tensors of 64-bit words: each depends on every word of one and on its
    place.

    A tensor is cut into slabs of at least `_ROWS` rows of `_COLUMNS` words, and the sums of its columns take
    the place of a slab. A number is the sum of odd multiples of these sums, and of the words that are left
    over, modulo 2^64. So only words of one slab whose distance is a multiple of `_COLUMNS` can change places
    unnoticed.

    The words are read once, in one launch for each large tensor and eight for all; the host does not wait.
    What is made meanwhile takes a fortieth of the words, and at most 128 KiB for each tensor.
    """
    pieces = [words[0].new_zeros(1)]  # what the numbers are made of, tensor by tensor
    lengths: list[int] = []
    for each in words:
        slabs = max(1, each.numel() // (_COLUMNS * _ROWS))
        rows = each.numel() // (_COLUMNS * slabs)
        summed = slabs * rows * _COLUMNS if rows > 1 else 0
        parts = [each[summed:]]
        if summed:
            parts.append(each[:summed].view(slabs, rows, _COLUMNS).sum(1).view(-1))
        pieces += parts
        lengths.append(sum(part.numel() for part in parts))
    sums = torch.cat(pieces)
    odd = torch.arange(_ODD, _ODD + 2 * max(lengths), 2, device=sums.device)
    sums[1:].mul_(torch.cat([odd[:n] for n in lengths]))
    below = sums.cumsum_(0)
    at = torch.stack([below[end] for end in itertools.accumulate(lengths, initial=0)])
    return at[1:] - at[:-1]


#: A prime number: what lies at one place of two rows, or of two columns, of a parameter has other columns.
_COLUMNS: Final = 4093
_ROWS: Final = 256
#: The first multiplier, without a pattern: of the golden ratio, in 62 bits.
_ODD: Final = 0x278DDE6E5FD29E37
