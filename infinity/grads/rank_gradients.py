"""Gradients of several ranks: what has arrived is added up over them, and each keeps its slices of the mean.

In ZeRO stages 2 and 3 that happens as a unit's backward ends, and goes on behind the backward ([Note: behind
compute]). In stages 0 and 1 every rank keeps its whole gradients until the step. The gradients of the first
backward stay in the compute dtype, as autograd made them; those of later backwards are added in fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from infinity.core.commits import commit, in_backward
from infinity.core.errors import GradientError
from infinity.hardware.device import Task
from infinity.hardware.ranks import told
from infinity.params.param import ShardedParam
from infinity.params.unit import ParamUnit

from .buffer import Arrival, UnitBuffer
from .changes import Change, agree_on_changes, change_of
from .gradients import Gradients
from .reduction import add_up, codes_of, elsewhere, of_all
from .sharded_grad import ShardedGrad


class RankGradients(Gradients):
    """Takes gradients over, and reduces them over ranks.

    Args:
        waits: what arrives is reduced when it is asked for, at the latest by a step, or in the last of the
            step's backwards (ZeRO's stages 0 and 1), and not as its unit's backward ends.
    """

    of_ranks: ClassVar = True

    def __init__(self, *given: Any, waits: bool, **options: Any) -> None:
        super().__init__(*given, **options)
        self._waits = waits
        self._waiting: dict[int, UnitBuffer] = {}  # unit → what of several backwards is not reduced
        self._came: dict[int, dict[int, Arrival]] = {}  # unit → what has arrived in this backward
        self._found: dict[str, Change] = {}  # what the backward that is under way has found in `p.grad`
        #: What is being added up, in order: a unit, what of it had arrived on this rank, and the sum.
        self._under_way: deque[tuple[int, Mapping[int, Arrival], Task]] = deque()

    # -- what a user and autograd put into `p.grad` -----------------------------------------

    def adopt(self, sharded: ShardedParam) -> bool:
        """Return whether there is a gradient.

        Raises:
            GradientError: it is none that a backward made.
        """
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
        return grad is not None

    def begin_backward(self) -> None:
        """Note what the user left in `p.grad` before a backward adds to it.

        Raises:
            GradientError: a gradient is none that a backward made.
        """
        self._found = self._changes()
        self._backwards += 1

    def _changes(self) -> dict[str, Change]:
        """Return what the user has made of each gradient since the last backward: it has to be the same on
        all ranks, as `agree_on_changes` finds out.

        Raises:
            GradientError: a gradient is none that a backward made; the others are told.
        """
        found = {}
        with told(self._comm):
            for unit in self.units:
                buffer = self._filling.get(unit.index)
                for sharded in unit.params:
                    if sharded.spec.trainable:
                        self.adopt(sharded)
                        arrival = buffer.arrivals.get(sharded.index) if buffer is not None else None
                        found[sharded.name] = change_of(sharded, arrival)
        return found

    @commit
    def add(self, grad: ShardedGrad, other: torch.Tensor) -> None:
        """Add to a gradient what autograd has made, which is multiplied by the loss scale."""
        buffer, index = self._buffer_for(grad.sharded), grad.sharded.index
        waiting = buffer.arrivals.get(index)
        if waiting is None or waiting.zero:
            super().add(grad, other)
            return
        # It is reduced with the rest of the unit, on all ranks at once.
        if (factor := grad.factor * self.scale) != 1.0:
            buffer.scale(index, factor)
            buffer.arrivals[index] = waiting._replace(factor=waiting.factor * factor)
            grad.factor = 1.0 / self.scale
        buffer.add(index, other)

    def read(self, grads: Sequence[ShardedGrad]) -> list[torch.Tensor]:
        """Return gradients as `p.grad` shows them. Collective.

        Raises:
            GradientError: a backward is running; or as with one rank.
        """
        if in_backward():
            raise GradientError(
                f"the gradient of {grads[0].sharded.name!r} is not reduced over the ranks yet",
                expected="with several ranks, reads of gradients after the backward",
                found=f"a read inside the backward, on rank {self._comm.rank}",
                cure="read it when the backward has returned",
            )
        return super().read(grads)

    # -- out of the backward ----------------------------------------------------------------

    def arrived(self, sharded: ShardedParam, *, made: bool = True) -> bool:
        """Take over what is in `p.grad`. Return False: ranks reduce a unit where the program says, not where
        its gradients happen to be there."""
        super().arrived(sharded, made=made)
        return False

    def _buffer_for(self, sharded: ShardedParam) -> UnitBuffer:
        if any(unit == sharded.unit for unit, *_ in self._under_way):
            self._finish_reduced()
        return super()._buffer_for(sharded)

    def _make_room(self, unit: int, nbytes: int) -> None:
        """Nothing: a unit is sent where the program says, on all ranks."""

    @commit
    def reduce(self, unit: ParamUnit) -> None:
        """The backward of a unit ends: reduce what has arrived on any rank, and `send` this rank's slices of
        it. Collective, unless that waits.

        Raises:
            RankError: another rank failed, or does something else.
        """
        if not unit.layout.gradient_nbytes:
            return
        if not self._waits:
            self._reduce(unit)
            return
        self._accumulate(unit)
        came = bytes([unit.index in self._came])  # or it ends again, as one with tied parameters
        if self.is_last and b"\1" in self._comm.exchange(f"the end of {unit.layout.name!r}", came):
            self._reduce(unit)

    @commit
    def reduce_rest(self) -> None:
        """`reduce` what is left when a backward ends, on any rank: units whose inputs need no gradient."""
        if not self._waits:
            self._reduce_any("the end of a backward", self._filling, self._found)
            return
        self._accumulate(*self.units)
        came, self._came = self._came, {}
        if self.is_last:
            self._reduce_any("the end of a backward", self._waiting, self._found)
        else:
            self._join(came)

    @commit
    def reduce_waiting(self) -> None:
        """`reduce` all that waits on any rank; in stages 2 and 3 that is what users added. Collective.

        Raises:
            GradientError: a gradient is none that a backward made.
            DivergenceError: a user has changed one on some ranks, or one that is another's.
        """
        changes = self._changes()
        if not self._waits:
            added = [i for i, buffer in self._filling.items() if not buffer.is_zero]
            self._reduce_any("what was added to gradients", added, changes)
            return
        self._accumulate(*self.units)
        self._came.clear()  # what is reduced here does not come in a backward
        for index, waiting in self._waiting.items():
            for sharded in self.units[index].params:
                if not self._is_ours(sharded):  # p.grad = None
                    waiting.drop(sharded.index)
        self._reduce_any("the gradients that wait", self._waiting, changes)

    def _reduce_any(self, what: str, here: Collection[int], changes: Mapping[str, Change]) -> None:
        """Reduce the units of which any rank has something."""
        mine = bytes(i in here for i in range(len(self.units)))
        came = agree_on_changes(self._comm, what, mine, changes)
        for unit in self.units:
            if any(units[unit.index] for units in came):
                self._reduce(unit)
        self._finish_reduced()

    def _reduce(self, unit: ParamUnit) -> None:
        """Begin to add up what has waited of a unit, else what is arriving, on all ranks; finish the one
        before."""
        self.chunks.let_go()
        self._finish_reduced()
        mine = self._waiting.pop(unit.index, None)
        if mine is None:
            mine = self._filling.pop(unit.index, None) or UnitBuffer(unit.layout, self._device)
            mine.seal()
        made, comm, device = mine.mark(), self._comm, self._device
        task = comm.begin(lambda: add_up(comm, mine, made, device))
        self._under_way.append((unit.index, mine.arrivals, task))

    @commit
    def _finish_reduced(self) -> None:
        """Send this rank's slices of what is being added up.

        Raises:
            DivergenceError: a gradient replaces another one here, and is added to it elsewhere.
            RankError: another rank failed, or does something else.
        """
        while self._under_way:
            index, mine, task = self._under_way.popleft()
            self._comm.finish(task)
            buffer: UnitBuffer = task.result()
            self.chunks.wait(index)
            for i in elsewhere(mine, buffer.arrivals):  # what arrived elsewhere is this rank's, too
                sharded = self.units[index].params[i]
                buffer.arrivals[i] = self._arrived_elsewhere(sharded, buffer.arrivals[i])
            self._send(buffer)

    def _arrived_elsewhere(self, sharded: ShardedParam, arrival: Arrival) -> Arrival:
        """Add a gradient of a parameter for which one has arrived only on another rank (`elsewhere`)."""
        grad = sharded.param.grad
        if not isinstance(grad, ShardedGrad) or (arrival.fresh and not self.holds(grad)):
            sharded.param.grad = ShardedGrad(sharded, self, self.begin(sharded), 1.0 / self.scale)
            return arrival
        if not arrival.fresh:
            arrival = arrival._replace(factor=grad.factor * self.scale)
        grad.factor, grad.is_zero = 1.0 / self.scale, False
        return arrival

    def send(self, unit: ParamUnit) -> None:
        """Send what has arrived for `unit` to its tier, if that is zeros alone: the rest is reduced first."""
        buffer = self._filling.get(unit.index)
        if buffer is not None and buffer.is_zero and not self._waits:
            super().send(unit)

    def send_all(self) -> None:
        """Send everything that has arrived, and is reduced."""
        if self._under_way:
            self._finish_reduced()
        super().send_all()

    @commit
    def clear(self) -> None:
        """Forget all gradients."""
        super().clear()
        self._waiting.clear()

    # -- stages 0 and 1 ---------------------------------------------------------------------

    def _accumulate(self, *units: ParamUnit) -> None:
        """Have what a backward has brought of `units` wait, beside what waits already."""
        for unit in units:
            buffer = self._filling.pop(unit.index, None)
            if buffer is None or not buffer.arrivals:
                continue
            came = self._came.setdefault(unit.index, {})
            # Of several in one backward, as of a layer that is recomputed reentrantly, the first one counts.
            came.update({i: a for i, a in buffer.arrivals.items() if i not in came or came[i].zero})
            buffer.seal()
            if (mine := self._waiting.get(unit.index)) is None:
                self._begin(unit, buffer)
            else:
                self._waiting[unit.index] = mine.merge(buffer)

    def _begin(self, unit: ParamUnit, buffer: UnitBuffer) -> None:
        # What was reduced before makes way: of an update that reads it nothing is left, as a forward has
        # used the unit.
        self.chunks.wait(unit.index)
        self._updates.wait_unit(unit.index)
        self.chunks.free(unit)
        self._waiting[unit.index] = buffer

    def _join(self, came: Mapping[int, Mapping[int, Arrival]]) -> None:
        """Treat gradients that arrived on any rank in a backward as this rank's, too, so that all ranks see
        the same."""
        layouts = [unit.layout for unit in self.units]
        mine = codes_of(layouts, came)
        of_ranks = agree_on_changes(self._comm, "the end of a backward", mine, self._found)
        for index, arrivals in of_all(layouts, came, of_ranks).items():
            unit = self.units[index]
            for i in elsewhere(came.get(index, {}), arrivals):
                arrival = self._arrived_elsewhere(unit.params[i], arrivals[i])
                if index not in self._waiting:
                    self._begin(unit, UnitBuffer(unit.layout, self._device))
                self._waiting[index].join(i, arrival)
