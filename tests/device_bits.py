"""What a device computes beside the CPU's kernels: Adam, norms, rounding. Each answers with what differs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.core.sizes import MOMENT_BLOCK, NORM_BLOCK
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.cpu_adam import RULES, SGD, Adagrad, Adam, Lion, Segment, rounding_key

from .test_cpu_adam import DTYPES, OPTIONS, SIZES, VARIANTS, adam_segment, any_bits, same, state, values


def adam(device: str, grad: torch.dtype, out: torch.dtype | None) -> list[str]:
    """Three updates, of all sizes and options; `out`: the dtype of the copies."""
    differ = []
    for n in SIZES:
        for options in VARIANTS:
            gradient = values(n, 9).to(grad)
            here = state(n), gradient, None if out is None else torch.zeros(n, dtype=out)
            there = (
                [t.to(device) for t in state(n)],
                gradient.to(device),
                None if here[2] is None else here[2].to(device),
            )
            for step in (1, 2, 3):
                chosen = {**OPTIONS, "step": step, **options}
                cpu_adam.adamw_update(*here[0], here[1], here[2], **chosen)
                adam_reference.adamw_reference(*there[0], there[1], there[2], **chosen)
            for found, wanted in zip([*there[0], there[2]], [*here[0], here[2]], strict=True):
                if found is not None and wanted is not None and not same(found.cpu(), wanted):
                    differ.append(f"Adam, {n} elements, {grad} to {out}, {options}")
    return differ


def segments(device: str) -> list[str]:
    """One update of several param groups."""
    n = 100_003
    scalars = {k: v for k, v in OPTIONS.items() if k != "step"}
    groups = [
        adam_segment(0, 17, **scalars, step=1),
        adam_segment(17, 40_000, **{**scalars, "lr": 3e-3, "weight_decay": 0.0}, step=9),
        adam_segment(50_000, 50_003, **scalars, step=2, grad_scale=0.5, decoupled=False),
    ]
    here, there = state(n), [t.to(device) for t in state(n)]
    gradient = values(n, 9)
    cpu_adam.update_segments(here[0], here[1:], gradient, None, groups)
    adam_reference.reference_segments(there[0], there[1:], gradient.to(device), None, groups)
    same_all = [same(found.cpu(), wanted) for found, wanted in zip(there, here, strict=True)]
    return [] if all(same_all) else ["Adam by segments"]


def rules(device: str, dtype: torch.dtype) -> list[str]:
    """Three updates by each rule, with moments in `dtype`; the upper half of an index changes in each."""
    n, differ = 100_003, []
    every = (
        Adam(0.9, 0.999, 1e-8),
        SGD(0.9, 0.5, True),
        SGD(0.0, 0.0, False),
        Lion(0.9, 0.99),
        Adagrad(0.1, 1e-9),
    )
    for options in every:
        for count in RULES[type(options)]:
            here = state(n)[0], [m.to(dtype) for m in state(n)[1:][:count]]
            begin, place = 3, (1 << 32) - 77
            if dtype is torch.uint8:  # as before the first update: a code means nothing without its scale
                scales = [torch.zeros(-(-n // MOMENT_BLOCK)) for _ in range(count)]
                here = here[0], [torch.zeros(n, dtype=dtype) for _ in range(count)] + scales
                begin, place = MOMENT_BLOCK, (1 << 32) - 3 * MOMENT_BLOCK
            there = here[0].to(device), [m.to(device) for m in here[1]]
            there = there[0].clone(), [m.clone() for m in there[1]]
            for step in (1, 2, 3):
                key, grad = rounding_key("w", step), values(n, 9 + step).bfloat16()
                cut = Segment(begin, n - begin, place, key, step, 1e-3, 0.1, 0.7, False, options)
                cpu_adam.update_segments(*here, grad, None, [cut])
                adam_reference.reference_segments(*there, grad.to(device), None, [cut])
            pairs = zip([there[0], *there[1]], [here[0], *here[1]], strict=True)
            if not all(same(found.cpu(), wanted) for found, wanted in pairs):
                differ.append(f"{options}, {count} moments in {dtype}")
    return differ


def norms(device: str, dtype: torch.dtype) -> list[str]:
    """Sums of squares."""
    differ = []
    for n in (1, 15, 16, 1000, NORM_BLOCK, NORM_BLOCK + 1, 17 * NORM_BLOCK + 5):
        tensor = values(n).to(dtype)
        found = adam_reference.sum_of_squares_reference(tensor.to(device))
        if found.tobytes() != cpu_adam.sum_of_squares(tensor).tobytes():
            differ.append(f"norm of {n} elements, {dtype}")
    return differ


def rounding(device: str, dtype: torch.dtype) -> list[str]:
    """Subnormals are kept, halves go to even, Inf and NaN stay what they are."""
    wide = any_bits(1 << 20, torch.float32)
    narrow = torch.empty(wide.shape, dtype=dtype)
    cpu_adam.convert(narrow, wide)
    found = torch.empty(wide.shape, dtype=dtype, device=device).copy_(wide.to(device))
    return [] if same(found.cpu(), narrow) else [f"copies in {dtype}"]


#: All of them, by name; the device is what they are called with.
CHECKS: dict[str, Callable[[str], list[str]]] = {
    **{
        f"adam {grad} {out}": lambda device, grad=grad, out=out: adam(device, grad, out)
        for grad in DTYPES
        for out in (None, *DTYPES)
    },
    "segments": segments,
    **{
        f"rules {d}": lambda device, d=d: rules(device, d)
        for d in (torch.float32, torch.bfloat16, torch.uint8)
    },
    **{f"norms {dtype}": lambda device, dtype=dtype: norms(device, dtype) for dtype in DTYPES},
    **{
        f"rounding {dtype}": lambda device, dtype=dtype: rounding(device, dtype)
        for dtype in (torch.bfloat16, torch.float16)
    },
}
