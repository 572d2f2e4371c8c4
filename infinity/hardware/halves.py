"""A master in two halves, the bf16 copy and the lower 16 bits, in plain torch: the bits of the native kernel.

See [Note: a split master] in csrc/cpu_adam/adam_lane.inl.
"""

from __future__ import annotations

from typing import Final

import torch

_SLICE: Final = 1 << 18  # elements at once: temporaries of about 1 MiB
_NAN: Final = 0x7FC00000


def join(copy: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Put the master into `out`, and return it.

    Args:
        copy: (n,) bfloat16.
        low: (n,) int16.
        out: (n,) float32. All are on one device.
    """
    for begin in range(0, low.numel(), _SLICE):
        part = slice(begin, begin + _SLICE)
        upper = copy[part].view(torch.int16).int() << 16
        lower = low[part].int() & 0xFFFF
        values = (upper - ((lower >> 15) << 16) | lower).view(torch.float32)
        torch.where(values.isnan(), upper.view(torch.float32), values, out=out[part])
    return out


def split(master: torch.Tensor, copy: torch.Tensor, low: torch.Tensor) -> None:
    """Put a master, fp32, into its halves; see `join`."""
    for begin in range(0, low.numel(), _SLICE):
        part = slice(begin, begin + _SLICE)
        bits = master[part].view(torch.int32)
        bits = torch.where(master[part].isnan(), _NAN, bits)
        copy[part].view(torch.int16).copy_((bits + 0x8000) >> 16)
        low[part].copy_(bits)
