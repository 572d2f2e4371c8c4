"""`infinity bench step`: bounds, room, contestants that take turns, those that fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infinity.cli.bench import step_case
from infinity.cli.bench.contest import Child, ChildError
from infinity.cli.bench.group import bench_group
from infinity.cli.bench.step_bound import Measured, bound
from infinity.cli.bench.step_case import PLACEMENTS, Request, check_room
from infinity.cli.bench.step_child import Model, Task
from infinity.cli.bench.step_rounds import paired, steady
from infinity.core.config import UPDATES
from infinity.core.errors import BudgetError, ConfigError, DataError, DirectoryError

ROOT = Path(__file__).parents[1]
SMALL = Model(layers=2, width=64, heads=2, vocab=256, context=128)
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--tokens", "16", "--device", "cpu"]


# ---- bounds ----


def test_the_bound_of_each_update_mode() -> None:
    found = Measured(forward=1.0, backward=2.0, adam=0.5, moved=10.0, nvme_rate=1.0)
    assert found.nvme == 10.0
    assert bound("sync", found) == 1 + 2 + 10
    assert bound("overlap", found) == 2 + 10
    assert bound("delayed", found) == 10
    ahead = dataclasses.replace(found, read_ahead=1.5)
    assert bound("sync", ahead) == 1 + 2 + 8.5
    assert bound("overlap", ahead) == 2 + 8.5
    assert bound("delayed", ahead) == 10
    # A backward hides no more than it lasts, a forward no more than itself.
    much = dataclasses.replace(found, read_ahead=100.0, copies=100.0, gradients=1.0)
    assert bound("overlap", much) == 2 + 8
    assert bound("sync", much) == 1 + 2 + 7


def test_without_a_drive_the_kernel_is_what_is_left() -> None:
    found = Measured(forward=1.0, backward=2.0, adam=0.5)
    assert bound("sync", found) == 3.5
    assert bound("overlap", found) == 3.0
    assert bound("overlap", dataclasses.replace(found, adam=1.25)) == 3.25
    assert bound("delayed", found) == 3.0


def test_steady_steps_have_an_update_behind_them() -> None:
    assert steady({"intervals": [1.0, 5.0, 7.0, 6.0]}) == 6.0
    assert steady({"intervals": [3.0]}) == 3.0
    assert paired([1.0, 2.0], [2.0, 6.0]) == {
        "of_medians": 2.6667,
        "median_of_rounds": 2.5,
        "lowest": 2.0,
        "highest": 3.0,
    }


# ---- room ----


def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(model=SMALL, directory=str(tmp_path))
    check_room(request)
    with pytest.raises(BudgetError, match="host memory") as caught:
        check_room(dataclasses.replace(request, model=dataclasses.replace(SMALL, width=1 << 16)))
    assert "--preset" in str(caught.value.cure)
    with pytest.raises(DirectoryError, match="no file can be made"):
        check_room(dataclasses.replace(request, directory=str(tmp_path / "missing")))
    monkeypatch.setattr(step_case, "usable_bytes", lambda _: (1 << 20, 1 << 20))
    with pytest.raises(DirectoryError, match="not the room"):
        check_room(request)
    check_room(dataclasses.replace(request, placements=("all-on-host",)))


def test_every_update_mode_and_tier_is_measured() -> None:
    request = Request(model=SMALL, directory=".")
    assert request.updates == UPDATES
    assert request.names == [*(f"infinity-{u}" for u in UPDATES), "torch"]
    assert {p.optimizer_state for p in PLACEMENTS.values()} == {"device", "host", "nvme"}
    assert {p.parameters for p in PLACEMENTS.values()} == {"device", "host", "nvme"}
    assert request.steps == 4
    assert dataclasses.replace(request, updates=("sync",)).steps == 1


def test_a_task_goes_to_its_child_as_json() -> None:
    task = Task(contestant="infinity", model=SMALL, tokens=8, settings={"update": "sync"})
    assert Task.from_json(task.as_json()) == task
    assert SMALL.parameters == sum(p.numel() for p in SMALL.build().parameters())


# ---- contestants ----


def child(body: str, timeout: float = 20) -> Child:
    return Child("child", [sys.executable, "-u", "-c", body], timeout=timeout)


def test_a_contestant_answers_each_line() -> None:
    body = """
import sys
print('@@ {}')
for line in sys.stdin:
    print('note'); print('@@ no answer'); print('@@ {"n": ' + line.strip() + '}')
