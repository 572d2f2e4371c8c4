"""Two ranks train random models, placed at random; and so with loads that come late, others on each. With
`--device lagging` on a device with memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import ranks
from .ranks import all_well, run_ranks

NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("first", "end", "options"),
    [
        pytest.param(0, 4, [], marks=pytest.mark.integration),
        (4, 6, ["--late"]),
        pytest.param(5, 205, [], marks=NIGHT),
        pytest.param(205, 255, ["--late"], marks=NIGHT),
    ],
)
def test_random_trainings_do_what_torch_does(
    first: int, end: int, options: list[str], tmp_path: Path
) -> None:
    arguments = [str(first), str(end), str(tmp_path), "--device", ranks.DEVICE, *options]
    script = "from tests.rank_seeds import main; main()"
    results = run_ranks(2, script, *arguments, seconds=30 * (end - first), device="cpu")
    assert all_well(results) == [f"{end - first} cases\n"] * 2
