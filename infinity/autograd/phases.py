"""The phases of a training loop, and the four places that see all of it.

[Note: the seams] The places are `begin_forward`, when a forward begins from outside; `Gradients.reduce`, when
a unit's gradients of one backward have arrived; `end_backward`, when the outermost backward is over; `step`,
when an optimizer's step begins. The engine calls them in the order of the program, on the thread that
runs it. No other call tells one part of the engine that another phase has begun. Work that concerns all units
or all ranks (collectives, commits, traces) attaches to these four places and to no others.

torch reports neither a backward that raises nor a forward that Ctrl-C ends. So the engine asks torch whether
a backward is running; the next forward from outside removes abandoned forward objects; and what keeps a
unit is a use that a reset can drop ([Note: uses], [Note: looks at the stack]).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.autograd.variable import Variable

from infinity.core import handlers
from infinity.core.commits import commit, hook, in_backward
from infinity.core.errors import ClosedError, ParameterError
from infinity.core.spans import Recorder, now
from infinity.core.stack import calls_of, is_called
from infinity.optim.backward_update import BackwardUpdate, Parts
from infinity.optim.blocks import Blocks
from infinity.params.discover import Scope
from infinity.params.eager import eager
from infinity.params.uses import Use, UseKind

from . import saved
from .activations import Activations

_task_now: Final = torch._C._current_graph_task_id  # -1: this thread is in no backward
_node_now: Final = torch._C._current_autograd_node
_next_number: Final = torch._C._autograd._get_sequence_nr  # of the next node that this thread makes

#: Why an engine is closed, and what to do then.
CLOSED: Final = "close() was called"
UNWRAPPED: Final = "unwrap() was called"
_AFTER: Final = {
    CLOSED: "build the model again, load a saved state and wrap it; to keep a model, call "
    "`infinity.unwrap(model)` in place of close()",
    UNWRAPPED: "use it as a plain model; or wrap the model again, and use the model that `wrap` returns",
}


class Root(Use):
    """A forward of the model, with `frame` of hooks on saved tensors."""

    def __init__(self, frame: object) -> None:
        super().__init__(UseKind.ROOT)
        self.frame = frame


class Forward(Use):
    """A forward of one scope, and then its backward. It refers to nothing of the engine: a unit refers to it.

    Attributes:
        frame: what `saved.leave` takes.
        newest: the version that it used: [Note: two versions].
        start: the number of the first of all nodes that it makes.
        task: autograd's number of the backward that it is in; -1: none.
        recomputes: whether it is inside of a backward.
        outside: whether it began from outside of any other.
        over: whether a backward of it has ended since the last began.
        passed: whether any has ended.
    """

    def __init__(self, scope: Scope, *, newest: bool) -> None:
        self.kind = UseKind.FORWARD  # what `Use` does, without a call
        self.units = set()
        self.thread = get_ident()
        self.scope = scope
        self.frame: object = None
        self.newest = newest
        self.start: int = _next_number()
        self.task = -1
        self.recomputes = _task_now() != -1
        self.outside = self.over = self.passed = False


class Phases:
    """The phases of one engine."""

    def __init__(
        self,
        owner: object,
        parts: Parts,
        recorder: Recorder,
        activations: Activations | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.owner = owner  # kept by whoever has the phases: the model's hooks, and the optimizer
        self.commits = parts.residency.commits
        self.trains = trains  # whether there is an optimizer; without, no forward has a backward to come
        self.uses = parts.residency.uses  # all that is under way: [Note: uses]
        self.blocks = Blocks(parts.residency, parts.edits)
        self.token = saved.Forwards()  # whose hooks on saved tensors are ours
        self.closed = ""  # why, when it is
        self._inconsistent = (
            ""  # what has ended early, and left the parameters and their state not of one step
        )
        self.backward_update: BackwardUpdate | None = None  # see `attach`
        self._has_graph = False  # the forward that began from outside, but for what it checkpoints
        self.newest = False  # the version that what is under way uses: [Note: two versions]
        self._of_graph = False  # the one that the last forward with a graph used
        self.times = {"step": 0.0, "update": 0.0}
        self._last_step_end: float | None = None
        self._residency = parts.residency
        self._residency.end_left = weak(self.end_blocks)  # threads of the engine have the residency
        self._gradients = parts.gradients
        self._updates = parts.updates
        self._updater = parts.updater
        self._edits = parts.edits
        self._store = parts.tiers.store
        self._recorder = recorder
        self._activations = activations
        self._left = 0  # when the last forward with a graph ended, for traces
        of: dict[UseKind, Any] = self.uses.of
        self.tasks = self.uses.tasks
        self._roots: dict[Root, None] = of[UseKind.ROOT]
        self._forwards: dict[Forward, None] = of[UseKind.FORWARD]
        self._recomputed: dict[Forward, None] = of[UseKind.RECOMPUTED]
        self._backwards: dict[Forward, None] = of[UseKind.BACKWARD]

    def attach(self, backward_update: BackwardUpdate | None) -> None:
        """From now on `behind` updates units in the last backward of a step, if there is one."""
        self.backward_update = backward_update

    def close(self, why: str) -> None:
        """Refuse all that follows, because of the first `why`."""
        self.closed = self.closed or why

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not (in_backward() or self.in_forward)

    @property
    def in_forward(self) -> bool:
        """Whether a forward is under way, inside of which a backward may be."""
        return self.uses.has(UseKind.ROOT, UseKind.FORWARD)

    def is_forward_here(self) -> bool:
        """Return whether this thread is in a forward: an interrupt leaves marks of one that is not."""
        return self.in_forward and is_called()

    @property
    def usable(self) -> bool:
        """Whether the engine is open, and its values are of one moment."""
        return not self.closed and not self._inconsistent

    def check(self, *, reads_only: bool = False) -> None:
        """Raise what failed in the background, that the engine is closed, or that a `step()` comes first, but
        for who only `looks` at gradients. End `gathered` blocks that were left and did not come to their
        end."""
        saved.leave_left()
        backward = in_backward()
        self._check(backward=backward)
        if self.backward_update is not None and not (backward or reads_only):
            self.backward_update.check_stepped("a use of the model or its state")

    @commit
    def _check(self, *, backward: bool) -> None:
        """`check`; in a `backward` nothing of an earlier one is lost."""
        if self.closed:
            raise ClosedError(
                "the engine of this model is closed",
                expected="an open engine",
                found=self.closed,
                cure=_AFTER[self.closed],
            )
        self.end_blocks()
        if not backward:
            self.note_lost()
        if self._inconsistent:
            raise ParameterError(
                "some parameters and their state may be from another step, or from a checkpoint",
                expected="a complete step or load",
                found=self._inconsistent,
                cure="load a whole checkpoint, with `infinity.load`; or build the model again",
            )
        self._updates.check()
        self._store.check()

    def end_blocks(self) -> None:
        """End the `gathered` blocks that were left: see `Blocks.end_left`."""
        self.blocks.end_left(self.lose)

    def note_lost(self) -> None:
        """Note what a backward that did not come to its end has updated: it cannot be taken back."""
        if self.backward_update is not None and not in_backward() and self.backward_update.abandon():
            self.lose('with update="backward", the last backward of a step, which raised or was interrupted')

    def lose(self, found: str) -> None:
        """Refuse to go on until a load succeeds, because of what was `found`."""
        self._inconsistent = found
        if self.backward_update is not None:
            self.backward_update.forget()

    @contextlib.contextmanager
    def beginning_load(self) -> Iterator[None]:
        """A block in which a load begins: it may use what is lost, and stays lost if the block raises."""
        self.note_lost()
        before, self._inconsistent = self._inconsistent, ""
        try:
            yield
        except BaseException:
            self._inconsistent = self._inconsistent or before
            raise

    def mark_consistent(self) -> None:
        """Go on: a load is complete."""
        self._inconsistent = ""

    # -- forward ----------------------------------------------------------------------------

    def begin_forward(self, use: object, *, training: bool, grad: bool) -> None:
        """A forward begins from outside of any other, maybe with a graph (`grad`): take the engine lock for
        it, and use the version that `training` or evaluating uses."""
        handlers.wrap()
        self.commits.begin(use)
        self.reset_abandoned()
        self.commits.begin(use)  # that ended what this thread had begun
        self.end_blocks()
        self._edits.given.check()
        if getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):
            raise ParameterError(
                "torch.autograd.graph.allow_mutation_on_saved_tensors() does not support a wrapped model",
                expected="a forward outside of it: it saves tensors before torch's operators change them, "
                "and does not see the changes of an update or of the end of a `gathered` block",
                found="a forward inside of it",
                cure="clone() tensors that you change before their backward",
            )
        self.newest = not training
        self._has_graph = grad
        if grad:
            self._of_graph = self.newest
        self._residency.show(newest=self.newest)
        self._residency.schedule.expect(grad and self.trains)

    def enter_root(self, module: torch.nn.Module, use: object) -> bool:
        """A forward of the root begins; return whether it begins from outside, and not in a forward or a
        backward. What was left by others is gone then."""
        if in_backward():
            self.check()
            return False
        self.commits.begin(use)
        self.check()
        if roots := [*self._roots]:
            # torch calls no hook after a KeyboardInterrupt: what it ended is not under way.
            goes_on = max(0, calls_of(module) - 1)
            for root in roots[goes_on:]:
                self.uses.end(root)
            if roots[:goes_on]:
                return False
        self.reset()
        self.commits.begin(use)  # once more: that ended what was left of others
        return True

    def push_root(self, use: object, frame: object) -> None:
        """The root's forward is under way, with `frame` of hooks on saved tensors."""
        self.uses.begin(Root(frame))
        if (log := self._recorder.log) is not None and len(self._roots) == 1:
            log.enter(use, "recompute" if in_backward() else "forward", -1)

    def leave_root(self, use: object) -> bool:
        """A forward of the root is over, also when it raised; return whether it was the outermost."""
        roots = [*self._roots]
        if roots:
            self.uses.end(roots[-1])
            saved.leave(roots[-1].frame)
        self._release_wanted()
        if roots[:-1]:
            return False
        grad, backward = torch.is_grad_enabled() and self.trains, in_backward()
        if (log := self._recorder.log) is not None:
            log.leave(use)
            self._left = now() if grad and not backward else 0
        if not grad and not backward:
            self._residency.schedule.end_cycle()
        return True

    def end_forward(self, use: object) -> None:
        """A forward that began from outside is over; without an optimizer, it is what figures count as a
        step."""
        if not self.trains:
            self.stepped(0.0)
        self.commits.leave(use)

    def enter(self, scope: Scope, *, grad: bool) -> Forward:
        """A forward of a scope begins, with grad mode or without."""
        forward = Forward(scope, newest=self.newest)
        if forward.recomputes:
            if self._backwards:
                self.end_passed()
        elif self._roots:
            if self.commits.holder != forward.thread:
                self.commits.check_thread()
        else:  # not called through the root
            forward.outside = True
            self.begin_forward(forward, training=scope.module.training, grad=grad)
            forward.newest = self.newest
        if self.backward_update is not None and self._has_graph and not forward.recomputes:
            self.backward_update.visit(scope.units)
        if self._recomputed:
            self._release_recomputed(scope)
        if self._residency.wanted:
            self._residency.release_wanted()
        for again in [*self._recomputed]:  # of this scope
            self.uses.end(again)  # what it kept, this one does
        self._residency.acquire(scope.units, forward, newest=self.newest)
        forward.frame = saved.enter(self.token)
        if (log := self._recorder.log) is not None:
            log.enter(forward, "recompute" if forward.recomputes else "forward", _first(scope))
        return forward

    def leave(self, scope: Scope) -> Forward | None:
        """This thread's innermost forward of a scope is over, also when it raised; None: it never began,
        for another thread holds the engine lock."""
        me = get_ident()
        for forward in reversed(self._forwards):
            if forward.scope is scope and forward.thread == me:
                if forward.frame is not None:
                    saved.leave(forward.frame)
                return forward
        mine = in_backward() or self.commits.mine
        return Forward(scope, newest=self.newest) if mine else None

    def release(self, forward: Forward, *, grad: bool) -> None:
        """Let go of what a forward of a scope used; then others may come in."""
        try:
            if self._residency.wanted:
                self._residency.release_wanted()
            if (log := self._recorder.log) is not None:
                log.leave(forward)
            if grad and forward.recomputes:
                # Recomputation: its backward follows at once, or another scope comes.
                self.uses.turn(forward, UseKind.RECOMPUTED)
            else:
                self._residency.release(forward)
        finally:
            if forward.outside:
                self.commits.leave(forward)

    @commit
    def want(self, units: Sequence[int], *, newest: bool, address: bool = False) -> None:
        """Code uses units outside of their scope; `address`: it has an address in their memory."""
        backward = in_backward()
        if backward:
            self.begin_backward()
            self.end_passed()
        note = backward or self.in_forward
        self._residency.want(units, newest=newest, note=note, address=address)

    def _release_recomputed(self, scope: Scope | None) -> None:
        """Let go of recomputed scopes, but for `scope`."""
        for use in [*self._recomputed]:
            if use.scope is not scope:
                self._residency.release(use)

    @commit
    def _release_wanted(self) -> None:
        self._residency.release_wanted()

    # -- backward ---------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward is under way: the first of it, or any later time."""
        # A callback fires at the end of the backward that queues it, which may be the inner one
        # of reentrant checkpointing: each queues one, and the last to end is the outermost.
        task = _task_now()
        if task in self.tasks:
            return
        if not self.tasks:
            self.commits.begin(self.token)
            if (log := self._recorder.log) is not None:
                log.backward(self, self._left)
            self._prepare_backward()
        self.tasks.add(task)
        Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))

    @commit
    def _prepare_backward(self) -> None:
        """Its gradients join what is in `p.grad`; an update may follow, of the first units first."""
        saved.leave_left()
        self._check(backward=True)
        if self.backward_update is not None:
            self.backward_update.check_begin()
        self._residency.show(newest=self._of_graph)
        self._gradients.begin_backward()
        if self.backward_update is not None and self._gradients.is_last and not self._updates.busy():
            self.backward_update.begin()
        elif not self._updates.busy():
            units = self._residency.cache.forward_order()
            self._updater.read_ahead(c for u in units for c in u.layout.trainable_chunks)

    def begin_root_backward(self, *, newest: bool) -> None:
        """The gradient of an output of the root is there, whose forward used the `newest` version or not."""
        self.begin_backward()
        self.newest = newest

    @eager
    @hook
    def begin_scope_backward(self, _: bool, forward: Forward, grad: torch.Tensor) -> None:
        """The gradient of an output of a scope is there."""
        if _task_now() not in self.tasks:
            self.begin_backward()
        self.end_passed()
        forward.task = _task_now()
        forward.over = False
        self.uses.turn(forward, UseKind.BACKWARD)
        if self._residency.wanted:
            self._residency.release_wanted()
        if self._recomputed:
            self._release_recomputed(forward.scope)
        self.newest = forward.newest
        units = forward.scope.units
        if (
            self.backward_update is not None
        ):  # an output that is handed on has its gradient last: nothing reads them
            units = tuple(unit for unit in units if not self.backward_update.has_updated(unit))
        self._residency.acquire(units, forward, newest=self.newest)
        if self._recomputed:
            self._release_recomputed(None)
        if (log := self._recorder.log) is not None:
            log.enter(forward, "backward", _first(forward.scope))

    @eager
    def input_comes(self, forward: Forward, grad: torch.Tensor) -> None:
        """The node of an input of a scope is about to run in a backward."""
        if not forward.over:
            self._end_at_input(forward)

    @hook
    def _end_at_input(self, _: bool, forward: Forward) -> None:
        self.end_scope_backward(forward)

    def end_scope_backward(self, forward: Forward) -> None:
        """The backward of a scope is over ([Note: the end of a scope's backward]), or it never began. The
        caller is in a commit."""
        claimed = forward in self._backwards
        for index in forward.scope.units:
            self._gradients.reduce(self._residency.units[index])
        if claimed:
            self._residency.release(forward)
        if self._residency.wanted:
            self._residency.release_wanted()
        forward.over = True
        if self.backward_update is not None:
            self._passed(forward, self.backward_update)
        if (log := self._recorder.log) is not None:
            log.leave(forward)

    def _passed(self, forward: Forward, backward_update: BackwardUpdate) -> None:
        if not forward.passed:
            forward.passed = True
            backward_update.passed(forward.scope.units)

    def end_passed(self) -> None:
        """End the backwards of scopes that the node that runs now was made before."""
        node, task = _node_now(), _task_now()
        number = node._sequence_nr() if node is not None else 2**64  # above all: this thread is at no node
        for forward in [*self._backwards]:
            # on whichever thread it runs
            if forward.start > number and forward.task == task:
                self.end_scope_backward(forward)

    @eager
    @hook
    def _backward_ends(self, _: bool, task: int) -> None:
        self.tasks.discard(task)
        if self.tasks:
            for forward in [*self._backwards]:
                if forward.task == task:
                    self.end_scope_backward(forward)
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """The outermost backward is over: all of its gradients are there."""
        self._residency.gather_all()
        self._gradients.reduce_rest()
        if self.backward_update is not None:
            for forward in self._backwards:
                self._passed(forward, self.backward_update)
            self.backward_update.end()
        if self.in_forward:
            self._reset_backward()  # it was called inside a forward, which goes on
        else:
            self.reset()
            self._residency.schedule.end_cycle()

    # -- step -------------------------------------------------------------------------------

    @commit
    def step(self) -> None:
        """A step of the optimizer begins: wait for all that it waits for. Changes nothing that a user
        sees."""
        self._finish()
        self._gradients.wait()

    def finish(self) -> None:
        """End what was left under way, and wait for every update."""
        self._updates.check()
        if self.backward_update is not None:
            self.backward_update.check_stepped("a use of the model or its state")
        self._finish()

    @commit
    def _finish(self) -> None:
        saved.leave_left()
        self._check(backward=in_backward())
        if not self.is_forward_here():  # a hook of the user's makes the call
            self.reset()
        self._updater.wait()
        self._residency.resume_all()

    def stepped(self, seconds: float) -> None:
        """A step has returned to the user after `seconds`."""
        if self._activations is not None:
            self._activations.after_step()
        end = time.perf_counter()
        if self._last_step_end is not None:
            self.times["step"] = end - self._last_step_end
        self.times["update"] = seconds
        self._last_step_end = end
        stats = self._store.stats()
        self._recorder.step(
            round((end - seconds) * 1e9),
            sum(s.bytes_read for s in stats),
            sum(s.bytes_written for s in stats),
            round(max((r.active_seconds for r in self._store.ring_stats()), default=0.0) * 1e9),
        )

    # -- what was left ----------------------------------------------------------------------

    def reset(self) -> None:
        """Finish what a backward that raised, or a forward without one, has left."""
        self._left = 0
        if (log := self._recorder.log) is not None:
            log.leave_all()
        self.uses.drop(UseKind.ROOT, UseKind.FORWARD)
        saved.reset(self.token)
        self._reset_backward()
        self.commits.reset()

    def reset_abandoned(self) -> None:
        """`reset`, if something is left and no forward or backward is running. The caller holds the engine
        lock, so no other thread is in a use."""
        if in_backward() or self.is_forward_here():
            return
        if any(use.units for use in self.uses if use.kind is not UseKind.BLOCK):
            self.reset()

    def _reset_backward(self) -> None:
        """Finish what a backward has left; forwards that it was a part of go on."""
        self.tasks.clear()
        self.commits.leave(self.token)
        self._gradients.send_all()
        self._residency.drop(UseKind.BACKWARD, UseKind.RECOMPUTED)


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which its object is not kept alive by; it answers False after that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else False

    return call


def _first(scope: Scope) -> int:
    """Return the unit that a scope's time is put down to."""
    return scope.units[0] if scope.units else -1
