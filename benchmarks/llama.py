"""Llama as transformers has it, with SDPA; each block computes its forward again in the backward. No
infinity is imported here, neither this tree's nor another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The sizes of a model: 1.4 B unless told otherwise. `kv_heads` are those of keys and values."""

    layers: int = 24
    width: int = 2048
    mlp: int = 5632
    heads: int = 16
    kv_heads: int = 16
    vocabulary: int = 32_000

    @property
    def blocks(self) -> int:
        """Elements of the blocks' matrices."""
        attention = 2 * self.width * self.width * (self.heads + self.kv_heads) // self.heads
        return self.layers * (attention + 3 * self.width * self.mlp)

    @property
    def head(self) -> int:
        """Elements of the head, and of the embedding."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Their number."""
        return self.blocks + 2 * self.head + (2 * self.layers + 1) * self.width

    def flops(self, batch: int, sequence: int) -> dict[str, float]:
        """Return the FLOPs of a step. ``model``: as in a model FLOPs utilisation (2204.02311, appendix B).
        ``device``: what is computed: the blocks' forward twice, no product for the embedding, and attention
        only to what is before a token."""
        tokens, attention = batch * sequence, self.layers * self.width * sequence
        return {
            "model": tokens * (6.0 * self.parameters + 12 * attention),
            "device": tokens * (8.0 * self.blocks + 6 * self.head + 8 * attention),
        }

    def build(self) -> Any:
        """Return the module in bf16; few of its values are drawn (values.py)."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from values import Repeated

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=1 << 17,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with Repeated():
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def loss_of(self, batch: int, sequence: int, device: Any) -> Callable[[Any], Any]:
        """Return what computes the loss of a model on the sequences of every step."""
        import torch

        random = torch.Generator().manual_seed(1)
        data = torch.randint(0, self.vocabulary, (batch, sequence), generator=random).to(device)
        return lambda model: model(input_ids=data, labels=data).loss


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a contestant does that trains it (gpu_step.py).

    Attributes:
        kind: infinity, torch or deepspeed.
        clip: the norm to which gradients are clipped; None: they are not.
        reserve: bytes on the device that the engine leaves to activations; 0: as it does by default.
        settings: of `infinity.Config`, or of DeepSpeed's ``zero_optimization``.
    """

    kind: str
    model: Llama
    directory: str
    device: str
    clip: float | None
    reserve: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
