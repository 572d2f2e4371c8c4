"""How much of a device's arithmetic a run uses: its model FLOPs utilisation (MFU).

[Note: MFU] By the definition of PaLM (Chowdhery et al. 2022, 2204.02311, appendix B): the observed tokens per
second over those at the peak of the devices, where a token takes 6·N + 12·L·H·Q·T FLOPs. N are the parameters
that a token passes, L layers with H heads of width Q attend to T tokens. What is computed again in a backward
does not count, and neither does it count that attention is causal.
"""

from __future__ import annotations

import math
from typing import Final

import torch

#: TFLOP/s of dense matrix products in bf16 and fp16, by `torch.cuda.get_device_name` without "NVIDIA". From
#: NVIDIA's data sheets "H100 Tensor Core GPU" and "H200 Tensor Core GPU", whose figures are with sparsity,
#: twice those of dense products, and "A100 Tensor Core GPU". Whole names: a part of a GPU (MIG), or a variant
#: with a similar name, has another peak.
_TFLOPS: Final = {
    "H100 80GB HBM3": 1979 / 2,
    "H100 NVL": 1671 / 2,
    "H100 PCIe": 1513 / 2,
    "H200": 1979 / 2,
    "H200 NVL": 1671 / 2,
    **dict.fromkeys(("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"), 312),
}


def peak_flops(device: torch.device, dtype: str, ranks: int) -> float:
    """Return the FLOP/s of `device` by its data sheet; NaN where that is not known.

    Args:
        dtype: short name of the compute dtype.
        ranks: of this machine; where they share devices, nobody knows how.
    """
    if device.type != "cuda" or dtype not in ("bf16", "fp16") or ranks > torch.cuda.device_count():
        return math.nan
    return 1e12 * _TFLOPS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA "), math.nan)


def most_tokens(peak: float, parameters: int, attention: int | None, sequence: int) -> float:
    """Return the tokens per second at a `peak` in FLOP/s, by [Note: MFU]; NaN where that is not known.

    Args:
        parameters: that a token passes (N).
        attention: layers × heads × width of a head (L·H·Q), or None.
        sequence: tokens (T).
    """
    return math.nan if attention is None else peak / (6 * parameters + 12 * attention * sequence)
