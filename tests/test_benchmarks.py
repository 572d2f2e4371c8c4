"""`benchmarks/`: children that take turns, races, pairs against another checkout."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from .quick import quick

ROOT = Path(__file__).parents[1]
TINY = ["--layers", "1", "--width", "64", "--vocabulary", "300", "--tokens", "8"]


@pytest.fixture(autouse=True)
def _as_a_script_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def script(name: str, *arguments: str, timeout: float = 280) -> str:
    """Run a benchmark with a small model; return what it printed."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- children ----


def child(body: str, timeout: float = 60) -> Any:
    children = importlib.import_module("children")
    return children.Child("child", [sys.executable, "-u", "-c", body], timeout=timeout)


def test_a_child_answers_each_line() -> None:
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
        ("raise ValueError('no such thing')", 60, "ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", 60, "ended by SIGKILL"),
        ("import time; time.sleep(60)", 0.5, "did not answer"),
    ],
)
def test_a_child_that_fails_says_why(body: str, timeout: float, what: str) -> None:
    children = importlib.import_module("children")
    with pytest.raises(children.ChildError, match=what) as caught:
        child(body, timeout)
    assert re.search(what, caught.value.reason)


def test_peaks_are_those_since_they_were_forgotten() -> None:
    children = importlib.import_module("children")
    body = """
from children import *
tell({})
for line in lines():
    forget_peak(); held = bytearray(int(line)); del held; tell({"peak": peak_memory()})
"""
    env = {"PYTHONPATH": str(ROOT / "benchmarks")}
    one = children.Child("child", [sys.executable, "-u", "-c", body], env=env)
    large, small = one.ask(str(64 << 20))["peak"], one.ask("1")["peak"]
    one.close()
    assert large > small + (32 << 20)


# ---- turns and ratios ----


def test_turns_rotate() -> None:
    common = importlib.import_module("common")
    turns = list(common.turns(["a", "b", "c"], 1, 2))
    assert "".join(name for name, _ in turns) == "abcbcacab"
    assert [counts for _, counts in turns] == [False] * 3 + [True] * 6


def test_ratios_are_of_medians_and_of_rounds() -> None:
    common = importlib.import_module("common")
    assert common.paired([1.0, 2.0], [2.0, 6.0]) == {
        "ratio": 2.5,
        "low": 2.0,
        "high": 3.0,
        "of_medians": 2.6667,
        "ratios": [2.0, 3.0],
    }


def test_a_race_goes_on_without_a_child_and_not_without_a_call() -> None:
    children, common = (importlib.import_module(name) for name in ("children", "common"))
    answers = iter([{"n": 1}, {"n": 2}])

    def ask(child: Any) -> Any:
        answer = next(answers, None)
        if answer is None:
            raise children.ChildError("one ended", 1, "Error: no more")
        return answer

    closed: list[str] = []
    one = types.SimpleNamespace(ready={"threads": 1}, close=lambda: closed.append("one"))
    with common.Race({"call": lambda: 7}) as race:
        race.start("one", lambda: one, ask)
        race.start("missing", lambda: os.stat("/missing"))
        assert race.run(1, 2) == {"call": [7, 7]}
    assert race.ready == {"one": {"threads": 1}}
    assert race.errors["one"] == {"error": "Error: no more", "exit_status": 1, "log": ["Error: no more"]}
    assert "/missing" in race.errors["missing"]["error"]
    assert closed == ["one"]
    with pytest.raises(OSError, match="/missing"):
        common.Race({"call": lambda: os.stat("/missing")}).run(0, 1)


def test_results_say_that_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    common = importlib.import_module("common")
    monkeypatch.setenv("PATH", "/nowhere")
    versions = common.versions()
    assert versions["commit"].startswith("unknown: git cannot be run")
    assert versions["torch"]


def test_a_model_counts_its_parameters() -> None:
    gpt2 = importlib.import_module("gpt2")
    assert gpt2.GPT2().parameters == 202_882_048
    small = gpt2.GPT2(layers=2, width=64, vocabulary=300, positions=16)
    assert small.parameters == sum(p.numel() for p in small.build().parameters())


# ---- races ----


