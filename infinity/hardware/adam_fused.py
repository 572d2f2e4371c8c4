"""AdamW and Adam in one launch of a kernel for a GPU: the bits of the CPU's kernel.

It needs Triton, which torch's builds for CUDA bring along; without it adam_reference.py does the same in
plain torch, in some tens of launches.

Every operation is rounded once: [Note: one rounding per operation] in csrc/cpu_adam/adam_lane.inl. So nothing
is contracted (`enable_fp_fusion=False`), and divisions and square roots are those of IEEE 754 (`div_rn`,
`sqrt_rn`). Triton's interpreter gives these bits on a CPU; no GPU has run it yet.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from .cpu_adam import Scalars

_BLOCK: Final = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _update(
    master: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    grad: Any,
    first: Any,
    last: Any,
    grad_scale: Any,
    decay: Any,
    l2: Any,
    lerp: Any,
    beta2: Any,
    square: Any,
    inverse_root: Any,
    eps: Any,
    step_size: Any,
    from_grad: tl.constexpr,
    has_l2: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = first + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < last
    p = tl.load(master + at, inside)
    m = tl.load(exp_avg + at, inside)
    v = tl.load(exp_avg_sq + at, inside)
    g = tl.load(grad + at, inside)
    if grad.dtype.element_ty == tl.bfloat16:  # Triton's interpreter converts subnormals to other numbers
        g = (g.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g.to(tl.float32) * grad_scale
    if has_l2:  # rounded once: the product is exact
        g = (p.to(tl.float64) * l2 + g.to(tl.float64)).to(tl.float32)
    p = p * decay
    way = (g - m) * lerp
    m = (g if from_grad else m) + way
    v = v * beta2
    v = v + (g * square) * g
    d = tl.sqrt_rn(v) * inverse_root + eps
    p = p + tl.div_rn(m * step_size, d)
    tl.store(master + at, p, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)


def update(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    last: int,
    scalars: Scalars,
) -> None:
    """Update elements from `first` on, before `last`, of a flat float32 state by gradients of any dtype."""
    *numbers, from_grad = scalars
    if first < last:
        _update[(triton.cdiv(last - first, _BLOCK),)](
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            first,
            last,
            *numbers,
            from_grad=from_grad,
            has_l2=numbers[2] != 0.0,
            block=_BLOCK,
            enable_fp_fusion=False,
        )
