"""Random models, loops and placements against plain torch, like `python -m tests.fuzz.run` by hand."""

from __future__ import annotations

import re

import pytest

from .command_line import python
from .fuzz.generate import THEMES, generate
from .quick import quick


def run(*arguments: str, timeout: float = 280) -> str:
    """Run the fuzzer in a process of its own, which forks before torch has a thread; return what it says."""
    done = python("-m", "tests.fuzz.run", *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def cases_in(output: str) -> int:
    found = re.search(r"^(\d+) cases in", output, re.MULTILINE)
    assert found is not None, output
    return int(found[1])


@pytest.mark.parametrize(
    ("first", "end"),
    quick([(0, 12), (12, 40), *((n, n + 40) for n in range(40, 200, 40))], [(0, 12)]),
)
def test_random_programs_do_what_torch_does(first: int, end: int) -> None:
    assert cases_in(run("--seeds", f"{first}:{end}")) == end - first


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(200, 5200, 500))
def test_many_random_programs_do_what_torch_does(first: int) -> None:
    assert cases_in(run("--seeds", f"{first}:{first + 500}", timeout=3000)) == 500


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
