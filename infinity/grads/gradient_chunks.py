"""The gradient of each chunk on its tier: the bytes, their dtype, their squares.

Only one thread works on them at a time: the worker of `Gradients`, or the user's while that has nothing
to do.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from infinity.core.errors import StorageError
from infinity.core.sizes import Tier, ceil_to
from infinity.core.spans import Recorder, now
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import Device, Event
from infinity.params.unit import ParamUnit
from infinity.planning.partition import Chunk, Segment
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Reads, Slot, Store, Transfer, Version

from .buffer import Arrival, Leaving


class ChunkGradient:
    """What is known of one chunk's gradient, which is in front. `dtype` None: its bytes mean nothing, and
    whatever is present is zero."""

    __slots__ = ("dtype", "is_summed", "present", "squares")

    def __init__(self, pieces: int) -> None:
        self.dtype: torch.dtype | None = None
        self.present: set[int] = set()  # parameters (indices in the unit) that have arrived
        self.squares = np.zeros(pieces)  # sums, one of each of the chunk's `norm_pieces`
        self.is_summed = True  # whether `squares` are those of its bytes

    def clear(self) -> None:
        """Forget everything."""
        self.dtype = None
        self.present.clear()
        self.squares[:] = 0
        self.is_summed = True


class ChunkGradients:
    """What is known of every chunk's gradient, where its bytes are, and leases to work on them.

    `comes_and_goes`: what is placed on the device has its memory only while it is needed (`free`).
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        recorder: Recorder,
        *,
        comes_and_goes: bool = False,
    ) -> None:
        self.entries: dict[int, ChunkGradient] = {}
        self.plans = plans
        self.store = store
        self.device = device
        self.recorder = recorder
        self.writes: deque[tuple[Transfer, Lease]] = deque()
        self._pool = pool
        self._on_device: dict[tuple[int, Slot], torch.Tensor] = {}  # by chunk
        self.pieces: dict[int, cpu_adam.Pieces] = {}
        self._chunks: dict[int, Chunk] = {}
        for unit in units:
            for chunk in unit.layout.trainable_chunks:
                self._chunks[chunk.id] = chunk
                self.entries[chunk.id] = ChunkGradient(len(chunk.norm_pieces))
                self.pieces[chunk.id] = np.array(
                    [place for _, *place in chunk.norm_pieces], dtype=np.int64
                ).reshape(-1, 2)
                if plans[chunk.id].gradient_tier is Tier.DEVICE and not comes_and_goes:
                    self._place(chunk)

    def _place(self, chunk: Chunk) -> None:
        nbytes = self.plans[chunk.id].parts["gradient"].nbytes
        slots = self.store.versions.slots(chunk.id, "gradient")
        flat = self.device.zeros(nbytes * len(slots))
        for slot, tensor in zip(slots, flat.split(nbytes), strict=True):
            self._on_device[chunk.id, slot] = tensor

    def free(self, unit: ParamUnit) -> None:
        """Free the memory on the device of a unit's gradients of which nothing is there; it comes back when
        it is needed. No update may read it."""
        for chunk in unit.layout.trainable_chunks:
            if self.entries[chunk.id].dtype is None:
                for slot in self.store.versions.slots(chunk.id, "gradient"):
                    self._on_device.pop((chunk.id, slot), None)

    def open(self, chunk: Chunk) -> GradientIO:
        """Return the I/O of a chunk's gradient as it is; waits for a lease."""
        return self._io(chunk, None, self._leases(self._needed(chunk), self.plans[chunk.id]))

    def take(self, chunk: Chunk, leaving: Leaving, *, alone: bool) -> GradientIO | None:
        """Return the I/O of a chunk that gets what `leaving` has for it, which is on its way then. All leases
        that this takes are there, or None is returned; `alone`: no other I/O is open, so wait for them."""
        plan = self.plans[chunk.id]
        count = self._needed(chunk, leaving)
        leases = self._leases(count, plan) if alone else self._try_leases(count, plan)
        return None if leases is None else self._io(chunk, leaving, leases)

    def _io(self, chunk: Chunk, leaving: Leaving | None, leases: Sequence[Lease]) -> GradientIO:
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

    def widens(self, chunk: Chunk, leaving: Leaving) -> bool:
        """Return whether what arrives is added to a chunk that is in the compute dtype: the sum is fp32. Or
        is fp32 itself."""
        dtype, arrivals = self.entries[chunk.id].dtype, leaving.arrivals
        here = [arrivals[s.param] for s in chunk.segments if s.param in arrivals]
        wide = any(leaving.is_wide or not arrival.fresh for arrival in here)
        return dtype is not None and dtype is not torch.float32 and wide

    def _needed(self, chunk: Chunk, leaving: Leaving | None = None) -> int:
        """Return how many leases the I/O of a chunk takes: one for its place where that is on NVMe, and one
        for what comes from the device, unless that is the chunk's gradient as it is kept."""
        count = 1 if self.plans[chunk.id].gradient_tier is Tier.NVME else 0
        if leaving is None or not self.crosses(chunk, leaving.arrivals):
            return count
        assert leaving.buffer is not None
        kept = torch.float32 if leaving.is_wide else chunk.dtype
        there = self.entries[chunk.id].dtype is not None
        return count + (there or leaving.buffer.chunk(chunk).dtype is not kept)

    def on_device(self, chunk: Chunk, version: Version | Slot = Version.FRONT) -> torch.Tensor:
        """Return the bytes of a gradient that is placed on the device."""
        slot = self.store.versions.slot(chunk.id, "gradient", version)
        if (chunk.id, slot) not in self._on_device:
            self._place(chunk)
        return self._on_device[chunk.id, slot]

    @property
    def are_summed(self) -> bool:
        """Whether the squares of all are known."""
        return all(entry.is_summed for entry in self.entries.values())

    def sum_squares(self) -> None:
        """Sum the squares that are not known, those of the device, all in one pass: the host waits for that
        once. Where there is no memory for it nothing has changed."""
        parts = {}
        for number, entry in self.entries.items():
            if not entry.is_summed:
                assert entry.dtype is not None
                chunk = self._chunks[number]
                flat = self.on_device(chunk)[: chunk.numel * entry.dtype.itemsize].view(entry.dtype)
                parts[number] = flat, self.pieces[number]
        found = adam_reference.sums_of_squares_reference(list(parts.values()))
        for number, squares in zip(parts, found, strict=True):
            self.entries[number].squares[:] = squares
            self.entries[number].is_summed = True

    def _leases(self, count: int, plan: ChunkParts) -> list[Lease]:
        while (leases := self._try_leases(count, plan)) is None:
            if not self.writes:
                return [self._pool.lease("gradient", plan.gradient_lease) for _ in range(count)]
            self.finish_write()
        return leases

    def _try_leases(self, count: int, plan: ChunkParts) -> list[Lease] | None:
        while self.writes and self.writes[0][0].done:
            self.finish_write()
        leases: list[Lease] = []
        while len(leases) < count:
            lease = self._pool.try_lease("gradient", plan.gradient_lease)
            if lease is None:
                for taken in leases:
                    taken.release()
                return None
            leases.append(lease)
        return leases

    def finish_write(self) -> None:
        """Wait for the oldest write."""
        transfer, lease = self.writes.popleft()
        try:
            transfer.wait()
        finally:
            lease.release()

    def finish_writes(self) -> None:
        """Wait for every write."""
        while self.writes:
            self.finish_write()


