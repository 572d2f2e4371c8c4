"""The CPU as the device: pages that units use one after the other, and host streams that copy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.core.sizes import MiB
from infinity.core.spans import Moment, Recorder, now

from . import cpu_adam
from .pages import PagedMemory, Pages
from .streams import Event, HostStream

_libc = ctypes.CDLL(None)


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3), glibc 2.33 and later; `fordblks`: bytes in free blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo = getattr(_libc, "mallinfo2", None)
if _mallinfo is not None:
    _mallinfo.restype = _MallocInfo


class Spare:
    """Flat memory that is allocated and dropped constantly. The kernel fills fresh pages with zeros, so this
    class reuses memory without references; it keeps at most `most` bytes for that."""

    def __init__(self) -> None:
        self.most = 0
        self._kept: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` without other references: uint8, of any content."""
        free = sorted((t for t in self._kept if _owners(t) == 1), key=torch.Tensor.numel)
        for each in free:
            if each.numel() >= nbytes:
                return each[:nbytes]
        kept = {id(t): t for t in self._kept}
        for each in free:  # the smallest first
            if nbytes + sum(t.numel() for t in kept.values()) > self.most:
                del kept[id(each)]
        self._kept = list(kept.values())
        del free
        made = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes + sum(map(torch.Tensor.numel, self._kept)) <= self.most:
            self._kept.append(made)
        return made.view(-1)

    def give_back(self) -> None:
        """Keep nothing of what is there."""
        self._kept.clear()


def _owners(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()  # one more owner
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


class HostDevice:
    """The CPU as the device."""

    #: Whether the device has memory of its own: what crosses goes through pinned leases, and what is placed
    #: there the device computes, not the CPU's kernels.
    staged = False

    def __init__(self, torch_device: torch.device, recorder: Recorder | None = None) -> None:
        self.torch_device = torch_device
        self._trim_above = 2 * MiB  # what the C heap may keep for reuse
        self._trim_after = 0  # when to look at it next
        self.pages = Pages()
        self._spare = Spare()
        self._recorder = recorder or Recorder()
        self._h2d = HostStream("h2d")
        self._d2h = HostStream("d2h")

    def h2d(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, chunk: int = -1) -> Event:
        """Start copying `source` to `target` (same dtype and numel, contiguous), after `after`; `chunk`:
        for traces."""
        return self._h2d.submit(_copier(target, source, after, "h2d", self._recorder, chunk))

    def start_clock(self) -> Callable[[], Moment] | None:
        """Return what tells the moments of the device's compute; None: the host's clock does."""
        return None

    def memory(self, nbytes: int) -> PagedMemory:
        """Return the storage of a unit, empty."""
        return PagedMemory(nbytes, self.pages)

    def reuse(self, nbytes: int, flat: int = 0, heap: int = 0) -> None:
        """Keep pages of units that go for those that come: `nbytes` of filled units and kept pages together.
        See [Note: pages that move]. And `flat` bytes of what `empty` returns, and `heap` free bytes of the C
        heap."""
        self._trim_above = max(self._trim_above, heap)
        self.pages.most = nbytes
        self.pages.trim()
        self._spare.most = flat
        self._spare.give_back()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the device's memory for a while: uint8, of any content."""
        return self._spare.take(nbytes)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the device's memory, for good: uint8 zeros."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def compute(self, call: Callable[[], None]) -> None:
        """Do `call`, operations on tensors of the device alone, in the order of this thread's compute."""
        call()

    def mark(self) -> Event | None:
        """Return an event of all device work so far; None: the host itself has done it."""
        return None

    def current(self) -> object:
        """Return what the caller's compute goes to: the host, for all."""
        return None

    def carry(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what has another thread's compute go where the caller's goes."""
        return contextlib.nullcontext

    def worker(self) -> AbstractContextManager[Any]:
        """Return what a worker's thread computes in: nothing of its own."""
        return contextlib.nullcontext()

    def aside(self) -> AbstractContextManager[Any]:
        """Return what has compute go beside the caller's: on a CPU it does so on another thread."""
        return contextlib.nullcontext()

    def uses(self, tensor: torch.Tensor) -> None:
        """Nothing to do: all compute is in one order."""

    def wait_on_device(self, event: Event | None) -> None:
        """Make the device's compute wait for `event` (here the host is the device)."""
        if event is not None:
            event.wait()

    def d2h(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, chunk: int = -1) -> Event:
        """Start copying `source` to `target` (same dtype and numel, contiguous), after `after`."""
        return self._d2h.submit(_copier(target, source, after, "d2h", self._recorder, chunk))

    def trim(self) -> None:
        """Give back what the C heap holds in free blocks, if that is more than it may keep
        (malloc_trim(3)): gradients and activations come and go in blocks that leave it in pieces. Both calls
        walk all free blocks, so they are made for a twentieth of the time at most."""
        begin = now()
        if _mallinfo is None or begin < self._trim_after:
            return
        if _mallinfo().fordblks > self._trim_above:
            _libc.malloc_trim(0)
        self._trim_after = begin + 20 * (now() - begin)

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory for the device (nothing to do)."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""

    def synchronize(self) -> None:
        """Block until all copies are done."""
        self._h2d.synchronize()
        self._d2h.synchronize()

    def memory_free(self) -> int:
        """Return the bytes that could be allocated on the device."""
        from .probe import available_host_memory

        return available_host_memory()

    def close(self) -> None:
        """Finish all copies, end the streams, and keep no pages."""
        self._h2d.close()
        self._d2h.close()
        self.reuse(0)
        self._trim_after = 0
        self.trim()


def _copier(
    target: torch.Tensor,
    source: torch.Tensor,
    after: Sequence[Event | None],
    kind: str,
    recorder: Recorder,
    chunk: int,
) -> Callable[[], None]:
    # The closure keeps both alive. Not torch's copy_: it would bump versions and hold the GIL.
    def copy() -> None:
        for event in after:
            if event is not None:
                event.wait()
        begin = now()
        cpu_adam.copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes)
        if (log := recorder.log) is not None:
            log.add(kind, begin, now(), chunk=chunk, nbytes=source.nbytes)

    return copy
