"""A small wrapped net with everything on NVMe, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity

WIDTH, VOCAB = 48, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three blocks, a tied head, a buffer, and a module that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) * self.scale, tokens.roll(-1, 1).flatten())


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))


def build(seed: int = 0, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    """Beside plain torch, gradients differ by their rounding, about 1e-7. Where one is near zero, Adam moves
    an element by lr / eps of that: with this eps by 1e-7; with torch's own, by a whole step on some CPUs."""
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "eps": 1e-2, **options})


@pytest.fixture
def config(tmp_path: Path) -> infinity.Config:
    return infinity.Config(
        nvme=tmp_path,
        device="cpu",
        dtype="fp32",
        parameters="nvme",
        optimizer_state="nvme",
        gradients="nvme",
        device_memory="2MiB",
        host_memory="16MiB",
        chunk_elements=65536,
    )


Wrapped = tuple[Any, Any]


@pytest.fixture
def wrapped(config: infinity.Config) -> Iterator[Wrapped]:
    model, optimizer = infinity.wrap(*build(), config)
    yield model, optimizer
    infinity.close(optimizer)


def train(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
