"""The phases of a training loop, and the four places that see all of it.

[Note: the seams] The places are `begin_forward`, when a forward begins from outside; `Gradients.reduce`, when
a unit's gradients of one backward have arrived; `end_backward`, when the outermost backward is over; `step`,
when an optimizer's step begins. The engine calls them in the order of the program, on the thread that
runs it. No other call tells one part of the engine that another phase has begun. Work that concerns all units
or all ranks (collectives, commits, traces) attaches to these four places and to no others.

torch reports neither a backward that raises nor a forward that Ctrl-C ends. So the engine asks torch whether
a backward is running; the next forward from outside removes abandoned forward objects; and what keeps a
unit is a use that a reset can drop ([Note: uses], [Note: looks at the stack]).

[Note: nothing moves] Where all units are placed on the device, in one version, the forward of a scope inside
the root's moves nothing, and keeps no unit that could go. Such a forward is *still*: the engine notes it on a
list of its own, and changes no other state. So it acquires nothing, which costs more than a small layer
computes. A unit that waits for its update, a backward, another thread and a trace take the usual way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

import torch
from torch.autograd.variable import Variable

from infinity.core import handlers
from infinity.core.commits import commit, in_backward
from infinity.core.errors import ClosedError, ParameterError
from infinity.core.spans import Recorder, now
from infinity.core.stack import calls_of, is_called
from infinity.optim.behind import Behind, Parts
from infinity.optim.blocks import Blocks
from infinity.params.discover import Scope
from infinity.params.eager import eager
from infinity.params.param import ShardedParam
from infinity.params.uses import Use, UseKind

from . import inputs, saved
from .activations import Activations
from .claims import Claims, Forward

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
        self.claims = Claims(parts.residency)
        self.uses = parts.residency.uses  # all that is under way: [Note: uses]
        self.blocks = Blocks(parts.residency, parts.edits)
        self.token = saved.Forwards()  # whose hooks on saved tensors are ours
        self.closed = ""  # why, when it is
        self._partly = ""  # what has ended early, and left the parameters and their state not of one step
        self.behind: Behind | None = None  # see `attach`
        self._has_graph = False  # the forward that began from outside, but for what it checkpoints
        self.newest = False  # the version that what is under way uses: [Note: two versions]
        self._of_graph = False  # the one that the last forward with a graph used
        self.times = {"step": 0.0, "update": 0.0}
        self._last_step_end: float | None = None
        self._residency = parts.residency
        self._gradients = parts.gradients
        self._updates = parts.updates
        self._updater = parts.updater
        self._edits = parts.edits
        self._store = parts.tiers.store
        self._recorder = recorder
        self._activations = activations
        self._left = 0  # when the last forward with a graph ended, for traces
        self._stays = self._residency.stays  # whether a forward may be still: [Note: nothing moves]
        self._still: list[Forward] = []  # of one thread, innermost last
        self._without_graph: dict[int, Forward] = {}  # still, by scope

    def attach(self, behind: Behind | None) -> None:
        """From now on `behind` updates units in the last backward of a step, if there is one."""
        self.behind = behind

    def close(self, why: str) -> None:
        """Refuse all that follows, because of the first `why`."""
        self.closed = self.closed or why

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not (in_backward() or self.in_forward)

    def _of_scopes(self, kind: UseKind) -> list[Forward]:
        """Return the forwards of scopes, or their backwards, that are under way, innermost last."""
        return [use for use in self.uses.of[kind] if isinstance(use, Forward)]

    def _roots(self) -> list[Root]:
        return [use for use in self.uses.of[UseKind.ROOT] if isinstance(use, Root)]

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
        return not self.closed and not self._partly

    def check(self, *, looks: bool = False) -> None:
        """Raise what failed in the background, that the engine is closed, or that a `step()` comes first, but
        for who only `looks` at gradients. End `gathered` blocks that were left and did not come to their
        end."""
        saved.leave_left()
        backward = in_backward()
        self._check(backward=backward)
        if self.behind is not None and not (backward or looks):
            self.behind.check_stepped("a use of the model or its state")

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
        if self._partly:
            raise ParameterError(
                "some parameters and their state may be from another step, or from a checkpoint",
                expected="a complete step or load",
                found=self._partly,
                cure="load a whole checkpoint, with `infinity.load`; or build the model again",
            )
        self._updates.check()
        self._store.check()

    def end_blocks(self) -> None:
        """End the `gathered` blocks that were left: see `Blocks.end_left`."""
        self.blocks.end_left(self.lose)

    def note_lost(self) -> None:
        """Note what a backward that did not come to its end has updated: it cannot be taken back."""
        if self.behind is not None and not in_backward() and self.behind.abandon():
            self.lose('with update="backward", the last backward of a step, which raised or was interrupted')

    def lose(self, found: str) -> None:
        """Refuse to go on until a load succeeds, because of what was `found`."""
        self._partly = found
        if self.behind is not None:
            self.behind.forget()

    @contextlib.contextmanager
    def beginning_load(self) -> Iterator[None]:
        """A block in which a load begins: it may use what is lost, and stays lost if the block raises."""
        self.note_lost()
        before, self._partly = self._partly, ""
        try:
            yield
        except BaseException:
            self._partly = self._partly or before
            raise

    def mended(self) -> None:
        """Go on: a load is complete."""
        self._partly = ""

    # -- forward ----------------------------------------------------------------------------

    def begin_forward(self, use: object, *, training: bool) -> None:
        """A forward begins from outside of any other: take the engine lock for it, and use the version that
        `training` or evaluating uses."""
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
        self._has_graph = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self._of_graph = self.newest
        self._residency.show(newest=self.newest)
        self._residency.schedule.expect(torch.is_grad_enabled() and self.trains)

    def enter_root(self, module: torch.nn.Module, use: object) -> bool:
        """A forward of the root begins; return whether it begins from outside, and not in a forward or a
        backward. What was left by others is gone then."""
        if in_backward():
            self.check()
            return False
        self.commits.begin(use)
        self.check()
        if roots := self._roots():
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
        if (log := self._recorder.log) is not None and len(self._roots()) == 1:
            log.enter(use, "recompute" if in_backward() else "forward", -1)

    def leave_root(self, use: object) -> bool:
        """A forward of the root is over, also when it raised; return whether it was the outermost."""
        roots = self._roots()
        if roots:
            self.uses.end(roots[-1])
            saved.leave(roots[-1].frame)
        self.claims.release_wanted()
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

    def enter_still(self, scope: Scope) -> Forward | None:
        """A forward of a scope begins, as in `enter`, if it is still; else do nothing, and return None."""
        if not self._stays or scope.looks or self.behind is not None or self._recorder.log is not None:
            return None
        if in_backward() or not self.commits.mine or not self.uses.of[UseKind.ROOT]:
            return None
        if not self._residency.use_still(scope.units, note=self.trains):
            return None
        if torch.is_grad_enabled():
            forward = self._forward(scope)
            forward.frame = saved.enter(self.token)
        else:  # one for all: no backward asks anything of it
            forward = self._without_graph.get(id(scope)) or self._forward(scope)
            self._without_graph[id(scope)] = forward
            forward.thread = threading.get_ident()
        forward.still = True
        self._still.append(forward)
        return forward

    def enter(self, scope: Scope) -> Forward:
        """A forward of a scope begins."""
        forward = self._forward(scope)
        if forward.recomputes:
            self.end_passed()
        elif self.uses.of[UseKind.ROOT]:
            self.commits.check_thread()
        else:  # not called through the root
            self.begin_forward(forward, training=scope.module.training)
            forward.newest = self.newest
        if self.behind is not None and self._has_graph and not forward.recomputes:
            self.behind.visit(scope.units)
        self.claims.release_recomputed(scope)
        self.claims.release_wanted()
        for again in [*self.uses.of[UseKind.RECOMPUTED]]:  # of this scope
            self.uses.end(again)  # what it kept, this one does
        self.uses.begin(forward)
        forward.frame = saved.enter(self.token)
        self._residency.acquire(scope.units, forward, newest=self.newest)
        if (log := self._recorder.log) is not None:
            log.enter(forward, "recompute" if forward.recomputes else "forward", _first(scope))
        return forward

    def leave(self, scope: Scope) -> Forward | None:
        """This thread's innermost forward of a scope is over, also when it raised; None: it never began,
        for another thread holds the engine lock."""
        me = threading.get_ident()
        if self._still and not in_backward():
            for at in range(len(self._still) - 1, -1, -1):
                still = self._still[at]
                if still.scope is scope and still.thread == me:
                    del self._still[at:]  # with what an interrupt has left inside of it
                    saved.leave(still.frame)
                    return still
        for forward in reversed([*self.uses.of[UseKind.FORWARD]]):
            if isinstance(forward, Forward) and forward.scope is scope and forward.thread == me:
                saved.leave(forward.frame)
                return forward
        mine = in_backward() or self.commits.mine
        return self._forward(scope) if mine else None

    def _forward(self, scope: Scope) -> Forward:
        return Forward(scope, inputs.next_number(), newest=self.newest, recomputes=in_backward())

    def release(self, forward: Forward) -> None:
        """Let go of what a forward of a scope used; then others may come in."""
        if forward.still:
            return
        try:
            self.claims.release_wanted()
            if (log := self._recorder.log) is not None:
                log.leave(forward)
            if in_backward() and torch.is_grad_enabled():
                # Recomputation: its backward follows at once, or another scope comes.
                self.uses.turn(forward, UseKind.RECOMPUTED)
            else:
                self._residency.release(forward)
        finally:
            self.commits.leave(forward)

    # -- backward ---------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward is under way: the first of it, or any later time."""
        # A callback fires at the end of the backward that queues it, which may be the inner one
        # of reentrant checkpointing: each queues one, and the last to end is the outermost.
        task = torch._C._current_graph_task_id()
        tasks = self.uses.of[UseKind.TASK]
        for use in tasks:
            if use.task == task:
                return
        if not tasks:
            self.commits.begin(self.token)
            if (log := self._recorder.log) is not None:
                log.backward(self, self._left)
            self._prepare_backward()
        self.uses.begin(Use(UseKind.TASK, task=task))
        Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))

    @commit
    def _prepare_backward(self) -> None:
        """Its gradients join what is in `p.grad`; an update may follow, of the first units first."""
        saved.leave_left()
        self._check(backward=True)
        if self.behind is not None:
            self.behind.check_begin()
        self._residency.show(newest=self._of_graph)
        self._gradients.begin_backward()
        if self.behind is not None and self._gradients.is_last and not self._updates.busy():
            self.behind.begin()
        elif not self._updates.busy():
            units = self._residency.cache.forward_order()
            self._updater.read_ahead(c for u in units for c in u.layout.trainable_chunks)

    def begin_root_backward(self, *, newest: bool) -> None:
        """The gradient of an output of the root is there, whose forward used the `newest` version or not."""
        self.begin_backward()
        self.newest = newest

    def begin_scope_backward(self, forward: Forward) -> None:
        """The gradient of an output of a scope is there."""
        self.begin_backward()
        self.end_passed()
        forward.task = torch._C._current_graph_task_id()
        self.uses.turn(forward, UseKind.BACKWARD)
        self.claims.release_wanted()
        self.claims.release_recomputed(forward.scope)
        self.newest = forward.newest
        units = forward.scope.units
        if self.behind is not None:  # an output that is handed on has its gradient last: nothing reads them
            units = tuple(unit for unit in units if not self.behind.has_updated(unit))
        self._residency.acquire(units, forward, newest=self.newest)
        self.claims.release_recomputed(None)
        if (log := self._recorder.log) is not None:
            log.enter(forward, "backward", _first(forward.scope))

    @eager
    def end_scope_backward(self, forward: Forward) -> None:
        """The backward of a scope is over: [Note: the end of a scope's backward]."""
        with self.commits:
            self._end_scope(forward)

    def _end_scope(self, forward: Forward) -> None:
        # Or it has ended at another input, or never began.
        claimed = forward in self.uses.of[UseKind.BACKWARD]
        for index in forward.scope.units:
            self._gradients.reduce(self._residency.units[index])
        if claimed:
            self._residency.release(forward)
        self.claims.release_wanted()
        self._passed(forward)
        if (log := self._recorder.log) is not None:
            log.leave(forward)

    def _passed(self, forward: Forward) -> None:
        if self.behind is not None and not forward.ended:
            forward.ended = True
            self.behind.passed(forward.scope.units)

    def came(self, sharded: ShardedParam) -> None:
        """A parameter's gradient has come in the backward that is under way."""
        self.begin_backward()
        if self.behind is not None:
            self.behind.came(sharded)

    def end_passed(self) -> None:
        """End the backwards of scopes that the node that runs now was made before."""
        number, task = inputs.number_now(), torch._C._current_graph_task_id()
        for forward in [*self.uses.of[UseKind.BACKWARD]]:
            # on whichever thread it runs
            if isinstance(forward, Forward) and forward.start > number and forward.task == task:
                self.end_scope_backward(forward)

    @eager
    def _backward_ends(self, task: int) -> None:
        with self.commits:
            self._end_task(task)

    def _end_task(self, task: int) -> None:
        for use in [*self.uses.of[UseKind.TASK]]:
            if use.task == task:
                self.uses.end(use)
        if self.uses.of[UseKind.TASK]:
            for forward in self._of_scopes(UseKind.BACKWARD):
                if forward.task == task:
                    self.end_scope_backward(forward)
        else:
            self.end_backward()

    def end_backward(self) -> None:
        """The outermost backward is over: all of its gradients are there."""
        self._residency.gather_all()
        self._gradients.reduce_rest()
        for forward in self._of_scopes(UseKind.BACKWARD):
            self._passed(forward)
        if self.behind is not None:
            self.behind.end()
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
        if self.behind is not None:
            self.behind.check_stepped("a use of the model or its state")
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
        self._still.clear()
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
        self.uses.drop(UseKind.TASK)
        self.claims.forget()
        self.commits.leave(self.token)
        self._gradients.send_all()
        self._residency.drop(UseKind.BACKWARD, UseKind.RECOMPUTED, UseKind.ONCE)


def _first(scope: Scope) -> int:
    """Return the unit that a scope's time is put down to."""
    return scope.units[0] if scope.units else -1
