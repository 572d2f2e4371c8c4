"""Loops that users write: exceptions, metrics, modules that return what they were given."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity

from .offloaded import ON_HOST, config_for, wrap_adamw
from .small_net import Wrapped, build, same, tokens, train


def test_an_exception_in_the_loop_leaves_a_usable_model(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        model(tokens())
    handle.remove()
    loss = model(tokens())
    loss.register_hook(lambda _: (_ for _ in ()).throw(KeyError("mine too")))
    with pytest.raises(KeyError, match="mine too"):
        loss.backward()
    assert train(model, optimizer) == pytest.approx(train(reference, torch_optimizer), rel=1e-5)


def test_metrics_are_figures_and_a_step_without_gradients_changes_nothing(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    optimizer.step()
    train(model, optimizer, 2)
    before = model.state_dict()
    optimizer.step()
    assert same(model.state_dict(), before)
    values = infinity.metrics(optimizer)
    assert values["steps"] == 4
    assert values["nvme/written(GiB)"] > 0
    assert all(isinstance(v, str if name == "bound" else float) for name, v in values.items())


class _WithPrompt(nn.Module):
    """Learned queries: a forward that returns a parameter."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 16))

        def forward(self) -> torch.Tensor:
            return self.w

    def __init__(self) -> None:
        super().__init__()
        self.prompt = self.Prompt()
        self.layer = nn.Linear(16, 16)
        self.also = nn.Identity()  # returns what a caller gave it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.also(x) + self.prompt()).tanh() * self.prompt()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_leaf_that_a_module_returns_gets_no_hook_per_forward(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = _WithPrompt()
    config = config_for(tmp_path, **{**ON_HOST, "parameters": tier}, units=["Prompt", "Linear"])
    model, adam = wrap_adamw(copy.deepcopy(plain), config, lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    x = torch.randn(4, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    hooks = []
    try:
        for _ in range(4):
            for network, data, optimizer in ((model, x, adam), (plain, y, theirs)):
                for _ in range(2):
                    network(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            hooks.append(sum(len(t._backward_hooks or ()) for t in (x, *model.parameters())))
        torch.testing.assert_close(x.grad, y.grad)
        assert hooks == [hooks[0]] * 4
        assert len(x._backward_hooks or ()) == 0
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    finally:
        infinity.close(adam)
