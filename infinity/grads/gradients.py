"""Gradients on their way from the backward to the update.

A unit's gradient leaves the device once, in the compute dtype, when its backward ends ([Note: one buffer]).
Gradients that arrive later (another backward, a shared layer, reentrant checkpointing) are added in fp32. One
worker thread starts the copies of all chunks and then handles each as it arrives, so the backward waits for
the worker only when it is a whole unit ahead. For a gradient of zeros the engine keeps a note and no bytes.

[Note: norms] A shard is cut into fixed blocks of 65,536 elements. The elements of one parameter in a block
are a piece. The engine sums the squares of a piece in double as a halving tree, once for each gradient. The
CPU sums them while it processes the gradient; a device sums all of its pieces in one pass, at the first
request for a norm. A norm adds factor² times the sums of its parameters' pieces, one after the other in the
order of the chunks. So neither clipping nor one parameter's norm reads a gradient again, and a norm does not
depend on the tier, the size of a chunk or the instruction set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from infinity.core.commits import Commits, commit, in_backward
from infinity.core.errors import GradientError
from infinity.core.sizes import format_size
from infinity.hardware.ranks import Comm
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates

from .buffer import FRESH, Arrival, UnitBuffer
from .gradient_chunks import ChunkGradients
from .sharded_grad import ShardedGrad


class Gradients:
    """Takes gradients over, keeps them on their tier, answers norms.

    Args:
        room: bytes of buffers at a time.
        spare: host bytes that the budget leaves.
        once: a second gradient of a parameter has no room, unless it is fp32 as the first one.
        scale: the loss scale to begin with.

    Attributes:
        scale: the loss scale in use: autograd's gradients are multiplied by it.
        of_ranks: whether there are several ranks.
    """

    of_ranks: ClassVar = False

    def __init__(
        self,
        units: Sequence[ParamUnit],
        chunks: ChunkGradients,
        comm: Comm,
        updates: Updates,
        commits: Commits,
        *,
        room: int,
        spare: int = 0,
        once: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.units = units
        self._trainable = [s for unit in units for s in unit.params if s.spec.trainable]
        self.commits = commits
        self.chunks = chunks
        self.scale = scale
        self._backwards = self._before = 0  # that have begun, and those before the last step
        self._no_sync = False  # whether reductions wait, whatever the number of a step's backwards is
        self._comm = comm
        #: Of the shards of this rank alone; where it has the whole, the other ranks have the same.
        self._own = [chunk for unit in units for _, chunk in unit.layout.chunks_of(comm.rank)]
        #: The number of each unit's first parameter, and of each piece's: [Note: norms].
        self._first = [*itertools.accumulate((len(unit.params) for unit in units), initial=0)]
        owners = [self._first[c.unit] + param for c in self._own for param, *_ in c.norm_pieces]
        self._owners = np.array(owners, dtype=np.int64)
        self._places = dict(zip((s for unit in units for s in unit.params), itertools.count(), strict=False))
        self._count = itertools.count(1)
        self._numbers: dict[ShardedParam, int] = {}  # of the gradients that the shards hold
        self._device = chunks.device
        self._room, self._spare, self._once = room, spare, once
        self._filling: dict[int, UnitBuffer] = {}  # unit → what has arrived and was not sent
        self._taken = 0  # bytes of all buffers, or more
        self._updates = updates

    # -- the user's thread ------------------------------------------------------------------

    def begin(self, sharded: ShardedParam) -> int:
        """Return the number of a new gradient of a parameter; the one before it is gone."""
        self._numbers[sharded] = number = next(self._count)
        return number

    def holds(self, grad: ShardedGrad) -> bool:
        """Return whether the shards still hold `grad`: [Note: a gradient is a view]."""
        return self._numbers.get(grad.sharded) == grad.number

    def adopt(self, sharded: ShardedParam) -> bool:
        """Take over a gradient that the user put into `p.grad`, which replaces ours and is unscaled, as
        all that users see; return whether there is a gradient.

        Raises:
            GradientError: it is a view of other shards, or of what they held before.
        """
        self.arrived(sharded, made=False)
        return sharded.param.grad is not None

    def arrived(self, sharded: ShardedParam, *, made: bool = True) -> bool:
        """Take over what is in `p.grad`: autograd has `made` it, of a scaled loss, or added to ours, which is
        here already; or a user has put it there. Return whether all gradients of its unit have arrived that
        can.

        Raises:
            GradientError: `p.grad` is not the parameter's present gradient.
        """
        grad: torch.Tensor | None = sharded.param.grad
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
            filling = self._filling.get(sharded.unit) or self._buffer_for(sharded)
            missing = filling.missing.get(sharded.index, 0)
            self._taken += missing
            if missing and self._taken > self._room:
                self._make_room(sharded.unit, missing)
            filling.put(sharded.index, grad)
            self._numbers[sharded] = number = next(self._count)
            ours = ShardedGrad(sharded, self, number, 1.0 / self.scale if made else 1.0)
            ours.has_graph = made and grad.requires_grad
            filling.arrivals[sharded.index] = FRESH
            sharded.param.grad = ours
        if (buffer := self._filling.get(sharded.unit)) is None:
            return False
        for other in self.units[sharded.unit].params:
            if other.index not in buffer.arrivals and other.spec.trainable and other.param.requires_grad:
                return False
        return True

    def present(self, params: Iterable[ShardedParam]) -> dict[ShardedParam, ShardedGrad]:
        """Return the gradients of those that have one. Settles what the user did to `p.grad`, and waits until
        all gradients are on their tiers. Collective.

        Raises:
            GradientError: as `adopt`.
        """
        self.reduce_waiting()
        found: dict[ShardedParam, ShardedGrad] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in params:
                grad: Any = sharded.param.grad
                if grad is None:
                    continue
                is_ours = type(grad) is ShardedGrad and grad.sharded is sharded
                if not is_ours or self._numbers.get(sharded) != grad.number:
                    self.adopt(sharded)
                    grad = sharded.param.grad
                found[sharded] = grad
        self.wait()
        self.reconcile()
        return found

    def begin_backward(self) -> None:
        """See to what the user left in `p.grad` before a backward adds to it: gradients of a scaled
        loss are not added to unscaled ones.

        Raises:
            GradientError: one of them is not its parameter's present gradient.
        """
        if self._are_dropped():
            self.stepped()  # the next step has its backwards yet to come
        self._backwards += 1
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in self._trainable:
                grad = sharded.param.grad
                if grad is not None and (isinstance(grad, ShardedGrad) or self.scale != 1.0):
                    self.adopt(sharded)

    def check_unused(self, sharded: ShardedParam) -> None:
        """Raise `GradientError` if a parameter was updated already, with the gradient that is to change."""
        if sharded.unit in self._updates.used:
            raise GradientError(
                f"the gradient of {sharded.name!r} changes after the update has used it",
                expected='with update="backward", one gradient of each parameter in the last backward, which '
                "stays as it is until `step()`",
                found="another gradient in that backward"
                if in_backward()
                else "a change after that backward",
                cure='make the change before that backward; or use update="overlap"',
            )

    @commit
    def add(self, grad: ShardedGrad, other: torch.Tensor) -> None:
        """Add to a gradient what autograd has made, which is multiplied by the loss scale.

        Raises:
            GradientError: the run was to have one gradient of each parameter in a step.
        """
        if self._once and not grad.is_zero and grad.dtype is not torch.float32:
            self._refuse_second(grad.sharded)
        sharded, index = grad.sharded, grad.sharded.index
        buffer = self._buffer_for(sharded)
        waiting = buffer.arrivals.get(index)
        if waiting is not None and not waiting.zero:  # that goes first
            self.send(self.units[sharded.unit])
            buffer, waiting = self._buffer_for(sharded), None
        self._make_room(sharded.unit, buffer.missing.get(index, 0))
        buffer.put(index, other, shared=True)
        # What is added to zero replaces it, and is rounded so, whatever else is in its chunk.
        buffer.arrivals[index] = Arrival(waiting is not None or grad.is_zero, grad.factor * self.scale)
        grad.factor, grad.is_zero = 1.0 / self.scale, False

    def _refuse_second(self, sharded: ShardedParam) -> NoReturn:
        raise GradientError(
            f"a second gradient of {sharded.name!r} in a step has no room: it would be added in fp32",
            expected="with accumulation=1, one gradient of each parameter between two calls of "
            f"`zero_grad()`: there are {sharded.spec.dtype.itemsize} bytes for each element",
            found="a further backward, a gradient that was assigned to `p.grad` before it, or a layer that "
            "reentrant checkpointing uses twice",
            cure="set Config(accumulation=…) to the number of backwards of a step, or leave it out; or call "
            "`zero_grad()` after each step; with a layer that is used twice, checkpoint with "
            "use_reentrant=False",
        )

    def _buffer_for(self, sharded: ShardedParam) -> UnitBuffer:
        """Return the buffer that a parameter's gradient is put into."""
        buffer = self._filling.get(sharded.unit)
        if buffer is None:
            buffer = UnitBuffer(self.units[sharded.unit].layout, self._device)
            self._filling[sharded.unit] = buffer
        return buffer

    def _fits(self, nbytes: int) -> bool:
        for buffer in self._filling.values():
            nbytes += buffer.nbytes
        for leaving in self.chunks.leaving:
            nbytes += leaving.buffer.nbytes
        self._taken = nbytes
        return nbytes <= self._room

    @commit
    def _make_room(self, unit: int, nbytes: int) -> None:
        """Have room for `nbytes` more of a unit: let go of what is leaving; if that is not enough, of what
        has arrived of other units, too."""
        if self._fits(nbytes):
            return
        self.chunks.let_go()
        for other in [i for i in self._filling if i != unit]:
            if not self._fits(nbytes):
                self.send(self.units[other])
                self.chunks.let_go()

    def _are_dropped(self) -> bool:
        """Return whether there were gradients, and the user has let go of all of them."""
        if not self._numbers:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            for sharded in self._trainable:
                if sharded.param.grad is not None:
                    return False
        return True

    @property
    def is_last(self) -> bool:
        """Whether the backward that has begun last is the last of a step, as `Config(accumulation)` says."""
        of = self._updates.accumulation
        return of is not None and not self._no_sync and (self._backwards - self._before) % of == 0

    @property
    def are_new(self) -> bool:
        """Whether a backward has begun that no step has used."""
        return self._backwards != self._before

    def stepped(self) -> None:
        """A step has used the backwards so far, or the user has let go of all gradients."""
        self._before = self._backwards

    def rescale(self, scale: float) -> None:
        """Use another loss scale, from the next gradient on."""
        self.scale = scale

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which no backward is the last of a step: gradients stay on their rank (`no_sync`)."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def reduce_waiting(self) -> None:
        """See to it that what has arrived is this rank's gradient: with several, the sum over all."""

    def reduce_rest(self) -> None:
        """`reduce` what is left when a backward ends: units whose inputs need no gradient."""
        self.send_all()

    def send(self, unit: ParamUnit) -> None:
        """Send what has arrived for `unit` to its tier; waits for the unit before it, and for an update that
        still reads what `unit` had. In a commit."""
        buffer = self._filling.get(unit.index)
        if buffer is None:
            return  # there is nothing to do, and what leaves goes on leaving
        self.chunks.let_go()
        self.chunks.wait(unit.index)
        self._taken = 0  # of what leaves nothing is left
        for each in self._filling.values():
            self._taken += each.nbytes
        del self._filling[unit.index]
        if buffer.arrivals:
            buffer.seal()
            self._send(buffer)

    reduce = send  # as the backward of a unit ends

    def _send(self, buffer: UnitBuffer) -> None:
        """Send a sealed buffer, of whose unit nothing is on its way."""
        unit, arrivals, kept = self.units[buffer.layout.index], buffer.arrivals, []
        for sharded in unit.params:
            arrival = arrivals.get(sharded.index)
            if not arrival.fresh if arrival is not None else self._is_ours(sharded):
                kept.append(sharded.index)
        self._keep(unit, kept, arrivals)
        self.chunks.send(buffer)

    def _keep(self, unit: ParamUnit, kept: Collection[int], new: Collection[int] = ()) -> None:
        """Forget the gradients of a unit but those of the parameters `kept` and `new`. Drop the values of
        chunks that no code will read again: none of their parameters is `kept`. Then nothing is read, and the
        slots may flip."""
        for sharded in unit.params:
            if sharded.index not in kept and sharded.index not in new:
                self._numbers.pop(sharded, None)
        for chunk in unit.layout.trainable_chunks:
            entry = self.chunks.entries[chunk.id]
            if entry.dtype is None:
                continue
            for segment in chunk.segments:
                if segment.param in kept:
                    break
            else:
                entry.clear()

    def _is_ours(self, sharded: ShardedParam) -> bool:
        grad = sharded.param.grad
        return isinstance(grad, ShardedGrad) and grad.sharded is sharded and self.holds(grad)

    @commit
    def send_all(self) -> None:
        """Send everything that has arrived."""
        for index in list(self._filling):
            self.send(self.units[index])

    @commit
    def wait(self) -> None:
        """Block until every gradient is complete on its tier; raise what went wrong."""
        self.send_all()
        self.chunks.let_go()
        self.chunks.wait()
        self.chunks.finish_writes()

    @commit
    def zero(self, grad: ShardedGrad) -> None:
        """Make a gradient zero; it stays present."""
        buffer = self._buffer_for(grad.sharded)
        grad.factor, grad.is_zero = 1.0, True
        buffer.arrivals[grad.sharded.index] = Arrival(True, zero=True)

    @commit
    def clamp(self, grad: ShardedGrad, low: float, high: float) -> None:
        """Limit the elements of a gradient, unscaled, to `low` … `high`, which have zero between them."""
        self.reduce_waiting()
        self.wait()
        unit, index = self.units[grad.sharded.unit], grad.sharded.index
        if not grad.factor:
            return
        bounds = sorted((low / grad.factor, high / grad.factor))
        if self.scale != 1.0:
            self.chunks.sum_squares()
        for entry, segment in self.chunks.parts_of(unit, index):
            of_it = [param == index for param, *_ in entry.chunk.norm_pieces]
            if self.scale != 1.0 and not np.isfinite(entry.squares[of_it]).all():
                continue  # the step has to see that it overflowed
            self.chunks.keep_clear([entry.chunk])
            self.chunks.work_on(entry, segment, lambda part: part.clamp_(*bounds), writes=True)

    @commit
    def clear(self) -> None:
        """Forget all gradients."""
        self.wait()
        self.stepped()
        self._filling.clear()
        self._numbers.clear()
        for entry in self.chunks.entries.values():
            if entry.dtype is not None:
                entry.clear()

    @commit
    def full(self, grad: ShardedGrad) -> torch.Tensor:
        """Return a gradient that the shards hold: fp32, on the host, unscaled, with its factor; shape as
        the parameter. Collective, with several ranks."""
        self.reduce_waiting()
        self.wait()
        sharded = grad.sharded
        out = torch.zeros(sharded.spec.numel, dtype=torch.float32)
        unit = self.units[sharded.unit]
        for entry, segment in self.chunks.parts_of(unit, sharded.index):
            part = out[segment.offset : segment.offset + segment.numel]
            self.chunks.work_on(entry, segment, part.copy_, writes=False)
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
                gathered.
        """
        first = grads[0].sharded.name
        ungathered = [g for g in grads if not self.units[g.sharded.unit].keepers]
        nbytes = sum(g.numel() * (4 + g.itemsize * (g.dtype is not torch.float32)) for g in ungathered)
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
        squares = self._squares()
        factors, wanted = np.zeros(self._first[-1]), np.zeros(self._first[-1], dtype=bool)
        for grad in grads:
            place = self._places[grad.sharded]
            factors[place], wanted[place] = grad.factor, True
        with np.errstate(all="ignore"):  # what is Inf or NaN shows in the answer
            terms = (np.square(factors)[self._owners] * squares)[wanted[self._owners]]
            # cumsum adds one after the other; sum() and np.sum would group in their own ways.
            mine = np.cumsum(np.append(0.0, terms))[-1:]
            return float(np.sqrt(self._add_up("the norm of the gradients", mine)[0]))

    @commit
    def norms(self, grads: Sequence[ShardedGrad]) -> list[float]:
        """Return the 2-norm of each gradient, unscaled, with its factor: [Note: norms]."""
        self.reduce_waiting()
        self.wait()
        with np.errstate(all="ignore"):
            mine = np.bincount(self._owners, self._squares(), minlength=self._first[-1])
            sums = self._add_up("the norms of gradients", mine.astype(np.float64))
        return [math.sqrt(sums[self._places[grad.sharded]]) * abs(grad.factor) for grad in grads]

    def _squares(self) -> npt.NDArray[np.float64]:
        """Return the sums of the squares of all pieces."""
        self.chunks.sum_squares()
        return np.concatenate([np.empty(0), *[self.chunks.entries[c.id].squares for c in self._own]])

    def _add_up(self, what: str, mine: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sums over all ranks, added in their order. Collective."""
        sums = np.zeros_like(mine)
        for told in self._comm.exchange(what, mine.tobytes()):
            sums = sums + np.frombuffer(told)
        return sums

    @commit
    def reconcile(self) -> None:
        """Drop from the shards what the user dropped by `p.grad = None`."""
        dropped = set()
        with torch._C.DisableTorchFunctionSubclass():
            for sharded, number in self._numbers.items():
                grad = sharded.param.grad
                if type(grad) is not ShardedGrad or grad.sharded is not sharded or grad.number != number:
                    dropped.add(sharded.unit)
        for unit in (self.units[index] for index in dropped):
            self._keep(unit, {p.index for p in unit.params if self._is_ours(p)})

    def close(self) -> None:
        """Finish and end the worker, and let go of the gradients: Python's collector does not see that a
        parameter holds its gradient, which holds the parameter."""
        self.chunks.close()
        for unit in self.units:
            for sharded in unit.params:
                if isinstance(sharded.param.grad, ShardedGrad):
                    sharded.param.grad = None
