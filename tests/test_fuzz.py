"""Random models, loops and placements against plain torch, like `python -m tests.fuzz.run` by hand."""

from __future__ import annotations

import pytest

from .fuzz.generate import THEMES, generate
from .fuzz.run import run_cases
from .quick import quick


@pytest.mark.parametrize(
    ("first", "end"),
    [
        *quick([(0, 12), (12, 40), *((n, n + 40) for n in range(40, 200, 40))], [(0, 12)]),
        *(pytest.param(n, n + 500, marks=pytest.mark.nightly) for n in range(200, 5200, 500)),
    ],
)
def test_random_programs_do_what_torch_does(first: int, end: int) -> None:
    results = list(run_cases(map(generate, range(first, end))))
    assert not [result.line() for result in results if result.failed]
    assert len(results) == end - first


def test_a_case_is_a_function_of_its_seed() -> None:
    assert [generate(seed) for seed in range(50)] == [generate(seed) for seed in range(50)]


def test_the_fixed_seeds_reach_every_family() -> None:
    cases = [generate(seed) for seed in range(80)]
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
    for setting in ("least", "tight", "large"):
        assert any(case["config"]["device_memory"] == setting for case in cases)
        assert any(case["config"]["host_memory"] == setting for case in cases)
