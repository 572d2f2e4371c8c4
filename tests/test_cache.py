"""Load and gather: what is loaded ahead, and what goes for it, depend on the schedule and on bytes alone."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.params.cache import Cache
from infinity.params.load import _Worker
from infinity.params.unit import ParamUnit

from .offloaded import config_for

WIDTH = 64
BLOCK = WIDTH * WIDTH + WIDTH


class Layers(nn.Module):
    """Calls its layers in a given order."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def made(folder: Path, count: int, room: str) -> tuple[Any, Any, Engine]:
    torch.manual_seed(0)
    model: Any = Layers(count)
    config = config_for(folder, units=["Linear"], device_memory=room)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    return model, optimizer, engine_of(model)


def evictions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, delays: bool
) -> list[tuple[str, int]]:
    """Return which units were loaded and which went, in which order, by random programs; `delays`: reads and
    copies take any time."""
    folder.mkdir()
    found: list[tuple[str, int]] = []
    with monkeypatch.context() as patch:
        load, drop = Cache.load, Cache._drop

        def noted_load(self: Cache, unit: ParamUnit, **options: Any) -> None:
            found.append(("load", unit.index))
            load(self, unit, **options)

        def noted_drop(self: Cache, unit: ParamUnit) -> bool:
            found.append(("drop", unit.index))
            return drop(self, unit)

        patch.setattr(Cache, "load", noted_load)
        patch.setattr(Cache, "_drop", noted_drop)
        if delays:
            pause = random.Random(seed)
            land = _Worker._land

            def slow(self: Any, *flight: Any) -> None:
                time.sleep(pause.random() * 0.01)
                land(self, *flight)

            patch.setattr(_Worker, "_land", slow)
        model, optimizer, _ = made(folder, 8, "130KiB")
        try:
            draw = random.Random(seed)
            orders = [draw.sample(range(8), draw.randint(3, 8)) for _ in range(3)]
            for _ in range(8):
                model(torch.ones(2, WIDTH), draw.choice(orders)).sum().backward()
                optimizer.step()
                infinity.flush(model)  # what a load waits for is not what is decided
                optimizer.zero_grad()
        finally:
            infinity.close(optimizer)
    return found


@pytest.mark.first
@pytest.mark.parametrize("seed", range(2))
def test_what_goes_and_what_comes_never_depends_on_time(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = evictions(tmp_path / "fast", monkeypatch, seed, delays=False)
    slow = evictions(tmp_path / "slow", monkeypatch, seed, delays=True)
    assert fast == slow
    assert {kind for kind, _ in fast} == {"load", "drop"}


@pytest.mark.parametrize(
    ("count", "room", "backward", "most"),
    [
        (8, 4, False, 5.5),  # all eight, where each took the place of one that was to come again
        (8, 6, False, 3),
        (8, 4, True, 8),  # four on the way there, four on the way back: nothing stands in its own way
    ],
)
def test_a_cycle_loads_little_more_than_has_no_room(
    count: int, room: int, backward: bool, most: float, tmp_path: Path
) -> None:
    model: Any = Layers(count)
    config = config_for(tmp_path, units=["Linear"], device_memory=1 << 20)
    if backward:
        model, owner = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    else:
        model = owner = infinity.inference(model, config)
    cache = engine_of(model).residency.cache
    cache._capacity = room * cache.units[0].layout.gathered_nbytes

    def cycle() -> None:
        with torch.set_grad_enabled(backward):
            y = model(torch.ones(2, WIDTH), list(range(count)))
        if backward:
            y.sum().backward()

    try:
        for _ in range(3):
            cycle()
        before, missed = cache.loads, engine_of(model).residency.missed
        for _ in range(8):
            cycle()
        assert (cache.loads - before) / 8 <= most
        assert engine_of(model).residency.missed == missed  # nothing is waited for that was not begun
        assert cache.allocated <= cache._capacity
    finally:
        infinity.close(owner)
