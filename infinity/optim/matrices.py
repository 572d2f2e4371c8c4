"""Matrices in an update: Muon orthogonalizes a matrix, which lies in the chunks of its unit.

[Note: two visits] A chunk of a matrix is visited twice. The first visit updates its piece of the momentum
and puts what is to be orthogonalized into bf16 memory. When all pieces of a round are there ([Note: rounds]),
the owner of each matrix orthogonalizes it, in the shape that the parameter has. The second visit takes the
chunk's piece of the result and updates master and copy. The rounds of an update come one after the other, so
there is memory for one.

With one rank the pieces are put where the matrix is whole. If all of a matrix is one chunk on NVMe, one visit
does both: what that changes is in the lease, which an update that stops drops.

[Note: whole at its owner] With several ranks each has pieces of a matrix in its shard. Before the second
visits the ranks send the pieces to the owner, and the owner sends those of the result back. They do so on the
thread of the update, beside the collectives of forward and backward, over a connection of their own: what one
thread of a rank does would otherwise come between the collectives of another. The order is that of the
rounds, which is the same on all ranks, and the ranks compare it. An update waits for the updates of other
ranks, and for nothing else that they do, so these waits close no cycle. The pieces go over gloo, in the
host's memory, also from a GPU: two groups of NCCL on one device must have their kernels in one order. A rank
without a piece of a round visits a chunk of padding, and takes part all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from infinity.core.errors import ParameterError
from infinity.core.sizes import ALIGNMENT, Tier, ceil_to
from infinity.hardware import cpu_adam, muon
from infinity.hardware.ranks import Comm
from infinity.params.param import plain_name
from infinity.planning.matrices import ITEMSIZE, lease_nbytes, pieces_of, room_of
from infinity.planning.partition import Chunk, ParamSpec, Segment
from infinity.storage.pinned import Lease

from .chunk_io import ChunkIO, Tiers


class Visit(NamedTuple):
    """Which of the two visits this one is: one of them, or both."""

    is_first: bool
    is_last: bool


class Matrix(NamedTuple):
    """A matrix of a round: its owner, its index among the parameters of its unit, and its options."""

    owner: int
    param: int
    options: muon.Muon


class Round(NamedTuple):
    """The matrices of a unit that are updated at the same time, in the order of their owners."""

    unit: int
    matrices: tuple[Matrix, ...]


def visits_of(tiers: Tiers, chunks: Sequence[Chunk]) -> tuple[Visit, ...]:
    """Return the visits of the `chunks` of a round: all of the first come before the second."""
    alone = tiers.units[chunks[0].unit].layout.whole
    if alone and len(chunks) == 1 and tiers.plans[chunks[0].id].state_tier is Tier.NVME:
        return (Visit(True, True),)
    return Visit(True, False), Visit(False, True)


class Matrices:
    """The rounds of one update after the other. One thread, the worker, uses all but `expect`. `comm`: the
    ranks that have pieces, over a connection for this alone ([Note: whole at its owner])."""

    def __init__(self, tiers: Tiers, comm: Comm) -> None:
        self._tiers, self._comm = tiers, comm
        self._room = room_of([unit.layout for unit in tiers.units])  # elements, of the lease
        self._lease: Lease | None = None  # with room for a matrix and for pieces, until `close`
        self._buffer: torch.Tensor | None = None  # of the matrix at work, on the device; on a CPU the lease
        self._at: Round | None = None  # at work
        self._collected: dict[int, int] = {}  # elements of the chunks that were visited, by chunk: once
        self._applied: dict[int, int] = {}  # and again
        self._on_host: list[slice] = []  # pieces of the matrix that the CPU updates, in order; of one rank
        self._is_gathered = self._is_made = self._is_orthogonal = False
        self._expected = self._made = 0

    def begin(self) -> None:
        """An update begins."""
        self._expected = self._made = 0

    def expect(self, count: int) -> None:
        """The update has `count` matrices more."""
        self._expected += count

    def check(self) -> None:
        """Raise `ParameterError` unless the ranks together have orthogonalized each matrix of the update,
        once. Collective, if there are any."""
        if self._at is not None or (self._made and not self._expected):
            raise _lost(f"{self._expected} matrices, each orthogonalized once", f"{self._made}")
        if not self._expected:
            return
        told = self._comm.exchange("the end of an update of matrices", str(self._made).encode())
        if (made := sum(map(int, told))) != self._expected:
            raise _lost(f"{self._expected} matrices, each orthogonalized once", f"{made}")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, whose updates wait for this one, that it has failed."""
        self._comm.post(error)

    def close(self) -> None:
        """Give the lease back."""
        self._buffer = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def collect(
        self,
        io: ChunkIO,
        round_: Round,
        grad: torch.Tensor,
        options: muon.Muon,
        *,
        scale: float,
        step: int,
    ) -> None:
        """Make the first visit of a chunk. `grad`: where the chunk is updated; `scale` multiplies it."""
        [segment] = io.chunk.segments
        spec = self._spec(io.chunk, segment.param)
        self._begin(round_)
        here, there = self._places(io.chunk, segment)
        device, crosses = self._tiers.device, io.on_device and self._comm.world > 1
        piece = self._pieces(segment.param, on_device=io.on_device and not crosses)[there]
        out = torch.empty_like(piece, device=device.torch_device) if crosses else piece
        [moment] = io.moments
        rounds = moment.dtype is not torch.float32
        key = cpu_adam.rounding_key(plain_name(spec.name), step) if rounds else 0

        def work() -> None:
            parts = moment[here], grad[here], out
            muon.add_to_momentum(*parts, options, grad_scale=scale, first=segment.offset, key=key)

        if io.on_device:
            device.compute(work)
        else:
            work()
            first = self._on_host.pop().start if self._meets(there) else there.start
            self._on_host.append(slice(first, there.stop))
        if crosses and (done := device.d2h(piece, out, device.mark(), chunk=io.chunk.id)) is not None:
            done.wait()
        self._collected[io.chunk.id] = segment.numel

    def work(self, round_: Round) -> None:
        """Orthogonalize the matrices of a round, before its first second visit.
        What needs memory changes nothing, and an update that stops there goes on there."""
        if self._at is None and not self._has_pieces(round_):
            self._begin(round_)
        self._check_at(round_)
        if self._is_orthogonal:
            return
        if (found := sum(self._collected.values())) != (wanted := sum(map(self._numel, round_.matrices))):
            raise _lost(f"{wanted} elements of {self._names(round_)}", f"{found}")
        if not self._is_gathered and self._comm.world > 1:
            self._comm.exchange(f"the update of {self._names(round_)}")
            self._exchange(round_, back=False)
        self._is_gathered = True
        mine = self._mine(round_)
        if not self._is_made and mine is not None:
            self._work_on(mine)
            self._made += 1
        self._is_made = True
        if self._comm.world > 1:
            self._exchange(round_, back=True)
        self._is_orthogonal = True

    def take(self, io: ChunkIO) -> torch.Tensor | None:
        """Return a chunk's piece of the result, after `work`, where the chunk is updated; None: it
        has none."""
        for segment in io.chunk.segments:
            _, there = self._places(io.chunk, segment)
            crosses = io.on_device and self._comm.world > 1
            piece = self._pieces(segment.param, on_device=io.on_device and not crosses)[there]
            if not crosses:
                return piece
            device = self._tiers.device
            taken = torch.empty_like(piece, device=device.torch_device)
            device.wait_on_device(device.h2d(taken, piece, device.mark(), chunk=io.chunk.id))
            return taken
        return None

    def apply(
        self,
        io: ChunkIO,
        master: torch.Tensor,
        piece: torch.Tensor | None,
        options: muon.Muon,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Make the second visit of a chunk: update its piece of `master` by what `take` returned."""
        assert self._at is not None
        if piece is not None:
            [segment] = io.chunk.segments
            here, _ = self._places(io.chunk, segment)
            shape = self._spec(io.chunk, segment.param).shape
            muon.step_along(master[here], piece, options, shape, lr=lr, weight_decay=weight_decay)
            self._applied[io.chunk.id] = segment.numel
        if sum(self._applied.values()) == sum(map(self._numel, self._at.matrices)):
            self._at = None
            if self._tiers.device.staged:
                self._buffer = None

    def _spec(self, chunk: Chunk, param: int) -> ParamSpec:
        return self._tiers.units[chunk.unit].params[param].spec

    def _names(self, round_: Round) -> str:
        params = self._tiers.units[round_.unit].params
        return ", ".join(repr(params[matrix.param].spec.name) for matrix in round_.matrices)

    def _has_pieces(self, round_: Round) -> bool:
        layout = self._tiers.units[round_.unit].layout
        return any(pieces_of(layout, matrix.param)[self._comm.rank] for matrix in round_.matrices)

    def _numel(self, matrix: Matrix) -> int:
        """Return the elements of a matrix of the round at work that this rank has."""
        return self._sizes(matrix.param)[self._comm.rank]

    def _sizes(self, param: int) -> list[int]:
        """Return the elements of a matrix of the round at work that each rank has."""
        assert self._at is not None
        return pieces_of(self._tiers.units[self._at.unit].layout, param)

    def _begin(self, round_: Round) -> None:
        if self._at is None:
            self._at, self._on_host = round_, []
            self._collected, self._applied = {}, {}
            self._is_gathered = self._is_made = self._is_orthogonal = False
        self._check_at(round_)

    def _check_at(self, round_: Round) -> None:
        if self._at != round_:
            at = "none" if self._at is None else self._names(self._at)
            raise _lost(f"{self._names(round_)}, of which all pieces come together", f"pieces of {at}")

    def _places(self, chunk: Chunk, segment: Segment) -> tuple[slice, slice]:
        """Return the place of a piece in its chunk, and in what this rank has of the matrix."""
        begin = segment.offset - sum(self._sizes(segment.param)[: self._comm.rank])
        return slice(segment.start, segment.start + segment.numel), slice(begin, begin + segment.numel)

    def _meets(self, piece: slice) -> bool:
        return bool(self._on_host) and self._on_host[-1].stop == piece.start

    def _work_on(self, matrix: Matrix) -> None:
        """Orthogonalize a matrix of which all pieces are here."""
        assert self._at is not None
        spec, options = self._tiers.units[self._at.unit].params[matrix.param].spec, matrix.options
        device, flat = self._tiers.device, self._memory(spec.numel, on_device=True)
        everything = [slice(0, spec.numel)] if self._comm.world > 1 else self._on_host
        crossing = everything if device.staged else []
        for piece in crossing:
            source = self._memory(spec.numel, on_device=False)
            device.wait_on_device(device.h2d(flat[piece], source[piece], device.mark()))

        def work() -> None:
            whole = flat.view(spec.shape)
            whole.copy_(muon.orthogonalize(whole, options))

        device.compute(work)
        done = device.mark()
        for piece in crossing:
            done = device.d2h(self._memory(spec.numel, on_device=False)[piece], flat[piece], done)
        if crossing and done is not None:
            done.wait()

    def _exchange(self, round_: Round, *, back: bool) -> None:
        """Send all pieces to the owners of their matrices, or, `back`, from there."""
        of_owners = [0] * self._comm.world
        for matrix in round_.matrices:
            of_owners[matrix.owner] = self._numel(matrix)
        mine = self._mine(round_)
        of_ranks = [0] * self._comm.world if mine is None else self._sizes(mine.param)
        pieces, whole = self._all_pieces(sum(of_owners)), self._memory(sum(of_ranks), on_device=False)
        if back:
            self._comm.all_to_all(pieces, whole, of_owners, of_ranks)
        else:
            self._comm.all_to_all(whole, pieces, of_ranks, of_owners)

    def _mine(self, round_: Round) -> Matrix | None:
        return next((matrix for matrix in round_.matrices if matrix.owner == self._comm.rank), None)

    def _pieces(self, param: int, *, on_device: bool) -> torch.Tensor:
        """Return the memory of what this rank has of a matrix: on the device, or for the CPU."""
        assert self._at is not None
        numel = self._sizes(param)[self._comm.rank]
        if self._comm.world == 1:
            return self._memory(numel, on_device=on_device)
        before = itertools.takewhile(lambda matrix: matrix.param != param, self._at.matrices)
        begin = sum(map(self._numel, before))
        return self._all_pieces(sum(map(self._numel, self._at.matrices)))[begin : begin + numel]

    def _all_pieces(self, numel: int) -> torch.Tensor:
        """Return memory for the pieces that this rank has of the matrices of a round, by owner."""
        begin = ceil_to(ITEMSIZE * self._room[0], ALIGNMENT)
        return self._leased().tensor(torch.bfloat16, begin, numel)

    def _memory(self, numel: int, *, on_device: bool) -> torch.Tensor:
        """Return the memory of a whole matrix of `numel` elements: on the device, or for the CPU."""
        device = self._tiers.device
        if on_device and device.staged:
            if self._buffer is None or self._buffer.numel() != numel:
                self._buffer = torch.empty(numel, dtype=torch.bfloat16, device=device.torch_device)
            return self._buffer
        return self._leased().tensor(torch.bfloat16, 0, numel)

    def _leased(self) -> Lease:
        if self._lease is None:
            self._lease = self._tiers.pool.lease("matrix", lease_nbytes(*self._room))
        return self._lease


def _lost(expected: str, found: str) -> ParameterError:
    return ParameterError(
        "the update of a matrix is not complete",
        expected=expected,
        found=found,
        cure="build the model again and load the last checkpoint (`infinity.load`), and report this: it is "
        "an error of the engine",
    )
