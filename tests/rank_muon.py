"""What each rank runs in test_rank_muon.py: Muon on a model whose gradients are given.

    python -m tests.rank_muon JSON      (under torchrun's environment)

The gradients have few bits, and those of the ranks differ, with a mean that is the same for every number of
ranks. So one rank and several must come to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.hardware import muon as arithmetic

from .whole import muon, train_whole

Shapes = list[list[list[int]]]
KEPT = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class Block(nn.Module):
    """Parameters of some shapes."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.each = nn.ParameterList(nn.Parameter(torch.randn(*shape) / 8) for shape in shapes)

    def forward(self, total: torch.Tensor, draw: torch.Generator, share: float, without: int) -> torch.Tensor:
        for param in self.each:
            # Eight bits, as bf16 has them: sums and shares are exact.
            given = torch.randn(param.shape, generator=draw).bfloat16().float().to(param.device) * share
            if without != 0:
                total = total + (param * given).sum()
            without -= 1
        return total


class Net(nn.Module):
    """Blocks, each a unit. In each step one parameter of each block has no gradient."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(of_block) for of_block in shapes)

    def forward(self, step: int, share: float = 1.0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        total = torch.zeros((), device=next(self.parameters()).device)
        for block in self.blocks:
            total = block(total, draw, share, step)
        return total


def share_of(rank: int, world: int) -> float:
    """Return what a rank multiplies the gradients with. The mean over the ranks is 1."""
    return 1.0 if world == 1 else 0.5 + rank * (1.0 if world == 2 else 0.5) if world < 4 else 1.0


def digest(state: dict[str, dict[str, torch.Tensor]]) -> str:
    """Return a digest of values and moments, by name."""
    found = hashlib.sha256()
    for name in sorted(state):
        for kind in sorted(state[name]):
            found.update(f"{name} {kind} ".encode() + state[name][kind].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def state_of(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return the values and moments of a wrapped model, by name. Collective."""
    engine = engine_of(model)
    saved = engine.optimizer.state_dict()
    names = {param: name for name, param in model.named_parameters()}
    ordered = [names[p] for group in engine.optimizer.param_groups for p in group["params"]]
    found = {name: {"value": value} for name, value in model.state_dict().items()}
    for index, state in saved["state"].items():
        kept = {k: v for k, v in state.items() if k in KEPT}
        found[ordered[index]] |= kept
    return found


def run_steps(model: Any, optimizer: Any, steps: range, rank: int, world: int) -> None:
    """Make some steps."""
    for step in steps:
        model(step, share_of(rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train as `settings` say: `shapes`, `config`, `steps` (first and end); `load` and
    `save` are checkpoints. Return a digest, and how many matrices this rank has updated."""
    model = Net(settings["shapes"])
    optimizer = muon(model.parameters())
    config = infinity.Config(**settings["config"])
    model, optimizer = infinity.wrap(model, optimizer, config)  # type: ignore[assignment]
    calls = 0

    def counted(inner: Any) -> Any:
        def call(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            return inner(*given)

        return call

    arithmetic.orthogonalize = counted(arithmetic.orthogonalize)
    if "load" in settings:
        infinity.load(optimizer, settings["load"])
    run_steps(model, optimizer, range(*settings["steps"]), rank, world)
    if "save" in settings:
        infinity.save(optimizer, settings["save"])
    state = state_of(model)
    infinity.close(optimizer)
    return {"digest": digest(state), "calls": calls}


def whole(settings: dict[str, Any]) -> str:
    """Return the digest of the same in plain torch."""
    model, steps = Net(settings["shapes"]), settings["steps"][1]
    return digest(train_whole(model, muon, lambda m, step: m(step), steps=steps))


def main() -> None:
    """`train` as is given, and print what comes of it."""
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    found = train(settings, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if settings.get("whole"):
        found["whole"] = whole(settings)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
