"""An exception from a signal handler, anywhere: right values or a typed error, never a hang.

`INFINITY_INTERRUPT_SEED=7 pytest tests/test_interrupts.py` draws other samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.core.spans import Recorder
from infinity.optim import update
from infinity.params.load import Load
from infinity.params.updates import Updates

from .models import case
from .offloaded import RESIDENT, config_for, wrap_adamw
from .quick import quick

SEED = int(os.environ.get("INFINITY_INTERRUPT_SEED", "0"))


def outcomes_of(folder: Path, kind: str, first: int, count: int, timeout: float) -> list[dict[str, Any]]:
    """Run interrupted loops in a process of their own, which has no threads; return how each ended."""
    out = folder / "outcomes.json"
    command = [sys.executable, "-m", "tests.interrupts", "--kind", kind, "--out", str(out)]
    command += ["--first", str(1000 * SEED + first), "--count", str(count)]
    subprocess.run(command, cwd=Path(__file__).parents[1], timeout=timeout, check=True)
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


class Handler(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def interrupted(seconds: float = 0.1) -> Any:
    """Expect that a handler, called after `seconds`, ends what the block waits for."""

    def handler(number: int, frame: Any) -> None:
        raise Handler

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(Handler):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
def test_a_step_that_an_interrupt_ends_is_made_wholly(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("interrupted", "plain"):
        (tmp_path / name).mkdir()
        this = case("gpt")
        config = config_for(tmp_path / name, update="sync", **settings)
        model, optimizer = wrap_adamw(this.model, config, lr=1e-2)
        this.loss(model, this.batches[0]).backward()
        if name == "interrupted":
            gate, inner = threading.Event(), update._compute

            def compute(*args: Any, gate: Any = gate, inner: Any = inner, **mode: Any) -> None:
                assert gate.wait(60)
                inner(*args, **mode)

            monkeypatch.setattr(update, "_compute", compute)
            with interrupted():
                optimizer.step()
            threading.Timer(0.1, gate.set).start()
            if settings:  # a look waits for the values
                assert not torch.equal(model.head.weight, case("gpt").model.head.weight)
            assert optimizer.steps == 1
            monkeypatch.undo()
        else:
            optimizer.step()
        optimizer.zero_grad()
        loss = this.loss(model, this.batches[1])
        loss.backward()
        optimizer.step()
        found.append((loss.item(), {n: v.clone() for n, v in model.state_dict().items()}))
        assert optimizer.steps == 2
        infinity.close(optimizer)
    (a, weights), (b, wanted) = found
    assert a == b
    assert all(torch.equal(weights[n], v) for n, v in wanted.items())


def test_threads_may_look_at_a_parameter_while_its_update_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path, **RESIDENT), lr=1e-2)
    residency, inner, found = engine_of(model).residency, update._compute, []

    def compute(*args: Any, **mode: Any) -> None:
        time.sleep(0.02)  # all that look come before the update is over
        inner(*args, **mode)

    this.loss(model, this.batches[0]).backward()
    monkeypatch.setattr(update, "_compute", compute)
    optimizer.step()
    threads = [threading.Thread(target=lambda: found.append(model.head.weight.sum())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    assert type(model.head.weight) is torch.nn.Parameter
    assert residency.units[6].arriving is None
    assert found == [model.head.weight.sum()] * 3
    infinity.close(optimizer)


def test_a_sync_step_that_fails_halfway_is_told_at_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path, update="sync", **RESIDENT), lr=1e-2)
    inner, calls = update._compute, []

    def fail(*args: Any, **mode: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise ArithmeticError
        inner(*args, **mode)

    monkeypatch.setattr(update, "_compute", fail)
    this.loss(model, this.batches[0]).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    monkeypatch.undo()
    for use in (optimizer.step, model.state_dict, lambda: this.loss(model, this.batches[0])):
        with pytest.raises(ArithmeticError):
            use()
    infinity.close(optimizer)


def test_a_wait_for_an_update_may_be_interrupted_and_made_again(tmp_path: Path) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path), lr=1e-2)
    chunk = engine_of(model).units[0].layout.chunks[0]
    pending = Updates(Recorder())
    pending.post([chunk])
    with interrupted(0.02):
        pending.wait_unit(chunk.unit)
    threading.Timer(0.02, lambda: pending.finish(chunk)).start()
    pending.wait_unit(chunk.unit)
    infinity.close(optimizer)


def test_a_load_is_started_once(tmp_path: Path) -> None:
    this = case("gpt")
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path), lr=1e-2)
    engine = engine_of(model)
    layout = engine.units[1].layout
    target = torch.zeros(layout.gathered_nbytes, dtype=torch.uint8)
    slots = {c.id: engine.store.versions.slot(c.id, "copy") for c in layout.chunks}
    load = Load(target, layout.chunks, slots, None)
    assert not load.started
    assert not load.is_over()
    engine.loader.start(load)
    engine.loader.start(load, urgent=True)
    assert load.started
    event = load.wait_issued()
    assert event is not None
    event.wait()
    engine.loader.start(load)
    assert not load.chunks
    with infinity.gathered(model):
        assert torch.equal(target, engine.units[1].view(0, layout.gathered_nbytes))
    infinity.close(optimizer)


def check(outcomes: list[dict[str, Any]], count: int) -> None:
    failed = [o for o in outcomes if o["result"] not in ("right", "typed")]
    assert not failed, json.dumps(failed, indent=1)[:8000]
    assert len(outcomes) == count
    assert all(o["fired"] for o in outcomes)
    # Most interrupts cost nothing; an engine that always refuses to go on is not what is meant.
    assert sum(o["result"] == "typed" for o in outcomes) <= 0.1 * count + 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("first", "count"), quick([(0, 3), (3, 1)], [(0, 3)])
)  # the first three: each update
def test_a_loop_goes_on_after_an_exception_at_any_point(first: int, count: int, tmp_path: Path) -> None:
    check(outcomes_of(tmp_path, "traced", first, count, 250), count)


@pytest.mark.nightly
def test_200_loops_go_on_after_an_exception_at_any_point(tmp_path: Path) -> None:
    check(outcomes_of(tmp_path, "traced", 0, 200, 3500), 200)


@pytest.mark.nightly
def test_30_loops_go_on_after_a_signal_at_any_moment(tmp_path: Path) -> None:
    check(outcomes_of(tmp_path, "signal", 0, 30, 3500), 30)
