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
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from infinity.hardware.device import Device, Event
from infinity.planning.partition import Chunk, GatherRun, Segment, UnitLayout


class Arrival(NamedTuple):
    """How one parameter's gradient has come: it replaces what the shards hold (`fresh`), or is added to that
    times `factor`; `zero`: it is zero, and takes no bytes."""

    fresh: bool
    factor: float = 1.0
    zero: bool = False


#: Of a gradient that replaces another one, as nearly all do.
FRESH: Final = Arrival(True)


class UnitBuffer:
    """A unit's gradient on the device, from autograd to the tier: what has arrived, by parameter, and has not
    left ([Note: one buffer]); what of several backwards waits until ranks add up theirs; their sum.

    On a device with streams all is done in the order of the stream that it was made on. Nothing is put into
    one that is sealed.

    Args:
        first: of a sum, the rank whose slices of each run it begins with.

    Attributes:
        nbytes: that it takes on the device.
        missing: bytes that `put` would take more than there are, by parameter.
        is_wide: whether it is fp32, what replaces a gradient included.
    """

    def __init__(
        self,
        layout: UnitLayout,
        device: Device,
        *,
        arrivals: Mapping[int, Arrival] = MappingProxyType({}),
        is_wide: bool = False,
        first: int = 0,
    ) -> None:
        self.layout = layout
        self.arrivals = dict(arrivals)
        self.nbytes = 0
        self.is_wide = is_wide
        self._keeps = not device.staged and layout.world == 1  # what autograd made, on the host
        self.missing = dict(layout.gradient_sizes)
        if not self._keeps:
            self.missing = dict.fromkeys(layout.gradient_sizes, layout.gradient_nbytes)
        self.there = contextlib.nullcontext if self._keeps else device.carry()
        self._current = None if self._keeps else device.current()
        self._device = device
        self._first = first
        self._runs: dict[int, torch.Tensor] = {}  # flat, by the first byte of a run
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def is_zero(self) -> bool:
        """Whether nothing but zeros has arrived."""
        return all(arrival.zero for arrival in self.arrivals.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing but zeros has arrived on this rank, which take no memory."""
        return not self._runs

    def put(self, index: int, grad: torch.Tensor, *, shared: bool = False) -> None:
        """Put `grad` as the gradient of parameter `index`, which counts as soon as `arrivals` has it.
        `shared`: other code may write to `grad`."""
        spec, grad = self.layout.params[index], grad.detach()
        if self._keeps:
            flat = grad.to(spec.dtype).contiguous().view(-1)
            self.nbytes += self.missing.pop(index, 0)
            self._kept[index] = flat.clone() if shared and flat.data_ptr() == grad.data_ptr() else flat
            return
        if not self._runs:
            with self.there():
                self.nbytes = self.layout.gradient_nbytes
                flat = self._device.empty(self.nbytes)
                runs = self.layout.trainable_runs
                self._runs = {r.begin: flat[r.begin : r.begin + r.nbytes].view(r.dtype) for r in runs}
            self.missing.clear()
        with self._in_order():
            self.values(index).view(grad.shape).copy_(grad)

    def hold(self, run: GatherRun, values: torch.Tensor) -> None:
        """Have `values` as the sum of a run: flat, of the dtype that they have."""
        self._runs[run.begin] = values
        self.nbytes += values.untyped_storage().nbytes()

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
        run, begin = self.layout.place(index)
        return self._runs[run.begin][begin : begin + self.layout.params[index].numel]

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
        if not self._runs:
            return
        with self.there():
            ends = dict.fromkeys(self._runs, 0)
            for index in sorted(self.arrivals, key=self.layout.byte_offsets.__getitem__):
                if not self.arrivals[index].zero:
                    run, begin = self.layout.place(index)
                    if begin > ends[run.begin]:
                        self._runs[run.begin][ends[run.begin] : begin].zero_()
                    ends[run.begin] = begin + self.layout.params[index].numel
            for start, values in self._runs.items():
                values[ends[start] :].zero_()

    # -- of several backwards ---------------------------------------------------------------

    def merge(self, more: UnitBuffer) -> UnitBuffer:
        """Return the sum of this and `more`, which a later backward has brought: in fp32, unless this is
        empty. Both are sealed, and of no use any more."""
        if self.is_empty:
            for index, arrival in more.arrivals.items():
                self.note(index, arrival)
            more.arrivals = self.arrivals
            return more
        made = more.mark()
        self.widen()
        with self.there(), torch.no_grad():
            self._device.wait_on_device(made)
            for index, arrival in more.arrivals.items():
                before, mine = self.arrivals.get(index), self.values(index)
                if arrival.zero:
                    mine.zero_()
                elif arrival.fresh or before is None:
                    mine.copy_(more.values(index))
                else:
                    if arrival.factor != 1.0:
                        mine.mul_(arrival.factor)
                    mine.add_(more.values(index))
                self.note(index, arrival)
            done = self._device.mark()
        with more.there():  # its memory may go to something else there
            self._device.wait_on_device(done)
        return self

    def note(self, index: int, arrival: Arrival) -> None:
        """Note one more arrival of a parameter."""
        before = self.arrivals.get(index)
        if before is not None and not arrival.fresh:
            arrival = Arrival(before.fresh, before.factor * arrival.factor)
        self.arrivals[index] = arrival

    def join(self, index: int, arrival: Arrival) -> None:
        """Take part in what has arrived of a parameter on another rank alone: with zeros."""
        before = self.arrivals.get(index)
        if before is not None and not before.zero and not self.is_empty:
            with self.there():
                mine = self.values(index)
                mine.zero_() if arrival.fresh else mine.mul_(arrival.factor)
        self.note(index, arrival)

    def widen(self) -> None:
        """Have it in fp32."""
        if not self.is_wide:
            with self.there():
                runs = self.layout.trainable_runs
                self._runs = {run.begin: self.run(run).to(torch.float32) for run in runs}
            self.nbytes, self.is_wide = self.layout.accumulated_nbytes, True

    def drop(self, index: int) -> None:
        """Forget what has arrived of a parameter."""
        arrival = self.arrivals.pop(index, None)
        if arrival is not None and not arrival.zero and not self.is_empty:
            with self.there():
                self.values(index).zero_()

    # -- what leaves ------------------------------------------------------------------------

    def kept(self, chunk: Chunk) -> torch.dtype:
        """Return the dtype in which a chunk is kept that begins with this."""
        return torch.float32 if self.is_wide else chunk.dtype

    def free(self) -> None:
        """Let go of its memory, of which nothing is needed any more."""
        self._runs, self._kept = {}, {}

    def run(self, run: GatherRun) -> torch.Tensor:
        """Return a run of trainable parameters: flat; zeros where nothing arrived on this rank."""
        if not self._runs:
            numel = run.slice_numel * run.world
            return torch.zeros(numel, dtype=run.dtype, device=self._device.torch_device)
        return self._runs[run.begin]

    def mark(self) -> Event | None:
        """Return an event of all that was done with it so far."""
        if self._keeps:
            return None
        with self.there():
            return self._device.mark()

    def chunk(self, chunk: Chunk) -> torch.Tensor:
        """Return the memory of a chunk: (chunk.numel,), in its dtype or fp32. Not where pieces are kept."""
        run, begin = self.layout.at(chunk.copy_offset)
        begin -= self._first * run.slice_numel
        return self._runs[run.begin][begin : begin + chunk.numel]

    def pieces(self, chunk: Chunk) -> list[tuple[int, torch.Tensor]]:
        """Return what has arrived of a chunk, as (first element within the chunk, values); the rest is zero.
        That is the chunk as one where the buffer is flat."""
        if self._runs:
            return [(0, self.chunk(chunk))]
        found = []
        for segment in chunk.segments:
            arrival = self.arrivals.get(segment.param)
            if arrival is not None and not arrival.zero:
                begin, kept = segment.offset, self._kept[segment.param]
                found.append((segment.start, kept[begin : begin + segment.numel]))
        return found

    def piece(self, chunk: Chunk, segment: Segment) -> torch.Tensor:
        """Return what has arrived of one segment: (segment.numel,)."""
        if self._runs:
            return self.chunk(chunk)[segment.start : segment.start + segment.numel]
        return self._kept[segment.param][segment.offset : segment.offset + segment.numel]
