"""Llama with as many units, parameters, launches and saved tensors as the real one; kernels only take time.

Each side of a matrix is 1/√scale of the real one's. A layer is one node of autograd in C++ (`device.cpp`). It
launches as many kernels and saves as many tensors as the real layer's nodes do together. Matrix products take
their operations ÷ `flops`; other kernels take the least time of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

#: What a layer saves for its backward: its inputs, and one or two small tensors of statistics.
_FIRST, _SECOND, _THIRD, _STATISTICS, _TWO_STATISTICS = 1, 2, 4, 8, 16
#: Views and transposes in a block: calls of torch that launch nothing.
_VIEWS: Final = 45


class Shape(NamedTuple):
    """The sizes of a real model."""

    hidden: int
    intermediate: int
    layers: int
    queries_per_key: int
    vocabulary: int


SHAPES: Final = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 4, 128256),
    "tiny": Shape(2048, 4096, 12, 4, 16384),
}


class Work(NamedTuple):
    """What the kernels' times depend on. `flops`: operations per second of matrix products; `tokens`: a list
    of one number, which a caller changes between steps."""

    scale: int
    flops: float
    tokens: list[int]


def _layer(
    inputs: tuple[torch.Tensor, ...],
    *,
    width: int = 0,
    saves: int = 0,
    seconds: float = 0.0,
    launches: int,
    backward_launches: int,
) -> torch.Tensor:
    """Launch a layer. `width`: of its output, if that is not its first input's; -1: it is a loss. Its
    backward takes twice as long."""
    first, second, third = (*inputs, None, None, None)[:3]
    out: torch.Tensor = torch.ops.emulated.layer(
        first, second, third, width, saves, seconds, 2 * seconds, launches, backward_launches
    )
    return out


class Linear(nn.Module):
    """A matrix product."""

    def __init__(self, inputs: int, outputs: int, work: Work) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.bfloat16))
        self._outputs, self._work = outputs, work

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        work = self._work
        seconds = 2.0 * self.weight.numel() * work.scale * work.tokens[0] / work.flops
        saves = _FIRST | _SECOND
        return _layer(
            (x, self.weight),
            width=self._outputs,
            saves=saves,
            seconds=seconds,
            launches=1,
            backward_launches=2,
        )


class Norm(nn.Module):
    """RMSNorm in eager torch: six kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        saves = _FIRST | _SECOND | _STATISTICS
        return _layer((x, self.weight), saves=saves, launches=6, backward_launches=8)


class Embedding(nn.Module):
    """A look-up."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width, dtype=torch.bfloat16))
        self._width = width

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return _layer((ids, self.weight), width=self._width, saves=_FIRST, launches=1, backward_launches=2)


class Block(nn.Module):
    """A transformer block: 35 launches of a forward, 51 of a backward."""

    def __init__(self, hidden: int, intermediate: int, keys: int, work: Work) -> None:
        super().__init__()
        self.query, self.key = Linear(hidden, hidden, work), Linear(hidden, keys, work)
        self.value, self.out = Linear(hidden, keys, work), Linear(hidden, hidden, work)
        self.gate, self.up = Linear(hidden, intermediate, work), Linear(hidden, intermediate, work)
        self.down = Linear(intermediate, hidden, work)
        self.before_attention, self.before_mlp = Norm(hidden), Norm(hidden)

    def forward(self, h: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = self.before_attention(h)
        query, key, value = self.query(x), self.key(x), self.value(x)
        for _ in range(_VIEWS):
            torch.ops.emulated.host_work(1)
        query, key = (
            _layer((each, cosines, sines), saves=_SECOND | _THIRD, launches=5, backward_launches=6)
            for each in (query, key)
        )
        saves = _FIRST | _SECOND | _THIRD | _STATISTICS | _TWO_STATISTICS
        attended = _layer((query, key, value), saves=saves, launches=2, backward_launches=3)
        h = _layer((h, self.out(attended)), launches=1, backward_launches=1)
        x = self.before_mlp(h)
        gated = _layer((self.gate(x), self.up(x)), saves=_FIRST | _SECOND, launches=2, backward_launches=4)
        return _layer((h, self.down(gated)), launches=1, backward_launches=1)


class Llama(nn.Module):
    """The model; its forward returns the loss. Blocks are recomputed in the backward."""

    def __init__(self, shape: Shape, work: Work) -> None:
        super().__init__()
        by = math.isqrt(work.scale)
        if by * by != work.scale:
            raise ValueError(f"the scale is a square, not {work.scale}")
        hidden, intermediate, vocabulary = (
            n // by for n in (shape.hidden, shape.intermediate, shape.vocabulary)
        )
        self.embedding = Embedding(vocabulary, hidden)
        keys = hidden // shape.queries_per_key
        self.layers = nn.ModuleList(Block(hidden, intermediate, keys, work) for _ in range(shape.layers))
        self.norm = Norm(hidden)
        self.head = Linear(hidden, vocabulary, work)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h: Any = self.embedding(ids)
        rotary = torch.empty(4, 8, dtype=torch.bfloat16, device=h.device)
        for block in self.layers:
            h = checkpoint(block, h, rotary, rotary, use_reentrant=False)
        return _layer((self.head(self.norm(h)),), width=-1, saves=_FIRST, launches=8, backward_launches=8)

    def units(self) -> Iterator[nn.Module]:
        """Yield what a peer loads and sends at once, in the order of the forward."""
        yield self.embedding
        yield from self.layers
        yield nn.ModuleList([self.norm, self.head])


class Sizes(NamedTuple):
    """Elements of the real model: of all parameters, of those in matrix products, and of these in blocks,
    which are recomputed. With the rounding of sizes that are divided."""

    parameters: int
    products: int
    recomputed: int

    def compute(self, tokens: int, flops: float) -> float:
        """Return the seconds of the matrix products of a step: forward once, backward twice, and the blocks'
        forward once more."""
        return 2.0 * tokens * (3 * self.products + self.recomputed) / flops


def sizes_of(model: Llama, scale: int) -> Sizes:
    """Return the sizes of the real model."""
    blocks = sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    every = sum(p.numel() for p in model.parameters())
    return Sizes(every * scale, (blocks + model.head.weight.numel()) * scale, blocks * scale)
