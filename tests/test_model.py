"""Presets: their closed forms are those of transformers' models, and what is trained is theirs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from infinity.cli.settings import ModelSettings, OptimizerName, RunSettings, TrainSettings
from infinity.cli.shape import PRESETS, activations_of, config_from, idle_of, units_of
from infinity.cli.workload import Workload, planned_from
from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.params.discover import discover

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_environment")

VARIANTS: list[dict[str, Any]] = [
    {"tied": True},
    {"layers": 1, "kv_heads": 1},
    {"kv_heads": 2, "inner": 96},
    {"experts": 4, "kv_heads": 2, "inner": 96},
    {"preset": "qwen2.5-0.5b", "kv_heads": 2},
    {"preset": "llama-3.1-8b", "kv_heads": 4},
    {"preset": "mixtral-8x7b", "kv_heads": 2, "experts": 0},
]


def small(optimizer: OptimizerName = "adamw", **changes: Any) -> Workload:
    size = {"layers": 3, "width": 64, "heads": 4, "vocab": 256, **changes}
    train = TrainSettings(sequence=48, optimizer=optimizer)
    return Workload(RunSettings(ModelSettings(**size), train))


def parameters_of(config: dict[str, Any]) -> int:
    return sum(math.prod(shape) for _, params in units_of(config) for _, shape in params)


@pytest.mark.parametrize("variant", VARIANTS)
def test_closed_forms_are_those_of_the_real_model(variant: dict[str, Any]) -> None:
    config = Config(dtype="bf16", device="cpu", optimizer_state_dtype="8bit", optimizer_state_fp32="*norm*")
    optimizer: OptimizerName = "muon" if "kv_heads" in variant else "adamw"
    workload = small(optimizer, **variant)
    members, _ = discover(workload.structure, None)
    real = [(m.name, [(n, tuple(p.shape)) for n, p in m.params.items()]) for m in members]
    assert units_of(workload.shape) == real
    planned = workload.planned(config)
    found = planned_from(workload.structure, config, optimizer=optimizer)
    assert [(n, list(p)) for n, p in planned.units] == [(n, list(p)) for n, p in found.units]
    assert [*map(tuple, planned.working_sets)] == [*map(tuple, found.working_sets)]
    assert [*planned.again] == [*found.again]
    for dtype in (torch.float32, torch.bfloat16):
        activations = activations_of(workload.shape, 2, 48, dtype.itemsize, recompute=False)
        assert activations.saved == saved_by(workload, dtype)


def test_with_recomputation_a_block_keeps_its_input() -> None:
    workload, dtype = small(), torch.bfloat16
    planned = activations_of(workload.shape, 2, 48, dtype.itemsize, recompute=True)
    rotation = 2 * 48 * 16 * dtype.itemsize  # of all blocks: an argument that is not saved
    assert planned.saved == saved_by(workload, dtype, recompute=True) + rotation
    assert planned.inputs == 3 * planned.largest == 3 * 2 * 48 * 64 * dtype.itemsize


def saved_by(workload: Workload, dtype: torch.dtype, *, recompute: bool = False) -> int:
    """Bytes that autograd keeps after a forward of 2 × 48 tokens, and their loss."""
    model = transformers.AutoModelForCausalLM.from_config(workload.hf_config).to(dtype).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in of_model:
            saved[address] = tensor  # held, so that no address is used twice
        return tensor

    tokens = torch.randint(0, 256, (2, 48))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.clone().flatten())
    return sum(t.untyped_storage().nbytes() for t in saved.values())


def test_presets_have_the_parameters_that_their_names_say() -> None:
    units = {"m": 1e6, "b": 1e9}
    for name in list(PRESETS)[:9]:
        said = float(name[:-1]) * units[name[-1]]
        assert parameters_of(config_from(name)) == pytest.approx(said, rel=0.09), name
    assert next(iter(PRESETS)) == "10m"
    assert list(PRESETS)[8] == "13b"
    assert config_from("30M", layers=2)["num_hidden_layers"] == 2
    with pytest.raises(ConfigError, match=r"6\.7b"):
        config_from("30g")


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


def test_published_models_have_their_parameters() -> None:
    found = {name: config_from(name) for name in list(PRESETS)[9:]}
    assert {name: parameters_of(config) for name, config in found.items()} == PUBLISHED
    # Of Mixtral a token passes 12.9 billion.
    assert PUBLISHED["mixtral-8x7b"] - idle_of(found["mixtral-8x7b"]) == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"width": 65}, "width"),
        ({"heads": 64}, "width"),
        ({"kv_heads": 3}, "do not divide among those of keys and values"),
        ({"inner": 0}, "inner"),
        ({"experts": -3}, "experts.*\n.*from 0 to 10,000"),
        ({"experts": 10**5}, "experts"),
        ({"layers": 10**8}, "from 1 to 10,000"),
        ({"context": 16}, "sequence"),
    ],
)
def test_dimensions_that_cannot_be_used(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        small(**changes)
    assert caught.value.cure
