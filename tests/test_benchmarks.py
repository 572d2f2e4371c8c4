"""`benchmarks/`: children that take turns, races, pairs against another checkout."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from infinity.core.config import UPDATES, Config

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


# ---- bounds ----


def test_the_bound_of_each_update_mode() -> None:
    steps = importlib.import_module("steps")
    bound, found = steps.bound, steps.Measured(forward=1.0, backward=2.0, adam=0.5, moved=10.0, nvme_rate=1.0)
    assert found.nvme == 10.0
    assert bound("sync", found) == 1 + 2 + 10
    assert bound("overlap", found) == 2 + 10
    assert bound("delayed", found) == 10
    assert bound("backward", found) == 1 + 10
    ahead = dataclasses.replace(found, read_ahead=1.5)
    assert bound("sync", ahead) == 1 + 2 + 8.5
    assert bound("overlap", ahead) == 2 + 8.5
    assert bound("delayed", ahead) == 10
    # A backward hides no more than it lasts, a forward no more than itself.
    much = dataclasses.replace(found, read_ahead=100.0, copies=100.0, gradients=1.0)
    assert bound("overlap", much) == 2 + 8
    assert bound("sync", much) == 1 + 2 + 7
    assert bound("backward", much) == 1 + 9
    # Without a drive the kernel is left.
    kernel = steps.Measured(forward=1.0, backward=2.0, adam=0.5)
    assert bound("sync", kernel) == 3.5
    assert bound("overlap", kernel) == 3.0
    assert bound("overlap", dataclasses.replace(kernel, adam=1.25)) == 3.25
    assert bound("delayed", kernel) == bound("backward", kernel) == 3.0


def test_every_placement_and_update_mode_is_one_of_the_engine(tmp_path: Path) -> None:
    steps = importlib.import_module("steps")
    for placement in steps.PLACEMENTS:
        for update in UPDATES:
            Config(nvme=str(tmp_path), device="cpu", **steps.settings_of(placement, update, 1 << 20))


# ---- races ----


@pytest.mark.integration
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


@pytest.mark.integration
def test_visits_by_the_number_of_units(tmp_path: Path) -> None:
    output = tmp_path / "visits.json"
    script("visits.py", "--units", "3", "5", "--rounds", "1", "--warmup", "1", "--output", str(output))
    found = json.loads(output.read_text())["microseconds_of_a_visit"]
    assert list(found) == ["3", "5"]
    for cases in found.values():
        assert list(cases) == ["torch", "all fit", "half fit", "device", "inference"]
        assert all(figure > 0 for case in cases.values() for figure in case.values())


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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_races_of_several_modes(tmp_path: Path) -> None:
    arguments = ["--rounds", "2", "--warmup", "1", "--modes", "state-on-nvme", "all-on-host", "all-on-nvme"]
    arguments += ["--update", "overlap", "delayed", "--burst", "2", "--contestants", "infinity", "torch"]
    output = tmp_path / "r.json"
    script("whole_step.py", *TINY, *arguments, "--directory", str(tmp_path), "--output", str(output))
    result = json.loads(output.read_text())
    assert set(result["placements"]) == {"state-on-nvme", "all-on-host", "all-on-nvme"}
    for group in result["placements"].values():
        assert set(group["table"]) == {"infinity-overlap", "infinity-delayed", "torch"}


@pytest.mark.nightly
def test_the_optimizers_step_beside_merely_reading_and_writing(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = ["--rounds", "2", "--warmup", "1", "--directory", str(tmp_path), "--output", str(output)]
    script("optimizer_step.py", *TINY, *arguments)
    result = json.loads(output.read_text())
    assert set(result["table"]) == {"step", "merely"}
    assert result["bytes_each_way"] >= 12 * result["params"]


@pytest.mark.nightly
def test_adam_beside_its_ceiling(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = ["--params", "300000", "--repetitions", "7", "--threads", "1", "--output", str(output)]
    script("adam.py", *arguments)
    result = json.loads(output.read_text())
    assert set(result["ratios"]) >= {"of_ceiling", "of_torch"}
    assert len(result["seconds"]["kernel"]) == 7


@pytest.mark.nightly
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


@pytest.mark.nightly
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

STAGES = ["facts", "tests", "speed", "large", "checks", "nvme"]


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize("stage", quick(STAGES, ["facts"]))
def test_a_stage_of_the_check_of_a_gpu(stage: str, tmp_path: Path) -> None:
    """On the double of CUDA: each part passes, and the whole is one JSON and one archive."""
    done = check(stage, tmp_path)
    result = json.loads((tmp_path / "out" / f"{stage}.json").read_text())
    assert done.returncode == 0, json.dumps(result["parts"], indent=1)[-6000:] + done.stderr[-2000:]
    assert result["verdict"] == "passed"
    left_out = {name for name, part in result["parts"].items() if part["verdict"].startswith("left out")}
    assert left_out <= {"deepspeed", "zero-offload"}  # which CI does not have
    assert all(result["parts"][name]["verdict"] == "passed" for name in result["parts"].keys() - left_out)
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
    assert [line.split()[0] for line in done.stdout.splitlines()] == STAGES


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


# ---- the timing of a GPU's step ----


class Clock:
    """Time that passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Asked:
    """A contestant whose points take seconds by their tokens; what comes at `end` is raised instead."""

    name, ready = "one", {"built_seconds": 1.0}

    def __init__(self, clock: Clock, seconds: float, end: tuple[int, BaseException] | None = None) -> None:
        self.clock, self.seconds, self.end = clock, seconds, end
        self.jobs: list[dict[str, Any]] = []
        self.timeout = 0.0

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, line: str) -> dict[str, Any]:
        job = json.loads(line)
        if self.end is not None and len(self.jobs) == self.end[0]:
            raise self.end[1]
        self.jobs.append(job)
        tokens = job["batch"] * job["sequence"]
        self.clock.now += self.seconds * tokens
        return {"tokens_per_second": 1 / self.seconds, "losses": [1.0]}


