"""Whole matrices in an update: Muon orthogonalizes a matrix, which lies in the chunks of its unit in pieces.

[Note: two visits] A chunk of a matrix is visited twice. The first visit updates its piece of the momentum
and puts what is to be orthogonalized into one bf16 buffer for the matrix. When all pieces are there, the
device orthogonalizes the buffer, in the shape that the parameter has. The second visit takes the chunk's
piece of the result and updates master and copy. The matrices of an update come one after the other, so there
is one buffer.

If all of a matrix is one chunk on NVMe, one visit does both: what that changes is in the lease, which an
update that stops drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity.core.errors import ParameterError
from infinity.core.sizes import Tier
from infinity.hardware import cpu_adam, muon
from infinity.params.param import plain_name
from infinity.planning.partition import Chunk, ParamSpec, Segment
from infinity.storage.pinned import Lease

from .chunk_io import ChunkIO, Tiers


class Visit(NamedTuple):
    """Which of the two visits this one is: one of them, or both."""

    is_first: bool
    is_last: bool


def visits_of(tiers: Tiers, chunks: Sequence[Chunk]) -> tuple[Visit, ...]:
    """Return the visits of the `chunks` of a matrix: all of the first come before the second."""
    if len(chunks) == 1 and tiers.plans[chunks[0].id].state_tier is Tier.NVME:
        return (Visit(True, True),)
    return Visit(True, False), Visit(False, True)


class Matrices:
    """The matrices of one update after the other. One thread, the worker, uses all but `expect`."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._lease: Lease | None = None  # with room for the largest matrix, until `close`
        self._buffer: torch.Tensor | None = None  # of the matrix at work, on the device; on a CPU the lease
        self._at: tuple[int, int] | None = None  # unit and parameter of the matrix at work
        self._collected = self._applied = 0  # elements of it
        self._on_host: list[slice] = []  # pieces of it that the CPU updates, in order
        self._is_orthogonal = False
        self._expected = self._made = 0

    def begin(self) -> None:
        """An update begins."""
        self._expected = self._made = 0

    def expect(self, count: int) -> None:
        """The update has `count` matrices more."""
        self._expected += count

    def check(self) -> None:
        """Raise `ParameterError` unless the update has orthogonalized each matrix, once."""
        if self._made != self._expected or self._at is not None:
            raise _lost(f"{self._expected} matrices, each orthogonalized once", f"{self._made}")

    def close(self) -> None:
        """Give the lease back."""
        self._buffer = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def collect(
        self, io: ChunkIO, grad: torch.Tensor, options: muon.Muon, *, grad_scale: float, step: int
    ) -> None:
        """Make the first visit of a chunk. `grad`: where the chunk is updated."""
        [segment] = io.chunk.segments
        spec = self._spec(io.chunk, segment)
        if segment.offset == 0:
            self._begin((io.chunk.unit, segment.param), spec)
        self._check_at(io.chunk, segment)
        target = self._memory(spec, on_device=io.on_device)
        here, there = _places(segment)
        [moment] = io.moments
        rounds = moment.dtype is not torch.float32
        key = cpu_adam.rounding_key(plain_name(spec.name), step) if rounds else 0
        # An update that stops drops what is in a lease; what is in place it takes memory on its way to.
        io.changed = self._tiers.plans[io.chunk.id].state_tier is not Tier.NVME

        def work() -> None:
            parts = moment[here], grad[here], target[there]
            muon.add_to_momentum(*parts, options, grad_scale=grad_scale, first=segment.offset, key=key)

        if io.on_device:
            self._tiers.device.compute(work)
        else:
            work()
            first = self._on_host.pop().start if self._meets(there) else there.start
            self._on_host.append(slice(first, there.stop))
        self._collected += segment.numel

    def orthogonalize(self, chunk: Chunk, options: muon.Muon) -> None:
        """Orthogonalize the matrix that a chunk is a piece of, before the first piece's second visit. What
        needs memory changes nothing."""
        [segment] = chunk.segments
        spec = self._spec(chunk, segment)
        self._check_at(chunk, segment)
        if self._is_orthogonal:
            return
        if self._collected != spec.numel:
            raise _lost(f"{spec.numel} elements of {spec.name!r}", f"{self._collected}")
        device, matrix = self._tiers.device, self._memory(spec, on_device=True)
        crossing = self._on_host if device.staged else []
        for piece in crossing:
            source = self._memory(spec, on_device=False)[piece]
            device.wait_on_device(device.h2d(matrix[piece], source, device.mark()))

        def work() -> None:
            whole = matrix.view(spec.shape)
            whole.copy_(muon.orthogonalize(whole, options))

        device.compute(work)
        done = device.mark()
        for piece in crossing:
            done = device.d2h(self._memory(spec, on_device=False)[piece], matrix[piece], done)
        if crossing and done is not None:
            done.wait()
        self._is_orthogonal = True
        self._made += 1

    def apply(
        self, io: ChunkIO, master: torch.Tensor, options: muon.Muon, *, lr: float, weight_decay: float
    ) -> None:
        """Make the second visit of a chunk, after `orthogonalize`: update its piece of the matrix in
        `master`."""
        [segment] = io.chunk.segments
        spec = self._spec(io.chunk, segment)
        source, (here, there) = self._memory(spec, on_device=io.on_device), _places(segment)
        parts = master[here], source[there], options, spec.shape
        muon.step_along(*parts, lr=lr, weight_decay=weight_decay)
        self._applied += segment.numel
        if self._applied == spec.numel:
            self._at = None
            if self._tiers.device.staged:
                self._buffer = None

    def _spec(self, chunk: Chunk, segment: Segment) -> ParamSpec:
        return self._tiers.units[chunk.unit].params[segment.param].spec

    def _begin(self, at: tuple[int, int], spec: ParamSpec) -> None:
        if self._at not in (None, at):
            raise _lost("one matrix after the other", f"the first piece of {spec.name!r} before the last one")
        self._at, self._on_host, self._is_orthogonal = at, [], False
        self._collected = self._applied = 0

    def _check_at(self, chunk: Chunk, segment: Segment) -> None:
        if self._at != (chunk.unit, segment.param):
            name = self._spec(chunk, segment).name
            raise _lost(f"all pieces of {name!r}, the first one first", "a piece without the first one")

    def _meets(self, piece: slice) -> bool:
        return bool(self._on_host) and self._on_host[-1].stop == piece.start

    def _memory(self, spec: ParamSpec, *, on_device: bool) -> torch.Tensor:
        """Return the memory of the matrix at work, flat: on the device, or for the CPU."""
        device = self._tiers.device
        if on_device and device.staged:
            if self._buffer is None or self._buffer.numel() != spec.numel:
                self._buffer = torch.empty(spec.numel, dtype=torch.bfloat16, device=device.torch_device)
            return self._buffer
        if self._lease is None:
            specs = (p.spec for unit in self._tiers.units for p in unit.params)
            self._lease = self._tiers.pool.lease("matrix", max(2 * s.numel for s in specs if s.matrix))
        return self._lease.tensor(torch.bfloat16, 0, spec.numel)


def _places(segment: Segment) -> tuple[slice, slice]:
    """Return the place of a piece in its chunk, and in its matrix."""
    begin, end = segment.offset, segment.offset + segment.numel
    return slice(segment.start, segment.start + segment.numel), slice(begin, end)


def _lost(expected: str, found: str) -> ParameterError:
    return ParameterError(
        "the update of a matrix is not complete",
        expected=expected,
        found=found,
        cure="build the model again and load the last checkpoint (`infinity.load`), and report this: it is "
        "an error of the engine",
    )
