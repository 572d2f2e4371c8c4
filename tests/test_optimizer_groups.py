"""The optimizer's groups, options and state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import OptimizerTypeError, StateDictError, WrapError

from .small_net import Wrapped, build, train


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_a_scheduler_from_before_wrap_knows_of_the_steps(config: infinity.Config) -> None:
    model, plain = build()
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    model, optimizer = infinity.wrap(model, plain, config)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()  # it comes too soon, indeed
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1)
    train(model, optimizer, 1)
    scheduler.step()
    infinity.close(optimizer)


def test_an_option_that_is_set_later_is_refused(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(OptimizerTypeError, match="amsgrad"):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    assert optimizer.steps == 1


def test_whoever_would_reset_the_state_is_told_how(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    train(model, optimizer, 2)
    param = model.head.weight
    for use in (
        lambda: optimizer.state.clear(),
        lambda: optimizer.state[param]["exp_avg"].zero_(),
        lambda: optimizer.state.pop(param),
        lambda: setattr(optimizer, "state", {}),
    ):
        with pytest.raises(StateDictError, match="is on its tiers"):
            use()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, 1)
    assert all(int(s["step"]) == 1 for s in optimizer.state_dict()["state"].values())


def test_add_param_group_is_refused(wrapped: Wrapped) -> None:
    with pytest.raises(
        WrapError, match="after `wrap` freeze"
    ):  # test_what_required_a_gradient_may_come_and_go
        wrapped[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
