"""Two ranks train random models, placed at random; and so with loads that come late, others on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from .quick import quick
from .ranks import all_well, run_ranks

SCRIPT = "from tests.rank_seeds import main; main()"
SEEDS = [(0, 5), (5, 55), (55, 105), (105, 305), (305, 505)]
LATE = [(0, 2), (2, 6), (6, 56), (56, 106)]


@pytest.mark.processes
@pytest.mark.parametrize(("first", "end"), quick(SEEDS, SEEDS[:1], SEEDS[1:3]))
def test_random_trainings_do_what_torch_does(first: int, end: int, tmp_path: Path) -> None:
    results = run_ranks(2, SCRIPT, str(first), str(end), str(tmp_path), seconds=30 * (end - first))
    assert all_well(results) == [f"{end - first} cases\n"] * 2


@pytest.mark.processes
@pytest.mark.parametrize(("first", "end"), quick(LATE, LATE[:1], LATE[1:2]))
def test_random_trainings_with_late_loads_do_what_torch_does(first: int, end: int, tmp_path: Path) -> None:
    results = run_ranks(2, SCRIPT, str(first), str(end), str(tmp_path), "late", seconds=30 * (end - first))
    assert all_well(results) == [f"{end - first} cases\n"] * 2
