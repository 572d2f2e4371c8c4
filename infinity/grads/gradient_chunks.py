"""The gradient of each chunk on its tier: the bytes, their dtype, their squares; and how they come there.

One worker thread takes a unit's buffer to its tier, chunk by chunk, behind the user's back. Only one thread
works on the gradients at a time: the worker, or the user's while that has nothing to do.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from infinity.core.errors import StorageError
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
from infinity.storage.store import Reads, Slot, Store, Transfer, Version

from .buffer import Arrival, UnitBuffer


@dataclass
class Leaving:
    """A sealed buffer on its way, of which `chunks` go to their tier, `after` an event of the device.

    `issued` opens when nothing needs the memory of the buffer but copies and other work of the device, which
    are over with `copied`. Who has seen to it that these come before whatever takes it next drops it.
    """

    buffer: UnitBuffer
    chunks: Sequence[Chunk]
    after: Event | None
    issued: Latch = field(default_factory=Latch)
    copied: Event | None = None


class ChunkGradient:
    """What is known of one chunk's gradient, which is in front. `dtype` None: its bytes mean nothing, and
    what the shards hold of it is zero. Elsewhere the bytes of a parameter that has no gradient mean nothing.
    """

    __slots__ = ("chunk", "dtype", "is_summed", "on_device", "pieces", "squares")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.dtype: torch.dtype | None = None
        places = [place for _, *place in chunk.norm_pieces]
        self.pieces: cpu_adam.Pieces = np.array(places, dtype=np.int64).reshape(-1, 2)
        self.squares = np.zeros(len(places))  # sums, one of each of `pieces`
        self.is_summed = True  # whether `squares` are those of its bytes
        self.on_device: dict[Slot, torch.Tensor] = {}  # its bytes, where it is placed there

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
        self.plans = plans
        self.store = store
        self.device = device
        self.recorder = recorder
        self.writes: deque[tuple[Transfer, Lease]] = deque()
        self.leaving: deque[Leaving] = deque()
        self._pool = pool
        self._updates = updates
        self._tasks: deque[tuple[int, Task]] = deque()  # unit, and what sends it
        self._last: dict[int, Task] = {}  # unit → what has sent it last
        self._reserved: dict[int, Slot] = {}  # chunk → the version that its update reads
        self.entries = {c.id: ChunkGradient(c) for unit in units for c in unit.layout.trainable_chunks}
        for number, entry in self.entries.items():
            if plans[number].gradient_tier is Tier.DEVICE and not comes_and_goes:
                self._place(entry)
        self._stream = HostStream("gradients", there=device.worker)

    def _place(self, entry: ChunkGradient) -> None:
        nbytes = self.plans[entry.chunk.id].parts["gradient"].nbytes
        slots = self.store.versions.slots(entry.chunk.id, "gradient")
        flat = self.device.zeros(nbytes * len(slots))
        entry.on_device = dict(zip(slots, flat.split(nbytes), strict=True))

    # -- the user's thread ------------------------------------------------------------------

    def send(self, buffer: UnitBuffer) -> None:
        """Start to send what has arrived of a unit, of which nothing else is on its way."""
        arrivals, written = buffer.arrivals, []
        for chunk in buffer.layout.trainable_chunks:
            here = [arrivals[s.param] for s in chunk.segments if s.param in arrivals]
            if any(self.entries[chunk.id].dtype is not None or not arrival.zero for arrival in here):
                written.append(chunk)  # and not zeros beside zeros
        if not written:
            return
        self.keep_clear(written)
        self.device.trim()
        self.device.wait_on_device(buffer.mark())
        leaving = Leaving(buffer, written, self.device.mark())
        task = self._last[buffer.layout.index] = self._stream.submit(lambda: self._take(leaving))
        self.leaving.append(leaving)  # not before: a worker that is closed would never issue it
        self._tasks.append((buffer.layout.index, task))

    def last(self, unit: ParamUnit) -> Task | None:
        """Return what has sent a unit's gradients last; its result is an event of the device."""
        return self._last.get(unit.index)

    def keep_clear(self, chunks: Iterable[Chunk]) -> None:
        """Keep clear of what an update still reads: put it into the back, or wait for it."""
        versions = self.store.versions
        for chunk in chunks:
            front = versions.slot(chunk.id, "gradient")
            if self._reserved.get(chunk.id) != front or not self._updates.has_chunk(chunk.id):
                continue
            if self.entries[chunk.id].dtype is None and versions.has_two("gradient"):
                versions.flip(chunk.id, "gradient")
            else:
                self._updates.wait_unit(chunk.unit)

    def reserve(self, slots: Iterable[tuple[int, Slot]]) -> None:
        """Note which version of which chunk the update that was posted reads."""
        self._reserved = dict(slots)

    def let_go(self) -> None:
        """Return the memory of gradients that are leaving to the device: the host waits until the copies are
        issued, and the device's compute until they are done."""
        while self.leaving:
            leaving = self.leaving[0]
            wait = self.recorder.waits()
            leaving.issued.wait()
            with leaving.buffer.there():
                self.device.wait_on_device(leaving.copied)
            self.leaving.popleft()
            leaving.buffer.free()
            self.recorder.waited(wait, ("reduce", 0))

    def wait(self, unit: int | None = None) -> None:
        """Wait for what sends a unit, or for all; raise what went wrong in any that is over."""
        while self._tasks:
            task = self._tasks[0][1]
            if unit is not None and not task.is_over and all(i != unit for i, _ in self._tasks):
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
            with self.open(entry.chunk) as io:
                target = io.buffer(entry.dtype)
                call(target[segment.start : segment.start + segment.numel])
                if writes:
                    io.store(target)
            return self.device.mark()

        self.device.wait_on_device(self._stream.submit(work).result())

    def sum_squares(self) -> None:
        """Compute the squares of all gradients, which are complete."""
        if not all(entry.is_summed for entry in self.entries.values()):
            self._run(self._sum_squares, "reduce")

    def finish_writes(self) -> None:
        """Wait until what was sent is on its tier."""
        self._run(self._finish_writes, "nvme")

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
                self.entries[chunk.id].on_device.clear()

    def close(self) -> None:
        """Finish and end the worker."""
        self._stream.close()

    # -- the worker -------------------------------------------------------------------------

    def _take(self, leaving: Leaving) -> Event | None:
        """Take a buffer's chunks to their tier; return an event of what the device has to do for that."""
        begin, buffer = now(), leaving.buffer
        works: deque[GradientIO] = deque()
        try:
            self._issue(leaving, works)
            while works:
                works.popleft().merge()
        finally:
            try:
                for work in works:  # only after an error is anything left
                    work.close()
            finally:
                self._let_go(leaving)
        if (log := self.recorder.log) is not None:
            log.add("reduce", begin, now(), unit=buffer.layout.index, nbytes=buffer.nbytes)
        return self.device.mark() if any(map(self.by_device, leaving.chunks)) else None

    def _issue(self, leaving: Leaving, works: deque[GradientIO]) -> None:
        """Start what can be started: all chunks at once, as far as there are leases."""
        left = True
        for chunk in leaving.chunks:
            while (work := self.take(chunk, leaving, alone=not works)) is None:
                works.popleft().merge()
            if work.ready:
                work.merge()
                continue
            works.append(work)
            left = left and work.has_left
        if left:
            self._let_go(leaving)

    def _let_go(self, leaving: Leaving) -> None:
        """Nothing needs the buffer any more but what the device has been given: copies, and work on chunks
        that it keeps."""
        if leaving.issued.is_open:
            return
        try:
            if any(map(self.by_device, leaving.chunks)):
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
            nbytes = entry.chunk.numel * entry.dtype.itemsize
            parts.append((self.on_device(entry.chunk)[:nbytes].view(entry.dtype), entry.pieces))
        found = adam_reference.sums_of_squares_reference(parts)
        for entry, squares in zip(entries, found, strict=True):
            entry.squares[:] = squares
            entry.is_summed = True

    def _finish_writes(self) -> None:
        while self.writes:
            self._finish_write()

    def _finish_write(self) -> None:
        """Wait for the oldest write."""
        transfer, lease = self.writes.popleft()
        try:
            transfer.wait()
        finally:
            lease.release()

    # -- one chunk --------------------------------------------------------------------------

    def open(self, chunk: Chunk) -> GradientIO:
        """Return the I/O of a chunk's gradient as it is; waits for a lease."""
        work = self.take(chunk, None, alone=True)
        assert work is not None
        return work

    def take(self, chunk: Chunk, leaving: Leaving | None, *, alone: bool) -> GradientIO | None:
        """Return the I/O of a chunk that gets what `leaving` has for it, which is on its way then. All leases
        that this takes are there, or None is returned; `alone`: no other I/O is open, so wait for them."""
        plan, count = self.plans[chunk.id], self._needed(chunk, leaving)
        leases = self._leases(count, plan) if alone else self._try_leases(count, plan)
        if leases is None:
            return None
        try:
            return GradientIO(self, chunk, leaving, leases)
        except BaseException:  # a transfer before this one has failed
            for lease in leases:
                lease.release()
            raise

    def by_device(self, chunk: Chunk) -> bool:
        """Return whether the device works on a chunk's gradient, in memory of its own; else the CPU does."""
        return self.device.staged and self.plans[chunk.id].gradient_tier is Tier.DEVICE

    def crosses(self, chunk: Chunk, arrivals: Mapping[int, Arrival]) -> bool:
        """Return whether what arrives for a chunk is copied from the device."""
        values = (s.param in arrivals and not arrivals[s.param].zero for s in chunk.segments)
        return self.device.staged and not self.by_device(chunk) and any(values)

    def _needed(self, chunk: Chunk, leaving: Leaving | None) -> int:
        """Return how many leases the I/O of a chunk takes: one for its place where that is on NVMe, and one
        for what comes from the device, unless that is the chunk's gradient as it is kept."""
        count = int(self.plans[chunk.id].gradient_tier is Tier.NVME)
        if leaving is None or not self.crosses(chunk, leaving.buffer.arrivals):
            return count
        there = self.entries[chunk.id].dtype is not None
        return count + (there or leaving.buffer.chunk(chunk).dtype is not leaving.buffer.kept(chunk))

    def on_device(self, chunk: Chunk, version: Version | Slot = Version.FRONT) -> torch.Tensor:
        """Return the bytes of a gradient that is placed on the device."""
        entry, slot = self.entries[chunk.id], self.store.versions.slot(chunk.id, "gradient", version)
        if slot not in entry.on_device:
            self._place(entry)
        return entry.on_device[slot]

    def _leases(self, count: int, plan: ChunkParts) -> list[Lease]:
        while (leases := self._try_leases(count, plan)) is None:
            if not self.writes:
                return [self._pool.lease("gradient", plan.gradient_lease) for _ in range(count)]
            self._finish_write()
        return leases

    def _try_leases(self, count: int, plan: ChunkParts) -> list[Lease] | None:
        while self.writes and self.writes[0][0].done:
            self._finish_write()
        leases: list[Lease] = []
        while len(leases) < count:
            lease = self._pool.try_lease("gradient", plan.gradient_lease)
            if lease is None:
                for taken in leases:
                    taken.release()
                return None
            leases.append(lease)
        return leases


