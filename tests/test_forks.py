"""A forked child that uses a model of its parent has an answer or `ClosedError`, and never waits for good."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import InfinityError
from infinity.hardware import cpu_adam

from . import inner


def said_by_child(call: Callable[[], Any], seconds: int = 60) -> Any:
    """Return what `call` returns in a fork of this process; a signal ends one that waits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            os.write(writing, json.dumps(call()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as said:
        text = said.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(text)


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except InfinityError as error:
        return type(error).__name__ if error.cure else "no cure"
    except Exception as error:
        return repr(error)
    return "returned"


@pytest.mark.first
@pytest.mark.parametrize(
    ("tier", "update"),
    [("device", "overlap"), ("device", "delayed"), ("host", "overlap"), ("nvme", "delayed")],
)
def test_a_fork_waits_for_nothing_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, update: str
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    config = inner.config(
        device="cpu",
        dtype="bf16",
        parameters=tier,
        optimizer_state="nvme" if tier == "nvme" else "host",
        update=update,
        delay_warmup_steps=0,
        nvme=str(tmp_path),
        device_memory="8MiB",
        host_memory="64MiB",
    )
    model, adam = infinity.wrap(net, torch.optim.AdamW(net.parameters()), config)
    go, began = threading.Event(), threading.Event()
    real = cpu_adam.update_segments

    def held(*args: Any) -> None:
        began.set()
        assert go.wait(120)
        real(*args)

    monkeypatch.setattr(cpu_adam, "update_segments", held)
    x = torch.randn(4, 16)
    weight = model[1].weight
    calls: dict[str, Callable[[], object]] = {
        "look": lambda: weight.sum(),
        "print": lambda: repr(weight),
        "forward": lambda: model(x),
        "gathered": lambda: infinity.gathered(model).__enter__(),
        "gradient": lambda: infinity.gradient(weight),
        "state dict": lambda: model.state_dict(),
        "optimizer's": lambda: adam.state_dict(),
        "step": lambda: adam.step(),
        "flush": lambda: infinity.flush(adam),
        "save": lambda: infinity.save(adam, tmp_path / "saved"),
        "close": lambda: infinity.close(adam),
    }
    try:
        model(x).sum().backward()
        adam.step()
        assert began.wait(60)
        said = said_by_child(lambda: {name: outcome(call) for name, call in calls.items()})
        answers = {"print", "close", "gradient"}
        if tier == "device" and update == "delayed":
            answers.add("look")  # at the front, which nobody changes
        for name, result in said.items():
            refusals = {"ClosedError"}
            if name == "look" and tier != "device":
                refusals.add("ReleasedParameterError")
            assert result in refusals or (name in answers and result == "returned"), (name, said)
        assert tier != "device" or update == "delayed" or said["look"] == "ClosedError"
    finally:
        go.set()
        infinity.close(adam)
