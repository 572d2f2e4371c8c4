"""From the description of a tree to an `nn.Module`: what hostile users build, small.

The model takes `(x, ctx)`: x is (batch, width) floating, `ctx` a dict of flags and tensors that every
block sees (which branch to take, where to raise). All blocks are of the form x → x.
"""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Json = dict[str, Any]


class ForwardFailed(ValueError):
    """Raised on purpose, inside a forward or a backward."""


@dataclass
class Plain:
    x: Any


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


Named = namedtuple("Named", ["x", "more"])


#: How a module returns a tensor, and what takes it out of that.
_OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (x, None), lambda out: out[0]),
    "list": (lambda x: [x], lambda out: out[0]),
    "dict": (lambda x: {"x": x}, lambda out: out["x"]),
    "nested": (lambda x: {"a": [({"x": x},)]}, lambda out: out["a"][0][0]["x"]),
    "named": (lambda x: Named(x, None), lambda out: out.x),
    "dataclass": (Plain, lambda out: out.x),
    "slotted": (Slotted, lambda out: out.x),
    "deque": (lambda x: deque([x]), lambda out: out[0]),
    "frozenset": (lambda x: frozenset([x]), lambda out: next(iter(out))),
    "iterator": (lambda x: iter([x]), next),
    "values": (lambda x: {"x": x}.values(), lambda out: next(iter(out))),
    "closure": (lambda x: lambda: x, lambda out: out()),
}


