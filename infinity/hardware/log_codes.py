"""Moments in 8 bits, in plain torch on any device: from codes and scales to values, and back.

[Note: moments in 8 bits] in csrc/cpu_adam/adam_lane.inl describes the code. The native kernel gives the same
bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from infinity.core.sizes import MOMENT_BLOCK

#: Where a code ends in the bits of a float, after three bits of the fraction; and the bits below.
_AT: Final = 20
_BELOW: Final = (1 << _AT) - 1
_MAGNITUDE: Final = 0x7FFFFFFF
_NAN: Final = 0x7FC00000
#: What rounds a magnitude to the nearest code.
NEAREST: Final = 1 << (_AT - 1)


def decode(codes: torch.Tensor, scales: torch.Tensor, *, squares: bool, first: int = 0) -> torch.Tensor:
    """Return the values of `codes` (uint8), in fp32.

    Args:
        scales: of the blocks that `codes` lie in.
        squares: whether they are of sums of squares, which have no sign.
        first: elements between the begin of the first block and the first code.
    """
    code = codes.int()
    size = code if squares else code & 127
    bits = (size << _AT) + _of_each(scales.view(torch.int32), codes.numel(), first)
    bits = torch.where(size > 0, bits, 0)
    if not squares:
        bits = torch.where(code > 127, bits | ~_MAGNITUDE, bits)
    return bits.view(torch.float32)


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    squares: bool,
    below: torch.Tensor | int = NEAREST,
) -> None:
    """Put fp32 values, which begin at a block, into `codes` and `scales`. `below` is added below the last
    place of a code, and then cut off: random bits (int32), or what rounds to nearest."""
    bits = values.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).clamp(max=_NAN)
    top = pad(magnitude, (0, -values.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK).amax(1)
    base = ((top + _BELOW >> _AT) - (255 if squares else 127)).clamp(min=0)
    scales.view(torch.int32).copy_(base << _AT)
    code = (((magnitude + below) >> _AT) - _of_each(base, values.numel(), 0)).clamp(min=0)
    least = magnitude.clamp(max=1)  # a sum of squares that is not 0 stays so
    codes.copy_(torch.maximum(code, least) if squares else torch.where(bits < 0, code | 128, code))


def _of_each(blocks: torch.Tensor, numel: int, first: int) -> torch.Tensor:
    """Return what each of `numel` elements has of its block."""
    return blocks.repeat_interleave(MOMENT_BLOCK)[first : first + numel]
