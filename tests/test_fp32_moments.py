"""Parameters whose moments stay fp32 beside others in bf16 or 8 bits (`Config.optimizer_state_fp32`): bits,
checkpoints, budgets and refusals."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ConfigError
from infinity.core.sizes import Tier
from infinity.planning.planner import Model, checkpoint_nbytes

from .models import case
from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, config_for
from .quick import quick
from .test_optimizers import (
    DTYPES,
    PLACES,
    STEPS,
    State,
    as_kept,
    assert_equal,
    go_on,
    loss_of,
    state_of,
    trained,
    wrapped,
)
from .test_wrap_refusals import suggested
from .whole import OPTIMIZERS, muon, train_whole

PATTERNS = ("tokens.*", "*norm*", "*.bias")
FORMS = ["bf16", "8bit"]


def matching(patterns: Any) -> set[str]:
    names = [name for name, _ in case("gpt").model.named_parameters()]
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", quick(OPTIMIZERS, ["adamw"]))
def test_bits_are_those_of_whole_parameters_everywhere(name: str, form: str, tmp_path: Path) -> None:
    make, settings = OPTIMIZERS[name], {"optimizer_state_dtype": form, "optimizer_state_fp32": PATTERNS}
    model, fp32 = case("gpt").model, matching(PATTERNS)
    wanted = train_whole(model, make, loss_of, steps=STEPS, dtype=DTYPES[form], fp32=fp32)
    for place, more in PLACES.items():
        assert_equal(trained(make, tmp_path / place, **settings, **more), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_a_delayed_update_has_the_same_bits_on_every_tier(form: str, tmp_path: Path) -> None:
    settings = {"update": "delayed", "delay_warmup_steps": 2, "optimizer_state_dtype": form}
    settings |= {"optimizer_state_fp32": PATTERNS}
    make = OPTIMIZERS["adamw"]
    wanted = trained(make, tmp_path / "host", **ON_HOST, **settings)
    for place, tiers in {"nvme": ON_NVME, "device": ON_DEVICE}.items():
        assert_equal(trained(make, tmp_path / place, **tiers, **settings), wanted)
    assert not all_equal(wanted, trained(make, tmp_path / "all", **settings | {"optimizer_state_fp32": ()}))


def all_equal(a: State, b: State) -> bool:
    return all(
        torch.equal(value, b[name][kind]) for name, kinds in a.items() for kind, value in kinds.items()
    )


# -- random models, with given gradients ----------------------------------------------------------


class Given(nn.Module):
    """The gradients of its parameters are what it is called with: they do not depend on its values."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        parts: list[nn.Module] = []
        for _ in range(random.choice((1, 2, 4))):
            part = nn.Module()
            for name in random.sample(("weight", "bias", "scale", "table"), random.choice((1, 2, 3))):
                shape = [random.choice((1, 3, 40, 300)) for _ in range(random.choice((1, 2)))]
                part.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
            parts.append(part)
        self.parts = nn.ModuleList(parts)
        if random.random() < 0.3:
            next(self.parts.parameters()).requires_grad_(False)
        if not any(p.requires_grad for p in self.parameters()):
            self.last = nn.Parameter(torch.ones(700))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        named = self.named_parameters()
        return torch.stack([(p * gradients[name]).sum() for name, p in named]).sum()


def given_case(seed: int) -> tuple[Any, ...]:
    """Return how to build a model, what it is trained with, the settings, and the patterns."""
    random = Random(seed)
    built, names = random.randrange(1 << 30), ["adamw", "adam", "momentum", "adagrad", "lion", "muon"]
    make = {**OPTIMIZERS, "muon": muon}[name := random.choice(names)]
    form = "bf16" if name == "muon" else random.choice(FORMS)
    update = random.choice(("overlap", "sync", "backward", "delayed" if name != "muon" else "sync"))
    tiers = ("device", "host", "nvme", {"device": 0.3, "host": 0.3, "nvme": 0.4})
    settings = {
        **{kind: random.choice(tiers) for kind in ON_HOST},
        "optimizer_state_dtype": form,
        "update": update,
        "accumulation": 1 if update == "backward" else None,
        "delay_warmup_steps": random.choice((0, 2)),
        "dtype": random.choice(("fp32", "bf16")),
        "chunk_elements": random.choice((65536, 131072)),
        "update_depth": random.choice((1, 3)),
        "read_ahead_memory": random.choice((0, "1MiB")),
        "units": random.choice((None, ["Given"])),
    }
    model = Given(Random(built))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    ends = ("*.weight", "*.bias", "*s[0-9]*", "parts.0.*", "*")
    patterns = [p for p in (*ends, random.choice(trainable)) if any(fnmatchcase(n, p) for n in trainable)]
    chosen = random.sample(patterns, random.randint(1, min(2, len(patterns))))
    return built, make, settings, chosen


