"""The gradient of each chunk on its tier: the bytes, their dtype, their squares; and how they come there.

One worker thread takes a unit's buffer to its tier, chunk by chunk, behind the user's back. Only one thread
works on the gradients at a time: the worker, or the user's while that has nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.core.sizes import Tier, ceil_to
from infinity.core.spans import Recorder, now
from infinity.core.waiting import Latch
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import Device, Event, HostStream, Task
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.partition import Chunk, Segment
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.pipeline import close_all, pipeline
from infinity.storage.store import Reads, Slot, Store, Transfer, Version

from .buffer import UnitBuffer


@dataclass
class Leaving:
    """A sealed buffer on its way, of which `chunks` go to their tier, `after` an event of the device.
    `by_device`: the device works on some of them.

    `issued` opens when nothing needs the memory of the buffer but copies and other work of the device, which
    are over with `copied`. Who has seen to it that these come before whatever takes it next drops it.
    """

    buffer: UnitBuffer
    chunks: Sequence[Chunk]
    after: Event | None
    by_device: bool
    issued: Latch = field(default_factory=Latch)
    copied: Event | None = None

    def brings(self, chunk: Chunk) -> bool:
        """Return whether anything but zeros arrives for a chunk."""
        arrivals = self.buffer.arrivals
        return any(s.param in arrivals and not arrivals[s.param].zero for s in chunk.segments)


class ChunkGradient:
    """What is known of one chunk's gradient, which is in front. `dtype` None: its bytes mean nothing, and
    what the shards hold of it is zero. Elsewhere the bytes of a parameter that has no gradient mean nothing.

    `by_device`: the device works on it, in memory of its own; else the CPU does.
    """

    __slots__ = ("by_device", "chunk", "dtype", "is_summed", "pieces", "plan", "squares", "tier")

    def __init__(self, chunk: Chunk, plan: ChunkParts, device: Device) -> None:
        self.chunk, self.plan, self.tier = chunk, plan, plan.gradient_tier
        self.by_device = device.staged and self.tier is Tier.DEVICE
        self.dtype: torch.dtype | None = None
        places = [place for _, *place in chunk.norm_pieces]
        self.pieces = cpu_adam.Pieces(chunk.numel, np.array(places, dtype=np.int64).reshape(-1, 2))
        self.squares = np.zeros(len(places))  # sums, one of each of `pieces`
        self.is_summed = True  # whether `squares` are those of its bytes

    def clear(self) -> None:
        """Forget its values."""
        self.dtype, self.is_summed = None, True
        self.squares[:] = 0


class ChunkGradients:
    """What is known of every chunk's gradient, where its bytes are, and the worker that works on them.

    `comes_and_goes`: what is placed on the device has its memory only while it is needed (`free`).

    Attributes:
        leaving: buffers that are on their way.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        updates: Updates,
        recorder: Recorder,
        *,
        comes_and_goes: bool = False,
    ) -> None:
        self.store = store
        self.device = device
        self.recorder = recorder
        self._writing: deque[GradientIO] = deque()  # what the worker has worked on, oldest first
        self.leaving: deque[Leaving] = deque()
        self._pool = pool
        self._updates = updates
        self._tasks: deque[Task] = deque()  # what sends units, in that order
        self._last: dict[int, Task] = {}  # unit → what has sent it last
        self._reserved: Mapping[int, Slot] = {}  # chunk → the version that its update reads
        chunks = [chunk for unit in units for chunk in unit.layout.trainable_chunks]
        self.entries = {chunk.id: ChunkGradient(chunk, plans[chunk.id], device) for chunk in chunks}
        for entry in self.entries.values():
            if entry.tier is Tier.DEVICE and not comes_and_goes:
                self._place(entry)
        self._stream = HostStream("gradients", there=device.worker)

    def _place(self, entry: ChunkGradient) -> None:
        number, nbytes = entry.chunk.id, entry.plan.parts["gradient"].nbytes
        slots = self.store.versions.slots(number, "gradient")
        flat = self.device.zeros(nbytes * len(slots))
        for slot, memory in zip(slots, flat.split(nbytes), strict=True):
            self.store.place(number, "gradient", slot, memory)

    def view(self, chunk: Chunk, dtype: torch.dtype, version: Version | Slot = Version.FRONT) -> torch.Tensor:
        """Return a gradient that is on the host or the device, as elements of `dtype`."""
        entry = self.entries[chunk.id]
        if entry.tier is Tier.DEVICE:
            slot = self.store.versions.slot(chunk.id, "gradient", version)
            if not self.store.is_placed(chunk.id, "gradient", slot):
                self._place(entry)
        return self.store.view(chunk.id, "gradient", dtype, numel=chunk.numel, version=version)

    # -- the user's thread ------------------------------------------------------------------

    def send(self, buffer: UnitBuffer) -> None:
        """Start to send what has arrived of a unit, of which nothing else is on its way."""
        arrivals, written, by_device = buffer.arrivals, [], False
        for chunk in buffer.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            for segment in chunk.segments:
                arrival = arrivals.get(segment.param)
                if arrival is not None and (entry.dtype is not None or not arrival.zero):
                    written.append(chunk)  # and not zeros beside zeros
                    by_device = by_device or entry.by_device
                    break
        if not written:
            return
        self.keep_clear(written)
        self.device.trim()
        self.device.wait_on_device(buffer.mark())
        leaving = Leaving(buffer, written, self.device.mark(), by_device)
        task = self._last[buffer.layout.index] = self._stream.submit(lambda: self._take(leaving))
        self.leaving.append(leaving)  # not before: a worker that is closed would never issue it
        self._tasks.append(task)

    def last(self, unit: ParamUnit) -> Task | None:
        """Return what has sent a unit's gradients last; its result is an event of the device."""
        return self._last.get(unit.index)

    def keep_clear(self, chunks: Iterable[Chunk]) -> None:
        """Keep clear of what an update still reads: put it into the back, or wait for it."""
        versions = self.store.versions
        for chunk in chunks:
            reserved = self._reserved.get(chunk.id)
            if reserved is None or reserved != versions.slot(chunk.id, "gradient"):
                continue
            if not self._updates.has_chunk(chunk.id):
                continue
            if self.entries[chunk.id].dtype is None and versions.has_two("gradient"):
                versions.flip(chunk.id, "gradient")
            else:
                self._updates.wait_unit(chunk.unit)

    def reserve(self, slots: Mapping[int, Slot]) -> None:
        """Note which version of which chunk the update that was posted reads."""
        self._reserved = slots

    def let_go(self) -> None:
        """Return the memory of gradients that are leaving to the device: the host waits until the copies are
        issued, and the device's compute until they are done."""
        while self.leaving:
            leaving = self.leaving[0]
            wait = self.recorder.waits()
            leaving.issued.wait()
            if leaving.copied is not None:
                with leaving.buffer.there():
                    self.device.wait_on_device(leaving.copied)
            self.leaving.popleft()
            leaving.buffer.free()
            self.recorder.waited(wait, ("reduce", 0))

    def wait(self, unit: int | None = None) -> None:
        """Wait for what sends a unit, or for all; raise what went wrong in any that is over."""
        while self._tasks:
            task = self._tasks[0]
            if unit is not None and not task.is_over:
                last = self._last.get(unit)
                if last is None or last.is_over:
                    return
            wait = self.recorder.waits()
            try:
                task.wait()
            except Exception:
                if task.is_over:  # and not a handler has raised
                    self._tasks.popleft()
                raise
            self._tasks.popleft()
            self.recorder.waited(wait, ("reduce", 0))

    def parts_of(self, unit: ParamUnit, index: int) -> Iterator[tuple[ChunkGradient, Segment]]:
        """Yield the chunks of a parameter whose bytes mean something, and where it is in them."""
        for chunk in unit.layout.trainable_chunks:
            for segment in chunk.segments:
                if segment.param == index and self.entries[chunk.id].dtype is not None:
                    yield self.entries[chunk.id], segment

    def work_on(
        self, entry: ChunkGradient, segment: Segment, call: Callable[[torch.Tensor], object], *, writes: bool
    ) -> None:
        """Wait until the worker has given `call` a part of a chunk, which it reads or `writes`; the device's
        compute waits for what it has put there."""

        def work() -> Event | None:
            assert entry.dtype is not None
            for _, io in self.opened([entry.chunk]):
                io.wait()
                target = io.buffer(entry.dtype)
                call(target[segment.start : segment.start + segment.numel])
                if writes:
                    io.store(target)
            return self.device.mark()

        self.device.wait_on_device(self._stream.submit(work).result())

    def sum_squares(self) -> None:
        """Compute the squares of all gradients, which are complete."""
        if not all([entry.is_summed for entry in self.entries.values()]):  # one call, not one for each
            self._run(self._sum_squares, "reduce")

    def finish_writes(self) -> None:
        """Wait until what was sent is on its tier."""
        self._run(lambda: close_all(self._writing), "nvme")

    def _run(self, call: Callable[[], None], cause: str) -> None:
        task = self._stream.submit(call)
        wait = self.recorder.waits()
        task.wait()
        self.recorder.waited(wait, (cause, 0))

    def free(self, unit: ParamUnit) -> None:
        """Free the memory on the device of a unit's gradients of which nothing is there; it comes back when
        it is needed. No update may read it."""
        for chunk in unit.layout.trainable_chunks:
            if self.entries[chunk.id].dtype is None:
                self.store.displace(chunk.id, "gradient")

    def close(self) -> None:
        """Finish and end the worker."""
        self._stream.close()

    # -- the worker -------------------------------------------------------------------------

    def _take(self, leaving: Leaving) -> Event | None:
        """Take a buffer's chunks to their tier; return an event of what the device has to do for that."""
        begin, buffer = now(), leaving.buffer
        opened = self.opened(leaving.chunks, leaving)
        try:
            for _, io in opened:
                io.wait()
                io.merge()
        finally:
            opened.close()
            self._let_go(leaving)
        if (log := self.recorder.log) is not None:
            log.add("reduce", begin, now(), unit=buffer.layout.index, nbytes=buffer.nbytes)
        return self.device.mark() if leaving.by_device else None

    def opened(
        self, chunks: Iterable[Chunk], leaving: Leaving | None = None
    ) -> Generator[tuple[ChunkGradient, GradientIO]]:
        """Yield the I/O of gradients, as far ahead as there are leases. What `leaving` has for them is on its
        way then; None: nothing comes."""

        needed = False  # whether what arrived is still read where it is

        def entries() -> Iterator[ChunkGradient]:
            for chunk in chunks:
                yield self.entries[chunk.id]
            if leaving is not None and not needed:
                self._let_go(leaving)

        def open_(entry: ChunkGradient, wait: bool) -> GradientIO | None:
            io = GradientIO(self, entry, leaving)
            if (io.crosses or entry.tier is Tier.NVME) and not io.lease(self._pool, wait=wait):
                return None
            return io

        def read(_entry: ChunkGradient, io: GradientIO) -> None:
            nonlocal needed
            io.read()
            needed = needed or io.source is not None

        return pipeline(entries(), open_, read, closing=self._writing, keep=True)

    def _let_go(self, leaving: Leaving) -> None:
        """Nothing needs the buffer any more but what the device has been given: copies, and work on chunks
        that it keeps."""
        if leaving.issued.is_open:
            return
        try:
            if leaving.by_device:
                self.device.wait_on_device(leaving.copied)
                leaving.copied = self.device.mark()
        finally:
            leaving.issued.open()

    def _sum_squares(self) -> None:
        """Sum the squares that are not known, those of the device, all in one pass: the host waits for that
        once. Where there is no memory for it nothing has changed."""
        entries, parts = [entry for entry in self.entries.values() if not entry.is_summed], []
        for entry in entries:
            assert entry.dtype is not None
            parts.append((self.view(entry.chunk, entry.dtype), entry.pieces))
        found = adam_reference.sums_of_squares_reference(parts)
        for entry, squares in zip(entries, found, strict=True):
            entry.squares[:] = squares
            entry.is_summed = True


