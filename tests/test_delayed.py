"""One-step delayed updates, against a plain loop with the same arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, ParameterChangedError, ParameterError, StateDictError, WrapError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.hardware.adam_reference import adamw_reference
from infinity.optim.chunk_io import ChunkIO
from infinity.optim.optimizer import OffloadOptimizer
from infinity.optim.update import Drift

from .models import Case, case
from .offloaded import ON_HOST, ON_NVME, assert_same, config_for, train_offloaded, wrap_adamw
from .quick import covering

WARMUP = 3
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


class Found(NamedTuple):
    losses: list[float]
    seen: list[float]  # by `eval()`, after some of the steps
    masters: list[torch.Tensor]


@functools.cache
def plain(
    name: str, dtype: torch.dtype, steps: int, warmup: int, look: tuple[int, ...] = (), **sizes: Any
) -> Found:
    """θ_t = Adam(θ_{t−1}, ∇L_t(θ_{t−2})) after `warmup` steps, in plain torch.

    Several tests have what it returns: only for looking at.
    """
    this = case(name, **sizes)
    model, found = this.model, Found([], [], [])
    params = list(model.parameters())
    newest = [p.detach().float().clone() for p in params]
    moments = [(torch.zeros(p.numel()), torch.zeros(p.numel())) for p in params]
    updates = [0] * len(params)

    def fill(values: list[torch.Tensor]) -> None:
        for param, value in zip(params, values, strict=True):
            param.data = value.to(dtype)

    fill(newest)
    for t in range(1, steps + 1):
        before = [n.clone() for n in newest]
        loss = this.loss(model, this.batches[t % len(this.batches)])
        loss.backward()
        found.losses.append(loss.item())
        options = {"lr": 1e-3 * t, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
        for i, p in enumerate(params):
            if p.grad is not None:
                updates[i] += 1
                adamw_reference(newest[i].view(-1), *moments[i], p.grad.view(-1), step=updates[i], **options)
                p.grad = None
        if t in look:
            fill(newest)
            found.seen.append(glance(this))
        fill(before if t > warmup else newest)  # what the forward of step t+1 sees
    found.masters.extend(newest)
    return found


def glance(case: Case) -> float:
    with torch.no_grad():
        loss = case.loss(case.model.eval(), case.batches[0]).item()
    case.model.train()
    return loss


def offloaded(
    case: Case,
    config: infinity.Config,
    steps: int,
    look: tuple[int, ...] = (),
    between: Callable[[OffloadOptimizer, int], None] | None = None,
) -> Found:
    model, found = case.model, Found([], [], [])
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    try:
        for t in range(1, steps + 1):
            adam.param_groups[0]["lr"] = 1e-3 * t
            loss = case.loss(model, case.batches[t % len(case.batches)])
            loss.backward()
            found.losses.append(loss.item())
            adam.step()
            adam.param_groups[0]["lr"] = 17.0  # the next step's business
            adam.zero_grad()
            if t in look:
                found.seen.append(glance(case))
            if between is not None:
                between(adam, t)
        found.masters.extend(masters_of(model))
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


def check(found: Found, wanted: Found) -> None:
    assert found.losses == wanted.losses
    assert found.seen == wanted.seen
    for a, b in zip(found.masters, wanted.masters, strict=True):
        assert torch.equal(a, b)


@covering
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_equals_a_plain_loop(tmp_path: Path, name: str, placement: str) -> None:
    wanted = plain(name, torch.float32, 9, WARMUP)
    check(offloaded(case(name), delayed(tmp_path, placement), 9), wanted)
    assert wanted.losses != plain(name, torch.float32, 9, 9).losses  # the delay shows


@pytest.mark.first
@pytest.mark.parametrize("placement", ["nvme", "host", "state on nvme", "split"])
def test_equals_a_plain_loop_in_bf16(tmp_path: Path, placement: str) -> None:
    wanted = plain("gpt", torch.bfloat16, 9, WARMUP, tied=True)
    check(offloaded(case("gpt", tied=True), delayed(tmp_path, placement, dtype="bf16"), 9), wanted)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_eval_sees_the_newest_and_changes_nothing(tmp_path: Path, placement: str) -> None:
    look = (1, 3, 4, 5, 8)
    wanted = plain("gpt", torch.float32, 9, WARMUP, look)
    check(offloaded(case("gpt"), delayed(tmp_path, placement), 9, look), wanted)


@pytest.mark.first
@pytest.mark.parametrize("placement", ["nvme", "host", "state on nvme", "split"])
def test_looks_at_the_newest_change_nothing(tmp_path: Path, placement: str) -> None:
    """state_dict, gathered and the optimizer's state dict show θ_t; the training does not notice."""
    newest: list[list[torch.Tensor]] = []

    def look(adam: OffloadOptimizer, t: int) -> None:
        model = engine_of(adam).model()
        assert model is not None
        params = [p for g in adam.param_groups for p in g["params"]]
        saved = list(model.state_dict().values()) if t % 2 else None
        with infinity.gathered(params):
            held = [p.detach().clone() for p in params]
        states = adam.state_dict()["state"]
        assert len(states) == len(params)
        newest.append(held)
        for a, b in zip(saved or held, held, strict=True):
            assert torch.equal(a, b)

    wanted = plain("gpt", torch.float32, 7, WARMUP)
    check(offloaded(case("gpt"), delayed(tmp_path, placement), 7, between=look), wanted)
    for t in range(1, 8):
        masters = plain("gpt", torch.float32, t, WARMUP).masters
        for a, b in zip(newest[t - 1], masters, strict=True):
            assert torch.equal(a, b)


