"""Errors at `wrap`, before anything is touched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.errors import BudgetError, ConfigError, DirectoryError, OptimizerTypeError, WrapError
from infinity.params.param import ReleasedParameter

from .small_net import Net, Wrapped, build, same, train


def test_a_model_is_wrapped_once(wrapped: Wrapped, config: infinity.Config) -> None:
    model, _ = wrapped
    with pytest.raises(WrapError, match="already"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.AdamW(p, capturable=True),
    ],
)
def test_other_optimizers_are_refused(make: Any, config: infinity.Config) -> None:
    model, _ = build()
    with pytest.raises(OptimizerTypeError):
        infinity.wrap(model, make(model.parameters()), config)
    assert not isinstance(model.embed.weight, ReleasedParameter)


def test_optimizer_and_model_must_agree(config: infinity.Config) -> None:
    model, _ = build()
    with pytest.raises(WrapError, match="optimizer does not have it"):
        infinity.wrap(model, torch.optim.AdamW(model.head.parameters()), config)
    other, _ = build()
    with pytest.raises(WrapError, match="model does not have"):
        infinity.wrap(model, torch.optim.AdamW([*model.parameters(), *other.parameters()]), config)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(WrapError, match="no values"):
        infinity.wrap(empty, torch.optim.AdamW(empty.parameters()), config)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"device_memory": "10KiB"}, "device_memory"), ({"host_memory": "10KiB"}, "host_memory")],
)
def test_a_run_that_cannot_fit_is_refused_untouched(
    config: infinity.Config, change: dict[str, Any], name: str, tmp_path: Path
) -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetError, match=name):
        infinity.wrap(model, optimizer, config.replace(**change))
    assert same(model.state_dict(), before)
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_is_refused_untouched(config: infinity.Config, tmp_path: Path) -> None:
    model, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DirectoryError, match="nowhere"):
        infinity.wrap(model, optimizer, config.replace(nvme=tmp_path / "nowhere"))
    assert same(model.state_dict(), before)
    assert train(model, optimizer, 1)


def test_a_directory_in_use_is_refused(wrapped: Wrapped, config: infinity.Config) -> None:
    with pytest.raises(DirectoryError, match="use"):
        infinity.wrap(*build(), config)


def test_units_that_do_not_exist_are_refused(config: infinity.Config) -> None:
    with pytest.raises(ConfigError, match="Blok"):
        infinity.wrap(*build(), config.replace(units=["Blok"]))
