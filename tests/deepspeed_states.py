"""What DeepSpeed 0.19.8 has written into tests/deepspeed.tar.xz, for tests/test_import_deepspeed.py.

Each case is a run of a few steps on several ranks, its checkpoint, and what DeepSpeed itself says of it: the
masters and the moments of each parameter, and the losses of the steps that follow. The history of this file
has the program that has recorded them; it needs DeepSpeed, which no run of the tests has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

from .offloaded import ON_HOST, config_for

ARCHIVE = Path(__file__).parent / "deepspeed.tar.xz"
#: The steps before the checkpoint, and those after it.
STEPS, MORE = 3, 3

#: The settings of each case: those of DeepSpeed, and `ranks`, `frozen`, `client`, `torch`, `universal`.
CASES: dict[str, dict[str, Any]] = {
    "stage1-fp32": {"stage": 1, "ranks": 2},
    "stage1-round-robin": {"stage": 1, "ranks": 2, "round_robin_gradients": True},
    "stage2-bf16": {"stage": 2, "ranks": 2, "dtype": "bf16", "frozen": True},
    "stage2-fp16": {"stage": 2, "ranks": 3, "dtype": "fp16", "parameter_alignment": True},
    "stage2-l2": {"stage": 2, "ranks": 1, "params": {"adam_w_mode": False}},
    "stage3-fp32": {"stage": 3, "ranks": 2, "sub_group_size": 30, "frozen": True},
    "stage3-bf16": {"stage": 3, "ranks": 3, "dtype": "bf16", "sub_group_size": 30},
    "stage3-fp16": {"stage": 3, "ranks": 2, "dtype": "fp16"},
    "stage3-offload": {"stage": 3, "ranks": 2, "offload_optimizer": {"device": "cpu"}, "params": {}},
    "bf16-optimizer": {"stage": 1, "ranks": 2, "dtype": "bf16", "accumulate": "fp32", "frozen": True},
    "client": {"stage": 2, "ranks": 2, "client": True},
    "universal-stage2": {"stage": 2, "ranks": 2, "dtype": "bf16", "universal": True},
    "universal-stage3": {"stage": 3, "ranks": 2, "universal": True, "sub_group_size": 30, "frozen": True},
    "universal-round-robin": {"stage": 2, "ranks": 2, "round_robin_gradients": True, "universal": True},
}


class Net(nn.Module):
    """Odd sizes, so that nothing fills its padding; a head that is tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("shift", torch.arange(3) / 10)
        self.second = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(self.embed(tokens))))
        hidden = hidden + self.get_buffer("shift").to(hidden.dtype)
        return self.head(self.second(hidden) * self.scale)


def build(*, frozen: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(not frozen)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def batch(step: int) -> torch.Tensor:
    """Tokens for all ranks; each rank sees all of them, so that the mean over ranks is that of one."""
    return torch.randint(0, 7, (12,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def wrapped(folder: Path, *, frozen: bool, dtype: str = "fp32", lr: float = 0.5) -> tuple[Any, Any]:
    """A model of the engine that knows nothing of the checkpoint, with other values."""
    model = build(frozen=frozen)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(0.25)
    folder.mkdir(exist_ok=True)
    adam = torch.optim.AdamW(groups_of(model), lr=lr)
    return infinity.wrap(model, adam, config_for(folder, **{**ON_HOST, "dtype": dtype}))


def losses_after(
    model: Any, adam: Any, begin_step: Callable[[int], object], scheduler: Any = None
) -> list[float]:
    """The losses of the steps that follow the checkpoint."""
    losses = []
    for step in range(STEPS, STEPS + MORE):
        begin_step(step)
        loss = loss_of(model, step)
        adam.scale(loss).backward()
        adam.step()
        adam.zero_grad()
        if scheduler is not None and step + 1 < STEPS + MORE:
            scheduler.step()
        losses.append(loss.item())
    return losses
