"""Gradients on their way from the backward to the update.

A gradient leaves the device once, in the compute dtype, when its unit's backward ends; what
arrives later (another backward, a shared layer, reentrant checkpointing) is added in fp32. The
work is done chunk by chunk on one worker thread, so the backward waits for it only when it is a
whole unit ahead. A gradient that is zero is a note and takes no bytes.

[Note: norms] A norm is a double sum over fixed blocks of 65,536 elements, each block summed as a
halving tree, blocks in index order. The blocks are summed while a gradient is at hand; they do
not depend on the tier, on the size of a chunk or on the instruction set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infinity.core.spans import Recorder, now
from infinity.hardware.device import Device, Event, HostStream, Task
from infinity.hardware.shelter import Shelter, sheltered
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.partition import Chunk, Segment
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Slot, Store

from .gradient_chunks import ChunkGradients
from .sharded_grad import ShardedGrad


class _Arrival(NamedTuple):
    grad: torch.Tensor | None  # flat, on the device, in the compute dtype; None: it is zero
    fresh: bool  # replaces what is there
    factor: float  # what is there is to be multiplied by this first


class Gradients:
    """Takes gradients over, keeps them on their tier, answers norms."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        *,
        leases: int,
        updates: Updates,
        recorder: Recorder,
        shelter: Shelter,
    ) -> None:
        self.units = units
        self.shelter = shelter
        self._recorder = recorder
        self.chunks = ChunkGradients(units, plans, store, pool, device, leases=leases, recorder=recorder)
        self.entries = self.chunks.entries
        self.scale = 1.0  # the loss scale in use: autograd's gradients are multiplied by it
        self.backwards = 0  # that have begun
        self._begun = 0
        self._numbers: dict[tuple[int, int], int] = {}  # of the gradients that the shards hold
        self._versions = store.versions
        self._device = device
        self._stream = HostStream("gradients")
        self._waiting: dict[int, dict[int, list[_Arrival]]] = {}  # unit → parameter → arrivals
        self._tasks: deque[Task] = deque()
        self._updates = updates
        self._reserved: dict[int, Slot] = {}  # chunk → the version that its update reads

    # -- the user's thread ------------------------------------------------------------------

    def begin(self, sharded: ShardedParam) -> int:
        """Return the number of a new gradient of a parameter; the one before it is gone."""
        self._begun += 1
        self._numbers[sharded.unit, sharded.index] = self._begun
        return self._begun

    def holds(self, grad: ShardedGrad) -> bool:
        """Return whether the shards still hold `grad`: [Note: a gradient is a view]."""
        return self._numbers.get((grad.sharded.unit, grad.sharded.index)) == grad.number

    def arrived(self, sharded: ShardedParam) -> None:
        """Take over what autograd has put into `p.grad`; what it added to ours is here already.

        Raises:
            GradientError: `p.grad` is not the parameter's present gradient.
        """
        self._take_over(sharded, 1.0 / self.scale)

    def adopt(self, sharded: ShardedParam) -> bool:
        """Take over a gradient that the user put into `p.grad`, which replaces ours and is unscaled, as
        all that users see; return whether there is a gradient.

        Raises:
            GradientError: it is a view of other shards, or of what they held before.
        """
        self._take_over(sharded, 1.0)
        return sharded.param.grad is not None

    def _take_over(self, sharded: ShardedParam, factor: float) -> None:
        grad = sharded.param.grad
        if isinstance(grad, ShardedGrad):
            grad.check(sharded)
        elif grad is not None:
            ours = ShardedGrad(sharded, self, factor)
            self._deliver(sharded, _Arrival(_flat(sharded, grad), True, 1.0))
            sharded.param.grad = ours  # last: after an interrupt it is taken over once more

    def begin_backward(self) -> None:
        """See to what the user left in `p.grad` before a backward adds to it: gradients of a scaled
        loss are not added to unscaled ones.

        Raises:
            GradientError: one of them is not its parameter's present gradient.
        """
        self.backwards += 1
        for unit in self.units:
            for sharded in unit.params:
                grad = sharded.param.grad if sharded.spec.trainable else None
                if isinstance(grad, ShardedGrad) or (grad is not None and self.scale != 1.0):
                    self.adopt(sharded)

    def add(self, grad: ShardedGrad, other: torch.Tensor, *, scaled: bool) -> None:
        """Add `other` to a gradient; `scaled`: it is multiplied by the loss scale."""
        scale = self.scale if scaled else 1.0
        inverse = 1.0 / scale
        flat = _flat(grad.sharded, other)
        if flat.data_ptr() == other.data_ptr():
            flat = flat.clone()  # whoever added it may write there before it is read
        arrival = _Arrival(flat, False, grad.factor * scale)
        waiting, index = self._waiting.setdefault(grad.sharded.unit, {}), grad.sharded.index
        arrivals = [*waiting.get(index, ()), arrival]
        # No call, so no signal handler, from here on: the factor goes with the arrival, or stays.
        waiting[index] = arrivals
        grad.factor = inverse

    def _deliver(self, sharded: ShardedParam, arrival: _Arrival) -> None:
        """Note what has arrived, and replaces what there was; it stays on the device until `flush`."""
        self._waiting.setdefault(sharded.unit, {})[sharded.index] = [arrival]  # what waits is replaced

    def complete(self, unit: ParamUnit) -> bool:
        """Return whether every parameter that can have a gradient has one waiting."""
        waiting = self._waiting.get(unit.index, {})
        return all(p.index in waiting for p in unit.params if p.spec.trainable and p.param.requires_grad)

    @sheltered
    def send(self, unit: ParamUnit) -> None:
        """Send what has arrived for `unit` to its tier; waits for the unit before it, and for an update that
        still reads what `unit` had."""
        arrivals = self._waiting.pop(unit.index, None)
        if not arrivals:
            return
        self._wait_tasks()
        self._forget_replaced(unit, arrivals)
        written = []
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            several = {s.param: arrivals[s.param] for s in chunk.segments if s.param in arrivals}
            if entry.dtype is None and all(a.grad is None for items in several.values() for a in items):
                entry.present.update(several)  # zeros beside zeros
            elif several:
                written.append(chunk)
        if not written:
            return
        self._keep_clear(unit, written)
        self._device.trim()
        after = self._device.mark()
        self._tasks.append(self._stream.submit(lambda: self._take(unit, written, arrivals, after)))

    def _forget_replaced(self, unit: ParamUnit, arrivals: Mapping[int, Sequence[_Arrival]]) -> None:
        """Forget the values of chunks that nobody will see again: another gradient replaces them, or
        `p.grad` is gone. Then nothing is read, and the slots may flip."""
        if not any(self.entries[c.id].present for c in unit.layout.trainable_chunks):
            return
        gone = {p.index for p in unit.params if p.index not in arrivals and not self._is_ours(p)}
        replaced = {i for i, several in arrivals.items() if several[0].fresh}
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            if entry.present and entry.present <= gone | replaced:
                for i in entry.present & gone:
                    self._numbers.pop((unit.index, i), None)
                entry.clear()

    def _is_ours(self, sharded: ShardedParam) -> bool:
        grad = sharded.param.grad
        return isinstance(grad, ShardedGrad) and grad.sharded is sharded and self.holds(grad)

    def _keep_clear(self, unit: ParamUnit, chunks: Iterable[Chunk]) -> None:
        """Keep clear of what an update still reads: put it into the back, or wait for it."""
        for chunk in chunks:
            front = self._versions.slot(chunk.id, "gradient")
            if self._reserved.get(chunk.id) != front or not self._updates.has_chunk(chunk.id):
                continue
            if self.entries[chunk.id].dtype is None and self._versions.has_two("gradient"):
                self._versions.flip(chunk.id, "gradient")
            else:
                self._updates.wait_unit(unit.index)

    def reserve(self, slots: Iterable[tuple[int, Slot]]) -> None:
        """Note which version of which chunk the update that was posted reads."""
        self._reserved = dict(slots)

    @sheltered
    def send_all(self) -> None:
        """Send everything that has arrived."""
        for index in list(self._waiting):
            self.send(self.units[index])

    @sheltered
    def wait(self) -> None:
        """Block until every gradient is complete on its tier; raise what went wrong."""
        self.send_all()
        self._wait_tasks()
        task = self._stream.submit(self.chunks.finish_writes)
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
    def zero(self, grad: ShardedGrad) -> None:
        """Make a gradient zero; it stays present."""
        grad.factor = 1.0
        self._deliver(grad.sharded, _Arrival(None, True, 1.0))

    @sheltered
    def clamp(self, grad: ShardedGrad, low: float, high: float) -> None:
        """Limit the elements of a gradient, unscaled, to `low` … `high`, which have zero between them."""
        self.wait()
        unit, index = self.units[grad.sharded.unit], grad.sharded.index
        if not grad.factor:
            return
        bounds = sorted((low / grad.factor, high / grad.factor))
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            segments = [s for s in chunk.segments if s.param == index and index in entry.present]
            if segments and entry.dtype is not None:
                if self.scale != 1.0 and not np.isfinite(entry.squares).all():
                    continue  # the step has to see that it overflowed
                self._keep_clear(unit, [chunk])
                self._stream.submit(lambda c=chunk, s=segments: self._clamp(c, s, *bounds)).wait()  # type: ignore[misc]

    @sheltered
    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        self._waiting.clear()
        self._numbers.clear()
        for entry in self.entries.values():
            entry.clear()

    @sheltered
    def full(self, grad: ShardedGrad) -> torch.Tensor:
        """Return a gradient that the shards hold: fp32, on the host, unscaled, with its factor; shape as
        the parameter."""
        self.wait()
        sharded = grad.sharded
        out = torch.zeros(sharded.spec.numel, dtype=torch.float32)
        unit = self.units[sharded.unit]
        for chunk in unit.layout.trainable_chunks:
            for segment in chunk.segments:
                if segment.param == sharded.index and segment.param in self.entries[chunk.id].present:
                    part = out[segment.offset : segment.offset + segment.numel]
                    self._stream.submit(lambda c=chunk, s=segment, o=part: self._read(c, s, o)).wait()  # type: ignore[misc]
        if grad.factor != 1.0:
            out.mul_(grad.factor)
        return out.view(sharded.spec.shape)

    def sum_of_squares(self) -> float:
        """Return the double sum over all norm blocks, in order (scaled, without factors). See
        [Note: norms]."""
        squares = [e.squares for e in self.entries.values()]
        # cumsum adds one after the other; sum() and np.sum would group in their own ways.
        return float(np.cumsum(np.concatenate(squares))[-1]) if squares else 0.0

    @sheltered
    def reconcile(self) -> None:
        """Drop from the shards what the user dropped by `p.grad = None`."""
        for unit in self.units:
            gone = {p.index for p in unit.params if not isinstance(p.param.grad, ShardedGrad)}
            for i in gone:
                self._numbers.pop((unit.index, i), None)
            for chunk in unit.layout.trainable_chunks if gone else ():
                entry = self.entries[chunk.id]
                stale = entry.present & gone
                if not stale:
                    continue
                if entry.dtype is None:
                    entry.present -= gone
                    continue
                if entry.present <= gone:
                    entry.clear()
                    continue
                segments = [s for s in chunk.segments if s.param in stale]
                self._stream.submit(lambda c=chunk, s=segments: self._erase(c, s)).wait()  # type: ignore[misc]

    def close(self) -> None:
        """Finish and end the worker."""
        self._stream.close()

    # -- the worker -------------------------------------------------------------------------

    def _take(
        self,
        unit: ParamUnit,
        chunks: Iterable[Chunk],
        arrivals: Mapping[int, Sequence[_Arrival]],
        after: Event | None,
    ) -> None:
        begin = now()
        for chunk in chunks:
            rounds = max((len(arrivals.get(s.param, ())) for s in chunk.segments), default=0)
            for i in range(rounds):
                items = [
                    (s, arrivals[s.param][i]) for s in chunk.segments if i < len(arrivals.get(s.param, ()))
                ]
                self._take_chunk(chunk, items, after)
        if (log := self._recorder.log) is not None:
            grads = (a.grad for several in arrivals.values() for a in several)
            nbytes = sum(g.nbytes for g in grads if g is not None)
            log.add("reduce", begin, now(), unit=unit.index, nbytes=nbytes)

    def _take_chunk(
        self, chunk: Chunk, items: Sequence[tuple[Segment, _Arrival]], after: Event | None
    ) -> None:
        entry = self.entries[chunk.id]
        held = set(entry.present) if entry.dtype is not None else set()
        with self.chunks.open(chunk, after) as work:
            if entry.dtype is None:
                entry.dtype = chunk.dtype
                work.buffer(chunk.dtype).zero_()
            elif entry.dtype is not torch.float32 and any(not a.fresh for _, a in items):
                work.widen()
            target = work.buffer(entry.dtype)
            for segment, arrival in items:
                part = target[segment.start : segment.start + segment.numel]
                if arrival.grad is None:
                    part.zero_()
                    entry.present.add(segment.param)
                    continue
                source = arrival.grad[segment.offset : segment.offset + segment.numel]
                if not arrival.fresh and segment.param in held:
                    if arrival.factor != 1.0:
                        part.mul_(arrival.factor)
                    work.add(part, source)
                else:
                    work.put(part, source)
                entry.present.add(segment.param)
            work.store(target)

    def _erase(self, chunk: Chunk, segments: Sequence[Segment]) -> None:
        entry = self.entries[chunk.id]
        with self.chunks.open(chunk) as work:
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment in segments:
                target[segment.start : segment.start + segment.numel].zero_()
                entry.present.discard(segment.param)
            work.store(target)

    def _clamp(self, chunk: Chunk, segments: Sequence[Segment], low: float, high: float) -> None:
        entry = self.entries[chunk.id]
        with self.chunks.open(chunk) as work:
            target = work.buffer(entry.dtype or chunk.dtype)
            for segment in segments:
                target[segment.start : segment.start + segment.numel].clamp_(low, high)
            work.store(target)

    def _read(self, chunk: Chunk, segment: Segment, out: torch.Tensor) -> None:
        entry = self.entries[chunk.id]
        if entry.dtype is not None:
            with self.chunks.open(chunk) as work:
                buffer = work.buffer(entry.dtype)
                out.copy_(buffer[segment.start : segment.start + segment.numel])


def _flat(sharded: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
    return grad.detach().to(sharded.spec.dtype).contiguous().view(-1)
