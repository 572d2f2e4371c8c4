"""The inputs and outputs of a model of `infinity.inference`: none of them has a gradient."""

from __future__ import annotations

from typing import Any

import torch

from infinity.optim.misuse import not_for_training

from .containers import mapped


class _Refuse(torch.autograd.Function):
    """The identity, with a backward that says what to write. Of a model that has no gradients torch would
    say that a tensor does not require one, and not whose fault that is."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)  # it is the same tensor: what a user does in place goes on to work
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise not_for_training("a backward")


def without_gradients(given: Any) -> Any:
    """Return what a forward is given, detached."""
    return mapped(given, lambda t: t.detach() if t.requires_grad else t)


def refuse_backward(output: Any) -> Any:
    """Return the outputs of a forward, such that a backward of them raises `ParameterError`."""
    return mapped(output, _refused)


def _refused(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.requires_grad or tensor.is_inference():
        return tensor
    if (func := torch._C._functorch.peek_interpreter_stack()) is not None:
        if func.key() != torch._C._functorch.TransformType.Vmap:
            raise not_for_training("torch.func.grad, vjp, jacrev or jvp")
        return tensor
    anchor = torch.empty(0, device=tensor.device, requires_grad=True)
    refused: torch.Tensor = _Refuse.apply(anchor, tensor.detach())
    return refused
