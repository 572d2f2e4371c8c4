"""A block gets what its caller passes: the same tensors, in the same containers. And its backward ends."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

from .offloaded import ON_HOST, config_for, wrap_adamw

WIDTH = 16
SETTINGS: dict[str, dict[str, Any]] = {"nvme": {}, "host": ON_HOST, "device": {"parameters": "device"}}


class Pair(tuple):  # type: ignore[type-arg]
    """A named tuple of its own making."""

    _fields = ("x",)

    def __new__(cls, x: torch.Tensor) -> Pair:
        return super().__new__(cls, (x,))

    @classmethod
    def _make(cls, items: Any) -> Pair:
        return cls(*items)


class Frozen(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("frozen")


class Block(nn.Module):
    """A linear layer that is told by `look` what to make of what it is given."""

    def __init__(self, look: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._look = look

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._look(self.linear, *args, **kwargs)


class Net(nn.Module):
    def __init__(
        self, look: Callable[..., torch.Tensor], run: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(look) for _ in range(3))
        self._run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self._run(block, x)
        return x


def _append(linear: nn.Module, x: torch.Tensor, aux: list[torch.Tensor]) -> torch.Tensor:
    y = torch.tanh(linear(x))
    aux.append(y.square().mean())
    return y


def _appended(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    aux: list[torch.Tensor] = []
    return block(x, aux) * (1 + sum(aux))  # type: ignore[no-any-return]


def _update(linear: nn.Module, state: dict[str, torch.Tensor]) -> None:
    state["x"] = torch.tanh(linear(state["x"]))


def _updated(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    state = {"x": x}
    block(state)
    return state["x"]


def _same(linear: nn.Module, q: torch.Tensor, k: torch.Tensor, held: dict[str, Any]) -> torch.Tensor:
    return linear(q) if q is k and held["x"][0] is q else linear(q) * 0.1


def _attribute(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = linear(x) * getattr(x, "gain", 1.0)
    x.seen = True  # type: ignore[attr-defined]
    return y  # type: ignore[no-any-return]


def _with_attribute(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.gain = 3.0  # type: ignore[attr-defined]
    y = block(x)
    return y + x if x.seen else y  # type: ignore[attr-defined, no-any-return]


def _hooked(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 0.5)
    return torch.tanh(linear(x))


def _in_place(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return linear(x.mul_(2.0).relu_()) + x


LOOKS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module, torch.Tensor], torch.Tensor]]] = {
    "a list is appended to": (_append, _appended),
    "a dict is updated": (_update, _updated),
    "one tensor twice": (_same, lambda block, x: block(x, x, {"x": [x]})),
    "attributes": (_attribute, _with_attribute),
    "a hook": (_hooked, lambda block, x: block(x) + x),
    "the input comes back": (lambda linear, x: (linear(x), x)[1] * 1.0, lambda block, x: block(x)),
    "in place": (_in_place, lambda block, x: block(x.clone())),
    "in place, of a view": (_in_place, lambda block, x: block(x.clone().view(-1, WIDTH))),
    "a dict that refuses": (lambda linear, d: linear(d["x"]), lambda block, x: block(Frozen(x=x))),
    "an ordered dict": (
        lambda linear, d: linear(d["x"]),
        lambda block, x: block(collections.OrderedDict(x=x)),
    ),
    "a named tuple of its own": (lambda linear, p: linear(p[0]), lambda block, x: block(Pair(x))),
    "by keyword": (lambda linear, *, x: linear(x), lambda block, x: block(x=x)),
    "two branches": (lambda linear, x: torch.tanh(linear(x)), lambda block, x: block(x) + block(x * 2)),
}


def _train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for index in range(3):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("look", LOOKS)
def test_a_block_gets_what_its_caller_passes(look: str, settings: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(*LOOKS[look])

    plain = build()
    wanted = _train(plain, torch.optim.AdamW(plain.parameters()))
    model = build()
    model, optimizer = wrap_adamw(model, config_for(tmp_path, **SETTINGS[settings]))
    assert _train(model, optimizer) == pytest.approx(wanted, rel=1e-5)
    infinity.close(optimizer)


class Decoder(nn.Module):
    """Blocks that all get the same tensor beside their own input, and branches side by side."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self._branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.memory(x)
        if self._branches:
            return torch.stack([block(memory) for block in self.blocks]).sum(0)
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h + memory))
        return h


@pytest.mark.parametrize("branches", [False, True])
def test_a_scope_does_not_outlast_its_backward(branches: bool, tmp_path: Path) -> None:
    """Never more units are in use than one at a time, also where inputs have further uses."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(branches=branches)
    config = config_for(tmp_path, units=["memory", *(f"blocks.{i}" for i in range(6))])
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    units = infinity.api.engine.engine_of(model).units
    most = []

    def look(*_: Any) -> None:
        most.append(sum(bool(u.users) for u in units))

    for unit in units:
        for sharded in unit.params:
            sharded.param.register_post_accumulate_grad_hook(look)
    _train(model, optimizer)
    infinity.close(optimizer)
    assert max(most) == 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_the_root_is_given_is_not_changed(settings: str, tmp_path: Path) -> None:
    """bf16: floating tensors are cast, in copies of their containers; the others are the caller's."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: dict[str, Any], out: list[str], pair: Pair) -> torch.Tensor:
            out.append(type(inputs).__name__)
            return self.linear(inputs["x"]) + pair[0]  # type: ignore[no-any-return]

    model: nn.Module = Root()
    model, optimizer = wrap_adamw(model, config_for(tmp_path, dtype="bf16", **SETTINGS[settings]))
    x = torch.randn(4, WIDTH, requires_grad=True)
    for inputs in (collections.OrderedDict(x=x), {"x": x}):
        out: list[str] = []
        pair = Pair(x)
        model(inputs, out, pair).float().square().mean().backward()
        assert out == [type(inputs).__name__]
        assert inputs["x"] is x
        assert pair[0] is x
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    infinity.close(optimizer)
