"""Train a small Llama whose head is fused with its loss, in torch and in the engine; print what each came to.

A process of its own: no other test must see what these libraries import (triton) and replace.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch

import infinity

from .models import huggingface
from .test_ecosystem import Wrap, adamw, tokens


def liger(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    off = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
    apply_liger_kernel_to_llama(**off, fused_linear_cross_entropy=True, model=model)


def cut_cross_entropy(model: Any) -> None:
    from cut_cross_entropy import linear_cross_entropy
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        with infinity.gathered(self.lm_head.weight):
            loss = linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, impl="torch_compile")
        return CausalLMOutputWithPast(loss=loss)

    model.forward = MethodType(forward, model)


def train(model: Any, wrap: Wrap) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = wrap(model, adamw(model))
    losses = []
    for step in range(4):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model.state_dict()


def main(head: str, packages: str, nvme: str) -> None:
    """`packages`: the folder that has the libraries."""
    sys.path.append(packages)
    os.environ["TRITON_INTERPRET"] = "1"

    def build() -> Any:
        torch.manual_seed(0)
        return huggingface("llama", tied=head != "liger")

    losses, parameters = train(build(), Wrap(None))
    model, wrap = build(), Wrap(Path(nvme))
    (liger if head == "liger" else cut_cross_entropy)(model)
    found, trained = train(model, wrap)
    equal = all(
        torch.allclose(trained[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()))
        for name, value in parameters.items()
    )
    wrap.close()
    sys.stdout.write(json.dumps({"torch": losses, "engine": found, "parameters": equal}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
