"""Gradients in flat buffers: what arrives beside what is there, with the least leases, and how much of the
device they take."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.api import engine as engine_module
from infinity.api.engine import engine_of
from infinity.core.sizes import Tier
from infinity.grads.buffer import UnitBuffer
from infinity.hardware import cpu_adam
from infinity.hardware.device import HostDevice
from infinity.planning.footprint import LEAST_BUFFERS

from .offloaded import config_for

SIZES = {"large": (300, 300), "odd": (7, 33), "bias": (301,), "small": (5,)}


class Staged(HostDevice):
    """A device with memory of its own, as far as a CPU can be one."""

    staged = True


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_module, "open_device", lambda name, recorder: Staged(torch.device("cpu"), recorder)
    )


class Parts(nn.Module):
    """One unit of a few parameters, of which one chunk has several and one has several chunks."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parts() for _ in range(layers))

    def forward(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The gradient of a parameter is what `weights` has for its name."""
        total = torch.zeros(())
        for name, param in self.named_parameters():
            if name in weights:
                total = total + (param * weights[name].to(param.dtype)).sum().float()
        return total


def wrapped(
    folder: Path, place: str, dtype: str = "bf16", layers: int = 2, **settings: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net(layers)
    where = {"parameters": "device", "optimizer_state": place, "gradients": place}
    config = config_for(folder, dtype=dtype, device_memory="32MiB", **{**where, **settings})
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def needed(folder: Path, place: str, dtype: str = "bf16") -> int:
    """The least host memory that such a model takes, in bytes."""
    model, optimizer = wrapped(folder, place, dtype)
    engine = engine_of(model)
    quotas = engine.footprint.quotas
    more = sum(q.buffer_nbytes * (q.buffers - LEAST_BUFFERS[n]) for n, q in quotas.items())
    infinity.close(optimizer)
    return engine.footprint.total(Tier.HOST) - more


def draw(model: nn.Module, seed: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    generator, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
    return {
        n: torch.randn(p.shape, generator=generator).to(p.dtype)
        for n, p in model.named_parameters()
        if chosen.random() < share
    }


@pytest.mark.parametrize(
    ("place", "dtype", "leases"),
    [
        ("nvme", "bf16", "least"),
        ("nvme", "fp32", "most"),
        ("host", "bf16", "most"),
        ("device", "fp32", "least"),
    ],
)
def test_whatever_arrives_is_what_a_plain_model_has(
    place: str, dtype: str, leases: str, tmp_path: Path
) -> None:
    """After backwards of some, zeros, values put there, factors, gradients dropped; squares, too."""
    least = {"host_memory": needed(tmp_path, place, dtype)} if leases == "least" else {}
    model, optimizer = wrapped(tmp_path, place, dtype, **least)
    quota = engine_of(model).footprint.quotas.get("gradient")
    assert quota is None or quota.buffers == (2 if leases == "least" else 4)
    gradients = engine_of(model).gradients
    chosen = random.Random(7)
    plain: dict[str, torch.Tensor | None] = {n: None for n, _ in model.named_parameters()}
    named = dict(model.named_parameters())
    for number in range(30):
        some = [n for n in named if chosen.random() < 0.4] or list(named)
        kind = chosen.choice(["backward"] * 5 + ["zero", "put", "factor", "drop"])
        values = draw(model, number)
        if kind == "backward":
            model({n: values[n] for n in some}).backward()
        for name in some:
            param, before, value = named[name], plain[name], values[name].float()
            if kind == "backward":
                plain[name] = value if before is None else before + value
            elif kind == "put":
                param.grad, plain[name] = values[name], value.clone()
            elif kind == "drop":
                param.grad = plain[name] = None
            elif before is not None and kind == "zero":
                param.grad.zero_()
                plain[name] = torch.zeros_like(before)
            elif before is not None and kind == "factor":
                param.grad.mul_(0.5)
                plain[name] = before * 0.5
        if kind == "put":
            optimizer.clip_grad_norm_(float("inf"))  # takes over what was put there
        if number % 5:
            continue
        for name, param in named.items():
            found, wanted = infinity.gradient(param), plain[name]
            assert (found is None) == (wanted is None), (number, name)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=f"{number} {name}")
        gradients.chunks.sum_squares()
        for unit in engine_of(model).units:
            for chunk in unit.layout.trainable_chunks:
                entry = gradients.chunks.entries[chunk.id]
                for _, work in gradients.chunks.opened([chunk]):
                    work.wait()
                    places = np.array(chunk.norm_pieces, dtype=np.int64)[:, 1:].copy()
                    pieces = cpu_adam.Pieces(chunk.numel, places)
                    squares = cpu_adam.sum_of_squares(work.buffer(entry.dtype or chunk.dtype), pieces)
                assert entry.dtype is None or (entry.squares == squares).all()
    infinity.close(optimizer)


class Nested(nn.Module):
    """What the root owns waits for the whole backward, beside the layers' own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(300, 300))
        self.last = nn.Parameter(torch.ones(300, 300))
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.last).square().mean()


@pytest.mark.parametrize("place", ["nvme", "device"])
def test_buffers_take_what_was_planned_and_no_more(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model: Any = Nested()
    plain = Nested()
    plain.load_state_dict(model.state_dict())
    where = {"parameters": "device", "optimizer_state": place, "gradients": place}
    config = config_for(tmp_path, device_memory="32MiB", **where)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine, most = engine_of(model), 0
    put = UnitBuffer.put

    def watched(self: UnitBuffer, *args: Any, **options: Any) -> None:
        nonlocal most
        put(self, *args, **options)
        gradients = engine.gradients
        leaving = [each.buffer for each in gradients.chunks.leaving]
        most = max(most, sum(b.nbytes for b in [*gradients._filling.values(), *leaving]))

    monkeypatch.setattr(UnitBuffer, "put", watched)
    x = torch.randn(300, 300)
    for _ in range(2):
        for net in (model, plain):
            net(x).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert wanted.grad is not None
        largest = wanted.grad.abs().max().item()
        torch.testing.assert_close(infinity.gradient(found), wanted.grad, rtol=1e-6, atol=1e-6 * largest)
    assert 0 < most <= engine.footprint.gradients_nbytes
    optimizer.step()
    assert not engine.gradients._filling
    assert not engine.gradients.chunks.leaving
    infinity.close(optimizer)
