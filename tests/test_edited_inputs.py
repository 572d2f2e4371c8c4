"""Operators that edit a scope's input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of

from .offloaded import config_for
from .quick import covering, quick
from .small_models import CLASSES, LAYERS, WIDTH, budgeted, built, train, values
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


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

    def __init__(self, how: str, view: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Editing(how) for _ in range(LAYERS))
        self.tail, self.view = nn.Linear(WIDTH, CLASSES), view
        self.watch: Callable[[int], None] = lambda block: None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for i, block in enumerate(self.blocks):
            x.register_hook(lambda grad, i=i: self.watch(i))  # just before what the block is given
            x = x * 0.5
            if self.view:
                x = x.view(2, -1, WIDTH).flatten(0, 1)
            x = block(x) + 0.5 * x
        return F.cross_entropy(self.tail(x), tokens)


@pytest.mark.first
@covering
@pytest.mark.parametrize("view", quick([False, True], [True]))
@pytest.mark.parametrize("how", ["first", "twice", "added", "part", "returned"])
def test_an_operator_that_edits_a_scopes_input(how: str, view: bool, tmp_path: Path) -> None:
    """As in torch; and each unit is let go of when its own backward ends."""

    def make() -> nn.Module:
        return EditingNet(how, view)

    model, optimizer = built(make)
    wanted = [*train(model, optimizer), *(p.detach() for p in model.parameters())]
    for budget in ("least", "large"):
        model, optimizer = built(make)
        model, optimizer = infinity.wrap(model, optimizer, budgeted(make, tmp_path, budget))
        engine, kept = engine_of(model), []

        def watch(block: int, engine: Any = engine, kept: list[Any] = kept) -> None:
            kept.extend(u.layout.name for u in engine.units if u.users and f"s.{block}" in u.layout.name)

        model.watch = watch
        assert_close([*train(model, optimizer), *values(model)], wanted)
        assert not kept
        assert (
            engine.residency.cache.peak <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
        )
        infinity.close(model)


def test_edits_of_inputs_that_torch_refuses_are_refused(tmp_path: Path) -> None:
    model, optimizer = built(lambda: Editing("first"))
    plain, _ = built(lambda: Editing("first"))
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))
    leaf = torch.randn(6, WIDTH, requires_grad=True)
    for x in (lambda: leaf, lambda: leaf[:3], lambda: (leaf * 1).split(3)[0]):
        for net in (plain, model):
            with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad|multiple views"):
                net(x())
    for net in (plain, model):
        y = (leaf * 1).exp()  # keeps its result
        net(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    infinity.close(model)