class GradientIO:
    """One chunk's gradient where the CPU (or the device) can work on it, until it is closed. What arrived for
    it is there in a `with` block, and no work of the device from before still reads what it replaces."""

    def __init__(
        self, owner: ChunkGradients, chunk: Chunk, leaving: Leaving | None, leases: Sequence[Lease]
    ) -> None:
        self.chunk = chunk
        self._owner = owner
        self._leaving = leaving
        self._entry = owner.entries[chunk.id]
        self._plan = plan = owner.plans[chunk.id]
        # Where it is: the slots flip when the next one comes.
        self._slot = owner.store.versions.slot(chunk.id, "gradient")
        on_nvme = plan.gradient_tier is Tier.NVME
        self._lease = leases[0] if on_nvme else None
        self._second = leases[-1] if len(leases) > on_nvme else None
        self._source = leaving.buffer if leaving is not None else None
        self._crossed: torch.Tensor | None = None  # what arrived, in the second lease
        self._reading: Transfer | Reads | None = None
        self._copied: Event | None = None
        if self._lease is not None:
            if self._entry.dtype is not None:
                self._reading = owner.store.read(chunk.id, "gradient", self._lease, version=self._slot)
            self._bytes = self._lease.tensor(torch.uint8, 0, plan.gradient_lease)
        elif plan.gradient_tier is Tier.DEVICE:
            owner.device.wait_on_device(leaving.after if leaving is not None else None)
            self._bytes = owner.on_device(chunk, self._slot)
        if leaving is not None and owner.crosses(chunk, leaving.arrivals):
            self._cross(leaving)

    def _cross(self, leaving: Leaving) -> None:
        """Start copying what arrived, as it is: to its place, or where that holds something already, or is to
        hold it rounded, into a lease."""
        assert self._source is not None
        source, self._source = self._source.chunk(self.chunk), None
        if self._second is None:
            target = self.buffer(source.dtype)
        else:
            target = self._crossed = self._second.tensor(source.dtype, 0, self.chunk.numel)
        device = self._owner.device
        after = leaving.after if leaving.copied is None else None  # what follows comes after it, too
        self._copied = leaving.copied = device.d2h(target, source, after, chunk=self.chunk.id)

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
            for lease in (self._lease, self._second):
                if lease is not None:
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
        if self._plan.gradient_tier is Tier.HOST:  # the store keeps such views
            store, numel = self._owner.store, self.chunk.numel
            return store.view(self.chunk.id, "gradient", dtype, numel=numel, version=self._slot)
        return self._bytes[: self.chunk.numel * dtype.itemsize].view(dtype)

    def widen(self) -> None:
        """Turn the compute dtype into fp32, in place: the later half of what is left, whose place in fp32 is
        behind all of that, again and again."""
        narrow, wide = self.buffer(self.chunk.dtype), self.buffer(torch.float32)
        left = narrow.numel()
        while left > 1:
            first = (left + 1) // 2
            self.put(wide[first:left], narrow[first:left])
            left = first
        wide[:left].copy_(narrow[:left].clone())
        self._entry.dtype = torch.float32

    def replace(self, target: torch.Tensor) -> None:
        """Put the gradients that arrived into `target`, the whole chunk, with zeros elsewhere."""
        if self._crossed is not None:
            self.put(target, self._crossed)
        end = 0
        for begin, source in self._source.pieces(self.chunk) if self._source is not None else ():
            if begin > end:
                target[end:begin].zero_()
            end = begin + source.numel()
            self.put(target[begin:end], source)
        if self._source is not None and end < target.numel():
            target[end:].zero_()

    def arrived(self, segment: Segment) -> torch.Tensor:
        """Return what arrived for a segment, where something was there already: rounded to the compute dtype
        if it replaces that."""
        assert self._leaving is not None
        if self._source is not None:
            values = self._source.piece(self.chunk, segment)
        else:
            assert self._crossed is not None
            values = self._crossed[segment.start : segment.start + segment.numel]
        is_rounded = self._leaving.arrivals[segment.param].fresh and not self._leaving.is_wide
        return values.to(self.chunk.dtype) if is_rounded else values

    def put(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` over `part`."""
        if self._owner.by_device(self.chunk):
            part.copy_(source)
            return
        begin = now()
        cpu_adam.convert(part, source)
        log = self._owner.recorder.log
        if log is not None and self._copied is None:  # this is what d2h is where nothing crosses
            log.add("d2h", begin, now(), chunk=self.chunk.id, nbytes=source.nbytes)

    def add(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Add `source` to `part` (fp32)."""
        if self._owner.by_device(self.chunk):
            part.add_(source.float())
        else:
            cpu_adam.accumulate(part, source)

    def store(self, target: torch.Tensor) -> None:
        """Sum the squares, or have them summed when somebody asks, and send the chunk to its tier."""
        owner, entry = self._owner, self._entry
        entry.is_summed = not owner.by_device(self.chunk)
        if entry.is_summed:
            entry.squares[:] = cpu_adam.sum_of_squares(target, owner.pieces[self.chunk.id])
        if self._lease is not None:
            nbytes = ceil_to(target.nbytes, 4096)
            transfer = owner.store.write(
                self.chunk.id, "gradient", self._lease, nbytes=nbytes, version=self._slot
            )
            owner.writes.append((transfer, self._lease))
            self._lease = None
