"""Hooks: torch calls them, and they call the phases.

The engine does not assume that pre- and post-hooks come in pairs. Recomputation stops early, so a forward may
have no end; its reentrant form and shared layers call hooks twice. So every forward is a use of its
own ([Note: uses]), and the next forward from outside drops the uses that nothing has ended.

A scope's backward begins when the gradient of one of its outputs arrives (a hook on each), and ends as
inputs.py describes. A scope without one of these events is settled when the outermost backward ends. In a
backward that begins elsewhere, the engine loads a unit when autograd unpacks a tensor saved from it
([Note: references]), or when a recomputation uses it. A forward that uses a parameter of another scope loads
the unit, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.core.commits import in_backward
from infinity.grads.gradients import Gradients
from infinity.params.discover import Scope
from infinity.params.eager import eager
from infinity.params.param import ShardedParam
from infinity.params.residency import Residency
from infinity.params.unit import ParamUnit, UnitState

from . import inputs, saved
from .activations import Activations
from .claims import Forward
from .containers import cast, tensors_in
from .guard import Guard
from .no_gradients import refuse_backward, without_gradients
from .phases import Phases


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
        self._phases = phases
        self._residency = residency
        self._gradients = gradients
        self._compute_dtype = compute_dtype
        self._activations = activations
        self.guard = Guard(model, scopes, params, residency.units, residency.uses, trains=phases.trains)
        self._handles: list[Any] = []
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        for scope in scopes:
            self._install(scope)
        self._handles.append(model.register_forward_hook(self._leave, always_call=True))
        for sharded in params:
            if sharded.param.requires_grad:
                self._handles.append(
                    sharded.param.register_post_accumulate_grad_hook(_gradient_hook(self, sharded))
                )
                if gradients.of_ranks:  # they compare what is in `p.grad` before anything is added to it
                    self._handles.append(sharded.param.register_hook(_coming_hook(self)))
        present, use = _weak(self._present), _weak(self._use)
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

    def _install(self, scope: Scope) -> None:
        phases, commits, guard = self._phases, self._phases.commits, self.guard

        @eager
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            with commits:
                guard.check_autocast(scope.name)
                guard.check_replaced(scope)
                forward = phases.enter_still(scope) or phases.enter(scope)
                if scope.looks:
                    self._use(scope.looks, False)
                if torch.is_grad_enabled():
                    inputs.watch(args, kwargs, lambda: phases.end_scope_backward(forward))

        @eager
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            with commits:
                forward = phases.leave(scope)
                if forward is None:
                    return None
                try:
                    if torch.is_grad_enabled():
                        self._watch(output, forward)
                finally:
                    phases.release(forward)
            return None

        module = scope.module
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True, prepend=True))

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the root's forward."""
        self.guard.check_traced()
        with self._phases.commits:
            return self._begin(module, args, kwargs)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        phases = self._phases
        outside = phases.enter_root(module, self)
        self.guard.check_autocast("")
        if outside:
            self.guard.check_params()
            self.guard.check_added(module)
            phases.begin_forward(self, training=module.training)
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
        phases = self._phases
        if not in_backward() and not phases.commits.mine:
            return None  # it never began: another thread holds the lock
        with phases.commits:
            return self._end(output)

    def _end(self, output: Any) -> Any:
        phases = self._phases
        if phases.leave_root(self):
            if torch.is_grad_enabled() and not in_backward():
                self._keep_version(output, self._phases.newest)
            phases.end_forward(self)
        if not phases.trains and torch.is_grad_enabled() and not phases.in_forward:
            return refuse_backward(output)
        return output

    # -- backward ---------------------------------------------------------------------------

    def _watch(self, output: Any, forward: Forward) -> None:
        @eager
        def begins(grad: torch.Tensor) -> None:
            with self._phases.commits:
                self._phases.begin_scope_backward(forward)

        for tensor in tensors_in(output):
            # Not a leaf, on which hooks would stay for good: the scope has computed nothing of it.
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def _keep_version(self, output: Any, newest: bool) -> None:
        """Make the backward of the root's `output` begin with the version that its forward used: a reentrant
        recomputation has no hook of its own before its forward."""

        @eager
        def begins(grad: torch.Tensor) -> None:
            with self._phases.commits:
                self._phases.begin_root_backward(newest=newest)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def _gradient_arrives(self, sharded: ShardedParam) -> None:
        with self._phases.commits:
            is_complete = self._gradients.arrived(sharded)
            self._phases.came(sharded)
            if is_complete:
                self._gradients.reduce(self._residency.units[sharded.unit])

    # -- what is used elsewhere -------------------------------------------------------------

    def _present(self, unit: ParamUnit, newest: bool) -> None:
        """Load the values of `unit` to the device, because autograd is unpacking a part of it."""
        there = unit.persistent or unit.in_use
        if unit.state is UnitState.UNSHARDED and unit.newest == newest and there:
            return
        with self._phases.commits:
            if unit.is_away:
                self._phases.check()
            self._want((unit.index,), newest)
            if not in_backward():
                self._phases.claims.release_wanted()

    def _use(self, units: Sequence[int], address: bool) -> bool:
        """Code uses released parameters of `units`. In a forward or a backward, load all of these units: a
        module may use another module's parameter, and a recomputation a parameter that is released by then.
        `address`: the code asks for an address in their memory, which the engine cannot count.
        Return whether the units are loaded."""
        if self._phases.is_idle:
            if self._phases.closed:
                self._phases.check()  # raises what to do then
            return False
        self._phases.commits.check_thread()
        with self._phases.commits:
            self._phases.check()
            self._want(units, self._phases.newest, address=address)
        return True

    def _want(self, units: Sequence[int], newest: bool, *, address: bool = False) -> None:
        phases = self._phases
        if in_backward():
            phases.begin_backward()
            phases.end_passed()
        phases.claims.want(units, newest=newest, note=not phases.is_idle, address=address)


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which its object is not kept alive by; it answers False after that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return bound(*args) if bound is not None else False

    return call


def _coming_hook(hooks: Hooks) -> Callable[[torch.Tensor], None]:
    weak_hooks = weakref.ref(hooks)

    @eager
    def begins(grad: torch.Tensor) -> None:
        if (owner := weak_hooks()) is not None:
            with owner._phases.commits:
                owner._phases.begin_backward()

    return begins


def _gradient_hook(hooks: Hooks, sharded: ShardedParam) -> Callable[[torch.Tensor], None]:
    # Weak: autograd keeps the hook where the garbage collector does not look.
    weak_hooks, weak_sharded = weakref.ref(hooks), weakref.ref(sharded)

    @eager
    def take(param: torch.Tensor) -> None:
        owner, mine = weak_hooks(), weak_sharded()
        if owner is not None and mine is not None:
            owner._gradient_arrives(mine)

    return take
