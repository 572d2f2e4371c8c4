"""The built-in GPT.

A decoder-only transformer: pre-norm blocks, causal attention (with fewer heads for keys and values, where
that is said), rotary or learned positions, a GELU or SwiGLU MLP or a mixture of such, a tied or untied head.
It is an ordinary `nn.Module` that knows nothing of offloading.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .shape import GPTShape


class GPTOutput(NamedTuple):
    """What the model returns. `loss` is None without targets; `logits` is (batch, sequence, vocab)."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class _Linear(nn.Linear):
    """A linear layer, drawn from N(0, std²) at once (not first from another law); its bias is zero."""

    def __init__(self, inputs: int, outputs: int, std: float, *, bias: bool = False) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Return x, (batch, sequence, heads, size), rotated pairwise by rope, (2, sequence, 1, size / 2)."""
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _mlp(width: int, hidden: int, gated: bool, std: float) -> tuple[_Linear, _Linear]:
    return _Linear(width, 2 * hidden if gated else hidden, 0.02), _Linear(hidden, width, std)


def _through(x: torch.Tensor, up: _Linear, down: _Linear) -> torch.Tensor:
    """Return x, (…, width), through an MLP: SwiGLU where `up` has a half for the gate, else GELU."""
    inner = up(x)
    if inner.shape[-1] == 2 * down.in_features:
        gate, inner = inner.chunk(2, -1)
        inner = F.silu(gate) * inner
    else:
        inner = F.gelu(inner)
    out: torch.Tensor = down(inner)
    return out


class Expert(nn.Module):
    """One MLP of a mixture."""

    def __init__(self, width: int, hidden: int, gated: bool, std: float) -> None:
        super().__init__()
        self.up, self.down = _mlp(width, hidden, gated, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, width) for x, (tokens, width)."""
        return _through(x, self.up, self.down)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        w, h = shape.width, shape.hidden
        # Residual branches are drawn smaller, so that the stream's variance does not grow with depth.
        residual = 0.02 / math.sqrt(2 * shape.layers)
        self.heads, self.kept = shape.heads, shape.kept_heads
        self.chosen = min(shape.chosen, shape.experts)
        self.norm1 = nn.LayerNorm(w, bias=False)
        self.qkv = _Linear(w, shape.joint, 0.02, bias=shape.qkv_bias)
        self.proj = _Linear(w, w, residual)
        self.norm2 = nn.LayerNorm(w, bias=False)
        gated = shape.mlp == "swiglu"
        if shape.experts:
            self.router = _Linear(w, shape.experts, 0.02)
            self.experts = nn.ModuleList(Expert(w, h, gated, residual) for _ in range(shape.experts))
        else:
            self.up, self.down = _mlp(w, h, gated, residual)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        """Return the stream, (batch, sequence, width), after this block."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, self.heads + 2 * self.kept, width // self.heads)
        q, k, v = qkv.split((self.heads, self.kept, self.kept), 2)
        if rope is not None:
            q, k = _rotate(q, rope), _rotate(k, rope)
        if self.kept != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kept, 2) for t in (k, v))
        # Transposed after the rotation: what attention returns then needs no copy to be flat.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, sequence, width))
        inner = self.norm2(x)
        out: torch.Tensor = x + (self._mix(inner) if self.chosen else _through(inner, self.up, self.down))
        return out

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts make of each token, by their shares."""
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).float().topk(self.chosen)
        shares = shares.softmax(-1).to(x.dtype)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * shares[token, place, None])
        return out.view_as(x)


class GPT(nn.Module):
    """The model of a `GPTShape`.

    Args:
        recompute: compute each block again in the backward instead of keeping its activations.
    """

    def __init__(self, shape: GPTShape, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.embed = _Embedding(shape.vocab, shape.width)
        if shape.positions == "learned":
            self.position = _Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = _Linear(shape.width, shape.vocab, 0.02)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> GPTOutput:
        """Return logits, and the mean cross-entropy against `targets`.

        Args:
            tokens: (batch, sequence), int64, values below `vocab`.
            targets: (batch, sequence), int64: the token that follows each; -100 is not counted.
        """
        sequence = tokens.shape[1]
        if sequence > self.shape.context:
            raise ValueError(
                f"a sequence of {sequence} tokens is longer than the context {self.shape.context}"
            )
        x = self.embed(tokens)
        rope = None
        if self.shape.positions == "learned":
            x = x + self.position(torch.arange(sequence, device=tokens.device))
        else:
            rope = self._rope(sequence, tokens.device)
        again = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            if again:
                x = checkpoint(block, x, rope, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope)
        logits = self.head(self.norm(x))
        if targets is None:
            return GPTOutput(None, logits)
        return GPTOutput(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), logits)

    def _rope(self, sequence: int, device: torch.device) -> torch.Tensor:
        size = self.shape.width // self.shape.heads
        frequency = 10000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
        angle = torch.arange(sequence, device=device, dtype=torch.float32)[:, None] * frequency
        return torch.stack((angle.cos(), angle.sin()))[:, :, None]