@pytest.mark.first
@pytest.mark.parametrize("placement", ["nvme", "state on nvme", "split"])
def test_flush_publishes_the_newest(tmp_path: Path, placement: str) -> None:
    def flush(adam: OffloadOptimizer, t: int) -> None:
        infinity.flush(adam)

    wanted = plain("gpt", torch.float32, 8, 8)
    check(offloaded(case("gpt"), delayed(tmp_path, placement), 8, between=flush), wanted)


@pytest.mark.first
@pytest.mark.parametrize("training", [{"accumulate": 3}, {"dtype": "fp16", "loss_scale_window": 2}, {}])
def test_placement_never_changes_results(tmp_path: Path, training: dict[str, Any]) -> None:
    """Also with accumulation, with clipping that sometimes triggers, with overflows that skip steps."""
    settings = dict(training)
    accumulate = settings.pop("accumulate", 1)
    runs = []
    for placement in ("host", "nvme", "state on nvme", "tight", "split"):
        folder = tmp_path / placement
        folder.mkdir()
        config = delayed(folder, placement, max_grad_norm=0.9, loss_scale=2.0**20, **settings)
        runs.append(train_offloaded(case("moe"), config, steps=12, accumulate=accumulate))
    for run in runs[1:]:
        assert_same(run, runs[0])
    if settings:
        assert len(set(runs[0].scales)) > 1  # some steps were skipped, others not


@pytest.mark.first
@pytest.mark.parametrize("placement", ["nvme", "state on nvme"])
def test_a_graph_from_before_an_evaluation_still_works(tmp_path: Path, placement: str) -> None:
    """Forward, evaluation, backward: the backward sees what its forward saw."""
    found = []
    for evaluate in (False, True):
        folder = tmp_path / str(evaluate)
        folder.mkdir()
        run = case("gpt")
        model, adam = wrap_adamw(run.model, delayed(folder, placement))
        try:
            for t in range(7):
                loss = run.loss(model, run.batches[t])
                if evaluate:
                    glance(run)
                loss.backward()
                adam.step()
                adam.zero_grad()
            found.append(masters_of(model))
        finally:
            infinity.close(adam)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_graph_from_before_a_step_fails(tmp_path: Path) -> None:
    run = case("gpt")
    model, adam = wrap_adamw(run.model, delayed(tmp_path, "state on nvme"))
    try:
        for t in range(6):
            run.loss(model, run.batches[t]).backward()
            adam.step()
            adam.zero_grad()
        old = run.loss(model, run.batches[0])
        infinity.flush(adam)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
    finally:
        infinity.close(adam)


