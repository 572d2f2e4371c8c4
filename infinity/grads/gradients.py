"""Gradients on their way from the backward to the update.

A unit's gradient leaves the device once, in the compute dtype, when its backward ends ([Note: one buffer]).
Gradients that arrive later (another backward, a shared layer, reentrant checkpointing) are added in fp32. One
worker thread starts the copies of all chunks and then handles each as it arrives, so the backward waits for
the worker only when it is a whole unit ahead. For a gradient of zeros the engine keeps a note and no bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import numpy as np
import torch

from infinity.core.errors import GradientError
from infinity.core.sizes import format_size
from infinity.core.spans import Recorder
from infinity.hardware.device import Device
from infinity.hardware.ranks import Comm, told
from infinity.hardware.shelter import Shelter, in_backward, sheltered
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates
from infinity.planning.parts import ChunkParts
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Store

from .accumulated import Waiting
from .buffer import Arrival, UnitBuffer
from .changes import Change, change_of, check_alike, digest_of
from .chunk_work import ChunkWork
from .gradient_chunks import ChunkGradients
from .norms import Norms
from .reducing import Reducing
from .reduction import codes_of_all, elsewhere, of_all
from .sending import Sending
from .sharded_grad import ShardedGrad


class Gradients:
    """Takes gradients over, keeps them on their tier, answers norms.

    Args:
        room: bytes of buffers at a time.
        spare: host bytes that the budget leaves.
        waits: with several ranks, what arrives is reduced when it is asked for, at the latest by a step
            (ZeRO's stages 0 and 1), and not as its unit's backward ends.
        accumulation: the backwards of a step: it is reduced in the last of them, too.

    Attributes:
        scale: the loss scale in use: autograd's gradients are multiplied by it.
        of_ranks: whether there are several ranks.
        backwards: that have begun; `stepped`: of these, before the last step, or before the user let go of
            all gradients.
        apart: reductions wait, whatever `accumulation` is (`no_sync`).
        used: units whose gradients the step that is to come has used: [Note: behind the backward].
    """

    def __init__(
        self,
        units: Sequence[ParamUnit],
        plans: Sequence[ChunkParts],
        store: Store,
        pool: PinnedPool,
        device: Device,
        comm: Comm,
        *,
        room: int,
        spare: int = 0,
        waits: bool = False,
        accumulation: int | None = None,
        updates: Updates,
        recorder: Recorder,
        shelter: Shelter,
    ) -> None:
        self.units = units
        self.shelter = shelter
        waits = waits and comm.world > 1
        self.chunks = ChunkGradients(units, plans, store, pool, device, recorder, comes_and_goes=waits)
        self.entries = self.chunks.entries
        self._work = ChunkWork(self.chunks, recorder)
        self.sending = Sending(self.chunks, self._work, store.versions, updates, device, recorder)
        self._waiting = Waiting(self.chunks, self.sending, updates, device)
        self._comm = comm
        self.of_ranks = comm.world > 1
        self._reducing, self._norms = Reducing(comm, device), Norms(units, self.entries, comm)
        self.scale = 1.0
        self.backwards = self.stepped = 0
        self.apart = False
        self.used: Container[int] = ()
        self._waits, self.accumulation = waits, accumulation
        self._begun = 0
        self._numbers: dict[tuple[int, int], int] = {}  # of the gradients that the shards hold
        self._found: list[Change] = []  # what the backward that is under way has found in `p.grad`
        self._device = device
        self._room, self._spare = room, spare
        self._filling: dict[int, UnitBuffer] = {}  # unit → what has arrived and was not sent
        self._updates = updates

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
        self._take_over(sharded, 1.0 / self.scale, made=True)

    def adopt(self, sharded: ShardedParam) -> bool:
        """Take over a gradient that the user put into `p.grad`, which replaces ours and is unscaled, as
        all that users see; return whether there is a gradient.

        Raises:
            GradientError: it is a view of other shards, or of what they held before.
        """
        if self._comm.world > 1:
            self._check_made(sharded)
        self._take_over(sharded, 1.0)
        return sharded.param.grad is not None

    def _check_made(self, sharded: ShardedParam) -> None:
        """With several ranks: raise `GradientError` unless a backward made what is in `p.grad`."""
        grad = sharded.param.grad
        if isinstance(grad, ShardedGrad):
            grad.check(sharded)
        elif grad is not None:
            raise GradientError(
                f"with several ranks, you cannot assign a gradient to {sharded.name!r}",
                expected="the gradient that a backward made, or None",
                found=f"a tensor that was assigned to `p.grad`, on rank {self._comm.rank}",
                cure="set `p.grad = None` again; add a term to the loss instead, and call its backward",
            )

    def _take_over(self, sharded: ShardedParam, factor: float, *, made: bool = False) -> None:
        grad = sharded.param.grad
        if isinstance(grad, ShardedGrad):
            grad.check(sharded)
        elif grad is not None:
            if grad.layout is not torch.strided:
                raise GradientError(
                    f"the gradient of {sharded.name!r} is sparse",
                    expected="dense gradients",
                    found=f"{grad.layout}, as torch.nn.functional.embedding(…, sparse=True) makes it",
                    cure="use sparse=False; convert your own sparse gradient with p.grad.to_dense(). "
                    "`optimizer.zero_grad()` drops this one",
                )
            buffer = self._buffer_for(sharded)
            buffer.put(sharded.index, grad)
            ours = ShardedGrad(sharded, self, factor)
            ours.has_graph = made and grad.requires_grad
            buffer.arrivals[sharded.index] = Arrival(True)
            sharded.param.grad = ours  # last: after an interrupt it is taken over once more

    def begin_backward(self) -> None:
        """See to what the user left in `p.grad` before a backward adds to it: gradients of a scaled
        loss are not added to unscaled ones.

        Raises:
            GradientError: one of them is not its parameter's present gradient.
        """
        if self._comm.world > 1:
            self._found = self._changes()
        if self._comm.world == 1 and self._are_dropped():
            self.stepped = self.backwards  # the next step has its backwards yet to come
        self.backwards += 1
        for unit in self.units if self._comm.world == 1 else ():
            for sharded in unit.params:
                grad = sharded.param.grad if sharded.spec.trainable else None
                if isinstance(grad, ShardedGrad) or (grad is not None and self.scale != 1.0):
                    self.adopt(sharded)

    def _changes(self) -> list[Change]:
        """With several ranks: return what the user has made of each gradient since the last backward: it has
        to be the same on all, as `_agree` finds out.

        Raises:
            GradientError: a gradient is none that a backward made; the others are told.
        """
        found = []
        with told(self._comm):
            for unit in self.units:
                buffer = self._filling.get(unit.index)
                for sharded in unit.params:
                    if sharded.spec.trainable:
                        self._check_made(sharded)
                        arrival = buffer.arrivals.get(sharded.index) if buffer is not None else None
                        found.append(change_of(sharded, arrival))
        return found

    def _agree(self, what: str, value: bytes, changes: Sequence[Change]) -> list[bytes]:
        """Return every rank's `value`; raise `DivergenceError` unless `changes` are the same on all."""
        digest = digest_of(changes)
        came = self._comm.exchange(what, digest + value)
        if len({each[: len(digest)] for each in came}) > 1:
            names = [s.name for unit in self.units for s in unit.params if s.spec.trainable]
            check_alike(self._comm, names, changes)
        return [each[len(digest) :] for each in came]

    def check_unused(self, sharded: ShardedParam) -> None:
        """Raise `GradientError` if a parameter was updated already, with the gradient that is to change."""
        if sharded.unit in self.used:
            raise GradientError(
                f"the gradient of {sharded.name!r} changes after the update has used it",
                expected='with update="backward", one gradient of each parameter in the last backward, which '
                "stays as it is until `step()`",
                found="another gradient in that backward"
                if in_backward()
                else "a change after that backward",
                cure='make the change before that backward; or use update="overlap"',
            )

    def add(self, grad: ShardedGrad, other: torch.Tensor, *, scaled: bool) -> None:
        """Add `other` to a gradient; `scaled`: it is multiplied by the loss scale."""
        scale = self.scale if scaled else 1.0
        inverse = 1.0 / scale
        sharded, index = grad.sharded, grad.sharded.index
        buffer = self._buffer_for(sharded)
        waiting = buffer.arrivals.get(index)
        if waiting is not None and not waiting.zero and self._comm.world > 1:
            # It is reduced with the rest of the unit, on all ranks at once.
            if (factor := grad.factor * scale) != 1.0:
                buffer.scale(index, factor)
                buffer.arrivals[index] = waiting._replace(factor=waiting.factor * factor)
                grad.factor = inverse
            buffer.add(index, other)
            return
        if waiting is not None and not waiting.zero:  # that goes first
            self.send(self.units[sharded.unit])
            buffer, waiting = self._buffer_for(sharded), None
        buffer.put(index, other, shared=True)
        # What is added to zero replaces it, and is rounded so, whatever else is in its chunk.
        arrivals, arrival = buffer.arrivals, Arrival(waiting is not None or grad.is_zero, grad.factor * scale)
        # No call, so no signal handler, from here on: the factor goes with the arrival, or stays.
        arrivals[index] = arrival
        grad.factor, grad.is_zero = inverse, False

    def _buffer_for(self, sharded: ShardedParam) -> UnitBuffer:
        """Return the buffer that a parameter's gradient is put into, with room for it on the device."""
        if self._reducing.has(sharded.unit):
            self._finish_reduced()
        buffer = self._filling.get(sharded.unit) or UnitBuffer(self.units[sharded.unit].layout, self._device)
        if self._comm.world == 1 and not self._fits(buffer.needs(sharded.index)):
            self._make_room(sharded.unit, buffer.needs(sharded.index))
        self._filling[sharded.unit] = buffer
        return buffer

    def _fits(self, nbytes: int) -> bool:
        taken = sum(b.nbytes for b in self._filling.values()) + sum(b.nbytes for b in self.sending.leaving)
        return not nbytes or taken + nbytes <= self._room

    @sheltered
    def _make_room(self, unit: int, nbytes: int) -> None:
        """Let go of what is leaving; if that is not enough, of what has arrived of other units, too."""
        self.sending.let_go()
        for other in [i for i in self._filling if i != unit]:
            if not self._fits(nbytes):
                self.send(self.units[other])
                self.sending.let_go()

    def complete(self, unit: ParamUnit) -> bool:
        """Return whether every parameter that can have a gradient has one waiting. With several ranks, never:
        they reduce a unit where the program says, not where its gradients happen to be there."""
        if self._comm.world > 1:
            return False
        buffer = self._filling.get(unit.index)
        arrivals = buffer.arrivals if buffer is not None else {}
        return all(p.index in arrivals for p in unit.params if p.spec.trainable and p.param.requires_grad)

    def reduce(self, unit: ParamUnit) -> None:
        """The backward of a unit ends: `send`, of what has arrived on any rank, and this rank's slices of it.
        Collective, unless that waits.

        Raises:
            RankError: another rank failed, or does something else.
        """
        if self._comm.world == 1:
            self.send(unit)
        elif unit.layout.gradient_nbytes:
            self._reduce_or_wait(unit)

    @sheltered
    def _reduce_or_wait(self, unit: ParamUnit) -> None:
        if not self._waits:
            self._reduce(unit, None)
            return
        self._waiting.add(unit, self._filling.pop(unit.index, None))
        came = bytes([unit.index in self._waiting.came])  # or it ends again, as one with tied parameters
        if self.is_last and b"\1" in self._comm.exchange(f"the end of {unit.layout.name!r}", came):
            self._reduce(unit, self._waiting.units.pop(unit.index, None))

    def _are_dropped(self) -> bool:
        """Return whether there were gradients, and the user has let go of all of them."""
        params = (s for unit in self.units for s in unit.params if s.spec.trainable)
        return any(e.present for e in self.entries.values()) and all(s.param.grad is None for s in params)

    @property
    def is_last(self) -> bool:
        """Whether the backward that has begun last is the last of a step, as `accumulation` says."""
        of = self.accumulation
        return of is not None and not self.apart and (self.backwards - self.stepped) % of == 0

    @sheltered
    def reduce_waiting(self) -> None:
        """`reduce` all that waits on any rank; in stages 2 and 3 that is what users added. Collective.

        Raises:
            GradientError: a gradient is none that a backward made.
            DivergenceError: a user has changed one on some ranks, or one that is another's.
        """
        if self._comm.world == 1:
            return
        changes = self._changes()
        if not self._waits:
            added = [i for i, buffer in self._filling.items() if not buffer.is_zero]
            self._reduce_any("what was added to gradients", added, changes)
            return
        for index in list(self._filling):
            self._waiting.add(self.units[index], self._filling.pop(index))
        self._waiting.came.clear()  # what is reduced here does not come in a backward
        for index, waiting in self._waiting.units.items():
            for sharded in self.units[index].params:
                if not self._is_ours(sharded):  # p.grad = None
                    waiting.drop(sharded.index)
        self._reduce_any("the gradients that wait", self._waiting.units, changes)

    def _reduce_any(self, what: str, here: Collection[int], changes: Sequence[Change]) -> None:
        """Reduce the units of which any rank has something."""
        came = self._agree(what, bytes(i in here for i in range(len(self.units))), changes)
        for unit in self.units:
            if any(units[unit.index] for units in came):
                self._reduce(unit, self._waiting.units.pop(unit.index, None))
        self._finish_reduced()

    def _reduce(self, unit: ParamUnit, mine: UnitBuffer | None) -> None:
        """Begin to add up `mine`, which has waited, else what is arriving, on all ranks; finish the one
        before."""
        self.sending.let_go()
        self._finish_reduced()
        if mine is None:
            mine = self._filling.pop(unit.index, None) or UnitBuffer(unit.layout, self._device)
            mine.seal()
        self._reducing.begin(unit, mine)

    @sheltered
    def _finish_reduced(self) -> None:
        """Send this rank's slices of what is being added up."""
        while self._reducing:
            unit, mine, buffer = self._reducing.next()
            for i in elsewhere(mine, buffer.arrivals):  # what arrived elsewhere is this rank's, too
                buffer.arrivals[i] = self._arrived_elsewhere(unit.params[i], buffer.arrivals[i])
            self._send(unit, buffer)

    @sheltered
    def reduce_rest(self) -> None:
        """`reduce` what is left when a backward ends, on any rank: units whose inputs need no gradient."""
        if self._comm.world == 1:
            self.send_all()
            return
        if not self._waits:
            self._reduce_any("the end of a backward", self._filling, self._found)
            return
        for index in list(self._filling):
            self._waiting.add(self.units[index], self._filling.pop(index))
        came, self._waiting.came = self._waiting.came, {}
        if self.is_last:
            self._reduce_any("the end of a backward", self._waiting.units, self._found)
        else:
            self._join(came)

    def _join(self, came: Mapping[int, Mapping[int, Arrival]]) -> None:
        """Treat gradients that arrived on any rank in a backward as this rank's, too, so that all ranks see
        the same."""
        layouts = [unit.layout for unit in self.units]
        told = self._agree("the end of a backward", codes_of_all(layouts, came), self._found)
        for index, arrivals in of_all(layouts, came, told).items():
            unit = self.units[index]
            for i in elsewhere(came.get(index, {}), arrivals):
                self._waiting.join(unit, i, self._arrived_elsewhere(unit.params[i], arrivals[i]))

    def _arrived_elsewhere(self, sharded: ShardedParam, arrival: Arrival) -> Arrival:
        """Add a gradient of a parameter for which one has arrived only on another rank (`elsewhere`)."""
        grad = sharded.param.grad
        if not isinstance(grad, ShardedGrad) or (arrival.fresh and not self.holds(grad)):
            sharded.param.grad = ShardedGrad(sharded, self, 1.0 / self.scale)
            return arrival
        if not arrival.fresh:
            arrival = arrival._replace(factor=grad.factor * self.scale)
        grad.factor, grad.is_zero = 1.0 / self.scale, False
        return arrival

    def send(self, unit: ParamUnit) -> None:
        """Send what has arrived for `unit` to its tier; waits for the unit before it, and for an update that
        still reads what `unit` had. With several ranks, zeros alone: the rest is reduced first."""
        if unit.index in self._filling:  # else there is nothing to do, and what leaves goes on leaving
            self._send_filled(unit)

    @sheltered
    def _send_filled(self, unit: ParamUnit) -> None:
        buffer = self._filling.get(unit.index)  # None: a call that was interrupted has sent it
        if buffer is None or (self._comm.world > 1 and (self._waits or not buffer.is_zero)):
            return
        self.sending.let_go()
        self.sending.wait(unit.index)
        del self._filling[unit.index]
        if buffer.arrivals:
            buffer.seal()
            self._send(unit, buffer)

    def _send(self, unit: ParamUnit, buffer: UnitBuffer) -> None:
        self.sending.wait(unit.index)
        self._forget_replaced(unit, buffer.arrivals)
        self.sending.send(unit, buffer)

    def _forget_replaced(self, unit: ParamUnit, arrivals: Mapping[int, Arrival]) -> None:
        """Drop the values of chunks that no code will read again: another gradient replaces them, or
        `p.grad` is gone. Then nothing is read, and the slots may flip."""
        if not any(self.entries[c.id].present for c in unit.layout.trainable_chunks):
            return
        gone = {p.index for p in unit.params if p.index not in arrivals and not self._is_ours(p)}
        replaced = {i for i, arrival in arrivals.items() if arrival.fresh}
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            if entry.present and entry.present <= gone | replaced:
                for i in entry.present & gone:
                    self._numbers.pop((unit.index, i), None)
                entry.clear()

    def _is_ours(self, sharded: ShardedParam) -> bool:
        grad = sharded.param.grad
        return isinstance(grad, ShardedGrad) and grad.sharded is sharded and self.holds(grad)

    def send_all(self) -> None:
        """Send everything that has arrived."""
        if self._filling or self._reducing:
            self._send_every()

    @sheltered
    def _send_every(self) -> None:
        self._finish_reduced()
        for index in list(self._filling):
            self.send(self.units[index])

    @sheltered
    def wait(self) -> None:
        """Block until every gradient is complete on its tier; raise what went wrong."""
        self.send_all()
        self.sending.let_go()
        self.sending.wait()
        self.sending.finish_writes()

    @sheltered
    def zero(self, grad: ShardedGrad) -> None:
        """Make a gradient zero; it stays present."""
        self._finish_reduced()
        grad.factor, grad.is_zero = 1.0, True
        unit = grad.sharded.unit
        buffer = self._filling.setdefault(unit, UnitBuffer(self.units[unit].layout, self._device))
        buffer.arrivals[grad.sharded.index] = Arrival(True, zero=True)

    @sheltered
    def clamp(self, grad: ShardedGrad, low: float, high: float) -> None:
        """Limit the elements of a gradient, unscaled, to `low` … `high`, which have zero between them."""
        self.reduce_waiting()
        self.wait()
        unit, index = self.units[grad.sharded.unit], grad.sharded.index
        if not grad.factor:
            return
        bounds = sorted((low / grad.factor, high / grad.factor))
        if self.scale != 1.0:
            self.sending.sum_squares()
        for chunk in unit.layout.trainable_chunks:
            entry = self.entries[chunk.id]
            segments = [s for s in chunk.segments if s.param == index and index in entry.present]
            if segments and entry.dtype is not None:
                if self.scale != 1.0 and not np.isfinite(entry.squares).all():
                    continue  # the step has to see that it overflowed
                self.sending.keep_clear(unit, [chunk])
                self.sending.run(lambda c=chunk, s=segments: self._work.clamp(c, s, *bounds))  # type: ignore[misc]

    @sheltered
    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        self.stepped = self.backwards
        self._filling.clear()
        self._waiting.units.clear()
        self._numbers.clear()
        for entry in self.entries.values():
            entry.clear()

    @sheltered
    def full(self, grad: ShardedGrad) -> torch.Tensor:
        """Return a gradient that the shards hold: fp32, on the host, unscaled, with its factor; shape as
        the parameter. Collective, with several ranks."""
        self.reduce_waiting()
        self.wait()
        sharded = grad.sharded
        out = torch.zeros(sharded.spec.numel, dtype=torch.float32)
        unit = self.units[sharded.unit]
        for chunk in unit.layout.trainable_chunks:
            for segment in chunk.segments:
                if segment.param == sharded.index and segment.param in self.entries[chunk.id].present:
                    part = out[segment.offset : segment.offset + segment.numel]
                    self.sending.run(lambda c=chunk, s=segment, o=part: self._work.read(c, s, o))  # type: ignore[misc]
        self._comm.exchange(f"a look at the gradient of {sharded.name!r}")
        for rank, first, end in () if unit.layout.whole else unit.layout.owners(sharded.index):
            self._comm.broadcast(out[first:end], rank)
        if grad.factor != 1.0:
            out.mul_(grad.factor)
        return out.view(sharded.spec.shape)

    def read(self, grads: Sequence[ShardedGrad]) -> list[torch.Tensor]:
        """Return gradients that the shards hold as `p.grad` shows them: in the dtype and on the device of
        their parameters, unscaled, with their factors. Collective, with several ranks.

        Raises:
            GradientError: the gradients do not fit the host memory that the budget leaves, and are not
                gathered; or a backward of several ranks is running.
        """
        first = grads[0].sharded.name
        if in_backward() and self._comm.world > 1:
            raise GradientError(
                f"the gradient of {first!r} is not reduced over the ranks yet",
                expected="with several ranks, reads of gradients after the backward",
                found=f"a read inside the backward, on rank {self._comm.rank}",
                cure="read it when the backward has returned",
            )
        apart = [g for g in grads if not self.units[g.sharded.unit].keepers]
        nbytes = sum(g.numel() * (4 + g.itemsize * (g.dtype is not torch.float32)) for g in apart)
        if nbytes > self._spare:
            raise GradientError(
                f"the whole gradient of {first!r} does not fit the host memory that is left",
                expected=f"{format_size(nbytes)} ({nbytes} bytes), to read it as one tensor",
                found=f"{format_size(self._spare)} ({self._spare} bytes) left of host_memory",
                cure="read it inside `with infinity.gathered(p):`, or by `infinity.gradient(p)`, which use "
                "memory outside the budget; or raise host_memory",
            )
        return [self.full(g).to(g.device, g.dtype) for g in grads]

    def norm(self, grads: Iterable[ShardedGrad]) -> float:
        """Return the 2-norm of several gradients, which are complete, with their factors: [Note: norms]."""
        self.sending.sum_squares()
        return self._norms.together(grads)

    @sheltered
    def norms(self, grads: Sequence[ShardedGrad]) -> list[float]:
        """Return the 2-norm of each gradient, unscaled, with its factor: [Note: norms]."""
        self.reduce_waiting()
        self.wait()
        self.sending.sum_squares()
        return self._norms.each(grads)

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
                self.sending.run(lambda c=chunk, s=segments: self._work.erase(c, s))  # type: ignore[misc]

    def close(self) -> None:
        """Finish and end the worker, and let go of the gradients: Python's collector does not see that a
        parameter holds its gradient, which holds the parameter."""
        self.sending.close()
        for unit in self.units:
            for sharded in unit.params:
                if isinstance(sharded.param.grad, ShardedGrad):
                    sharded.param.grad = None
