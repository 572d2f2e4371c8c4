"""The built-in GPT: what it computes, and that its closed forms are those of the real model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity.cli.model import GPT
from infinity.cli.settings import ModelSettings
from infinity.cli.shape import (
    KNOWN,
    PRESETS,
    GPTShape,
    activations_of,
    idle_of,
    parameters_of,
    shape_from,
    units_of,
)
from infinity.cli.workload import BuiltIn, planned_from
from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.params.discover import discover

VARIANTS: list[dict[str, Any]] = [
    {},
    {"mlp": "swiglu"},
    {"positions": "learned"},
    {"tied": True},
    {"tied": True, "positions": "learned", "mlp": "swiglu"},
    {"layers": 1},
    {"kv_heads": 2, "mlp": "swiglu", "inner": 96},
    {"kv_heads": 1, "positions": "learned"},
]
MIXED: dict[str, Any] = {"experts": 4, "chosen": 2, "mlp": "swiglu", "kv_heads": 2, "inner": 96}


def small(**changes: Any) -> GPTShape:
    return GPTShape(**{"layers": 3, "width": 64, "heads": 4, "context": 64, **changes})


@pytest.mark.parametrize("variant", [*VARIANTS, MIXED, {"qkv_bias": True}])
def test_units_and_parameters_are_those_of_the_real_model(variant: dict[str, Any]) -> None:
    shape = small(**variant)
    with torch.device("meta"):
        model = GPT(shape)
    members, _ = discover(model, None)
    real = [(m.name, [(n, tuple(p.shape)) for n, p in m.params.items()]) for m in members]
    assert units_of(shape) == real
    assert parameters_of(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", [*VARIANTS, MIXED])
def test_the_planned_model_is_what_discovery_finds(variant: dict[str, Any]) -> None:
    config = Config(dtype="bf16", device="cpu")
    workload = BuiltIn(ModelSettings(layers=3, width=64, heads=4, **_settings(variant)), 32)
    with torch.device("meta"):
        found = planned_from(GPT(workload.shape), config)
    planned = workload.planned(config)
    assert [(n, list(p)) for n, p in planned.units] == [(n, list(p)) for n, p in found.units]
    assert sorted(set(map(tuple, planned.working_sets))) == sorted(set(map(tuple, found.working_sets)))


def _settings(variant: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in variant.items() if k not in ("layers", "qkv_bias", "chosen")}


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
    assert activations_of(shape, 2, 48, dtype.itemsize, recompute=False).saved == saved_by(shape, dtype)


@pytest.mark.parametrize("experts", [1, 4, 8])
def test_saved_activations_of_experts_are_bounded(experts: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shape = small(**{**MIXED, "experts": experts, "width": 128})
        most = activations_of(shape, 2, 48, dtype.itemsize, recompute=False).saved
        assert 0.9 * most <= saved_by(shape, dtype) <= most


def saved_by(shape: GPTShape, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps after a forward of 2 × 48 tokens."""
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
    return sum(t.untyped_storage().nbytes() for t in saved.values())


PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}


def test_known_shapes_have_the_published_parameters() -> None:
    assert {name: parameters_of(shape) for name, shape in KNOWN.items()} == PUBLISHED
    # Of Mixtral a token passes 12.9 billion.
    assert PUBLISHED["mixtral-8x7b"] - idle_of(KNOWN["mixtral-8x7b"]) == pytest.approx(12.9e9, rel=0.01)


def test_known_shapes_are_those_of_the_real_model() -> None:
    for shape in (replace(KNOWN["qwen2.5-0.5b"], layers=2), replace(KNOWN["mixtral-8x7b"], layers=1)):
        with torch.device("meta"):
            model = GPT(shape)
        assert parameters_of(shape) == sum(p.numel() for p in model.parameters())


def test_experts_learn_from_the_tokens_that_pass_them() -> None:
    torch.manual_seed(0)
    model = GPT(small(**MIXED))
    tokens = torch.randint(0, 256, (2, 32))
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(b.router.weight.grad.any() for b in model.blocks)


def test_heads_that_share_keys_and_values_are_heads_with_equal_ones() -> None:
    torch.manual_seed(0)
    shared = GPT(small(kv_heads=2))
    alone = GPT(small())
    state = shared.state_dict()
    for i in range(3):
        q, k, v = state[f"blocks.{i}.qkv.weight"].split((64, 32, 32))
        k, v = (t.view(2, 16, 64).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v))
        state[f"blocks.{i}.qkv.weight"] = torch.cat((q, k, v))
    alone.load_state_dict(state)
    tokens = torch.randint(0, 256, (2, 32))
    torch.testing.assert_close(shared(tokens).logits, alone(tokens).logits)


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


@pytest.mark.parametrize("variant", [*VARIANTS, MIXED, {"qkv_bias": True}])
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
        ({"kv_heads": 3}, "heads"),
        ({"inner": 0}, "inner"),
        ({"experts": -3}, "experts.*\n.*from 0 to 10,000"),
        ({"experts": 10**5}, "experts"),
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
