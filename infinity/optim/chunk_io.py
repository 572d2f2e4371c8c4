"""One chunk's state, gradient and compute parameters, ready for the update, on any tiers.

A `ChunkIO` brings the parts of a chunk that are on NVMe into one lease (all that it needs or nothing), and
the parts on a GPU that the CPU works on. It gives access to the other parts in place, and writes changes
back. What is the same in each update of a chunk is in its `Place`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.core.sizes import Tier, ceil_to
from infinity.grads.gradients import Gradients
from infinity.hardware import cpu_adam, halves
from infinity.hardware.aio import Priority
from infinity.hardware.device import Device, Event
from infinity.params.publish import Publisher
from infinity.params.unit import ParamUnit
from infinity.planning.matrices import rounds_of
from infinity.planning.partition import Chunk
from infinity.planning.parts import ChunkParts, Moment
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import FIRST, Reads, Slot, Store, Transfer, Version

from .pieces import put_together


class Place:
    """Where the parts of a chunk are, and what the optimizer keeps of it; all chunks that are alike share it.

    Attributes:
        lease_nbytes: bytes of pool that its I/O takes.
        on_device: the device updates it, and not the CPU: its state is on a device of its own.
        has_two: there are two versions of its compute parameters.
        copy_is_master, begins_with_copy: see `ChunkParts`.
        kinds: the names of its moments.
        rounds: its moments are rounded at random.
        leased: where a part begins in the lease, if it is worked on there.
    """

    __slots__ = (
        *("begins_with_copy", "copy_is_master", "copy_tier", "gradient_tier", "has_two", "is_split", "kinds"),
        *("kept", "lease_nbytes", "leased", "on_device", "plan", "rounds", "state_tier"),
    )

    def __init__(self, plan: ChunkParts, numel: int, device: Device) -> None:
        self.plan = plan
        self.lease_nbytes = ceil_to(plan.update_lease, 4096)
        self.copy_tier, self.state_tier = plan.copy_tier, plan.state_tier
        self.gradient_tier = plan.gradient_tier
        self.on_device = plan.state_tier is Tier.DEVICE and device.staged
        self.has_two = len(plan.copy.tiers) > 1
        self.copy_is_master, self.is_split = plan.copy_is_master, plan.is_split
        self.begins_with_copy = plan.begins_with_copy
        self.kinds = tuple(moment.name for moment in plan.moments)
        self.rounds = any(moment.dtype is not torch.float32 for moment in plan.moments)
        parts = plan.parts.items()
        self.leased = {name: part.lease_offset for name, part in parts if part.lease_offset is not None}
        #: Dtype and number of the values of each section of the state.
        self.kept = [(moment.dtype, moment.count(numel)) for moment in plan.moments]
        if not plan.copy_is_master:
            self.kept.insert(0, (torch.int16 if plan.is_split else torch.float32, numel))


class Tiers:
    """Where the parts of chunks are: the store, and the units for what is placed on the device."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        gradients: Gradients,
        publisher: Publisher,
    ) -> None:
        self.publisher = publisher
        self.units = units
        self.plans = plans
        self.rounds = rounds_of([unit.layout for unit in units])
        #: All that the state of any chunk keeps beside the master.
        self.moments: tuple[Moment, ...] = tuple(dict.fromkeys(m for plan in plans for m in plan.moments))
        self.store = store
        self.pool = pool
        self.device = device
        self.gradients = gradients
        numels = {chunk.id: chunk.numel for unit in units for chunk in unit.layout.chunks}
        alike: dict[int, Place] = {}
        for number, plan in enumerate(plans):
            if id(plan) not in alike:
                alike[id(plan)] = Place(plan, numels[number], device)
        self.places = [alike[id(plan)] for plan in plans]
        self.uses_leases = any(place.lease_nbytes for place in self.places)
        #: The sections of states where they lie, by chunk; and in leases, where nearly all chunks are alike.
        self.sections: dict[int | tuple[int, int], tuple[torch.Tensor, ...]] = {}
        #: Other parts in leases, by address, dtype and length.
        self.leased: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        #: Of split masters, the last copies of upper halves to the device.
        self.copied: dict[int, Event] = {}
        for index, plan in enumerate(plans):
            if plan.state_tier is Tier.DEVICE:
                [slot] = store.versions.slots(index, "state")
                store.place(index, "state", slot, device.zeros(plan.parts["state"].nbytes))

    def drop_memory(self) -> None:
        """Hold no memory any more: the engine is closed."""
        self.copied.clear()
        self.sections.clear()
        self.leased.clear()


