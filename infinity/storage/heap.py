"""Pinned host memory for pieces of any size: one mapping, lent first fit.

The pool lends equal buffers, which suit chunks. Only the first forward shows the sizes of activations, and
they are returned in the reverse order of their allocation: there first fit leaves no holes.
"""

from __future__ import annotations

import bisect

import torch

from infinity.core.errors import ClosedError
from infinity.core.locks import lock
from infinity.core.sizes import ALIGNMENT, ceil_to

from .memory import HostMapping, Pins


class HeapLease:
    """A piece of a heap, on loan: `nbytes` from `offset` on, a multiple of 4096."""

    __slots__ = ("_heap", "_mapping", "nbytes", "offset")

    def __init__(self, heap: PinnedHeap, mapping: HostMapping, offset: int, nbytes: int) -> None:
        self._heap = heap
        self._mapping: HostMapping | None = mapping
        self.offset = offset
        self.nbytes = nbytes

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it as a 1-d tensor of `dtype`, without copying.

        Raises:
            ClosedError: the lease was released.
        """
        if self._mapping is None:
            raise ClosedError("this lease was released", cure="hold it while you use it")
        return self._mapping.tensor(self.offset, self.nbytes, dtype)

    def release(self) -> None:
        """Give it back; nothing may still read or write it. A second call does nothing."""
        if self._mapping is not None:
            self._mapping = None
            self._heap._take_back(self.offset, self.offset + ceil_to(self.nbytes, ALIGNMENT))


class PinnedHeap:
    """`nbytes` of host memory, lent in pieces of any size, each from the first hole that holds it.

    Args:
        nbytes: rounded down to a multiple of 4096.
        pins, node: as in `HostMemory`.

    Raises:
        BudgetError: the system has not so much memory.
    """

    def __init__(self, nbytes: int, *, pins: Pins | None = None, node: int | None = None) -> None:
        self.nbytes = nbytes // ALIGNMENT * ALIGNMENT
        self.in_use = self.peak = 0  # bytes lent, each piece to the next multiple of 4096
        self._lock = lock("heap")
        self._holes: list[tuple[int, int]] = []  # (begin, end), in order, never adjacent
        self._mapping: HostMapping | None = None
        if self.nbytes:
            self._mapping = HostMapping(self.nbytes, pins=pins, node=node if pins is not None else None)
            self._holes.append((0, self.nbytes))

    def take(self, nbytes: int) -> HeapLease | None:
        """Return a lease of `nbytes` (> 0); None if no hole is so large."""
        size = ceil_to(nbytes, ALIGNMENT)
        with self._lock:
            mapping = self._mapping
            for index, (begin, end) in enumerate(self._holes):
                if mapping is not None and end - begin >= size:
                    if end - begin == size:
                        del self._holes[index]
                    else:
                        self._holes[index] = (begin + size, end)
                    self.in_use += size
                    self.peak = max(self.peak, self.in_use)
                    return HeapLease(self, mapping, begin, nbytes)
        return None

    def _take_back(self, begin: int, end: int) -> None:
        with self._lock:
            self.in_use -= end - begin
            index = bisect.bisect_left(self._holes, (begin, end))
            if index < len(self._holes) and self._holes[index][0] == end:
                end = self._holes.pop(index)[1]
            if index and self._holes[index - 1][1] == begin:
                self._holes[index - 1] = (self._holes[index - 1][0], end)
            else:
                self._holes.insert(index, (begin, end))

    def close(self) -> None:
        """Lend nothing more, unpin, and let go of the memory; tensors that are held keep it."""
        with self._lock:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.unpin()
