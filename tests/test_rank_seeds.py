"""Two ranks train random models, placed at random, with loads that come late on each by another seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .quick import quick
from .ranks import all_well, run_ranks

SCRIPT = "from tests.rank_seeds import main; main()"


@pytest.mark.processes
@pytest.mark.parametrize(("first", "end"), quick([(0, 2), (2, 5), (5, 55), (55, 105)], [(0, 2)], [(2, 5)]))
def test_random_trainings_with_late_loads_do_what_torch_does(first: int, end: int, tmp_path: Path) -> None:
    results = run_ranks(2, SCRIPT, str(first), str(end), str(tmp_path), seconds=30 * (end - first))
    assert all_well(results) == [f"{end - first} cases\n"] * 2
