"""`p.grad` after a backward: a tensor subclass without storage that reads from the shards.

It has the parameter's metadata. torch's `clip_grad_norm_` works on it: norms come from
the shards (unscaled), and a multiplication by a scalar or a one-element tensor records a factor
that the update applies. `clip_grad_value_` works, too: the engine clamps the shards. Adding a tensor
accumulates, which is also how autograd delivers a second backward. An operator that only reads gets
the whole gradient, unscaled, for the duration of that operator. Every other edit raises `GradientError`.

[Note: a gradient is a view] It has no values of its own: it shows the values in the shards of its
parameter. When the shards get another gradient, every use of the old object raises an error, also when the
program puts it back into `p.grad`. To keep values, call `infinity.gradient`. A view of it
(`p.grad.view(-1)`, `p.grad[0]`) reads its values from the shards, too, when an operator uses it. An edit of a
view would be lost, and raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infinity.core.commits import in_backward
from infinity.core.errors import GradientError, PrecisionError
from infinity.params.param import ShardedParam

aten: Any = torch.ops.aten


class GradientSource(Protocol):
    """What a `ShardedGrad` asks (see `Gradients`)."""

    def begin(self, sharded: ShardedParam) -> int:
        """Return the number of a new gradient of a parameter; the one before it is gone."""

    def holds(self, grad: ShardedGrad) -> bool:
        """Return whether the shards still hold this one."""

    def check_unused(self, sharded: ShardedParam) -> None:
        """Raise `GradientError` if a parameter was updated with it already."""

    def add(self, grad: ShardedGrad, other: torch.Tensor, *, scaled: bool) -> None:
        """Add to it; `scaled`: what is added is multiplied by the loss scale."""

    def full(self, grad: ShardedGrad) -> torch.Tensor:
        """Return it as one fp32 host tensor: unscaled, with its factor."""

    def read(self, grads: Sequence[ShardedGrad]) -> list[torch.Tensor]:
        """Return what each shows: whole, unscaled, with its factor, in its dtype, on its device."""

    def norms(self, grads: Sequence[ShardedGrad]) -> list[float]:
        """Return the 2-norm of each, unscaled, with its factor."""

    def zero(self, grad: ShardedGrad) -> None:
        """Make it zero."""

    def clamp(self, grad: ShardedGrad, low: float, high: float) -> None:
        """Limit its elements, unscaled, to `low` … `high`, which have zero between them."""


class _Step(NamedTuple):
    """An operator that makes a view: of several views the one that is `which`."""

    func: Any
    more: tuple[Any, ...]
    kwargs: dict[str, Any]
    which: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its view of `tensor`."""
        made = self.func(tensor, *self.more, **self.kwargs)
        return made if self.which is None else made[self.which]  # type: ignore[no-any-return]