def stage_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, device: str = "cuda"
) -> tuple[Any, Clock]:
    """Return a stage that has so many seconds of a clock, and the clock."""
    gpu, clock = importlib.import_module("gpu"), Clock()
    args = argparse.Namespace(device=device, seconds=seconds, logs=folder / "logs", output=folder / "s.json")
    args.directory = str(folder)
    monkeypatch.setattr(gpu.time, "monotonic", clock.monotonic)
    return gpu.Stage("speed", args), clock


def contest(stage: Any, name: str, child: Asked, *, least: float = 0.0, profiled: bool = False) -> Any:
    """Have a contestant of `speed` take its points; return what the JSON of the stage has of it."""
    speed = importlib.import_module("speed")
    plan = speed.Plan(speed.SMALL, speed.POINTS, profiled=profiled)
    call = speed.contestant(stage, name, speed.ENTRIES[name], plan, start=lambda *_, **__: child)
    stage.part(name, least, call)
    return json.loads(stage.args.output.read_text())["parts"].get(name)


def test_points_and_contestants_that_do_not_fit_the_time_are_left_out_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, clock = stage_of(tmp_path, monkeypatch, 100.0)
    torch, overlap, backward = (Asked(clock, seconds) for seconds in (1e-3, 1.2e-3, 1e-3))
    assert [*contest(stage, "torch", torch)["points"]] == ["4096", "16384", "32768"]  # 53 s
    found = contest(stage, "overlap", overlap, profiled=True)
    assert [*found["points"]] == ["4096", "16384"]  # 25 s; the third would take 39 of the 22 that are left
    assert found["verdict"] == "passed"
    assert [line.split(":")[0] for line in found["left_out"]] == ["32768 tokens"]
    assert overlap.timeout == pytest.approx(100 - 53.248 - 4.9152)  # each wait ends with the stage
    contest(stage, "backward", backward, least=30.0)
    assert stage.parts["backward"] == {"verdict": "left out: 22 s are left"}
    assert backward.jobs == []
    headline = json.loads(stage.args.output.read_text())["headline"]
    assert headline["overlap"]["16384"]["of_torch"] == pytest.approx(1 / 1.2, abs=1e-4)
    stage.save()
    assert stage.passed


