"""Host memory that the engine owns: one mapping, and the memory of the host tier cut from one.

A mapping is anonymous, of exactly the requested size, created once at start-up, on huge pages if the
system has them, and never copied into a child. The engine populates it at once only if it registers it
with a device; otherwise the system allocates memory at the first touch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import torch

from infinity.core.errors import BudgetError, StorageError
from infinity.core.sizes import ALIGNMENT, MiB, ceil_to, format_size
from infinity.core.system_errors import reason
from infinity.hardware.cores import prefer_node


class Pins(Protocol):
    """A device that host memory is pinned for."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory."""

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""


_MADV_POPULATE_WRITE: Final = 23
_SLICE: Final = 128 * MiB
_MOST_THREADS: Final = 8  # more do not help: they meet at the kernel's lock of the process's memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostMapping:
    """`nbytes` of zeroed memory at `address`, which is a multiple of 4096.

    The memory lasts as long as this object or any tensor of it. `io_address` is where the kernel
    finds the same bytes: `address` itself, unless `twice`. With `node` its pages come from that NUMA
    node, as far as it has any. With `pins` it is populated, and pinned until `unpin`.

    Raises:
        BudgetError: the system has not so much memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        pins: Pins | None = None,
        populate: bool = False,
        twice: bool = False,
        node: int | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.twice = twice
        self._pins: Pins | None = None
        try:
            if twice:
                fd = os.memfd_create("infinity", os.MFD_CLOEXEC)
                try:
                    os.ftruncate(fd, nbytes)
                    self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
                    self._io_map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
                finally:
                    os.close(fd)
            else:
                self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._io_map = self._map
                _advise(self._map, mmap.MADV_HUGEPAGE)
            for mapping in {id(m): m for m in (self._map, self._io_map)}.values():
                _advise(mapping, mmap.MADV_DONTFORK)
            # The mmap object is never closed: tensors hold it, and the last of them unmaps it.
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self.address = self._bytes.data_ptr()
            self.io_address = (
                torch.frombuffer(self._io_map, dtype=torch.uint8).data_ptr() if twice else self.address
            )
            if node is not None:
                prefer_node(self.address, nbytes, node)
            if populate or pins is not None:
                _populate(self._bytes)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EAGAIN):
                raise
            raise BudgetError(
                "the system refused host memory",
                expected=f"{format_size(nbytes)} ({nbytes} bytes)",
                found=reason(error.errno),
                cure=f"free that much memory, or allow this process {-(-nbytes // 1024)} KiB more "
                "(`ulimit -v`, or the memory limit of its cgroup)",
            ) from error
        if pins is not None:
            pins.register(self.address, nbytes)
            self._pins = pins

    def unpin(self) -> None:
        """Undo the pinning, if there is any."""
        pins, self._pins = self._pins, None
        if pins is not None:
            pins.unregister(self.address, self.nbytes)

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return `nbytes` at `offset` as a 1-d tensor of `dtype`, without copying."""
        part = self._bytes[offset : offset + nbytes]
        return part if dtype is torch.uint8 else part.view(dtype)

    def protect(self, offset: int, nbytes: int, protection: int) -> None:
        """Set what the CPU may do with whole pages at `offset` (the kernel's mapping stays)."""
        if _libc.mprotect(self.address + offset, nbytes, protection) != 0:
            number = ctypes.get_errno()
            raise StorageError(f"mprotect failed: {os.strerror(number)}", errno=number)


def _populate(memory: torch.Tensor) -> None:
    """Populate the pages of all of `memory`, uint8. Several threads take one slice each at a time, and the
    caller handles signals meanwhile: one call for 100 GB would block signals in the kernel for a minute or
    more."""
    slices = iter(memory.split(_SLICE))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set() and (part := next(slices, None)) is not None:
            if _libc.madvise(part.data_ptr(), part.nbytes, _MADV_POPULATE_WRITE):
                number = ctypes.get_errno()
                if number != errno.EINVAL:  # a kernel without this advice
                    raise OSError(number, os.strerror(number))
                part.zero_()

    count = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(count, thread_name_prefix="infinity-populate") as pool:
        try:
            for task in [pool.submit(work) for _ in range(count)]:
                task.result()
        finally:
            stop.set()


def _advise(mapping: mmap.mmap, advice: int) -> None:
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without this advice
            raise


class HostMemory:
    """One mapping of `nbytes` for what is placed on the host tier, handed out in fixed extents.

    Args:
        pins: the device that it is pinned for; None: it is not.
        node: the NUMA node that it prefers if it is pinned; what the CPU alone uses comes from where it
            is first touched.

    Raises:
        BudgetError: the system has not so much memory.
    """

    def __init__(self, nbytes: int, *, pins: Pins | None = None, node: int | None = None) -> None:
        self.nbytes = ceil_to(nbytes, ALIGNMENT)
        self.used = 0
        self._mapping: HostMapping | None = None
        if nbytes:
            self._mapping = HostMapping(self.nbytes, pins=pins, node=node if pins is not None else None)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the next `nbytes` as a uint8 tensor of zeros; it begins on a multiple of 4096.

        Raises:
            BudgetError: less than that is left.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None or self.used + nbytes > self.nbytes:
            raise BudgetError(
                "the host tier is full",
                expected=f"{nbytes} bytes",
                found=f"{self.nbytes - self.used} of {self.nbytes} bytes left",
                cure="size it by the layout",
            )
        begin = self.used
        self.used = ceil_to(begin + nbytes, ALIGNMENT)
        return self._mapping.tensor(begin, nbytes)

    def close(self) -> None:
        """Unpin and let go of the memory; tensors that are still held keep it."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.unpin()
