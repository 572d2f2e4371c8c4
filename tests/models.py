"""Small models with batches, one of each kind that users bring.

`FACTORIES[name](seed)` builds a model; `case(name)` adds batches and the loss. Batches are dicts of
tensors, loss functions take `(model, batch)` and return a scalar. There is no dropout, so a run is a
function of the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 96
CLASSES = 10
EXPERTS = 4

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, the batches that steps take in turn, and the loss."""

    name: str
    model: nn.Module
    batches: list[Batch] = field(repr=False)
    loss: Loss


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width), the same
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, *mlp_args: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x), *mlp_args)


class GPT(nn.Module):
    """tokens (batch, length) int64 → logits (batch, length, vocabulary).

    `recompute`: None, "reentrant" or "non-reentrant" activation checkpointing of each block. Only the first
    `depth` blocks are used; None: all.
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
        length: int = 32,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
        recompute: str | None = None,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.depth: int | None = None
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks[: self.depth]:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """images (batch, 3, 16, 16) → logits (batch, classes), with BatchNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(images))
        for layer in self.body:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


class LSTMClassifier(nn.Module):
    """tokens (batch, length) → logits (batch, classes)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0][:, -1])


class Experts(nn.Module):
    """x (batch, length, width) → the same; each token goes to one of the allowed experts.

    An expert that no token goes to is not called: its gradients are None.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        share, choice = self.gate(x).float().masked_fill(~allowed, -1e9).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mine = choice == k
            if bool(mine.any()):
                out = out.index_put((mine,), (expert(x[mine]) * share[mine].unsqueeze(-1)).to(x.dtype))
        return out


class MixtureOfExperts(nn.Module):
    """tokens (batch, length), allowed (experts,) bool → logits (batch, length, vocabulary)."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4, Experts(width)) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(x)


def huggingface(
    kind: str,
    *,
    tied: bool | None = None,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    layers: int = 2,
    vocab_size: int = VOCABULARY,
) -> Any:
    """A causal language model of `transformers`: "gpt2", "llama" or "qwen2"."""
    import transformers

    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=vocab_size,
                n_embd=hidden_size,
                n_inner=intermediate_size,
                n_layer=layers,
                n_head=4,
                n_positions=64,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                tie_word_embeddings=tied is not False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    return model(
        config(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=bool(tied),
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
        )
    )


def _next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(**{k: v for k, v in batch.items() if k != "targets"})
    return F.cross_entropy(logits.float().flatten(0, -2), batch["targets"].flatten())


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def _text(random: torch.Generator, k: int, size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (size, 17), generator=random)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _routed(random: torch.Generator, k: int, size: int) -> Batch:
    allowed = torch.arange(EXPERTS) != k % EXPERTS
    allowed[-1] = k > 2  # the last expert is not used in the first steps at all
    return {**_text(random, k, size), "allowed": allowed}


def _images(random: torch.Generator, k: int, size: int) -> Batch:
    return {
        "images": torch.randn(size, 3, 16, 16, generator=random),
        "targets": torch.randint(CLASSES, (size,), generator=random),
    }


def _labelled(random: torch.Generator, k: int, size: int) -> Batch:
    return {
        "tokens": torch.randint(VOCABULARY, (size, 12), generator=random),
        "targets": torch.randint(CLASSES, (size,), generator=random),
    }


def _hf_text(random: torch.Generator, k: int, size: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (size, 16), generator=random)
    return {"input_ids": tokens, "labels": tokens}


_KINDS: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., Batch], Loss]] = {
    "gpt": (GPT, _text, _next_token),
    "cnn": (ConvNet, _images, _next_token),
    "lstm": (LSTMClassifier, _labelled, _next_token),
    "moe": (MixtureOfExperts, _routed, _next_token),
    "gpt2": (lambda **sizes: huggingface("gpt2", **sizes), _hf_text, _own_loss),
    "llama": (lambda **sizes: huggingface("llama", **sizes), _hf_text, _own_loss),
    "qwen2": (lambda **sizes: huggingface("qwen2", **sizes), _hf_text, _own_loss),
}


def build(name: str, seed: int = 0, **sizes: Any) -> nn.Module:
    """Return the model `name` with the values of `seed`."""
    torch.manual_seed(seed)
    return _KINDS[name][0](**sizes)


#: name → a function that takes a seed and returns the model
FACTORIES: Mapping[str, Callable[[int], nn.Module]] = {
    name: (lambda seed, name=name: build(name, seed)) for name in _KINDS
}


def case(name: str, seed: int = 0, *, batches: int = 8, batch_size: int = 4, **sizes: Any) -> Case:
    """Return the model `name` with the values of `seed`, its batches and its loss."""
    _, make, loss = _KINDS[name]
    random = torch.Generator().manual_seed(seed + 1000)
    data = [make(random, k, batch_size) for k in range(batches)]
    return Case(name, build(name, seed, **sizes), data, loss)
