"""Released parameters: what stays readable, and what is refused."""

from __future__ import annotations

import copy
import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from infinity.core.errors import ParameterChangedError, ReleasedParameterError
from infinity.params.param import ReleasedParameter

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
        assert "gathered" in str(caught.value) or "state_dict" in str(caught.value)
        assert not re.search("DistributedDataParallel|FSDP|fully_shard|wrapper", str(caught.value.cure))


def test_a_trainer_that_copies_adapters_comes_before_wrap(wrapped: Wrapped) -> None:
    """GRPOTrainer copies them into those of its reference, as it is built."""
    weight = wrapped[0].blocks[0].up.weight
    with pytest.raises(ReleasedParameterError) as caught:
        torch.empty(weight.shape).copy_(weight.data)
    assert "GRPOTrainer" in str(caught.value.cure)
    assert "then `wrap` the trainer's model" in str(caught.value.cure)


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
