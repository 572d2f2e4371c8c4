"""A unit's memory on the device: its gathered storage, and where in it each parameter and each chunk lies."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch

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
        self._memory = device.memory(layout.gathered_nbytes)
        self.storage = self._memory.storage
        self._shard = device.zeros(layout.shard_nbytes) if kept_apart else None
        begins = itertools.accumulate((c.copy_nbytes for c in layout.chunks), initial=0)
        self._begins = {c.id: begin for c, begin in zip(layout.chunks, begins, strict=False)}  # in the shard
        places = sorted((at, i) for i, at in enumerate(layout.byte_offsets))
        self._starts = [at for at, _ in places]
        self._order = [i for _, i in places]
        self.first = {at: self.params[i] for at, i in places}  # the parameters by their first byte

    def view(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a flat view of the unit's storage; `offset` and `nbytes` in bytes."""
        with torch.inference_mode(False):  # the thread that fills it is not in that mode
            tensor = torch.empty(0, dtype=dtype, device=self.storage.device)
            size = dtype.itemsize
            return tensor.set_(self.storage, offset // size, (nbytes // size,), (1,))

    def runs(self) -> list[torch.Tensor]:
        """Return the unit's runs, as bytes."""
        return [self.view(run.begin, run.nbytes) for run in self.layout.runs]

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
        return {chunk.id: self.chunk_view(chunk).view(torch.uint8) for chunk in self.layout.chunks}

    def values(self, sharded: ShardedParam) -> torch.Tensor:
        """Return the flat values of one of the unit's parameters, in the storage."""
        spec = sharded.spec
        return self.view(
            self.layout.byte_offsets[sharded.index], spec.numel * spec.dtype.itemsize, spec.dtype
        )

    def param_at(self, offset: int) -> ShardedParam:
        """Return the parameter that lies at byte `offset` of the storage."""
        return self.params[self._order[max(0, bisect.bisect_right(self._starts, offset) - 1)]]