def test_the_file_of_a_stage_has_each_point_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, clock = stage_of(tmp_path, monkeypatch, 1e6)
    seen: list[list[str]] = []

    class Looking(Asked):
        def ask(self, line: str) -> dict[str, Any]:
            if stage.args.output.exists():
                parts = json.loads(stage.args.output.read_text())["parts"]
                seen.append([*parts["torch"]["points"]])
            return super().ask(line)

    found = contest(stage, "torch", Looking(clock, 1e-3), profiled=True)
    assert seen == [["4096"], ["4096", "16384"], ["4096", "16384", "32768"]]
    assert "profile" in found


@pytest.mark.parametrize("name", ["overlap", "zero-offload"])
@pytest.mark.parametrize("code", [None, 1])
def test_a_contestant_that_ends_early_keeps_its_points(
    name: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of ours is a fault of the stage; a peer is left out."""
    children = importlib.import_module("children")
    stage, clock = stage_of(tmp_path, monkeypatch, 1e6)
    error = children.ChildError("it ended", code, "a line\nOutOfMemoryError: no memory")
    found = contest(stage, name, Asked(clock, 1e-3, (1, error)))
    assert [*found["points"]] == ["4096"]
    assert found["error"] == ("it ended" if code is None else "OutOfMemoryError: no memory")
    wanted = "left out" if name == "zero-offload" else "timed out" if code is None else "failed"
    assert found["verdict"].split(":")[0] == wanted
    assert not stage.passed


def test_an_interrupted_stage_keeps_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, clock = stage_of(tmp_path, monkeypatch, 1e6)
    with pytest.raises(KeyboardInterrupt):
        contest(stage, "torch", Asked(clock, 1e-3, (2, KeyboardInterrupt())))
    result = json.loads(stage.args.output.read_text())
    assert [*result["parts"]["torch"]["points"]] == [*result["headline"]["torch"]] == ["4096", "16384"]
    assert result["parts"]["torch"]["verdict"] == "interrupted"


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt])
def test_a_part_keeps_what_its_script_has_written(
    ends: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = stage_of(tmp_path, monkeypatch, 1e6)

    def run(found: dict[str, Any], name: str, command: list[str], most: float) -> bool:
        Path(command[-1]).write_text(json.dumps({"benchmark": "adam_beside", "rows": [1, 2]}))
        if ends is not None:
            raise ends
        found["verdict"] = "timed out"
        return False

    monkeypatch.setattr(stage, "run", run)
    with pytest.raises(ends) if ends is not None else contextlib.nullcontext():
        stage.part("adam", 30, stage.script("adam", ["adam_beside.py"], 60))
    part = json.loads(stage.args.output.read_text())["parts"]["adam"]
    assert part["rows"] == [1, 2]
    assert part["verdict"] == ("timed out" if ends is None else "interrupted")


def test_without_deepspeed_its_contestants_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a stage is gone through in the order of the list, each with its own reason."""
    speed = importlib.import_module("speed")
    stage, _ = stage_of(tmp_path, monkeypatch, 1e6)
    monkeypatch.setattr(speed, "contestant", lambda *_: lambda found: True)
    monkeypatch.setattr(stage, "script", lambda *_: lambda found: True)
    monkeypatch.setattr(speed, "missing_for_deepspeed", lambda: "DeepSpeed is not installed")
    speed.speed(stage)
    verdicts = {name: part["verdict"] for name, part in stage.parts.items()}
    assert verdicts.pop("deepspeed") == "left out: DeepSpeed is not installed"
    assert [*verdicts] == ["adam", *speed.ENTRIES]
    peers = [name for name, entry in speed.ENTRIES.items() if entry.kind == "deepspeed"]
    assert {verdicts.pop(name) for name in peers} == {"left out: see deepspeed"}
    assert set(verdicts.values()) == {"passed"}
    assert stage.passed


def test_a_release_of_deepspeed_without_reflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = importlib.import_module("speed")
    stage, _ = stage_of(tmp_path, monkeypatch, 1e6)
    monkeypatch.setattr(speed, "contestant", lambda *_: lambda found: True)
    monkeypatch.setattr(stage, "script", lambda *_: lambda found: True)

    def built(found: dict[str, Any]) -> bool:
        found |= {"passed": True, "deepspeed": "0.19.8", "reflow": False}
        return True

    monkeypatch.setattr(speed, "missing_for_deepspeed", lambda: None)
    monkeypatch.setattr(stage, "task", lambda *_: built)
    speed.speed(stage)
    verdicts = {name: stage.parts[name]["verdict"] for name in ("zero-offload", "reflow", "reflow-unclipped")}
    no_reflow = "left out: DeepSpeed 0.19.8 has no reflow"
    assert verdicts == {"zero-offload": "passed", "reflow": no_reflow, "reflow-unclipped": no_reflow}


def test_what_verify_says_is_in_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("gpu")
    stage, _ = stage_of(tmp_path, monkeypatch, 1e6)
    said = {"cases": [{"name": "one", "verdict": "same"}, {"name": "two", "verdict": "differs"}]}

    def run(found: dict[str, Any], name: str, command: list[str], most: float) -> bool:
        assert command[1:4] == ["-m", "infinity", "verify"]
        (stage.args.logs / f"{name}.log").write_text(f"a warning\n{json.dumps(said)}\n")
        return False

    monkeypatch.setattr(stage, "run", run)
    found: dict[str, Any] = {}
    assert not gpu._verify(stage, found)
    assert found == {"cases": 2, "wrong": [said["cases"][1]]}


def test_the_sizes_of_llama() -> None:
    """By its shape as many parameters as the module has; as many FLOPs as its products, counted by hand."""
    speed, llama = (importlib.import_module(name) for name in ("speed", "llama"))
    small = llama.Llama(layers=2, width=64, mlp=96, heads=4, kv_heads=2, vocabulary=100)
    model = small.build()
    assert sum(p.numel() for p in model.parameters()) == small.parameters
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    assert all(block.gradient_checkpointing for block in model.model.layers)
    assert [round(each.parameters / 1e9, 1) for each in (speed.SMALL, speed.LARGE)] == [1.4, 8.0]
    flops = small.flops(3, 8)
    assert flops["model"] == 24 * (6 * small.parameters + 12 * 2 * 64 * 8)
    blocks = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96)
    assert flops["device"] == 24 * (8 * blocks + 6 * 100 * 64 + 8 * 2 * 64 * 8)


