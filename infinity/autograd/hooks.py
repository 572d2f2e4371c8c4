"""Hooks: when units come and go, and when gradients are taken over.

No pairing of pre- and post-hooks is assumed. Recomputation stops early, so a forward may lack
its end; its reentrant form and shared layers fire twice. So claims on units are sets of owners,
and what an owner did not release is dropped at the next forward from outside.

A scope's backward begins when the gradient of one of its outputs is there (a hook on each), and ends as
inputs.py has it; what lacks either is settled when the outermost backward ends. A backward that begins
elsewhere makes a unit present where autograd asks for what it saved of it ([Note: references]), or where a
recomputation uses it; and so does a forward that uses a parameter of another scope.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable

from infinity.core.spans import Recorder, now
from infinity.core.turn import calls_around, is_inside
from infinity.grads.gradients import Gradients
from infinity.grads.sharded_grad import in_backward
from infinity.params.discover import Scope
from infinity.params.eager import eager
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamState, ParamUnit

from . import inputs, saved
from .activations import Activations
from .containers import cast, tensors_in
from .guard import Guard
from .guests import Guests


class _Call:
    """One forward of one scope: the owner of its backward's claim."""

    __slots__ = ("frame", "guest", "newest", "scope", "start", "task", "thread")

    def __init__(self, scope: Scope, newest: bool) -> None:
        self.scope = scope
        self.frame: object = None  # of hooks on saved tensors
        self.newest = newest  # the version that it used: [Note: two versions]
        self.thread = threading.get_ident()
        self.start = inputs.next_number()  # of all nodes that it makes, the first
        self.task = -1  # the backward that has begun its own
        self.guest: FrameType | None = None  # its frame, in a thread of a forward's own: [Note: turns]


