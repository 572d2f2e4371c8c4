"""Moments in bf16 under stress, beside those in fp32: what rounding to nearest, or 8 bits, would break.

A: the gradient falls by 10. B: gradients of one tensor on scales that differ by many orders of magnitude.
C: rows of an embedding that seldom have a gradient. D: gradients that rise and fall beside each other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity.hardware import cpu_adam

Gradients = Callable[[int, torch.Generator], torch.Tensor]
N = 2048
_ROWS = 16
_SPREAD = torch.exp(torch.randn(N, generator=torch.Generator().manual_seed(0)) * 2.5)
_OFTEN = (1 / (1 + torch.arange(_ROWS).float()))[
    torch.randperm(_ROWS, generator=torch.Generator().manual_seed(1))
]
_EVEN = torch.arange(N) % 2 == 0


def falls(step: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(N, generator=draw) * (1.0 if step <= 1500 else 0.1)


def spread(step: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(N, generator=draw) * _SPREAD * 1e-3


def seldom(step: int, draw: torch.Generator) -> torch.Tensor:
    there = (torch.rand(_ROWS, 1, generator=draw) < _OFTEN[:, None]).float()
    return (there * torch.randn(_ROWS, N // _ROWS, generator=draw) * 1e-3).view(-1)


def in_turn(step: int, draw: torch.Generator) -> torch.Tensor:
    large = _EVEN if step <= 700 else ~_EVEN
    return torch.randn(N, generator=draw) * torch.where(large, 1.0, 0.1)


#: Gradients, steps, and the standard deviation of √v ÷ exact that is allowed (bf16 has 8 bits).
CASES: dict[str, tuple[Gradients, int, float]] = {
    "A": (falls, 5500, 0.05),
    "B": (spread, 1000, 0.05),
    "C": (seldom, 1500, 0.05),
    "D": (in_turn, 2700, 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_stay_as_large_as_those_of_fp32(name: str) -> None:
    gradients, steps, allowed = CASES[name]
    draw, options = torch.Generator().manual_seed(3), cpu_adam.Adam(0.9, 0.999, 1e-8)
    exact, rounded = ([torch.zeros(N, dtype=d) for _ in range(2)] for d in (torch.float32, torch.bfloat16))
    largest = error = size = 0.0
    for step in range(1, steps + 1):
        grad, updates = gradients(step, draw), []
        for moments in (exact, rounded):
            master = torch.zeros(N)
            key = cpu_adam.rounding_key("w", step)
            cut = cpu_adam.Segment(0, N, 0, key, step, 1.0, 0.0, 1.0, False, options)
            cpu_adam.update_segments(master, moments, grad, None, [cut])
            updates.append(master)
        if step > 20:
            largest = max(largest, float(updates[1].abs().max()))
            error += float((updates[1] - updates[0]).square().mean())
            size += float(updates[0].square().mean())
    assert largest < 10
    assert (error / size) ** 0.5 < 0.05
    ratio = rounded[1].float().sqrt() / exact[1].sqrt()
    assert abs(float(ratio.mean()) - 1) < 0.01
    assert float(ratio.std()) < allowed
