"""`benchmarks/`: its scripts run and write what they should; children, races and pairs are met in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .quick import quick

ROOT = Path(__file__).parents[1]
TINY = ["--layers", "1", "--width", "64", "--vocabulary", "300", "--tokens", "8"]


def script(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run a benchmark with a small model; return what it printed."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


# ---- races ----


@pytest.mark.integration
def test_a_race_and_a_peer_that_crashes(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nraise AssertionError('Not enough buffers 0 for swapping 1')\n")
    fake.chmod(0o700)
    place, output = tmp_path / "d", tmp_path / "result.json"
    place.mkdir()
    said = script(
        *("whole_step.py", *TINY, "--modes", "state-on-nvme", "--update", "overlap"),
        *("--directory", str(place), "--rounds", "2", "--warmup", "0", "--burst", "2"),
        *("--deepspeed-python", str(fake), "--output", str(output)),
    )
    result = json.loads(output.read_text())
    assert result["command"].startswith("python benchmarks/whole_step.py")
    assert result["versions"]["torch"]
    group = result["placements"]["state-on-nvme"]
    assert set(group["table"]) == {"infinity-overlap", "torch"}
    assert "Not enough buffers 0" in group["errors"]["deepspeed"]["error"]
    assert group["errors"]["deepspeed"]["exit_status"] == 1
    row = group["table"]["infinity-overlap"]
    assert row["efficiency"] == pytest.approx(row["bound"] / row["seconds"])
    assert 24 <= row["bytes_per_parameter"] < 49
    assert row["read_bytes"] == row["written_bytes"]
    assert row["peak_rss"] > 0
    assert row["bound_of"]["nvme_rate"] == group["rates"]["nvme_mixed_bytes_per_second"]
    assert len(group["samples"]["torch"]) == 2
    ours, torchs = (group["samples"][n][-1]["losses"] for n in ("infinity-overlap", "torch"))
    assert ours == pytest.approx(torchs, rel=1e-4)  # the same model, data and optimizer
    assert set(group["speedups"]["infinity-overlap"]) == {"of_torch"}
    assert group["wanted"]["infinity-overlap"]["of_bound"] == 1.15
    assert "of its bound" in said
    assert list(place.iterdir()) == []


# ---- a GPU, of which there is none here ----

STAGES = ["facts", "tests", "speed", "large", "checks", "nvme"]


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("stage", quick(STAGES, STAGES[:1]))
def test_a_stage_of_the_check_of_a_gpu(stage: str, tmp_path: Path) -> None:
    """On the double of CUDA: each part passes, and the whole is one JSON and one archive."""
    command = [str(ROOT / "benchmarks" / "gpu_check.sh"), "--list"]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert [line.split()[0] for line in done.stdout.splitlines()] == STAGES
    (tmp_path / "drive").mkdir()
    env |= {"DIRECTORY": str(tmp_path / "drive"), "OMP_NUM_THREADS": "1", "DEVICE": "lagging", "BUILD": "no"}
    command = [command[0], stage, str(tmp_path / "wheels"), str(tmp_path / "out"), "250"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, env=env)
    result = json.loads((tmp_path / "out" / f"{stage}.json").read_text())
    assert done.returncode == 0, json.dumps(result["parts"], indent=1)[-6000:] + done.stderr[-2000:]
    assert result["verdict"] == "passed"
    left_out = {name for name, part in result["parts"].items() if part["verdict"].startswith("left out")}
    assert left_out <= {"deepspeed", "zero-offload"}  # which CI does not have
    assert all(result["parts"][name]["verdict"] == "passed" for name in result["parts"].keys() - left_out)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"{stage}.json", f"{stage}.tar.gz"}
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.nightly  # its device takes a minute to compile
@pytest.mark.serial
def test_a_modelled_machine_moves_its_clocks_by_bytes_and_rates() -> None:
    """The script checks itself: the adapter is in step with the engine."""
    (printed,) = script("emulated.py", "--check", "--shape", "tiny", "--tokens", "4096").splitlines()
    assert {"overlap", "delayed", "state-on-4-drives", "plain"} <= json.loads(printed).keys()
