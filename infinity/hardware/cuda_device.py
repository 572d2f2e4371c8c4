"""A CUDA device: a stream for each direction of copies, and pinned host memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from infinity.core.errors import ConfigError
from infinity.core.sizes import format_size
from infinity.core.spans import Moment, Recorder

from .clock import DeviceClock, timed
from .streams import Event


class ResizedMemory:
    """The storage of one unit on a device with an allocator of its own: resized to 0 and back.

    The allocator gives what goes back to the stream that it was allocated on, at once. So that stream first
    waits for all others that have used it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storage = torch.UntypedStorage(0, device=device)
        self._nbytes = nbytes
        self._stream: torch.cuda.Stream | None = None
        self._users: set[torch.cuda.Stream] = set()

    def fill(self) -> None:
        """Make it usable."""
        if not self.storage.nbytes():
            self.storage.resize_(self._nbytes)
            self._stream = torch.cuda.current_stream(self.storage.device)

    def used(self) -> None:
        """The current stream is about to use it."""
        self._users.add(torch.cuda.current_stream(self.storage.device))

    def drop(self) -> None:
        """Give the memory back to torch's allocator."""
        self.used()
        if self._stream is not None:
            for stream in self._users - {self._stream}:
                self._stream.wait_stream(stream)
        self._users.clear()
        self.storage.resize_(0)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        if not self.event.query():
            self.event.synchronize()


def _record(stream: torch.cuda.Stream) -> _CudaEvent:
    event = torch.cuda.Event(blocking=True)  # who waits sleeps, and looks at nothing
    event.record(stream)
    return _CudaEvent(event)


def _wait(stream: torch.cuda.Stream, after: Sequence[Event | None]) -> None:
    for event in after:
        if isinstance(event, _CudaEvent):
            stream.wait_event(event.event)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _named(status: int) -> str:
    """Return what a status of the CUDA runtime means."""
    try:
        return f"CUDA error {status} ({_cudart().cudaGetErrorString(_cudart().cudaError(status))})"
    except Exception:  # a build of torch that does not know it
        return f"CUDA error {status}"


class CudaDevice:
    """One CUDA device, with a stream for each direction of copies."""

    staged = True

    def __init__(self, torch_device: torch.device, recorder: Recorder | None = None) -> None:
        self.torch_device = torch_device
        self._recorder = recorder or Recorder()
        self._clock: DeviceClock | None = None
        self._pinned = 0  # bytes
        with torch.cuda.device(torch_device):
            self._h2d = torch.cuda.Stream()
            self._d2h = torch.cuda.Stream()
            self._aside = torch.cuda.Stream()

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

    def reuse(self, nbytes: int, flat: int = 0, heap: int = 0) -> None:
        """Nothing to do: torch's allocator keeps what it has."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the device's memory for a while: uint8, of any content."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the device's memory, for good: uint8 zeros."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def compute(self, call: Callable[[], None]) -> None:
        """Put `call`, operations on tensors of the device alone, on the current stream: it may be done later
        than this returns."""
        call()

    def mark(self) -> Event | None:
        """Return an event of the compute stream as it stands."""
        return _record(torch.cuda.current_stream(self.torch_device))

    def current(self) -> object:
        """Return what the caller's compute goes to: equal for what is in order."""
        return torch.cuda.current_stream(self.torch_device)

    def carry(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what has another thread's compute go where the caller's goes: its current stream."""
        return functools.partial(torch.cuda.stream, torch.cuda.current_stream(self.torch_device))

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """In it a worker's thread has this device as its own, and its compute goes to a new stream: on the
        default one, which is the user's, it would wait for all that the user's thread has put there."""
        with torch.cuda.device(self.torch_device), torch.cuda.stream(torch.cuda.Stream(self.torch_device)):
            yield

    def aside(self) -> AbstractContextManager[Any]:
        """Return what has compute go beside the caller's: on a stream of its own."""
        return torch.cuda.stream(self._aside)

    def wait_on_device(self, event: Event | None) -> None:
        """Make the current compute stream wait for `event`; the host does not."""
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.event)
        elif event is not None:
            event.wait()

    def uses(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses `tensor`, which may be another one's: its memory is
        given to nobody before that is done."""
        tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def d2h(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, chunk: int = -1) -> Event:
        """Start copying `source` to `target` (pinned) on the d2h stream, after `after`. The caller keeps
        `source` until the host or the stream that it was made on has waited for the copy, or has told the
        allocator of another stream that waits for it (`uses`): here nothing is told."""
        with torch.cuda.stream(self._d2h):
            _wait(self._d2h, after)
            with timed(self._recorder.log, self._clock, "d2h", self._d2h, chunk, source.nbytes):
                target.copy_(source, non_blocking=True)
            return _record(self._d2h)

    def trim(self) -> None:
        """Nothing to do: torch's allocator keeps what it has."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` at `address` with cudaHostRegister.

        Raises:
            ConfigError: the driver refuses.
        """
        runtime = _cudart()
        if status := int(runtime.cudaHostRegister(address, nbytes, 0)):
            # The runtime keeps the error for the next launch, which reads it, and has done nothing wrong.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.torch_device)
            raise ConfigError(
                "the driver refuses to pin host memory",
                expected=f"a successful cudaHostRegister of {format_size(nbytes)} ({nbytes} bytes)",
                found=f"{_named(status)}, with {format_size(self._pinned)} pinned before it",
                cure="lower host_memory; under WSL and in some virtual machines the driver pins only a part "
                "of the memory",
            )
        self._pinned += nbytes

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""
        _cudart().cudaHostUnregister(address)
        self._pinned -= nbytes

    def synchronize(self) -> None:
        """Block until all copies are done."""
        self._h2d.synchronize()
        self._d2h.synchronize()
        self._aside.synchronize()

    def memory_free(self) -> int:
        """Return the bytes that could be allocated on the device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def close(self) -> None:
        """Finish all copies: the memory that they use is about to be unpinned."""
        self.synchronize()
