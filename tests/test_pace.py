"""What prefetch knows of time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from infinity.planning.pace import MARGIN, Pace
from torch import nn

import infinity
from infinity.api.engine import engine_of

from .offloaded import config_for


def test_nothing_waits_before_anything_was_measured() -> None:
    pace = Pace()
    assert not pace.can_wait(1e9, 1)
    pace.used(0, 1e9)
    assert not pace.can_wait(1e9, 1)
    assert pace.seconds(1) == 0.0


def test_what_comes_in_time_anyway_can_wait() -> None:
    pace = Pace()
    pace.fetched(1000, 1.0)
    assert pace.can_wait(MARGIN * 2.01, 2000)
    assert not pace.can_wait(MARGIN * 1.99, 2000)


def test_figures_turn_to_fetching_early_at_once_and_back_in_steps() -> None:
    pace = Pace()
    pace.used(0, 1.0)
    pace.used(0, 0.1)
    assert pace.seconds(0) == 0.1
    pace.used(0, 1.0)
    assert 0.1 < pace.seconds(0) < 0.2
    pace.fetched(1000, 1.0)
    pace.fetched(1000, 10.0)
    assert not pace.can_wait(MARGIN * 9, 1000)
    pace.fetched(1000, 1.0)
    assert not pace.can_wait(MARGIN * 7, 1000)
    for _ in range(20):
        pace.fetched(1000, 1.0)
    assert pace.can_wait(MARGIN * 1.1, 1000)


@pytest.mark.parametrize(("seconds", "most"), [(1e-9, 20), (1e9, 3)])
def test_a_slow_compute_fetches_what_is_next_and_a_fast_one_all_that_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """The unit in use, the next, and one more: the rest would come in time later."""
    monkeypatch.setattr(Pace, "seconds", lambda self, unit: seconds)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(20)))
    config = config_for(tmp_path, device_memory="8MiB")
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    residency = engine_of(model).residency
    ahead = []

    def look(*_: object) -> None:
        fetched = [u for u in residency.units if not u.on_device and u.storage and u.last_load is not None]
        ahead.append(len(fetched))

    try:
        for _ in range(2):
            model(torch.randn(2, 128)).mean().backward()
        optimizer.zero_grad()
        infinity.flush(optimizer)
        residency.reshard_all()
        model[0].register_forward_hook(look)
        residency.missed = 0
        with torch.no_grad():
            model(torch.randn(2, 128))
        assert residency.missed <= 1  # the first
        assert ahead[0] <= most
        assert most == 3 or ahead[0] > 10
    finally:
        infinity.close(optimizer)
