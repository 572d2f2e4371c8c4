"""Config(skip_nonfinite=True): steps whose gradients have an Inf or NaN change nothing, on any tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import ConfigError

from .models import case
from .offloaded import config_for
from .test_optimizers import PLACES, assert_equal, loss_of, state_of
from .whole import OPTIMIZERS

STEPS = 5
BAD = {1: float("inf"), 3: float("nan")}


def run(model: nn.Module, optimizer: Any, plain: bool) -> list[bool]:
    """Make steps, of which some have a bad gradient, with a scheduler that waits then; say which."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    skipped = []
    for step in range(STEPS):
        (loss_of(model, step) * BAD.get(step, 1.0)).backward()
        if plain:
            skipped.append(step in BAD)
        if not plain or step not in BAD:
            optimizer.step()
        if not plain:
            skipped.append(optimizer.step_was_skipped)
        if not skipped[-1]:
            scheduler.step()
        optimizer.zero_grad()
    return skipped


@pytest.mark.parametrize("place", ["device", "nvme", "split"])
def test_parameters_moments_and_counts_stay(place: str, tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw"]
    found = []
    for folder, settings in (("plain", {}), ("ours", PLACES[place])):
        (tmp_path / folder).mkdir()
        model = case("gpt").model
        config = config_for(tmp_path / folder, skip_nonfinite=folder == "ours", **settings)
        model, optimizer = infinity.wrap(model, make(model.parameters()), config)
        assert run(model, optimizer, folder == "plain") == [step in BAD for step in range(STEPS)]
        metrics, saved = infinity.metrics(optimizer), optimizer.state_dict()
        assert (metrics["steps"], metrics["skipped_steps"]) == (3.0, 2.0 if folder == "ours" else 0.0)
        assert {float(state["step"]) for state in saved["state"].values()} == {3.0}
        found.append(state_of(model))
        infinity.close(optimizer)
    assert_equal(found[1], found[0])


def test_bf16_goes_on_behind_a_skipped_step(tmp_path: Path) -> None:
    settings = {"update": "delayed", "delay_warmup_steps": 0}
    model = case("gpt").model
    config = config_for(tmp_path, dtype="bf16", skip_nonfinite=True, max_grad_norm=1.0, **settings)
    model, optimizer = infinity.wrap(model, OPTIMIZERS["adamw"](model.parameters()), config)
    assert run(model, optimizer, False) == [step in BAD for step in range(STEPS)]
    infinity.flush(optimizer)
    assert all(value["value"].isfinite().all() for value in state_of(model).values())
    infinity.close(optimizer)


def test_without_it_the_step_is_made(tmp_path: Path) -> None:
    model = case("gpt").model
    model, optimizer = infinity.wrap(model, OPTIMIZERS["adamw"](model.parameters()), config_for(tmp_path))
    assert run(model, optimizer, False) == [False] * STEPS
    infinity.close(optimizer)


def test_an_update_behind_the_backward_cannot_skip(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="skip_nonfinite=False"):
        config_for(tmp_path, update="backward", accumulation=1, skip_nonfinite=True)
