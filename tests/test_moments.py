"""Moments in bf16 and in 8 bits under stress, beside those in fp32: what rounding to nearest would break.

A: the gradient falls by 10. B: gradients of one tensor on scales that differ by many orders of magnitude.
C: rows of an embedding that seldom have a gradient. D: gradients that rise and fall beside each other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import cpu_adam, log_codes

Gradients = Callable[[int, torch.Generator], torch.Tensor]
N = 1024
_ROWS = 16
_SPREAD = torch.exp(torch.randn(N, generator=torch.Generator().manual_seed(0)) * 2.5)
_OFTEN = (1 / (1 + torch.arange(_ROWS).float()))[
    torch.randperm(_ROWS, generator=torch.Generator().manual_seed(1))
]
_EVEN = torch.arange(N) % 2 == 0


def falls(step: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(N, generator=draw) * (1.0 if step <= 700 else 0.1)


def spread(step: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(N, generator=draw) * _SPREAD * 1e-3


def seldom(step: int, draw: torch.Generator) -> torch.Tensor:
    there = (torch.rand(_ROWS, 1, generator=draw) < _OFTEN[:, None]).float()
    return (there * torch.randn(_ROWS, N // _ROWS, generator=draw) * 1e-3).view(-1)


def in_turn(step: int, draw: torch.Generator) -> torch.Tensor:
    large = _EVEN if step <= 700 else ~_EVEN
    return torch.randn(N, generator=draw) * torch.where(large, 1.0, 0.1)


CASES: dict[str, tuple[Gradients, int]] = {
    "A": (falls, 3700),
    "B": (spread, 1000),
    "C": (seldom, 1500),
    "D": (in_turn, 2700),
}
#: What is allowed with moments in each form: the error of the updates, of the mean of √v ÷ exact, and the
#: standard deviation of that.
ALLOWED = {"bf16": (0.05, 0.01, 0.05), "8bit": (0.5, 0.03, 0.25)}


def kept_in(form: str) -> list[torch.Tensor]:
    if form == "8bit":
        codes = [torch.zeros(N, dtype=torch.uint8) for _ in range(2)]
        return [*codes, *(torch.zeros(N // MOMENT_BLOCK) for _ in range(2))]
    return [torch.zeros(N, dtype=torch.bfloat16 if form == "bf16" else torch.float32) for _ in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_updates_stay_as_large_as_those_of_fp32(name: str, one_thread: None) -> None:
    gradients, steps = CASES[name]
    draw, options = torch.Generator().manual_seed(3), cpu_adam.Adam(0.9, 0.999, 1e-8)
    moments = {form: kept_in(form) for form in ("fp32", *ALLOWED)}
    largest, error, size = dict.fromkeys(ALLOWED, 0.0), dict.fromkeys(ALLOWED, 0.0), 0.0
    for step in range(1, steps + 1):
        grad, updates = gradients(step, draw), {}
        key = cpu_adam.rounding_key("w", step)
        cut = cpu_adam.Segment(0, N, 0, key, step, 1.0, 0.0, 1.0, False, options)
        for form, kept in moments.items():
            updates[form] = torch.zeros(N)
            cpu_adam.update_segments(updates[form], kept, grad, None, [cut])
        if step > 20:
            size += float(updates["fp32"].square().mean())
            for form in ALLOWED:
                largest[form] = max(largest[form], float(updates[form].abs().max()))
                error[form] += float((updates[form] - updates["fp32"]).square().mean())
    exact = moments["fp32"][1]
    # What is below the range of its block is kept larger than it is.
    largest_of_block = exact.view(-1, MOMENT_BLOCK).amax(1).repeat_interleave(MOMENT_BLOCK)
    for form, (of_updates, of_mean, of_each) in ALLOWED.items():
        assert largest[form] < 10, form
        assert (error[form] / size) ** 0.5 < of_updates, form
        kept = moments[form]
        wide = kept[1].float() if form == "bf16" else log_codes.decode(kept[1], kept[3], squares=True)
        ratio = (wide.sqrt() / exact.sqrt())[exact > largest_of_block * 2.0**-30]
        assert abs(float(ratio.mean()) - 1) < of_mean, form
        assert float(ratio.std()) < of_each, form
