"""The built-in GPT, and its sizes in closed form.

A decoder-only transformer: pre-norm blocks, causal attention (with fewer heads for keys and values, where
that is said), rotary or learned positions, a GELU or SwiGLU MLP or a mixture of such, a tied or untied head.
It is an ordinary `nn.Module` that knows nothing of offloading. `units_of` and `activations_of` compute its
parameters and activations without building it; tests hold them equal to the real model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infinity.core.errors import ConfigError
from infinity.core.sizes import ceil_to

MLPS = ("gelu", "swiglu")
POSITIONS = ("rotary", "learned")


#: The largest dimension; the most layers and experts, for a plan looks at each and is to answer at once.
MOST: Final = (1 << 30, 10_000)


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The dimensions of a GPT.

    Attributes:
        kv_heads: heads of keys and values, each shared by as many heads of queries; None: `heads`.
        inner: width of the MLP; None: 4 × width, or for SwiGLU (three matrices) 8/3 × width in steps of 64.
        qkv_bias: whether the projections to queries, keys and values have biases.
        experts: MLPs in each block, of which a token passes `chosen`, or the only one; 0: none, but one MLP,
            which every token passes without a router.

    Raises:
        ConfigError: a dimension is out of range, or `width` is not a multiple of `heads` (of
            twice that for rotary positions), or `heads` not one of `kv_heads`.
    """

    layers: int
    width: int
    heads: int
    vocab: int = 256
    context: int = 1024
    mlp: str = "gelu"
    positions: str = "rotary"
    tied: bool = False
    kv_heads: int | None = None
    inner: int | None = None
    qkv_bias: bool = False
    experts: int = 0
    chosen: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocab", "context", "kv_heads", "inner", "experts"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "inner"):
                continue
            least, most = int(name != "experts"), MOST[name in ("layers", "experts")]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"the model's {name} cannot be used",
                    expected=f"an integer from {least} to {most:,}",
                    found=repr(value),
                    cure=f"--{name} {256 if name in ('vocab', 'context') else 8}",
                )
        for name, known in (("mlp", MLPS), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"the model's {name} is unknown",
                    expected=", ".join(known),
                    found=repr(getattr(self, name)),
                    cure=f"--{name} {known[0]}",
                )
        step = self.heads * (2 if self.positions == "rotary" else 1)
        if self.width % step:
            raise ConfigError(
                "the model's width does not divide among its heads",
                expected=f"a multiple of {step}" + (" (rotary pairs)" if step != self.heads else ""),
                found=self.width,
                cure=f"--width {ceil_to(self.width, step)}, or fewer --heads",
            )

        if self.heads % self.kept_heads:
            raise ConfigError(
                "the model's heads do not divide among those of keys and values",
                expected=f"a multiple of {self.kept_heads}",
                found=self.heads,
                cure=f"--heads {ceil_to(self.heads, self.kept_heads)}",
            )

    @property
    def kept_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def joint(self) -> int:
        """Width of queries, keys and values together."""
        return self.width // self.heads * (self.heads + 2 * self.kept_heads)

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        if self.inner is not None:
            return self.inner
        return 4 * self.width if self.mlp == "gelu" else ceil_to(8 * self.width // 3, 64)


#: Depth, width and heads whose parameters, with a vocabulary of 256 bytes, are what the name says.
PRESETS: dict[str, GPTShape] = {
    name: GPTShape(layers=layers, width=width, heads=heads)
    for name, (layers, width, heads) in {
        "10m": (6, 384, 6),
        "30m": (10, 512, 8),
        "125m": (18, 768, 12),
        "350m": (28, 1024, 16),
        "760m": (27, 1536, 16),
        "1.5b": (48, 1600, 25),
        "2.7b": (34, 2560, 32),
        "6.7b": (33, 4096, 32),
        "13b": (41, 5120, 40),
    }.items()
}


def _known(layers: int, width: int, heads: int, kept: int, inner: int, vocab: int, **more: Any) -> GPTShape:
    more = {"mlp": "swiglu", **more}
    return GPTShape(layers=layers, width=width, heads=heads, kv_heads=kept, inner=inner, vocab=vocab, **more)


_LLAMA_2, _LLAMA_3 = 32_000, 128_256
#: Published shapes: dimensions and parameters are theirs; norms are this model's, with as many weights.
KNOWN: dict[str, GPTShape] = {
    "llama-2-7b": _known(32, 4096, 32, 32, 11008, _LLAMA_2),
    "llama-2-13b": _known(40, 5120, 40, 40, 13824, _LLAMA_2),
    "llama-2-70b": _known(80, 8192, 64, 8, 28672, _LLAMA_2),
    "llama-3.1-8b": _known(32, 4096, 32, 8, 14336, _LLAMA_3),
    "llama-3.1-70b": _known(80, 8192, 64, 8, 28672, _LLAMA_3),
    "llama-3.2-1b": _known(16, 2048, 32, 8, 8192, _LLAMA_3, tied=True),
    "llama-3.2-3b": _known(28, 3072, 24, 8, 8192, _LLAMA_3, tied=True),
    "qwen2.5-0.5b": _known(24, 896, 14, 2, 4864, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-1.5b": _known(28, 1536, 12, 2, 8960, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-3b": _known(36, 2048, 16, 2, 11008, 151_936, tied=True, qkv_bias=True),
    "qwen2.5-7b": _known(28, 3584, 28, 4, 18944, 152_064, qkv_bias=True),
    "qwen2.5-14b": _known(48, 5120, 40, 8, 13824, 152_064, qkv_bias=True),
    "qwen2.5-32b": _known(64, 5120, 40, 8, 27648, 152_064, qkv_bias=True),
    "qwen2.5-72b": _known(80, 8192, 64, 8, 29568, 152_064, qkv_bias=True),
    "mistral-7b": _known(32, 4096, 32, 8, 14336, _LLAMA_2),
    "mixtral-8x7b": _known(32, 4096, 32, 8, 14336, _LLAMA_2, experts=8),
}


def units_of(shape: GPTShape) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """Return (unit, [(parameter, shape)]) of the GPT, in registration order, without building it."""
    w, h = shape.width, shape.hidden
    units: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = [
        ("embed", [("embed.weight", (shape.vocab, w))])
    ]
    if shape.positions == "learned":
        units.append(("position", [("position.weight", (shape.context, w))]))
    up = (h if shape.mlp == "gelu" else 2 * h), w
    block: list[tuple[str, tuple[int, ...]]] = [("norm1.weight", (w,)), ("qkv.weight", (shape.joint, w))]
    if shape.qkv_bias:
        block.append(("qkv.bias", (shape.joint,)))
    block += [("proj.weight", (w, w)), ("norm2.weight", (w,))]
    if shape.experts:
        block.append(("router.weight", (shape.experts, w)))
    for mlp in [f"experts.{e}." for e in range(shape.experts)] or [""]:
        block += [(f"{mlp}up.weight", up), (f"{mlp}down.weight", (w, h))]
    for i in range(shape.layers):
        units.append((f"blocks.{i}", [(f"blocks.{i}.{n}", s) for n, s in block]))
    units.append(("norm", [("norm.weight", (w,))]))
    if not shape.tied:
        units.append(("head", [("head.weight", (shape.vocab, w))]))
    return units


def idle_of(shape: GPTShape) -> int:
    """Return the number of parameters that a token does not pass: those of experts that are not chosen."""
    matrices = 2 if shape.mlp == "gelu" else 3
    unchosen = max(0, shape.experts - shape.chosen)
    return shape.layers * unchosen * matrices * shape.width * shape.hidden


def parameters_of(shape: GPTShape) -> int:
    """Return the number of parameters of the GPT, without building it."""
    return sum(math.prod(s) for _, params in units_of(shape) for _, s in params)


class Activations(NamedTuple):
    """Bytes that autograd keeps, and the most there are at once (with temporaries). `inputs`: how
    many of them are inputs of checkpointed blocks, `largest` how many one input has."""

    saved: int
    peak: int
    inputs: int = 0
    largest: int = 0


def activations_of(
    shape: GPTShape, batch: int, sequence: int, itemsize: int, *, recompute: bool
) -> Activations:
    """Return the activations of one forward and backward, in bytes.

    [Note: activations] Counted in tensors of N·w elements (N = batch × sequence tokens) of the
    compute dtype, a block keeps for its backward: its input, what each norm returns, the joint
    qkv (3; v is a view of it), the rotated q and k (2, rotary only), what attention returns, the
    input of the second norm; and of N·h: the MLP's input to its activation and what it returns
    (GELU 2; SwiGLU 2 + 1 + 1); and per token the fp32 log-sum-exp of each head and two statistics
    of each norm. Where heads share keys and values, these are repeated for attention (2), and the joint
    qkv is kept only if q is a view of it (without rotation). With experts, the MLP counts for each expert
    that a token passes, with the token's row of the stream before and after it;
    which tokens meet is not known, and the router's own tensors are small: an upper bound. The root keeps
    the tokens, the positions, the input of the last norm, what it returns, and the log-softmax of the logits
    in fp32.
    With recomputation every block keeps its input only, and one block at a time is whole.
    The peak adds what a backward needs at once: at the loss, two tensors of logits in fp32; in a
    block, gradients of the MLP's hidden layer (twice) and of the residual stream (three times).

    Args:
        itemsize: bytes of an element of the compute dtype.
        recompute: whether blocks are computed again in the backward.
    """
    n = batch * sequence
    w, h = shape.width, shape.hidden
    stream = n * w * itemsize
    hidden = n * h * itemsize
    statistics = n * (4 * shape.heads + 4 * itemsize)
    rotary = shape.positions == "rotary"
    shared = shape.kept_heads / shape.heads
    attention: float = 4  # what norms return, what attention does, the second input
    if shared == 1 or not rotary:
        attention += shape.joint / w
    if rotary:
        attention += 1 if shared < 1 else 2
    if shared < 1:
        attention += 2
    passed = 1
    if shape.experts:
        passed = min(shape.chosen, shape.experts)
        attention += 2 * passed + 2
        statistics += 32 * n * passed  # what was chosen, and the shares
    interior = int(attention * stream) + (2 if shape.mlp == "gelu" else 4) * hidden * passed + statistics
    block = stream + interior  # the input is counted with the block that reads it
    logits = n * shape.vocab
    where = 8 * sequence if shape.positions == "learned" else 4 * sequence * w // shape.heads
    root = 2 * stream + logits * 4 + 2 * n * itemsize + 2 * 8 * n + where + 4
    if recompute:
        saved = shape.layers * stream + root
        temporary = interior
    else:
        saved = shape.layers * block + root
        temporary = 0
    backward = temporary + 2 * hidden * passed + 3 * stream
    loss = 2 * logits * 4 + (logits * itemsize if itemsize != 4 else 0)
    inputs, largest = (shape.layers * stream, stream) if recompute else (0, 0)
    return Activations(saved, saved + max(backward, loss), inputs, largest)


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


def shape_from(preset: str, **dimensions: int | str | bool | None) -> GPTShape:
    """Return the shape of a preset with single dimensions replaced (None: the preset's).

    Raises:
        ConfigError: the preset is unknown, or a dimension cannot be used.
    """
    base = {**PRESETS, **KNOWN}.get(preset.lower())
    if base is None:
        raise ConfigError(
            f"unknown preset {preset!r}",
            expected=", ".join([*PRESETS, *KNOWN]),
            found=repr(preset),
            cure="--preset 30m, with --layers, --width and --heads for sizes in between",
        )
    return replace(base, **{k: v for k, v in dimensions.items() if v is not None})  # type: ignore[arg-type]
