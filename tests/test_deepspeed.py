"""Settings files of DeepSpeed: `config_from`, `scheduler_from` and `infinity plan --deepspeed`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity import Config
from infinity.cli.main import run
from infinity.core.errors import ConfigError
from infinity.integrations.deepspeed import config_from, scheduler_from

from .ranks import all_well, run_ranks
from .small_net import build, tokens
from .test_ecosystem import need

Settings = dict[str, Any]
#: What Trainer fills in for "auto".
ARGUMENTS = SimpleNamespace(
    bf16=True,
    fp16=False,
    max_grad_norm=1.0,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=2e-5,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    weight_decay=0.1,
    max_steps=100,
    get_warmup_steps=lambda steps: steps // 10,
)
BATCHES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
AUTO = {**BATCHES, "gradient_clipping": "auto"}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
FP16 = {"enabled": "auto", "initial_scale_power": 16, **SCALE}
FP16_ON = {**FP16, "enabled": True}
DTYPES = {"bf16": {"enabled": "auto"}, "fp16": FP16}
BF16: Settings = {"bf16": {"enabled": True}}
CPU = {"device": "cpu", "pin_memory": True}
ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
TORCH_ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
}
WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
COSINE = {
    "type": "WarmupCosineLR",
    "params": {
        **{"total_num_steps": 1000, "warmup_min_ratio": 0, "warmup_num_steps": 100},
        **{"cos_min_ratio": 0.001, "warmup_type": "linear"},
    },
}
BUCKETS = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
THREE = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OFFLOADED = {**THREE, "offload_optimizer": CPU, "offload_param": CPU}
#: The names without `stage3_`, which are the same keys.
SHORT = {
    **{k: v for k, v in OFFLOADED.items() if "max_" not in k and "gather" not in k},
    **{"sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0},
    "gather_16bit_weights_on_model_save": True,
}
FACTORY = {
    **AUTO,
    **DTYPES,
    "zero_allow_untested_optimizer": True,
    "comms_config": {"verbose": False},
    "monitor_config": {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}},
}
SWEEP = {**AUTO, **BF16, "fp16": {"enabled": False}}
FORCED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, **BF16, **AUTO}
AXOLOTL = {
    **AUTO,
    "bf16": {"enabled": "auto"},
    "fp16": {**FP16, "auto_cast": False, "initial_scale_power": 32},
    "wall_clock_breakdown": False,
}
ACCELERATE = {
    **AUTO,
    **{"gradient_accumulation_steps": 1, "steps_per_print": 2000, "wall_clock_breakdown": False},
    **{"fp16": FP16_ON, "optimizer": TORCH_ADAM, "scheduler": DECAY},
}
SQUAD = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6, "steps_per_print": 10}
EXPERTS = {**BF16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "scheduler": COSINE}
INFINITY = {
    **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
    **{"fp16": {"enabled": True, **SCALE}, "wall_clock_breakdown": True},
    "zero_optimization": {
        **{"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e8},
        "offload_optimizer": {
            **{"device": "nvme", "nvme_path": "/nvme_data", "buffer_count": 4, "pipeline_read": False},
            "pin_memory": True,
        },
        "offload_param": {
            **{"device": "nvme", "nvme_path": "/nvme_data", "max_in_cpu": 1, "pin_memory": True},
        },
    },
    "aio": {"block_size": 1048576, "queue_depth": 16, "overlap_events": True, "thread_count": 2},
}

#: Settings as projects publish them, and what becomes of them: stage, parameters, optimizer state, gradients,
#: dtype and max_grad_norm; or the keys that the error names. `ARGUMENTS` fill in what Trainer fills in.
_OFF, _HOST = "device", "host"
PUBLISHED: Mapping[str, tuple[Settings, tuple[Any, ...]]] = {
    "LLaMA-Factory/ds_z0": (
        {**FACTORY, "zero_optimization": {**BUCKETS, "stage": 0, "round_robin_gradients": True}},
        (0, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "LLaMA-Factory/ds_z2": (
        {**FACTORY, "zero_optimization": {**BUCKETS, "round_robin_gradients": True}},
        (2, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "LLaMA-Factory/ds_z2_offload": (
        {**FACTORY, "zero_optimization": {**BUCKETS, "offload_optimizer": CPU}},
        (2, _OFF, _HOST, _HOST, "bf16", None),
    ),
    "LLaMA-Factory/ds_z3": (
        {**FACTORY, "zero_optimization": THREE},
        (3, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "LLaMA-Factory/ds_z3_offload": (
        {**FACTORY, "zero_optimization": OFFLOADED},
        (3, _HOST, _HOST, _HOST, "bf16", None),
    ),
    "LLaMA-Factory/ds_z3_partial_offload": (
        {**FACTORY, "zero_optimization": {**THREE, "offload_optimizer": {**CPU, "pin_memory": False}}},
        (3, _OFF, _HOST, _HOST, "bf16", None),
    ),
    "LLaMA-Factory/ds_z2_autotp": (
        {
            **FACTORY,
            "_comment": "models",
            "zero_optimization": BUCKETS,
            "tensor_parallel": {"autotp_size": 2},
        },
        ("tensor_parallel",),
    ),
    "LLaMA-Factory/ds_z3_alst": (
        {**SWEEP, "zero_optimization": OFFLOADED, "sequence_parallel": {"enabled": True, "size": 4}},
        ("sequence_parallel",),
    ),
    "LLaMA-Factory/ds_z3_e9_quant_grads": (
        {**SWEEP, "zero_optimization": {**THREE, "zero_quantized_gradients": True}},
        (3, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "LLaMA-Factory/ds_z3_e11_act_ckpt": (
        {
            **SWEEP,
            "zero_optimization": {**THREE, "stage3_module_granularity_threshold": 16},
            "activation_checkpointing": {
                **{"partition_activations": True, "contiguous_memory_optimization": True},
                "synchronize_checkpoint_boundary": False,
            },
        },
        (3, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "axolotl/zero1": (
        {
            **{k: v for k, v in AXOLOTL.items() if k != "gradient_clipping"},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "optimizer": ADAM,
        },
        (1, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "axolotl/zero1_torch_compile": (
        {**AXOLOTL, "zero_optimization": {"stage": 1}, "compile": {"disable": False, "backend": "inductor"}},
        (1, _OFF, _OFF, _OFF, "bf16", None),
    ),
    "axolotl/zero2": (
        {**AXOLOTL, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        (2, _OFF, _HOST, _HOST, "bf16", None),
    ),
    "axolotl/zero3_cpuoffload": (
        {**AXOLOTL, "zero_optimization": {**OFFLOADED, "sub_group_size": 0, "stage3_max_live_parameters": 0}},
        (3, _HOST, _HOST, _HOST, "bf16", None),
    ),
    "axolotl/zero3_bf16_cpuoffload_all": (
        {**FORCED, "zero_optimization": SHORT},
        (3, _HOST, _HOST, _HOST, "bf16", None),
    ),
    "axolotl/zero3_bf16_cpuoffload_params": (
        {**FORCED, "zero_optimization": {k: v for k, v in SHORT.items() if k != "offload_optimizer"}},
        (3, _HOST, _OFF, _OFF, "bf16", None),
    ),
    "transformers/zero2": (
        {
            **{**AUTO, **DTYPES, "optimizer": ADAM, "scheduler": WARMUP, "steps_per_print": 2000},
            "zero_optimization": {**BUCKETS, "offload_optimizer": CPU},
        },
        (2, _OFF, _HOST, _HOST, "bf16", None),
    ),
    "transformers/zero2_bf16": (
        {
            **{**AUTO, "bfloat16": {"enabled": "auto"}, "optimizer": ADAM, "scheduler": WARMUP},
            "zero_optimization": {**BUCKETS, "offload_optimizer": CPU},
        },
        (2, _OFF, _HOST, _HOST, "bf16", None),
    ),
    "DeepSpeed/tensor_parallel": (
        {
            **{**AUTO, "bf16": {"enabled": "auto"}, "optimizer": ADAM, "scheduler": DECAY},
            "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 4},
        },
        ("tensor_parallel",),
    ),
    "accelerate/zero_stage1": (
        {**ACCELERATE, "zero_optimization": {**BUCKETS, "stage": 1}},
        (1, _OFF, _OFF, _OFF, "fp16", 1.0),
    ),
    "accelerate/zero_stage2_offload": (
        {**ACCELERATE, "zero_optimization": {**BUCKETS, "offload_optimizer": CPU}},
        (2, _OFF, _HOST, _HOST, "fp16", 1.0),
    ),
    "accelerate/zero_stage3_offload": (
        {
            **ACCELERATE,
            "zero_optimization": {**OFFLOADED, "stage3_gather_16bit_weights_on_model_save": "auto"},
        },
        (3, _HOST, _HOST, _HOST, "fp16", 1.0),
    ),
    "accelerate/zero3_model_only": (
        {**DTYPES, "zero_optimization": OFFLOADED, "train_batch_size": 1},
        ("fp16.enabled and bf16.enabled",),
    ),
    "transformers/zero3": (
        {
            "fp16": FP16_ON,
            "zero_optimization": {**OFFLOADED, "sub_group_size": 1e14, "reduce_bucket_size": 0},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
        },
        (3, _HOST, _HOST, _HOST, "fp16", 1.0),
    ),
    "LLaMA-Factory/ds_z3_fp8": (
        {
            **{"fp16": {**FP16, "enabled": False}, "bf16": {"enabled": False}, "fp8": {"enabled": True}},
            **{"gradient_clipping": 0.001, "zero_optimization": {**THREE, "offload_optimizer": CPU}},
        },
        (3, _OFF, _HOST, _HOST, "fp32", 0.001),
    ),
    "DeepSpeed/zero2_cpu_offload": (
        {
            **{"train_batch_size": 16, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0},
            "zero_optimization": {"stage": 2, "cpu_offload": True},
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True, **SCALE},
            "activation_checkpointing": {"partition_activations": True},
        },
        (2, _OFF, _HOST, _HOST, "fp16", 1.0),
    ),
    "DeepSpeed/zero_stage_infinity": (INFINITY, (3, "nvme", "nvme", _HOST, "fp16", 1.0)),
    "DeepSpeed/zero_stage_infinity, as published": (
        {
            **INFINITY,
            "fp16": {**INFINITY["fp16"], "loss_scale": 1024},
            "zero_optimization": {**INFINITY["zero_optimization"], "stage3_param_persitance_threshold": 1e5},
        },
        ("fp16.loss_scale", "zero_optimization.stage3_param_persitance_threshold"),
    ),
    "DeepSpeed/qanet_1cycle": (
        {
            **{"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32},
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999]}},
            "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.004, "cycle_max_lr": 0.015}},
        },
        (0, _OFF, _OFF, _OFF, "fp32", 1.0),
    ),
    "DeepSpeed/cifar": (
        {
            **{"train_batch_size": 4, "gradient_clipping": 1.0, "prescale_gradients": False},
            "fp16": {**FP16_ON, "fp16_master_weights_and_grads": True, "initial_scale_power": 15},
            "zero_optimization": {**BUCKETS, "cpu_offload": True},
        },
        ("fp16.fp16_master_weights_and_grads",),
    ),
    "DeepSpeed/squad": (
        {
            **{**SQUAD, "fp16": {"enabled": True}},
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 3e-5, "max_grad_norm": 1.0, "weight_decay": 0.0, "bias_correction": False},
            },
        },
        ("optimizer.params.bias_correction", "optimizer.params.max_grad_norm"),
    ),
    "DeepSpeed/squad_onebit": (
        {**SQUAD, "optimizer": {"type": "OnebitAdam", "params": {"lr": 3e-5, "freeze_step": 400}}},
        ("optimizer.type",),
    ),
    "DeepSpeed/moq": (
        {
            **{"gradient_clipping": 1.0, "fp16": {"initial_scale_power": 16, "enabled": True}},
            "quantize_training": {"enabled": True, "quantize_groups": 8},
        },
        ("quantize_training",),
    ),
    "DeepSpeed/zenflow": (
        {
            **{**BF16, "train_batch_size": 32, "gradient_clipping": 1.0},
            "zero_optimization": {
                **{"stage": 2, "offload_optimizer": CPU},
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4},
            },
        },
        ("zero_optimization.zenflow",),
    ),
    "DeepSpeed/zero3_leaf": (
        {
            **{**EXPERTS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["MoeBlock"]}},
        },
        (3, _OFF, _OFF, _OFF, "bf16", 1.0),
    ),
    "DeepSpeed/autoep": (
        {
            **EXPERTS,
            "zero_optimization": {"stage": 1},
            "expert_parallel": {"enabled": True, "autoep_size": 8},
        },
        ("expert_parallel",),
    ),
    "DeepSpeed/t5_xl": (
        {
            **{**BF16, "train_batch_size": 512, "train_micro_batch_size_per_gpu": 1},
            **{"gradient_accumulation_steps": 16, "gradient_clipping": 1.0},
            "zero_optimization": {
                **{**THREE, "offload_optimizer": {**CPU, "buffer_count": 4, "fast_init": False}},
                "offload_param": {**CPU, "buffer_count": 5, "buffer_size": 2e8, "max_in_cpu": 2e9},
            },
            "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 8},
            "flops_profiler": {"enabled": False, "profile_step": 1},
            "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "t5"},
        },
        (3, _HOST, _HOST, _HOST, "bf16", 1.0),
    ),
}
#: The keys that `Config` has, so that no note has to name them.
MAPPED = (
    *(
        "fp16",
        "bf16",
        "bfloat16",
        "enabled",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "stage",
    ),
    *("min_loss_scale", "zero_optimization", "offload_optimizer", "offload_param", "device", "nvme_path"),
    *("loss_scale", "gradient_clipping", "cpu_offload", "cpu_offload_param", "max_in_cpu"),
    *("optimizer", "scheduler", "params", "activation_checkpointing"),
)


def translated(settings: Settings) -> tuple[Config, list[str]]:
    of_trainer = settings.get("gradient_accumulation_steps") == "auto"
    return config_from(settings, ARGUMENTS if of_trainer else None)


def refused(settings: Settings, arguments: Any = None) -> str:
    """Return what the error says that has to change."""
    with pytest.raises(ConfigError, match="cannot be taken over") as caught:
        config_from(settings, arguments)
    return str(caught.value.cure)


def keys_of(settings: Any, path: str = "") -> Iterator[str]:
    """Yield each key of the blocks that are not one key's own value."""
    for key, value in settings.items():
        yield f"{path}{key}"
        if key in MAPPED and isinstance(value, dict) and key != "params":
            yield from keys_of(value, f"{path}{key}.")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_translated_or_the_error_names_the_keys(name: str, tmp_path: Path) -> None:
    settings, expected = PUBLISHED[name]
    before = json.dumps(settings)
    file = tmp_path / "ds_config.json"
    file.write_text(before, encoding="utf-8")
    if len(expected) < 6:
        cure = refused(settings, ARGUMENTS if "Factory" in name or "tensor" in name else None)
        assert [part.split(": ")[0] for part in cure.split("\n    ")] == list(expected)
        return
    config, notes = translated(settings)
    found = (config.zero_stage, config.parameters, config.optimizer_state, config.gradients, config.dtype)
    assert (*found, config.max_grad_norm) == expected
    assert json.dumps(settings) == before
    of_trainer = settings.get("gradient_accumulation_steps") == "auto"
    assert config_from(file, ARGUMENTS if of_trainer else None) == (config, notes)
    told = " ".join(notes)
    filled = [key for key in BATCHES if settings.get(key) == "auto"]
    lost = [k for k in keys_of(settings) if k.split(".")[-1] not in MAPPED and k not in told]
    assert [key for key in lost if key not in filled] == []
    assert all(note.endswith(".") for note in notes)


