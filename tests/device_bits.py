"""What a device computes beside the CPU's kernels: Adam, norms, rounding. Each answers with what differs.

Tests of the kernels have the same values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from infinity.core.sizes import MOMENT_BLOCK, NORM_BLOCK
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.cpu_adam import RULES, SGD, Adagrad, Adam, Lion, Segment, rounding_key

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 7, 64, 20_003)
OPTIONS: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=7)
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"decoupled": False, "maximize": True, "beta1": 0.3, "grad_scale": 0.37},
    {"weight_decay": 0.0, "beta1": 0.5, "beta2": 0.0, "eps": 0.0, "step": 1},
)


def adam_segment(
    start: int,
    numel: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
) -> Segment:
    options = Adam(beta1, beta2, eps, decoupled)
    return Segment(start, numel, 0, 0, step, lr, weight_decay, grad_scale, maximize, options)


def values(n: int, seed: int = 0) -> torch.Tensor:
    """Return (n,) float32 from subnormal to large, zeros among them."""
    return made(n, seed).clone()


@functools.lru_cache(maxsize=64)
def made(n: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * 10.0 ** torch.randint(-6, 3, (n,), generator=g).float()
    x[torch.rand(n, generator=g) < 0.02] = 0.0
    x[torch.rand(n, generator=g) < 0.02] *= 1e-36
    return x


def state(n: int, seed: int = 0) -> list[torch.Tensor]:
    """Return master, exp_avg and exp_avg_sq."""
    return [values(n, seed), values(n, seed + 1) * 0.1, values(n, seed + 2).square()]


def any_bits(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return (n,) random bit patterns: NaN, Inf and subnormals too."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(width)
    g = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max + 1, (n,), dtype=width, generator=g).view(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, any NaN being as good as another."""
    return bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all()) and a.shape == b.shape


def update(
    call: Any, tensors: list[torch.Tensor], grad: torch.Tensor, out: torch.Tensor | None, **options: Any
) -> None:
    """Update all elements by one segment."""
    call(tensors[0], tensors[1:], grad, out, [adam_segment(0, len(grad), **options)])


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
                update(cpu_adam.update_segments, *here, **chosen)
                update(adam_reference.reference_segments, *there, **chosen)
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
