"""Norms of gradients, beside doubles; clipping by value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

from .offloaded import config_for, wrap_adamw
from .small_models import HeadModel, Losses, built, tokens, values, wrapped
from .test_doors import assert_close

SHAPES = [(300, 301), (7, 33), (70_001,), (5,), (64,)]


class Net(nn.Module):
    """Two units of parameters of all sizes beside the norm's block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.randn(s) for s in SHAPES) for _ in range(2))

    def forward(self, weights: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.parameters(), weights, strict=True)
        return sum((((p * w.to(p.dtype)).float().sum()) for p, w in pairs), torch.zeros(()))


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_norm_is_that_of_doubles(place: str, tmp_path: Path) -> None:
    """Within 1e-12, whatever the factors; of the parameters that have a gradient, and a group."""
    where = {"parameters": "host", "optimizer_state": "host", "gradients": place}
    model, optimizer = wrap_adamw(Net(), config_for(tmp_path, device_memory="32MiB", **where))
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator) for _ in range(2) for shape in SHAPES]
    model(weights).backward()
    params = list(model.parameters())
    factors = [1.0 + i / 7 for i in range(len(params))]
    params[2].grad = None
    out = params[4]
    optimizer.param_groups[0]["params"] = [p for p in params if p is not out]
    left = [i for i in range(len(params)) if i not in (2, 4)]
    for i in left:
        params[i].grad.mul_(factors[i])
    optimizer.step()
    squares = (weights[i].double().square().sum() * factors[i] ** 2 for i in left)
    assert optimizer.grad_norm == pytest.approx(math.sqrt(math.fsum(map(float, squares))), rel=1e-12)
    infinity.close(optimizer)


@pytest.mark.parametrize(
    ("update", "gradients", "foreach"),
    [("sync", "device", None), ("overlap", "host", False), ("delayed", "nvme", None)],
)
def test_clip_grad_value(update: str, gradients: str, foreach: bool | None, tmp_path: Path) -> None:
    def run(model: Any, optimizer: Any, gradient: Any) -> Losses:
        found = []
        for step in range(3):
            model(tokens(step)).backward()
            model(tokens(step + 10)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.002, foreach=foreach)
            found += [gradient(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model, optimizer = built(HeadModel)
    wanted = [*run(model, optimizer, lambda p: p.grad.clone()), *(p.detach() for p in model.parameters())]
    model, optimizer = wrapped(tmp_path, gradients=gradients, update=update)
    assert_close([*run(model, optimizer, infinity.gradient), *values(model)], wanted)
    infinity.close(model)


def test_gradients_of_two_models_at_once(tmp_path: Path) -> None:
    """Each is asked of its own engine, also beside plain ones."""
    pairs = [wrapped(tmp_path) for _ in range(2)]
    plain = nn.Linear(4, 4)
    plain(torch.ones(4)).sum().backward()
    for number, (model, _) in enumerate(pairs):
        model(tokens(number)).backward()
    params = [p for model, _ in pairs for p in model.parameters() if p.grad is not None]
    whole = [infinity.gradient(p) for p in params] + [p.grad.clone() for p in plain.parameters()]
    params += plain.parameters()
    norm = torch.cat([g.view(-1) for g in whole]).norm()
    assert_close([torch.cat([p.grad.view(-1) for p in params]).norm()], [norm])
    assert_close([nn.utils.clip_grad_norm_(params, 0.1, foreach=True)], [norm])
    assert_close([nn.utils.get_total_norm([p.grad for p in params])], [torch.tensor(0.1)])
    for model, _ in pairs:
        infinity.close(model)