class GradientIO:
    """One chunk's gradient where the CPU (or the device) can work on it, until it is closed. What arrived for
    it is there in a `with` block, and no work of the device from before still reads what it replaces."""

    def __init__(
        self, owner: ChunkGradients, chunk: Chunk, leaving: Leaving | None, leases: list[Lease]
    ) -> None:
        self._owner = owner
        self._chunk = chunk
        self._entry = owner.entries[chunk.id]
        self._leaving = leaving
        self._leases = leases
        # Where it is: the slots flip when the next one comes.
        self._slot = owner.store.versions.slot(chunk.id, "gradient")
        self._tier = owner.plans[chunk.id].gradient_tier
        self._source = leaving.buffer if leaving is not None else None
        self._crossed: torch.Tensor | None = None  # what arrived, in the second lease
        self._reading: Transfer | Reads | None = None
        self._copied: Event | None = None
        if self._tier is Tier.NVME:
            if self._entry.dtype is not None:
                self._reading = owner.store.read(chunk.id, "gradient", leases[0], version=self._slot)
            self._bytes = leases[0].tensor(torch.uint8, 0, owner.plans[chunk.id].gradient_lease)
        elif self._tier is Tier.DEVICE:
            owner.device.wait_on_device(leaving.after if leaving is not None else None)
            self._bytes = owner.on_device(chunk, self._slot)
        if leaving is not None and owner.crosses(chunk, leaving.buffer.arrivals):
            self._cross(leaving)

    def _cross(self, leaving: Leaving) -> None:
        """Start copying what arrived, as it is: to its place, or where that holds something already, or is to
        hold it rounded, into a lease."""
        source, self._source = leaving.buffer.chunk(self._chunk), None
        if len(self._leases) == (self._tier is Tier.NVME):
            target = self.buffer(source.dtype)
        else:
            target = self._crossed = self._leases[-1].tensor(source.dtype, 0, self._chunk.numel)
        device = self._owner.device
        after = leaving.after if leaving.copied is None else None  # what follows comes after it, too
        self._copied = leaving.copied = device.d2h(target, source, after, chunk=self._chunk.id)

    @property
    def ready(self) -> bool:
        """Whether nothing is on its way to it."""
        return self._reading is None and self._copied is None

    @property
    def has_left(self) -> bool:
        """Whether what arrived has left the buffer, or is in a copy that has been issued."""
        return self._source is None

    def _wait(self) -> None:
        if self._reading is not None:
            self._reading.wait()
        if self._copied is not None:
            self._copied.wait()

    def close(self) -> None:
        """Give the leases back."""
        try:
            if self._reading is not None:
                with contextlib.suppress(StorageError):  # whoever waited for it was told
                    self._reading.wait()
            if self._copied is not None:
                self._copied.wait()  # it writes into one of them
        finally:
            for lease in self._leases:
                lease.release()

    def __enter__(self) -> GradientIO:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the chunk's gradient as elements of `dtype`."""
        chunk, store = self._chunk, self._owner.store
        if self._tier is Tier.HOST:  # the store keeps such views
            return store.view(chunk.id, "gradient", dtype, numel=chunk.numel, version=self._slot)
        return self._bytes[: chunk.numel * dtype.itemsize].view(dtype)

    def merge(self) -> None:
        """Put what arrived in its place, and compute the squares; then close."""
        assert self._leaving is not None
        chunk, entry, buffer = self._chunk, self._entry, self._leaving.buffer
        with self:
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
        if self._source is None:
            return
        end = 0
        for begin, source in self._source.pieces(self._chunk):
            if begin > end:
                target[end:begin].zero_()
            end = begin + source.numel()
            self._put(target[begin:end], source)
        if end < target.numel():
            target[end:].zero_()

    def _arrived(self, segment: Segment) -> torch.Tensor:
        """Return what arrived for a segment, where something was there already."""
        if self._source is not None:
            return self._source.piece(self._chunk, segment)
        assert self._crossed is not None
        return self._crossed[segment.start : segment.start + segment.numel]

    def _put(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` over `part`."""
        if self._owner.by_device(self._chunk):
            part.copy_(source)
            return
        begin = now()
        cpu_adam.convert(part, source)
        log = self._owner.recorder.log
        if log is not None and self._copied is None:  # this is what d2h is where nothing crosses
            log.add("d2h", begin, now(), chunk=self._chunk.id, nbytes=source.nbytes)

    def _add(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Add `source` to `part` (fp32)."""
        if self._owner.by_device(self._chunk):
            part.add_(source.float())
        else:
            cpu_adam.accumulate(part, source)

    def store(self, target: torch.Tensor) -> None:
        """Sum the squares, or have them summed when somebody asks, and send the chunk to its tier."""
        owner, entry, chunk = self._owner, self._entry, self._chunk
        entry.is_summed = not owner.by_device(chunk)
        if entry.is_summed:
            entry.squares[:] = cpu_adam.sum_of_squares(target, entry.pieces)
        if self._tier is Tier.NVME:
            nbytes = ceil_to(target.nbytes, 4096)
            transfer = owner.store.write(
                chunk.id, "gradient", self._leases[0], nbytes=nbytes, version=self._slot
            )
            owner.writes.append((transfer, self._leases.pop(0)))
