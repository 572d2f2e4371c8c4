"""Gradients on their way from the backward to the update.

A gradient leaves the device once, in the compute dtype, when its unit's backward ends; what
arrives later (another backward, a shared layer, reentrant recomputation) is added in fp32. The
work is done chunk by chunk on one worker thread, so the backward waits for it only when it is a
whole unit ahead.

[Note: norms] A norm is a double sum over fixed spans of 65,536 elements, each span summed as a
halving tree, spans in index order. The spans are summed while a gradient is at hand; they do
not depend on the tier, on the size of a chunk or on the instruction set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infinity.core.sizes import Tier, ceil_to
from infinity.core.spans import Recorder, now
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import Device, Event, HostStream, Task
from infinity.hardware.shelter import Shelter, sheltered
from infinity.planning.partition import GRADIENT_PARTS, Chunk, ChunkPlan, Segment
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Store, Transfer

from .param import ShardedParam
from .pending import Pending
from .sharded_grad import ShardedGrad
from .unit import ParamUnit


class _Arrival(NamedTuple):
    grad: torch.Tensor  # flat, on the device, in the compute dtype
    fresh: bool  # replaces what is there
    factor: float  # what is there is to be multiplied by this first


class ChunkGradient:
    """What is known of one chunk's gradient. `dtype` None: its bytes mean nothing (zeros)."""

    __slots__ = ("dtype", "present", "slot", "spans")

    def __init__(self, spans: int) -> None:
        self.dtype: torch.dtype | None = None
        self.present: set[int] = set()  # parameters (indices in the unit) that have arrived
        self.spans = np.zeros(spans)
        self.slot = 0  # the part that it is in, an index into GRADIENT_PARTS

    def clear(self) -> None:
        """Forget everything."""
        self.dtype = None
        self.present.clear()
        self.spans[:] = 0


