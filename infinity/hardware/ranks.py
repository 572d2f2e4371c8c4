"""The ranks that train one model: their collectives, and what a single rank does instead.

One thread of a rank at a time calls a collective, on all ranks, in the order of the program.

[Note: behind compute] A collective that was begun runs on a thread of its own while the program computes. The
next collective waits for it first. So their order is still the order of the program, on every rank.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from infinity.core.errors import ClosedError, InfinityError, OutOfMemoryError, RankError, StorageError

from .streams import Task

#: How many times its timeout a rank is waited for in `wrap`, until the first step, and in saves and loads.
PATIENCE: Final = 3.0
_SUMMED: Final = 1 << 16  # elements that `mean` converts at once


class Comm:
    """The ranks that train one model. `rank` is this one's number, of `world`; `local_rank` its number among
    the `local_world` ranks of its node. `sent`: bytes that this rank has sent in gathers and reductions, on
    average over ranks. `patience`: how many times the timeout a wait may take now.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    sent = 0
    tells = False  # whether `told` is under way
    patience = 1.0

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """A block in which a rank may take long by itself: waits in it have more patience."""
        before, self.patience = self.patience, PATIENCE
        try:
            yield
        finally:
            self.patience = before

    def be_punctual(self) -> None:
        """End the patience of the beginning: all ranks have begun."""
        self.patience = 1.0

    def exchange(self, what: str, value: bytes = b"") -> list[bytes]:
        """Return every rank's `value`, by rank. Collective.

        `what` says in words what this rank is about to do.

        Raises:
            DivergenceError: on all ranks, if `what` is not the same on all.
            RankError: another rank failed, is gone or too late. So of every collective below.
            ClosedError: `close` was called.
        """
        raise NotImplementedError

    def gather(self, run: torch.Tensor) -> None:
        """All-gather in place. `run`: flat, contiguous, `world` equal slices, of any dtype; rank r's is there
        before, all are after. Collective.

        After an error `run` is undefined, and may be written to for as long as the process lives.
        """
        raise NotImplementedError

    def reduce(self, run: torch.Tensor, *, narrow: bool = False) -> torch.Tensor:
        """Return the mean over ranks of their slice `rank` of `run`: flat, in fp32, or, `narrow`, rounded
        once to the dtype of `run`. Collective.

        `run`: flat, contiguous, `world` equal slices, floating; undefined afterwards. What has its dtype may
        be returned in its memory. Each value is converted to fp32 and added in the order of the ranks, then
        the sum is divided once: the same bits over gloo and NCCL, whose own mean rounds at each hop.
        """
        raise NotImplementedError

    def all_to_all(
        self, to: torch.Tensor, of: torch.Tensor, to_sizes: Sequence[int], of_sizes: Sequence[int]
    ) -> None:
        """Send a piece of `of` to each rank, of as many elements as `of_sizes` says for it, and receive one
        from each into `to`, by `to_sizes`: flat, contiguous, of one dtype, in the order of ranks. Collective.
        """
        raise NotImplementedError

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        """Copy rank `source`'s `flat` (contiguous, any dtype) to all ranks', in place. Collective."""
        raise NotImplementedError

    def begin(self, call: Callable[[], Any]) -> Task:
        """Queue `call`, which does nothing but wait and make collectives: [Note: behind compute]."""
        raise NotImplementedError

    def finish(self, last: Task | None = None) -> None:
        """Wait for what was begun, up to `last` or all; raise what one of these raised, once. All: also until
        the device has ended what it was given of them."""

    def total(self, value: float) -> float:
        """Return the sum of all ranks' values, added in the order of the ranks. Collective."""
        values = (struct.unpack("<d", v)[0] for v in self.exchange("a sum", struct.pack("<d", value)))
        total = next(values)
        for value in values:
            total += value
        return float(total)

    def post(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. The first error of any rank counts. Never raises."""

    def check(self) -> None:
        """Raise RankError if another rank failed or is gone. No I/O."""

    def close(self) -> None:
        """Say goodbye: a rank that has is not gone. Not collective; never hangs; idempotent."""


@contextlib.contextmanager
def told(comm: Comm) -> Iterator[None]:
    """Make all ranks raise an error that this rank raises, each in its next collective: the error comes from
    the program of this rank, and the others would wait for it. Errors of drives and of memory do not go this
    way: they may come between two collectives."""
    if comm.tells:
        yield
        return
    comm.tells = True
    try:
        yield
    except InfinityError as error:
        if not isinstance(error, (RankError, ClosedError, StorageError, OutOfMemoryError)):
            with contextlib.suppress(RankError, ClosedError):  # that all raise is what it is for
                comm.exchange(f"{type(error).__name__}: {error.what}")
        raise
    finally:
        comm.tells = False


class Alone(Comm):
    """One rank: nothing is sent."""

    rank, world, local_rank, local_world = 0, 1, 0, 1

    def exchange(self, what: str, value: bytes = b"") -> list[bytes]:
        return [value]

    def gather(self, run: torch.Tensor) -> None:
        pass

    def reduce(self, run: torch.Tensor, *, narrow: bool = False) -> torch.Tensor:
        return run if narrow else run.to(torch.float32)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        pass


def mean(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Put the mean of `parts` into `out`, which may be one of them: flat, of any floating dtypes. Each value
    is converted to fp32 and added in order; the sum is divided once, and rounded once."""
    at_once = _SUMMED if out.device.type == "cpu" else max(out.numel(), 1)
    for begin in range(0, out.numel(), at_once):  # torch converts all that it is given before it adds
        first, *rest = (part[begin : begin + at_once] for part in parts)
        total = first.to(torch.float32, copy=True)
        for part in rest:
            total += part.to(torch.float32)
        total /= total.new_full((), len(parts))  # by a number CUDA multiplies with its reciprocal
        out[begin : begin + at_once].copy_(total)
