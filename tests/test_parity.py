"""Placement never changes results, and results are torch's.

The settings are covering pairs, not a product: each case trains once per variant, and every
variant must equal the first bit for bit.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.hardware import cpu_adam

from . import digests
from .models import case
from .offloaded import ON_HOST, assert_same, config_for, train_offloaded
from .quick import quick
from .reference import Run, beyond, train_master, train_torch, two_groups

STEPS = 30
SHORT = 10  #: of a variant: each of the eight batches comes, and two come again

#: placements, chunk sizes, depths, pool sizes, backends and instruction sets
VARIANTS: dict[str, dict[str, Any]] = {
    "host": {**ON_HOST, "update": "sync"},
    "device": {"parameters": "device", "optimizer_state": "device", "gradients": "device"},
    "nvme": {"aio_backend": "threads", "update_depth": 1, "host_memory": "least", "read_ahead_memory": 0},
    "nvme, tight": {"aio_backend": "libaio", "device_memory": "least", "queue_depth": 1},
    "nvme, sync": {"update": "sync"},
    "state on nvme": {
        "parameters": "device",
        "optimizer_state": "nvme",
        "gradients": "host",
        "chunk_elements": 131072,
        "block_bytes": 65536,
    },
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"host": 0.5, "nvme": 0.5},
        "gradients": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "aio_backend": "syscall",
    },
    "scalar": {**ON_HOST, "isa": "scalar"},
    "avx2, two directories": {"isa": "avx2", "directories": 2, "prefetch_memory": 0},
}

#: model, training settings, variants (beside the first)
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gpt-fp32": ("gpt", {}, list(VARIANTS)[1:]),
    "gpt-fp32-clip-accumulate": (
        "gpt",
        {"clip": 0.5, "accumulate": 4, "groups": True, "model": {"tied": True, "recompute": "non-reentrant"}},
        ["nvme, tight", "split"],
    ),
    "gpt-bf16-reentrant": (
        "gpt",
        {"dtype": "bf16", "clip": 0.5, "model": {"recompute": "reentrant"}},
        ["nvme", "device", "scalar"],
    ),
    "gpt-fp16": (
        "gpt",
        {"dtype": "fp16", "window": 4},
        ["nvme, tight", "state on nvme", "avx2, two directories"],
    ),
    "cnn-fp32": ("cnn", {"clip": 1.0}, ["nvme", "device", "split"]),
    "cnn-bf16": ("cnn", {"dtype": "bf16", "accumulate": 4}, ["nvme, tight", "split"]),
    "lstm-fp32": ("lstm", {"accumulate": 4}, ["nvme, tight", "state on nvme"]),
    "moe-fp32": ("moe", {"clip": 0.5}, ["nvme", "split", "avx2, two directories"]),
    "moe-bf16": ("moe", {"dtype": "bf16", "accumulate": 4}, ["nvme, tight", "device"]),
    "gpt2-fp32": ("gpt2", {"clip": 1.0}, ["nvme, tight", "split"]),
    "gpt2-fp16": ("gpt2", {"dtype": "fp16", "accumulate": 4, "clip": 1.0}, ["nvme", "state on nvme"]),
    "llama-bf16": ("llama", {"dtype": "bf16"}, ["nvme, tight", "device"]),
    "llama-fp32": ("llama", {"accumulate": 4}, ["split", "nvme"]),
    "qwen2-fp32": ("qwen2", {"clip": 0.5, "model": {"tied": True}}, ["nvme, tight", "state on nvme"]),
}


def offload(
    name: str, training: dict[str, Any], variant: dict[str, Any], folder: Path, steps: int = STEPS
) -> Run:
    settings = dict(variant)
    isa = settings.pop("isa", None)
    count = settings.pop("directories", 1)
    folders = [folder / str(i) for i in range(count)]
    for f in folders:
        f.mkdir()
    settings["nvme"] = folders
    settings["max_grad_norm"] = training.get("clip")
    settings["dtype"] = training.get("dtype", "fp32")
    if "window" in training:
        settings["loss_scale_window"] = training["window"]
    run = case(name, **training.get("model", {}))
    for tier in ("host_memory", "device_memory"):
        if settings.get(tier) == "least":
            settings[tier] = least(run, settings, tier, folder)
    before = cpu_adam.isa()
    if isa is not None:
        cpu_adam.set_isa(isa)
    try:
        return train_offloaded(
            run,
            config_for(folder, **settings),
            steps=steps,
            accumulate=training.get("accumulate", 1),
            **({"groups": two_groups} if training.get("groups") else {}),
        )
    finally:
        cpu_adam.set_isa(before)


def least(run: Any, settings: dict[str, Any], tier: str, folder: Path) -> int:
    """The smallest budget that is not refused, taken from the refusal."""
    import re

    import infinity
    from infinity.core.errors import BudgetError

    others = {k: v for k, v in settings.items() if v != "least"}
    model = copy.deepcopy(run.model)
    with pytest.raises(BudgetError) as caught:
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(folder, **{**others, tier: 1}))
    found = re.search(r"\((\d+) bytes\)", str(caught.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    "name",
    quick(CASES, ["gpt-bf16-reentrant", "moe-fp32", "cnn-fp32", "gpt2-fp16"]),
)
def test_placement_never_changes_results(name: str, tmp_path: Path) -> None:
    kind, training, variants = CASES[name]
    folders = [tmp_path / str(i) for i in range(len(variants) + 2)]
    for f in folders:
        f.mkdir()
    available = cpu_adam.available_isas()
    wanted = digests.recorded(name)  # and torch's threads are those of the record from here on
    whole = offload(kind, training, VARIANTS["host"], folders[0])
    assert wanted in (None, digests.digests(whole))
    compare_with_torch(kind, training, whole)
    first = offload(kind, training, VARIANTS["host"], folders[1], SHORT)
    for variant, folder in zip(variants, folders[2:], strict=True):
        settings = VARIANTS[variant]
        if settings.get("isa", "scalar") in available:
            assert_same(offload(kind, training, settings, folder, SHORT), first)


def compare_with_torch(kind: str, training: dict[str, Any], run: Run) -> None:
    model = training.get("model", {})
    accumulate, clip = training.get("accumulate", 1), training.get("clip")
    groups = {"groups": two_groups} if training.get("groups") else {}
    dtype = training.get("dtype", "fp32")
    if dtype != "fp32":
        wanted = train_master(
            case(kind, **model),
            dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype],
            steps=STEPS,
            accumulate=accumulate,
            max_grad_norm=clip,
            loss_scale_window=training.get("window", 2000),
        )
        assert run.scales == wanted.scales
        # One rounding of a bf16 copy that falls the other way moves everything after it a little.
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=2e-2, atol=0)
        torch.testing.assert_close(
            torch.tensor(run.losses[:3]), torch.tensor(wanted.losses[:3]), rtol=1e-3, atol=0
        )
        compare_gradients(run, wanted)
        return
    wanted = train_torch(
        case(kind, **model), steps=STEPS, accumulate=accumulate, max_grad_norm=clip, foreach=True, **groups
    )
    fused = train_torch(
        case(kind, **model), steps=STEPS, accumulate=accumulate, max_grad_norm=clip, fused=True, **groups
    )
    compare_gradients(run, wanted)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)
    if clip is not None:
        torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(wanted.norms), rtol=1e-4, atol=0)
    # Gradients that are mathematically zero make Adam amplify noise, so torch's own two
    # implementations differ too; ours may differ in no more than twice as many elements.
    assert beyond(run.params, wanted.params) <= 2 * max(beyond(fused.params, wanted.params), 8)
    for key, value in wanted.buffers.items():
        torch.testing.assert_close(run.buffers[key], value, rtol=1e-4, atol=1e-5)


def compare_gradients(run: Run, wanted: Run) -> None:
    largest = max(float(g.abs().max()) for g in wanted.first_gradients.values() if g is not None)
    for name, gradient in wanted.first_gradients.items():
        found = run.first_gradients[name]
        if gradient is None:
            assert found is None, name
        else:
            assert found is not None, name
            torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-7 * largest)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}),
        (torch.optim.AdamW, {"maximize": True, "weight_decay": 0.0}),
        (torch.optim.Adam, {"weight_decay": 0.05}),
        (torch.optim.AdamW, {"lr": torch.tensor(2e-3)}),
    ],
)
def test_options_of_the_optimizer(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    run = train_offloaded(case("gpt"), config_for(tmp_path), steps=6, optimizer=optimizer, **options)
    wanted = train_torch(case("gpt"), steps=6, optimizer=optimizer, foreach=False, **options)
    fused = train_torch(case("gpt"), steps=6, optimizer=optimizer, fused=True, **options)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)
    assert beyond(run.params, wanted.params) <= 2 * max(beyond(fused.params, wanted.params), 8)


def test_lr_schedule_and_groups_edited_between_steps(tmp_path: Path) -> None:
    def edit(adam: torch.optim.Optimizer, step: int) -> None:
        for index, group in enumerate(adam.param_groups):
            group["lr"] = 1e-3 / (1 + step + index)
            group["betas"] = (0.9 - 0.01 * step, 0.99)
            group["weight_decay"] = 0.01 * step

    runs = [
        train_offloaded(
            case("gpt"), config_for(tmp_path, **where), steps=6, groups=two_groups, before_step=edit
        )
        for where in ({}, ON_HOST)
    ]
    assert_same(runs[0], runs[1])
    wanted = train_torch(case("gpt"), steps=6, groups=two_groups, before_step=edit)
    torch.testing.assert_close(torch.tensor(runs[0].losses), torch.tensor(wanted.losses), rtol=1e-5, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(50))
def test_random_delays_change_nothing_in_the_matrix(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed takes the next case, and each time around the next of its variants."""
    name = list(CASES)[seed % len(CASES)]
    kind, training, variants = CASES[name]
    settings = VARIANTS[variants[seed // len(CASES) % len(variants)]]
    if settings.get("isa", "scalar") not in cpu_adam.available_isas():
        settings = {**settings, "isa": "scalar"}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    wanted = offload(kind, training, VARIANTS["host"], folders[0])
    monkeypatch.setenv("INFINITY_DELAY_SEED", str(seed))
    assert_same(offload(kind, training, settings, folders[1]), wanted)


@pytest.mark.parametrize("seed", quick(range(5), [0]))
def test_random_delays_change_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and rings that sleep at random show a missing wait."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    settings: dict[str, Any] = {"device_memory": "1MiB", "max_grad_norm": 0.5}
    wanted = train_offloaded(case("gpt"), config_for(folders[0], **settings), steps=4, accumulate=2)
    monkeypatch.setenv("INFINITY_DELAY_SEED", str(seed))
    assert_same(
        train_offloaded(case("gpt"), config_for(folders[1], **settings), steps=4, accumulate=2), wanted
    )
