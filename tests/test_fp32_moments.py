"""Parameters whose moments stay fp32 beside others in bf16 or 8 bits (`Config.optimizer_state_fp32`): budgets
and refusals. test_optimizers.py has their bits and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ConfigError
from infinity.core.sizes import Tier
from infinity.planning.planner import Model, checkpoint_nbytes

from .models import case
from .offloaded import config_for
from .test_optimizers import FORMS, PATTERNS, as_kept, go_on, matching, state_of, wrapped
from .test_wrap_refusals import suggested
from .whole import OPTIMIZERS


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_planned_bytes_of_checkpoints_and_arenas_are_those_that_are_there(form: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path / "a", **FORMS[f"{form}, some fp32"])
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


def test_state_of_an_optimizer_that_has_stepped_is_taken_over(tmp_path: Path) -> None:
    model = case("gpt").model
    plain = OPTIMIZERS["adamw"](model.parameters())
    go_on(model, plain, 0, 2)
    theirs = {n: dict(plain.state[p]) for n, p in model.named_parameters()}
    config = config_for(tmp_path, **FORMS["8bit, some fp32"])
    model, optimizer = infinity.wrap(model, plain, config)
    for name, kinds in state_of(model).items():
        form = "fp32" if name in matching(PATTERNS) else "8bit"
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kinds[kind], as_kept(kind, theirs[name][kind], form)), (name, kind)
    assert {plan.state_tier for plan in engine_of(model).tiers.plans} == {Tier.NVME}
    infinity.close(optimizer)