def trained_on_gradients(built: int, make: Any, folder: Path, **settings: Any) -> State:
    folder.mkdir()
    model: Any = Given(Random(built))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = infinity.wrap(model, make(trained), config_for(folder, **settings))
    generator = torch.Generator().manual_seed(built)
    for _ in range(4):
        scale = float(10 ** torch.randn((), generator=generator))
        shapes = {name: p.shape for name, p in model.named_parameters()}
        model({n: torch.randn(shape, generator=generator) * scale for n, shape in shapes.items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(model)
    found = {name: state[name] for name, p in model.named_parameters() if p.requires_grad}
    infinity.close(optimizer)
    return found


@pytest.mark.parametrize("seed", quick(range(40), range(4)))
def test_each_parameter_has_the_bits_of_the_run_that_keeps_all_in_its_form(seed: int, tmp_path: Path) -> None:
    built, make, settings, patterns = given_case(seed)
    found = trained_on_gradients(built, make, tmp_path / "a", **settings, optimizer_state_fp32=patterns)
    rounded = trained_on_gradients(built, make, tmp_path / "b", **settings)
    exact = trained_on_gradients(built, make, tmp_path / "c", **settings | {"optimizer_state_dtype": "fp32"})
    fp32 = {name for name in found if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert_equal(found, {name: (exact if name in fp32 else rounded)[name] for name in found})


# -- checkpoints and state dicts ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_resumes_bit_for_bit(form: str, tmp_path: Path) -> None:
    make, settings = OPTIMIZERS["adamw"], {"optimizer_state_dtype": form, "optimizer_state_fp32": PATTERNS}
    wanted = trained(make, tmp_path / "whole", **ON_HOST, **settings)
    model, optimizer = wrapped(make, tmp_path / "a", **settings)
    go_on(model, optimizer, 0, 3)
    infinity.save(optimizer, tmp_path / "saved")
    infinity.close(optimizer)
    model, optimizer = wrapped(make, tmp_path / "b", **settings, chunk_elements=131072, **ON_HOST)
    infinity.load(optimizer, tmp_path / "saved")
    go_on(model, optimizer, 3, STEPS)
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"optimizer_state_dtype": "fp32"},
    "bf16": {"optimizer_state_dtype": "bf16"},
    "8bit": {"optimizer_state_dtype": "8bit"},
    "bf16, some": {"optimizer_state_dtype": "bf16", "optimizer_state_fp32": PATTERNS},
    "8bit, some": {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": PATTERNS},
    "8bit, others": {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ("*.weight",)},
}
EXCHANGED = [(a, b) for a in SETTINGS for b in SETTINGS if "," in a + b and a != b]


@pytest.mark.parametrize(
    ("first", "second"),
    quick(
        EXCHANGED,
        [
            ("8bit, some", "8bit, others"),
            ("8bit", "bf16, some"),
            ("bf16, some", "8bit"),
            ("8bit, some", "fp32"),
        ],
    ),
)
def test_checkpoints_and_state_dicts_are_exchanged(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.api.load._AT_ONCE", 512)  # so that one segment takes several
    monkeypatch.setattr("infinity.optim.pieces._SLICE", 512)
    make = OPTIMIZERS["adamw"]
    model, optimizer = wrapped(make, tmp_path / "a", **SETTINGS[first])
    go_on(model, optimizer, 0, 3)
    infinity.save(optimizer, tmp_path / "saved")
    before, saved = state_of(model), optimizer.state_dict()
    infinity.close(optimizer)
    assert all(v.dtype is torch.float32 for one in saved["state"].values() for v in one.values())
    here = SETTINGS[second]
    fp32, form = matching(here.get("optimizer_state_fp32", ())), here["optimizer_state_dtype"]
    wanted = {
        name: {
            k: v if k == "value" else as_kept(k, v, "fp32" if name in fp32 else form)
            for k, v in kinds.items()
        }
        for name, kinds in before.items()
    }
    model, optimizer = wrapped(make, tmp_path / "b", **here)
    infinity.load(optimizer, tmp_path / "saved")
    assert_equal(state_of(model), wanted)
    go_on(model, optimizer, 3, 4)
    optimizer.load_state_dict(saved)
    model.load_state_dict({name: kinds["value"] for name, kinds in before.items()})
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_planned_bytes_of_checkpoints_and_arenas_are_those_that_are_there(form: str, tmp_path: Path) -> None:
    settings = {"optimizer_state_dtype": form, "optimizer_state_fp32": PATTERNS}
    model, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path / "a", **settings)
    engine = engine_of(model)
    go_on(model, optimizer, 0, 2)
    infinity.save(optimizer, tmp_path / "saved")
    planned = Model([(u.layout.name, u.layout.params) for u in engine.units], ())
    nbytes = 0
    for path in (tmp_path / "saved").glob("step-2/*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        stem = path.stem.partition("-")[0]
        if stem in ("parameters", "exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales"):
            nbytes += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in tensors)
        if stem == "exp_avg":
            kinds = {name: header[name]["dtype"] for name in header if name != "__metadata__"}
            assert {name for name, kind in kinds.items() if kind == "F32"} == matching(PATTERNS)
            assert set(kinds.values()) == {"F32", {"bf16": "BF16", "8bit": "U8"}[form]}
    assert nbytes == checkpoint_nbytes(planned, engine.config)
    written = [infinity.metrics(optimizer)["nvme/written(GiB)"]]
    go_on(model, optimizer, 2, 3)
    engine.states.quiesce()
    written.append(infinity.metrics(optimizer)["nvme/written(GiB)"])
    assert round((written[1] - written[0]) * (1 << 30)) == engine.footprint.nvme_written_per_step
    assert sum(engine.footprint.nvme.values()) == sum(plan.nvme_nbytes for plan in engine.tiers.plans)
    infinity.close(optimizer)


def test_suggestions_of_wrap_count_them() -> None:
    every = ((), ("[0-3].weight",), ("*",))
    budgets = [suggested(optimizer_state_dtype="8bit", optimizer_state_fp32=patterns) for patterns in every]
    assert budgets[1] - budgets[0] == pytest.approx(budgets[2] - budgets[1], rel=0.1)
    assert budgets[1] - budgets[0] == pytest.approx(4 * (8 - 2.03), rel=0.1)  # MiB of four matrices


# -- refusals and names ---------------------------------------------------------------------------


def test_a_pattern_that_matches_no_trainable_parameter_is_refused(tmp_path: Path) -> None:
    for patterns in (["*.bias", "*.wieght"], ["Tokens.*"], ["tokens.weight"]):
        model = case("gpt").model
        model.get_parameter("tokens.weight").requires_grad_(patterns == ["Tokens.*"])
        config = config_for(tmp_path, optimizer_state_dtype="bf16", optimizer_state_fp32=patterns)
        trained = [p for p in model.parameters() if p.requires_grad]
        with pytest.raises(ConfigError, match="matches no trainable parameter") as caught:
            infinity.wrap(model, torch.optim.AdamW(trained), config)
        assert repr(patterns[-1]) in str(caught.value)
        assert "positions.weight" in str(caught.value.found)
        config = config.replace(optimizer_state_fp32="*.bias")
        infinity.close(infinity.wrap(model, torch.optim.AdamW(trained), config)[1])


def test_patterns_change_nothing_where_all_moments_are_fp32(tmp_path: Path) -> None:
    """So a run may be told that all of its moments are fp32 from now on."""
    layouts = []
    for patterns in ([], ["*.bias", "nothing"]):
        model, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path / "a", optimizer_state_fp32=patterns)
        layouts.append([unit.layout for unit in engine_of(model).units])
        infinity.close(optimizer)
    assert layouts[0] == layouts[1]


def test_patterns_are_for_names_without_the_prefix_of_a_compiled_module(tmp_path: Path) -> None:
    model: Any = case("gpt").model
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    patterns = ["blocks.0.mlp.0.weight", "norm.*"]
    config = config_for(tmp_path, optimizer_state_dtype="bf16", optimizer_state_fp32=patterns)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine = engine_of(model)
    kept = {s.name for s in engine.params.values() if engine.states.moments_of(s)[0].precision == "fp32"}
    assert kept == {"blocks.0._orig_mod.mlp.0.weight", "norm.weight", "norm.bias"}
    infinity.close(optimizer)


def test_a_model_for_inference_has_no_moments_and_takes_any_pattern(tmp_path: Path) -> None:
    config = config_for(tmp_path, optimizer_state_dtype="bf16", optimizer_state_fp32=["nothing"])
    infinity.close(infinity.inference(case("gpt").model, config))


def test_state_of_an_optimizer_that_has_stepped_is_taken_over(tmp_path: Path) -> None:
    model = case("gpt").model
    plain = OPTIMIZERS["adamw"](model.parameters())
    go_on(model, plain, 0, 2)
    theirs = {n: dict(plain.state[p]) for n, p in model.named_parameters()}
    config = config_for(tmp_path, optimizer_state_dtype="8bit", optimizer_state_fp32=PATTERNS)
    model, optimizer = infinity.wrap(model, plain, config)
    for name, kinds in state_of(model).items():
        form = "fp32" if name in matching(PATTERNS) else "8bit"
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kinds[kind], as_kept(kind, theirs[name][kind], form)), (name, kind)
    assert {plan.state_tier for plan in engine_of(model).tiers.plans} == {Tier.NVME}
    infinity.close(optimizer)
