"""A unit's memory on the device: its gathered storage, and where in it each parameter and each chunk lies."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence

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
        self._digests: tuple[tuple[int, ...], _Digests] | None = None

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
        known = self._digests
        if known is None or known[0] != indices:
            # Of each with what follows it up to the next parameter, which changes only where a chunk does.
            specs = [self.params[index].spec for index in indices]
            sizes = [ceil_to(s.numel, SEGMENT_ELEMENTS) * s.dtype.itemsize // 8 for s in specs]
            known = indices, _Digests(sizes, self.storage.device)
            # The first stay, which are those of all that are watched: streams share them, so they never go.
            self._digests = self._digests or known
        offsets, sizes = self.layout.byte_offsets, known[1].sizes
        words = [self.view(offsets[i], n * 8, torch.int64) for i, n in zip(indices, sizes, strict=True)]
        return dict(zip(indices, known[1].of(words).unbind(), strict=True))

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


class _Digests:
    """Numbers of parameters that each depend on every 64-bit word of one and on its place: the sum of odd
    multiples of the sums of rows and of columns, modulo 2^64.

    Nothing as large as the words is made for it, and on a device it is two launches a parameter, and four.
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes  # of each, in words
        self._columns = [math.gcd(size, 1024) or 1 for size in sizes]
        parts = [n for size, c in zip(sizes, self._columns, strict=True) for n in (c, size // c)]
        self._ends = [*itertools.accumulate(parts)]
        odd = [torch.arange(n) * (_ODD[at % 2] * 2) + 1 for at, n in enumerate(parts)]
        of = [torch.full((n,), at // 2) for at, n in enumerate(parts)]
        # Copies that block: they are there for each stream.
        self._odd, self._of = torch.cat(odd).to(device), torch.cat(of).to(device)

    def of(self, words: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the numbers, int64, of tensors of these sizes."""
        sums = torch.empty_like(self._odd)
        parts = iter(sums.tensor_split(self._ends[:-1]))
        for each, columns in zip(words, self._columns, strict=True):
            square = each.view(-1, columns)
            torch.sum(square, 0, out=next(parts))
            torch.sum(square, 1, out=next(parts))
        return sums.new_zeros(len(words)).index_add_(0, self._of, sums.mul_(self._odd))


#: Multipliers without a pattern: of the golden ratio, and of the square root of 2, in 62 bits.
_ODD = 0x278DDE6E5FD29E37, 0x1A827999FCEF3242
