"""The device: its copy streams and events, and what is free on it.

`HostDevice` (device memory is host memory) and `CudaDevice` have one interface. Copies are
asynchronous on both: a CUDA stream there, a *host stream* here (streams.py).
All others import streams and events from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.core.errors import ConfigError, StorageError
from infinity.core.sizes import MiB
from infinity.core.spans import Moment, Recorder, now

from . import cpu_adam
from .clock import DeviceClock, timed
from .streams import POLL, Event, HostStream, Task

__all__ = [
    "POLL",
    "CudaDevice",
    "Device",
    "Event",
    "HostDevice",
    "HostStream",
    "PagedMemory",
    "ResizedMemory",
    "Task",
    "open_device",
]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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


class PagedMemory:
    """The storage of one unit on a CPU device: a mapping whose pages come and go.

    Not torch's allocator: blocks of some megabytes that come and go between small ones leave the
    C heap in pieces, and the process then holds far more than was planned. A mapping gives its
    pages back at once, and without them it is protected, so a stray use is a fault and not a
    zero. The address range stays reserved (it costs nothing), so views stay valid.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        # The mapping is never closed: the storage holds it, and the last of its tensors unmaps it.
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.storage = whole.untyped_storage()
        self._address, self._nbytes = whole.data_ptr(), nbytes
        self._protect(0)

    def fill(self) -> None:
        """Make it usable."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def drop(self) -> None:
        """Give the pages back."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self._protect(0)

    def _protect(self, protection: int) -> None:
        if _libc.mprotect(self._address, self._nbytes, protection):
            number = ctypes.get_errno()
            raise StorageError(f"mprotect failed: {os.strerror(number)}", errno=number)


class ResizedMemory:
    """The storage of one unit on a device with an allocator of its own: resized to 0 and back."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storage = torch.UntypedStorage(0, device=device)
        self._nbytes = nbytes

    def fill(self) -> None:
        """Make it usable."""
        self.storage.resize_(self._nbytes)

    def drop(self) -> None:
        """Give the memory back to torch's allocator."""
        self.storage.resize_(0)