@pytest.mark.full
def test_a_race_of_ranks(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    (tmp_path / "d").mkdir()
    arguments = ["--rounds", "1", "--warmup", "1", "--burst", "2", "--timeout", "100", "--limit", "250"]
    arguments += ["--contestants", "infinity-host", "infinity-nvme", "fsdp2", "--output", str(output)]
    script("ranks.py", *TINY, *arguments, "--directory", str(tmp_path / "d"))
    group = json.loads(output.read_text())["dtypes"]["fp32"]
    assert group["same_work"]
    assert set(group["first_losses"]) == {"infinity-host", "infinity-nvme", "fsdp2"}
    assert all(len(ranks) == 2 and ranks[0] != ranks[1] for ranks in group["first_losses"].values())
    assert 0 < group["table"]["fsdp2"]["peak_anonymous"] < group["table"]["fsdp2"]["peak_rss"]
    ratio = group["speedups"]["infinity-nvme"]["of_fsdp2"]
    assert ratio["low"] == ratio["ratio"] == ratio["high"] > 0
    assert list((tmp_path / "d").iterdir()) == []


def test_other_losses_are_other_work() -> None:
    ranks = importlib.import_module("ranks")
    losses = {"a": [[8.0, 7.0], [8.5, 7.5]], "b": [[8.0, 7.01], [8.5, 7.5]]}
    assert ranks.agree(losses, 1e-4, 1e-2)
    assert not ranks.agree(losses, 1e-4, 1e-3)  # it did not update as the other did
    losses["b"][1][0] = 8.51
    assert not ranks.agree(losses, 1e-4, 1e-2)


@pytest.mark.later
def test_visits_by_the_number_of_units(tmp_path: Path) -> None:
    output = tmp_path / "visits.json"
    script("visits.py", "--units", "3", "5", "--rounds", "1", "--warmup", "1", "--output", str(output))
    found = json.loads(output.read_text())["microseconds_of_a_visit"]
    assert list(found) == ["3", "5"]
    for cases in found.values():
        assert list(cases) == ["torch", "all fit", "half fit", "device", "inference"]
        assert all(figure > 0 for case in cases.values() for figure in case.values())


@pytest.mark.later
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


@pytest.mark.slow
def test_inference_beside_its_bound_and_accelerate(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = [*TINY, "--layers", "3", "--positions", "32"]
    arguments += ["--rounds", "2", "--warmup", "0", "--burst", "3"]
    arguments += ["--output", str(output)]
    (tmp_path / "d").mkdir()
    said = script("inference.py", *arguments, "--directory", str(tmp_path / "d"))
    result = json.loads(output.read_text())
    assert result["same_tokens"]
    assert {"infinity", "torch"} <= set(result["table"])
    row = result["table"]["infinity"]
    reads = row["bytes_read_per_token"] / result["nvme_read_bytes_per_second"]
    assert row["bytes_read_per_token"] > 0
    assert result["bound"]["seconds"] == max(result["table"]["torch"]["seconds_per_token"], reads)
    assert result["of_bound"] == pytest.approx(row["seconds_per_token"] / result["bound"]["seconds"])
    if "accelerate" in result["table"]:
        assert set(result["of_accelerate"]) == {"ratio", "low", "high", "of_medians", "ratios"}
    assert "of its bound" in said
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.slow
def test_races_of_several_modes(tmp_path: Path) -> None:
    arguments = ["--rounds", "2", "--warmup", "1", "--modes", "state-on-nvme", "all-on-host", "all-on-nvme"]
    arguments += ["--update", "overlap", "delayed", "--burst", "2", "--contestants", "infinity", "torch"]
    output = tmp_path / "r.json"
    script("whole_step.py", *TINY, *arguments, "--directory", str(tmp_path), "--output", str(output))
    result = json.loads(output.read_text())
    assert set(result["placements"]) == {"state-on-nvme", "all-on-host", "all-on-nvme"}
    for group in result["placements"].values():
        assert set(group["table"]) == {"infinity-overlap", "infinity-delayed", "torch"}


@pytest.mark.slow
def test_the_optimizers_step_beside_merely_reading_and_writing(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = ["--rounds", "2", "--warmup", "1", "--directory", str(tmp_path), "--output", str(output)]
    script("optimizer_step.py", *TINY, *arguments)
    result = json.loads(output.read_text())
    assert set(result["table"]) == {"step", "merely"}
    assert result["bytes_each_way"] >= 12 * result["params"]


@pytest.mark.slow
def test_adam_beside_its_ceiling(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = ["--params", "300000", "--repetitions", "7", "--threads", "1", "--output", str(output)]
    script("adam.py", *arguments)
    result = json.loads(output.read_text())
    assert set(result["ratios"]) >= {"of_ceiling", "of_torch"}
    assert len(result["seconds"]["kernel"]) == 7


@pytest.mark.slow
def test_the_rings_beside_fio(tmp_path: Path) -> None:
    if importlib.import_module("infinity.cli.bench.io_fio").find_fio() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("fio is not installed")
    output = tmp_path / "r.json"
    arguments = ["--nbytes", str(64 << 20), "--block", "65536", "--depth", "4", "--ticket", "262144"]
    arguments += ["--seconds", "0.05", "--repeats", "2", "--directory", str(tmp_path)]
    script("io_fio.py", *arguments, "--backends", "threads", "--output", str(output))
    table = json.loads(output.read_text())["table"]
    assert set(table) == {"read", "write", "mixed"}
    assert table["mixed"]["threads"]["of fio-huge"] > 0


# ---- pairs against another checkout ----


def test_bounds_of_ratios_against_another_commit() -> None:
    against, common = (importlib.import_module(name) for name in ("against_commit", "common"))
    assert common.bounds([5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 8.0, 4.0, 6.0]) == (5.0, 2.0, 8.0)
    assert common.bounds([float(i) for i in range(1, 7)]) == (3.5, 1.0, 6.0)
    assert common.bounds([1.0, 2.0, 3.0]) == (2.0, 1.0, 3.0)
    assert common.bounds([float(i) for i in range(1, 26)]) == (13.0, 8.0, 18.0)
    pairs = [{"old": {"seconds": 1.0}, "new": {"seconds": 1.031 + i / 1e4}} for i in range(9)]
    assert against.figures(pairs)["falls_short"]
    pairs[0]["new"]["seconds"] = pairs[1]["new"]["seconds"] = 1.0
    assert not against.figures(pairs)["falls_short"]


def test_the_engine_of_a_checkout_with_other_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    against = importlib.import_module("against_commit")
    assert against.engine_of.__module__ == "against_commit"
    old, engines = types.ModuleType("infinity"), types.ModuleType("infinity.surface.engine")
    engines.__dict__["engine_of"] = lambda model: ("engine of", model)
    exec("def wrap(): ...", engines.__dict__)
    old.__dict__["wrap"] = engines.__dict__["wrap"]
    monkeypatch.setitem(sys.modules, "infinity", old)
    monkeypatch.setitem(sys.modules, "infinity.surface.engine", engines)
    assert against.engine_of("m") == ("engine of", "m")


@pytest.mark.slow
def test_pairs_against_this_very_checkout(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "against_commit.py"), *TINY, "--old", str(ROOT)]
    command += ["--directory", str(tmp_path), "--burst", "1", "--warmup", "1", "--rounds", "2", "--most", "2"]
    command += ["--fresh", "1", "--cases", "state-on-nvme", "optimizer-on-host", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr  # with two pairs a case may well fall short
    result = json.loads(output.read_text())
    assert set(result["cases"]) == {"state-on-nvme", "optimizer-on-host"}
    assert all(case["pairs"] == 2 for case in result["cases"].values())


# ---- a GPU, of which there is none here ----


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize("stage", quick(["facts", "tests", "speed", "nvme"], ["facts"], ["tests", "speed"]))
def test_a_stage_of_the_check_of_a_gpu(stage: str, tmp_path: Path) -> None:
    """On the double of CUDA: each part passes, and the whole is one JSON and one archive."""
    done = check(stage, tmp_path)
    result = json.loads((tmp_path / "out" / f"{stage}.json").read_text())
    assert done.returncode == 0, json.dumps(result["parts"], indent=1)[-6000:] + done.stderr[-2000:]
    assert result["verdict"] == "passed"
    assert {part["verdict"] for part in result["parts"].values()} == {"passed"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {f"{stage}.json", f"{stage}.tar.gz"}
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.processes
def test_a_check_that_is_ended_keeps_what_it_has(tmp_path: Path) -> None:
    """Also where a shell has SIGINT ignored, as it has for what runs in the background."""
    ignored = "import os, signal, sys; signal.signal(2, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    done = check("facts", tmp_path, 9, before=[sys.executable, "-c", ignored])
    assert done.returncode != 0
    result = json.loads((tmp_path / "out" / "facts.json").read_text())
    assert result["verdict"] == "failed"
    verdicts = [part["verdict"] for part in result["parts"].values()]
    assert verdicts[-1] in ("interrupted", "timed out", "failed") or verdicts[-1].startswith("left out")
    assert (tmp_path / "out" / "facts.tar.gz").stat().st_size > 0


def test_the_stages_are_listed() -> None:
    command = [str(ROOT / "benchmarks" / "gpu_check.sh"), "--list"]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["facts", "tests", "speed", "nvme"]


def check(
    stage: str, folder: Path, seconds: int = 250, before: tuple[str, ...] | list[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a stage of gpu_check.sh without a GPU; `before`: what the command line begins with."""
    (folder / "drive").mkdir()
    env = {**os.environ, "PYTHON": sys.executable, "DEVICE": "lagging", "BUILD": "no"}
    env |= {"DIRECTORY": str(folder / "drive"), "OMP_NUM_THREADS": "1"}
    command = [*before, str(ROOT / "benchmarks" / "gpu_check.sh"), stage]
    command += [str(folder / "wheels"), str(folder / "out"), str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, env=env)


# ---- lines of code ----


def test_lines_of_code_are_no_blanks_no_comments_and_no_docstrings() -> None:
    source = '''"""A module.

Of two lines.
"""

# a comment
X = """a text,

not a docstring"""  # three lines, one of them blank


class A:
    """A class."""

    def f(self) -> int:
        """A method."""
        return (
            # a comment
            1
        )
'''
    assert importlib.import_module("lines_of_code").lines_of_code(source) == 2 + 1 + 1 + 3


def test_lines_of_code_are_counted_by_folder() -> None:
    found = json.loads(script("lines_of_code.py", "--json"))
    assert found["folders"]["infinity/core"] > 0
    assert found["total"] == sum(found["folders"].values())
    assert f"{found['total']:,}" in script("lines_of_code.py").splitlines()[-1]