"""
    one = child(body)
    assert one.ready == {}
    assert one.ask("3")["n"] == 3
    assert one.ask("4")["n"] == 4
    one.close()
    assert one.log().count("note\n@@ no answer\n") == 2


@pytest.mark.parametrize(
    ("body", "timeout", "what"),
    [
        ("raise ValueError('no such thing')", 20, "ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", 20, "ended by SIGKILL"),
        ("import time; time.sleep(60)", 0.5, "did not answer"),
    ],
)
def test_a_contestant_that_fails_says_why(body: str, timeout: float, what: str) -> None:
    with pytest.raises(ChildError, match=what) as caught:
        child(body, timeout)
    assert re.search(what, caught.value.reason)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(
        bench_group, ["step", *TINY, "--json", *arguments], catch_exceptions=False, standalone_mode=False
    )
    return done.return_value, json.loads(done.stdout)


def check(row: dict[str, Any], nbytes: float | None) -> None:
    assert row["seconds"] > 0
    assert row["seconds_with_drain"] > 0
    assert row["bound"] > 0
    assert row["efficiency"] == pytest.approx(row["bound"] / row["seconds"])
    if nbytes is not None:  # padding of small parameters comes on top
        assert nbytes <= row["bytes_per_parameter"] < 2 * nbytes + 1


def test_a_group_and_a_peer_that_crashes(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nraise AssertionError('Not enough buffers 0 for swapping 1')\n")
    fake.chmod(0o700)
    place, output = tmp_path / "d", tmp_path / "result.json"
    place.mkdir()
    code, result = run(
        *("--directory", str(place), "--placement", "state-on-nvme", "--update", "overlap"),
        *("--rounds", "2", "--warmup", "0", "--burst", "2"),
        *("--deepspeed-python", str(fake), "--output", str(output)),
    )
    assert code == 0
    assert json.loads(output.read_text()) == result
    group = result["placements"]["state-on-nvme"]
    assert set(group["table"]) == {"infinity-overlap", "torch"}
    assert "Not enough buffers 0" in group["errors"]["deepspeed"]["error"]
    assert group["errors"]["deepspeed"]["exit_status"] == 1
    row = group["table"]["infinity-overlap"]
    check(row, 24)
    assert row["read_bytes"] == row["written_bytes"]
    assert row["bound_of"]["nvme_rate"] == group["rates"]["nvme_mixed_bytes_per_second"]
    assert len(group["samples"]["torch"]) == 2
    ours, torchs = (group["samples"][n][-1]["losses"] for n in ("infinity-overlap", "torch"))
    assert ours == pytest.approx(torchs, rel=1e-4)  # the same model, data and optimizer
    assert set(group["speedups"]["infinity-overlap"]) == {"of_torch"}
    assert os.listdir(place) == []


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    for option, error in (
        (["--placement", "nowhere"], ConfigError),
        (["--update", "never"], ConfigError),
        (["--device", "tpu"], ConfigError),
        (["--device", "meta"], ConfigError),
        (["--preset", "31m"], ConfigError),
        (["--output", str(tmp_path / "missing" / "x.json")], DataError),
    ):
        with pytest.raises(error) as caught:
            run("--directory", str(tmp_path), *option)
        assert caught.value.cure
    with pytest.raises(ConfigError) as caught:
        run("--update", "delayd")
    assert caught.value.cure == "--update delayed"


@pytest.mark.slow
def test_all_placements_and_update_modes(tmp_path: Path) -> None:
    code, result = run("--directory", str(tmp_path), "--rounds", "1", "--warmup", "0", "--burst", "3")
    assert code == 0
    assert list(result["placements"]) == list(PLACEMENTS)
    wanted = {"in-memory": 0, "state-on-host": 0, "all-on-host": 0, "state-on-nvme": 24}
    for name, group in result["placements"].items():
        assert not [n for n in group["errors"] if n.startswith("infinity")]
        for update in UPDATES:
            check(group["table"][f"infinity-{update}"], wanted.get(name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_benchmark_script_measures_the_same(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("the benchmarks' model is that of transformers")
    command = [
        sys.executable,
        "benchmarks/whole_step.py",
        "--layers",
        "1",
        "--width",
        "64",
        "--vocabulary",
        "300",
    ]
    command += ["--rounds", "2", "--warmup", "1", "--modes", "state-on-nvme", "all-on-host", "--tokens", "8"]
    command += ["--update", "overlap", "--burst", "2", "--contestants", "infinity", "torch"]
    command += ["--directory", str(tmp_path), "--output", str(tmp_path / "r.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["command"].startswith("python benchmarks/whole_step.py")
    assert set(result["placements"]) == {"state-on-nvme", "all-on-host"}
    assert result["placements"]["state-on-nvme"]["wanted"]["infinity-overlap"]["of_bound"] == 1.15
    assert "of its bound" in done.stdout