def test_all_refusals_are_in_one_error() -> None:
    settings = {
        "zero_optimization": {
            "stage": 4,
            "zenflow": {"topk_ratio": 0.1},
            "offload_param": {"device": "disk"},
        },
        "train_batch_size": "many",
        "gradient_cliping": 1.0,
        "bf16": True,
        "scheduler": {"type": "Sometimes"},
    }
    cure = refused(settings)
    for key in ("zero_optimization.stage", "zero_optimization.zenflow", "train_batch_size", "bf16"):
        assert f"{key}: " in cure
    assert "zero_optimization.offload_param.device: write" in cure
    assert "gradient_cliping: did you mean 'gradient_clipping'?" in cure
    assert "scheduler.type: write one of WarmupLR" in cure


def note_of(notes: list[str], key: str) -> str:
    [note] = [each for each in notes if each.startswith(f"{key} = ")]
    return note


def test_defaults_of_deepspeed_are_not_ours() -> None:
    config, notes = config_from({"fp16": {"enabled": True}})
    assert (config.loss_scale, config.max_grad_norm) == (65536.0, 1.0)
    assert "since version 0.19.3" in note_of(notes, "gradient_clipping")
    assert "from overflow number 2 on" in note_of(notes, "fp16.loss_scale")
    assert "after 1000 steps" in note_of(notes, "fp16.loss_scale")
    config, notes = config_from({**BF16, "gradient_clipping": 0})
    assert config.max_grad_norm is None
    assert "not all finite" in note_of(notes, "bf16.check_grad_overflow")
    assert config.skip_nonfinite
    assert "rounds the initial parameters to bf16" in note_of(notes, "bf16.enabled")
    assert config.optimizer_state == "device"  # and `Config()` has it on the host
    config, notes = config_from({"bf16": {"enabled": True, "check_grad_overflow": False}})
    assert not any("finite" in note for note in notes)
    assert not config.skip_nonfinite
    accumulating = {**BF16, "gradient_accumulation_steps": 2}
    key, in_fp32 = "data_types.grad_accum_dtype", {"data_types": {"grad_accum_dtype": "fp32"}}
    assert "here they are added in fp32" in note_of(config_from(accumulating)[1], key)
    assert not any(n.startswith(key) for n in config_from({**accumulating, **in_fp32})[1])


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("Adam", {}, "AdamW(parameters, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)"),
        ("Adam", {"adam_w_mode": False}, "torch.optim.Adam(parameters, lr=0.001,"),
        ("AdamW", {"adam_w_mode": False}, "torch.optim.AdamW(parameters, lr=0.001,"),
        ("AdamW", {"torch_adam": True}, "weight_decay=0.01)"),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "weight_decay=0.0)"),
        (
            "Lion",
            {"lr": 1e-4},
            "infinity.optim.Lion(parameters, lr=0.0001, betas=(0.9, 0.999), weight_decay=0.0)",
        ),
        ("Adagrad", {}, "torch.optim.Adagrad(parameters, lr=0.01, eps=1e-10, weight_decay=0.0)"),
        ("SGD", {"momentum": 0.9}, "momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)"),
    ],
)
def test_optimizers_have_the_defaults_of_deepspeed(kind: str, params: Settings, said: str) -> None:
    _, notes = config_from({"optimizer": {"type": kind, "params": params}})
    note = note_of(notes, "optimizer.type")
    assert said in note
    made = note.split(": ", 1)[1].removesuffix(".")
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    assert eval(made, {"torch": torch, "infinity": infinity, "parameters": parameters}).param_groups


