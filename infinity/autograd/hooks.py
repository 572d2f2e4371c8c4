"""Hooks: torch calls them, and they call the phases.

The engine does not assume that pre- and post-hooks come in pairs. Recomputation stops early, so a forward may
have no end; its reentrant form and shared layers call hooks twice. So every forward is a use of its
own ([Note: uses]), and the next forward from outside drops the uses that nothing has ended.

A scope's backward begins when the gradient of one of its outputs arrives (a hook on each), and ends as the
note describes. A scope without one of these events is settled when the outermost backward ends. In a
backward that begins elsewhere, the engine loads a unit when autograd unpacks a tensor saved from it
([Note: references]), or when a recomputation uses it. A forward that uses a parameter of another scope loads
the unit, too.

[Note: the end of a scope's backward] Autograd numbers the nodes that a thread creates, and runs the newest
first: in one backward the numbers of a thread's nodes only fall. So a scope's backward is over
when a node runs that is older than the scope's first computation. The engine reads the number of the running
node wherever a backward calls it: at a scope's inputs (by hooks on the tensors themselves, so that the scope
gets the tensors that its caller passed), at other scopes' outputs, at a recomputation, and when autograd
unpacks a tensor of a unit that is not on the device. So the end is never too early; a scope that is left is
over when the backward that began it is over.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.core.commits import commit, hook, in_backward
from infinity.grads.gradients import Gradients
from infinity.params.discover import Scope
from infinity.params.eager import eager
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit

from . import saved
from .activations import Activations
from .containers import cast, tensors_in
from .guard import Guard
from .no_gradients import refuse_backward, without_gradients
from .phases import Phases, weak


class _ScopeHooks:
    """The hooks of one scope."""

    def __init__(self, hooks: Hooks, scope: Scope) -> None:
        self.commits = hooks.commits
        self._hooks = hooks
        self._phases = hooks.phases
        self._guard = hooks.guard
        self._scope = scope

    @eager
    @hook
    def before(self, grad: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward begins."""
        scope = self._scope
        self._guard.check_scope(scope)
        forward = self._phases.enter(scope, grad=grad)
        if scope.inspected_units:
            self._hooks.use(scope.inspected_units, False)
        if grad:
            _watch_inputs(args, kwargs, functools.partial(self._phases.input_comes, forward))

    @eager
    @hook
    def after(self, grad: bool, module: nn.Module, args: Any, output: Any) -> None:
        """It is over, also when it raised."""
        forward = self._phases.leave(self._scope)
        if forward is None:
            return
        try:
            if grad:
                _watch_outputs(output, functools.partial(self._phases.begin_scope_backward, forward))
        finally:
            self._phases.release(forward, grad=grad)


