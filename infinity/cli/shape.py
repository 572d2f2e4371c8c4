"""The sizes of the built-in GPT, in closed form.

`units_of` and `activations_of` compute its parameters and activations without building it, and without torch;
tests hold them equal to the real model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from infinity.core.errors import ConfigError
from infinity.core.sizes import ceil_to

MLP: TypeAlias = Literal["gelu", "swiglu"]
Positions: TypeAlias = Literal["rotary", "learned"]

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
    mlp: MLP = "gelu"
    positions: Positions = "rotary"
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
        for name, known in (("mlp", get_args(MLP)), ("positions", get_args(Positions))):
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