class _Shown(torch.Tensor):
    """What shows a gradient, or a part of it: [Note: a gradient is a view]."""

    steps: tuple[_Step, ...] = ()  # from the whole gradient to what this shows
    _whole: ShardedGrad

    @property
    def of(self) -> ShardedGrad:
        """The gradient."""
        return self if isinstance(self, ShardedGrad) else self._whole

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor, but nothing can be put in its place: torch would do so without asking the class,
        and the values in the shards would stay as they are."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        # `Module.cpu()` and `Module.to()` put there what they have made of it, the same values.
        if new is self or (
            new.shape == self.shape and torch.equal(new.to(self.device, self.dtype), self.show())
        ):
            return
        raise GradientError(
            f"the gradient of {self.of.sharded.name!r} is in shards, and `p.grad.data` cannot be replaced",
            expected="`p.grad = values`",
            found="an assignment to `p.grad.data`, as by `torch.nn.utils.vector_to_parameters`",
            cure="assign the values to `p.grad`; `infinity.gradient(p)` returns the present ones",
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from the shards, or by their values."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        found = [a for a in _flat((*args, *kwargs.values())) if isinstance(a, _Shown)]
        # Once: the host waits for a number that is on a device.
        number = _number(args[1]) if handler in (_mul, _foreach_mul) else None
        given = args if number is None else (args[0], number)
        if handler is not _same:
            for shown in found:
                shown.of.check()
                # torch's clipping multiplies by one where it clips nothing.
                if (func._schema.is_mutable and number != 1.0) or _accumulates():
                    shown.of.source.check_unused(shown.of.sharded)
            _check_graph(func, found)
        answer = NotImplemented
        if handler is not None and any(isinstance(shown, ShardedGrad) for shown in found):
            answer = handler(*given, **kwargs)
        for general in (_view, _read):
            if answer is NotImplemented:
                answer = general(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if "_amp_" in str(func):
            raise PrecisionError(
                "torch's GradScaler cannot unscale gradients that are in shards",
                expected="`optimizer.scale(loss).backward()` and `optimizer.step()`",
                found=str(func),
                cure="drop the GradScaler: the optimizer scales, unscales and checks for overflow",
            )
        raise GradientError(
            f"the gradient of {found[0].of.sharded.name!r} is in shards",
            expected="clip_grad_norm_, clip_grad_value_, mul_() or div_() by a scalar, add_() of a "
            "tensor, zero_(), metadata, or an operator that only reads it",
            found=str(func),
            cure="edit the values of `g = infinity.gradient(p)`, and assign them with "
            "`p.grad = g.to(p.device, p.dtype)`",
        )

    def show(self) -> torch.Tensor:
        """Return the values that it shows now, a tensor of their own. Collective, with several ranks."""
        self.of.check()
        return _through(self, self.of.source.read([self.of])[0])

    def numpy(self, *, force: bool = False) -> Any:
        """Return its values as an array that cannot be edited: in torch an edit would be one of `p.grad`."""
        array = self.show().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return its values as numbers in lists."""
        return self.show().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: who gets its memory may edit it, and it has none."""
        raise GradientError(
            f"the gradient of {self.of.sharded.name!r} is in shards and has no memory to share",
            expected="`infinity.gradient(parameter)`",
            found="an exchange of memory by DLPack",
            cure="share the tensor that `infinity.gradient(parameter)` returns",
        )

    def __format__(self, spec: str) -> str:
        return repr(self) if self.dim() else format(self.item(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.show()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.show().__reduce_ex__(protocol)


class ShardedGrad(_Shown):
    """The gradient of one parameter, in shards. `factor`: the update multiplies the shards by it; it is one
    over the loss scale of the backward, times the user's factors. `limits`: the limits to which its elements
    were clamped, in order. `is_zero`: it was set to zero, and nothing was added since. `has_graph`: a
    backward with ``create_graph=True`` made a part of it, and the engine has not kept the graph."""

    sharded: ShardedParam
    source: GradientSource
    factor: float
    limits: tuple[tuple[float, float], ...] = ()
    is_zero: bool = False
    has_graph: bool = False
    number: int

    @staticmethod
    def __new__(
        cls, sharded: ShardedParam, source: GradientSource, number: int, factor: float = 1.0
    ) -> ShardedGrad:
        """Make the wrapper for a new gradient of `sharded`, which `source` has given this `number`."""
        grad = torch.Tensor._make_wrapper_subclass(
            cls,
            sharded.spec.shape,
            dtype=sharded.spec.dtype,
            device=sharded.param.device,
        )
        grad.sharded = sharded
        grad.source = source
        grad.factor = factor
        grad.number = number
        return grad

    def scale_by(self, factor: float) -> None:
        """Multiply all of its elements by `factor`, in the update."""
        self.factor *= factor

    def check(self, owner: ShardedParam | None = None) -> None:
        """Raise `GradientError` unless the shards still hold it; and, where it was found in the `grad` of
        `owner`, unless it is that parameter's. See [Note: a gradient is a view]."""
        name = self.sharded.name
        if owner is not None and owner is not self.sharded:
            raise GradientError(
                f"the gradient of {name!r} was assigned to {owner.name!r}",
                expected="a tensor, or the parameter's own gradient",
                found="a view of another parameter's shards",
                cure="assign its values: `q.grad = infinity.gradient(p).to(q.device, q.dtype)`",
            )
        if not self.source.holds(self):
            raise GradientError(
                f"this gradient of {name!r} is gone: the program kept a view of shards that now hold another "
                "gradient, or none",
                expected="the gradient that the last backward left in `p.grad`",
                found="a gradient from before `p.grad = None` or zero_grad()",
                cure="keep the values, `g = infinity.gradient(p)`, before you drop the gradient; "
                "put them back with `p.grad = g.to(p.device, p.dtype)`",
            )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.sharded.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def share_memory_(self) -> Any:
        """Refused: there is no storage to share."""
        raise GradientError(
            f"the gradient of {self.sharded.name!r} is in shards and cannot be shared",
            expected="a model without gradients",
            found="share_memory_()",
            cure="call optimizer.zero_grad() first; share the tensor that `infinity.gradient(parameter)` "
            "returns",
        )


class GradientView(_Shown):
    """A view of a `ShardedGrad`, or of another view: read only."""

    @staticmethod
    def __new__(cls, of: _Shown, step: _Step) -> GradientView:
        """Make the view that `step` makes of what `of` shows."""
        meta = step.of(_like(of))
        view = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), dtype=meta.dtype, device=of.device
        )
        view._whole, view.steps = of.of, (*of.steps, step)
        return view

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"GradientView({self.of.sharded.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [x for a in args for x in (_flat(tuple(a)) if isinstance(a, (list, tuple)) else [a])]


def _check_graph(func: Any, found: Sequence[_Shown]) -> None:
    """Raise `GradientError` where torch's result would have a graph, and ours has none."""
    graphs = [shown.of for shown in found if shown.of.has_graph]
    if not graphs or not torch.is_grad_enabled() or func._schema.is_mutable or func.is_view or in_backward():
        return
    raise GradientError(
        f"the gradient of {graphs[0].sharded.name!r} was made with create_graph=True, and has no graph here",
        expected="reads of its values inside `with torch.no_grad():`",
        found=f"{func} while grad mode is on",
        cure="for gradients with a graph write `torch.autograd.grad(loss, parameters, create_graph=True)`",
    )


def _like(shown: _Shown) -> torch.Tensor:
    """Return a tensor without values that is laid out as what `shown` shows."""
    return torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype, device="meta")


def _through(shown: _Shown, whole: torch.Tensor) -> torch.Tensor:
    for step in shown.steps:
        whole = step.of(whole)
    return whole


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a view of what `args` begins with: nothing is read."""
    if not func.is_view or not isinstance(args[0], _Shown):
        return NotImplemented
    shown, step = args[0], _Step(func, args[1:], kwargs)
    made = step.of(_like(shown))
    if isinstance(made, torch.Tensor):
        return GradientView(shown, step)
    return [GradientView(shown, step._replace(which=i)) for i in range(len(made))]


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give an operator the values in place of what shows them, unless it edits these."""
    declared = func._schema.arguments
    named = (*zip((a.name for a in declared), args, strict=False), *kwargs.items())
    edited = {a.name for a in declared if a.alias_info is not None and a.alias_info.is_write}
    if _accumulates() and func is aten.add.Tensor:
        return NotImplemented  # what autograd adds is scaled, and what is read is not
    if any(isinstance(s, _Shown) for name, value in named if name in edited for s in _flat((value,))):
        return NotImplemented
    shown = [a for a in _flat((*args, *kwargs.values())) if isinstance(a, _Shown)]
    grads = list({id(s.of): s.of for s in shown}.values())
    values = dict(zip(map(id, grads), grads[0].source.read(grads), strict=True))

    def valued(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(valued(a) for a in arg)
        return _through(arg, values[id(arg.of)]) if isinstance(arg, _Shown) else arg

    return func(*valued(args), **{name: valued(value) for name, value in kwargs.items()})


def _add_in_place(grad: Any, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(grad, ShardedGrad) or not isinstance(other, torch.Tensor):
        return NotImplemented
    if other.shape != grad.shape:
        return NotImplemented
    if isinstance(other, _Shown):
        other = other.show()
    other = other if alpha == 1 else other * alpha
    # In a backward it is autograd that adds, and then it is the gradient of a scaled loss.
    grad.source.add(grad, other, scaled=in_backward())
    grad.has_graph |= other.requires_grad
    return grad


def _add(grad: Any, other: Any, *, alpha: float = 1) -> Any:
    # How autograd accumulates with create_graph=True, which is grad mode in a backward: the sum is another
    # tensor, and the one before it is gone. Nobody else gets one.
    if not _accumulates() or _add_in_place(grad, other, alpha=alpha) is NotImplemented:
        return NotImplemented
    made = ShardedGrad(grad.sharded, grad.source, grad.source.begin(grad.sharded), grad.factor)
    made.has_graph = grad.has_graph
    return made


def _accumulates() -> bool:
    return in_backward() and torch.is_grad_enabled()


def _number(other: Any) -> float | None:
    """Return the number that an operand is, or None."""
    if isinstance(other, torch.Tensor) and not isinstance(other, _Shown) and other.numel() == 1:
        return float(other)
    return other if isinstance(other, (int, float)) else None


def _mul(grad: Any, other: Any) -> Any:
    if not isinstance(grad, ShardedGrad) or (factor := _number(other)) is None:
        return NotImplemented
    if factor != 1.0:  # as torch's clipping multiplies where it clips nothing
        grad.scale_by(factor)
    return grad


def _div(grad: Any, other: Any) -> Any:
    return _mul(grad, 1.0 / divisor) if (divisor := _number(other)) else NotImplemented


def _foreach_mul(grads: list[Any], other: Any) -> None:
    for i, grad in enumerate(grads):
        grad.mul_(other[i] if isinstance(other, (list, tuple)) else other)


def _norm(grad: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not isinstance(grad, ShardedGrad) or dim is not None or keepdim:
        return NotImplemented
    return _foreach_norm([grad], ord, dtype)[0]


def _foreach_norm(grads: list[Any], ord: float = 2, dtype: Any = None) -> Any:
    ours = [g for g in grads if isinstance(g, ShardedGrad)]
    # Of 2-norms the squares are there; for others all is read.
    norms = iter(ours[0].source.norms(ours) if ord == 2 and ours else ())
    found = []
    for grad in grads:
        if not isinstance(grad, ShardedGrad):
            found.append(torch.linalg.vector_norm(grad, ord, dtype=dtype))
        elif ord == 2:
            # On a device `torch.tensor` would wait for it. A float32 may be too small for a norm: Inf.
            value = torch.full((), next(norms), dtype=torch.float64, device=grad.device)
            found.append(value.to(dtype or torch.float32))
        else:
            value = torch.linalg.vector_norm(grad.source.full(grad), ord)
            found.append(value.to(device=grad.device, dtype=dtype or torch.float32))
    return found


def _zero(grad: Any) -> Any:
    grad.source.zero(grad)
    return grad


def _clamp(grad: Any, low: Any = None, high: Any = None) -> Any:
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if not all(isinstance(b, (int, float)) for b in (low, high)) or not low <= 0 <= high:
        return NotImplemented
    grad.source.clamp(grad, low, high)
    grad.limits += ((float(low), float(high)),)
    return grad


def _foreach_clamp(grads: list[Any], low: Any, high: Any) -> None:
    for grad in grads:
        grad.clamp_(low, high)


def _same(grad: Any, *args: Any, **kwargs: Any) -> Any:
    return grad


_HANDLERS: dict[Any, Any] = {
    aten.add_.Tensor: _add_in_place,
    aten.add.Tensor: _add,
    aten.mul_.Tensor: _mul,
    aten.mul_.Scalar: _mul,
    aten.div_.Tensor: _div,
    aten.div_.Scalar: _div,
    aten._foreach_mul_.Tensor: _foreach_mul,
    aten._foreach_mul_.Scalar: _foreach_mul,
    aten._foreach_mul_.ScalarList: _foreach_mul,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.zero_.default: _zero,
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: lambda grad, high: _clamp(grad, None, high),
    aten._foreach_clamp_min_.Scalar: lambda grads, low: _foreach_clamp(grads, low, None),
    aten._foreach_clamp_max_.Scalar: lambda grads, high: _foreach_clamp(grads, None, high),
    aten.detach.default: _same,
    aten.alias.default: _same,
}
