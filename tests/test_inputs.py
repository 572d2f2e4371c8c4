"""A block gets what its caller passes: the same tensors, in the same containers, and may edit them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of

from . import small_models
from .offloaded import ON_HOST, config_for, wrap_adamw
from .test_doors import assert_close

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
    "in place, of a view": (_in_place, lambda block, x: block(x.clone().view(-1, WIDTH))),
    "a dict that refuses": (lambda linear, d: linear(d["x"]), lambda block, x: block(Frozen(x=x))),
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


@pytest.mark.parametrize(("look", "settings"), [*zip(LOOKS, itertools.cycle(SETTINGS))])
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


def test_what_the_root_is_given_is_not_changed(tmp_path: Path) -> None:
    """bf16: floating tensors are cast, in copies of their containers; the others are the caller's."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: dict[str, Any], out: list[str], pair: Pair) -> torch.Tensor:
            out.append(type(inputs).__name__)
            return self.linear(inputs["x"]) + pair[0]  # type: ignore[no-any-return]

    model: nn.Module = Root()
    model, optimizer = wrap_adamw(model, config_for(tmp_path, dtype="bf16"))
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


# -- edited ------------------------------------------------------------------------------------------


class Editing(nn.Module):
    """x (batch, width) → the same; `how` edits x."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.out, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "first":
            return self.out(self.lin(self.relu(x)))
        if self.how == "twice":
            return self.out(x.add_(0.5).mul_(1.5)) + x
        if self.how == "added":
            x += self.lin(x.clone())
            return self.out(x)
        if self.how == "part":
            x[:, : WIDTH // 2] *= 2
            return self.out(self.lin(x))
        return self.relu(x)  # "returned": what it returns is what it was given


class EditingNet(nn.Module):
    """The inputs of blocks are used after them, too, as edited."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.wte = nn.Embedding(small_models.CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Editing(how) for _ in range(3))
        self.tail = nn.Linear(WIDTH, small_models.CLASSES)
        self.watch: Callable[[int], None] = lambda block: None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for i, block in enumerate(self.blocks):
            x.register_hook(lambda grad, i=i: self.watch(i))  # just before what the block is given
            x = (x * 0.5).view(2, -1, WIDTH).flatten(0, 1)
            x = block(x) + 0.5 * x
        return F.cross_entropy(self.tail(x), tokens)


@pytest.mark.first
@pytest.mark.parametrize("how", ["first", "twice", "added", "part", "returned"])
def test_an_operator_that_edits_a_scopes_input(how: str, one_thread: None, tmp_path: Path) -> None:
    """As in torch; and each unit is let go of when its own backward ends."""

    def make() -> nn.Module:
        return EditingNet(how)

    model, optimizer = small_models.built(make)
    wanted = [*small_models.train(model, optimizer), *(p.detach() for p in model.parameters())]
    model, optimizer = small_models.built(make)
    model, optimizer = infinity.wrap(model, optimizer, small_models.budgeted(make, tmp_path, "least"))
    engine, kept = engine_of(model), []

    def watch(block: int) -> None:
        kept.extend(u.layout.name for u in engine.units if u.users and f"s.{block}" in u.layout.name)

    model.watch = watch
    assert_close([*small_models.train(model, optimizer), *small_models.values(model)], wanted)
    assert not kept
    assert engine.residency.cache.peak <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
    infinity.close(model)
