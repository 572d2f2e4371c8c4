"""Random models, loops and placements against plain torch, like `python -m tests.fuzz.run` by hand."""

from __future__ import annotations

import pytest

from .command_line import python
from .fuzz.generate import THEMES, generate

NIGHT = [pytest.param(n, n + 500, marks=pytest.mark.nightly) for n in range(100, 5100, 500)]


@pytest.mark.parametrize(("first", "end"), [(0, 12), *NIGHT])
def test_random_programs_do_what_torch_does(first: int, end: int) -> None:
    """In a process of its own, which forks before torch has a thread."""
    done = python("-m", "tests.fuzz.run", "--seeds", f"{first}:{end}", timeout=280 if end < 100 else 3000)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{end - first} cases in" in done.stdout


def test_the_fixed_seeds_reach_every_family() -> None:
    cases = [generate(seed) for seed in range(80)]
    assert cases == [generate(seed) for seed in range(80)]
    assert {case["family"] for case in cases} == set(THEMES)
    actions = {action["do"] for case in cases for action in case["program"]}
    assert actions >= {
        "penalty",
        "hessian",
        "gathered_graph",
        "hold",
        "read",
        "edit",
        "load",
        "fresh",
        "fail",
    }
    for memory in ("device_memory", "host_memory"):
        assert {case["config"][memory] for case in cases} == {"least", "tight", "large"}