class _Scaled(torch.autograd.Function):
    """x @ wᵀ with a backward of its own, which uses the saved weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Block(nn.Module):
    """One block; what it has and does is in its description."""

    def __init__(self, spec: Json, width: int, index: int, box: list[torch.Tensor]) -> None:
        super().__init__()
        self.spec, self.index, self.box = spec, index, box
        self.kind: str = spec["kind"]
        self.l1 = nn.Linear(width, width)
        match self.kind:
            case "mlp" | "inplace" | "frozen" | "functional" | "user-hooks":
                self.l2 = nn.Linear(width, width)
            case "lora":
                self.a = nn.Parameter(torch.randn(4, width) / width**0.5)
                self.b = nn.Parameter(torch.randn(width, 4) * 0.1)
            case "embedding":
                self.table = nn.Embedding(16, width)
            case "branch":
                self.l2, self.l3 = nn.Linear(width, width), nn.Linear(width, width)
            case "side":
                self.gate = nn.Linear(width, 8)
            case "norm":
                self.norm = nn.LayerNorm(width)
            case "batchnorm":
                self.norm = nn.BatchNorm1d(width)
            case "weight-norm":
                self.l2 = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
            case "nested":
                inner: Json = {"kind": "mlp", "output": "tensor", "recompute": None}
                self.inner = nn.ModuleList(Block(inner, width, -2, box) for _ in range(2))
            case "gru":
                self.gru = nn.GRU(width, width, batch_first=True)
        if self.kind == "frozen":
            self.requires_grad_(False)
        if self.kind == "lora":
            self.l1.requires_grad_(False)

    def forward(self, x: torch.Tensor, ctx: Json, y: torch.Tensor | None = None) -> Any:
        if ctx["fail"] == self.index:
            raise ForwardFailed("on purpose")
        if ctx["fail_back"] == self.index and x.requires_grad:

            def fail(grad: torch.Tensor) -> None:
                raise ForwardFailed("on purpose, in a backward")

            x = x.view_as(x)
            x.register_hook(fail)
        recompute = self.spec["recompute"]
        if recompute in ("inside-reentrant", "inside"):
            x = checkpoint(self.body, x, ctx, y, use_reentrant=recompute == "inside-reentrant")
        else:
            x = self.body(x, ctx, y)
        return _OUTPUTS[self.spec["output"]][0](x)

    def body(self, x: torch.Tensor, ctx: Json, y: torch.Tensor | None) -> torch.Tensor:
        match self.kind:
            case "lora":
                return x + torch.tanh(self.l1(x)) + (x @ self.a.t()) @ self.b.t()
            case "inplace":
                h = self.l1(x)
                h.mul_(1.5)
                h = self.l2(torch.tanh_(h))
                return h.add_(x)
            case "embedding":
                return x + self.table(ctx["ids"]).to(x.dtype) + torch.tanh(self.l1(x))
            case "branch":
                return x + (self.l2 if ctx["branch"] else self.l3)(torch.tanh(self.l1(x)))
            case "side":
                self.box.append(self.gate(torch.tanh(self.l1(x))).float().square().mean())
                return x * 1.0 if ctx["branch"] else x + torch.tanh(self.l1(x))
            case "norm" | "batchnorm":
                return x + torch.tanh(self.l1(self.norm(x)))
            case "nested":
                for inner in self.inner:
                    x = inner(x, ctx)
                return x + torch.tanh(self.l1(x))
            case "custom":
                return x + torch.tanh(_Scaled.apply(x, self.l1.weight) + self.l1.bias)
            case "functional":
                w = self.l2.weight
                g = torch.func.grad(lambda z: F.linear(z, w).square().sum() / z.numel())(x)
                return x + torch.tanh(self.l1(x)) + g
            case "user-hooks":
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    return x + self.l2(torch.tanh(self.l1(x)))
            case "pair":
                if ctx["use"] and y is not None:
                    return x + torch.tanh(self.l1(x)) * y
                return x + torch.tanh(self.l1(x))
            case "gru":
                return x + self.gru(torch.tanh(self.l1(x)).unsqueeze(1))[0].squeeze(1)
            case "mlp" | "frozen" | "weight-norm":
                return x + self.l2(torch.tanh(self.l1(x)))
        raise AssertionError(self.kind)


class Bank(nn.Module):
    """A module that returns a view of its weight."""

    def __init__(self, spec: Json, width: int) -> None:
        super().__init__()
        self.how: str = spec["how"]
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self) -> torch.Tensor:
        return {
            "itself": lambda: self.weight,
            "view": lambda: self.weight.view(-1).view(self.weight.shape),
            "transposed": lambda: self.weight.t(),
            "slice": lambda: self.weight[:],
            "detached": lambda: self.weight.detach(),
        }[self.how]()


class Root(nn.Module):
    """The whole model. Its loss is `loss_of`."""

    def __init__(self, tree: Json) -> None:
        super().__init__()
        width = tree["width"]
        self.tree = tree
        self.box: list[torch.Tensor] = []
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(s, width, i, self.box) for i, s in enumerate(tree["blocks"]))
        self.feeders = nn.ModuleList(nn.Linear(width, width) for _ in range(2 if tree["feeders"] else 0))
        self.banks = nn.ModuleList(Bank(s, width) for s in tree["banks"])
        self.head = nn.Linear(width, width)
        if tree["tied"] == "head":
            self.head.weight = self.stem.weight
        elif tree["tied"] == "blocks":
            self.blocks[-1].l1.weight = self.blocks[0].l1.weight
        elif tree["tied"] == "storage":
            self.head.weight = nn.Parameter(self.stem.weight.data)
        if tree["direct"]:
            self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, ctx: Json) -> Any:
        self.box.clear()
        # Weights that modules return are used long after their modules have run.
        weights = [bank() for bank in self.banks]
        x = self.stem(x)
        ys = [feeder(x) for feeder in self.feeders]
        for at in self.tree["order"]:
            x = self.call(at, x, ctx, ys[at % len(ys)] if ys else None)
            if self.tree["direct"]:
                x = x * self.scale
        for weight in weights:
            x = x + F.linear(x, weight)
        return _OUTPUTS[self.tree["output"]][0](self.head(x))

    def call(self, at: int, x: torch.Tensor, ctx: Json, y: torch.Tensor | None) -> torch.Tensor:
        block, spec = self.blocks[at], self.tree["blocks"][at]

        def run(x: torch.Tensor) -> torch.Tensor:
            return _OUTPUTS[spec["output"]][1](block(x, ctx, y) if y is not None else block(x, ctx))

        if spec["recompute"] in ("outside", "outside-reentrant"):
            return checkpoint(run, x, use_reentrant=spec["recompute"] == "outside-reentrant")  # type: ignore[no-any-return]
        if spec.get("autocast"):
            with torch.autocast("cpu", torch.bfloat16):
                return run(x).to(x.dtype)
        return run(x)


def build(tree: Json, seed: int) -> Root:
    """Return the model of `tree` with the values of `seed`."""
    torch.manual_seed(seed)
    return Root(tree)


def loss_of(model: Root, batch: Json, **ctx: Any) -> torch.Tensor:
    """Return the loss of one batch, without what the box holds; fp32."""
    flags = {"fail": -1, "fail_back": -1, "branch": batch["branch"], "use": batch["use"], "ids": batch["ids"]}
    flags.update(ctx)
    out = _OUTPUTS[model.tree["output"]][1](model(batch["x"], flags))
    return F.mse_loss(out.float(), batch["target"])


def batches(tree: Json, seed: int, count: int = 6) -> list[Json]:
    """Return batches: x and target (rows, width) fp32, ids (rows,) int64, and two flags."""
    random = torch.Generator().manual_seed(seed + 1)
    return [
        {
            "x": torch.randn(tree["rows"], tree["width"], generator=random),
            "target": torch.randn(tree["rows"], tree["width"], generator=random),
            "ids": torch.randint(16, (tree["rows"],), generator=random),
            "branch": bool(torch.randint(2, (1,), generator=random)),
            "use": bool(torch.randint(3, (1,), generator=random) == 0),
        }
        for _ in range(count)
    ]
