"""Parameters that are used outside their own module."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ReleasedParameterError

from .small_models import (
    CLASSES,
    WIDTH,
    Cut,
    CutModel,
    FusedModel,
    Holder,
    HolderModel,
    Model,
    TiedFusedModel,
    budgeted,
    built,
    tokens,
    train,
    values,
)
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


class PastTheBlock(Model):
    """As in diffusers' DiT, whose forward calls a part of its first block."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.blocks[0].up(x.mean(0))
        return super().logits(self.blocks[-1].norm(x) * (1 + shift))


class Parametrized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))
        self.other = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.other(x), self.head.weight)  # computed from two parameters


class CutByAttribute(Cut):
    """Keeps the weight itself as an attribute."""

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.kept = tensors

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.kept


class CutByAttributeModel(FusedModel):
    function = CutByAttribute


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the weight of a child": Model,
    "holders without a forward": HolderModel,
    "a part of a block": PastTheBlock,
    "parametrizations": Parametrized,
    "a fused head": FusedModel,
    "a fused head that slices in backward": CutModel,
    "a fused head with the weight as an attribute": CutByAttributeModel,
    "a tied fused head": TiedFusedModel,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_used_outside_its_own_module(name: str, tmp_path: Path) -> None:
    make = MODELS[name]
    model, optimizer = built(make)
    wanted = [*train(model, optimizer), *(p.detach() for p in model.parameters())]
    for budget, where, update in (("least", "nvme", "overlap"), ("large", "host", "sync")):
        places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), where)
        model, optimizer = built(make)
        config = budgeted(make, tmp_path, budget, update=update, **places)
        model, optimizer = infinity.wrap(model, optimizer, config)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(refer to|uses more units at once).*", RuntimeWarning)
            assert_close([*train(model, optimizer), *values(model)], wanted)
        infinity.close(model)


def test_outside_of_a_forward_it_is_an_error_with_a_cure_that_works(tmp_path: Path) -> None:
    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return CutByAttribute.apply(x, model.lm_head.weight, tokens(0))  # type: ignore[no-any-return]

    plain, _ = built(FusedModel)
    loss_of(plain, plain.hidden(tokens(0))).backward()
    model, optimizer = built(FusedModel)
    model, optimizer = infinity.wrap(model, optimizer, budgeted(FusedModel, tmp_path, "least"))
    with pytest.raises(ReleasedParameterError, match=r"gathered\(params\)"):
        loss_of(model, torch.randn(12, WIDTH))
    x = model.hidden(tokens(0))
    with infinity.gathered(model.lm_head):
        loss = loss_of(model, x)
    loss.backward()
    found = [infinity.gradient(p) for p in model.parameters()]
    infinity.close(model)
    assert_close(found, [p.grad for p in plain.parameters()])  # type: ignore[arg-type, misc]


def test_addresses_that_a_forward_asks_for_hold_until_its_scope_ends(tmp_path: Path) -> None:
    """Also over the least budget: nobody can count them."""

    class Addresses(Model):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Holder(), Holder()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.one.weight.sum()
            n, places = CLASSES * WIDTH, [self.one.weight.data_ptr(), self.two.weight.data_ptr()]
            self.blocks[0].up.weight.sum()
            parts = [
                torch.frombuffer((ctypes.c_float * n).from_address(p), dtype=torch.float32) for p in places
            ]
            return parts[0] - parts[1]

    model, optimizer = built(Addresses)
    wanted = model(tokens(0)).clone()
    model, _ = infinity.wrap(model, optimizer, budgeted(Addresses, tmp_path, "least"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*uses more units at once.*", RuntimeWarning)
        for _ in range(2):
            assert torch.equal(model(tokens(0)).clone(), wanted)
    engine = engine_of(model)
    assert not any(u.in_use for u in engine.units)
    infinity.close(model)
