"""Handlers of signals wait for the end of a commit: [Note: commits]."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ThreadError

from .offloaded import ON_NVME, config_for, wrap_adamw

X = torch.ones(2, 8)


class Interrupt(Exception):
    """What a handler raises; no KeyboardInterrupt, so that code which catches errors may meet it."""


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """SIGUSR1 raises, and SIGUSR2 notes that it came."""
    came: list[int] = []

    def raises(number: int, frame: Any) -> None:
        raise Interrupt

    before = [signal.signal(signal.SIGUSR1, raises)]
    before.append(signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number)))
    yield came
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_they_run_at_the_end_and_each_of_them(tmp_path: Path, handlers: list[int]) -> None:
    model, optimizer = wrap_adamw(net(), config_for(tmp_path, **ON_NVME))
    commits, reached = engine_of(model).commits, []

    def call() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        reached.append(True)

    with pytest.raises(Interrupt):
        commits.run(call)
    assert reached
    commits.run(lambda: None)
    assert handlers == [signal.SIGUSR2]
    infinity.close(optimizer)


def test_one_that_calls_the_engine_where_a_commit_waits_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrap_adamw(net(), config_for(tmp_path, **ON_NVME))
    commits, never = engine_of(model).commits, threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: infinity.flush(optimizer))

    def waits() -> None:
        signal.raise_signal(signal.SIGUSR1)
        commits._bell.wait(never.is_set)

    try:
        with pytest.raises(ThreadError, match="the handler of a signal calls the engine"):
            commits.run(waits)
        signal.raise_signal(signal.SIGUSR1)  # between calls it may
    finally:
        signal.signal(signal.SIGUSR1, before)
    infinity.close(optimizer)


def test_a_wrap_that_is_interrupted_can_be_made_again(
    tmp_path: Path, handlers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity.api import engine, wrap

    inner = engine.Engine.__init__

    def interrupted(*args: Any, **options: Any) -> None:
        inner(*args, **options)
        signal.raise_signal(signal.SIGUSR1)

    model, config = net(), config_for(tmp_path, **ON_NVME)
    values = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(engine.Engine, "__init__", interrupted)
    assert wrap.Engine is engine.Engine
    with pytest.raises(Interrupt):
        wrap_adamw(model, config)
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), values))
    again, optimizer = wrap_adamw(model, config)
    again(X).sum().backward()
    optimizer.step()
    infinity.close(optimizer)


def test_a_default_device_is_not_the_engines(tmp_path: Path) -> None:
    model, optimizer = wrap_adamw(net(), config_for(tmp_path, **ON_NVME))
    model(X).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        state = optimizer.state_dict()
    assert all(v.device.type == "cpu" for of in state["state"].values() for v in of.values())
    optimizer.load_state_dict(state)
    infinity.close(optimizer)