def test_auto_is_what_trainer_fills_in() -> None:
    settings = {**AUTO, "bf16": {"enabled": "auto"}, "fp16": FP16, "optimizer": ADAM}
    config, notes = config_from(settings, ARGUMENTS)
    assert (config.dtype, config.max_grad_norm) == ("bf16", None)
    made = "torch.optim.AdamW(parameters, lr=2e-05, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1)"
    assert made in note_of(notes, "optimizer.type")
    assert "all parameters are in one group" in note_of(notes, "optimizer.type")
    half = SimpleNamespace(bf16=False, fp16=True)
    config, notes = config_from(settings, half)
    assert (config.dtype, config.max_grad_norm) == ("fp16", 1.0)
    assert "lr=learning_rate, betas=(adam_beta1, adam_beta2)" in note_of(notes, "optimizer.type")
    assert "enabled: give the `arguments`" in refused(settings)
    assert config_from({**settings, **BF16})[0].dtype == "bf16"
    assert config_from(settings, SimpleNamespace(bf16=False, fp16=False))[0].dtype == "fp32"
    wrong = {"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 1, **BF16}
    cure = refused(wrong, ARGUMENTS)
    assert 'gradient_clipping: write "auto", or 1 as in the arguments' in cure
    assert "(per_device_train_batch_size)" in cure
    clips = SimpleNamespace(max_grad_norm=0.5)
    assert "gradient_clipping: write" in refused(BF16, clips)  # DeepSpeed clips at 1, Trainer at 0.5


@pytest.mark.integration
def test_arguments_may_be_those_of_transformers(tmp_path: Path) -> None:
    need("accelerate")  # without which transformers has no TrainingArguments
    transformers = need("transformers")
    arguments = transformers.TrainingArguments(
        tmp_path, bf16=True, max_steps=20, warmup_steps=2, use_cpu=True
    )
    settings = {**AUTO, **DTYPES, "optimizer": ADAM, "scheduler": DECAY}
    config, notes = config_from(settings, arguments)
    assert (config.dtype, config.max_grad_norm) == ("bf16", None)
    assert "lr=5e-05, betas=(0.9, 0.999)" in note_of(notes, "optimizer.type")
    optimizer = adam()
    scheduler_from(settings, optimizer, arguments)
    assert rates(settings, arguments, steps=None, count=4) == [0, 0, 5e-05, 5e-05]


def test_places_and_directories(tmp_path: Path) -> None:
    drive, other = str(tmp_path / "a"), str(tmp_path / "b")
    state = {"device": "nvme", "nvme_path": drive, "ratio": 0.75}
    zero: Settings = {"stage": 3, "offload_optimizer": state}
    config, notes = config_from({"zero_optimization": zero})
    assert (config.optimizer_state, config.directories) == ({"nvme": 0.75, "device": 0.25}, (drive,))
    assert "Config(gradients='nvme')" in note_of(notes, "zero_optimization.offload_optimizer.device")
    zero["offload_param"] = {"device": "nvme", "nvme_path": other}
    config, notes = config_from({"zero_optimization": zero})
    assert config.directories == (drive, other)
    assert "share is 1e+09 divided by" in note_of(notes, "zero_optimization.offload_param.max_in_cpu")
    assert "both directories" in note_of(notes, "nvme_path")
    zero["offload_param"]["max_in_cpu"] = 0
    assert not any("max_in_cpu" in note for note in config_from({"zero_optimization": zero})[1])
    del state["nvme_path"]
    assert "nvme_path: name a directory" in refused({"zero_optimization": zero})
    state["nvme_path"] = drive
    _, notes = config_from({"zero_optimization": {"stage": 1, "offload_optimizer": {**state, "ratio": 1}}})
    assert "DeepSpeed keeps it in host memory" in note_of(notes, "zero_optimization.offload_optimizer.device")
    second: Settings = {"stage": 2, "offload_param": {"device": "cpu"}}
    config, notes = config_from({"zero_optimization": second})
    assert config.parameters == "device"
    assert "DeepSpeed ignores this key" in note_of(notes, "zero_optimization.offload_param.device")
    assert config_from({"zero_optimization": True})[0].zero_stage == 1
    assert config_from({})[0].zero_stage == 0


def test_a_file_may_have_comments_and_no_key_twice(tmp_path: Path) -> None:
    file = tmp_path / "annotated.json"
    file.write_text('{\n// why\n"bf16": {"enabled": true,}, # yes\n"name": "a//b,}", /* no */}', "utf-8")
    config, notes = config_from(file)
    assert config.dtype == "bf16"
    assert note_of(notes, "name") == 'name = "a//b,}": left out; DeepSpeed does not know this key either.'
    for text in ('{"bf16": {}, "bf16": {}}', "[1]", "zero_stage: 3", ""):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="cannot read"):
            config_from(os.fspath(file))
    for wrong in (tmp_path / "none.json", None, 3):
        with pytest.raises(ConfigError, match="cannot read"):
            config_from(wrong)  # type: ignore[arg-type]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = run(["plan", "--preset", "10m", "--json", "--device", "cpu", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_plan_reads_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    settings: Settings = {
        **{**DTYPES, "gradient_clipping": 1.0, "train_batch_size": 32, "gradient_accumulation_steps": 2},
        "zero_optimization": {
            **{**THREE, "offload_param": CPU},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
        "optimizer": {"type": "Lion"},
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "2")
    assert code == 0
    assert (result["zero_stage"], result["dtype"]) == (3, "bf16")
    assert "parameters" in result["host"]
    elements = result["parameters"] / 2
    assert result["nvme"]["optimizer state"] == pytest.approx(elements * 8, rel=0.05)  # Lion's, with masters
    assert result["per_step"]["tokens"] == 32 * 256
    assert result["notes"] == config_from(settings, SimpleNamespace(bf16=True, fp16=False))[1]
    assert run(["plan", "--preset", "10m", "--device", "cpu", "--deepspeed", str(file)]) == 0
    assert "- bf16.check_grad_overflow = true: DeepSpeed skips" in capsys.readouterr().out
    more = ("--parameters", "device", "--batch", "1", "--optimizer-state", "host", "--dtype", "fp16")
    code, result = plan(capsys, "--deepspeed", str(file), *more)
    assert (code, result["dtype"], result["per_step"]["tokens"]) == (0, "fp16", 2 * 256)
    assert "parameters" in result["device"]
    assert not result["nvme"]
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "2", "--fit")
    assert result["settings"]["zero_stage"] == 3
    code, result = plan(capsys, "--deepspeed", str(file), "--ranks", "3")
    assert (code, "contradict each other" in result["error"]["what"]) == (2, True)
    settings["fp16"], settings["bf16"] = {"enabled": True, "loss_scale": 128}, {"enabled": False}
    file.write_text(json.dumps(settings), encoding="utf-8")
    code, result = plan(capsys, "--deepspeed", str(file), "--dtype", "fp16")
    assert 'write "loss_scale": 0' in result["error"]["cure"]
    settings = {"train_batch_size": 32, "zero_optimization": {}}
    settings["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
    file.write_text(json.dumps(settings), encoding="utf-8")
    code, result = plan(capsys, "--deepspeed", str(file))
    assert code == 2
    assert "zero_optimization.zenflow" in result["error"]["found"]


# ---- schedulers ----

#: Rates of the first group, step by step, of DeepSpeed 0.19.8.
RECORDED: Mapping[str, tuple[str, Settings, str]] = {
    "log": (
        "WarmupLR",
        {"warmup_max_lr": 0.003, "warmup_num_steps": 5},
        "0.0 0.0 0.0012920296742201791 0.0020478185834579563 0.0025840593484403583 0.003 0.003 "
        "0.003 0.003 0.003 0.003",
    ),
    "of the group": (
        "WarmupLR",
        {"warmup_min_lr": 0.0001, "warmup_num_steps": 5, "warmup_type": "linear"},
        "0.0001 0.0001 0.00028000000000000003 0.00046 0.00064 0.0008200000000000001 0.001 0.001 "
        "0.001 0.001 0.001",
    ),
    "decay": (
        "WarmupDecayLR",
        {"warmup_max_lr": 0.003, "warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"},
        "0.0 0.0 0.001 0.002 0.003 0.0024000000000000002 0.0018 0.0012000000000000001 "
        "0.0006000000000000001 0.0 0.0",
    ),
    "cosine": (
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
        "0.0 0.0001 0.0006678367782143116 0.001 0.000904518046337755 0.000654543046337755 "
        "0.0003455569536622451 9.558195366224507e-05 1.0000000000000001e-07 "
        "1.0000000000000001e-07 1.0000000000000001e-07",
    ),
    "stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0.004,
            "cycle_max_lr": 0.015,
            "cycle_first_step_size": 4,
            "cycle_second_step_size": 3,
            "cycle_first_stair_count": 2,
            "decay_step_size": 5,
            "decay_lr_rate": 0.01,
        },
        "0.004 0.004 0.0095 0.0095 0.015 0.0095 0.004 0.004 0.003992015968063872 "
        "0.00398406374501992 0.003976143141153082",
    ),
    "cycle": (
        "OneCycle",
        {
            "cycle_min_lr": 0.004,
            "cycle_max_lr": 0.015,
            "cycle_first_step_size": 4,
            "decay_step_size": 5,
            "decay_mom_rate": 0.01,
        },
        "0.004 0.00675 0.0095 0.01225 0.015 0.01225 0.0095 0.00675 0.004 0.004 0.004",
    ),
    "staircase": (
        "LRRangeTest",
        {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
        "0.001 0.001 0.001 0.002 0.002 0.002 0.003 0.003 0.003 0.004 0.004",
    ),
}
#: β₁ in "cycle".
MOMENTA = [0.8, 0.875, 0.8500000000000001, 0.8250000000000001, 0.8, 0.8250000000000001]


