"""What each rank runs in test_rank_checkpoints.py: a run that goes on from a checkpoint, and saves.

The first rank's loss counts, times the number of ranks, which changes no bits where that is a power of two:
so 1, 2 and 4 ranks make the same steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

STEPS = 10


class Net(nn.Module):
    """Four units; tensors of odd sizes, tied ones, a frozen one and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 150)
        self.norm = nn.BatchNorm1d(150)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(150, 151), nn.Linear(151, 150)) for _ in range(2))
        self.layers[1][0].weight = self.layers[0][0].weight
        self.last = nn.Linear(150, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)


def made(config: dict[str, Any]) -> tuple[Net, Any]:
    """A model and its optimizer, wrapped."""
    torch.manual_seed(7)
    model = Net()
    adam = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    return infinity.wrap(model, adam, infinity.Config(**config))


def step(model: Net, adam: Any, rank: int = 0, world: int = 1) -> float:
    """One step; return the loss."""
    random = torch.Generator().manual_seed(adam.steps)
    loss = model(torch.randn(8, 37, generator=random)).square().mean()
    (loss * (0 if rank else world)).backward()
    adam.step()
    adam.zero_grad()
    return loss.item()


def trained(
    config: dict[str, Any], rank: int = 0, world: int = 1, *, load: str = "", before: int = 0, save: str = ""
) -> dict[str, Any]:
    """Go on from what is at `load` for `before` steps, save, take `STEPS` more; return what comes of them."""
    model, adam = made(config)
    if load:
        infinity.load(adam, load)
    for _ in range(before):
        step(model, adam, rank, world)
    if save:
        infinity.save(adam, save)
    losses = [step(model, adam, rank, world) for _ in range(STEPS)]
    found = {"losses": losses, "after": digest(model, adam), "steps": adam.steps}
    infinity.close(adam)
    return found


def digest(model: torch.nn.Module, adam: Any) -> str:
    """Of parameters, masters, moments and steps."""
    values = list(model.state_dict().values())
    for _, state in sorted(adam.state_dict()["state"].items()):
        values += [value for _, value in sorted(state.items())]
    flat = (v.detach().contiguous().view(-1).view(torch.uint8).numpy() for v in values)
    return hashlib.sha256(b"".join(v.tobytes() for v in flat)).hexdigest()


def contents(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has that does not depend on who saved it: bytes of files, and all checksums."""
    outer = json.loads((checkpoint / "index.json").read_text())["index"]
    found: dict[str, Any] = {"crcs": {k: v for k, v in outer["crcs"].items() if k != "values"}}
    for stem, name in outer["files"].items():
        if stem != "values":
            found[stem] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    return found | {key: outer[key] for key in ("parameters", "groups", "counts", "state")}


def main() -> None:
    """Train once for each of the settings that are given; print what was found."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = [trained(config, rank, world, **more) for config, more in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(found))
