"""`torch.func` through a wrapped model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import ParameterChangedError

from .small_models import LAYERS, WIDTH, Block, Losses, budgeted, built
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


def test_torch_func_through_a_wrapped_model(tmp_path: Path) -> None:
    """Of inputs it works; for parameters the error names what does, and that works."""

    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(LAYERS)))

    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))

    def of_inputs(model: Any) -> Losses:
        gradient = torch.func.grad(lambda y: model(y).square().sum())
        return [
            *(gradient(x), torch.func.vjp(model, x)[1](x)[0], torch.func.jvp(model, (x,), (x,))[1]),
            *(torch.func.vmap(gradient)(x), torch.func.vmap(model)(x)),
        ]

    plain, _ = built(make)
    wanted = of_inputs(plain)
    names = dict(plain.named_parameters())

    def loss(params: Any, model: Any) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    by_name = torch.func.grad(loss)({n: p.detach() for n, p in names.items()}, plain)
    model, _ = infinity.wrap(*built(make), budgeted(make, tmp_path, "least"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(refer to|uses more units at once).*", RuntimeWarning)
        assert_close(of_inputs(model), wanted)
    with infinity.gathered(model):
        params = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ParameterChangedError, match=r"torch.autograd.grad\(loss, parameters\)"):
        torch.func.grad(loss)(params, model)
    found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert_close(list(found), list(by_name.values()))
    last = [*model.parameters()][-1]
    loss_of_all = model(x).square().sum()
    edge = torch.autograd.graph.get_gradient_edge(loss_of_all)
    (one,) = torch.autograd.grad(loss_of_all, [edge])
    assert one == 1
    last.requires_grad_(False)
    for inputs in ([last], list(model.parameters())):
        with pytest.raises(RuntimeError, match="does not require grad"):  # torch's own
            torch.autograd.grad(model(x).square().sum(), inputs, allow_unused=True)
    infinity.close(model)