class GradientIO:
    """One chunk's gradient where the CPU (or the device) can work on it: `lease`, `read`, `wait`, then work
    and `store`, then `close`.

    Attributes:
        source: the buffer, as long as what arrived has not left it, and is in no copy that was issued.
        crosses: whether what arrives is copied from the device.
    """

    def __init__(self, owner: ChunkGradients, entry: ChunkGradient, leaving: Leaving | None) -> None:
        self._owner, self._entry, self._chunk, self._leaving = owner, entry, entry.chunk, leaving
        # Where it is: the slots flip when the next one comes.
        self._slot = owner.store.versions.slot(entry.chunk.id, "gradient")
        self.source = leaving.buffer if leaving is not None else None
        on_cpu = not entry.by_device
        self.crosses = owner.device.staged and on_cpu and leaving is not None and leaving.brings(self._chunk)
        self._leases: list[Lease] = []
        self._crossed: torch.Tensor | None = None  # what arrived, in the second lease
        self._transfer: Transfer | Reads | None = None
        self._copied: Event | None = None

    def lease(self, pool: PinnedPool, *, wait: bool) -> bool:
        """Get the leases that it takes: one for its place where that is on NVMe, and one for what comes from
        the device, unless that is the gradient as it is kept. Return whether all of them are there, or none
        is taken; `wait`: until they are."""
        count = int(self._entry.tier is Tier.NVME)
        if self.crosses and self._leaving is not None:
            here, kept = self._leaving.buffer.chunk(self._chunk), self._leaving.buffer.kept(self._chunk)
            count += self._entry.dtype is not None or here.dtype is not kept
        call, nbytes = pool.lease if wait else pool.try_lease, self._entry.plan.gradient_lease
        try:
            while len(self._leases) < count and (lease := call("gradient", nbytes)) is not None:
                self._leases.append(lease)
        finally:
            if len(self._leases) < count:
                self._release()
        return len(self._leases) == count

    def read(self) -> None:
        """Start what brings it here, and what arrived for it."""
        owner, entry, chunk, leaving = self._owner, self._entry, self._chunk, self._leaving
        if entry.tier is Tier.NVME and entry.dtype is not None:
            self._transfer = owner.store.read(chunk.id, "gradient", self._leases[0], version=self._slot)
        if leaving is None:
            return
        if entry.by_device:
            owner.device.wait_on_device(leaving.after)
        elif self.crosses:
            # As it is: to its place, or where that holds something already, or is to hold it rounded, into a
            # lease.
            source, self.source = leaving.buffer.chunk(chunk), None
            if len(self._leases) == (entry.tier is Tier.NVME):
                target = self.buffer(source.dtype)
            else:
                target = self._crossed = self._leases[-1].tensor(source.dtype, 0, chunk.numel)
            after = leaving.after if leaving.copied is None else None  # what follows comes after it, too
            self._copied = leaving.copied = owner.device.d2h(target, source, after, chunk=chunk.id)

    def wait(self) -> None:
        """Block until what was started is complete."""
        try:
            if self._transfer is not None:
                self._transfer.wait()
        finally:
            if self._copied is not None:
                self._copied.wait()  # it writes into one of the leases
        self._transfer = self._copied = None

    def close(self, *, wait: bool = True) -> bool:
        """Give the leases back when its write is complete."""
        if not wait and self._transfer is not None and not self._transfer.done:
            return False
        try:
            if self._transfer is not None or self._copied is not None:
                self.wait()
        finally:
            if self._leases:
                self._release()
        return True

    def _release(self, left: int = 0) -> None:
        while len(self._leases) > left:
            self._leases.pop().release()

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the chunk's gradient as elements of `dtype`."""
        chunk = self._chunk
        if self._entry.tier is Tier.HOST:
            return self._owner.store.view(chunk.id, "gradient", dtype, numel=chunk.numel, version=self._slot)
        if self._entry.tier is Tier.NVME:
            return self._leases[0].tensor(dtype, 0, chunk.numel)
        return self._owner.view(chunk, dtype, self._slot)

    def merge(self) -> None:
        """Put what arrived in its place, after `wait`, and compute the squares."""
        assert self._leaving is not None
        chunk, entry, buffer = self._chunk, self._entry, self._leaving.buffer
        if entry.dtype is None:
            entry.dtype = buffer.kept(chunk)
            target = self.buffer(entry.dtype)
            self._replace(target)
        else:
            here = [(s, buffer.arrivals[s.param]) for s in chunk.segments if s.param in buffer.arrivals]
            # What is added to the compute dtype makes a sum in fp32.
            if entry.dtype is not torch.float32 and any(buffer.is_wide or not a.fresh for _, a in here):
                self._widen()
            target = self.buffer(entry.dtype)
            for segment, arrival in here:
                part = target[segment.start : segment.start + segment.numel]
                if arrival.zero:
                    part.zero_()
                elif arrival.fresh:
                    # Rounded, as it would be where nothing was there.
                    self._put(part, self._arrived(segment).to(buffer.kept(chunk)))
                else:
                    if arrival.factor != 1.0:
                        part.mul_(arrival.factor)
                    self._add(part, self._arrived(segment))
        self.store(target)

    def _widen(self) -> None:
        """Turn the compute dtype into fp32, in place: the later half of what is left, whose place in fp32 is
        behind all of that, again and again."""
        narrow, wide = self.buffer(self._chunk.dtype), self.buffer(torch.float32)
        left = narrow.numel()
        while left > 1:
            first = (left + 1) // 2
            self._put(wide[first:left], narrow[first:left])
            left = first
        wide[:left].copy_(narrow[:left].clone())
        self._entry.dtype = torch.float32

    def _replace(self, target: torch.Tensor) -> None:
        """Put the gradients that arrived into `target`, the whole chunk, with zeros elsewhere."""
        if self._crossed is not None:
            self._put(target, self._crossed)
        if self.source is None:
            return
        end = 0
        for begin, source in self.source.pieces(self._chunk):
            if begin > end:
                target[end:begin].zero_()
            end = begin + source.numel()
            self._put(target[begin:end], source)
        if end < target.numel():
            target[end:].zero_()

    def _arrived(self, segment: Segment) -> torch.Tensor:
        """Return what arrived for a segment, where something was there already."""
        if self.source is not None:
            return self.source.piece(self._chunk, segment)
        assert self._crossed is not None
        return self._crossed[segment.start : segment.start + segment.numel]

    def _put(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` over `part`."""
        if self._entry.by_device:
            part.copy_(source)
            return
        begin = now()
        cpu_adam.convert(part, source)
        log = self._owner.recorder.log
        if log is not None and not self.crosses:  # this is what d2h is where nothing crosses
            log.add("d2h", begin, now(), chunk=self._chunk.id, nbytes=source.nbytes)

    def _add(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Add `source` to `part` (fp32)."""
        if self._entry.by_device:
            part.add_(source.float())
        else:
            cpu_adam.accumulate(part, source)

    def store(self, target: torch.Tensor) -> None:
        """Sum the squares, or have them summed when somebody asks, and send the chunk to its tier."""
        owner, entry, chunk = self._owner, self._entry, self._chunk
        entry.is_summed = not entry.by_device
        if entry.is_summed:
            entry.squares[:] = cpu_adam.sum_of_squares(target, entry.pieces)
        if entry.tier is Tier.NVME:
            nbytes = ceil_to(target.nbytes, 4096)
            self._transfer = owner.store.write(
                chunk.id, "gradient", self._leases[0], nbytes=nbytes, version=self._slot
            )
        if self._leases:
            self._release(int(entry.tier is Tier.NVME))