class ChunkIO:
    """One chunk at work: `read`, then `wait`, then work on the tensors, then `write`, then `close`.

    The master is fp32, `copy` has the chunk's compute dtype, the moments and `grad` the dtype in which they
    are kept; all flat, of `chunk.numel`, but the scales of moments in 8 bits. `copy` has the values that
    count, and may be changed in part; an update puts all of a new one into what `make_copy` returns.

    Attributes:
        version: of the copy, which is read and written.
        gradient: the version of it that is used.
    """

    def __init__(self, tiers: Tiers, chunk: Chunk) -> None:
        self.chunk = chunk
        self.place = place = tiers.places[chunk.id]
        self.on_device = place.on_device
        self.lease: Lease | None = None  # until `close`
        self.version: Version | Slot = Version.NEWEST if place.has_two else FIRST
        self.copied: Event | None = None  # when what was made for the device is there
        self._tiers = tiers
        self._transfers: list[Transfer | Reads] = []
        self._arriving: list[Event] = []
        self._begun = False
        self._made: torch.Tensor | None = None  # a copy in the lease, for the device
        self._joined: torch.Tensor | None = None  # a split master, whole
        self._priority = Priority.NORMAL
        self.gradient: Slot | Version = Version.FRONT

    def delay(self) -> None:
        """Make `copy` and `write` use the back, which is not in use: [Note: two versions]. It must not be
        newer than the front."""
        self.version = Version.BACK
        self._priority = Priority.BACKGROUND  # forward and backward wait for their reads, not for these

    def read_state(self, *, early: bool = False, state: bool = True, copy: bool = False) -> None:
        """Start reading the state from NVMe, once. The copy is read where it is the master, or a half of it,
        or when asked for. `early`: nobody waits for it yet."""
        place = self.place
        if self._begun or self.lease is None:
            return
        self._begun = True
        priority = Priority.BACKGROUND if early else self._priority
        if state and place.state_tier is Tier.NVME:
            self._read("state", Version.FRONT, priority)
        if place.copy_tier is Tier.NVME and (copy or place.begins_with_copy):
            self._read("copy", Version.NEWEST if self.version is Version.BACK else self.version, priority)

    def _read(self, part: str, version: Slot | Version, priority: Priority) -> None:
        assert self.lease is not None
        store, begin = self._tiers.store, self.place.leased[part]
        self._transfers.append(
            store.read(self.chunk.id, part, self.lease, begin, version=version, priority=priority)
        )

    def read(
        self,
        *,
        gradient: torch.dtype | None = None,
        state: bool = True,
        copy: bool = False,
        changes: bool = False,
    ) -> None:
        """Start reading what is not on its way yet; `gradient` is the dtype of that, None: do not. `changes`:
        an update is going to change the master, and begins with a half of it that is on a device of its
        own. Nothing without a lease needs it."""
        if self.lease is None:
            return
        self.read_state(state=state, copy=copy)
        place, device, number = self.place, self._tiers.device, self.chunk.id
        if changes and place.is_split and place.copy_tier is Tier.DEVICE:
            self._made = self._leased("copy", self.chunk.dtype)
            if self._made is not None:
                events = device.mark(), self._tiers.copied.get(number)
                self._arriving.append(device.d2h(self._made, self._device_copy, *events, chunk=number))
        if gradient is None or "gradient" not in place.leased:
            return
        if place.gradient_tier is Tier.NVME:
            self._read("gradient", self.gradient, self._priority)
        else:
            target = self.grad(gradient)
            source = self._tiers.gradients.chunks.view(self.chunk, gradient, self.gradient)
            # It stays where it is: nothing else gets its memory.
            self._arriving.append(device.d2h(target, source, device.mark(), chunk=number))

    def wait(self) -> None:
        """Block until what was read is here, checked."""
        while self._arriving:
            self._arriving[0].wait()
            self._arriving.pop(0)
        if self._transfers:
            transfers, self._transfers = self._transfers, []
            for transfer in transfers:
                transfer.wait()

    def wait_unread(self) -> None:
        """Block until no copy to the device reads the copy where it lies: it is about to change."""
        if self.version is Version.BACK:
            self._tiers.publisher.wait_published(self.chunk.id)
        place = self.place
        if place.copy_tier is Tier.HOST or (place.has_two and self._copy_tier() is Tier.HOST):
            self._tiers.units[self.chunk.unit].wait_read()

    def copy_master(self) -> None:
        """Give a back in host memory the values that its update begins with, where it is the master."""
        place, chunk, store = self.place, self.chunk, self._tiers.store
        if self.version is Version.BACK and place.copy_is_master and place.copy_tier is Tier.HOST:
            here, there = self.copy, store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel)
            cpu_adam.copy_bytes(here.data_ptr(), there.data_ptr(), here.nbytes)

    def _leased(self, part: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a part in the lease; None: it is worked on where it lies."""
        begin = self.place.leased.get(part)
        if self.lease is None or begin is None:
            return None
        known, numel = self._tiers.leased, self.chunk.numel
        key = self.lease.address + begin, dtype, numel
        if (tensor := known.get(key)) is None:
            with torch.inference_mode(False):
                tensor = known[key] = self.lease.tensor(dtype, begin, numel)
        return tensor

    def _copy_tier(self) -> Tier:
        """Where the version is that `copy` and `write` mean."""
        return self._tiers.store.tier(self.chunk.id, "copy", self.version)

    @property
    def copy(self) -> torch.Tensor:
        """The copy in the compute dtype: its values, after they were read if it is on NVMe."""
        chunk, tier = self.chunk, self._copy_tier() if self.place.has_two else self.place.copy_tier
        if tier is Tier.HOST:
            store = self._tiers.store
            return store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel, version=self.version)
        if tier is Tier.DEVICE:
            return self._device_copy
        if self.place.plan.place is not None and self.lease is not None:
            return put_together(chunk, self.place.plan.place, self.lease)
        leased = self._leased("copy", chunk.dtype)
        assert leased is not None
        return leased

    def make_copy(self) -> torch.Tensor:
        """Return where an update makes a copy, all of it. For a device with memory of its own that is the
        lease, which has no values from before but for those of a split master, and from which `write` takes
        the whole to the device."""
        if self._made is None and self.place.copy_tier is Tier.DEVICE and self.version is not Version.BACK:
            self._made = self._leased("copy", self.chunk.dtype)
        return self.copy if self._made is None else self._made

    @property
    def _device_copy(self) -> torch.Tensor:
        return self._tiers.units[self.chunk.unit].chunk_view(self.chunk)

    def sections(self) -> tuple[torch.Tensor, ...]:
        """Return the sections of the state, without what they are padded with: the master, or its lower
        halves, unless the copy is the master; then the moments."""
        place, known, lease = self.place, self._tiers.sections, self.lease
        begin = place.leased.get("state")
        key: int | tuple[int, int] = self.chunk.id
        if lease is not None and begin is not None:
            key = id(place.plan), lease.address
        if (sections := known.get(key)) is None:
            part = place.plan.parts["state"]
            with torch.inference_mode(False):
                if lease is not None and begin is not None:
                    state = lease.tensor(torch.uint8, begin, part.nbytes)
                else:
                    state = self._tiers.store.view(self.chunk.id, "state")
                cut = zip(state.split(part.sections), place.kept, strict=True)
                sections = known[key] = tuple(s.view(dtype)[:count] for s, (dtype, count) in cut)
        return sections

    @property
    def low(self) -> torch.Tensor | None:
        """The lower halves of a split master, in int16; None: it is whole."""
        return self.sections()[0] if self.place.is_split else None

    @property
    def master(self) -> torch.Tensor:
        """The fp32 weights. Those of a split master are put together, after its halves were read; `write`
        takes them apart again."""
        if not self.place.is_split:
            return self.copy if self.place.copy_is_master else self.sections()[0]
        if self._joined is None:
            low = self.sections()[0]
            self._joined = halves.join(
                self.copy.to(low.device), low, torch.empty(low.numel(), device=low.device)
            )
        return self._joined

    def _take_apart(self) -> None:
        """Make a split master what `master` is by now."""
        joined, self._joined, low = self._joined, None, self.low
        if joined is not None and low is not None:
            upper = torch.empty(low.numel(), dtype=self.chunk.dtype, device=low.device)
            halves.split(joined, upper, low)
            (self.copy if self._made is None else self._made).copy_(upper)

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        """The moments, in the order in which an optimizer has them; scales come behind all codes."""
        return self.sections()[not self.place.copy_is_master :]

    def grad(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the gradient, after `wait`, which is kept in `dtype`; None: it is zero."""
        chunk, version = self.chunk, self.gradient
        kind = dtype or chunk.dtype
        grad = self._leased("gradient", kind) if self.lease is not None else None
        if grad is None and self.place.gradient_tier is Tier.HOST:
            grad = self._tiers.store.view(chunk.id, "gradient", kind, numel=chunk.numel, version=version)
        elif grad is None:
            grad = self._tiers.gradients.chunks.view(chunk, kind, version)
        return grad if dtype is not None else grad.zero_()

    def made(self, version: Version | Slot, generation: int) -> None:
        """Record that a version of the compute parameters was written; there are two."""
        self._tiers.store.versions.made(self.chunk.id, "copy", version, generation)

    def write(self, *, state: bool, copy: bool, after: Event | None = None) -> None:
        """Start sending back what was not changed where it lies; `close` waits for it. `after`: what a copy
        to the device comes after; None: what the current stream has been given."""
        if self._joined is not None:
            self._take_apart()
        if self.lease is None:
            return
        place, number = self.place, self.chunk.id
        if state and place.state_tier is Tier.NVME:
            self._write("state", Version.FRONT)
        if copy and place.copy_tier is Tier.NVME:
            self._write("copy", self.version)
        if copy and self._made is not None:
            device, target = self._tiers.device, self._device_copy
            after = after or device.mark()
            self.copied = device.h2d(target, self._made, after, chunk=number)
            if place.is_split:
                self._tiers.copied[number] = self.copied

    def _write(self, part: str, version: Version | Slot) -> None:
        assert self.lease is not None
        store, begin = self._tiers.store, self.place.leased[part]
        self._transfers.append(
            store.write(self.chunk.id, part, self.lease, begin, version=version, priority=self._priority)
        )

    def close(self, *, wait: bool = True) -> bool:
        """Give the lease back when what was sent to NVMe is there; it is lent again when its copy to the
        device is done."""
        if not wait and self._transfers and not all(t.done for t in self._transfers):
            return False
        try:
            if self._transfers or self._arriving:
                self.wait()
        finally:
            if self.lease is not None:
                self.lease.release(self.copied)
                self.lease = None
        return True


def open_chunk(tiers: Tiers, chunk: Chunk, quota: str = "update", *, wait: bool) -> ChunkIO | None:
    """Return the I/O of a chunk with its lease, if it needs one; None: none is free. `wait`: until one is."""
    io = ChunkIO(tiers, chunk)  # first: where there is no memory for it, nobody would have the lease
    if not (nbytes := io.place.lease_nbytes):
        return io
    io.lease = (tiers.pool.lease if wait else tiers.pool.try_lease)(quota, nbytes)
    return io if io.lease is not None else None
