"""The gradient of each chunk on its tier: the bytes, their dtype, their squares.

Only one thread works on them at a time: the worker of `Gradients`, or the user's while that has nothing
to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from infinity.core.sizes import Tier, ceil_to
from infinity.core.spans import Recorder, now
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import Device, Event
from infinity.params.unit import ParamUnit
from infinity.planning.partition import Chunk
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Slot, Store, Transfer, Version


class ChunkGradient:
    """What is known of one chunk's gradient, which is in front. `dtype` None: its bytes mean nothing, and
    whatever is present is zero."""

    __slots__ = ("dtype", "present", "squares")

    def __init__(self, norm_blocks: int) -> None:
        self.dtype: torch.dtype | None = None
        self.present: set[int] = set()  # parameters (indices in the unit) that have arrived
        self.squares = np.zeros(norm_blocks)

    def clear(self) -> None:
        """Forget everything."""
        self.dtype = None
        self.present.clear()
        self.squares[:] = 0


class ChunkGradients:
    """What is known of every chunk's gradient, where its bytes are, and leases to work on them.

    `leases`: leases of the gradient quota.
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        *,
        leases: int,
        recorder: Recorder,
    ) -> None:
        self.entries: dict[int, ChunkGradient] = {}
        self.plans = plans
        self.store = store
        self.device = device
        self.leases = leases
        self.recorder = recorder
        self.writes: deque[tuple[Transfer, Lease]] = deque()
        self._pool = pool
        self._on_device: dict[tuple[int, Slot], torch.Tensor] = {}  # by chunk
        for unit in units:
            for chunk in unit.layout.trainable_chunks:
                self.entries[chunk.id] = ChunkGradient(chunk.norm_blocks)
                if plans[chunk.id].gradient_tier is Tier.DEVICE:
                    nbytes = plans[chunk.id].parts["gradient"].nbytes
                    slots = store.versions.slots(chunk.id, "gradient")
                    flat = device.zeros(nbytes * len(slots))
                    for slot, tensor in zip(slots, flat.split(nbytes), strict=True):
                        self._on_device[chunk.id, slot] = tensor

    def open(self, chunk: Chunk, after: Event | None = None) -> GradientIO:
        """Return the I/O of a chunk's gradient; see there."""
        return GradientIO(self, chunk, after)

    def on_device(self, chunk: Chunk, version: Version | Slot = Version.FRONT) -> torch.Tensor:
        """Return the bytes of a gradient that is placed on the device."""
        return self._on_device[chunk.id, self.store.versions.slot(chunk.id, "gradient", version)]

    def lease(self, nbytes: int) -> Lease:
        """Return a lease of the gradient quota; finishes writes until one is free."""
        while True:
            lease = self._pool.try_lease("gradient", nbytes)
            if lease is not None:
                return lease
            if not self.writes:
                return self._pool.lease("gradient", nbytes)
            self.finish_write()

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
    it is there `after`, and nothing of the device's work before that still reads what it replaces."""

    def __init__(self, owner: ChunkGradients, chunk: Chunk, after: Event | None) -> None:
        self._owner = owner
        self._after = after
        self._chunk = chunk
        self._entry = owner.entries[chunk.id]
        self._plan = owner.plans[chunk.id]
        # Whether the device works on it, and not the CPU: it is on a device of its own.
        self._on_device = self._plan.gradient_tier is Tier.DEVICE and owner.device.staged
        self._lease: Lease | None = None

    def __enter__(self) -> GradientIO:
        owner, chunk, plan = self._owner, self._chunk, self._plan
        if plan.gradient_tier is Tier.NVME:
            # It may need a second lease (widen, add): two must be free, or none is taken.
            while len(owner.writes) > owner.leases - 2:
                owner.finish_write()
            self._lease = owner.lease(plan.gradient_lease)
            if self._entry.dtype is not None:
                owner.store.read(chunk.id, "gradient", self._lease).wait()
            self._bytes = self._lease.tensor(torch.uint8, 0, plan.gradient_lease)
        elif plan.gradient_tier is Tier.HOST:
            self._bytes = owner.store.view(chunk.id, "gradient")
        else:
            owner.device.wait_on_device(self._after)
            self._bytes = owner.on_device(chunk)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lease is not None:
            self._lease.release()

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the chunk's gradient as elements of `dtype`."""
        return self._bytes[: self._chunk.numel * dtype.itemsize].view(dtype)

    def widen(self) -> None:
        """Turn the compute dtype into fp32, in place, by way of a lease."""
        narrow = self.buffer(self._chunk.dtype)
        if not self._on_device:
            with self._owner.lease(narrow.nbytes) as lease:
                held = lease.tensor(narrow.dtype, 0, narrow.numel())
                cpu_adam.copy_bytes(held.data_ptr(), narrow.data_ptr(), narrow.nbytes)
                cpu_adam.convert(self.buffer(torch.float32), held)
        else:
            self.buffer(torch.float32).copy_(narrow.clone())
        self._entry.dtype = torch.float32

    def put(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` over `part`."""
        if not self._owner.device.staged:
            begin = now()
            cpu_adam.convert(part, source)
            if (log := self._owner.recorder.log) is not None:  # this is what d2h is on a CPU device
                log.add("d2h", begin, now(), chunk=self._chunk.id, nbytes=source.nbytes)
        elif self._on_device:
            part.copy_(source)
        elif part.dtype is source.dtype:
            self._owner.device.d2h(part, source, self._after, chunk=self._chunk.id).wait()
        else:
            self._staged(part, source, cpu_adam.convert)

    def add(self, part: torch.Tensor, source: torch.Tensor) -> None:
        """Add `source` to `part` (fp32)."""
        if not self._owner.device.staged:
            cpu_adam.accumulate(part, source)
        elif self._on_device:
            part.add_(source.float())
        else:
            self._staged(part, source, cpu_adam.accumulate)

    def _staged(
        self, part: torch.Tensor, source: torch.Tensor, then: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> None:
        with self._owner.lease(source.nbytes) as lease:
            host = lease.tensor(source.dtype, 0, source.numel())
            self._owner.device.d2h(host, source, self._after, chunk=self._chunk.id).wait()
            then(part, host)

    def store(self, target: torch.Tensor) -> None:
        """Sum the squares and send the chunk to its tier."""
        owner, entry = self._owner, self._entry
        if not self._on_device:
            entry.squares[:] = cpu_adam.sum_of_squares(target)
        else:
            entry.squares[:] = adam_reference.sum_of_squares_reference(target)
        if self._lease is not None:
            nbytes = ceil_to(target.nbytes, 4096)
            transfer = owner.store.write(self._chunk.id, "gradient", self._lease, nbytes=nbytes)
            owner.writes.append((transfer, self._lease))
            self._lease = None
