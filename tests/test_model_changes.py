"""Changes of a wrapped model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError, ParameterError

from .models import huggingface
from .offloaded import config_for
from .small_net import WIDTH, Wrapped, build, tokens, train


def test_replaced_added_and_removed_parameters_are_noticed(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    unused = model.blocks[1].up
    model.blocks[1].up = nn.Linear(WIDTH, 4 * WIDTH)
    with pytest.raises(ParameterChangedError, match=r"blocks\.1\.up\.weight"):
        model(tokens())
    model.blocks[1].up = unused
    train(model, optimizer, 1)
    del model.unused.bias
    with pytest.raises(ParameterChangedError, match=r"removed after `wrap`: 'unused\.bias'"):
        model(tokens())
    model = infinity.unwrap(model)  # the cure
    assert train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 1)


def test_a_state_dict_of_a_changed_model_says_what_a_forward_says(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    kept = model.state_dict()
    model.blocks[1].extra = nn.Linear(3, 3)
    blocks = model.blocks
    for use in (lambda: model(tokens()), model.state_dict, blocks.state_dict, blocks[1].state_dict):
        with pytest.raises(ParameterChangedError, match=r"added .*'blocks\.1\.extra\.weight'") as raised:
            use()
        assert len(str(raised.value)) < 500
    assert blocks[0].state_dict()  # of what is as it was
    del blocks[1].extra
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
    train(model, optimizer, 1)


def states(model: nn.Module, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Step, moments and master of each parameter that has them, by name."""
    engine = engine_of(optimizer)
    trained = {n: engine.params[p] for n, p in model.named_parameters() if engine.params[p].spec.trainable}
    read = engine.states.read([*trained.values()])
    return {n: read[s] for n, s in trained.items()}


@pytest.mark.parametrize(("parameters", "dtype"), [("nvme", "fp32"), ("device", "bf16")])
def test_what_was_frozen_is_trained_as_the_error_says(
    parameters: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside torch, which makes the state of what is unfrozen where it is first used."""
    config = config_for(tmp_path, parameters=parameters, dtype=dtype)
    (model, _), (reference, _) = build(), build()
    for net in (model, reference):
        net.blocks[0].requires_grad_(False)

    def adamw(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)

    plain = adamw(reference)
    model, optimizer = infinity.wrap(model, adamw(model), config)
    for net, adam in ((model, optimizer), (reference, plain)):
        train(net, adam, 2)
        net.blocks[0].requires_grad_(True)
    with pytest.raises(ParameterChangedError) as raised:
        model(tokens())
    calls = re.findall(r"`(infinity\.\w+\(.*?\))`", str(raised.value.cure))
    assert len(calls) == 3
    before, names = states(model, optimizer), {"infinity": infinity, "model": model, "optimizer": optimizer}
    monkeypatch.chdir(tmp_path)
    for call in calls[:2]:
        exec(call, names)
    model, optimizer = infinity.wrap(model, adamw(model), config)
    exec(calls[2], {**names, "optimizer": optimizer})
    after = states(model, optimizer)
    assert after.keys() > before.keys()
    for name, kinds in after.items():
        for kind, value in kinds.items():
            if name in before:
                assert torch.equal(value, before[name][kind]), (name, kind)
            elif kind != "master":
                assert not value.any(), (name, kind)
            else:
                assert torch.equal(value, model.state_dict()[name].float())
    plain.add_param_group({"params": [*reference.blocks[0].parameters()]})
    assert train(model, optimizer, 3) == pytest.approx(
        train(reference, plain, 3), rel=1e-4 if dtype == "fp32" else 0.1
    )
    if dtype == "fp32":
        for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    infinity.close(optimizer)


def test_what_required_a_gradient_may_come_and_go(config: infinity.Config) -> None:
    # With a small eps Adam makes steps of full size of gradients that are rounding alone, and MKL rounds as
    # CPU and threads have it.
    model, optimizer = infinity.wrap(*build(eps=0.1), config)
    reference, plain = build(eps=0.1)
    for net, adam in ((model, optimizer), (reference, plain)):
        for trains in (True, False, True, False, True):
            net.blocks[1].requires_grad_(trains)
            train(net, adam, 1)
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    infinity.close(optimizer)


def test_embeddings_are_resized_as_the_error_says(tmp_path: Path) -> None:
    config = config_for(tmp_path)
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
