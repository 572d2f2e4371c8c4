"""Hooks: when units come and go, and when gradients are taken over.

No pairing of pre- and post-hooks is assumed. Recomputation stops early, so a forward may lack
its end; its reentrant form and shared layers fire twice. So claims on units are sets of owners,
and what an owner did not release is dropped at the next forward from outside.

A backward of a scope begins when the gradient of one of its outputs is there (a hook on each
output) and ends when the gradients of its inputs are (an autograd function on the inputs, as in
FSDP2); what lacks either end is settled when the outermost backward ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable

from infinity.core.errors import ParameterChangedError, PrecisionError
from infinity.core.spans import Recorder, now

from .activations import Activations
from .discover import Scope
from .gradients import Gradients
from .param import ShardedParam
from .residency import Residency
from .sharded_grad import ShardedGrad


class _Call:
    """One forward of one scope: the owner of its backward's claim."""

    __slots__ = ("newest", "scope")

    def __init__(self, scope: Scope, newest: bool) -> None:
        self.scope = scope
        self.newest = newest  # the version that it used: [Note: two versions]


class _BackwardEnd(torch.autograd.Function):
    """The identity on a scope's inputs; its backward tells that theirs is over."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.end = end
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.end()
        return (None, *grads)


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
        on_backward: Callable[[], None],
        recorder: Recorder,
        activations: Activations | None = None,
    ) -> None:
        self._recorder = recorder
        self._left = 0  # when the last forward with a graph ended, for traces
        self._residency = residency
        self._gradients = gradients
        self._params = params
        self._compute_dtype = compute_dtype
        self._output_dtype = output_dtype
        self._check = check
        self._on_backward = on_backward
        self._activations = activations
        self._device_type = residency.units[0].storage.device.type if residency.units else "cpu"
        self._tasks: set[int] = set()  # backwards under way, inner ones included
        self._lazy: tuple[Scope, _Call] | None = None
        self._handles: list[Any] = []
        root = model
        self._depth = 0  # forwards of the root under way
        self._current: list[list[_Call]] = []  # of each scope: its forwards under way, innermost last
        self._handles.append(
            root.register_forward_pre_hook(_disabled(self._enter), with_kwargs=True, prepend=True)
        )
        for scope in scopes:
            self._install(scope)
        self._handles.append(root.register_forward_hook(_disabled(self._leave), always_call=True))
        for sharded in params:
            if sharded.param.requires_grad:
                self._handles.append(
                    sharded.param.register_post_accumulate_grad_hook(_gradient_hook(self, sharded))
                )
        self._scope_params: dict[int, list[tuple[nn.Module, str, nn.Parameter]]] = {
            id(s.module): [
                (m, n, p)
                for m in s.module.modules()
                for n, p in m._parameters.items()
                if isinstance(p, nn.Parameter)
            ]
            for s in scopes
        }

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def settle(self) -> None:
        """Finish what a backward that raised, or a forward without one, has left."""
        self._left = 0
        if (log := self._recorder.log) is not None:
            log.settle()
        self._lazy = None
        self._depth = 0
        for current in self._current:
            current.clear()
        self._tasks.clear()
        self._gradients.flush_all()
        self._residency.forget_users()

    # -- forward ----------------------------------------------------------------------------

    def _install(self, scope: Scope) -> None:
        current: list[_Call] = []
        self._current.append(current)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._check_replaced(scope)
            self._release_lazy(scope)
            if not self._depth and not _in_backward():  # not called through the root
                self._residency.show(not scope.module.training)
            call = _Call(scope, self._residency.shows_newest)
            current.append(call)
            self._residency.acquire(scope.units, scope)
            if (log := self._recorder.log) is not None:
                log.enter(call, "recompute" if _in_backward() else "forward", _first(scope))
            if torch.is_grad_enabled():
                return _wrap_inputs(args, kwargs, lambda: self._backward_ends(call))
            return None

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            call = current.pop() if current else _Call(scope, self._residency.shows_newest)
            if (log := self._recorder.log) is not None:
                log.leave(call)
            if torch.is_grad_enabled():
                self._watch(output, call)
            if current:
                return None  # an outer forward of the same scope is still under way
            if _in_backward() and torch.is_grad_enabled():
                # Recomputation: its backward follows at once, unless another scope comes first.
                self._lazy = (scope, call)
            else:
                self._residency.release(scope.units, scope)
            return None

        module = scope.module
        self._handles.append(module.register_forward_pre_hook(_disabled(before), with_kwargs=True))
        self._handles.append(module.register_forward_hook(_disabled(after), always_call=True, prepend=True))

    def _release_lazy(self, scope: Scope | None) -> None:
        if self._lazy is not None and self._lazy[0] is not scope:
            lazy, self._lazy = self._lazy[0], None
            self._residency.release(lazy.units, lazy)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the root's forward."""
        self._check()
        if torch.is_autocast_enabled(self._device_type):
            raise PrecisionError(
                "torch.autocast over offloaded parameters",
                expected="a forward outside torch.autocast",
                found=f"autocast({self._device_type!r}) is on: it keeps its own copies of the weights",
                cure='choose the compute dtype with Config(dtype="bf16")',
            )
        if self._depth and not _in_backward():
            # torch calls no hook after a KeyboardInterrupt: what it ended is not under way.
            self._depth = min(self._depth, _calls_around(module))
        if not _in_backward() and not self._depth:
            self.settle()
            self._check_params()
            self._check_added(module)
            self._residency.show(not module.training)
            self._residency.schedule.expect(torch.is_grad_enabled())
        self._depth += 1
        if (log := self._recorder.log) is not None and self._depth == 1:
            log.enter(self, "recompute" if _in_backward() else "forward", -1)
        if self._activations is not None:
            self._activations.enter()
        if self._compute_dtype is torch.float32:
            return None
        return _cast((args, kwargs), self._compute_dtype)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the root's forward, also when it raised."""
        if self._activations is not None:
            self._activations.leave()
        self._depth = max(0, self._depth - 1)
        if (log := self._recorder.log) is not None and not self._depth:
            log.leave(self)
            self._left = now() if torch.is_grad_enabled() and not _in_backward() else 0
        if torch.is_grad_enabled() and not self._depth and not _in_backward():
            self._show_again(output, self._residency.shows_newest)
        if not torch.is_grad_enabled() and not self._depth and not _in_backward():
            self._residency.schedule.end_cycle()
        if self._output_dtype is None:
            return None
        return _cast(output, self._output_dtype)

    def _check_params(self) -> None:
        for sharded in self._params:
            sharded.check(self._residency.units[sharded.unit].storage)
            if sharded.param.requires_grad and not sharded.spec.trainable:
                raise ParameterChangedError(
                    f"the parameter {sharded.name!r} was frozen at `wrap` and has no optimizer state",
                    expected="requires_grad=False",
                    found="requires_grad=True",
                    cure="unfreeze it before `wrap`",
                )

    def _check_added(self, model: nn.Module) -> None:
        if sum(1 for _ in model.parameters()) == len(self._params):
            return  # a parameter that was replaced is noticed by its scope
        known = {id(s.param) for s in self._params}
        added = [n for n, p in model.named_parameters() if id(p) not in known]
        raise ParameterChangedError(
            f"parameters were added after `wrap`: {', '.join(map(repr, added))}"
            if added
            else "parameters were removed after `wrap`",
            expected=f"the {len(known)} parameters that the model had at `wrap`",
            found=f"{sum(1 for _ in model.parameters())} parameters",
            cure="build the whole model before `wrap`",
        )

    def _check_replaced(self, scope: Scope) -> None:
        for module, name, param in self._scope_params[id(scope.module)]:
            if module._parameters.get(name) is not param:
                raise ParameterChangedError(
                    f"the parameter {name!r} of {type(module).__name__} in {scope.name or 'the model'!r} "
                    "was replaced or removed after `wrap`",
                    expected="the parameters that the model had at `wrap`",
                    found="another object",
                    cure="change the model before `wrap`; edit values inside "
                    "`with infinity.gathered(params, write=True):`",
                )

    # -- backward ---------------------------------------------------------------------------

    def _watch(self, output: Any, call: _Call) -> None:
        tensors = [t for t in _tensors(output) if t.requires_grad]

        def begins(grad: torch.Tensor) -> None:
            self._queue_end()
            self._release_lazy(call.scope)
            self._residency.show(call.newest)
            self._residency.acquire(call.scope.units, call)
            self._release_lazy(None)
            if (log := self._recorder.log) is not None:
                log.enter(call, "backward", _first(call.scope))

        for tensor in tensors:
            tensor.register_hook(begins)

    def _show_again(self, output: Any, newest: bool) -> None:
        """Have the backward of the root's `output` begin with the version that its forward used: what is
        recomputed reentrantly has no hook of its own before its forward."""

        def begins(grad: torch.Tensor) -> None:
            self._queue_end()
            self._residency.show(newest)

        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def _queue_end(self) -> None:
        # A callback fires at the end of the backward that queues it, which may be the inner one
        # of reentrant recomputation: each queues one, and the last to end is the outermost.
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if not self._tasks:
                if (log := self._recorder.log) is not None:
                    log.backward(self, self._left)
                self._on_backward()
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(lambda: self._ends(task))

    def _ends(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.settle()
            self._residency.schedule.end_cycle()

    def _backward_ends(self, call: _Call) -> None:
        """The gradients of a scope's inputs are there."""
        for index in call.scope.units:
            self._gradients.flush(self._residency.units[index])
        self._residency.release(call.scope.units, call)
        if (log := self._recorder.log) is not None:
            log.leave(call)

    def _gradient_arrives(self, sharded: ShardedParam) -> None:
        param = sharded.param
        grad = param.grad
        if grad is not None and not isinstance(grad, ShardedGrad):
            self._gradients.deliver(sharded, grad, fresh=True)
            param.grad = ShardedGrad(sharded, self._gradients)
        self._queue_end()
        unit = self._residency.units[sharded.unit]
        if self._gradients.complete(unit):
            self._gradients.flush(unit)


def _first(scope: Scope) -> int:
    """Return the unit that a scope's time is put down to."""
    return scope.units[0] if scope.units else -1


def _gradient_hook(hooks: Hooks, sharded: ShardedParam) -> Callable[[torch.Tensor], None]:
    # Weak: autograd keeps the hook where the garbage collector does not look.
    weak_hooks, weak_sharded = weakref.ref(hooks), weakref.ref(sharded)

    def take(param: torch.Tensor) -> None:
        owner, mine = weak_hooks(), weak_sharded()
        if owner is not None and mine is not None:
            owner._gradient_arrives(mine)

    return take


def _disabled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook. The mark that torch.compiler.disable sets, without its
    import of the compiler, which costs a run that never compiles seconds and megabytes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def _calls_around(module: nn.Module) -> int:
    """Return how many calls of `module` the one under way is inside of."""
    calls, frame = -1, sys._getframe(1)
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back  # type: ignore[assignment]
    return max(0, calls)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: containers, dataclasses and plain objects are looked into."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, bytes, int, float, type)) or id(value) in seen:
        return
    seen.add(id(value))
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif not isinstance(value, nn.Module) and hasattr(value, "__dict__") and not callable(value):
        items = vars(value).values()
    for item in items:
        yield from _tensors(item, seen)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with its tensors changed; containers of unknown kinds stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {k: _map(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(v, change) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(v, change) for v in value))
    if isinstance(value, dict):  # ordered dicts, Hugging Face's ModelOutput: same class, in place
        for key in list(value):
            new = _map(value[key], change)
            if new is not value[key]:
                value[key] = new
    return value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return _map(value, change)


def _wrap_inputs(args: Any, kwargs: Any, end: Callable[[], None]) -> Any:
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            found.append(tensor)
        return tensor

    _map((args, kwargs), collect)
    if not found:
        return None
    wrapped = iter(_BackwardEnd.apply(end, *found))  # type: ignore[no-untyped-call]

    def swap(tensor: torch.Tensor) -> torch.Tensor:
        return next(wrapped) if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else tensor

    return _map((args, kwargs), swap)
