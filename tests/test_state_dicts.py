"""State dicts between torch and the engine."""

from __future__ import annotations

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, StateDictError
from infinity.planning.footprint import Budget

from .small_net import Wrapped, build, same, train


def test_state_dicts_travel_both_ways(config: infinity.Config) -> None:
    reference, torch_optimizer = build()
    train(reference, torch_optimizer)
    model, optimizer = infinity.wrap(*build(seed=9), config.replace(host_memory="64MiB"))
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(torch_optimizer.state_dict())
    assert same(model.state_dict(), reference.state_dict())
    saved = optimizer.state_dict()
    expected = torch_optimizer.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(saved["state"][index][key], value), (index, key)
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)

    back, back_optimizer = build(seed=3)
    back.load_state_dict(model.state_dict())
    back_optimizer.load_state_dict(optimizer.state_dict())
    assert train(back, back_optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)
    infinity.close(optimizer)


def test_a_state_dict_of_another_model_is_refused_and_nothing_changes(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 1)
    before = model.state_dict()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:-1]
    with pytest.raises(StateDictError):
        optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateDictError):
        optimizer.load_state_dict(state)
    assert same(model.state_dict(), before)


def test_a_state_dict_that_does_not_fit_is_refused(config: infinity.Config) -> None:
    engine_config = config.replace(host_memory="2MiB", chunk_elements=65536)
    model, optimizer = infinity.wrap(*build(), engine_config)
    train(model, optimizer, 1)
    engine_of(model).budget = Budget(device=0, host=0)
    with pytest.raises(BudgetError, match="host_memory"):
        optimizer.state_dict()
    assert len(model.state_dict()) > 0  # it fits the leases that nobody uses
    infinity.close(optimizer)
