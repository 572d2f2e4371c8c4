"""Norms of gradients, beside doubles; and that nothing is read for them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.grads.gradient_chunks import ChunkGradients

from .offloaded import config_for

SHAPES = [(300, 301), (7, 33), (70_001,), (5,), (64,)]


class Net(nn.Module):
    """Two units of parameters of all sizes beside the norm's block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(torch.randn(s) for s in SHAPES) for _ in range(2))

    def forward(self, weights: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.parameters(), weights, strict=True)
        return sum((((p * w.to(p.dtype)).float().sum()) for p, w in pairs), torch.zeros(()))


def build() -> tuple[Any, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for _ in range(2) for s in SHAPES]


def together(grads: list[torch.Tensor]) -> float:
    return math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_norms_with_any_factors_read_nothing_again(
    place: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"parameters": "host", "optimizer_state": "host", "gradients": place}
    config = config_for(tmp_path, dtype=dtype, device_memory="32MiB", **where)
    model, optimizer = infinity.wrap(*build(), config)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    weights = [draw(0, kind), draw(1, kind)]
    for part in weights:
        model(part).backward()
    wanted = [a.float() + b.float() for a, b in zip(*weights, strict=True)]
    with monkeypatch.context() as patch:
        engine_of(model).gradients.wait()
        patch.setattr(ChunkGradients, "open", None)
        patch.setattr(ChunkGradients, "take", None)
        for number, (param, grad) in enumerate(zip(model.parameters(), wanted, strict=True)):
            param.grad.mul_(1 + number / 3)
            grad.mul_(1 + number / 3)
            assert param.grad.norm().item() == pytest.approx(together([grad]), rel=1e-6)
        exact = [g.float() for g in wanted]
        found = optimizer.clip_grad_norm_(1.0)
        assert found.item() == pytest.approx(together(exact), rel=1e-6)
        norms = torch._foreach_norm([p.grad for p in model.parameters()])
        clip = 1 / (together(exact) + 1e-6)
        assert [n.item() for n in norms] == pytest.approx([together([g * clip]) for g in exact], rel=1e-6)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(1.0, rel=1e-5)
    infinity.close(optimizer)


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_norm_is_that_of_doubles(place: str, tmp_path: Path) -> None:
    """Within 1e-12, whatever the factors; of the parameters that have a gradient, and a group."""
    where = {"parameters": "host", "optimizer_state": "host", "gradients": place}
    model, optimizer = infinity.wrap(*build(), config_for(tmp_path, device_memory="32MiB", **where))
    weights = draw(3)
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


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
@pytest.mark.parametrize("limit", [0.1, 1e9])
def test_a_step_that_clips_is_torchs(place: str, limit: float, tmp_path: Path) -> None:
    where = {"parameters": "host", "optimizer_state": place, "gradients": place}
    settings = {"max_grad_norm": limit, "device_memory": "32MiB", **where}
    model, optimizer = infinity.wrap(*build(), config_for(tmp_path, **settings))
    reference, plain = build()
    for net in (model, reference):
        net(draw(5)).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), limit)
    for o in (optimizer, plain):
        o.step()
    for (name, found), wanted in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        largest = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * largest, msg=name)
    infinity.close(optimizer)
