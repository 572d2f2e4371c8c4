"""Optimizers that have no kernel: their own code in PyTorch updates parameters, piece by piece.

[Note: pieces of a parameter] An optimizer whose arithmetic is elementwise does not see whether it has a
parameter or a piece of one. So each piece becomes a parameter of a short-lived optimizer of the class, in a
group with the options of the snapshot. Its state is views of the moments, and the counters of the parameter
from before the update: each piece starts from the same ones. What the counters are after an update does not
depend on values; the class computes them for a parameter of one element when the step begins.
At the first update of a parameter the class makes the state, so the engine need not know what it begins with.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from infinity.core.errors import OptimizerTypeError

#: Elements that are updated at once on a CPU, and on a device: each temporary of the class is so large.
AT_ONCE: Final = 1 << 18
AT_ONCE_ON_DEVICE: Final = 1 << 21
_PROBED_STEPS: Final = 12
_PROBED_SHAPES: Final = ((96, 80), (6000,), (4, 9, 11, 13))
_CUTS: Final = (0, 64, 192, 4096)  # multiples of 64, as those of chunks


class Code:
    """The code of an optimizer: its class, and its attributes at `wrap`.

    Attributes:
        moments: what it keeps of each element, by name; counters: what it keeps of each parameter, with a
            value that shows its type; of all param groups together.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.kind = type(optimizer)
        # Shared with the optimizer, never copied. Its hooks are the user's: they belong to whole steps.
        self._attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in ("state", "param_groups", "step") and "_hooks" not in name
        }
        self._step: Any = self.kind.step
        while getattr(self._step, "hooked", False):  # torch's wrapper calls hooks, also global ones
            self._step = self._step.__wrapped__  # type: ignore[attr-defined]
        self._counted: tuple[Any, dict[str, float]] | None = None  # the last call of `count`, and its result
        self._at_wrap: list[tuple[Mapping[str, Any], frozenset[str]]] = []  # groups, and what they keep
        self.moments: dict[str, None] = {}
        self.counters: dict[str, Any] = {}
        for group in optimizer.param_groups:
            moments, counters = self.kept(options_of(group))
            self.moments |= dict.fromkeys(moments)
            self.counters |= counters

    def kept(self, options: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Return which moments, and which counters, the optimizer keeps with the options of a param group.

        Raises:
            OptimizerTypeError: it keeps something that is neither.
        """
        group = dict(options)
        try:
            state = self._run(_ones(2), _ones(2), {}, group)
        except Exception as error:  # whatever a user's class raises
            shown = ", ".join(f"{name}={value!r}" for name, value in group.items())
            raise OptimizerTypeError(
                f"{self.kind.__module__}.{self.kind.__qualname__} cannot make a step with these options",
                expected="options with which its `step()` updates a parameter of two elements",
                found=f"with {shown}, `step()` raises {type(error).__name__}: {error}",
                cure="correct the option in optimizer.param_groups; or train with another optimizer, such as "
                "torch.optim.AdamW(model.parameters(), ...)",
            ) from error
        moments, counters = [], {}
        for name, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.shape == (2,) and value.dtype is torch.float32:
                moments.append(name)
            elif isinstance(value, (int, float)) or (is_tensor and value.numel() == 1 and value.is_cpu):
                counters[name] = value
            elif value is not None:
                found = f"its state {name!r} is neither an fp32 value of each element nor a number"
                raise self.refused(found)
        return tuple(moments), counters

    def without_room(self, group: Mapping[str, Any]) -> list[str]:
        """Return what the optimizer keeps with the options of a param group, and has no room for. That is
        what no group kept at `wrap`; of a class that was probed, what this group did not keep: the class
        would begin it with values of its own, and the engine has zeros."""
        moments, counters = self.kept(options_of(group))
        of_group = (names for known, names in self._at_wrap if known is group)
        room = next(of_group, frozenset((*self.moments, *self.counters)))
        return [name for name in (*moments, *counters) if name not in room]

    def counter(self, name: str, value: float) -> Any:
        """Return a counter as the class keeps it."""
        like = self.counters[name]
        if isinstance(like, torch.Tensor):
            return like.new_tensor(value).view(like.shape)
        return type(like)(value)

    def count(self, counters: Mapping[str, float], options: Mapping[str, Any]) -> dict[str, float]:
        """Return the counters after an update; no `counters`: after the first one."""
        if not self.counters:
            return {}
        if self._counted is not None and self._counted[0] == (counters, options):  # as others of its group
            return self._counted[1]
        state: dict[str, Any] = {name: self.counter(name, value) for name, value in counters.items()}
        if state:
            state |= {name: _ones(1) for name in self.moments}
        state = self._run(_ones(1), _ones(1), state, options)
        after = {name: float(state[name]) for name in self.counters if name in state}
        self._counted = (counters, options), after
        return after

    def update(
        self,
        param: torch.Tensor,
        moments: Mapping[str, torch.Tensor],
        grad: torch.Tensor,
        options: Mapping[str, Any],
        counters: Mapping[str, float],
        *,
        is_first: bool,
        grad_scale: float = 1.0,
    ) -> None:
        """Update flat fp32 pieces of a parameter and of its moments, in place. `counters`: from before."""
        at_once = AT_ONCE if param.is_cpu else AT_ONCE_ON_DEVICE
        for begin in range(0, param.numel(), at_once):
            part = slice(begin, begin + at_once)
            here = {name: moment[part] for name, moment in moments.items()}
            scaled = grad[part].to(torch.float32, copy=True)  # the class may change it
            if grad_scale != 1.0:
                scaled.mul_(grad_scale)
            state: dict[str, Any] = {}
            if not is_first:
                state = {name: self.counter(name, value) for name, value in counters.items()} | here
            made = self._run(param[part], scaled, state, options)
            for name, moment in here.items():
                value = made.get(name)
                if value is None:
                    moment.zero_()
                elif value.data_ptr() != moment.data_ptr():
                    moment.copy_(value)

    def update_whole(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        factors: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        counters: Mapping[str, float],
    ) -> dict[str, torch.Tensor]:
        """Update a whole parameter in place: fp32, in its shape. Return new factors: what the optimizer keeps
        of it, in fp32. The given `factors` stay; both are on the CPU. No `counters`: at the first update."""
        state: dict[str, Any] = {name: self.counter(name, value) for name, value in counters.items()}
        if state:
            state |= {name: factor.to(param.device, copy=True) for name, factor in factors.items()}
        made = self._run(param, grad, state, options)
        return {name: value.cpu() for name, value in made.items() if name not in self.counters}

    def _run(
        self,
        values: torch.Tensor,
        grad: torch.Tensor,
        state: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Make one step of an optimizer that has one parameter; return its state."""
        param = nn.Parameter(values)
        param.grad = grad
        optimizer = self.bare([param], options)
        if state:
            optimizer.state[param] = {**state}
        with torch.device("cpu"):  # where the class puts its counters, whatever the default device is
            self._step(optimizer)
        if param.data_ptr() != values.data_ptr():  # the class has replaced `param.data`
            values.copy_(param.data)
        made: dict[str, Any] = optimizer.state[param]
        return made

    def bare(self, params: list[nn.Parameter], options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return an optimizer of the class over `params`, without state and without hooks."""
        optimizer: torch.optim.Optimizer = object.__new__(self.kind)
        vars(optimizer).update(self._attributes)
        optimizer.param_groups = [{**options, "params": params}]
        optimizer.state = defaultdict(dict)
        return optimizer

    def refused(self, found: str) -> OptimizerTypeError:
        """Return the error for an optimizer of which something was `found` that does not work."""
        return OptimizerTypeError(
            f"{self.kind.__module__}.{self.kind.__qualname__} cannot run on pieces of parameters",
            expected="an update of each element by itself, whose whole state is fp32 values of each element "
            "and numbers of each parameter",
            found=found,
            cure="train with another optimizer, such as torch.optim.AdamW(model.parameters(), ...)",
        )

    # -- the probe --------------------------------------------------------------------------

    def probe(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `OptimizerTypeError` if whole parameters get other bits than their pieces, or get other bits
        beside other values."""
        for group in optimizer.param_groups:
            moments, counters = self.kept(options_of(group))
            self._at_wrap.append((group, frozenset((*moments, *counters))))
        with torch.random.fork_rng(devices=()):
            for group, shape in itertools.product(optimizer.param_groups, _PROBED_SHAPES):
                try:
                    self._probe(options_of(group), shape)
                except OptimizerTypeError:
                    raise
                except Exception as error:  # whatever a user's class raises
                    found = f"for a parameter of shape {shape} it raises {type(error).__name__}: {error}"
                    raise self.refused(found) from error

    def _probe(self, options: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        draw = torch.Generator("cpu").manual_seed(0)
        numel = torch.Size(shape).numel()
        cuts = [*(cut for cut in _CUTS if cut < numel), numel]
        first = cuts[1]  # elements before it have other values in `other`
        param = _random(numel, draw)
        whole, other = (nn.Parameter(param.clone().view(shape)) for _ in range(2))
        other.data.view(-1)[:first] *= 7
        beside = nn.Parameter(_random(35, draw).view(5, 7))  # of the same group
        plain, aside = self.bare([whole], options), self.bare([beside, other], options)
        moments = {name: torch.zeros_like(param) for name in self.moments}
        counters: dict[str, float] = {}
        for step in range(_PROBED_STEPS):
            grad = _random(numel, draw).mul_(_random(numel, draw).mul_(2).exp_())
            grad[: numel // 3 : 5] = 0
            if step == _PROBED_STEPS - 1:  # a class that skips a parameter for that would skip a piece
                grad[-1] = float("nan")
            whole.grad, other.grad = grad.clone().view(shape), grad.clone().view(shape)
            other.grad.view(-1)[:first] *= -300
            beside.grad = _random(35, draw).view(5, 7)
            kept = dict(plain.param_groups[0])
            self._step(plain)
            self._step(aside)
            group = plain.param_groups[0]
            if len(group) > len(kept) or any(group.get(name) is not value for name, value in kept.items()):
                raise self.refused("it keeps numbers in its param groups")
            for begin, end in itertools.pairwise(cuts):
                part = slice(begin, end)
                pieces = {name: moment[part] for name, moment in moments.items()}
                self.update(param[part], pieces, grad[part], options, counters, is_first=step == 0)
            counters = self.count(counters, options)
            theirs = plain.state[whole]
            if {n for n, v in theirs.items() if v is not None} - {*self.moments, *self.counters}:
                raise self.refused(f"after {step + 1} steps its state has {', '.join(theirs)}")
            if any(float(theirs[name]) != counters.get(name) for name in self.counters if name in theirs):
                raise self.refused("its state has numbers that depend on the values of the parameter")
            of_all = self._values(whole, theirs)
            beside_others = self._values(other, aside.state[other])
            for name, value in (("values", param), *moments.items()):
                if name in of_all and not _same(of_all[name], value):
                    raise self.refused(
                        f"a parameter of shape {shape} and its pieces have other {name!r} after {step + 1} "
                        "steps"
                    )
                if name in of_all and not _same(beside_others[name][first:], value[first:]):
                    raise self.refused(f"{name!r} of an element depends on other elements")

    def _values(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        kept = {name: state[name].reshape(-1) for name in self.moments if state.get(name) is not None}
        return {"values": param.data.view(-1), **kept}


def _ones(numel: int) -> torch.Tensor:
    return torch.ones(numel, dtype=torch.float32, device="cpu")


def _random(numel: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(numel, generator=draw, dtype=torch.float32, device="cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, any NaN being as good as another."""
    return bool(((one.view(torch.int32) == other.view(torch.int32)) | (one.isnan() & other.isnan())).all())


class OwnCode(NamedTuple):
    """The options of an update by an optimizer's own code: all that its param group has."""

    code: Code
    options: Mapping[str, Any]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot of a group's options, with numbers in the place of tensors that have one element. The
    order of operations is that of single tensors."""
    return dict(_options(group))


def _options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if name in ("foreach", "fused"):
            yield name, False
        elif name != "params":
            yield name, value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
