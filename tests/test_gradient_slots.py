"""Slots of gradients that one backward makes: in 16 bits they have 2 bytes for each element, with the same
bits as in 4; a second gradient is refused, and what the error says helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import GradientError
from infinity.core.sizes import Tier, ceil_to
from infinity.planning.parts import is_made_once

from .offloaded import config_for
from .ranks import all_well, run_ranks
from .test_ranks import HEAD, settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Parameters of several chunks, of one, and of a part of one; some not in each forward. `again`: a layer
    is used twice, where it is checkpointed `reentrant` or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        self.side = nn.Linear(300, 7)
        self.tasks = nn.ModuleList(nn.Linear(300, 1) for _ in range(2))

    def forward(
        self, x: torch.Tensor, task: int = 0, again: bool = False, reentrant: bool = True
    ) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        for _ in range(2 * again):
            x = checkpoint(self.layers[1], x, use_reentrant=reentrant)
        y = self.tasks[task](x).float().square().mean()
        return y + self.side(x).float().abs().mean() if task else y


def wrapped(folder: Path, place: str = "host", dtype: str = "bf16", **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net()
    where = {"parameters": "host", "optimizer_state": "host", "gradients": place}
    config = config_for(folder, **where, dtype=dtype, device_memory="32MiB", **settings)
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 300, generator=torch.Generator().manual_seed(seed))


def gradient_bytes(model: Any, place: str) -> tuple[int, int, int]:
    """The bytes of gradients on their tier; and of slots of 2 and of 4 bytes for each element."""
    footprint = engine_of(model).footprint
    tiers = {"device": footprint.device, "host": footprint.host, "nvme": footprint.nvme}
    chunks = [c for unit in engine_of(model).units for c in unit.layout.trainable_chunks]
    narrow, wide = (sum(ceil_to(each * c.numel, 4096) for c in chunks) for each in (2, 4))
    return tiers[place]["gradients"], narrow, wide


@pytest.mark.parametrize(
    ("place", "dtype", "update"),
    [
        ("host", "bf16", "overlap"),
        ("nvme", "bf16", "delayed"),
        ("nvme", "fp16", "sync"),
        ("device", "bf16", "overlap"),
        ("host", "bf16", "backward"),
    ],
)
def test_the_bits_are_those_of_wide_slots(place: str, dtype: str, update: str, tmp_path: Path) -> None:
    found = []
    mode = {"delay_warmup_steps": 1} if update == "delayed" else {}
    for accumulation in (1, 2 if update == "backward" else None):
        model, optimizer = wrapped(
            tmp_path, place, dtype, update=update, accumulation=accumulation, loss_scale=64.0, **mode
        )
        placed, *slots = gradient_bytes(model, place)
        assert placed == slots[accumulation != 1] * (2 if update == "delayed" else 1)
        found.append([])
        for step in range(6):
            if accumulation == 2:
                torch.autograd.grad(model(batch(9)), [model.tasks[0].bias])  # counts, and puts nothing there
            optimizer.scale(model(batch(step), task=step % 2)).backward()
            if update != "backward":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            found[-1] += [infinity.gradient(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=update == "backward" or step % 3 > 0)  # zeros take no bytes
        infinity.flush(optimizer)
        found[-1] += [*model.state_dict().values(), optimizer.grad_norm]
        infinity.close(optimizer)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_of_fp32_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="fp32", accumulation=1)
    placed, _, wide = gradient_bytes(model, "host")
    assert placed == wide
    for _ in range(2):
        model(batch(0)).backward()  # the sum has room
    optimizer.step()
    infinity.close(optimizer)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_second_gradient_is_refused_and_the_run_goes_on(place: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, place, accumulation=1)
    model(batch(0)).backward()
    before = [infinity.gradient(p) for p in model.parameters()]
    with pytest.raises(GradientError, match=r"accumulation=….*zero_grad") as raised:
        model(batch(1)).backward()
    assert "2 bytes" in str(raised.value)
    for param, whole in zip(model.parameters(), before, strict=True):  # nothing was added
        assert whole is None or torch.equal(infinity.gradient(param), whole)  # type: ignore[arg-type]
    model.layers[0].weight.grad = before[0].to(torch.bfloat16)  # type: ignore[union-attr]
    optimizer.step()  # with what was there
    with pytest.raises(GradientError, match="second gradient"):
        model(batch(1)).backward()
    optimizer.zero_grad(set_to_none=False)
    model(batch(1)).backward()  # onto zeros
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(GradientError, match="use_reentrant=False"):
        model(batch(2), again=True).backward()
    optimizer.zero_grad()
    model(batch(2), again=True, reentrant=False).backward()  # the cure
    optimizer.step()
    assert optimizer.steps == 3
    infinity.close(optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_slots_of_ranks(stage: int, tmp_path: Path) -> None:
    script = (
        HEAD
        + """
from infinity.api.engine import engine_of
model, adam = infinity.wrap(model, adam, config)
for step in range(3):
    model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    adam.step()
    adam.zero_grad()
print(engine_of(adam).footprint.host["gradients"])
print([float(v.double().sum()).hex() for v in model.state_dict().values()])
model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
try:
    model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
    print("added")
except infinity.InfinityError as error:
    print(type(error).__name__, flush=True)
    os._exit(0)
infinity.close(adam)
"""
    )
    found = []
    for accumulation in (1, None):
        given = settings_of(
            tmp_path, "host", "bf16", zero_stage=stage, accumulation=accumulation, gradients="host"
        )
        given |= {"parameters": "device"} if stage == 2 else {}
        results = run_ranks(2, "import os\n" + script, json.dumps(given))
        found.append([out.splitlines() for out in all_well(results)])
    for narrow, wide in zip(*found, strict=True):
        assert int(narrow[0]) < 0.7 * int(wide[0])
        assert narrow[1] == wide[1]
        assert (narrow[2], wide[2]) == ("GradientError", "added")


def test_stages_that_wait_keep_room_for_a_sum(tmp_path: Path) -> None:
    for stage in range(4):
        config = config_for(tmp_path, accumulation=1, zero_stage=stage, gradients=Tier.DEVICE.value)
        assert is_made_once(config, world=1)
        assert is_made_once(config, world=2) == (stage > 1)
