"""Models of the Llama family: presets, and their sizes in closed form.

A model is what its config.json says, as transformers names it. `units_of` and `activations_of` compute its
parameters and activations without building it, and without torch or transformers; tests hold them equal to
the real model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from infinity.core.errors import ConfigError
from infinity.core.sizes import ceil_to

Units: TypeAlias = list[tuple[str, list[tuple[str, tuple[int, ...]]]]]
#: The largest dimension; the most layers and experts, for a plan looks at each and is to answer at once.
MOST: Final = (1 << 30, 10_000)
#: The option of each dimension, and what config.json calls it.
KEYS: Final = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
    "experts": "num_local_experts",
}


def _inner(width: int) -> int:
    """Return the usual width of an MLP of three matrices: with it they have 8 × width² parameters."""
    return ceil_to(8 * width // 3, 64)


def _model(
    kind: str,
    layers: int,
    width: int,
    heads: int,
    kept: int,
    inner: int,
    vocab: int,
    context: int,
    theta: float = 1e4,
) -> dict[str, Any]:
    sizes = (layers, width, heads, vocab, context, False, kept, inner)
    eps = 1e-6 if kind == "qwen2" else 1e-5
    named = dict(zip(KEYS.values(), sizes, strict=False))
    return {"model_type": kind, **named, "rope_theta": theta, "rms_norm_eps": eps}


#: Vocabulary, context and base of the rotation.
_LLAMA_3: Final = (128_256, 131_072, 5e5)
_TIED: Final = {"tie_word_embeddings": True}
_EXPERTS: Final = {"num_local_experts": 8, "num_experts_per_tok": 2}


def _scaled(factor: float) -> dict[str, Any]:
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **frequencies}}


#: What the name says in parameters with a vocabulary of 256 bytes; and published models, as they are.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    **{
        name: _model("llama", layers, width, heads, heads, _inner(width), 256, 1024)
        for name, layers, width, heads in (
            ("10m", 6, 384, 6),
            ("30m", 10, 512, 8),
            ("125m", 18, 768, 12),
            ("350m", 28, 1024, 16),
            ("760m", 27, 1536, 16),
            ("1.5b", 48, 1600, 25),
            ("2.7b", 34, 2560, 32),
            ("6.7b", 33, 4096, 32),
            ("13b", 41, 5120, 40),
        )
    },
    "llama-2-7b": _model("llama", 32, 4096, 32, 32, 11008, 32_000, 4096),
    "llama-2-13b": _model("llama", 40, 5120, 40, 40, 13824, 32_000, 4096),
    "llama-2-70b": _model("llama", 80, 8192, 64, 8, 28672, 32_000, 4096),
    "llama-3.1-8b": _model("llama", 32, 4096, 32, 8, 14336, *_LLAMA_3) | _scaled(8.0),
    "llama-3.1-70b": _model("llama", 80, 8192, 64, 8, 28672, *_LLAMA_3) | _scaled(8.0),
    "llama-3.2-1b": _model("llama", 16, 2048, 32, 8, 8192, *_LLAMA_3) | _scaled(32.0) | _TIED,
    "llama-3.2-3b": _model("llama", 28, 3072, 24, 8, 8192, *_LLAMA_3) | _scaled(32.0) | _TIED,
    "qwen2.5-0.5b": _model("qwen2", 24, 896, 14, 2, 4864, 151_936, 32_768, 1e6) | _TIED,
    "qwen2.5-1.5b": _model("qwen2", 28, 1536, 12, 2, 8960, 151_936, 131_072, 1e6) | _TIED,
    "qwen2.5-3b": _model("qwen2", 36, 2048, 16, 2, 11008, 151_936, 32_768, 1e6) | _TIED,
    "qwen2.5-7b": _model("qwen2", 28, 3584, 28, 4, 18944, 152_064, 131_072, 1e6),
    "qwen2.5-14b": _model("qwen2", 48, 5120, 40, 8, 13824, 152_064, 131_072, 1e6),
    "qwen2.5-32b": _model("qwen2", 64, 5120, 40, 8, 27648, 152_064, 131_072, 1e6),
    "qwen2.5-72b": _model("qwen2", 80, 8192, 64, 8, 29568, 152_064, 131_072, 1e6),
    # Version 0.2, which has no sliding window.
    "mistral-7b": _model("mistral", 32, 4096, 32, 8, 14336, 32_000, 32_768, 1e6) | {"sliding_window": None},
    "mixtral-8x7b": _model("mixtral", 32, 4096, 32, 8, 14336, 32_000, 32_768, 1e6) | _EXPERTS,
}


def config_from(preset: str, **dimensions: int | bool | None) -> dict[str, Any]:
    """Return the config.json of a preset with single dimensions replaced (None: the preset's).

    Args:
        dimensions: by the names of `KEYS`.

    Raises:
        ConfigError: the preset is unknown, or a dimension cannot be used.
    """
    base = PRESETS.get(preset.lower())
    if base is None:
        raise ConfigError(
            f"unknown preset {preset!r}",
            expected=", ".join(PRESETS),
            found=repr(preset),
            cure="--preset 30m, with --layers, --width and --heads for sizes in between",
        )
    given = {name: value for name, value in dimensions.items() if value is not None}
    for name, value in given.items():
        least, most = int(name != "experts"), MOST[name in ("layers", "experts")]
        if name != "tied" and (type(value) is not int or not least <= value <= most):
            raise ConfigError(
                f"the model's {name} cannot be used",
                expected=f"an integer from {least} to {most:,}",
                found=repr(value),
                cure=f"--{name.replace('_', '-')} {256 if name in ('vocab', 'context') else 8}",
            )
    if "width" in given:
        given.setdefault("inner", _inner(given["width"]))
    if "heads" in given and base["num_key_value_heads"] == base["num_attention_heads"]:
        given.setdefault("kv_heads", given["heads"])
    config = {**base, **{KEYS[name]: value for name, value in given.items()}}
    if config.get("num_local_experts"):
        config["model_type"] = "mixtral"
        config["num_experts_per_tok"] = min(2, config["num_local_experts"])
    elif "num_local_experts" in config:
        config.pop("num_experts_per_tok", None)
        del config["num_local_experts"]
        if base["model_type"] == "mixtral":
            config |= {"model_type": "mistral", "sliding_window": None}
    width, heads, kept = (config[KEYS[name]] for name in ("width", "heads", "kv_heads"))
    if width % (2 * heads):
        raise ConfigError(
            "the model's width does not divide among its heads",
            expected=f"a multiple of {2 * heads} (rotary pairs)",
            found=width,
            cure=f"--width {ceil_to(width, 2 * heads)}, or fewer --heads",
        )
    if heads % kept:
        more = ceil_to(heads, kept)
        raise ConfigError(
            "the model's heads do not divide among those of keys and values",
            expected=f"a multiple of {kept}",
            found=heads,
            cure=f"--kv-heads {heads}" + (f", or --heads {more}" if width % (2 * more) == 0 else ""),
        )
    return config


#: The matrices that are not inner ones: those of the embedding and of the head.
OUTER: Final = ("model.embed_tokens.weight", "lm_head.weight")


def units_of(config: Mapping[str, Any]) -> Units:
    """Return (unit, [(parameter, shape)]) of a model, in the order of registration, without building it."""
    w, h, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kept = w // config["num_attention_heads"] * config["num_key_value_heads"]
    layer: list[tuple[str, tuple[int, ...]]] = []
    for name, out in (("q", w), ("k", kept), ("v", kept)):
        layer.append((f"self_attn.{name}_proj.weight", (out, w)))
        if config["model_type"] == "qwen2":
            layer.append((f"self_attn.{name}_proj.bias", (out,)))
    layer.append(("self_attn.o_proj.weight", (w, w)))
    if experts := config.get("num_local_experts"):
        layer += [
            ("mlp.gate.weight", (experts, w)),
            ("mlp.experts.gate_up_proj", (experts, 2 * h, w)),
            ("mlp.experts.down_proj", (experts, w, h)),
        ]
    else:
        layer += [(f"mlp.{name}_proj.weight", (h, w)) for name in ("gate", "up")]
        layer.append(("mlp.down_proj.weight", (w, h)))
    layer += [(f"{name}_layernorm.weight", (w,)) for name in ("input", "post_attention")]
    names = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    units: Units = [
        ("model.embed_tokens", [("model.embed_tokens.weight", (vocab, w))]),
        *((unit, [(f"{unit}.{name}", shape) for name, shape in layer]) for unit in names),
        ("model.norm", [("model.norm.weight", (w,))]),
    ]
    if len(names) == 1:  # nothing repeats: discovery does not look inside
        units = [("model", [param for _, params in units for param in params])]
    if not config["tie_word_embeddings"]:
        units.append(("lm_head", [("lm_head.weight", (vocab, w))]))
    return units


def idle_of(config: Mapping[str, Any]) -> int:
    """Return the number of parameters that a token does not pass: those of experts that are not chosen."""
    unchosen: int = config.get("num_local_experts", 0) - config.get("num_experts_per_tok", 0)
    expert: int = 3 * config["hidden_size"] * config["intermediate_size"]
    return config["num_hidden_layers"] * unchosen * expert  # type: ignore[no-any-return]


class Activations(NamedTuple):
    """Bytes that autograd keeps, and the most there are at once (with temporaries). `inputs`: how
    many of them are inputs of checkpointed blocks, `largest` how many one input has."""

    saved: int
    peak: int
    inputs: int = 0
    largest: int = 0


def activations_of(
    config: Mapping[str, Any], batch: int, sequence: int, itemsize: int, *, recompute: bool
) -> Activations:
    """Return the activations of one forward and backward, with the loss, in bytes.

    [Note: activations] A norm keeps its input in fp32, what it multiplies with its weight, what it returns,
    and the fp32 scale of each token. Attention keeps the rotated queries and keys, the values, what it
    returns, and the fp32 log-sum-exp of each head. An MLP keeps four tensors of its own width: the gate, its
    activation, the other branch and their product. With experts that counts for each expert that a token
    passes, with the token's row before and after it, and the router keeps shares, choices and the order of
    tokens (as transformers' grouped products have them). The root keeps the tokens, the targets, the
    rotation, its norm and the log-softmax of the logits in fp32.
    With recomputation every block keeps its input only, and one block at a time is whole.
    The peak adds what a backward needs at once: at the loss, two tensors of logits in fp32 (and those of the
    model); in a block, gradients of the MLP's inner layer (twice) and of the stream (three times, in fp32).

    Args:
        itemsize: bytes of an element of the compute dtype.
        recompute: whether blocks are computed again in the backward.
    """
    n, w, layers = batch * sequence, config["hidden_size"], config["num_hidden_layers"]
    heads, experts = config["num_attention_heads"], config.get("num_local_experts") or 0
    size = config.get("head_dim") or w // heads
    stream, wide = n * w * itemsize, 4 * n * w
    inner = n * config["intermediate_size"] * itemsize
    norm = wide + 2 * stream + 4 * n
    rows = n * size * itemsize  # of one head
    attention = 2 * rows * (heads + config["num_key_value_heads"]) + 4 * n * heads
    mlp = 4 * inner
    if experts:
        passed = config["num_experts_per_tok"]
        mlp = passed * (2 * stream + 4 * inner) + n * (4 * experts + 40 * passed + 4) + 4 * experts
        inner *= passed
    block = 2 * norm + attention + mlp
    logits = 4 * n * config["vocab_size"]
    root = norm + 2 * sequence * size * itemsize + 2 * 8 * n + logits + 4
    saved = layers * (stream if recompute else block) + root
    backward = (block if recompute else 0) + 2 * inner + 3 * wide
    loss = 2 * logits + (logits * itemsize // 4 if itemsize != 4 else 0)
    inputs, largest = (layers * stream, stream) if recompute else (0, 0)
    return Activations(saved, saved + max(backward, loss), inputs, largest)
