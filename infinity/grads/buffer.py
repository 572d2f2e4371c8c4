"""A unit's gradient on the device: one flat buffer, from autograd to the tier.

[Note: one buffer] The buffer has the layout of the unit's compute parameters, where the trainable ones come
first: a chunk is one range of it, in the chunk's dtype, and a gradient that did not arrive is zero. The
engine copies a parameter's gradient to its place when it arrives, and drops autograd's tensor. One copy moves
a chunk to its tier. One unit's buffer fills while that of the unit before leaves.

On a CPU device no transfer is needed, and the copy to its place would be one more pass over memory. There the
buffer keeps autograd's tensors, and the engine writes a chunk's pieces to its tier one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from infinity.core.waiting import Latch
from infinity.hardware.device import Device, Event
from infinity.planning.partition import Chunk, Run, Segment, UnitLayout


class Arrival(NamedTuple):
    """How one parameter's gradient has come: it replaces what the shards hold (`fresh`), or is added to that
    times `factor`; `zero`: it is zero, and takes no bytes."""

    fresh: bool
    factor: float = 1.0
    zero: bool = False


class SealedBuffer(Protocol):
    """What a unit's gradient leaves the device from."""

    layout: UnitLayout
    arrivals: dict[int, Arrival]
    nbytes: int
    is_wide: bool  # fp32, whatever it replaces
    there: Callable[[], AbstractContextManager[None]]

    def mark(self) -> Event | None:
        """Return an event of all that was done with it so far."""

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return the memory of a chunk of it: (chunk.numel,), in its dtype or in fp32."""

    def pieces(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived of a chunk: (first element within the chunk, values); the rest is zero."""

    def piece(self, chunk: Chunk, segment: Segment) -> torch.Tensor:
        """Return what has arrived of one segment: (segment.numel,)."""


class UnitBuffer:
    """What has arrived of one unit's gradient and has not left, by parameter: see [Note: one buffer].

    On a device with streams all is done in the order of the stream that it was made on.
    """

    is_wide = False

    def __init__(self, layout: UnitLayout, device: Device) -> None:
        self.layout = layout
        self._keeps = not device.staged and layout.world == 1  # what autograd made
        self.arrivals: dict[int, Arrival] = {}
        self.nbytes = 0  # that it takes on the device
        self.there = device.carry()
        self._current = device.current()
        self._device = device
        self._flat: torch.Tensor | None = None
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def is_zero(self) -> bool:
        """Whether nothing but zeros has arrived."""
        return all(arrival.zero for arrival in self.arrivals.values())

    def needs(self, index: int) -> int:
        """Return the bytes that `put` would take more than there are."""
        if not self._keeps:
            return 0 if self._flat is not None else self.layout.gradient_nbytes
        return 0 if index in self._kept else self.layout.params[index].nbytes

    def put(self, index: int, grad: torch.Tensor, *, shared: bool = False) -> None:
        """Put `grad` as the gradient of parameter `index`. It counts as soon as `arrivals` has it: an
        interrupt before that leaves the parameter as it was, or lets a repetition put it again. `shared`:
        other code may write to `grad`."""
        spec, grad = self.layout.params[index], grad.detach()
        if self._keeps:
            flat = grad.to(spec.dtype).contiguous().view(-1)
            self.nbytes += self.needs(index)
            self._kept[index] = flat.clone() if shared and flat.data_ptr() == grad.data_ptr() else flat
            return
        if self._flat is None:
            with self.there():
                self.nbytes = self.layout.gradient_nbytes
                self._flat = self._device.empty(self.nbytes)
        with self._in_order():
            self.values(index).view(grad.shape).copy_(grad)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """In it the caller's stream, on which its gradient was made, works on the buffer after what has been
        done with it, and before what comes."""
        beside = self._device.current() != self._current
        if beside:
            self._device.wait_on_device(self.mark())
        yield
        if beside:
            done = self._device.mark()
            with self.there():
                self._device.wait_on_device(done)

    def values(self, index: int) -> torch.Tensor:
        """Return what has arrived of parameter `index`, flat. Not where pieces are kept."""
        assert self._flat is not None
        begin, spec = self.layout.byte_offsets[index], self.layout.params[index]
        return self._flat[begin : begin + spec.nbytes].view(spec.dtype)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add `grad` to what has arrived of parameter `index`, in its dtype. Not where pieces are kept."""
        with self._in_order(), torch.no_grad():
            self.values(index).add_(grad.detach().reshape(-1))

    def scale(self, index: int, factor: float) -> None:
        """Multiply what has arrived of parameter `index`. Not where pieces are kept."""
        with self._in_order(), torch.no_grad():
            self.values(index).mul_(factor)

    def seal(self) -> None:
        """Make zero what did not arrive: nothing is put any more."""
        if self._flat is None:
            return
        with self.there():
            end = 0
            for index, begin in sorted(enumerate(self.layout.byte_offsets), key=lambda place: place[1]):
                arrival = self.arrivals.get(index)
                if arrival is not None and not arrival.zero:
                    if begin > end:
                        self._flat[end:begin].zero_()
                    end = begin + self.layout.params[index].nbytes
            self._flat[end:].zero_()

    def run(self, run: Run) -> torch.Tensor:
        """Return a run of the sealed buffer, of trainable parameters: flat, in its dtype; zeros where nothing
        arrived on this rank."""
        if self._flat is None:
            return torch.zeros(run.nbytes, dtype=torch.uint8, device=self._device.torch_device).view(
                run.dtype
            )
        return self._flat[run.begin : run.begin + run.nbytes].view(run.dtype)

    def mark(self) -> Event | None:
        """Return an event of all that was done with it so far."""
        with self.there():
            return self._device.mark()

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return a chunk of the sealed buffer: (chunk.numel,) in its dtype. Not where pieces are kept."""
        assert self._flat is not None
        return self._flat[chunk.copy_offset : chunk.copy_offset + chunk.copy_nbytes].view(chunk.dtype)

    def pieces(self, chunk: Chunk) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived of a chunk, as (first element within the chunk, values); the rest is zero.
        That is the chunk as one where the buffer is flat."""
        if self._flat is not None:
            yield 0, self.chunk(chunk)
            return
        for segment in chunk.segments:
            arrival = self.arrivals.get(segment.param)
            if arrival is not None and not arrival.zero:
                yield segment.start, self.piece(chunk, segment)

    def piece(self, chunk: Chunk, segment: Segment) -> torch.Tensor:
        """Return what has arrived of one segment: (segment.numel,)."""
        if self._flat is not None:
            return self.chunk(chunk)[segment.start : segment.start + segment.numel]
        return self._kept[segment.param][segment.offset : segment.offset + segment.numel]


class Leaving:
    """A sealed buffer on its way, of which `chunks` go to their tier, `after` an event of the device.

    `issued` opens when nothing needs the buffer but copies and other work of the device, which are over with
    `copied`. Who has seen to it that these come before whatever takes its memory next drops `buffer`.
    """

    def __init__(self, buffer: SealedBuffer, chunks: list[Chunk], after: Event | None) -> None:
        self.unit = buffer.layout.index
        self.arrivals = buffer.arrivals
        self.is_wide = buffer.is_wide
        self.buffer: SealedBuffer | None = buffer
        self.nbytes = buffer.nbytes
        self.chunks = chunks
        self.after = after
        self.issued = Latch()
        self.copied: Event | None = None
