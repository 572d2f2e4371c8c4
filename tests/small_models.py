"""Small models whose parameters are used in many ways, and the loop that trains them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import infinity

from .offloaded import config_for
from .test_doors import least

WIDTH, CLASSES, LAYERS = 64, 96, 3


Losses = list[torch.Tensor]


class Block(nn.Module):
    """x (batch, width) → the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """tokens (batch,) → a loss: embedding, blocks, and what the subclass makes of the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(self.hidden(tokens)), tokens)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.wte.weight)  # the head of many models


class Holder(nn.Module):
    """Has parameters and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 8)
        self.bias = nn.Parameter(torch.zeros(CLASSES))


class HolderModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.gains = nn.ModuleList(Holder() for _ in range(3))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for gain in self.gains:
            x = x + torch.tanh(F.linear(x, gain.weight, gain.bias)) @ gain.weight
        return F.linear(x, self.holder.weight, self.holder.bias)


class Fused(torch.autograd.Function):
    """Cross entropy of a linear head in pieces, as the fused heads of Liger and TRL are: the gradients are
    made in forward, and only they are kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for rows in torch.arange(len(x)).chunk(3):
            logits = x[rows] @ weight.t()
            log = logits.log_softmax(-1)
            loss -= log[torch.arange(len(rows)), targets[rows]].sum() / len(x)
            grad = (log.exp() - F.one_hot(targets[rows], weight.shape[0])) / len(x)
            grad_x[rows] = grad @ weight
            grad_weight += grad.t() @ x[rows]
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return grad * grad_x, grad * grad_weight, None


class Cut(torch.autograd.Function):
    """The same as cut-cross-entropy has it: slices of the weight in forward and once more in backward."""

    how = "saved"

    @classmethod
    def keep(cls, ctx: Any, *tensors: torch.Tensor) -> None:
        ctx.save_for_backward(*tensors)

    @classmethod
    def kept(cls, ctx: Any) -> Any:
        return ctx.saved_tensors

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = [x @ weight[i : i + 32].t() for i in range(0, weight.shape[0], 32)]
        log = torch.cat(parts, 1).log_softmax(-1)
        cls.keep(ctx, x, weight, targets, log)
        return -log[torch.arange(len(x)), targets].mean()

    @classmethod
    def backward(cls, ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, targets, log = cls.kept(ctx)
        logits = grad * (log.exp() - F.one_hot(targets, weight.shape[0])) / len(x)
        grad_x, grad_weight = torch.zeros_like(x), torch.empty_like(weight)
        for i in range(0, weight.shape[0], 32):
            grad_x += logits[:, i : i + 32] @ weight[i : i + 32]
            grad_weight[i : i + 32] = logits[:, i : i + 32].t() @ x
        return grad_x, grad_weight, None


class FusedModel(Model):
    """The head's own forward is never called."""

    function: Any = Fused

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.hidden(tokens), self.lm_head.weight, tokens)


class CutModel(FusedModel):
    function = Cut


class TiedFusedModel(FusedModel):
    function = Cut

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.wte.weight


class HeadModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, steps: int = 3) -> Losses:
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def values(model: Any) -> Losses:
    """The parameters of a wrapped model, in their order."""
    found = []
    for p in model.parameters():
        with infinity.gathered(p):
            found.append(p.detach().clone())
    return found


def built(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def wrapped(folder: Path, make: Callable[[], nn.Module] = HeadModel, **settings: Any) -> tuple[Any, Any]:
    return infinity.wrap(*built(make), config_for(folder, **settings))


def budgeted(make: Callable[[], nn.Module], folder: Path, budget: str, **settings: Any) -> infinity.Config:
    config = config_for(folder, **{"device_memory": "64MiB", **settings})
    if budget == "least":
        config = config.replace(device_memory=least(lambda: built(make)[0], config, "device_memory"))
    return config


def trained() -> Losses:
    model, optimizer = built(HeadModel)
    train(model, optimizer)
    return [p.detach() for p in model.parameters()]