class Hooks:
    """Installs the hooks on a model and takes them off again."""

    def __init__(
        self,
        model: nn.Module,
        scopes: Sequence[Scope],
        phases: Phases,
        residency: Residency,
        gradients: Gradients,
        params: Sequence[ShardedParam],
        *,
        compute_dtype: torch.dtype | None,
        activations: Activations | None = None,
    ) -> None:
        self.phases = phases
        self.commits = phases.commits
        self.residency = residency
        self.gradients = gradients
        self._compute_dtype = compute_dtype
        self._activations = activations
        self.guard = Guard(model, scopes, params, residency.units, residency.uses, trains=phases.trains)
        self._handles: list[Any] = []
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        for scope in scopes:
            hooks, module = _ScopeHooks(self, scope), scope.module
            self._handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(hooks.after, always_call=True, prepend=True))
        self._handles.append(model.register_forward_hook(self._leave, always_call=True))
        for sharded in params:
            if sharded.param.requires_grad:
                of_gradient = _GradientHooks(self, sharded)
                self._handles.append(
                    sharded.param.register_post_accumulate_grad_hook(of_gradient.post_accumulate)
                )
                if gradients.of_ranks:  # they compare what is in `p.grad` before anything is added to it
                    self._handles.append(sharded.param.register_hook(of_gradient.pre_accumulate))
        present, use = weak(self._present), weak(self.use)
        self.keys = []  # of units that are saved as references
        for unit in residency.units:
            if not unit.on_device or residency.has_two_versions:
                self.keys.append(saved.register(unit, present))
                for sharded in unit.params:
                    sharded.on_use = use

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- forward ----------------------------------------------------------------------------

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the root's forward."""
        self.guard.check_traced()
        with self.commits:
            return self._begin(module, args, kwargs)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        phases = self.phases
        outside = phases.enter_root(module, self)
        self.guard.check_autocast("")
        if outside:
            self.guard.check_params()
            self.guard.check_added(module)
            phases.begin_forward(self, training=module.training, grad=torch.is_grad_enabled())
        # What is recomputed is used at once.
        offload = self._activations if torch.is_grad_enabled() and not in_backward() else None
        phases.push_root(self, saved.enter(phases.token, offload))
        given = args, kwargs
        if not phases.trains and torch.is_grad_enabled():
            given = without_gradients(given)
        if self._compute_dtype not in (None, torch.float32):
            given = cast(given, self._compute_dtype)
        return given if given[0] is not args or given[1] is not kwargs else None

    @eager
    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the root's forward, also when it raised."""
        phases = self.phases
        if not in_backward() and not phases.commits.mine:
            return None  # it never began: another thread holds the lock
        with phases.commits:
            return self._end(output)

    def _end(self, output: Any) -> Any:
        phases = self.phases
        if phases.leave_root(self):
            if torch.is_grad_enabled() and not in_backward():
                self._keep_version(output, self.phases.newest)
            phases.end_forward(self)
        if not phases.trains and torch.is_grad_enabled() and not phases.in_forward:
            return refuse_backward(output)
        return output

    # -- backward ---------------------------------------------------------------------------

    def _keep_version(self, output: Any, newest: bool) -> None:
        """Make the backward of the root's `output` begin with the version that its forward used: a reentrant
        recomputation has no hook of its own before its forward."""

        @eager
        def begins(grad: torch.Tensor) -> None:
            with self.commits:
                self.phases.begin_root_backward(newest=newest)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    # -- what is used elsewhere -------------------------------------------------------------

    @commit
    def _present(self, unit: ParamUnit, newest: bool) -> None:
        """Load the values of `unit` to the device, because autograd is unpacking a part of it."""
        if unit.is_away:
            self.phases.check()
        self.phases.want((unit.index,), newest=newest)
        if not in_backward():
            self.residency.release_wanted()

    def use(self, units: Sequence[int], address: bool) -> bool:
        """Code uses released parameters of `units`. In a forward or a backward, load all of these units: a
        module may use another module's parameter, and a recomputation a parameter that is released by then.
        `address`: the code asks for an address in their memory, which the engine cannot count.
        Return whether the units are loaded."""
        if self.phases.is_idle:
            if self.phases.closed:
                self.phases.check()  # raises what to do then
            return False
        self.commits.check_thread()
        with self.commits:
            self.phases.check()
            self.phases.want(units, newest=self.phases.newest, address=address)
        return True


def _watch_inputs(args: Any, kwargs: Any, end: Callable[[torch.Tensor], None]) -> None:
    """Register `end`, which a backward calls when the node of one of the inputs is about to run."""
    seen: set[int] = set()
    for value in (*args, *kwargs.values()):
        for tensor in (value,) if type(value) is torch.Tensor else tensors_in(value, objects=False):
            # What a scope does to a view in place gives its base a new node, and may leave the view's out.
            for watched in (tensor, tensor._base):
                if watched is not None and watched.grad_fn is not None and id(watched) not in seen:
                    seen.add(id(watched))
                    watched.register_hook(end)


def _watch_outputs(output: Any, begins: Callable[[torch.Tensor], None]) -> None:
    """Register `begins`, which a backward calls when the gradient of one of the outputs is there."""
    for tensor in (output,) if type(output) is torch.Tensor else tensors_in(output):
        # Not a leaf, on which hooks would stay for good: the scope has computed nothing of it.
        if tensor.requires_grad and tensor.grad_fn is not None:
            tensor.register_hook(begins)


class _GradientHooks:
    """The hooks of one parameter. Weak: autograd keeps them where the garbage collector does not look."""

    def __init__(self, hooks: Hooks, sharded: ShardedParam) -> None:
        self.commits = hooks.commits
        self._hooks, self._sharded = weakref.ref(hooks), weakref.ref(sharded)

    @eager
    @hook
    def pre_accumulate(self, _: bool, grad: torch.Tensor) -> None:
        """The gradient is there, and not added to `p.grad` yet."""
        if (hooks := self._hooks()) is not None:
            hooks.phases.begin_backward()

    @eager
    @hook
    def post_accumulate(self, _: bool, param: torch.Tensor) -> None:
        """The gradient is in `p.grad`."""
        hooks, sharded = self._hooks(), self._sharded()
        if hooks is None or sharded is None:
            return
        phases, gradients = hooks.phases, hooks.gradients
        is_complete = gradients.arrived(sharded)
        if torch._C._current_graph_task_id() not in phases.tasks:
            phases.begin_backward()
        if phases.backward_update is not None:
            phases.backward_update.came(sharded)
        if is_complete:
            gradients.reduce(hooks.residency.units[sharded.unit])