def test_edits(tmp_path: Path) -> None:
    run = case("gpt")
    model, adam = wrap_adamw(run.model, delayed(tmp_path, "state on nvme"), lr=0.0)
    first = next(iter(model.parameters()))

    def step(t: int) -> None:
        run.loss(model, run.batches[t]).backward()
        adam.step()
        adam.zero_grad()

    try:
        for t in range(5):
            step(t)
        with infinity.gathered(first, write=True), torch.no_grad():
            first.fill_(0.25)
        step(5)
        assert first.eq(0.25).all()
        step(6)
        assert engine_of(model).states.copies_of([s := engine_of(model).params[first]])[s].eq(0.25).all()
        with torch.no_grad():
            first.mul_(2)
        run.loss(model, run.batches[7]).backward()
        with pytest.raises(ParameterChangedError, match=r"infinity\.flush"):
            adam.step()
        infinity.flush(adam)
        assert first.eq(0.25).all()
        adam.step()
    finally:
        infinity.close(adam)
    assert first.eq(0.25).all()


def test_two_versions_at_once_are_refused(tmp_path: Path) -> None:
    run = case("gpt")
    model, adam = infinity.wrap(run.model, torch.optim.AdamW(run.model.parameters()), delayed(tmp_path))
    try:
        for t in range(6):
            run.loss(model, run.batches[t]).backward()
            adam.step()
            adam.zero_grad()
        with infinity.gathered(model), pytest.raises(ParameterError, match="two versions"):
            run.loss(model, run.batches[0])
        run.loss(model, run.batches[6]).backward()
        adam.step()
    finally:
        infinity.close(adam)


def test_drift_is_told(tmp_path: Path) -> None:
    drifts: list[float] = []

    def note(adam: OffloadOptimizer, t: int) -> None:
        engine_of(adam).updater.wait()
        drifts.append(infinity.metrics(adam)["delayed/drift"])

    offloaded(case("gpt"), delayed(tmp_path), 6, between=note)
    assert drifts[:WARMUP] == [0.0] * WARMUP
    assert all(0 < d < 1 and math.isfinite(d) for d in drifts[WARMUP:])


