"""A small GPT for `infinity verify` and `infinity bench step`, which need no transformers.

A decoder-only transformer: pre-norm blocks, causal attention, rotary positions, a GELU MLP, an untied head.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Return x, (batch, sequence, heads, size), rotated pairwise by each token's place."""
    sequence, size = x.shape[1], x.shape[-1]
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = torch.arange(sequence, device=x.device, dtype=torch.float32)[:, None, None] * frequency
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream, (batch, sequence, width), after this block."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3 * self.heads, width // self.heads)
        q, k, v = qkv.chunk(3, 2)
        q, k, v = (t.transpose(1, 2) for t in (_rotate(q), _rotate(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, sequence, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """`layers` blocks between an embedding and a head. `width` is a multiple of twice `heads`."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        for name, param in self.named_parameters():
            if param.dim() >= 2:  # residual branches smaller: the stream's variance does not grow with depth
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy against `targets`; both arguments are (batch, sequence)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
