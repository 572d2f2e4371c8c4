"""What `infinity plan` says of a run is what the run takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import infinity
from infinity.api.engine import engine_of
from infinity.cli.main import run
from infinity.core.sizes import GiB
from infinity.planning.planner import checkpoint_nbytes

from .command_line import words
from .planned import planned

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_environment")
MORE = pytest.mark.integration


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--optimizer", "lion", "--optimizer-state-dtype", "bf16"], marks=MORE),
        pytest.param(["--dtype", "bf16", "--optimizer", "adagrad"], marks=MORE),
        pytest.param(["--optimizer-state-dtype", "8bit", "--optimizer-state-fp32", "*embed*"], marks=MORE),
        # A matrix has several chunks, and an update visits each twice.
        pytest.param(["--optimizer", "muon", "--width", "272"], marks=MORE),
    ],
    ids=" ".join,
)
def test_planned_bytes_are_the_measured_ones(more: list[str], nvme: str, tmp_path: Path) -> None:
    """Those of a footprint, of steps, and of a checkpoint."""
    steps = 3
    with planned(*words(nvme, "--recompute", *more)) as made:
        engine, taken, traffic = engine_of(made.optimizer), made.plan.footprint, made.plan.traffic
        assert engine.footprint == taken

        def moved() -> tuple[int, int]:
            engine.states.quiesce()
            stats = engine.store.stats()
            return sum(s.bytes_read for s in stats), sum(s.bytes_written for s in stats)

        made.step()
        before = moved()
        for _ in range(steps):
            made.step()
        read, written = (b - a for a, b in zip(before, moved(), strict=True))
        figures = infinity.metrics(made.optimizer)
        path = infinity.save(made.optimizer, tmp_path / "out")
    wanted = checkpoint_nbytes(made.case.planner.model, made.case.config)
    assert wanted <= sum(entry.stat().st_size for entry in os.scandir(path)) <= wanted + 64 * 1024
    assert written == steps * traffic.nvme_written
    assert 0 < read <= steps * traffic.nvme_read
    leases = sum(quota.nbytes for quota in taken.quotas.values())
    ahead = taken.working_nbytes + taken.prefetch_nbytes
    assert 0 < round(figures["memory/host_leases_peak(GiB)"] * GiB) <= leases
    assert 0 < round(figures["memory/device_units_peak(GiB)"] * GiB) <= ahead


def test_inputs_of_recomputed_blocks_on_the_host(nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = words(nvme, "--layers", "6", "--batch", "8", "--sequence", "64", "--recompute")
    nbytes = 64 * 8 * 64 * 4  # one block's input
    losses, plans = [], []
    for where in ("device", "host"):
        with planned(*common, "--activations", where) as made:
            losses.append([made.step() for _ in range(2)])
            there = infinity.metrics(made.optimizer)["activations/host(GiB)"] * GiB
        assert there == (6 * nbytes if where == "host" else 0)
        assert run(["plan", "--json", *common, "--activations", where]) == 0
        plans.append(json.loads(capsys.readouterr().out)["activations"])
    assert losses[0] == losses[1]
    assert plans[0]["inputs"] == 6 * nbytes
    assert plans[0]["peak"] - plans[1]["peak"] == (6 - 3) * nbytes
