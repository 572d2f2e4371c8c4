"""Two ranks train random models, placed at random; and so with loads that come late, others on each. With
`--device lagging` on a device with memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import ranks
from .quick import quick
from .ranks import all_well, run_ranks

SCRIPT = "from tests.rank_seeds import main; main()"
SEEDS = [(0, 5), (5, 55), (55, 105), (105, 305), (305, 505)]
LATE = [(0, 2), (2, 6), (6, 56), (56, 106)]


def train(first: int, end: int, folder: Path, *options: str) -> None:
    arguments = [str(first), str(end), str(folder), "--device", ranks.DEVICE, *options]
    results = run_ranks(2, SCRIPT, *arguments, seconds=30 * (end - first), device="cpu")
    assert all_well(results) == [f"{end - first} cases\n"] * 2


@pytest.mark.parametrize(("first", "end"), quick(SEEDS, SEEDS[:1]))
def test_random_trainings_do_what_torch_does(first: int, end: int, tmp_path: Path) -> None:
    train(first, end, tmp_path)


@pytest.mark.parametrize(("first", "end"), quick(LATE, LATE[:1]))
def test_random_trainings_with_late_loads_do_what_torch_does(first: int, end: int, tmp_path: Path) -> None:
    train(first, end, tmp_path, "--late")