def test_drift_is_measured_in_one_chunk_of_each_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is but a figure, and costs a wait where the state is on the device."""
    measured: list[int] = []
    before = Drift.before

    def noted(drift: Drift, io: ChunkIO) -> torch.Tensor | None:
        if (found := before(drift, io)) is not None:
            measured.append(io.chunk.id)
        return found

    monkeypatch.setattr(Drift, "before", noted)
    firsts: list[int] = []

    def note(adam: OffloadOptimizer, t: int) -> None:
        engine = engine_of(adam)
        engine.updater.wait()
        units = [unit.layout.trainable_chunks for unit in engine.units]
        firsts[:] = [chunks[0].id for chunks in units if chunks]
        assert sum(map(len, units)) > len(firsts), "a unit has several chunks"
        assert sorted(measured) == ([] if t <= WARMUP else firsts)
        measured.clear()

    offloaded(case("gpt"), delayed(tmp_path, units=["GPT"]), WARMUP + 2, between=note)


def test_the_second_copy_is_in_the_budget(tmp_path: Path) -> None:
    run = case("gpt")
    sizes = {}
    for update in ("overlap", "delayed"):
        config = delayed(tmp_path, "state on nvme", update=update)
        _, adam = infinity.wrap(run.model, torch.optim.AdamW(run.model.parameters()), config)
        engine = engine_of(adam)
        sizes[update] = engine.footprint.host
        infinity.close(adam)
        run = case("gpt")
    assert sizes["delayed"]["parameters being updated"] == sum(
        ceil_to(c.copy_nbytes, ALIGNMENT) for u in engine.units for c in u.layout.chunks
    )
    assert sizes["delayed"]["gradients"] == 2 * sizes["overlap"]["gradients"]
    fixed = sizes["delayed"]["parameters being updated"] + sizes["delayed"]["gradients"]
    with pytest.raises(BudgetError, match="parameters being updated"):
        wrap_adamw(run.model, delayed(tmp_path, "state on nvme", host_memory=fixed))


@pytest.mark.first
@covering
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["gpt", "moe"])
def test_a_run_goes_on_from_torchs_state_dicts(tmp_path: Path, name: str, placement: str, dtype: str) -> None:
    """As Trainer saves and loads: model and optimizer each on its own, through torch.save."""
    config = delayed(tmp_path, placement, dtype=dtype)
    files = tmp_path / "model.pt", tmp_path / "optimizer.pt"

    def save(adam: OffloadOptimizer, step: int) -> None:
        if step == 6:
            model: Any = engine_of(adam).model()
            torch.save(model.state_dict(), files[0])
            torch.save(adam.state_dict(), files[1])

    wanted = offloaded(case(name), config, 9, between=save)
    again, found = case(name), Found([], [], [])
    model, adam = infinity.wrap(again.model, torch.optim.AdamW(again.model.parameters(), lr=1e-3), config)
    try:
        model.load_state_dict(torch.load(files[0], weights_only=True))
        adam.load_state_dict(torch.load(files[1], weights_only=True))
        saved = torch.load(files[1], weights_only=True)
        assert all(map(torch.equal, _flat(saved), _flat(adam.state_dict())))
        if name == "moe":
            glance(again)  # shows the newest, and changes nothing
        for t in range(7, 10):
            adam.param_groups[0]["lr"] = 1e-3 * t
            loss = again.loss(model, again.batches[t % len(again.batches)])
            loss.backward()
            found.losses.append(loss.item())
            adam.step()
            adam.zero_grad()
        found.masters.extend(masters_of(model))
    finally:
        infinity.close(adam)
    assert found.losses == wanted.losses[6:]
    for a, b in zip(found.masters, wanted.masters, strict=True):
        assert torch.equal(a, b)


def _flat(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    return [v for values in state_dict["state"].values() for _, v in sorted(values.items())]


@pytest.mark.parametrize("placement", ["nvme", "state on host"])
def test_a_model_that_is_loaded_after_its_optimizer_is_refused(tmp_path: Path, placement: str) -> None:
    """It would drop the version that the next forward uses; the cures work."""
    this = case("gpt")
    config = delayed(tmp_path, placement)
    model, adam = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters(), lr=1e-3), config)

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


def test_a_run_whose_updates_are_not_delayed_begins_with_the_newest(tmp_path: Path) -> None:
    wanted, saved = case("gpt"), {}

    def save(adam: OffloadOptimizer, step: int) -> None:
        model: Any = engine_of(adam).model()
        saved.update(model={n: v.clone() for n, v in model.state_dict().items()}, adam=adam.state_dict())

    offloaded(wanted, delayed(tmp_path), 5, between=save)
    assert all("front" in values for values in saved["adam"]["state"].values())
    again = case("gpt")
    config = delayed(tmp_path).replace(update="sync")
    model, adam = infinity.wrap(again.model, torch.optim.AdamW(again.model.parameters(), lr=1e-3), config)
    try:
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        assert all(map(torch.equal, saved["model"].values(), model.state_dict().values()))
        assert not any("front" in values for values in adam.state_dict()["state"].values())
    finally:
        infinity.close(adam)


def test_an_optimizer_of_torch_that_has_loaded_delayed_updates_is_refused(tmp_path: Path) -> None:
    states: dict[str, Any] = {}
    offloaded(case("gpt"), delayed(tmp_path), 5, between=lambda adam, _: states.update(adam.state_dict()))
    model = case("gpt").model
    adam = torch.optim.AdamW(model.parameters())
    adam.load_state_dict(states)
    with pytest.raises(WrapError, match="what `wrap` returns"):
        infinity.wrap(model, adam, delayed(tmp_path))
