"""How many Python calls one more unit costs, whose bytes do not move: in that time no kernel starts.

A unit is one linear layer with a bias; its parameters, state and gradients are on the host, and the device
has room for all. What is counted is the difference of 20 units, so that what a step costs once is not in it.
"""

from __future__ import annotations

import collections
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core import locks

PACKAGE = str(Path(infinity.__file__).parent)
#: Calls of Python per unit: on the thread that trains, and on all others. A file that polls is not counted.
MOST = {"forward": (39, 1), "backward": (68, 36), "step": (80, 62)}
POLLS = ("waiting.py", "handlers.py")


def counted(units: int) -> collections.Counter[tuple[str, bool]]:
    """Count the calls in a step of a model of so many units, by phase and by whether it is this thread."""
    found: collections.Counter[tuple[str, bool]] = collections.Counter()
    me, phase = threading.get_ident(), ""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and phase:
            mine, file = threading.get_ident() == me, frame.f_code.co_filename
            if mine or (file.startswith(PACKAGE) and not file.endswith(POLLS)):
                found[phase, mine] += 1

    threading.setprofile(profile)  # of the threads that begin now
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(units)))
        host = {"parameters": "host", "optimizer_state": "host", "gradients": "host"}
        config = infinity.Config(
            device="cpu", dtype="fp32", units=["Linear"], device_memory="64MiB", host_memory="1GiB", **host
        )
        model, optimizer = infinity.wrap(plain, torch.optim.AdamW(plain.parameters()), config)
        x = torch.ones(2, 16)
        for step in range(4):
            if step == 3:
                model(x)  # after it the units are on the device
                sys.setprofile(profile)
                phase = "forward"
            loss = model(x).sum()
            phase = phase and "backward"
            loss.backward()
            phase = phase and "step"
            optimizer.step()
            optimizer.zero_grad()
            infinity.flush(optimizer)
        phase = ""
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    infinity.close(optimizer)
    return found


@pytest.mark.on_cpu
def test_calls_per_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "check", None)  # which has each lock make calls of its own
    monkeypatch.setattr(locks, "before_wait", None)
    few, many = counted(20), counted(40)
    each = {
        phase: tuple((many[phase, mine] - few[phase, mine]) / 20 for mine in (True, False)) for phase in MOST
    }
    for phase, most in MOST.items():
        assert all(found <= limit for found, limit in zip(each[phase], most, strict=True)), each
