"""`p.grad` after a backward: a tensor subclass without storage that reads from the shards.

It has the parameter's metadata. torch's `clip_grad_norm_` works on it: norms come from the shards (unscaled),
and a multiplication by a scalar or a one-element tensor records a factor that the update applies. So do
`clip_grad_value_`, for which the engine clamps the shards, and the `unscale_` of a GradScaler. autograd adds
to it, in a later backward. An operator that only reads gets the whole gradient, unscaled, for the duration of
that operator. Every other edit would be lost, and raises `GradientError`.

[Note: a gradient is a view] It has no values of its own: it shows the values in the shards of its
parameter. When the shards get another gradient, every use of the old object raises an error, also when the
program puts it back into `p.grad`. To keep values, call `infinity.gradient`. A view of it
(`p.grad.view(-1)`, `p.grad[0]`) reads its values from the shards, too, when an operator uses it. An edit of a
view would be lost, and raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from infinity.core.commits import in_backward
from infinity.core.errors import GradientError
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

    def add(self, grad: ShardedGrad, other: torch.Tensor) -> None:
        """Add what autograd has made, of a scaled loss."""

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


class _Shown(torch.Tensor):
    """What shows a gradient, or a part of it: [Note: a gradient is a view]."""

    _whole: ShardedGrad
    _part: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def of(self) -> ShardedGrad:
        """The gradient."""
        return self if isinstance(self, ShardedGrad) else self._whole

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this shows of the values of the whole gradient."""
        return whole if self._part is None else self._part(whole)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind, name = type(self).__name__, self.of.sharded.name
        return f"{kind}({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

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
        raise GradientError(
            f"the gradient of {found[0].of.sharded.name!r} is in shards",
            expected="clip_grad_norm_, clip_grad_value_, mul_() or div_() by a number, zero_(), metadata, or "
            "an operator that only reads it",
            found=str(func),
            cure="edit the values of `g = infinity.gradient(p)`, and assign them with "
            "`p.grad = g.to(p.device, p.dtype)`; with several ranks, add a term to the loss",
        )

    def show(self) -> torch.Tensor:
        """Return the values that it shows now, a tensor of their own. Collective, with several ranks."""
        self.of.check()
        return self.part(self.of.source.read([self.of])[0])

    def numpy(self, *, force: bool = False) -> Any:
        """Return its values as an array that cannot be edited: in torch an edit would be one of `p.grad`."""
        array = self.show().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return its values as numbers in lists."""
        return self.show().tolist()

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        """Refused: who gets its memory may edit it, and it has none."""
        raise GradientError(
            f"the gradient of {self.of.sharded.name!r} is in shards and has no memory to share",
            expected="`infinity.gradient(parameter)`, which returns a tensor",
            found="an exchange of memory: DLPack, or share_memory_()",
            cure="share the tensor that `infinity.gradient(parameter)` returns; or drop the gradient, "
            "`optimizer.zero_grad()`",
        )

    share_memory_ = __dlpack__

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
                found="a view of the shards of another parameter, or of one of another model",
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


class GradientView(_Shown):
    """A view of a `ShardedGrad`, or of another view: read only."""

    @staticmethod
    def __new__(cls, of: ShardedGrad, like: torch.Tensor) -> GradientView:
        """Make a view of a gradient that is laid out `like` a tensor."""
        view = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=of.device
        )
        view._whole = of
        return view


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


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a view of what `args` begins with, or the views of it: nothing is read."""
    if not func.is_view or not isinstance(args[0], _Shown):
        return NotImplemented
    shown = args[0]

    def views(tensor: torch.Tensor) -> Any:
        return func(tensor, *args[1:], **kwargs)

    def view(like: torch.Tensor, which: int | None = None) -> GradientView:
        def part(whole: torch.Tensor) -> Any:
            found = views(shown.part(whole))
            return found if which is None else found[which]

        view = GradientView(shown.of, like)
        view._part = part
        return view

    made = views(torch.empty_strided(shown.shape, shown.stride(), dtype=shown.dtype, device="meta"))
    return view(made) if isinstance(made, torch.Tensor) else [view(each, i) for i, each in enumerate(made)]


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give an operator the values in place of what shows them, unless it edits these."""
    declared = func._schema.arguments
    named = (*zip((a.name for a in declared), args, strict=False), *kwargs.items())
    edited = {a.name for a in declared if a.alias_info is not None and a.alias_info.is_write}
    if _accumulates() and func is aten.add.Tensor:
        return NotImplemented  # what autograd adds is scaled, and what is read is not
    if any(isinstance(s, _Shown) for name, value in named if name in edited for s in _flat((value,))):
        return NotImplemented
    grads = {s.of: None for s in _flat((*args, *kwargs.values())) if isinstance(s, _Shown)}
    values = dict(_by_source([*grads], lambda source, of: source.read(of)))

    def valued(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(valued(a) for a in arg)
        return arg.part(values[arg.of]) if isinstance(arg, _Shown) else arg

    return func(*valued(args), **{name: valued(value) for name, value in kwargs.items()})


def _by_source(
    grads: Sequence[ShardedGrad], ask: Callable[[GradientSource, list[ShardedGrad]], Sequence[Any]]
) -> Iterator[tuple[ShardedGrad, Any]]:
    """Yield each gradient, and what its source answers for it. Each source is asked once: there may be
    several models."""
    for source in dict.fromkeys(grad.source for grad in grads):
        of = [grad for grad in grads if grad.source is source]
        yield from zip(of, ask(source, of), strict=True)


def _add_in_place(grad: Any, other: Any, *, alpha: float = 1) -> Any:
    # In a backward it is autograd that adds, and then it is the gradient of a scaled loss.
    if not in_backward() or not isinstance(grad, ShardedGrad) or not isinstance(other, torch.Tensor):
        return NotImplemented
    if alpha != 1 or other.shape != grad.shape or isinstance(other, _Shown):
        return NotImplemented
    grad.source.add(grad, other)
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
    def norms(source: GradientSource, of: list[ShardedGrad]) -> list[float]:
        if ord == 2:  # the squares are there; for other norms all is read
            return source.norms(of)
        return [float(torch.linalg.vector_norm(source.full(grad), ord)) for grad in of]

    ours = dict(_by_source([g for g in grads if isinstance(g, ShardedGrad)], norms))
    return [
        # On a device `torch.tensor` would wait for it. A float32 may be too small for a norm: Inf.
        torch.full((), ours[g], dtype=torch.float64, device=g.device).to(dtype or torch.float32)
        if g in ours
        else torch.linalg.vector_norm(g, ord, dtype=dtype)
        for g in grads
    ]


def _unscale(grads: list[Any], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """As `GradScaler.unscale_` does: set `found_inf` if a value is not finite, and multiply."""
    norms = _foreach_norm(grads, dtype=torch.float64)
    if not all(norm.isfinite() for norm in norms):
        found_inf.fill_(1.0)
    _foreach_mul(grads, float(inverse))


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
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.zero_.default: _zero,
    aten.clamp_.default: _clamp,
    aten._foreach_clamp_min_.Scalar: lambda grads, low: _foreach_clamp(grads, low, None),
    aten._foreach_clamp_max_.Scalar: lambda grads, high: _foreach_clamp(grads, None, high),
    aten.detach.default: _same,
    aten.alias.default: _same,
}
