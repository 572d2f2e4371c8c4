"""One chunk's state, gradient and compute parameters, ready for the update, on any tiers.

A `ChunkIO` brings the parts of a chunk that are on NVMe into one lease (all that it needs or nothing), and
the parts on a GPU that the CPU works on. It gives access to the other parts in place, and writes changes
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from infinity.storage.store import Reads, Slot, Store, Transfer, Version

from .pieces import put_together


class Tiers:
    """Where the parts of chunks are: the store, and tensors for what is placed on the device."""

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
        self.sections: dict[int, tuple[torch.Tensor, ...]] = {}  # of states that are worked on where they lie
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

    def lease_nbytes(self, chunk: Chunk) -> int:
        """Return the bytes of pool that the I/O of `chunk` takes."""
        return self.plans[chunk.id].update_lease


class ChunkIO:
    """One chunk at work: `read`, then `wait`, then work on the tensors, then `write`, then `close`.

    The master is fp32, `copy` has the chunk's compute dtype, the moments and `grad` the dtype in which they
    are kept; all flat, of `chunk.numel`, but the scales of moments in 8 bits. `copy` has the values that
    count, and may be changed in part; an update puts all of a new one into what `make_copy` returns.
    """

    def __init__(self, tiers: Tiers, chunk: Chunk) -> None:
        self.chunk = chunk
        self.lease: Lease | None = None  # until `close`
        self._tiers = tiers
        self._plan = tiers.plans[chunk.id]
        self._transfers: list[Transfer | Reads] = []
        self._arriving: list[Event] = []
        self._event: Event | None = None  # of the copy to the device
        self._begun = False
        #: The version of the copy that is read and written.
        self.version = Version.NEWEST
        self._made: torch.Tensor | None = None  # a copy in the lease, for the device
        self._joined: torch.Tensor | None = None  # a split master, whole
        self._priority = Priority.NORMAL
        self._gradient: Slot | Version = Version.FRONT

    def read_state(self, *, early: bool = False, state: bool = True, copy: bool = False) -> None:
        """Start reading the state from NVMe, once. The copy is read where it is the master, or a half of it,
        or when asked for. `early`: nobody waits for it yet."""
        priority = Priority.BACKGROUND if early else self._priority
        plan, store, lease = self._plan, self._tiers.store, self.lease
        if self._begun or lease is None:
            return
        self._begun = True
        names = {"state": Version.FRONT} if state and plan.state_tier is Tier.NVME else {}
        if plan.copy_tier is Tier.NVME and (copy or plan.begins_with_copy):
            names["copy"] = Version.NEWEST if self._delayed else self.version
        for name, version in names.items():
            offset = self._offset(name)
            self._transfers.append(
                store.read(self.chunk.id, name, lease, offset, version=version, priority=priority)
            )

    def delay(self) -> None:
        """Make `copy` and `write` use the back, which is not in use: [Note: two versions]. It must not be
        newer than the front."""
        self.version = Version.BACK
        self._priority = Priority.BACKGROUND  # forward and backward wait for their reads, not for these

    def read(
        self,
        *,
        gradient: torch.dtype | None = None,
        version: Slot | Version = Version.FRONT,
        state: bool = True,
        copy: bool = False,
        changes: bool = False,
    ) -> None:
        """Start reading what is not on its way yet; `gradient` is its dtype, None: do not, and `version`
        says which. `changes`: an update is going to change the master, and begins with a half of it that is
        on a device of its own."""
        self.read_state(state=state, copy=copy)
        self._gradient = version
        lease = self.lease
        if changes and self._plan.is_split and self._plan.copy_tier is Tier.DEVICE and lease is not None:
            self._made = self._leased("copy", self.chunk.dtype, self.chunk.numel)
            if self._made is not None:
                device, number = self._tiers.device, self.chunk.id
                events = device.mark(), self._tiers.copied.get(number)
                self._arriving.append(device.d2h(self._made, self._device_copy, *events, chunk=number))
        if gradient is None or lease is None or self._plan.parts["gradient"].lease_offset is None:
            return
        if self._plan.gradient_tier is Tier.NVME:
            store, offset = self._tiers.store, self._offset("gradient")
            self._transfers.append(
                store.read(self.chunk.id, "gradient", lease, offset, version=version, priority=self._priority)
            )
        else:
            device, source = self._tiers.device, self._gradient_here(gradient)
            target = lease.tensor(gradient, self._offset("gradient"), self.chunk.numel)
            # It stays where it is: nothing else gets its memory.
            self._arriving.append(device.d2h(target, source, device.mark(), chunk=self.chunk.id))

    def wait(self) -> None:
        """Block until what was read is here, checked."""
        while self._arriving:
            self._arriving[0].wait()
            self._arriving.pop(0)
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            transfer.wait()

    def wait_unread(self) -> None:
        """Block until no copy to the device reads the copy where it lies: it is about to change."""
        if self._delayed:
            self._tiers.publisher.wait_published(self.chunk.id)
        if self._tiers.store.tier(self.chunk.id, "copy", self.version) is Tier.HOST:
            self._tiers.units[self.chunk.unit].wait_read()

    def copy_master(self) -> None:
        """Give a back in host memory the values that its update begins with, where it is the master."""
        plan, chunk, store = self._plan, self.chunk, self._tiers.store
        if self._delayed and plan.copy_is_master and plan.copy_tier is Tier.HOST:
            here, there = self.copy, store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel)
            cpu_adam.copy_bytes(here.data_ptr(), there.data_ptr(), here.nbytes)

    def _offset(self, part: str) -> int:
        """Return where a part that is worked on in the lease begins in it."""
        offset = self._plan.parts[part].lease_offset
        assert offset is not None
        return offset

    def _leased(self, part: str, dtype: torch.dtype, numel: int) -> torch.Tensor | None:
        """Return a part in the lease; None: it is worked on where it lies."""
        if self.lease is None or self._plan.parts[part].lease_offset is None:
            return None
        return self.lease.tensor(dtype, self._offset(part), numel)

    @property
    def _delayed(self) -> bool:
        return self.version is Version.BACK

    @property
    def copy(self) -> torch.Tensor:
        """The copy in the compute dtype: its values, after they were read if it is on NVMe."""
        chunk, store = self.chunk, self._tiers.store
        tier = store.tier(chunk.id, "copy", self.version)
        if tier is Tier.HOST:
            return store.view(chunk.id, "copy", chunk.dtype, numel=chunk.numel, version=self.version)
        if tier is Tier.DEVICE:
            return self._device_copy
        if self._plan.place is not None and self.lease is not None:
            return put_together(chunk, self._plan.place, self.lease)
        leased = self._leased("copy", chunk.dtype, chunk.numel)
        assert leased is not None
        return leased

    def make_copy(self) -> torch.Tensor:
        """Return where an update makes a copy, all of it. For a device with memory of its own that is the
        lease, which has no values from before but for those of a split master, and from which `write` takes
        the whole to the device."""
        if self._plan.copy_tier is Tier.DEVICE and not self._delayed and self._made is None:
            self._made = self._leased("copy", self.chunk.dtype, self.chunk.numel)
        return self.copy if self._made is None else self._made

    @property
    def _device_copy(self) -> torch.Tensor:
        return self._tiers.units[self.chunk.unit].chunk_view(self.chunk)

    def _sections(self) -> tuple[torch.Tensor, ...]:
        plan, chunk, tiers = self._plan, self.chunk, self._tiers
        flat = self._leased("state", torch.uint8, plan.parts["state"].nbytes)
        if flat is not None:
            return self._cut(flat)
        if chunk.id not in tiers.sections:
            flat = tiers.store.view(chunk.id, "state")
            with torch.inference_mode(False):
                tiers.sections[chunk.id] = self._cut(flat)
        return tiers.sections[chunk.id]

    def _cut(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sections of a state, without what they are padded with."""
        numel = self.chunk.numel
        kept = [(moment.dtype, moment.count(numel)) for moment in self._plan.moments]
        if not self._plan.copy_is_master:
            kept.insert(0, (torch.int16 if self._plan.is_split else torch.float32, numel))
        sections = state.split(self._plan.parts["state"].sections)
        return tuple(s.view(dtype)[:count] for s, (dtype, count) in zip(sections, kept, strict=True))

    @property
    def copy_is_master(self) -> bool:
        """See [Note: the copy is the master]."""
        return self._plan.copy_is_master

    @property
    def begins_with_copy(self) -> bool:
        """See `ChunkParts.begins_with_copy`."""
        return self._plan.begins_with_copy

    @property
    def low(self) -> torch.Tensor | None:
        """The lower halves of a split master, in int16; None: it is whole."""
        return self._sections()[0] if self._plan.is_split else None

    @property
    def master(self) -> torch.Tensor:
        """The fp32 weights. Those of a split master are put together, after its halves were read; `write`
        takes them apart again."""
        if self.low is None:
            return self.read_master()
        if self._joined is None:
            self._joined = self.read_master()
        return self._joined

    def read_master(self) -> torch.Tensor:
        """Return the fp32 weights, to be read: `write` does not take them apart."""
        if (low := self.low) is None:
            return self.copy if self._plan.copy_is_master else self._sections()[0]
        return halves.join(self.copy.to(low.device), low, torch.empty(low.numel(), device=low.device))

    def _take_apart(self) -> None:
        """Make a split master what `master` is by now."""
        joined, self._joined, low = self._joined, None, self.low
        if joined is not None and low is not None:
            upper = torch.empty(low.numel(), dtype=self.chunk.dtype, device=low.device)
            halves.split(joined, upper, low)
            (self.copy if self._made is None else self._made).copy_(upper)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of `moments`."""
        return tuple(moment.name for moment in self._plan.moments)

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        """The moments, in the order in which an optimizer has them; scales come behind all codes."""
        return self._sections() if self._plan.copy_is_master else self._sections()[1:]

    @property
    def copy_lease(self) -> tuple[Lease, int] | None:
        """The lease and the byte offset of a copy that goes to NVMe; None: it is elsewhere."""
        if self._plan.copy_tier is Tier.NVME and self.lease is not None:
            return self.lease, self._offset("copy")
        return None

    @property
    def on_device(self) -> bool:
        """Whether the device updates the chunk, and not the CPU: its state is on a device of its own."""
        return self._plan.state_tier is Tier.DEVICE and self._tiers.device.staged

    def grad(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the gradient, after `wait`, which is kept in `dtype`; None: it is zero."""
        kind = dtype or self.chunk.dtype
        grad = self._leased("gradient", kind, self.chunk.numel)
        if grad is None:
            grad = self._gradient_here(kind)
        return grad if dtype is not None else grad.zero_()

    def _gradient_here(self, dtype: torch.dtype) -> torch.Tensor:
        return self._tiers.gradients.chunks.view(self.chunk, dtype, self._gradient)

    def made(self, version: Version, generation: int) -> None:
        """Record that a version of the compute parameters was written, in place of an update."""
        self._tiers.store.versions.made(self.chunk.id, "copy", version, generation)

    def write(self, *, state: bool, copy: bool, after: Event | None = None) -> None:
        """Start sending back what was not changed where it lies; `close` waits for it. `after`: what a copy
        to the device comes after; None: what the current stream has been given."""
        plan, store, lease = self._plan, self._tiers.store, self.lease
        self._take_apart()
        if lease is not None:
            parts = {"state": Version.FRONT} if state and plan.state_tier is Tier.NVME else {}
            if copy and plan.copy_tier is Tier.NVME:
                parts["copy"] = self.version
            for name, version in parts.items():
                offset = self._offset(name)
                self._transfers.append(
                    store.write(self.chunk.id, name, lease, offset, version=version, priority=self._priority)
                )
            if copy and self._made is not None:
                device, target = self._tiers.device, self._device_copy
                after = after or device.mark()
                self._event = device.h2d(target, self._made, after, chunk=self.chunk.id)
                if plan.is_split:
                    self._tiers.copied[self.chunk.id] = self._event

    @property
    def copied(self) -> Event | None:
        """When what the update made for the device is there; None: all of it went elsewhere."""
        return self._event

    def done(self) -> bool:
        """Return whether `close` would not wait."""
        return all(t.done for t in self._transfers)

    def close(self) -> None:
        """Wait for what was sent to NVMe, and give the lease back, which is lent again when its copy to the
        device is done."""
        try:
            self.wait()
        finally:
            if self.lease is not None:
                self.lease.release(self._event)
                self.lease = None


def try_open_chunk(tiers: Tiers, chunk: Chunk, quota: str = "update") -> ChunkIO | None:
    """Return the I/O of a chunk with its lease, if it needs none or one is free."""
    return _open(tiers, chunk, lambda nbytes: tiers.pool.try_lease(quota, nbytes))


def open_chunk(tiers: Tiers, chunk: Chunk, quota: str = "update") -> ChunkIO:
    """Return the I/O of a chunk with its lease; blocks until one is free."""
    io = _open(tiers, chunk, lambda nbytes: tiers.pool.lease(quota, nbytes))
    assert io is not None
    return io


def _open(tiers: Tiers, chunk: Chunk, take: Callable[[int], Lease | None]) -> ChunkIO | None:
    io = ChunkIO(tiers, chunk)  # first: where there is no memory for it, nobody would have the lease
    if nbytes := ceil_to(tiers.lease_nbytes(chunk), 4096):
        io.lease = take(nbytes)
    return None if nbytes and io.lease is None else io
