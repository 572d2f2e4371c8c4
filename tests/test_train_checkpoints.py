"""What `infinity train` keeps: checkpoints on the way and at the end, and runs that go on from one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infinity.cli.case import Case
from infinity.cli.data import find_files
from infinity.cli.main import run
from infinity.cli.output import read_run
from infinity.cli.train import train
from infinity.cli.training import Training
from infinity.core.errors import BudgetError, ConfigError, DataError, DirectoryError
from infinity.core.sizes import MiB
from infinity.planning.planner import checkpoint_nbytes
from infinity.storage.checkpoints import find, list_checkpoints
from infinity.storage.folder import Claim, lock_directory

from . import inner
from .command_line import small_drive, started, wait_for_line, words
from .offloaded import wrap_adamw

pytestmark = pytest.mark.usefixtures("own_environment")


def trained(text: str, nvme: str, *more: str) -> list[str]:
    """The words of a run of a tiny model, with dropout's like in its batches: each step has its own."""
    kept = [w for w in words(text, nvme) if w not in ("--sample-tokens", "0")]
    return [*kept, "--sample-tokens", "8", "--max-grad-norm", "1", *more]


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["train", "--json", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def losses(log: Path) -> list[Any]:
    return [(s["step"], s["loss"], s["grad_norm"], s["lr"]) for s in map(json.loads, log.open())]


def tensors(path: str) -> dict[str, dict[str, torch.Tensor]]:
    found = find(path)
    return {stem: load_file(Path(found.path, name)) for stem, name in found.content["files"].items()}


def assert_equal(one: str, other: str) -> None:
    """Two checkpoints have the same bits, losses and torch's generator among them. Nothing draws from that of
    numpy, which each process seeds in its own way."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for stem in ours:
        assert ours[stem].keys() == theirs[stem].keys()
        for name, tensor in ours[stem].items():
            assert "numpy" in name or torch.equal(tensor, theirs[stem][name]), (stem, name)


SOME_IN_FP32 = ("--optimizer-state-dtype", "8bit", "--optimizer-state-fp32", "*norm*")


@pytest.mark.parametrize(("update", "more"), [("overlap", ()), ("delayed", ()), ("overlap", SOME_IN_FP32)])
def test_a_run_that_goes_on_is_the_run_that_nobody_disturbed(
    update: str,
    more: tuple[str, ...],
    text: str,
    nvme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Losses, parameters, moments, generators, the log and the sample."""
    inner.config(delay_warmup_steps=1)
    common = trained(text, nvme, "--steps", "7", "--update", update, *more)
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    logs = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    first = result_of(capsys, *common, "--output", whole, "--json-log", str(logs[0]))
    assert first["checkpoint"] == os.path.join(whole, "step-7")
    result_of(capsys, *common, "--output", parts, "--save-every", "2", "--json-log", str(logs[1]))
    assert [c.step for c in list_checkpoints(parts)] == [6, 7], "two are kept"
    assert_equal(whole, parts)
    shutil.rmtree(os.path.join(parts, "step-7"))
    with logs[1].open("a") as log:
        log.write('{"step": 8, "lo')  # as a run that was killed leaves it
    again = result_of(capsys, "--resume", "--output", parts)
    assert losses(logs[0]) == losses(logs[1])
    assert_equal(whole, parts)
    for name in ("sample", "first_loss", "last_loss", "validation_loss", "steps"):
        assert first[name] == again[name], name
    assert first["sample"]
    assert again["run"]["train"]["save_every"] == 2, "what nobody changes is as it was"


def killed_and_resumed(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, seed: int
) -> None:
    steps = 60
    common = trained(text, nvme, "--steps", str(steps), "--save-every", "3")
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    logs = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    first = result_of(capsys, *common, "--output", whole, "--json-log", str(logs[0]))
    chance = random.Random(seed)
    begin = [*common, "--output", parts, "--json-log", str(logs[1]), "--overwrite"]
    done = 0
    while done < kills:
        resumed = bool(list_checkpoints(parts))
        arguments = ["--resume", "--output", parts] if resumed else begin
        with started("-m", "infinity", "train", *arguments) as child:
            wait_for_line(child, "step " if resumed else "saved ")
            time.sleep(chance.uniform(0, 0.4))
            child.send_signal(signal.SIGKILL)
            ended = child.wait(30)
        done += 1
        assert ended == -signal.SIGKILL, "it was to be killed on its way"
    last = result_of(capsys, "--resume", "--output", parts)
    assert losses(logs[0]) == losses(logs[1])
    assert_equal(whole, parts)
    assert first["sample"] == last["sample"]


@pytest.mark.integration
def test_a_run_that_is_killed_and_resumed(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_and_resumed(text, nvme, tmp_path, capsys, kills=2, seed=0)


@pytest.mark.nightly
def test_a_run_that_is_killed_ten_times(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_and_resumed(text, nvme, tmp_path, capsys, kills=10, seed=1)


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_after_the_step_and_the_run_goes_on(
    number: int, text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "out")
    with started(
        "-m", "infinity", "train", *trained(text, nvme, "--steps", "5000", "--output", root)
    ) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(number)
        if number == signal.SIGHUP:  # it comes more than once
            child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert "Traceback" not in err
    (there,) = list_checkpoints(root)
    assert f"saved {there.path}" in out
    assert f"{signal.Signals(number).name}: ended after {there.step} of 5000 steps" in out
    assert f"infinity train --resume --output {root} " in out
    again = result_of(capsys, "--resume", "--output", root, "--steps", str(there.step + 1))
    assert again["steps"] == there.step + 1


def test_one_run_in_a_directory(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, new or going on, is refused before it trains; a save of somebody else is not."""
    root, theirs = str(tmp_path / "out"), str(tmp_path / "theirs")
    os.mkdir(theirs)
    loop = Training.loop
    loops: list[str | None] = []

    def meanwhile(training: Training) -> None:
        import infinity

        loops.append(training.root)
        other = ["--resume", "--steps", "9"] if training.begin else words(text, theirs, "--steps", "3")
        failed = result_of(capsys, *other, "--output", training.root or "", code=2)
        assert failed["error"]["type"] == "DirectoryError"
        assert "another run" in failed["error"]["what"]
        model = torch.nn.Linear(4, 4)
        model, adam = wrap_adamw(model, infinity.Config(device="cpu"))
        infinity.save(adam, tmp_path / "out")
        infinity.close(adam)
        loop(training)

    monkeypatch.setattr(Training, "loop", meanwhile)
    common = words(text, nvme, "--steps")
    result_of(capsys, *common, "2", "--output", root)
    shutil.rmtree(os.path.join(root, "step-0"))  # that of somebody else
    result_of(capsys, "--resume", "--output", root, "--steps", "3")
    assert loops == [root, root]
    assert sorted(os.listdir(root)) == ["step-0", "step-3"], "nothing else stays, and two are kept"


def test_what_a_killed_run_had_claimed(tmp_path: Path) -> None:
    """It is free at once; and what a claim has made goes with it, unless there is something in it."""
    root = str(tmp_path / "above" / "out")
    code = (
        "import sys, time; from infinity.storage.folder import Claim\n"
        "with Claim(sys.argv[1]): print('ready', flush=True); time.sleep(100)"
    )
    with started("-c", code, root) as child:
        wait_for_line(child, "ready")
        with pytest.raises(DirectoryError, match="another run"):
            Claim(root).__enter__()
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert os.listdir(root), "its file has stayed"
    assert list_checkpoints(root) == []
    with Claim(root):
        pass
    assert os.listdir(root) == [], "the directory was there before"
    os.removedirs(root)
    with Claim(root):
        assert os.path.isdir(root)
    assert not os.path.exists(tmp_path / "above")


def test_a_run_that_is_gone_on_with_meanwhile(
    text: str, nvme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one that began from the same checkpoint ends before this one has the directory."""
    root = str(tmp_path / "out")
    train(read_run(None, {**_given(text, nvme), "steps": 2, "output": root}))
    late = read_run(None, {"resume": True, "output": root, "steps": 3})
    train(late)
    with pytest.raises(ConfigError, match="at its end"):
        train(late)


def test_the_last_save_waits_for_that_of_another_process(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "out")
    os.mkdir(root)
    lock = lock_directory(root, "save")
    turns = iter([lambda: None, lock.close])
    monkeypatch.setattr("infinity.cli.training.time.sleep", lambda _: next(turns)())
    assert train(read_run(None, {**_given(text, nvme), "steps": 1, "output": root}))["checkpoint"]
    assert capsys.readouterr().out.count("waits for it") == 1


@pytest.mark.integration
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: int, text: str, nvme: str, tmp_path: Path) -> None:
    """Also amid the save that the first one asked for: what was saved before stays."""
    root = str(tmp_path / "out")
    common = trained(text, nvme, "--steps", "5000", "--save-every", "1", "--output", root)
    with started("-m", "infinity", "train", *common) as child:
        wait_for_line(child, "saved ")
        child.send_signal(signal.SIGTERM)
        child.send_signal(second)
        _, err = child.communicate(timeout=60)
    assert child.returncode in (128 + second, 75), err  # 75: the second one came too late
    assert "Traceback" not in err
    assert list_checkpoints(root)


def test_what_is_trained_is_kept_beside_the_run_unless_told(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = words(text, nvme, "--steps", "1")
    paths = [result_of(capsys, *common)["checkpoint"] for _ in range(2)]
    assert len({os.path.dirname(p) for p in paths}) == 2, "a directory for each"
    assert all(os.path.dirname(os.path.dirname(p)) == os.path.join(nvme, "runs") for p in paths)
    assert result_of(capsys, *common, "--no-save")["checkpoint"] is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    elsewhere = ["--parameters=host", "--optimizer-state=host", "--gradients=host", "--device=cpu"]
    size = ["--layers", "1", "--width", "32", "--heads", "1", "--batch", "1", "--sequence", "16"]
    path = result_of(capsys, *size, *elsewhere, "--data", text, "--steps", "1", "--sample-tokens", "0")
    assert path["checkpoint"].startswith(str(tmp_path / "runs") + "/")


def test_a_run_that_ends_before_anything_is_saved_leaves_no_directory(
    text: str, nvme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("infinity.cli.training.Training.loop", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        train(read_run(None, {"steps": 1, **_given(text, nvme)}))
    assert os.listdir(os.path.join(nvme, "runs")) == []


def _given(text: str, nvme: str) -> dict[str, Any]:
    size = {"layers": 1, "width": 32, "heads": 1, "batch": 1, "sequence": 16, "sample_tokens": 0}
    places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
    return {**size, **places, "data_path": text, "nvme": (nvme,), "device": "cpu", "chunk_elements": 65536}


def test_what_a_run_that_goes_on_may_not_change(text: str, nvme: str, tmp_path: Path) -> None:
    root = str(tmp_path / "out")
    forms = {"optimizer_state_dtype": "bf16", "optimizer_state_fp32": ("*norm*",)}
    train(read_run(None, {**_given(text, nvme), **forms, "steps": 2, "output": root}))
    there = {"resume": True, "output": root}
    of_optimizer: tuple[dict[str, Any], ...] = ({"optimizer": "lion"}, {"warmup": 1})
    for change in ({"batch": 2}, {"width": 64}, {"seed": 3}, {"preset": "10m"}, *of_optimizer):
        with pytest.raises(ConfigError, match="cannot change its"):
            read_run(None, {**there, "steps": 4, **change})
    with pytest.raises(ConfigError, match="at its end"):
        read_run(None, there)
    assert run(["train", "--resume", "--output", root]) == 0  # not a failure to who starts it again
    with pytest.raises(ConfigError, match="another run"):
        train(read_run(None, {**_given(text, nvme), "steps": 2, "output": root}))
    inside = {"output": os.path.join(root, "step-2")}
    with pytest.raises(DirectoryError, match=f"cannot contain other checkpoints[^$]*its parent, {root},"):
        train(read_run(None, {**_given(text, nvme), "steps": 2, **inside}))
    with pytest.raises(DirectoryError, match="cannot contain other checkpoints"):
        read_run(None, {"resume": True, "steps": 4, **inside})
    with pytest.raises(ConfigError, match="which run"):
        read_run(None, {"resume": True})
    with pytest.raises(DirectoryError, match="no checkpoint"):
        read_run(None, {"resume": True, "output": str(tmp_path / "elsewhere")})
    for change in ({"output": root}, {"save_every": 2}):
        with pytest.raises(ConfigError, match="cannot be used"):
            read_run(None, {"save": False, **change})
    # Where the bytes lie may change, in which form moments are, and how many steps there are.
    host = {"parameters": "host", "optimizer_state": "host", "optimizer_state_dtype": "fp32"}
    result = train(read_run(None, {**there, "steps": 3, **host}))
    assert result["steps"] == 3
    Path(text).write_text(Path(text).read_text().replace("return", "retorn"))
    with pytest.raises(DataError, match="not the one that the run began with"):
        train(read_run(None, {**there, "steps": 4}))


def _flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


@pytest.mark.first
@pytest.mark.parametrize("stem", ["index", "exp_avg", "values", "gone"])
def test_a_damaged_checkpoint_is_set_aside(
    stem: str, text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that the error says; then the run goes on from the one before, and ends as it would
    have. Nothing trips over what was set aside, or removes it."""
    root, whole = str(tmp_path / "it's out"), str(tmp_path / "whole")
    common = words(text, nvme, "--steps", "10", "--save-every", "2", "--keep-last", "2")
    first = result_of(capsys, *common, "--output", root)
    shutil.copytree(root, whole)
    for times in range(2):  # the second one has another name
        found = find(root)
        path = os.path.join(found.path, "index.json") if stem == "index" else found.file(stem)
        if stem == "gone":
            os.unlink(found.file("parameters") or "")
        else:
            assert path is not None
            _flip(path, -40)
        error = result_of(capsys, "--resume", "--output", root, "--steps", "11", code=2)["error"]
        assert error["type"] == "CorruptionError"
        assert f"resumes from {root}/step-8, after 8 steps" in error["cure"]
        subprocess.run(error["cure"].split("`")[1], shell=True, check=True)
        again = result_of(capsys, "--resume", "--output", root, "--steps", "10")
        assert again["last_loss"] == first["last_loss"]
        assert_equal(whole, root)
        aside = ["damaged-damaged-step-10"] * times + ["damaged-step-10"]
        assert sorted(os.listdir(root)) == [*aside, "step-10", "step-8"]
    assert not any(root in str(p) for p in find_files(tmp_path)), "that is no text, either"


def test_the_only_checkpoint_is_damaged(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "out")
    common = words(text, nvme, "--steps", "2", "--output", root)
    result_of(capsys, *common)
    _flip(os.path.join(root, "step-2", "index.json"), -40)
    cure = result_of(capsys, "--resume", "--output", root, code=2)["error"]["cure"]
    assert "no other" in cure
    subprocess.run(cure.split("`")[1], shell=True, check=True)
    assert result_of(capsys, *common)["steps"] == 2


def test_a_checkpoint_of_another_program_is_not_gone_on_from(tmp_path: Path) -> None:
    import infinity

    model = torch.nn.Linear(4, 4)
    model, adam = wrap_adamw(model, infinity.Config(device="cpu"))
    infinity.save(adam, tmp_path)
    infinity.close(adam)
    with pytest.raises(ConfigError, match="not saved by `infinity train`"):
        read_run(None, {"resume": True, "output": str(tmp_path)})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"update": "delayed"},
        {"dtype": "bf16"},
        {"optimizer": "adagrad"},
        {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ("*embed*", "*norm*")},
    ],
)
def test_the_planned_bytes_of_a_checkpoint(
    changes: dict[str, Any], text: str, nvme: str, tmp_path: Path
) -> None:
    inner.config(delay_warmup_steps=0)
    run_ = read_run(None, {**_given(text, nvme), "steps": 2, "output": str(tmp_path / "out"), **changes})
    case = Case(run_)
    planned = checkpoint_nbytes(case.planner.model, case.config)
    path = train(run_)["checkpoint"]
    taken = sum(entry.stat().st_size for entry in os.scandir(path))
    assert planned <= taken <= planned + 64 * 1024


def test_plan_counts_those_that_come_to_stand_at_once(text: str, nvme: str, tmp_path: Path) -> None:
    def count(**changes: Any) -> int:
        case = Case(read_run(None, {**_given(text, nvme), "steps": 10, **changes}))
        (there,) = case.plan().standing
        one = checkpoint_nbytes(case.planner.model, case.config)
        assert there.checkpoints % one == 0
        return there.checkpoints // one

    root = str(tmp_path / "out")
    assert count() == 1
    assert count(save=False) == 0
    assert count(save_every=1) == 3
    assert count(save_every=1, keep_last=5, output=root) == 6
    assert count(save_every=5) == 2
    train(read_run(None, {**_given(text, nvme), "steps": 4, "save_every": 1, "output": root}))
    assert count(save_every=1, output=root, resume=True) == 1, "two are there already"


@pytest.mark.root
def test_a_drive_without_room_for_the_checkpoints(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before the run, and each cure works."""
    size = {"layers": 4, "width": 128, "heads": 2}
    with small_drive(tmp_path, 28 * MiB) as drive:
        given = {**_given(text, nvme), **size, "steps": 4, "save_every": 1, "output": f"{drive}/out"}
        run_ = read_run(None, given)
        with pytest.raises(BudgetError, match=r"checkpoint\(s\)") as caught:
            train(run_)
        assert caught.value.cure.startswith("--keep-last 1, or --output DIR")
        assert not os.path.exists(f"{drive}/out")
        plan = Case(run_).plan()
        assert not plan.fits
        assert train(read_run(None, {**given, "keep_last": 1}))["checkpoint"]
        assert train(read_run(None, {**given, "output": str(tmp_path / "large")}))["checkpoint"]
    with small_drive(tmp_path, 20 * MiB) as drive:
        given = {**_given(text, nvme), **size, "steps": 4, "output": f"{drive}/out", "nvme": (nvme,)}
        with pytest.raises(BudgetError) as caught:
            train(read_run(None, {**given, "layers": 12}))
        assert caught.value.cure.startswith("--output DIR")


@pytest.mark.parametrize("save_every", [2, 9])
def test_a_last_save_that_fails(
    save_every: int, text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was trained is lost, and that is no wrong option. The cure works."""
    root = tmp_path / "out"
    root.mkdir()
    (root / "step-5").write_text("a file that stands in the way")
    common = words(text, nvme, "--steps", "5", "--save-every", str(save_every), "--output", str(root))
    capsys.readouterr()
    assert run(["train", *common, "--json"]) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    before = str(root / "step-4") if save_every == 2 else None
    assert (result["steps"], result["lost_steps"], result["checkpoint"]) == (5, 1 if before else 5, before)
    (error,) = result["incomplete"]
    assert error["type"] == "DirectoryError"
    newest = f"the newest whole checkpoint is {before}" if before else "there is no checkpoint"
    assert f"NOT SAVED: {result['lost_steps']} of the 5 steps are lost; {newest}." in said.err
    (root / "step-5").unlink()
    assert ("--resume" in error["cure"]) == bool(before)
    again = result_of(capsys, *(["--resume", "--output", str(root)] if before else common))
    assert (again["steps"], again["lost_steps"]) == (5, 0)


def _free(drive: str) -> int:
    status = os.statvfs(drive)
    return status.f_bavail * status.f_frsize


def _fill(drive: str, left: int) -> None:
    with open(f"{drive}/theirs", "wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, _free(drive) - left)


@pytest.mark.root
def test_a_run_that_goes_on_on_a_full_drive(text: str, nvme: str, tmp_path: Path) -> None:
    """Its cure is room where its checkpoints are, and so much is enough."""
    with small_drive(tmp_path, 40 * MiB) as drive:
        root = f"{drive}/out"
        train(read_run(None, {**_given(text, nvme), "width": 128, "steps": 1, "output": root}))
        _fill(drive, 64 * 1024)
        late = read_run(None, {"resume": True, "output": root, "steps": 2})
        with pytest.raises(BudgetError) as caught:
            train(late)
        cure = re.fullmatch(rf"free (\d+)MiB more on the drive of {root}", caught.value.cure or "")
        assert cure is not None, caught.value.cure
        os.truncate(f"{drive}/theirs", os.path.getsize(f"{drive}/theirs") - int(cure[1]) * MiB)
        assert train(late)["checkpoint"] == f"{root}/step-2"


@pytest.mark.integration
@pytest.mark.root
def test_a_full_drive_when_sigterm_comes(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_drive(tmp_path, 40 * MiB) as drive:
        command = trained(text, nvme, "--steps", "5000", "--output", f"{drive}/out")
        with started("-m", "infinity", "train", *command, "--json", stderr=subprocess.STDOUT) as child:
            wait_for_line(child, "step 1/")
            _fill(drive, 64 * 1024)
            child.send_signal(signal.SIGTERM)
            out, _ = child.communicate(timeout=60)
    assert child.returncode == 1, out
    assert "Traceback" not in out
    (result,) = (json.loads(line) for line in out.splitlines() if line.startswith('{"run"'))
    assert result["stopped"]
    assert result["lost_steps"] == result["steps"] > 0
    assert result["checkpoint"] is None
    assert "NOT SAVED" in out


@pytest.mark.integration
@pytest.mark.root
def test_a_checkpoint_on_the_way_that_fails_ends_nothing(text: str, nvme: str, tmp_path: Path) -> None:
    """Somebody fills the drive meanwhile; it has room again at the end."""
    with small_drive(tmp_path, 40 * MiB) as drive:
        command = trained(text, nvme, "--steps", "60", "--save-every", "4", "--output", f"{drive}/out")
        with started("-m", "infinity", "train", *command) as child:
            wait_for_line(child, "saved ")
            _fill(drive, 64 * 1024)
            wait_for_line(child, "no checkpoint of step")
            os.unlink(f"{drive}/theirs")
            out, err = child.communicate(timeout=100)
        assert child.returncode == 1, err
        assert "no room for a checkpoint" in err
        assert find(f"{drive}/out").step == 60
        assert "The loss" in out


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    """Its files are in the index, so that text can be made from the checkpoint alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import infinity

    words_ = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words_.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_, unk_token="[UNK]")
    model = torch.nn.Linear(4, 4)
    model, adam = wrap_adamw(model, infinity.Config(device="cpu"))
    path = infinity.save(adam, tmp_path / "out", state={"tokenizer": tokenizer, "n": 3})
    assert infinity.load(adam, path, state={"tokenizer": tokenizer, "n": 0}) == {"n": 3}
    infinity.close(adam)
    folder = tmp_path / "again"
    folder.mkdir()
    for name, content in find(path).content["texts"].items():
        (folder / name).write_text(content)
    assert PreTrainedTokenizerFast.from_pretrained(folder)("a b")["input_ids"] == [0, 1]


def test_help_of_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("--resume", "--save-every", "--keep-last", "--output", "75 when SIGTERM or SIGHUP"):
        assert word in said


def test_checkpoints_below_the_text_are_no_text(text: str, nvme: str, tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    shutil.copy(text, folder)
    given = {**_given(str(folder), nvme), "output": str(folder / "out")}
    train(read_run(None, {**given, "steps": 2}))
    assert [p.name for p in find_files(folder)] == [os.path.basename(text)]
    assert train(read_run(None, {"resume": True, "output": given["output"], "steps": 3}))["steps"] == 3
