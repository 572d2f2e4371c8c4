"""Released parameters: what stays readable, what is refused, and those of a user's own class."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.core.errors import (
    ClosedError,
    InfinityError,
    ParameterChangedError,
    ReleasedParameterError,
)
from infinity.params.param import ReleasedParameter

from .offloaded import config_for
from .small_net import WIDTH, Wrapped, build, same, train


def test_a_released_parameter_never_reaches_a_kernel(wrapped: Wrapped) -> None:
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    assert isinstance(weight, ReleasedParameter)
    assert isinstance(weight, nn.Parameter)
    uses = [
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: F.linear(torch.ones(1, WIDTH), weight),
        lambda: weight.data,
        lambda: weight.clone(),
        lambda: weight.numpy(),
        lambda: weight.tolist(),
        lambda: weight.data_ptr(),
        lambda: torch.save(weight, os.devnull),
        lambda: copy.deepcopy(model),
        lambda: model.blocks[0](torch.ones(1, WIDTH)) + weight.sum(),
    ]
    for use in uses:
        with pytest.raises(ReleasedParameterError) as caught:
            use()
        assert "blocks.0.up.weight" in str(caught.value) or "cannot be" in str(caught.value)
        assert re.search("gathered|state_dict", str(caught.value))
        assert not re.search("DistributedDataParallel|FSDP|fully_shard|wrapper", str(caught.value.cure))


# -- each kind of use has a cure of its own, and the tests follow it ---------------------------------


def cure_of(use: Callable[[], object], error: type[InfinityError] = ReleasedParameterError) -> str:
    with pytest.raises(error) as caught:
        use()
    return str(caught.value.cure)


@torch.no_grad()
def test_an_average_by_hand(wrapped: Wrapped) -> None:
    weight = wrapped[0].head.weight
    mean = torch.zeros(weight.shape)
    for use in (
        lambda: mean.lerp_(weight, 0.1),
        lambda: mean.mul_(0.9).add_(weight, alpha=0.1),
        lambda: mean.copy_(weight),
        lambda: torch._foreach_lerp_([mean], [weight], 0.1),
        lambda: torch.lerp(mean, weight, 0.1, out=mean),
    ):
        cure = cure_of(use)
        assert cure.startswith("`plain = copy.deepcopy(model)` before `wrap`; after each step call ")
        assert "`infinity.copy_to(model, plain)`" in cure


def test_reads_and_edits(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    weight = model.blocks[0].up.weight
    wanted = model.state_dict()["blocks.0.up.weight"]
    for look in (lambda: weight.sum(), lambda: weight.data, lambda: torch.cat([weight, weight])):
        assert cure_of(look).startswith("read it inside `with infinity.gathered(params):`")
        with infinity.gathered(weight):
            look()
    for n, edit in enumerate((lambda: weight.add_(1), lambda: nn.init.ones_(weight), lambda: fill(weight))):
        assert cure_of(edit) == "edit it inside `with infinity.gathered(params, write=True):`"
        with infinity.gathered(weight, write=True), torch.no_grad():
            edit()
        found = model.state_dict()["blocks.0.up.weight"]
        assert torch.equal(found, [wanted + 1, torch.ones_like(wanted), torch.zeros_like(wanted)][n])
    assert "`infinity.copy_to(model, plain)`" in cure_of(lambda: copy.deepcopy(model))
    with pytest.raises(ReleasedParameterError, match=r"(?s)found: Tensor\.data on .*gathered\(params\)"):
        weight.data.norm()
    infinity.close(optimizer)
    cure = cure_of(lambda: weight.sum(), ClosedError)
    assert "build the model again, load a saved state and wrap it" in cure


def fill(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(weight.shape)


def test_changes_of_the_structure(wrapped: Wrapped) -> None:
    change = torch.nn.utils.parametrizations.weight_norm
    wanted, _ = build()
    change(wanted.blocks[0].up)
    cure = cure_of(lambda: change(wrapped[0].blocks[0].up))
    assert cure == "do this before `wrap`, or to the model that `infinity.unwrap(model)` returns"
    plain = infinity.unwrap(wrapped[0])
    change(plain.blocks[0].up)
    assert same(plain.state_dict(), wanted.state_dict())


class Scores(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that come from the values of a parameter."""

    def __init__(self, values: Callable[[], torch.Tensor]) -> None:
        self.values = values

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values()[row] * 2


@pytest.mark.integration
def test_a_worker_of_a_loader(wrapped: Wrapped) -> None:
    """A fork has no engine: neither a read nor a `gathered` block works there."""
    model, optimizer = wrapped
    weight = model.blocks[0].up.weight

    def loader(values: Callable[[], torch.Tensor], workers: int = 1) -> list[torch.Tensor]:
        context = "fork" if workers else None
        made = torch.utils.data.DataLoader(
            Scores(values), num_workers=workers, multiprocessing_context=context, timeout=60 * workers
        )
        return list(made)

    def read() -> torch.Tensor:
        with infinity.gathered(weight):
            return weight.detach().clone()

    with pytest.raises(ReleasedParameterError) as caught:
        loader(lambda: weight.detach())
    assert all(word in str(caught.value) for word in ("this process is a fork", "num_workers=0"))
    assert "`with infinity.gathered(param): values = param.detach().clone()`" in str(caught.value)
    with pytest.raises(ClosedError, match="use the model in the process that wrapped it"):
        loader(read)
    wanted = loader(read, 0)
    values = read()
    assert all(map(torch.equal, loader(lambda: values), wanted))
    train(model, optimizer, 1)


def test_metadata_of_a_released_parameter_stays_readable(wrapped: Wrapped) -> None:
    weight = wrapped[0].blocks[0].up.weight
    assert weight.shape == (4 * WIDTH, WIDTH)
    assert weight.dtype is torch.float32
    assert weight.device.type == "cpu"
    assert weight.numel() == weight.nelement() == 4 * WIDTH * WIDTH
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert weight.dim() == weight.ndim == 2
    assert "blocks.0.up.weight" in repr(weight)
    assert len({weight, weight}) == 1
    assert sum(p.numel() for p in wrapped[0].parameters()) > 0


def test_an_edit_without_write_raises_instead_of_getting_lost(wrapped: Wrapped) -> None:
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    with pytest.raises(ParameterChangedError, match="write=True"), infinity.gathered([weight]):
        with torch.no_grad():
            weight.zero_()


# -- parameters of a user's own class ---------------------------------------------------------------


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute of its own."""

    factor = 3

    def scaled(self) -> torch.Tensor:
        return self * self.factor


class OfClass(nn.Module):
    """A head whose parent uses the weight, one of the classes above."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.head.weight = kind(self.head.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        weight: Any = self.head.weight
        return nn.functional.linear(x, weight.scaled(), self.head.bias)


@pytest.mark.integration
@pytest.mark.parametrize("parameters", ["nvme", "device"])
def test_parameters_of_a_users_class_stay_that(parameters: str, tmp_path: Path) -> None:
    found = []
    for offloaded in (False, True):
        model: Any = OfClass(Scaled)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model.head.weight.tag = "mine"
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path, parameters=parameters))
        for step in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            assert isinstance(model.head.weight, Scaled)
            assert (model.head.weight.tag, model.head.weight.factor) == ("mine", 3)
            optimizer.zero_grad()
        found.append({n: v.clone() for n, v in model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)
    assert type(infinity.unwrap(model).head.weight) is Scaled
