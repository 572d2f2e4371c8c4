"""The update behind the backward, ``Config(update="backward")``.

[Note: behind the backward] In the last backward of a step, which `Config(accumulation)` counts, the engine
updates a unit when three conditions hold: all of its gradients have arrived, every forward that used it has
had its backward, and there is no claim on it, alias of its memory or
reference to it in a graph any more. (An operator reads a parameter before autograd passes
that parameter's gradient on.) Units are updated from the last to the first; a unit that lacks one of the
conditions is updated when that backward ends. So updates overlap with the rest of the backward, with the
scalars that the param groups had when it began.

These updates cannot be undone. So every change that would have changed the step is an error, at the change or
at the latest in `step()`: the bits are those of ``update="sync"``, or there is an error. If the backward does
not complete, or a value that the update used has changed, some parameters are from the next step, and only a
load helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from infinity.core.commits import commit, in_backward
from infinity.core.errors import GradientError, InfinityError, ParameterChangedError
from infinity.grads.gradients import Gradients
from infinity.grads.sharded_grad import ShardedGrad
from infinity.hardware.ranks import Comm
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit
from infinity.params.updates import Updates

from .chunk_io import Tiers
from .edits import Edits
from .state_io import States, bump
from .update import ParamUpdate, Updater, chunk_updates

#: What helps where the step cannot be made as it should.
_LOAD = 'load the last checkpoint (`infinity.load`); and train such a loop with update="overlap"'


class Parts(NamedTuple):
    """The parts of an engine that a step goes through."""

    tiers: Tiers
    residency: Residency
    gradients: Gradients
    comm: Comm
    states: States
    edits: Edits
    updates: Updates
    updater: Updater


class Stepping(Protocol):
    """What an optimizer does for its update (see `OffloadOptimizer`)."""

    def options(self) -> dict[ShardedParam, ParamUpdate]:
        """Return what the param groups say of each of their parameters, but for its step and its factor."""


class BackwardUpdate:
    """Updates units in the last backward of each step: [Note: behind the backward].

    Attributes:
        pending: such a backward is over, and its `step()` is to come.
    """

    def __init__(self, optimizer: Stepping, parts: Parts) -> None:
        self.commits = parts.residency.commits
        self.pending = False
        self._optimizer = optimizer
        self._tiers, self._gradients, self._residency = parts.tiers, parts.gradients, parts.residency
        self._edits, self._updates, self._updater = parts.edits, parts.updates, parts.updater
        self._under_way = False
        self._options: dict[ShardedParam, ParamUpdate] = {}  # when the backward began
        self._visits: Counter[int] = Counter()  # of forwards of units whose backward has not come
        self._visited: set[int] = set()  # which had any, when the backward began: a graph may be used again
        self._came: set[ShardedParam] = set()  # gradients in this backward
        for unit in self._residency.units:
            unit.note_references()

    # -- in a forward and a backward --------------------------------------------------------

    def visit(self, units: Iterable[int]) -> None:
        """A forward that has a backward to come uses `units`."""
        self._visits.update(units)

    def check_begin(self) -> None:
        """Raise `GradientError` where a backward begins between the last one of a step and `step()`."""
        if self.pending:
            raise GradientError(
                "a backward between the last backward of a step and `step()`",
                expected="`step()`: accumulation counts every backward, also those of `torch.autograd.grad`",
                found="a further backward",
                cure="call `step()` first; or set the number of backwards with Config(accumulation=…), or "
                "train "
                'with update="overlap"',
            )

    def begin(self) -> None:
        """The last backward of a step begins.

        Raises:
            ParameterError: a parameter is inside a `gathered` block.
            ParameterChangedError: one was edited where its update would not see it.
        """
        units = [u for u in self._residency.cache.forward_order() if u.layout.trainable_chunks]
        self._residency.check_blocks(unit.index for unit in units)
        self._edits.check_unseen()
        self._edits.adopt_all()
        self._options = self._optimizer.options()
        self._came.clear()
        self._visited = {unit for unit, visits in self._visits.items() if visits}
        self._updater.begin(chunk for unit in reversed(units) for chunk in unit.layout.trainable_chunks)
        self._under_way = True

    def came(self, sharded: ShardedParam) -> None:
        """A parameter's gradient of this backward is there."""
        if self._under_way:
            self._came.add(sharded)

    def passed(self, units: Sequence[int]) -> None:
        """A backward of a forward that used `units` is over."""
        for index in units:
            self._visits[index] = max(0, self._visits[index] - 1)  # a recomputed forward may end twice
        if self._under_way:
            self._update_final(units)

    @commit
    def _update_final(self, units: Sequence[int]) -> None:
        for unit in (self._residency.units[i] for i in units):
            trainable = [s for s in unit.params if s.spec.trainable and s.param.requires_grad]
            passed = unit.index in self._visited and not (self._visits[unit.index] or unit.in_use)
            held = bool(unit.references) or unit.is_held()  # a graph, or somebody, may read what is there now
            if passed and trainable and self._came.issuperset(trainable) and not held:
                self._update(unit)

    def _update(self, unit: ParamUnit) -> None:
        """Update the parameters of a unit that have a gradient, once."""
        if unit.index in self._updates.used:
            return
        present: dict[ShardedParam, ShardedGrad] = {}
        for sharded in unit.params:
            if sharded in self._options and self._gradients.adopt(sharded):
                present[sharded] = sharded.param.grad  # type: ignore[assignment]
        if not present:
            return
        self._check_edited(unit)
        self._gradients.send(unit)
        self._residency.reshard_all({unit.index})
        # From here on it cannot be taken back.
        self._updates.use(unit.index, {s: (grad, grad.factor) for s, grad in present.items()})
        updates = {}
        for sharded, grad in present.items():
            updates[unit.index, sharded.index] = self._options[sharded].of(sharded, grad.factor)
        bump([*present])
        chunks = [
            c
            for c in unit.layout.trainable_chunks
            if any((unit.index, s.param) in updates for s in c.segments)
        ]
        landed = self._gradients.chunks.last(unit)
        matrices = sum(bool(s.spec.matrix and s.spec.numel) for s in present)
        self._updater.add(
            chunks, landed, lambda: chunk_updates(self._tiers, [unit], updates), matrices=matrices
        )
        self._residency.expect_updates({unit.index})

    def _check_edited(self, unit: ParamUnit) -> None:
        """Raise `ParameterChangedError` if a hook has edited a unit on the device in this backward, before
        the unit's update: [Note: edits]."""
        for sharded in unit.params if unit.on_device else ():
            if sharded.spec.trainable and sharded.param._version != sharded.version:
                raise self._edited(sharded, "in the last backward, before its update")

    @commit
    def end(self) -> None:
        """A backward is over, with all of its gradients: update what is left."""
        if not self._under_way:
            return
        for unit in reversed(self._residency.cache.forward_order()):
            self._update(unit)
        self._updater.end()
        self._under_way, self.pending = False, bool(self._updates.used)

    def abandon(self) -> bool:
        """What was under way does not come to its end; return whether it has changed parameters."""
        if not self._under_way:
            return False
        self._under_way = False
        self._updater.end()
        return self.forget()

    def forget(self) -> bool:
        """Forget what was updated; return whether that was anything."""
        self.pending = False
        self._visits.clear()
        return self._updates.forget_used()

    # -- behind it --------------------------------------------------------------------------

    def check_stepped(self, what: str) -> None:
        """Raise `GradientError` between the last backward of a step and `step()`, and in that backward, where
        `what` must not be."""
        self.check_outside(what)
        if self.pending:
            raise self._updates.early(what, after=True)

    def has_updated(self, unit: int) -> bool:
        """Return whether the backward that is under way has updated a unit."""
        return self._under_way and unit in self._updates.used

    def check_outside(self, what: str) -> None:
        """Raise `GradientError` in that backward, where `what` must not be."""
        if self._under_way and in_backward():
            raise self._updates.early(what, after=False)

    def check_options(self) -> None:
        """Raise `GradientError` if param groups have changed since the last backward began."""
        now = self._optimizer.options()
        if now == self._options:
            return
        both = now.keys() & self._options.keys()
        changed = next((s for s in both if now[s] != self._options[s]), None)
        if changed is None:
            changed, name = next(iter(now.keys() ^ self._options.keys())), "params"
            then, here = ("in a group" if changed in of else "in none" for of in (self._options, now))
        else:
            before, after = self._options[changed].named(), now[changed].named()
            name = next(n for n in after if before.get(n) != after[n])
            then, here = str(before.get(name)), str(after[name])
        raise GradientError(
            f"the param group of {changed.name!r} has changed since the last backward began",
            expected=f"{name} as the update had it: {then}",
            found=here,
            cure="restore it and call `step()` again; change param groups after `step()`, as schedulers do",
        )

    def changed(self) -> InfinityError | None:
        """Return what is wrong where gradients or parameters have changed since they were used."""
        for of_unit in self._updates.used.values():
            for sharded, (grad, factor) in of_unit.items():
                if grad.factor != factor or sharded.param.grad is not grad:
                    return self._wrong_gradient(sharded, "a change of it, or none")
        for sharded in self._options:
            if sharded.param.grad is not None and sharded not in self._updates.used.get(sharded.unit, ()):
                return self._wrong_gradient(sharded, "one that came later")
        if edited := self._edits.found():
            return self._edited(edited[0], "between the last backward and `step()`")
        return None

    @staticmethod
    def _edited(sharded: ShardedParam, when: str) -> ParameterChangedError:
        return ParameterChangedError(
            f"the parameter {sharded.name!r} was edited {when}",
            expected="parameters that only the update changes there",
            found="an edit, which the update has not seen",
            cure=_LOAD,
        )

    @staticmethod
    def _wrong_gradient(sharded: ShardedParam, found: str) -> GradientError:
        return GradientError(
            f"the gradient of {sharded.name!r} is not the one that its update used",
            expected='with update="backward", gradients as the last backward has left them',
            found=found,
            cure=_LOAD,
        )

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters that were updated."""
        return [sharded for of_unit in self._updates.used.values() for sharded in of_unit]