class Hooks:
    """Installs the hooks on a model and takes them off again."""

    def __init__(
        self,
        model: nn.Module,
        scopes: Sequence[Scope],
        residency: Residency,
        gradients: Gradients,
        params: Sequence[ShardedParam],
        *,
        compute_dtype: torch.dtype,
        output_dtype: torch.dtype | None,
        check: Callable[[], None],
        check_given: Callable[[], None],
        on_backward: Callable[[], None],
        recorder: Recorder,
        activations: Activations | None = None,
    ) -> None:
        self._recorder = recorder
        self._shelter = residency.shelter
        self._left = 0  # when the last forward with a graph ended, for traces
        self._residency = residency
        self._gradients = gradients
        self._params = params
        self._compute_dtype = compute_dtype
        self._output_dtype = output_dtype
        self._check = check
        self._check_given = check_given
        self._on_backward = on_backward
        self._activations = activations
        self._guests = Guests(residency)
        self._guard = Guard(scopes, params, residency.units)
        self._token = object()  # whose hooks on saved tensors are ours
        self._tasks: set[int] = set()  # backwards under way, inner ones included
        self._begun: dict[_Call, None] = {}  # scopes whose backward is under way
        self._lazy: tuple[Scope, _Call] | None = None
        self._wanted: tuple[int, ...] = ()  # units that were asked for last, by autograd or by an operator
        self._addressed: set[int] = set()  # units asked for before, in whose memory somebody has an address
        self._handles: list[Any] = []
        self._depth = 0  # forwards of the root under way
        # Of each scope: its forwards under way, innermost last.
        self._current: list[tuple[Scope, list[_Call]]] = []
        self._root_frames: list[object] = []  # of its forwards under way, hooks on saved tensors
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        for scope in scopes:
            self._install(scope)
        self._handles.append(model.register_forward_hook(self._leave, always_call=True))
        for sharded in params:
            if sharded.param.requires_grad:
                self._handles.append(
                    sharded.param.register_post_accumulate_grad_hook(_gradient_hook(self, sharded))
                )
        present, use = _weak(self._present), _weak(self._use)
        self.keys = []  # of units that are saved as references
        for unit in residency.units:
            if not unit.resident or residency.has_two_versions:
                self.keys.append(saved.register(unit, present))
                for sharded in unit.params:
                    sharded.on_use = use

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset(self) -> None:
        """Finish what a backward that raised, or a forward without one, has left."""
        self._left = 0
        if (log := self._recorder.log) is not None:
            log.leave_all()
        self._depth = 0
        self._guests.release()
        for _, current in self._current:
            current.clear()
        self._root_frames.clear()
        saved.reset(self._token)
        self._reset_backward()
        self._shelter.turn.reset()

    def reset_abandoned(self) -> None:
        """`reset`, if something is left and no forward or backward is under way."""
        if not in_backward() and not self._is_in_forward() and any(u.users for u in self._residency.units):
            self.reset()

    def _reset_backward(self) -> None:
        """Finish what a backward has left; forwards that it was a part of go on."""
        self._lazy, self._wanted = None, ()
        self._begun.clear()
        self._addressed.clear()
        self._tasks.clear()
        self._shelter.turn.leave(self._token)
        self._residency.in_backward = False
        self._gradients.send_all()
        self._residency.forget_users({scope for scope, current in self._current if current})

    # -- forward ----------------------------------------------------------------------------

    def _install(self, scope: Scope) -> None:
        current: list[_Call] = []
        self._current.append((scope, current))

        @eager
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._guard.check_autocast(scope.name)
            self._guard.check_replaced(scope)
            if not self._depth and not in_backward():
                self._check_given()
            call = _Call(scope, self._residency.shows_newest)
            if in_backward():
                self._end_passed()
            elif self._depth:
                call.guest = self._guests.join()
                call.start = call.start if call.guest is None else -1  # another thread's numbers
            else:  # not called through the root
                self._shelter.begin(call)
                self._residency.show(not scope.module.training)
                call.newest = self._residency.shows_newest
            self._release_lazy(scope)
            self._release_wanted()
            current.append(call)
            call.frame = saved.enter(self._token)
            self._residency.acquire(scope.units, scope)
            if scope.looks:
                self._use(scope.looks, False)
            if (log := self._recorder.log) is not None:
                log.enter(call, "recompute" if in_backward() else "forward", _first(scope))
            if torch.is_grad_enabled():
                inputs.watch(args, kwargs, lambda: self._backward_ends(call))

        @eager
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            call = _pop_own(current)
            if call is None:
                if not (in_backward() or self._shelter.turn.mine):
                    return None  # it never began: another thread has the turn
                call = _Call(scope, self._residency.shows_newest)
            saved.leave(call.frame)
            try:
                left(call, output)
            finally:
                self._guests.part(call.guest)
                call.guest = None
                self._shelter.turn.leave(call)
            return None

        def left(call: _Call, output: Any) -> None:
            self._release_wanted()
            if (log := self._recorder.log) is not None:
                log.leave(call)
            if torch.is_grad_enabled():
                self._watch(output, call)
            if current:
                return  # an outer forward of the same scope is still under way
            if in_backward() and torch.is_grad_enabled():
                # Recomputation: its backward follows at once, unless another scope comes first.
                self._lazy = (scope, call)
            else:
                self._residency.release(scope.units, scope)

        module = scope.module
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True, prepend=True))

    def _release_lazy(self, scope: Scope | None) -> None:
        if self._lazy is not None and self._lazy[0] is not scope:
            lazy, self._lazy = self._lazy[0], None
            self._residency.release(lazy.units, lazy)

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the root's forward."""
        if not in_backward():
            self._shelter.begin(self)
        self._check()
        self._guard.check_autocast("")
        if self._depth and not in_backward():
            # torch calls no hook after a KeyboardInterrupt: what it ended is not under way.
            self._depth = min(self._depth, calls_around(module))
        if not in_backward() and not self._depth:
            self.reset()
            self._shelter.begin(self)  # once more: that ended what was left of others
            self._guard.check_params()
            self._guard.check_added(module)
            self._check_given()
            self._residency.show(not module.training)
            self._residency.schedule.expect(torch.is_grad_enabled())
        self._depth += 1
        if (log := self._recorder.log) is not None and self._depth == 1:
            log.enter(self, "recompute" if in_backward() else "forward", -1)
        # What is recomputed is used at once.
        offload = self._activations if torch.is_grad_enabled() and not in_backward() else None
        self._root_frames.append(saved.enter(self._token, offload))
        if self._compute_dtype is torch.float32:
            return None
        return cast((args, kwargs), self._compute_dtype)

    @eager
    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the root's forward, also when it raised."""
        if not in_backward() and not self._shelter.turn.mine:
            return None  # it never began: another thread has the turn
        if self._root_frames:
            saved.leave(self._root_frames.pop())
        self._release_wanted()
        self._depth = max(0, self._depth - 1)
        if (log := self._recorder.log) is not None and not self._depth:
            log.leave(self)
            self._left = now() if torch.is_grad_enabled() and not in_backward() else 0
        if torch.is_grad_enabled() and not self._depth and not in_backward():
            self._show_again(output, self._residency.shows_newest)
        if not torch.is_grad_enabled() and not self._depth and not in_backward():
            self._residency.schedule.end_cycle()
        if not self._depth:
            self._guests.release()
            self._shelter.turn.leave(self)
        if self._output_dtype is None:
            return None
        return cast(output, self._output_dtype)

    # -- backward ---------------------------------------------------------------------------

    def _watch(self, output: Any, call: _Call) -> None:
        @eager
        def begins(grad: torch.Tensor) -> None:
            self._queue_end()
            self._end_passed()
            call.task = torch._C._current_graph_task_id()
            self._begun[call] = None
            self._release_wanted()
            self._release_lazy(call.scope)
            self._residency.show(call.newest)
            self._residency.acquire(call.scope.units, call)
            self._release_lazy(None)
            if (log := self._recorder.log) is not None:
                log.enter(call, "backward", _first(call.scope))

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def _end_passed(self) -> None:
        number, task = inputs.number_now(), torch._C._current_graph_task_id()
        self._end(lambda call: call.start > number and call.task == task)  # on whichever thread it runs

    def _end(self, which: Callable[[_Call], bool]) -> None:
        for call in filter(which, tuple(self._begun)):
            self._backward_ends(call)

    def _show_again(self, output: Any, newest: bool) -> None:
        """Have the backward of the root's `output` begin with the version that its forward used: what is
        recomputed reentrantly has no hook of its own before its forward."""

        @eager
        def begins(grad: torch.Tensor) -> None:
            self._queue_end()
            self._residency.show(newest)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def _queue_end(self) -> None:
        # A callback fires at the end of the backward that queues it, which may be the inner one
        # of reentrant checkpointing: each queues one, and the last to end is the outermost.
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._residency.in_backward = True
            if not self._tasks:
                self._shelter.begin(self._token)
                if (log := self._recorder.log) is not None:
                    log.backward(self, self._left)
                self._on_backward()
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: self._ends(task))

    @eager
    def _ends(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks:
            self._end(lambda call: call.task == task)
            return
        if self._is_in_forward():
            self._reset_backward()  # it was called inside a forward, which goes on
        else:
            self.reset()
            self._residency.schedule.end_cycle()

    def _present(self, unit: ParamUnit, newest: bool) -> None:
        """Have the values of `unit` on the device for whoever unpacks a part of it now."""
        there = not self._residency.is_suspended(unit) if unit.resident else unit.in_use
        if unit.state is ParamState.UNSHARDED and unit.newest == newest and there:
            return
        if unit.state is ParamState.SHARDED:
            self._check()
        self._want((unit.index,), newest)
        if not in_backward():
            self._release_wanted()

    def _use(self, units: Sequence[int], address: bool) -> bool:
        """Released parameters of `units` are used. Make all of these present if that is in a forward or a
        backward: a module may use another one's parameter, a recomputation what is released by then.
        `address`: it is an address in their memory that is asked for, which nobody can count.
        Return whether they are."""
        if not (in_backward() or self._is_in_forward()):
            return False
        if not in_backward() and self._guests.use(tuple(dict.fromkeys(units))):
            return True
        self._check()
        if address:  # and what was asked for just before: a kernel may take several
            self._addressed.update(self._wanted, units)
        self._want(tuple(dict.fromkeys(units)), self._residency.shows_newest)
        return True

    def _want(self, units: tuple[int, ...], newest: bool) -> None:
        """Have `units` present until others are wanted or a scope begins or ends; where somebody has their
        addresses, until a scope does."""
        if in_backward():
            self._queue_end()
            self._end_passed()
        if self._wanted != units:
            self._residency.release([u for u in self._wanted if u not in self._addressed], self)
            self._wanted = units
        self._residency.acquire(units, self, note=in_backward() or self._is_in_forward(), newest=newest)

    def _release_wanted(self) -> None:
        """Let go of what was asked for; what was unpacked of it holds it as long as it lives."""
        units, self._wanted = {*self._wanted, *self._addressed}, ()
        self._addressed.clear()
        self._residency.release(units, self)

    def in_forward(self) -> bool:
        """Return whether this thread is in a forward: an interrupt leaves marks of one that is not."""
        return self._is_in_forward() and is_inside(threading.get_ident())

    def _is_in_forward(self) -> bool:
        return bool(self._depth) or any(current for _, current in self._current)

    @eager
    def _backward_ends(self, call: _Call) -> None:
        """The backward of a scope is over: [Note: the end of a scope's backward]."""
        self._begun.pop(call, None)
        for index in call.scope.units:
            self._gradients.send(self._residency.units[index])
        self._residency.release(call.scope.units, call)
        self._release_wanted()
        if (log := self._recorder.log) is not None:
            log.leave(call)

    def _gradient_arrives(self, sharded: ShardedParam) -> None:
        self._gradients.arrived(sharded)
        self._queue_end()
        unit = self._residency.units[sharded.unit]
        if self._gradients.complete(unit):
            self._gradients.send(unit)


def _pop_own(calls: list[_Call]) -> _Call | None:
    """Take this thread's innermost call from those under way."""
    me = threading.get_ident()
    for index in range(len(calls) - 1, -1, -1):
        if calls[index].thread == me:
            return calls.pop(index)
    return None


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which its object is not kept alive by; it answers False after that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else False

    return call


def _first(scope: Scope) -> int:
    """Return the unit that a scope's time is put down to."""
    return scope.units[0] if scope.units else -1


def _gradient_hook(hooks: Hooks, sharded: ShardedParam) -> Callable[[torch.Tensor], None]:
    # Weak: autograd keeps the hook where the garbage collector does not look.
    weak_hooks, weak_sharded = weakref.ref(hooks), weakref.ref(sharded)

    @eager
    def take(param: torch.Tensor) -> None:
        owner, mine = weak_hooks(), weak_sharded()
        if owner is not None and mine is not None:
            owner._gradient_arrives(mine)

    return take
