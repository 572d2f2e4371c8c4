"""The optimizers' rules in one launch of a kernel for a GPU: the bits of the CPU's kernel.

It needs Triton, which torch's builds for CUDA bring along; without it adam_reference.py does the same in
plain torch, in some tens of launches.

Every operation is rounded once: [Note: one rounding per operation] in csrc/cpu_adam/adam_lane.inl. So nothing
is contracted (`enable_fp_fusion=False`), and divisions and square roots are those of IEEE 754 (`div_rn`,
`sqrt_rn`). Triton's interpreter gives these bits on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from infinity.core.sizes import MOMENT_BLOCK

from .cpu_adam import Scalars, codes_and_scales

_BLOCK: Final = 1024
#: Forms of moments, as the kernel has them.
_FORMS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


# Without annotations: Triton would look up what they name.
@triton.jit
def _bf16(bits):  # type: ignore[no-untyped-def]
    """Return numbers of bf16, given as int16. Triton's interpreter converts subnormals to other numbers."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _hashed(x):  # type: ignore[no-untyped-def]
    """Return lowbias32 of each number (uint32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _load(moment, scales, at, inside, row, begun, form: tl.constexpr, squares: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a moment in fp32. Codes become it as in `decode` of log_codes.py."""
    if form == 0:
        return tl.load(moment + at, inside)
    elif form == 1:
        return _bf16(tl.load(moment + at, inside))
    else:
        code = tl.load(moment + at, inside, other=0).to(tl.int32)
        size = code if squares else code & 127
        bits = tl.where(size > 0, (size << 20) + tl.load(scales + row, begun, other=0), 0)
        if not squares:
            bits = bits | ((code & 128) << 24)
        return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    moment,
    scales,
    at,
    inside,
    row,
    begun,
    form: tl.constexpr,
    squares: tl.constexpr,
    x,
    number: tl.constexpr,
    index,
    key,
):
    """Store the moment of this number. [Note: stochastic rounding] in csrc/cpu_adam/adam_lane.inl; codes are
    made as in `encode` of log_codes.py."""
    if form == 0:
        tl.store(moment + at, x, inside)
    else:
        low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
        random = _hashed(low ^ key.to(tl.uint32, bitcast=True) ^ _hashed(high))
        below = random >> 16 if number else random & 0xFFFF
        if form == 1:
            bits = (x.to(tl.uint32, bitcast=True) + below) >> 16
            tl.store(moment + at, tl.where(x == x, bits, 0xFFFF).to(tl.int16), inside)
        else:
            bits = x.to(tl.int32, bitcast=True)
            magnitude = tl.where(inside, tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000), 0)
            top = (tl.max(magnitude, 1, keep_dims=True) + 0xFFFFF) >> 20
            base = tl.maximum(top - (255 if squares else 127), 0)
            code = ((magnitude + (below << 4).to(tl.int32)) >> 20) - base
            if squares:  # what is not 0 stays so
                code = tl.maximum(code, tl.minimum(magnitude, 1))
            else:
                code = tl.where(bits < 0, tl.maximum(code, 0) | 128, tl.maximum(code, 0))
            tl.store(scales + row, base << 20, begun)
            tl.store(moment + at, code.to(tl.uint8), inside)


