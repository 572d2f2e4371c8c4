"""Ranks: who they are, and what they tell each other. The only file that names `torch.distributed`.

[Note: agreement] A data collective cannot see that ranks differ: of other sizes it aborts the process or
gives garbage, of another unit it is silent. So each is preceded by an `exchange`, in which all say what they
are about to do, on a group of its own. Nobody ever waits in C++, where no other rank's error, no signal and
no deadline would be heard: all are asked whether they are done ([Note: who is gone]).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from infinity.core.errors import ConfigError, DivergenceError, RankError

from .watch import Watch, address_of_first

_BLOCK: Final = 1024  # bytes that every rank says in an exchange at once
_HEAD: Final = struct.Struct("<III")  # of a block: bytes and CRC-32 of what it does, bytes of its value
_WORDS: Final = 512  # bytes of the first
_PAUSES: Final = 20e-6, 0.05  # seconds between two looks: the first, and at most
_NEWS: Final = 5.0  # seconds until who failed first is known


class Comm:
    """The ranks that train one model, as one of them sees them. Collectives are called by one thread at a
    time, on all ranks in the same order.

    Attributes:
        rank, world: this one's number, and how many there are.
        local_rank, local_world: the same of this machine.
        sent: bytes that this rank has sent in gathers and reductions, on average over ranks.

    Raises, every collective:
        DivergenceError: ranks do not do the same.
        RankError: another rank failed, is gone, or has not come in time.
    """

    rank = 0
    world = 1
    local_rank = 0
    local_world = 1
    sent = 0

    def exchange(self, what: str, value: bytes = b"") -> list[bytes]:
        """Return every rank's `value`, by rank. `what` says what they are about to do: the same on all."""
        return [value]

    def gather(self, run: torch.Tensor) -> None:
        """Have all slices of `run` (flat; as many equal slices as ranks; this rank's is there), in place."""

    def reduce(self, run: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the mean over ranks of `run` (flat, floating point; as many equal
        slices as ranks): fp32, (numel / world,). See [Note: one order of sums]."""
        return run.float()

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        """Have the values of rank `source`, in place (contiguous, of any dtype, anywhere)."""

    def post(self, error: BaseException) -> None:
        """This rank has failed: tell the others."""

    def check(self) -> None:
        """Raise `RankError` if another rank has failed."""

    def close(self) -> None:
        """Say farewell. A second call does nothing."""


class Alone(Comm):
    """The only rank: nothing is ever sent."""


class Ranks(Comm):
    """Several ranks. `timeout`: seconds that one waits for the others."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> None:
        self._timeout = timeout
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.world = self._members.index(dist.get_rank()), len(self._members)
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._watch: Watch | None = None
        self._closed = False
        self._control = self._group("gloo")
        self._data = self._group("nccl") if device.type == "cuda" else self._control
        self._meet()
        _OPEN.add(self)
        _listen_for_exceptions()

    def _group(self, backend: str) -> Any:
        limit = timedelta(seconds=min(self._timeout, 1e6) + 60)  # ours is first, and knows more
        return dist.new_group(self._members, backend=backend, timeout=limit)

    def _meet(self) -> None:
        hosts = self.exchange("wrap", os.uname().nodename.encode())
        local = len(set(hosts)) == 1
        self.local_world = (
            hosts.count(hosts[self.rank]) if "LOCAL_WORLD_SIZE" not in os.environ else self.local_world
        )
        watch = Watch(self.rank)
        server, told = (None, {}) if self.rank else watch.listen(address_of_first(local), self.world)
        told = json.loads(self.exchange("the address of the first rank", json.dumps(told).encode())[0])
        if server is not None:
            watch.accept(server, told, self.world)
        else:
            watch.join(told)
        self._watch = watch

    # -- collectives ------------------------------------------------------------------------

    def exchange(self, what: str, value: bytes = b"") -> list[bytes]:
        """See `Comm`. A value of more than half a KiB takes a second collective."""
        words, room = what.encode(), _BLOCK - _HEAD.size - _WORDS
        block = _HEAD.pack(min(len(words), _WORDS), zlib.crc32(words), len(value))
        block += words[:_WORDS].ljust(_WORDS, b"\0") + value[:room].ljust(room, b"\0")
        blocks = self._all(bytearray(block), what)
        heads = [_HEAD.unpack_from(b) for b in blocks]
        if len({crc for _, crc, _ in heads}) > 1:
            said = [
                b[_HEAD.size : _HEAD.size + n].decode(errors="replace")
                for b, (n, _, _) in zip(blocks, heads, strict=True)
            ]
            error = DivergenceError(
                "the ranks do not do the same",
                expected="the same program on every rank: the same layers, backwards and calls, in one order",
                found="; ".join(f"rank {r}: {words}" for r, words in enumerate(said)),
                cure="do on all ranks what one does; draw what is random (dropped layers, early exits) "
                "from a generator that is seeded alike",
            )
            self.post(error)
            raise error
        most = max(n for _, _, n in heads)
        if most > room:
            blocks = self._all(bytearray(value.ljust(most, b"\0")), what)
        begin = 0 if most > room else _BLOCK - room
        return [b[begin : begin + n] for b, (_, _, n) in zip(blocks, heads, strict=True)]

    def _all(self, mine: bytearray, what: str) -> list[bytes]:
        together = torch.empty(self.world, len(mine), dtype=torch.uint8)
        tensor = torch.frombuffer(mine, dtype=torch.uint8)
        self._do(what, lambda: [dist.all_gather(list(together), tensor, self._control, async_op=True)])
        return [row.numpy().tobytes() for row in together]

    def gather(self, run: torch.Tensor) -> None:
        """See `Comm`. gloo's own all-gather would take its output once more; each rank's slice is broadcast
        in its place, all at the same time."""
        self.sent += run.nbytes // self.world * (self.world - 1)
        slices = run.view(torch.uint8).chunk(self.world)
        if self._data is self._control:
            self._do(
                "a gather",
                lambda: [
                    dist.broadcast(piece, self._members[r], self._control, async_op=True)
                    for r, piece in enumerate(slices)
                ],
            )
        else:
            mine = slices[self.rank]
            whole = run.view(torch.uint8)
            self._do(
                "a gather", lambda: [dist.all_gather_into_tensor(whole, mine, self._data, async_op=True)]
            )

    def reduce(self, run: torch.Tensor) -> torch.Tensor:
        """See `Comm`. NCCL adds in its own order, in the dtype of `run`."""
        self.sent += run.nbytes // self.world * (self.world - 1)
        if self._data is not self._control:
            mine = run.new_empty(run.numel() // self.world)
            mean = dist.ReduceOp.AVG
            self._do(
                "a reduction",
                lambda: [dist.reduce_scatter_tensor(mine, run, mean, self._data, async_op=True)],
            )
            return mine.float()
        slices = torch.empty_like(run)
        sent, received = run.view(torch.uint8), slices.view(torch.uint8)
        self._do(
            "a reduction",
            lambda: [dist.all_to_all_single(received, sent, group=self._control, async_op=True)],
        )
        total = torch.zeros(run.numel() // self.world, dtype=torch.float32, device=run.device)
        for piece in slices.chunk(self.world):
            total.add_(piece)  # in fp32
        return total.div_(self.world)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        """See `Comm`."""
        group = self._control if flat.device.type == "cpu" else self._data
        whole = flat.view(torch.uint8)
        if whole.numel():
            self._do(
                "a broadcast",
                lambda: [dist.broadcast(whole, self._members[source], group, async_op=True)],
            )

    def _do(self, what: str, begin: Callable[[], Sequence[Any]]) -> None:
        """Begin works, and wait for all."""
        self.check()
        try:
            works = begin()
            for work in works:
                self._wait(work, what)
        except RankError:
            raise
        except RuntimeError as error:  # torch's words for a connection that is closed
            self._lost(what, error)

    def _wait(self, work: Any, what: str) -> None:
        pause, most = _PAUSES
        late = time.monotonic() + self._timeout
        while not work.is_completed():
            self.check()
            if time.monotonic() > late:
                error = RankError(
                    "another rank has not come in time",
                    expected=f"all ranks at {what} within rank_timeout, {self._timeout:g} s",
                    found=f"rank {self.rank} there, and not all others",
                    cure="see what the others do (one is stopped, or has more data); or raise rank_timeout",
                )
                self.post(error)
                raise error
            time.sleep(pause)
            pause = min(pause * 1.5, most)
        work.wait()

    def _lost(self, what: str, error: RuntimeError) -> None:
        """A connection is closed: raise what closed it first."""
        end = time.monotonic() + _NEWS
        while time.monotonic() < end:
            self.check()
            time.sleep(0.01)
        raise RankError(
            "the connection to another rank is closed",
            expected=f"all ranks at {what}",
            found=str(error).splitlines()[0],
            cure="see why the others have ended, and start all ranks again",
        ) from error

    # -- who failed -------------------------------------------------------------------------

    def post(self, error: BaseException) -> None:
        """See `Comm`. The first to fail is whom all hear of."""
        if self._watch is not None:
            self._watch.post("failed", f"{type(error).__name__}: {error}")

    def check(self) -> None:
        """See `Comm`."""
        if self._closed:
            raise RankError(
                "this rank has said farewell",
                expected="an open engine",
                found="a collective after close()",
                cure="wrap the model again, on all ranks",
            )
        if self._watch is not None:
            self._watch.check()

    def close(self) -> None:
        """See `Comm`."""
        if self._closed:
            return
        failed = self._watch is None or self._watch.failed
        self._closed = True
        _OPEN.discard(self)
        if self._watch is not None:
            self._watch.close()
        for group in {id(g): g for g in (self._control, self._data)}.values():
            with contextlib.suppress(Exception):  # nobody is asked any more
                if failed:
                    group.abort()
                else:
                    dist.destroy_process_group(group)


def connect(mesh: Any = None, *, device: torch.device, timeout: float = 1800.0) -> Comm:
    """Return the ranks of `mesh` (a `DeviceMesh` of one dimension), else those of the default process group,
    else, where ``WORLD_SIZE`` says that there are several (torchrun), of one that is made for it; else
    nobody.

    Raises:
        ConfigError: a mesh of several dimensions.
        RankError: the ranks do not find each other.
    """
    if mesh is not None and mesh.ndim != 1:
        raise ConfigError(
            "a mesh of several dimensions is not available yet",
            expected="a DeviceMesh of one dimension",
            found=f"one of shape {tuple(mesh.shape)}",
            cure='mesh["name of one dimension"]',
        )
    if not dist.is_available():
        return Alone()
    if mesh is None and not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return Alone()
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    group = mesh.get_group() if mesh is not None else None
    return Ranks(group, device, timeout) if dist.get_world_size(group) > 1 else Alone()


#: Ranks that are to be told of an exception that ends this process.
_OPEN: weakref.WeakSet[Ranks] = weakref.WeakSet()
_hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None = None


def _listen_for_exceptions() -> None:
    global _hook
    if _hook is None:
        _hook = sys.excepthook
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for comm in tuple(_OPEN):
        comm.post(error)
    if _hook is not None:
        _hook(kind, error, trace)
