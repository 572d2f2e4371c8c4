"""The update behind the next forward is safe whatever the user does meanwhile."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import StorageError
from infinity.optim import update

from .models import case
from .offloaded import config_for

RESIDENT = {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"}


class Gate:
    """Holds the kernel of every chunk until it is opened; counts the chunks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.computed = 0
        inner = update._compute

        def compute(*args: Any, **mode: Any) -> None:
            assert self._open.wait(60)
            inner(*args, **mode)
            self.computed += 1

        monkeypatch.setattr(update, "_compute", compute)

    def open_soon(self, seconds: float = 0.2) -> None:
        threading.Timer(seconds, self._open.set).start()


def wrapped(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    this = case("gpt", layers=2, width=32)
    config = config_for(folder, **settings)
    model, optimizer = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters(), lr=1e-2), config)
    return this, model, optimizer


def backward(this: Any, step: int = 0) -> None:
    this.loss(this.model, this.batches[step]).backward()


@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
def test_step_returns_before_the_update_and_the_forward_waits_for_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, **settings)
    gate = Gate(monkeypatch)
    backward(this)
    optimizer.step()
    optimizer.zero_grad()
    assert gate.computed == 0
    assert engine_of(model).updates.busy()
    gate.open_soon()
    loss = this.loss(model, this.batches[1]).item()
    monkeypatch.undo()
    infinity.close(optimizer)

    (tmp_path / "sync").mkdir()
    that, sync_model, sync_optimizer = wrapped(tmp_path / "sync", update="sync", **settings)
    backward(that)
    sync_optimizer.step()
    assert that.loss(sync_model, that.batches[1]).item() == loss
    infinity.close(sync_optimizer)


@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
def test_a_delayed_update_runs_beside_forward_and_backward(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, update="delayed", delay_warmup_steps=1, **settings)
    for step in range(3):
        backward(this, step)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.updater.wait()
    backward(this, 3)
    gate = Gate(monkeypatch)
    optimizer.step()
    optimizer.zero_grad()
    backward(this, 4)  # all of it, gradients included
    engine.gradients.wait()
    assert gate.computed == 0
    assert engine.updates.busy()
    gate.open_soon()
    optimizer.step()
    assert gate.computed >= len(engine.updates._chunks)
    infinity.close(optimizer)


def test_everything_a_user_may_do_after_step_means_what_it_means_in_torch(tmp_path: Path) -> None:
    """The scalars are those of the call; gradients may be dropped or made at once."""
    runs = []
    for mode in ("sync", "overlap"):
        folder = tmp_path / mode
        folder.mkdir()
        this, model, optimizer = wrapped(folder, update=mode, max_grad_norm=0.5)
        losses = []
        for step in range(6):
            for _ in range(1 + step % 3):  # accumulation that changes
                loss = this.loss(model, this.batches[step])
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
            if step == 2:
                backward(this, 5)  # onto the gradients that the update still reads
                optimizer.step()
            if step == 3:
                model.eval()
                with torch.no_grad():
                    losses.append(this.loss(model, this.batches[0]).item())
                model.train()
            if step == 4:
                losses.append(float(sum(v.double().sum() for v in model.state_dict().values())))
            optimizer.zero_grad(set_to_none=step != 1)
        state = optimizer.state_dict()["state"]
        runs.append((losses, model.state_dict(), state))
        infinity.close(optimizer)
    (a, params_a, state_a), (b, params_b, state_b) = runs
    assert a == b
    for name, value in params_a.items():
        assert torch.equal(value, params_b[name]), name
    for index, values in state_a.items():
        for key, value in values.items():
            assert torch.equal(value, state_b[index][key]), (index, key)


@pytest.mark.parametrize(
    ("mode", "settings"), [("sync", {}), ("overlap", RESIDENT), ("delayed", {}), ("delayed", RESIDENT)]
)
def test_an_update_that_fails_is_told_at_each_call_and_nobody_waits(
    mode: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, update=mode, delay_warmup_steps=0, **settings)
    inner, calls = update._compute, []

    def fail(*args: Any, **more: Any) -> None:
        calls.append(args)
        if len(calls) > 2:  # after some chunks
            raise StorageError("the drive is gone", cure="another drive")
        inner(*args, **more)

    monkeypatch.setattr(update, "_compute", fail)
    backward(this)
    with pytest.raises(StorageError) if mode == "sync" else contextlib.nullcontext():
        optimizer.step()
    for use in (
        optimizer.step,
        lambda: this.loss(model.eval(), this.batches[0]),
        lambda: (backward(this, 1), optimizer.step()),
        lambda: infinity.flush(optimizer),
        model.state_dict,
        optimizer.state_dict,
        lambda: infinity.gathered(model).__enter__(),
        lambda: model.load_state_dict({}, strict=False),
    ):
        with pytest.raises(StorageError, match="the drive is gone"):
            use()
        model.train()
    monkeypatch.undo()
    infinity.close(optimizer)


@pytest.mark.parametrize("settings", [{}, {"update": "delayed", "delay_warmup_steps": 0}, RESIDENT])
def test_nothing_grows_in_the_steady_state(tmp_path: Path, settings: dict[str, Any]) -> None:
    this, model, optimizer = wrapped(tmp_path, **settings)
    engine = engine_of(model)

    def step(number: int) -> tuple[int, int, int]:
        backward(this, number % 8)
        optimizer.step()
        optimizer.zero_grad()
        in_use = sum(q.total for q in engine.pool.stats().values())
        files = len(list(Path("/proc/self/fd").iterdir()))
        return in_use, files, threading.active_count()

    step(0)
    first = step(1)
    assert all(step(i) == first for i in range(2, 8))
    infinity.close(optimizer)
    assert all(q.in_use == 0 for q in engine.pool.stats().values())
