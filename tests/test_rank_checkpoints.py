"""Checkpoints and exports of several ranks: the same files, whoever writes them, and one end for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .quick import quick
from .rank_checkpoints import contents, trained
from .ranks import all_well, run_ranks
from .test_ranks import settings_of

SCRIPT = "from tests.rank_checkpoints import main; main()"


def job(folder: Path, place: str, dtype: str = "bf16", *, stage: int = 3, **more: Any) -> Any:
    config = settings_of(folder, place, dtype, zero_stage=stage, chunk_elements=65536)
    return config, {name: str(value) if isinstance(value, Path) else value for name, value in more.items()}


def alone(job: Any) -> dict[str, Any]:
    config, more = job
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(config, **more)
    finally:
        torch.set_num_threads(threads)


def ranks(world: int, *jobs: Any) -> list[dict[str, Any]]:
    """Do jobs on several ranks; return what all of them have found in each."""
    said = all_well(run_ranks(world, SCRIPT, json.dumps(jobs), seconds=120))
    found = [json.loads(text) for text in said]
    for other in found[1:]:
        assert other == found[0]
    first: list[dict[str, Any]] = found[0]
    return first


@pytest.mark.parametrize("dtype", quick(["bf16", "fp32"], ["bf16"]))
def test_a_run_goes_on_at_any_number_of_ranks_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """One rank → four, on NVMe → one, two and three, elsewhere; and the files are the same ones."""
    one, four, two, three = (tmp_path / name for name in ("one", "four", "two", "three"))
    wanted = alone(job(tmp_path, "host", dtype, before=2, save=one))
    (found,) = ranks(4, job(tmp_path, "nvme", dtype, load=one, save=four))
    assert found == wanted
    assert alone(job(tmp_path, "state on nvme", dtype, load=four)) == wanted
    assert ranks(
        2,
        job(tmp_path, "device", dtype, load=four, save=two, stage=2),
        job(tmp_path, "host", dtype, load=two),
    ) == [wanted, wanted]
    first, second = ranks(
        3,
        job(tmp_path, "split", dtype, load=four, save=three),
        job(tmp_path, "state on nvme", dtype, load=two, stage=2),
    )
    assert first == second
    for other in (four, two, three):
        assert contents(other / "step-2") == contents(one / "step-2")
