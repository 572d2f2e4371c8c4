"""Released parameters: what stays readable, and what is refused."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.core.errors import ClosedError, InfinityError, ParameterChangedError, ReleasedParameterError
from infinity.params.param import ReleasedParameter

from .small_net import WIDTH, Wrapped, build, same, tokens, train


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

TIERS = ["host", "nvme"]


def cure_of(use: Callable[[], object], error: type[InfinityError] = ReleasedParameterError) -> str:
    with pytest.raises(error) as caught:
        use()
    return str(caught.value.cure)


@torch.no_grad()
def check_averages(weight: nn.Parameter, mean: nn.Parameter) -> None:
    for use in (
        lambda: mean.lerp_(weight, 0.1),
        lambda: mean.mul_(0.9).add_(weight, alpha=0.1),
        lambda: mean.copy_(weight),
        lambda: torch._foreach_lerp_([mean], [weight], 0.1),
        lambda: torch.lerp(mean, weight, 0.1, out=mean),
    ):
        assert "`infinity.copy_to(model, plain)`" in cure_of(use)


@pytest.mark.parametrize("tier", TIERS)
def test_an_average_by_hand(tier: str, config: infinity.Config) -> None:
    averages = []
    for offloaded in (False, True):
        model, optimizer = build(eps=1e-3)
        average, plain = copy.deepcopy(model), model
        if offloaded:
            plain = copy.deepcopy(model)  # the cure
            model, optimizer = infinity.wrap(model, optimizer, config.replace(parameters=tier))  # type: ignore[assignment]
            check_averages(model.head.weight, torch.zeros_like(average.head.weight))
        for step in range(3):
            model(tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if offloaded:
                infinity.copy_to(model, plain)
            with torch.no_grad():
                for e, p in zip(average.parameters(), plain.parameters(), strict=True):
                    e.lerp_(p, 0.1)
        averages.append(average.state_dict())
        if offloaded:
            infinity.close(optimizer)
    torch.testing.assert_close(averages[1], averages[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tier", TIERS)
def test_reads_and_edits(tier: str, config: infinity.Config) -> None:
    model, optimizer = infinity.wrap(*build(), config.replace(parameters=tier))
    weight = model.blocks[0].up.weight
    wanted = model.state_dict()["blocks.0.up.weight"]
    for look in (lambda: weight.sum(), lambda: weight.data, lambda: torch.cat([weight, weight])):
        assert cure_of(look).startswith("read it inside `with infinity.gathered(params):`")
        with infinity.gathered(weight):
            look()
    for n, edit in enumerate((lambda: weight.add_(1), lambda: nn.init.ones_(weight), lambda: fill(weight))):
        assert "write=True to edit it" in cure_of(edit)
        with infinity.gathered(weight, write=True), torch.no_grad():
            edit()
        found = model.state_dict()["blocks.0.up.weight"]
        assert torch.equal(found, [wanted + 1, torch.ones_like(wanted), torch.zeros_like(wanted)][n])
    with pytest.raises(ReleasedParameterError, match=r"(?s)found: Tensor\.data on .*gathered\(params\)"):
        weight.data.norm()
    infinity.close(optimizer)
    cure = cure_of(lambda: weight.sum(), ClosedError)
    assert "build the model again, load a saved state and wrap it" in cure


def fill(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(weight.shape)


@pytest.mark.parametrize("tier", TIERS)
def test_changes_of_the_structure(tier: str, config: infinity.Config) -> None:
    change = torch.nn.utils.parametrizations.weight_norm
    wanted, _ = build()
    change(wanted.blocks[0].up)
    model, optimizer = infinity.wrap(*build(), config.replace(parameters=tier))
    assert "`infinity.unwrap(model)`" in cure_of(lambda: change(model.blocks[0].up))
    plain = infinity.unwrap(model)
    change(plain.blocks[0].up)
    assert same(plain.state_dict(), wanted.state_dict())
    infinity.close(optimizer)
    before, _ = build()
    change(before.blocks[0].up)
    model, optimizer = infinity.wrap(before, torch.optim.AdamW(before.parameters()), config)
    train(model, optimizer, 1)
    infinity.close(optimizer)


class Scores(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that come from the values of a parameter."""

    def __init__(self, values: Callable[[], torch.Tensor]) -> None:
        self.values = values

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.values()[row] * 2


@pytest.mark.parametrize("tier", TIERS)
def test_a_worker_of_a_loader(tier: str, config: infinity.Config) -> None:
    """A fork has no engine: neither a read nor a `gathered` block works there."""
    model, optimizer = infinity.wrap(*build(), config.replace(parameters=tier))
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
    infinity.close(optimizer)


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


@pytest.mark.parametrize("method", ["half", "bfloat16", "double", "share_memory"])
def test_casts_and_moves_after_wrap_are_refused(wrapped: Wrapped, method: str) -> None:
    with pytest.raises(ParameterChangedError, match="after `wrap`"):
        getattr(wrapped[0], method)()


def test_to_where_it_already_is_does_nothing(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    assert model.to("cpu").to(torch.float32) is model
    train(model, optimizer, 1)
    with pytest.raises(ParameterChangedError):
        model.to(torch.bfloat16)
    with pytest.raises(ParameterChangedError):
        model.to("meta")


def test_gathered_reads_and_keeps_edits(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    with infinity.gathered(model):
        for (_, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.equal(a, b)
    with infinity.gathered(model.blocks[1].up.weight, write=True), torch.no_grad():
        model.blocks[1].up.weight[3] += 1
    with torch.no_grad():
        reference.blocks[1].up.weight[3] += 1
    assert isinstance(model.blocks[1].up.weight, ReleasedParameter)
    assert same(model.state_dict(), reference.state_dict())
    losses, expected = train(model, optimizer), train(reference, torch_optimizer)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_an_edit_without_write_raises_instead_of_getting_lost(wrapped: Wrapped) -> None:
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    with pytest.raises(ParameterChangedError, match="write=True"), infinity.gathered([weight]):
        with torch.no_grad():
            weight.zero_()
