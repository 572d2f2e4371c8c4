"""One-step delayed updates, against a plain loop with the same arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, StateDictError, WrapError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.optim.optimizer import OffloadOptimizer

from .models import Case, case
from .offloaded import ON_HOST, ON_NVME, assert_same, config_for, train_offloaded, wrap_adamw
from .reference import adamw_reference

WARMUP = 2
STEPS = 7
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": ON_HOST,
    "nvme": ON_NVME,
    "state on nvme": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
    "state on host": {"parameters": "device", "optimizer_state": "host", "gradients": "device"},
    "device": {"parameters": "device", "optimizer_state": "device", "gradients": "device"},
    "state on device": {"parameters": "host", "optimizer_state": "device", "gradients": "nvme"},
    "tight": {**ON_NVME, "device_memory": "1MiB", "update_depth": 1, "read_ahead_memory": 0},
    "split": {
        "parameters": {"device": 0.4, "host": 0.3, "nvme": 0.3},
        "optimizer_state": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "gradients": {"host": 0.5, "nvme": 0.5},
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The evaluations of a run come after these steps.
LOOKS = (1, 3, 4)


class Found(NamedTuple):
    losses: list[float]
    seen: list[float]  # by `eval()`, after the steps of LOOKS
    newest: list[list[torch.Tensor]]  # the masters, after each step or after the last


def of(name: str, dtype: str) -> Case:
    return case(name, layers=1) if name == "moe" else case(name, layers=2, tied=dtype == "bf16")


@functools.cache
def plain(name: str, dtype: str, warmup: int = WARMUP) -> Found:
    """θ_t = Adam(θ_{t−1}, ∇L_t(θ_{t−2})) after `warmup` steps, in plain torch.

    Several tests have what it returns: only for looking at.
    """
    this, found = of(name, dtype), Found([], [], [])
    params = list(this.model.parameters())
    newest = [p.detach().float().clone() for p in params]
    moments = [(torch.zeros(p.numel()), torch.zeros(p.numel())) for p in params]
    updates = [0] * len(params)

    def fill(values: list[torch.Tensor]) -> None:
        for param, value in zip(params, values, strict=True):
            param.data = value.to(DTYPES[dtype])

    fill(newest)
    for t in range(1, STEPS + 1):
        before = [n.clone() for n in newest]
        loss = this.loss(this.model, this.batches[t % len(this.batches)])
        loss.backward()
        found.losses.append(loss.item())
        options = {"lr": 1e-3 * t, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
        for i, p in enumerate(params):
            if p.grad is not None:
                updates[i] += 1
                adamw_reference(newest[i].view(-1), *moments[i], p.grad.view(-1), step=updates[i], **options)
                p.grad = None
        if t in LOOKS:
            fill(newest)
            found.seen.append(glance(this))
        found.newest.append([n.clone() for n in newest])
        fill(before if t > warmup else newest)  # what the forward of step t+1 sees
    return found


def glance(case: Case) -> float:
    with torch.no_grad():
        loss = case.loss(case.model.eval(), case.batches[0]).item()
    case.model.train()
    return loss


def offloaded(
    case: Case,
    config: infinity.Config,
    steps: int = STEPS,
    *,
    looks: bool = False,
    between: Callable[[OffloadOptimizer, int], None] | None = None,
) -> Found:
    """Train as `plain` does."""
    found = Found([], [], [])
    model, adam = wrap_adamw(case.model, config, lr=1e-3)
    try:
        for t in range(1, steps + 1):
            adam.param_groups[0]["lr"] = 1e-3 * t
            loss = case.loss(model, case.batches[t % len(case.batches)])
            loss.backward()
            found.losses.append(loss.item())
            adam.step()
            adam.param_groups[0]["lr"] = 17.0  # the next step's business
            adam.zero_grad()
            if looks and t in LOOKS:
                found.seen.append(glance(case))
            if between is not None:
                between(adam, t)
        found.newest.append(masters_of(model))
        return found
    finally:
        infinity.close(adam)


def masters_of(model: Any) -> list[torch.Tensor]:
    engine = engine_of(model)
    values = []
    for param in model.parameters():
        sharded = engine.params[param]
        state = engine.states.read([sharded])[sharded]
        values.append(state["master"] if "master" in state else engine.states.copies_of([sharded])[sharded])
    return values


def delayed(folder: Path, placement: str = "nvme", **settings: Any) -> infinity.Config:
    mode = {"update": "delayed", "delay_warmup_steps": WARMUP}
    return config_for(folder, **{**PLACEMENTS[placement], **mode, **settings})


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "placement", "dtype"),
    [
        ("gpt", "host", "fp32"),
        ("moe", "nvme", "fp32"),
        ("gpt", "state on nvme", "bf16"),
        ("moe", "state on host", "fp32"),
        ("gpt", "device", "fp32"),
        ("moe", "state on device", "fp32"),
        ("gpt", "tight", "fp32"),
        ("gpt", "split", "bf16"),
    ],
)
def test_equals_a_plain_loop_and_who_looks_sees_the_newest(
    name: str, placement: str, dtype: str, tmp_path: Path
) -> None:
    """An evaluation, a state dict, gathered and the optimizer's state dict show θ_t; the training does not
    notice."""
    wanted = plain(name, dtype)

    def look(adam: OffloadOptimizer, t: int) -> None:
        if t in (1, STEPS):
            engine_of(adam).updater.wait()
            drift = infinity.metrics(adam)["delayed/drift"]
            assert drift == 0 if t <= WARMUP else 0 < drift < 1
        if t not in (2, 4, 6):
            return
        newest = [v.to(DTYPES[dtype]) for v in wanted.newest[t - 1]]
        model: Any = engine_of(adam).model()
        params = list(model.parameters())
        if t != 4:
            saved = model.state_dict()
            assert equal([saved[n] for n, _ in model.named_parameters()], newest)
        with infinity.gathered(params):
            assert equal([p.detach() for p in params], newest)
        adam.state_dict()

    found = offloaded(of(name, dtype), delayed(tmp_path, placement, dtype=dtype), looks=True, between=look)
    assert (found.losses, found.seen) == (wanted.losses, wanted.seen)
    assert equal(found.newest[-1], wanted.newest[-1])
    assert wanted.losses != plain(name, dtype, STEPS).losses  # the delay shows


@pytest.mark.first
@pytest.mark.parametrize("training", [{"accumulate": 3}, {"dtype": "fp16", "loss_scale_window": 2}])
def test_placement_never_changes_results(tmp_path: Path, training: dict[str, Any]) -> None:
    """Also with accumulation, with clipping that sometimes triggers, with overflows that skip steps."""
    settings = dict(training)
    accumulate = settings.pop("accumulate", 1)
    runs = []
    for placement in ("host", "tight", "split"):
        folder = tmp_path / placement
        folder.mkdir()
        config = delayed(folder, placement, max_grad_norm=0.9, loss_scale=2.0**20, **settings)
        runs.append(train_offloaded(of("moe", "fp32"), config, steps=8, accumulate=accumulate))
    for run in runs[1:]:
        assert_same(run, runs[0])
    if settings:
        assert len(set(runs[0].scales)) > 1  # some steps were skipped, others not


def test_the_second_copy_is_in_the_budget(tmp_path: Path) -> None:
    sizes = {}
    for update in ("overlap", "delayed"):
        _, adam = wrap_adamw(of("gpt", "fp32").model, delayed(tmp_path, "state on nvme", update=update))
        engine = engine_of(adam)
        sizes[update] = engine.footprint.host
        infinity.close(adam)
    assert sizes["delayed"]["parameters being updated"] == sum(
        ceil_to(c.copy_nbytes, ALIGNMENT) for u in engine.units for c in u.layout.chunks
    )
    assert sizes["delayed"]["gradients"] == 2 * sizes["overlap"]["gradients"]
    fixed = sizes["delayed"]["parameters being updated"] + sizes["delayed"]["gradients"]
    with pytest.raises(BudgetError, match="parameters being updated"):
        wrap_adamw(of("gpt", "fp32").model, delayed(tmp_path, "state on nvme", host_memory=fixed))


def test_a_model_that_is_loaded_after_its_optimizer_is_refused(tmp_path: Path) -> None:
    """It would drop the version that the next forward uses; the cures work."""
    this = of("gpt", "fp32")
    model, adam = wrap_adamw(this.model, delayed(tmp_path, "state on host"), lr=1e-3)

    def step(t: int) -> float:
        loss = this.loss(model, this.batches[t % len(this.batches)])
        loss.backward()
        adam.step()
        adam.zero_grad()
        return float(loss)

    try:
        for t in range(5):
            step(t)
        weights = {n: v.clone() for n, v in model.state_dict().items()}
        states = adam.state_dict()
        wanted = [step(t) for t in range(5, 8)]
        adam.load_state_dict(states)
        with pytest.raises(StateDictError, match="flush"):
            model.load_state_dict(weights)
        infinity.flush(adam)
        model.load_state_dict(weights)
        adam.load_state_dict(states)
        assert [step(t) for t in range(5, 8)] == wanted
        model.load_state_dict(weights)  # steps were made since
    finally:
        infinity.close(adam)


def test_who_loads_the_state_of_delayed_updates_without_delay(tmp_path: Path) -> None:
    """A run whose updates are not delayed begins with the newest; an optimizer of torch's is refused."""
    saved: dict[str, Any] = {}

    def save(adam: OffloadOptimizer, step: int) -> None:
        model: Any = engine_of(adam).model()
        saved.update(model={n: v.clone() for n, v in model.state_dict().items()}, adam=adam.state_dict())

    offloaded(of("gpt", "fp32"), delayed(tmp_path), 5, between=save)
    assert all("front" in values for values in saved["adam"]["state"].values())
    config = delayed(tmp_path).replace(update="sync")
    model, adam = wrap_adamw(of("gpt", "fp32").model, config, lr=1e-3)
    try:
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        assert equal([*model.state_dict().values()], [*saved["model"].values()])
        assert not any("front" in values for values in adam.state_dict()["state"].values())
    finally:
        infinity.close(adam)
    theirs = of("gpt", "fp32").model
    torchs = torch.optim.AdamW(theirs.parameters())
    torchs.load_state_dict(saved["adam"])
    with pytest.raises(WrapError, match="what `wrap` returns"):
        infinity.wrap(theirs, torchs, delayed(tmp_path))
