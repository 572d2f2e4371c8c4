"""An exception from a signal handler, anywhere: right values or a typed error, never a hang.

`INFINITY_INTERRUPT_SEED=7 pytest tests/test_interrupts.py` draws other samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.optim import update

from . import interrupts
from .models import case
from .offloaded import RESIDENT, config_for, wrap_adamw

SEED = int(os.environ.get("INFINITY_INTERRUPT_SEED", "0"))


class Handler(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def interrupted() -> Any:
    """Expect that a handler, called when the test starts the timer, ends what the block waits for."""

    def handler(number: int, frame: Any) -> None:
        raise Handler

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(Handler):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("mode", "settings"), [("sync", RESIDENT), ("sync", {}), ("delayed", {})], ids=str)
def test_a_step_whose_wait_an_interrupt_ends_is_made_wholly(
    mode: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("interrupted", "plain"):
        (tmp_path / name).mkdir()
        this = case("gpt", layers=2, width=32)
        config = config_for(tmp_path / name, update=mode, delay_warmup_steps=0, **settings)
        before = this.model.head.weight.detach().clone()
        model, optimizer = wrap_adamw(this.model, config, lr=1e-2)
        this.loss(model, this.batches[0]).backward()
        if name == "interrupted":
            gate, inner = threading.Event(), update._compute

            def compute(*args: Any, gate: Any = gate, inner: Any = inner, **more: Any) -> None:
                if not gate.is_set():
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                assert gate.wait(60)
                inner(*args, **more)

            monkeypatch.setattr(update, "_compute", compute)
            with interrupted():
                optimizer.step()
                model.state_dict()  # waits for an update that `step` left to its thread
            threading.Timer(0.1, gate.set).start()
            if settings:  # a look waits for the values
                assert not torch.equal(model.head.weight, before)
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


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("traced", 3, marks=pytest.mark.integration),  # one for each way to update
        *(pytest.param(kind, n, marks=pytest.mark.nightly) for kind, n in (("traced", 200), ("signal", 30))),
    ],
)
def test_loops_go_on_after_an_exception_at_any_point(kind: str, count: int) -> None:
    outcomes = [interrupts.run(1000 * SEED + n, kind) for n in range(count)]
    failed = [o for o in outcomes if o["result"] not in ("right", "typed")]
    assert not failed, json.dumps(failed, indent=1)[:8000]
    assert all(o["fired"] for o in outcomes)
    # Most interrupts cost nothing; an engine that always refuses to go on is not what is meant.
    assert sum(o["result"] == "typed" for o in outcomes) <= 0.1 * count + 1
