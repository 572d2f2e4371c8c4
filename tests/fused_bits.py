"""Compares Triton's kernel of Adam, in Triton's interpreter, with the CPU's: the bits of random updates.

TRITON_INTERPRET=1 python -m tests.fused_bits COUNT       (on the path: a triton that torch need not know)
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch

from infinity.hardware import adam_fused, adam_reference, cpu_adam
from infinity.hardware.cpu_adam import Segment

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38)


def values(draw: np.random.Generator, n: int) -> torch.Tensor:
    found = (draw.standard_normal(n) * np.exp(draw.uniform(-40, 20, n))).astype(np.float32)
    for special in SPECIAL:
        if draw.random() < 0.5:
            found[draw.integers(n)] = special
    return torch.from_numpy(found)


def compare(seed: int) -> None:
    """Update some elements in the middle of a chunk in both ways."""
    draw = np.random.default_rng(seed)
    n = int(draw.choice([3, 100, 1027, 5000]))
    first = int(draw.integers(n))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    state, grad = (values(draw, n), values(draw, n), values(draw, n).abs()), values(draw, n).to(dtype)
    segment = Segment(
        first,
        n - first,
        float(draw.choice([1e-3, 0.0, 0.1])),
        float(draw.choice([0.9, 0.0, 0.3])),
        float(draw.choice([0.999, 0.99, 0.0])),
        float(draw.choice([1e-8, 1e-15, 0.0])),
        float(draw.choice([0.0, 0.1])),
        int(draw.choice([1, 2, 100_000])),
        float(draw.choice([1.0, 0.5, 1 / 3])),
        bool(draw.random() < 0.5),
        bool(draw.random() < 0.3),
    )
    ours, wanted = ([t.clone() for t in state] for _ in range(2))
    adam_fused.update(*ours, grad, first, n, cpu_adam._derive(segment))
    cpu_adam.adamw_update_segments(*wanted, grad, None, [segment])
    for a, b in zip(ours, wanted, strict=True):
        assert bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all()), segment


def main() -> int:
    """See above."""
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of overflows
    count = int(sys.argv[1])
    for seed in range(count):
        compare(seed)
    segment = Segment(0, 1, 1e-3, 0.9, 0.99, 1e-8, 0.1, 3, 0.5, decoupled=True)
    here, scalars = torch.device("cpu"), cpu_adam._derive(segment)
    assert adam_reference._fused_for(here, torch.bfloat16, scalars) is adam_fused.update
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong = [(torch.float16, lambda *_: None), (torch.float32, lambda *_: 1 / 0)]
        for dtype, kernel in wrong:
            adam_reference._fused = lambda kernel=kernel: kernel  # type: ignore[assignment]
            try:
                adam_reference._fused_for(here, dtype, scalars)
            except RuntimeWarning as said:
                assert "plain torch" in str(said)  # noqa: PT017
            else:
                raise AssertionError(dtype)
    sys.stdout.write(f"{count} updates: same\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