@triton.jit(do_not_specialize=["place", "key"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    master,
    first_moment,
    second_moment,
    first_scales,
    second_scales,
    grad,
    first,
    last,
    place,
    key,
    grad_scale,
    decay,
    l2,
    x0,
    x1,
    x2,
    x3,
    x4,
    x5,
    flag: tl.constexpr,
    rule: tl.constexpr,
    has_l2: tl.constexpr,
    form: tl.constexpr,
    block: tl.constexpr,
    coded: tl.constexpr,
):
    """One program for each block. `rule` and `flag`, and x0 to x5: as in csrc/cpu_adam/rules.h. `coded`: how
    many elements share a scale, of moments that are codes; these are a row of the program's tile."""
    begin = first + tl.program_id(0).to(tl.int64) * block
    if form == 2:
        row = begin // coded + tl.arange(0, block // coded)[:, None]
        at = row * coded + tl.arange(0, coded)[None, :]
        begun = row * coded < last
    else:
        row = begin + tl.arange(0, block)
        at = row
        begun = row < last
    inside = at < last
    p = tl.load(master + at, inside)
    g = tl.load(grad + at, inside)
    if grad.dtype.element_ty == tl.bfloat16:
        g = _bf16(g.to(tl.int16, bitcast=True))
    g = g.to(tl.float32) * grad_scale
    if has_l2:  # rounded once: the product is exact
        g = (p.to(tl.float64) * l2 + g.to(tl.float64)).to(tl.float32)
    p = p * decay
    index = at - first + place
    if rule == 0:  # Adam
        m = _load(first_moment, first_scales, at, inside, row, begun, form, False)
        v = _load(second_moment, second_scales, at, inside, row, begun, form, True)
        way = (g - m) * x0
        m = (g if flag else m) + way
        v = v * x1
        v = v + (g * x2) * g
        d = tl.sqrt_rn(v) * x3 + x4
        p = p + tl.div_rn(m * x5, d)
        _store(first_moment, first_scales, at, inside, row, begun, form, False, m, 0, index, key)
        _store(second_moment, second_scales, at, inside, row, begun, form, True, v, 1, index, key)
    elif rule == 1:  # SGD without a buffer
        p = p + g * x0
    elif rule == 2:  # SGD with one
        m = _load(first_moment, first_scales, at, inside, row, begun, form, False)
        moved = m * x1 + g * x2
        m = tl.where(x1 != 0, moved, m)
        g = tl.where(x1 != 0, g + moved * x1 if flag else moved, g)
        p = p + g * x0
        _store(first_moment, first_scales, at, inside, row, begun, form, False, m, 0, index, key)
    elif rule == 3:  # Lion
        m = _load(first_moment, first_scales, at, inside, row, begun, form, False)
        u = m * x1 + g * x2
        p = p + tl.where(u > 0, x0, tl.where(u < 0, -x0, 0.0))
        m = m * x3 + g * x4
        _store(first_moment, first_scales, at, inside, row, begun, form, False, m, 0, index, key)
    else:  # Adagrad
        tl.static_assert(rule == 4)
        m = _load(first_moment, first_scales, at, inside, row, begun, form, True)
        m = m + g * g
        p = p + tl.div_rn(g * x0, tl.sqrt_rn(m) + x1)
        _store(first_moment, first_scales, at, inside, row, begun, form, True, m, 0, index, key)
    tl.store(master + at, p, inside)


def update(
    rule: int,
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    grad: torch.Tensor,
    first: int,
    last: int,
    scalars: Scalars,
    place: int,
    key: int,
) -> None:
    """Update elements from `first` on, before `last`, of a flat state by gradients of any dtype.

    Args:
        rule: its number in the kernel, of `RULES`.
        moments: those of the rule, all float32; or all rounded stochastically, by `place`, the index within
            the parameter of the element `first`, and `key`, that of `rounding_key`: all bfloat16, or codes
            and then their scales, for which `first` is where a block begins.
    """
    if first >= last:
        return
    kept, scales = codes_and_scales(moments)
    form = _FORMS[kept[0].dtype] if kept else 0
    each: list[Any] = [moment.view(torch.int16) if form == 1 else moment for moment in kept]
    bits = [scale.view(torch.int32) for scale in scales]
    *numbers, flag = scalars
    _update[(triton.cdiv(last - first, _BLOCK),)](
        master,
        *(each + 2 * [master])[:2],  # a rule without such a moment does not touch it
        *(bits + 2 * [master])[:2],
        grad,
        first,
        last,
        place,
        key - ((key >> 31) << 32),  # the same 32 bits, so that it always is an int32
        *numbers,
        flag=flag,
        rule=rule,
        has_l2=numbers[2] != 0.0,
        form=form,
        block=_BLOCK,
        coded=MOMENT_BLOCK,
        enable_fp_fusion=False,
    )