# ---- a modelled machine with a GPU ----


def test_python_is_what_an_infinitely_fast_one_would_save() -> None:
    emulated = importlib.import_module("emulated")
    found = emulated.fit({1.0: 3.0, 2.0: 2.5, 8.0: 2.125})
    assert found == pytest.approx({"infinitely_fast": 2.0, "python": 1.0, "off_by": 0.0})
    assert emulated.fit({1.0: 3.0}) is None


def test_a_gap_of_the_gpu_has_the_cause_of_the_wait_in_it() -> None:
    tracing = importlib.import_module("emulation.tracing")
    phases = [(0.0, 10.0, "forward"), (10.0, 20.0, "backward")]
    waits = [(2.0, 4.0, "a"), (4.0, 5.0, "b"), (18.0, 30.0, "a")]
    gaps = [(15.0, 17.0, 3), (1.0, 11.0, -1), (19.0, 20.0, -1)]
    assert tracing.causes(gaps, waits, phases) == {
        "Python and launches, forward": 1.0 + 5.0,
        "a": 2.0 + 1.0,
        "the GPU waits for copies": 2.0,
        "Python and launches, backward": 1.0,
        "b": 1.0,
    }


def test_a_step_is_bound_by_what_it_needs_longest() -> None:
    cases, machine, models = (
        importlib.import_module(f"emulation.{name}") for name in ("cases", "machine", "models")
    )
    sizes = models.Sizes(8_000_000_000, 7_500_000_000, 7_000_000_000)
    rates = machine.Rates()
    assert cases.CASES["overlap"].bounds(sizes, 4096, rates) == pytest.approx(
        {"compute": 2 * 4096 * 29.5e9 / 400e12, "Adam": 28 * 8 / 190, "link": 2 * 8 / 55}
    )
    assert cases.CASES["state-on-4-drives"].bounds(sizes, 4096, rates)["drives"] == pytest.approx(12 * 8 / 24)
    assert cases.CASES["plain"].bounds(sizes, 0, rates) == pytest.approx({"compute": 28 * 8e9 / 2.5e12})


