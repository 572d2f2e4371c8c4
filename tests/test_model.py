"""The built-in GPT: what it computes, and that its closed forms are those of the real model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.tools.model import (
    GPT,
    PRESETS,
    GPTShape,
    activations_of,
    parameters_of,
    shape_from,
    units_of,
)
from infinity.tools.settings import ModelSettings
from infinity.tools.workload import BuiltIn, planned_from
from infinity.training.discover import discover

VARIANTS: list[dict[str, Any]] = [
    {},
    {"mlp": "swiglu"},
    {"positions": "learned"},
    {"tied": True},
    {"tied": True, "positions": "learned", "mlp": "swiglu"},
    {"layers": 1},
]


def small(**changes: Any) -> GPTShape:
    return GPTShape(**{"layers": 3, "width": 64, "heads": 4, "context": 64, **changes})


@pytest.mark.parametrize("variant", VARIANTS)
def test_units_and_parameters_are_those_of_the_real_model(variant: dict[str, Any]) -> None:
    shape = small(**variant)
    with torch.device("meta"):
        model = GPT(shape)
    members, _ = discover(model, None)
    real = [(m.name, [(n, tuple(p.shape)) for n, p in m.params.items()]) for m in members]
    assert units_of(shape) == real
    assert parameters_of(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_planned_model_is_what_discovery_finds(variant: dict[str, Any]) -> None:
    config = Config(dtype="bf16", device="cpu")
    workload = BuiltIn(ModelSettings(layers=3, width=64, heads=4, **_settings(variant)), 32)
    with torch.device("meta"):
        found = planned_from(GPT(workload.shape), config)
    planned = workload.planned(config)
    assert [(n, list(p)) for n, p in planned.units] == [(n, list(p)) for n, p in found.units]
    assert sorted(set(map(tuple, planned.working_sets))) == sorted(set(map(tuple, found.working_sets)))


def _settings(variant: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in variant.items() if k != "layers"}


def test_presets_have_the_parameters_that_their_names_say() -> None:
    units = {"m": 1e6, "b": 1e9}
    for name, shape in PRESETS.items():
        said = float(name[:-1]) * units[name[-1]]
        assert parameters_of(shape) == pytest.approx(said, rel=0.09), name
    assert next(iter(PRESETS)) == "10m"
    assert list(PRESETS)[-1] == "13b"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_activations_are_exact(variant: dict[str, Any], dtype: torch.dtype) -> None:
    shape = small(**variant)
    model = GPT(shape).to(dtype)
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in of_model:
            saved[address] = tensor  # held, so that no address is used twice
        return tensor

    tokens = torch.randint(0, shape.vocab, (2, 48))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens.clone())
    expected = sum(t.untyped_storage().nbytes() for t in saved.values())
    assert activations_of(shape, 2, 48, dtype.itemsize, recompute=False).saved == expected


def test_recomputation_changes_memory_and_nothing_else() -> None:
    shape = small()
    torch.manual_seed(0)
    kept = GPT(shape)
    again = GPT(shape, recompute=True)
    again.load_state_dict(kept.state_dict())
    tokens = torch.randint(0, 256, (2, 32))
    losses = []
    for model in (kept, again):
        loss = model(tokens, tokens).loss
        assert loss is not None
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    less = activations_of(shape, 2, 32, 4, recompute=True)
    assert less.saved < activations_of(shape, 2, 32, 4, recompute=False).saved / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_a_later_one(variant: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT(small(**variant)).eval()
    tokens = torch.randint(0, 256, (1, 24))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 7) % 256
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_tokens_counts(positions: str) -> None:
    torch.manual_seed(0)
    model = GPT(small(positions=positions)).eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens).logits[0, -1], model(swapped).logits[0, -1])


def test_a_fresh_model_knows_nothing() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 32))
    loss = GPT(small())(tokens, tokens.roll(-1, 1)).loss
    assert loss is not None
    assert abs(loss.item() - math.log(256)) < 0.2


def test_a_tied_head_is_the_embedding() -> None:
    model = GPT(small(tied=True))
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"width": 65}, "width"),
        ({"mlp": "relu"}, "mlp"),
        ({"positions": "alibi"}, "positions"),
        ({"heads": 64}, "width"),
    ],
)
def test_dimensions_that_cannot_be_used(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        small(**changes)
    assert caught.value.cure


def test_an_unknown_preset_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from("30g")
    assert "6.7b" in str(caught.value)
    assert shape_from("30M", layers=2).layers == 2
