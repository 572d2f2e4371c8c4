"""Changes of a wrapped model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import ParameterChangedError, ParameterError

from .models import huggingface
from .offloaded import config_for
from .small_net import WIDTH, Wrapped, build, tokens, train


def test_replaced_parameters_are_noticed(wrapped: Wrapped) -> None:
    model, _ = wrapped
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(4 * WIDTH, WIDTH))
    with pytest.raises(ParameterChangedError, match="replaced"):
        model(tokens())


def test_a_replaced_module_is_noticed(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    unused = model.blocks[1].up
    model.blocks[1].up = nn.Linear(WIDTH, 4 * WIDTH)
    with pytest.raises(ParameterChangedError, match=r"blocks\.1\.up\.weight"):
        model(tokens())
    model.blocks[1].up = unused
    train(model, optimizer, 1)


def test_added_and_removed_parameters_are_noticed(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    model.extra = nn.Linear(3, 3)
    with pytest.raises(ParameterChangedError, match=r"extra\.weight"):
        model(tokens())
    del model.extra
    train(model, optimizer, 1)
    del model.unused.bias
    with pytest.raises(ParameterChangedError, match=r"removed after `wrap`: 'unused\.bias'"):
        model(tokens())
    model = infinity.unwrap(model)  # the cure
    assert train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 1)


def test_unfreezing_what_has_no_state_is_refused(config: infinity.Config) -> None:
    model, _ = build()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, wrapped_optimizer = infinity.wrap(model, optimizer, config)
    train(model, wrapped_optimizer, 1)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ParameterChangedError, match="frozen at `wrap`"):
        model(tokens())
    infinity.close(wrapped_optimizer)


@pytest.mark.parametrize("parameters", ["nvme", "device"])
def test_embeddings_are_resized_as_the_error_says(parameters: str, tmp_path: Path) -> None:
    config = config_for(tmp_path, parameters=parameters)
    model = huggingface("gpt2")
    infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    ids = torch.arange(12)[None]

    def resized() -> None:
        model.resize_token_embeddings(128)
        model(ids)

    with pytest.raises(ParameterError, match=r"infinity\.unwrap\(model\)"):
        resized()
    infinity.unwrap(model)
    model.resize_token_embeddings(128)
    _, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    assert model(ids).logits.shape[-1] == 128
    infinity.close(optimizer)
