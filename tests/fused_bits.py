"""Compares Triton's kernel of Adam, in Triton's interpreter on the CPU, with the native one.

TRITON_INTERPRET=1 python -m tests.fused_bits       (on the path: a triton that torch need not know)
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

from infinity.hardware import adam_fused, adam_reference, cpu_adam

from .device_bits import CHECKS
from .test_cpu_adam import OPTIONS, adam_segment, any_bits, same


def any_values() -> list[str]:
    """Updates of what there is of floats: infinities, NaNs and subnormals among them."""
    n = 20_000
    bits = any_bits(4 * n, torch.float32).view(4, n)
    here, there = ([*bits[:2].clone(), bits[2].abs()] for _ in range(2))
    segments = [adam_segment(7, n - 7, **OPTIONS)]
    cpu_adam.update_segments(here[0], here[1:], bits[3], None, segments)
    adam_reference.reference_segments(there[0], there[1:], bits[3], None, segments)
    return [] if all(map(same, here, there)) else ["any values"]


def main() -> int:
    """Print what differs; fail if something does, or if the kernel was not what ran."""
    warnings.filterwarnings("ignore", "(overflow|invalid|divide)", RuntimeWarning)  # numpy's
    warnings.filterwarnings("error", "Adam on", RuntimeWarning)
    adam_reference._FUSED_ON.add("cpu")
    inner, ran = adam_fused.update, 0

    def update(*given: Any) -> None:
        nonlocal ran
        ran += 1
        inner(*given)

    adam_fused.update = update
    checks = [check for name, check in CHECKS.items() if name.startswith(("adam", "segments"))]
    differ = [text for check in checks for text in check("cpu")] + any_values()
    sys.stdout.write("\n".join([*differ, f"{len(checks) + 1} checks\n"]))
    return 1 if differ or ran < len(checks) else 0


if __name__ == "__main__":
    sys.exit(main())
