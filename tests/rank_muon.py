"""What each rank runs in test_rank_muon.py: Muon on a model whose gradients are given.

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


def digest(state: dict[str, dict[str, torch.Tensor]]) -> str:
    """Return a digest of values and moments, by name."""
    found = hashlib.sha256()
    for name in sorted(state):
        for kind in sorted(state[name]):
            found.update(f"{name} {kind} ".encode() + state[name][kind].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_of(model: nn.Module) -> str:
    """Return the digest of a wrapped model. Collective."""
    engine = engine_of(model)
    saved = engine.optimizer.state_dict()
    names = {param: name for name, param in model.named_parameters()}
    ordered = [names[p] for group in engine.optimizer.param_groups for p in group["params"]]
    found = {name: {"value": value} for name, value in model.state_dict().items()}
    for index, state in saved["state"].items():
        found[ordered[index]] |= {k: v for k, v in state.items() if k in KEPT}
    return digest(found)


def run_steps(model: Any, optimizer: Any, steps: range, rank: int, world: int) -> None:
    """Make some steps. Each rank multiplies the gradients with a share of its own, of which the mean is 1."""
    share = {1: [1.0], 2: [0.5, 1.5], 3: [0.5, 1.0, 1.5]}[world][rank]
    for step in steps:
        model(step, share).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train as is given: `shapes`, `config`, `steps` (first and end); `load` and `save` are checkpoints.
    Print
    a digest, how many matrices this rank has updated, and the digest of the same in plain torch."""
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Net(given["shapes"])
    optimizer = muon(model.parameters())
    model, optimizer = infinity.wrap(model, optimizer, infinity.Config(**given["config"]))  # type: ignore[assignment]
    calls, inner = [], arithmetic.orthogonalize

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return inner(*arguments)

    arithmetic.orthogonalize = counted
    if "load" in given:
        infinity.load(optimizer, given["load"])
    run_steps(model, optimizer, range(*given["steps"]), rank, world)
    if "save" in given:
        infinity.save(optimizer, given["save"])
    found = digest_of(model)
    infinity.close(optimizer)
    whole = train_whole(Net(given["shapes"]), muon, lambda m, step: m(step), steps=given["steps"][1])
    sys.stdout.write(json.dumps([found, len(calls), digest(whole)]) + "\n")
