"""Times of events on a CUDA device, by the host's clock: for traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from infinity.core.spans import Recording, now


class DeviceClock:
    """Turns events of one device into times. Made on the thread that computes; waits for the device
    once, to know when its zero was. CUDA gives differences as fp32 milliseconds: a minute after zero
    they are exact to 4 µs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.zero = torch.cuda.Event(enable_timing=True)
        self.zero.record(torch.cuda.current_stream(device))
        self.zero.synchronize()
        self.zero_ns = now()

    def moment(self, stream: torch.cuda.Stream | None = None) -> CudaMoment:
        """Return when `stream` has done all that it was given so far; None: the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return CudaMoment(self, event)


class CudaMoment:
    """A point in the work of a stream."""

    __slots__ = ("_clock", "_event")

    def __init__(self, clock: DeviceClock, event: torch.cuda.Event) -> None:
        self._clock = clock
        self._event = event

    def ns(self) -> int:
        """Return when it happened, in ns of CLOCK_MONOTONIC; block until it has."""
        self._event.synchronize()
        since = float(self._clock.zero.elapsed_time(self._event))
        return self._clock.zero_ns + round(since * 1e6)


@contextlib.contextmanager
def timed(
    log: Recording | None,
    clock: DeviceClock | None,
    kind: str,
    stream: torch.cuda.Stream,
    chunk: int,
    nbytes: int,
) -> Iterator[None]:
    """Record what the block puts on `stream` as one span, if a trace is on."""
    if log is None or clock is None:
        yield
        return
    begin = clock.moment(stream)
    yield
    log.add(kind, begin, clock.moment(stream), chunk=chunk, nbytes=nbytes)