def adam() -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW(
        [{"params": [p], "lr": lr} for p, lr in zip(parameters, (1e-3, 2e-3), strict=True)]
    )


def rates(settings: Settings, arguments: Any = None, *, steps: int | None = None, count: int) -> list[float]:
    optimizer = adam()
    scheduler = scheduler_from(settings, optimizer, arguments, steps=steps)
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_rates_are_those_of_deepspeed(name: str) -> None:
    kind, params, expected = RECORDED[name]
    found = rates({"scheduler": {"type": kind, "params": params}}, count=11)
    assert found == [*map(float, expected.split())]


def test_one_cycle_sets_betas_of_a_wrapped_optimizer_and_goes_on(config: Config, tmp_path: Path) -> None:
    """A state dict of the scheduler is that of a LambdaLR; a run that goes on has the same rates."""
    kind, params, expected = RECORDED["cycle"]
    settings = {"scheduler": {"type": kind, "params": params}}
    found: list[tuple[float, float]] = []

    def train(steps: int, state: Settings | None) -> Settings:
        model, optimizer = infinity.wrap(*build(), config)
        scheduler = scheduler_from(settings, optimizer)
        if state is not None:
            infinity.load(optimizer, tmp_path / "saved", state=state | {"scheduler": scheduler})
        for step in range(steps):
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0]))
            assert group["betas"][1] == 0.99
            model(tokens(step)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        infinity.save(optimizer, tmp_path / "saved", state={"scheduler": scheduler})
        infinity.close(model)
        return {}

    train(3, None)
    train(3, {})
    assert found == list(zip(map(float, expected.split()[:6]), MOMENTA, strict=True))


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (None, "no scheduler"),
        ({"type": "StepLR", "params": {"step_size": 3}}, "create a scheduler of torch"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "warmup_steps"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "a number of at least 1"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, '"log" or "linear"'),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3] * 3}}, "2 values, one for each param group"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, "Trainer's `arguments`"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "high"}}, "a number of at least 0"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}, "give `steps`"),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 1}}, "scheduler.params.cycle_min_lr"),
    ],
)
def test_a_scheduler_that_cannot_be_made(scheduler: Settings | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scheduler_from({} if scheduler is None else {"scheduler": scheduler}, adam())
    assert said in str(caught.value)


# ---- the example ----

ROOT = Path(__file__).parents[1]
#: The loss of each step with DeepSpeed 0.19.8: the script before, as the page has it.
BEFORE = [
    *(1.0942, 0.9976, 0.9964, 0.9040, 1.0692, 0.9018, 0.9661, 0.9480, 0.8561, 0.8204),
    *(0.8178, 0.8056, 0.7918, 0.7340, 0.7687, 0.7583, 0.8034, 0.7256, 0.7570, 0.7028),
]


@pytest.mark.processes
def test_the_example_has_the_losses_of_deepspeed_and_goes_on(tmp_path: Path) -> None:
    script = ROOT / "examples/deepspeed/train.py"
    page = (ROOT / "docs/deepspeed.md").read_text(encoding="utf-8")
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    code = script.read_text(encoding="utf-8")
    assert [line[1:] for line in diff if not line.startswith("-")] == code.splitlines()
    compile("\n".join(line[1:] for line in diff if not line.startswith("+")), "before", "exec")
    run = f"import os, runpy, sys\nos.chdir(sys.argv[1])\nrunpy.run_path({str(script)!r})"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    first, second = (
        all_well(run_ranks(1, run, str(tmp_path), seconds=120, environment=environment))[0] for _ in range(2)
    )
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.+)$", first, flags=re.M)]
    assert losses == pytest.approx(BEFORE, abs=1e-3)
    assert 'optimizer.type = "AdamW": torch.optim.AdamW(parameters, lr=0.003,' in first
    assert (tmp_path / "checkpoints/step-20").is_dir()
    assert not re.search(r"^step \d+:", second, flags=re.M), "a second run goes on: nothing is left to do"
