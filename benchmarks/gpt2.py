"""GPT-2 as transformers has it, without dropout. With the standard sizes it has 203 M parameters, the size
that the peers' figures are for. Neither this tree's infinity nor another one is imported here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GPT2:
    """The sizes of a model. `repeated`: few of its values are drawn, the rest repeat them (values.py)."""

    layers: int = 12
    width: int = 1024
    vocabulary: int = 50257
    positions: int = 256
    repeated: bool = False

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.width // 64)

    @property
    def parameters(self) -> int:
        """Their number."""
        blocks = self.layers * (12 * self.width + 13)
        return (blocks + self.vocabulary + self.positions + 2) * self.width

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit: a block, or an embedding."""
        return max(12 * self.width + 13, self.vocabulary, self.positions) * self.width

    def build(self) -> Any:
        """Return the module, with the values of seed 0."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        from values import Repeated

        torch.manual_seed(0)
        sizes = {
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "vocab_size": self.vocabulary,
            "n_positions": self.positions,
        }
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        with Repeated() if self.repeated else contextlib.nullcontext():
            return GPT2LMHeadModel(config)

    def loss_of(self, tokens: int, device: Any) -> Callable[[Any], Any]:
        """Return what computes the loss of a model on the one sequence of every step."""
        import torch

        random = torch.Generator().manual_seed(1)
        data = torch.randint(0, self.vocabulary, (1, tokens), generator=random).to(device)
        return lambda model: model(input_ids=data, labels=data).loss
