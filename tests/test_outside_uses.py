"""Parameters that are used outside their own module."""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ReleasedParameterError

from .quick import covering, quick
from .small_models import (
    CLASSES,
    WIDTH,
    Cut,
    CutModel,
    FusedModel,
    HeadModel,
    Holder,
    HolderModel,
    Losses,
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


class ListModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(3))
        self.dict = nn.ParameterDict(
            {
                "head": nn.Parameter(torch.randn(CLASSES, WIDTH) / 8),
                "bias": nn.Parameter(torch.zeros(CLASSES)),
            }
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x @ self.dict["head"].t() + self.dict["bias"]


class PastTheBlock(Model):
    """As in diffusers' DiT, whose forward calls a part of its first block."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.blocks[0].up(x.mean(0))
        return super().logits(self.blocks[-1].norm(x) * (1 + shift))


class WeightNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.head = torch.nn.utils.weight_norm(nn.Linear(WIDTH, CLASSES))
            for block in self.blocks:
                torch.nn.utils.weight_norm(block.up)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


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


class CutByAddress(Cut):
    """Reads what lies at the addresses of two parameters, as a Triton kernel does."""

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return Cut.forward.__func__(cls, ctx, x, at_address(weight), targets)

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.kept = tensors

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.kept


def at_address(tensor: torch.Tensor) -> torch.Tensor:
    values = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(values, dtype=torch.float32).view(tensor.shape).clone()


class CutByAttributeModel(FusedModel):
    function = CutByAttribute


class CutByAddressModel(FusedModel):
    function = CutByAddress


def patched() -> nn.Module:
    """A plain model whose forward somebody replaced afterwards."""
    model = HeadModel()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return Cut.apply(model.hidden(tokens), model.head.weight, tokens)  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    return model


class TwoAddresses(Model):
    """A kernel that is given addresses in two units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Holder(), Holder()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return BothByAddress.apply(self.hidden(tokens), self.one.weight, self.two.weight, tokens)  # type: ignore[no-any-return]


class BothByAddress(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        one.sum()  # it is there from here on
        n = one.numel()
        places = [one.data_ptr(), two.data_ptr()]
        values = [torch.frombuffer((ctypes.c_float * n).from_address(p), dtype=torch.float32) for p in places]
        weight = (values[0] + values[1]).view(one.shape)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            loss = F.cross_entropy(leaves[0] @ leaves[1].t(), targets)
        ctx.grads = torch.autograd.grad(loss, leaves)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.grads[0], grad * ctx.grads[1], grad * ctx.grads[1], None


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the weight of a child": Model,
    "holders without a forward": HolderModel,
    "ParameterList and ParameterDict": ListModel,
    "a part of a block": PastTheBlock,
    "weight_norm": WeightNorm,
    "parametrizations": Parametrized,
    "a fused head": FusedModel,
    "a fused head that slices in backward": CutModel,
    "a fused head with the weight as an attribute": CutByAttributeModel,
    "a fused head that takes addresses": CutByAddressModel,
    "a tied fused head": TiedFusedModel,
    "a patched forward": patched,
    "addresses in two units": TwoAddresses,
}


@functools.cache
def by_torch(make: Callable[[], nn.Module]) -> Losses:
    """Losses and parameters of plain torch. Several tests have them: only for looking at."""
    model, optimizer = built(make)
    return [*train(model, optimizer), *(p.detach() for p in model.parameters())]


@covering
@pytest.mark.parametrize(
    ("budget", "where"),
    quick(itertools.product(["least", "large"], ["host", "nvme"]), [("least", "nvme"), ("large", "host")]),
)
@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_used_outside_its_own_module(name: str, budget: str, where: str, tmp_path: Path) -> None:
    make = MODELS[name]
    wanted = by_torch(make)
    config = budgeted(
        make, tmp_path, budget, **dict.fromkeys(("parameters", "optimizer_state", "gradients"), where)
    )
    for update in ("sync", "overlap"):
        model, optimizer = built(make)
        model, optimizer = infinity.wrap(model, optimizer, config.replace(update=update))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(refer to|uses more units at once).*", RuntimeWarning)
            assert_close([*train(model, optimizer), *values(model)], wanted)
        infinity.close(model)


def test_what_is_used_outside_its_module_is_loaded_ahead_from_the_second_round_on(tmp_path: Path) -> None:
    """As often as in a model that calls its head."""
    missed = {}
    for make in (HeadModel, FusedModel, CutByAttributeModel):
        model, optimizer = built(make)
        config = budgeted(make, tmp_path, "least")
        room = 4 * 2 * WIDTH * (WIDTH + 1) * 4  # of four linear layers
        model, optimizer = infinity.wrap(
            model, optimizer, config.replace(device_memory=int(config.device_memory or 0) + room)
        )
        engine, counts = engine_of(model), []
        for _ in range(2):
            train(model, optimizer)
            counts.append(engine.residency.missed)
        head = next(u.index for u in engine.units if u.layout.name.endswith("head"))
        assert engine.residency.schedule.recorded().count(head) >= 1
        missed[make] = counts[1] - counts[0]
        infinity.close(model)
    assert max(missed.values()) <= missed[HeadModel] + 2, missed


def test_outside_of_a_forward_it_is_an_error_with_a_cure_that_works(tmp_path: Path) -> None:
    def program(model: Any, gather: Callable[[Any], Any]) -> torch.Tensor:
        x = model.hidden(tokens(0)) if not gather else hidden(model, tokens(0))
        with gather(model.lm_head) if gather else nullcontext():
            loss = CutByAttribute.apply(x, model.lm_head.weight, tokens(0))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def hidden(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ReleasedParameterError, match=r"gathered\(params\)"):
            CutByAttribute.apply(torch.randn(12, WIDTH), model.lm_head.weight, batch)
        return model.hidden(batch)  # type: ignore[no-any-return]

    model, optimizer = built(FusedModel)
    wanted = [program(model, None), *(p.grad for p in model.parameters())]  # type: ignore[arg-type]
    config = budgeted(FusedModel, tmp_path, "least")
    model, optimizer = built(FusedModel)
    model, optimizer = infinity.wrap(model, optimizer, config)
    found = [program(model, infinity.gathered), *(infinity.gradient(p) for p in model.parameters())]
    infinity.close(model)
    assert_close(found, wanted)  # type: ignore[arg-type]


def test_addresses_that_a_forward_asks_for_hold_until_its_scope_ends(tmp_path: Path) -> None:
    """Also over the least budget: nobody can count them."""

    class Addresses(TwoAddresses):
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
