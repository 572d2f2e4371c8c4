"""2-norms of gradients, from the sums of their squares.

[Note: norms] A shard is cut into fixed blocks of 65,536 elements. The elements of one parameter in a block
are a piece. The engine sums the squares of a piece in double as a halving tree, once for each gradient. The
CPU sums them while it processes the gradient; a device sums all of its pieces in one pass, at the first
request for a norm. A norm adds factor² times the sums of its parameters' pieces, one after the other in the
order of the chunks. So neither clipping nor one parameter's norm reads a gradient again, and a norm does not
depend on the tier, the size of a chunk or the instruction set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from infinity.hardware.ranks import Comm
from infinity.params.unit import ParamUnit

from .gradient_chunks import ChunkGradient
from .sharded_grad import ShardedGrad


class Norms:
    """Answers norms. What it answers is of gradients that are complete on their tier."""

    def __init__(self, units: Sequence[ParamUnit], entries: Mapping[int, ChunkGradient], comm: Comm) -> None:
        self._comm = comm
        self._entries = entries
        self._firsts: list[int] = []  # of each unit, the number of its first parameter
        self._count = 0
        self._chunks: list[int] = []
        owners: list[int] = []  # of each piece, the number of its parameter
        for unit in units:
            self._firsts.append(self._count)
            for _, chunk in unit.layout.chunks_of(comm.rank):  # with the whole, of this rank's slices alone
                owners += [self._count + param for param, _, _ in chunk.norm_pieces]
                self._chunks.append(chunk.id)
            self._count += len(unit.params)
        self._owners = np.array(owners, dtype=np.int64)

    def together(self, grads: Iterable[ShardedGrad]) -> float:
        """Return the norm of several gradients, with their factors."""
        factors, wanted = np.zeros(self._count), np.zeros(self._count, dtype=bool)
        for grad in grads:
            factors[self._number(grad)], wanted[self._number(grad)] = grad.factor, True
        with np.errstate(all="ignore"):  # what is Inf or NaN shows in the answer
            terms = np.square(factors)[self._owners] * self._squares()
        terms = terms[wanted[self._owners]]
        # cumsum adds one after the other; sum() and np.sum would group in their own ways.
        mine = float(np.cumsum(terms)[-1]) if len(terms) else 0.0
        with np.errstate(all="ignore"):
            return float(np.sqrt(self._add_up("the norm of the gradients", np.array([mine]))[0]))

    def each(self, grads: Sequence[ShardedGrad]) -> list[float]:
        """Return the norm of each gradient, with its factor."""
        with np.errstate(all="ignore"):
            mine = np.bincount(self._owners, self._squares(), minlength=self._count)
            sums = self._add_up("the norms of gradients", mine.astype(np.float64))
        return [math.sqrt(sums[self._number(grad)]) * abs(grad.factor) for grad in grads]

    def _add_up(self, what: str, mine: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sums over all ranks, added in their order. Collective."""
        sums = np.zeros_like(mine)
        for told in self._comm.exchange(what, mine.tobytes()):
            sums = sums + np.frombuffer(told)
        return sums

    def _number(self, grad: ShardedGrad) -> int:
        return self._firsts[grad.sharded.unit] + grad.sharded.index

    def _squares(self) -> npt.NDArray[np.float64]:
        return np.concatenate([np.empty(0), *(self._entries[c].squares for c in self._chunks)])