class Gradients:
    """Takes gradients over, keeps them on their tier, answers norms."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkPlan],
        store: Store,
        pool: PinnedPool,
        device: Device,
        *,
        slots: int,
        pending: Pending,
        recorder: Recorder,
        shelter: Shelter,
    ) -> None:
        self.units = units
        self.shelter = shelter
        self._recorder = recorder
        self.entries: dict[int, ChunkGradient] = {}
        self._plans = plans
        self._store = store
        self._pool = pool
        self._device = device
        self._stream = HostStream("gradients")
        self._waiting: dict[int, dict[int, list[_Arrival]]] = {}  # unit → parameter → arrivals
        self._tasks: deque[Task] = deque()
        self._writes: deque[tuple[Transfer, Lease]] = deque()
        self._pending = pending
        self._slots = slots  # leases of the gradient quota
        self._lent: dict[int, int] = {}  # chunk → the slot that its update reads
        self._on_device: dict[int, torch.Tensor] = {}  # all slots, one after the other
        for unit in units:
            for chunk in unit.layout.trainable_chunks:
                self.entries[chunk.id] = ChunkGradient(chunk.spans)
                if plans[chunk.id].gradient_tier is Tier.DEVICE:
                    self._on_device[chunk.id] = torch.empty(
                        plans[chunk.id].gradient_nbytes * plans[chunk.id].gradient_slots,
                        dtype=torch.uint8,
                        device=device.torch_device,
                    )

    # -- the user's thread ------------------------------------------------------------------

    def deliver(self, sharded: ShardedParam, grad: torch.Tensor, *, fresh: bool) -> None:
        """Take over the gradient of one parameter; it stays on the device until `flush`."""
        current = None if fresh else sharded.param.grad
        current = current if isinstance(current, ShardedGrad) else None
        arrival = _Arrival(
            grad.detach().to(sharded.spec.dtype).contiguous().view(-1),
            fresh,
            current.factor if current is not None else 1.0,
        )
        waiting = self._waiting.setdefault(sharded.unit, {})
        arrivals = [*waiting.get(sharded.index, ()), arrival]
        # No call, so no signal handler, from here on: the factor goes with the arrival, or stays.
        waiting[sharded.index] = arrivals
        if current is not None:
            current.factor = 1.0

    def complete(self, unit: ParamUnit) -> bool:
        """Return whether every parameter that can have a gradient has one waiting."""
        waiting = self._waiting.get(unit.index, {})
        return all(p.index in waiting for p in unit.params if p.spec.trainable and p.param.requires_grad)

    @sheltered
    def flush(self, unit: ParamUnit) -> None:
        """Send what has arrived for `unit` to its tier; waits only for the unit before it."""
        arrivals = self._waiting.pop(unit.index, None)
        if not arrivals:
            return
        self._wait_tasks()
        self._avoid(unit)
        self._device.tidy()
        after = self._device.mark()
        self._tasks.append(self._stream.submit(lambda: self._take(unit, arrivals, after)))

    def _avoid(self, unit: ParamUnit) -> None:
        """Keep clear of what an update still reads: take the other slot, or wait for it."""
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            if self._lent.get(chunk.id) != entry.slot or not self._pending.has_chunk(chunk.id):
                continue
            if entry.dtype is None and self._plans[chunk.id].gradient_slots > 1:
                entry.slot ^= 1
            else:
                self._pending.wait_unit(unit.index)

    def lend(self, slots: Iterable[tuple[int, int]]) -> None:
        """Note which slot of which chunk the update that was posted reads."""
        self._lent = dict(slots)

    @sheltered
    def flush_all(self) -> None:
        """Send everything that has arrived."""
        for index in list(self._waiting):
            self.flush(self.units[index])

    @sheltered
    def wait(self) -> None:
        """Block until every gradient is complete on its tier; raise what went wrong."""
        self.flush_all()
        self._wait_tasks()
        task = self._stream.submit(self._finish_writes)
        wait = self._recorder.waits()
        task.wait()
        self._recorder.waited(wait, ("nvme", 0))

    def _wait_tasks(self) -> None:
        while self._tasks:
            wait = self._recorder.waits()
            task = self._tasks[0]
            try:
                task.wait()
            except Exception:  # but not an interrupt, after which it is still under way
                self._tasks.popleft()
                raise
            self._tasks.popleft()
            self._recorder.waited(wait, ("reduce", 0))

    @sheltered
    def zero(self, sharded: ShardedParam) -> None:
        """Make the gradient of one parameter zero; it stays present."""
        self._waiting.get(sharded.unit, {}).pop(sharded.index, None)
        zeros = torch.zeros(
            max(sharded.spec.numel, 1), dtype=sharded.spec.dtype, device=self._device.torch_device
        )
        self.deliver(sharded, zeros[: sharded.spec.numel], fresh=True)

    @sheltered
    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        self._waiting.clear()
        for entry in self.entries.values():
            entry.clear()

    @sheltered
    def whole(self, sharded: ShardedParam) -> torch.Tensor:
        """Return the gradient of one parameter: fp32, on the host, with its factor and still
        scaled; shape as the parameter."""
        self.wait()
        out = torch.zeros(sharded.spec.numel, dtype=torch.float32)
        unit = self.units[sharded.unit]
        for chunk in unit.layout.trainable_chunks:
            for segment in chunk.segments:
                if segment.param == sharded.index and segment.param in self.entries[chunk.id].present:
                    part = out[segment.offset : segment.offset + segment.numel]
                    self._stream.submit(lambda c=chunk, s=segment, o=part: self._read(c, s, o)).wait()  # type: ignore[misc]
        grad = sharded.param.grad
        if isinstance(grad, ShardedGrad) and grad.factor != 1.0:
            out.mul_(grad.factor)
        return out.view(sharded.spec.shape)

    def sum_of_squares(self) -> float:
        """Return the double sum over all spans, in order (scaled, without factors). See
        [Note: norms]."""
        spans = [e.spans for e in self.entries.values()]
        # cumsum adds one after the other; sum() and np.sum would group in their own ways.
        return float(np.cumsum(np.concatenate(spans))[-1]) if spans else 0.0

    @sheltered
    def reconcile(self) -> None:
        """Drop from the shards what the user dropped by `p.grad = None`."""
        for unit in self.units:
            gone = {p.index for p in unit.params if not isinstance(p.param.grad, ShardedGrad)}
            for chunk in unit.layout.trainable_chunks if gone else ():
                entry = self.entries[chunk.id]
                stale = entry.present & gone
                if not stale:
                    continue
                if entry.present <= gone:
                    entry.clear()
                    continue
                segments = [s for s in chunk.segments if s.param in stale]
                self._stream.submit(lambda c=chunk, s=segments: self._erase(c, s)).wait()  # type: ignore[misc]

    def on_device(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """Return the bytes of a gradient that is placed on the device."""
        nbytes = self._plans[chunk.id].gradient_nbytes
        return self._on_device[chunk.id][slot * nbytes : (slot + 1) * nbytes]

    def close(self) -> None:
        """Finish and end the worker."""
        self._stream.close()

    # -- the worker -------------------------------------------------------------------------

    def _take(self, unit: ParamUnit, arrivals: dict[int, list[_Arrival]], after: Event | None) -> None:
        begin = now()
        self._take_chunks(unit, arrivals, after)
        if (log := self._recorder.log) is not None:
            nbytes = sum(a.grad.nbytes for several in arrivals.values() for a in several)
            log.add("reduce", begin, now(), unit=unit.index, nbytes=nbytes)

    def _take_chunks(self, unit: ParamUnit, arrivals: dict[int, list[_Arrival]], after: Event | None) -> None:
        for chunk in unit.layout.trainable_chunks:
            rounds = max((len(arrivals.get(s.param, ())) for s in chunk.segments), default=0)
            for i in range(rounds):
                items = [
                    (s, arrivals[s.param][i]) for s in chunk.segments if i < len(arrivals.get(s.param, ()))
                ]
                self._take_chunk(chunk, items, after)

    def _take_chunk(
        self, chunk: Chunk, items: Sequence[tuple[Segment, _Arrival]], after: Event | None
    ) -> None:
        entry = self.entries[chunk.id]
        with _Work(self, chunk) as work:
            adding = any(not a.fresh for _, a in items) and entry.dtype is not None
            if adding and entry.dtype is not torch.float32:
                work.widen()
            elif entry.dtype is None:
                entry.dtype = chunk.dtype
                work.buffer(chunk.dtype).zero_()
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment, arrival in items:
                part = target[segment.start : segment.start + segment.numel]
                source = arrival.grad[segment.offset : segment.offset + segment.numel]
                if not arrival.fresh and segment.param in entry.present:
                    if arrival.factor != 1.0:
                        part.mul_(arrival.factor)
                    work.add(part, source, after)
                else:
                    work.put(part, source, after)
                entry.present.add(segment.param)
            work.store(target)

    def _erase(self, chunk: Chunk, segments: Sequence[Segment]) -> None:
        entry = self.entries[chunk.id]
        with _Work(self, chunk) as work:
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment in segments:
                target[segment.start : segment.start + segment.numel].zero_()
                entry.present.discard(segment.param)
            work.store(target)

    def _read(self, chunk: Chunk, segment: Segment, out: torch.Tensor) -> None:
        entry = self.entries[chunk.id]
        if entry.dtype is not None:
            with _Work(self, chunk) as work:
                buffer = work.buffer(entry.dtype)
                out.copy_(buffer[segment.start : segment.start + segment.numel])

    def _lease(self, nbytes: int) -> Lease:
        while True:
            lease = self._pool.try_lease("gradient", nbytes)
            if lease is not None:
                return lease
            if not self._writes:
                return self._pool.lease("gradient", nbytes)
            self._finish_write()

    def _finish_write(self) -> None:
        transfer, lease = self._writes.popleft()
        try:
            transfer.wait()
        finally:
            lease.release()

    def _finish_writes(self) -> None:
        while self._writes:
            self._finish_write()


class _Work:
    """One chunk's gradient where the CPU (or the device) can work on it, for one visit."""

    def __init__(self, owner: Gradients, chunk: Chunk) -> None:
        self._owner = owner
        self._chunk = chunk
        self._entry = owner.entries[chunk.id]
        self._plan = owner._plans[chunk.id]
        self._part = GRADIENT_PARTS[self._entry.slot]
        self._lease: Lease | None = None

    def __enter__(self) -> _Work:
        owner, chunk, plan = self._owner, self._chunk, self._plan
        if plan.gradient_tier is Tier.NVME:
            # The visit may need a second lease (widen, add): two must be free, or none is taken.
            while len(owner._writes) > owner._slots - 2:
                owner._finish_write()
            self._lease = owner._lease(plan.gradient_nbytes)
            if self._entry.dtype is not None:
                owner._store.read(chunk.id, self._part, self._lease).wait()
            self._bytes = self._lease.tensor(torch.uint8, 0, plan.gradient_nbytes)
        elif plan.gradient_tier is Tier.HOST:
            self._bytes = owner._store.view(chunk.id, self._part)
        else:
            self._bytes = owner.on_device(chunk, self._entry.slot)
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
        if narrow.is_cpu:
            with self._owner._lease(narrow.nbytes) as lease:
                held = lease.tensor(narrow.dtype, 0, narrow.numel())
                cpu_adam.copy_bytes(held.data_ptr(), narrow.data_ptr(), narrow.nbytes)
                cpu_adam.convert(self.buffer(torch.float32), held)
        else:
            self.buffer(torch.float32).copy_(narrow.clone())
        self._entry.dtype = torch.float32

    def put(self, part: torch.Tensor, source: torch.Tensor, after: Event | None) -> None:
        """Write `source` over `part`."""
        if source.device == part.device and part.is_cpu:
            begin = now()
            cpu_adam.convert(part, source)
            if (log := self._owner._recorder.log) is not None:  # this is what d2h is on a CPU device
                log.add("d2h", begin, now(), chunk=self._chunk.id, nbytes=source.nbytes)
        elif source.device == part.device:
            self._owner._device.wait_on_device(after)
            part.copy_(source)
        elif part.dtype is source.dtype:
            self._owner._device.d2h(part, source, after, chunk=self._chunk.id).wait()
        else:
            self._staged(part, source, after, cpu_adam.convert)

    def add(self, part: torch.Tensor, source: torch.Tensor, after: Event | None) -> None:
        """Add `source` to `part` (fp32)."""
        if source.device == part.device and part.is_cpu:
            cpu_adam.accumulate(part, source)
        elif source.device == part.device:
            self._owner._device.wait_on_device(after)
            part.add_(source.float())
        else:
            self._staged(part, source, after, cpu_adam.accumulate)

    def _staged(self, part: torch.Tensor, source: torch.Tensor, after: Event | None, then: object) -> None:
        with self._owner._lease(source.nbytes) as lease:
            host = lease.tensor(source.dtype, 0, source.numel())
            self._owner._device.d2h(host, source, after, chunk=self._chunk.id).wait()
            then(part, host)  # type: ignore[operator]

    def store(self, target: torch.Tensor) -> None:
        """Sum the squares and send the chunk to its tier."""
        owner, entry = self._owner, self._entry
        if target.is_cpu:
            entry.spans[:] = cpu_adam.sum_of_squares(target)
        else:
            entry.spans[:] = adam_reference.sum_of_squares_reference(target)
        if self._lease is not None:
            nbytes = ceil_to(target.nbytes, 4096)
            transfer = owner._store.write(self._chunk.id, self._part, self._lease, nbytes=nbytes)
            owner._writes.append((transfer, self._lease))
            self._lease = None
