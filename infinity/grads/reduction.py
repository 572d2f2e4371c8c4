"""Gradients of several ranks: what arrived on any of them, added up, and of that this rank's slices.

[Note: one order of sums] Every rank has a slice of each run of a unit. Ranks send each other their parts of
it; the owner adds them in fp32 in the order of the ranks, and divides once. What replaces a gradient is then
rounded to the compute dtype, once; what is added to one stays fp32. So at one number of ranks the placement,
the tier and the size of chunks change no bit. Where several arrive for one parameter before its unit is
reduced, they are added on their rank, in the dtype in which autograd made them, as autograd would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from infinity.core.errors import DivergenceError
from infinity.hardware.device import Device, Event
from infinity.hardware.ranks import Comm
from infinity.planning.partition import Chunk, Segment, UnitLayout

from .buffer import Arrival, UnitBuffer

#: How a gradient came, in what ranks tell each other: one byte for each parameter.
_NOT, _FRESH, _ADDED, _ZERO = range(4)


def agree(comm: Comm, layout: UnitLayout, arrivals: Mapping[int, Arrival]) -> dict[int, Arrival]:
    """Return what has arrived of a unit on any rank. Collective.

    Raises:
        DivergenceError: a gradient replaces another one here, and is added to it elsewhere.
        RankError: another rank failed, or does something else.
    """
    mine = bytearray(len(layout.params))
    for index, arrival in arrivals.items():
        mine[index] = _ZERO if arrival.zero else _FRESH if arrival.fresh else _ADDED
    told = comm.exchange(f"reduction of the gradients of unit {layout.name!r}", bytes(mine))
    together: dict[int, Arrival] = {}
    for index, spec in enumerate(layout.params):
        kinds = {codes[index] for codes in told} - {_NOT}
        if not kinds:
            continue
        if {_FRESH, _ADDED} <= kinds or {_ZERO, _ADDED} <= kinds:
            raise DivergenceError(
                f"ranks do not agree on whether {spec.name!r} has a gradient already",
                expected="zero_grad() and `p.grad = None` at the same point of the program on all ranks",
                found=", ".join(f"rank {r}: {_said(codes[index])}" for r, codes in enumerate(told)),
                cure="call `optimizer.zero_grad()` on all ranks alike",
            )
        factor = arrivals[index].factor if index in arrivals else 1.0
        together[index] = Arrival(_ADDED not in kinds, factor, zero=kinds == {_ZERO})
    return together


def _said(code: int) -> str:
    return ("no gradient", "a first one", "one more", "zeros")[code]


class ReducedBuffer:
    """This rank's slices of a unit's gradient, added up over all ranks: see [Note: one order of sums]."""

    def __init__(self, comm: Comm, buffer: UnitBuffer, arrivals: dict[int, Arrival], device: Device) -> None:
        self.layout = buffer.layout
        self.arrivals = arrivals
        self.there = buffer.there
        self.nbytes = 0
        self._device = device
        self._chunks: dict[int, torch.Tensor] = {}  # fp32, by id
        with self.there():
            for run in self.layout.runs:
                if not run.trainable:
                    continue
                mine = comm.reduce(buffer.run(run))
                self.nbytes += mine.nbytes
                at = run.begin + comm.rank * run.slice_nbytes
                for chunk in self.layout.trainable_chunks:
                    if at <= chunk.copy_offset < at + run.slice_nbytes:
                        begin = (chunk.copy_offset - at) // run.dtype.itemsize
                        self._chunks[chunk.id] = mine[begin : begin + chunk.numel]

    def mark(self) -> Event | None:
        """Return an event of all that was done with it so far."""
        with self.there():
            return self._device.mark()

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a chunk: (chunk.numel,) in its dtype."""
        return self._chunks[chunk.id].to(chunk.dtype)

    def pieces(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the chunk as one: (first element, fp32 values, (chunk.numel,))."""
        yield 0, self._chunks[chunk.id]

    def piece(self, chunk: Chunk, segment: Segment) -> torch.Tensor:
        """Return one segment, (segment.numel,): in fp32 what is added, in the chunk's dtype what replaces."""
        values = self._chunks[chunk.id][segment.start : segment.start + segment.numel]
        return values.to(chunk.dtype) if self.arrivals[segment.param].fresh else values