def test_a_loaded_machine_is_refused() -> None:
    emulated = importlib.import_module("emulated")
    assert emulated.refuse(0.3, 0.1) is None
    assert "a load of 0.90" in emulated.refuse(0.9, 0.0)
    assert "others use 0.50 of its cores" in emulated.refuse(0.1, 0.5)


@pytest.mark.integration  # its device takes a minute to compile, once
@pytest.mark.serial
def test_one_step_of_each_case_moves_what_it_should() -> None:
    """The adapter is in step with the engine: bytes, launches and chunks are those of the schedule, and each
    clock moves by bytes ÷ rate, which the script checks."""
    (printed,) = script("emulated.py", "--check", "--shape", "tiny", "--tokens", "4096").splitlines()
    found = json.loads(printed)
    shape = importlib.import_module("emulation.models").SHAPES["tiny"]
    width, rows = shape.hidden, shape.hidden // shape.queries_per_key
    norm = 8 * width  # of width ÷ 8 elements, of which each counts for 64
    block = width * (2 * width + 2 * rows + 3 * shape.intermediate) + 2 * norm
    units = [shape.vocabulary * width, *([block] * shape.layers), shape.vocabulary * width + norm]
    numel = sum(units)
    # Of a block: a forward, once more up to the last addition, a backward, and five sums of gradients. Then
    # the embedding, the last norm, the head, the loss, and the gradient of that.
    launches = shape.layers * (35 + 34 + 51 + 5) + 3 + 14 + 3 + 16 + 1
    per_parameter = {
        "overlap": (2, 2, 30, 0),
        "backward": (2, 2, 30, 0),
        "delayed": (2, 2, 30, 0),
        "state-on-4-drives": (2, 2, 30, 12),
        "state-on-1-drive": (2, 2, 30, 12),
        "zero-offload": (2, 2, 28, 0),
        "fsdp2": (4, 2, 28, 0),
        "reflow": (2, 2, 16 + 26, 0),
        "reflow-clipped": (4, 2, 16 + 16 + 26, 0),
        "plain": (0, 0, 0, 0),
    }
    assert found.keys() - {"parameters-on-host"} == per_parameter.keys()
    for name, wanted in per_parameter.items():
        counts = found[name]
        moved = [counts["parts"][part]["bytes"] for part in ("h2d", "d2h", "dram", "read")]
        assert moved == pytest.approx([n * numel for n in wanted], rel=0.01, abs=numel / 1000), name
        assert counts["about"]["sizes"]["parameters"] == numel
        assert counts["parts"]["read"]["bytes"] == counts["parts"]["write"]["bytes"]
    host = found["parameters-on-host"]["parts"]["h2d"]["bytes"]
    assert 2 * numel * (2 - 0.35) < host < 2.001 * 2 * numel  # what fits stays for the backward
    peers = {"plain": 2, "zero-offload": 0, "reflow": 0, "reflow-clipped": 0}
    assert {name: found[name]["launches"] - launches for name in peers} == peers
    engines = [counts for counts in found.values() if counts["updates"]]
    assert len(engines) == 6
    for counts in engines:
        chunk = counts["about"]["chunk_elements"]
        assert chunk in (2 << 20, 4 << 20, 16 << 20)  # a default of the engine, and not of 1/64 of the model
        assert counts["updates"] == sum(-(-unit // chunk) for unit in units)
        assert launches < counts["launches"] < 2 * launches


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