class HostDevice:
    """The CPU as the device."""

    #: Whether what crosses to the device needs pinned leases.
    staged = False

    def __init__(self, torch_device: torch.device, recorder: Recorder | None = None) -> None:
        self.torch_device = torch_device
        self.trim_above = 2 * MiB  # what the C heap may keep for reuse
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
        return PagedMemory(nbytes)

    def mark(self) -> Event | None:
        """Return an event of all device work so far; None: the host itself has done it."""
        return None

    def carry(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what has another thread's compute go where the caller's goes."""
        return contextlib.nullcontext

    def wait_on_device(self, event: Event | None) -> None:
        """Make the device's compute wait for `event` (here the host is the device)."""
        if event is not None:
            event.wait()

    def d2h(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *after: Event | None,
        chunk: int = -1,
        kept: bool = False,
    ) -> Event:
        """Start copying `source` to `target` (same dtype and numel, contiguous), after `after`."""
        return self._d2h.submit(_copier(target, source, after, "d2h", self._recorder, chunk))

    def trim(self) -> None:
        """Give back what the C heap holds in free blocks, if that is more than `trim_above` bytes
        (malloc_trim(3)): gradients and activations come and go in blocks that leave it in pieces."""
        if _mallinfo is not None and _mallinfo().fordblks > self.trim_above:
            _libc.malloc_trim(0)

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
        """Finish all copies and end the streams."""
        self._h2d.close()
        self._d2h.close()


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


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        while not self.event.query():
            time.sleep(5e-5)


def _record(stream: torch.cuda.Stream) -> _CudaEvent:
    event = torch.cuda.Event()
    event.record(stream)
    return _CudaEvent(event)


def _wait(stream: torch.cuda.Stream, after: Sequence[Event | None]) -> None:
    for event in after:
        if isinstance(event, _CudaEvent):
            stream.wait_event(event.event)


def _cudart() -> Any:
    return torch.cuda.cudart()


class CudaDevice:
    """One CUDA device, with a stream for each direction of copies."""

    staged = True

    def __init__(self, torch_device: torch.device, recorder: Recorder | None = None) -> None:
        self.torch_device = torch_device
        self.trim_above = 0
        self._recorder = recorder or Recorder()
        self._clock: DeviceClock | None = None
        with torch.cuda.device(torch_device):
            self._h2d = torch.cuda.Stream()
            self._d2h = torch.cuda.Stream()

    def h2d(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, chunk: int = -1) -> Event:
        """Start copying `source` (pinned) to `target` on the h2d stream, after `after`."""
        with torch.cuda.stream(self._h2d):
            _wait(self._h2d, after)
            with timed(self._recorder.log, self._clock, "h2d", self._h2d, chunk, source.nbytes):
                target.copy_(source, non_blocking=True)
            return _record(self._h2d)

    def start_clock(self) -> Callable[[], Moment] | None:
        """Return what tells the moments of the current stream. Waits for the device once."""
        self._clock = DeviceClock(self.torch_device)
        return self._clock.moment

    def memory(self, nbytes: int) -> ResizedMemory:
        """Return the storage of a unit, empty."""
        return ResizedMemory(nbytes, self.torch_device)

    def mark(self) -> Event | None:
        """Return an event of the compute stream as it stands."""
        return _record(torch.cuda.current_stream(self.torch_device))

    def carry(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what has another thread's compute go where the caller's goes: its current stream."""
        return functools.partial(torch.cuda.stream, torch.cuda.current_stream(self.torch_device))

    def wait_on_device(self, event: Event | None) -> None:
        """Make the current compute stream wait for `event`; the host does not."""
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.event)
        elif event is not None:
            event.wait()

    def d2h(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *after: Event | None,
        chunk: int = -1,
        kept: bool = False,
    ) -> Event:
        """Start copying `source` to `target` (pinned) on the d2h stream, after `after`.

        `kept`: the caller keeps `source` until its own stream has waited for the copy; else the
        allocator is told, and gives the memory to nobody before the host has seen the copy done.
        """
        with torch.cuda.stream(self._d2h):
            _wait(self._d2h, after)
            with timed(self._recorder.log, self._clock, "d2h", self._d2h, chunk, source.nbytes):
                target.copy_(source, non_blocking=True)
            event = _record(self._d2h)
        if not kept:
            source.record_stream(self._d2h)
        return event

    def trim(self) -> None:
        """Nothing to do: torch's allocator keeps what it has."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` at `address` with cudaHostRegister.

        Raises:
            ConfigError: the driver refuses (usually the memlock limit).
        """
        status = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if status:
            raise ConfigError(
                "host memory cannot be pinned",
                expected=f"cudaHostRegister of {nbytes} bytes to succeed",
                found=f"CUDA error {status}",
                cure="raise the memlock limit (`ulimit -l unlimited`) or lower host_memory",
            )

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""
        _cudart().cudaHostUnregister(address)

    def synchronize(self) -> None:
        """Block until all copies are done."""
        self._h2d.synchronize()
        self._d2h.synchronize()

    def memory_free(self) -> int:
        """Return the bytes that could be allocated on the device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def close(self) -> None:
        """Finish all copies: the memory that they use is about to be unpinned."""
        self.synchronize()


Device = HostDevice | CudaDevice


def open_device(name: str | None, recorder: Recorder | None = None) -> Device:
    """Return the device called `name`; None: cuda where there is one, else the CPU. `recorder` is
    told of copies while a trace is on.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # torch has no such word; nor can this one be computed on
    if device.type == "cpu":
        return HostDevice(torch.device("cpu"), recorder)
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"there is no device {name!r}",
            expected=f"one of {torch.cuda.device_count()} CUDA devices, or the CPU",
            found=repr(name),
            cure='device="cpu", or a torch build with CUDA',
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index), recorder)
