"""Muon's arithmetic, on tensors of any one device: torch's own operators, in the order of `torch.optim.Muon`.

An update of a matrix has three parts. The first and the third go element by element, so that a piece of the
matrix, flat, gives the bits of the whole. Only the second needs the matrix at once, in its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from .adam_reference import SLICE, round_stochastically

#: Of the polynomial, as torch has them.
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)


class Muon(NamedTuple):
    """The options of `torch.optim.Muon`. Moment: momentum_buffer."""

    momentum: float
    nesterov: bool
    ns_steps: int
    ns_coefficients: tuple[float, float, float]
    eps: float
    adjust_lr_fn: str | None


@torch.no_grad()
def add_to_momentum(
    moment: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    options: Muon,
    *,
    grad_scale: float,
    first: int,
    key: int,
) -> None:
    """Move a momentum towards the gradient, and put what is to be orthogonalized into `out`.

    Args:
        moment: (n,) float32, or bfloat16, which is rounded stochastically.
        grad: (n,) float32, bfloat16 or float16.
        out: (n,) bfloat16, in which the orthogonalization computes.
        grad_scale: multiplies the gradient first (unscaling, clipping).
        first, key: see `Segment` of cpu_adam.py; they matter to moments in bf16 alone.
    """
    for start in range(0, moment.numel(), SLICE):  # which bounds the temporary memory
        part = slice(start, start + SLICE)
        g = grad[part].float()
        if grad_scale != 1.0:
            g = g * grad_scale
        wide = moment[part].float()  # the moment itself, if it is fp32
        wide.lerp_(g, 1 - options.momentum)
        out[part].copy_(g.lerp(wide, options.momentum) if options.nesterov else wide)
        if moment.dtype is not torch.float32:
            round_stochastically([moment[part]], [wide], first + start, key)


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, options: Muon) -> torch.Tensor:
    """Return the orthogonal matrix next to `matrix`, about, by the Newton–Schulz iteration of torch.

    Args:
        matrix: (m, n) bfloat16. It stays as it is.

    Returns:
        (m, n) bfloat16, perhaps `matrix` itself or a view of another layout.
    """
    a, b, c = options.ns_coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x.div(x.norm().clamp(min=options.eps))
    for _ in range(options.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@torch.no_grad()
def step_along(
    master: torch.Tensor,
    update: torch.Tensor,
    options: Muon,
    shape: Sequence[int],
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """Decay a parameter of `shape`, or a piece of it, and take its step along an orthogonal `update`."""
    rows, columns = shape
    ratio = 1.0
    if options.adjust_lr_fn in (None, "original"):
        ratio = math.sqrt(max(1, rows / columns))
    elif options.adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    master.mul_(1 - lr * weight_decay)
    master.add_(update, alpha=-(lr * ratio))
