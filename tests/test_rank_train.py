"""`infinity train` on several ranks: the batches of one, one report, and one end."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infinity.cli.main import run
from infinity.storage.checkpoints import find, list_checkpoints

from .command_line import started, wait_for_line, words
from .ranks import Result, all_well, run_ranks

pytestmark = pytest.mark.usefixtures("own_environment")

IMPORTS = "infinity.cli.train", "torch._dynamo"
MAIN = "from infinity.cli.main import main\nmain()\n"

#: A rank that does `act` when it has made two steps.
AFTER_TWO = """
import os, signal, time
from infinity.cli import training
add, rank = training.Training._of_all, int(os.environ["RANK"])
def watched(self, *arguments):
    if len(self.losses) == 2 and rank == 1:
        {act}
    return add(self, *arguments)
training.Training._of_all = watched
"""


def ranks_of(world: int, *arguments: str, before: str = "", seconds: int = 120) -> list[Result]:
    script = before + MAIN
    return run_ranks(world, script, "train", *arguments, seconds=seconds, imports=IMPORTS)


def steps_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.open()]


def common(text: str, nvme: str, *more: str, batch: int = 2) -> list[str]:
    return [*words(text, nvme), "--steps", "4", "--threads", "1", "--batch", str(batch), *more]


def test_ranks_train_on_the_batches_of_one(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [tmp_path / f"{n}.jsonl" for n in (1, 2)]
    more = ["--accumulation", "2", "--max-grad-norm", "1", "--no-save", "--sample-tokens", "4"]
    more += ["--eval-every", "2", "--peak-tflops", "1"]
    alone = common(text, nvme, *more, "--json-log", str(logs[0]), "--json", batch=4)
    assert run(["train", *alone]) == 0
    wanted = json.loads(capsys.readouterr().out)
    results = ranks_of(2, *common(text, nvme, *more, "--json-log", str(logs[1]), "--json"))
    first, second = all_well(results)
    found = json.loads(first)
    assert (second, results[1][2]) == ("", "")
    assert "planned on each rank" in results[0][2]
    assert "2 ranks, ZeRO stage 3: 8 sequences in a step" in results[0][2]
    ours, theirs = steps_of(logs[1]), steps_of(logs[0])
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in ours] == pytest.approx([s[name] for s in theirs], rel=1e-5)
    for name in ("step", "tokens", "lr"):
        assert [s[name] for s in ours] == [s[name] for s in theirs]
    assert found["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=1e-5)
    for log in (ours, theirs):
        assert [s["step"] for s in log if "eval_loss" in s] == [2, 4]
    assert ours[1]["eval_loss"] == pytest.approx(theirs[1]["eval_loss"], rel=1e-5)
    two, one = (log[0]["mfu"] / log[0]["tokens_per_second"] for log in (ours, theirs))
    assert two == pytest.approx(one / 2), "the peak is that of two devices"
    state = [s["memory"]["nvme"] for s in (ours[0], theirs[0])]
    assert state[0] == pytest.approx(state[1], rel=0.2)  # of both, with their padding
    [planned] = [r for r in found["planned_and_measured"] if r["what"] == "nvme"]
    assert planned["measured"] == pytest.approx(planned["planned"], rel=0.1)


@pytest.mark.integration
def test_stages_train_alike(text: str, nvme: str, tmp_path: Path) -> None:
    logs = [tmp_path / f"{n}.jsonl" for n in (2, 3)]
    for stage, log in zip((2, 3), logs, strict=True):
        more = "--parameters", "device", "--zero-stage", str(stage), "--json-log", str(log), "--no-save"
        all_well(ranks_of(2, *common(text, nvme, *more)))
    ours, theirs = ([(s["loss"], s["grad_norm"]) for s in steps_of(log)] for log in logs)
    assert ours == theirs


LATE = """
import os, time
from infinity.cli import case
if os.environ["RANK"] == "1":
    looks = case.here
    case.here = lambda *args, **more: [time.sleep(1), looks(*args, **more)][1]
"""


@pytest.mark.parametrize("before", ["", LATE], ids=["", "who looks late"])
def test_what_one_rank_cannot_do_ends_all(before: str, text: str, nvme: str) -> None:
    """The rank whose error it is says so, with its number."""
    Path(nvme, "0").mkdir()
    given = common(text, f"{nvme}/{{rank}}", "--no-save")
    (code, out, said), (other, _, error) = ranks_of(2, *given, before=before)
    assert (code, other) == (2, 2)
    assert (out, said) == ("", "")
    assert error.startswith("error: rank 1: the directory")
    assert f"mkdir -p {nvme}/1" in error


def tensors(path: str) -> dict[str, dict[str, torch.Tensor]]:
    found = find(path)
    return {stem: load_file(Path(found.path, name)) for stem, name in found.content["files"].items()}


def assert_same(one: str, other: str) -> None:
    """Every bit of parameters, moments, losses and torch's generators; nothing draws from numpy's."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    for stem, kind in ours.items():
        for name, tensor in kind.items():
            assert "numpy" in name or torch.equal(tensor, theirs[stem][name]), (stem, name)


def test_a_run_goes_on_as_if_nobody_had_disturbed_it(text: str, nvme: str, tmp_path: Path) -> None:
    """On as many ranks bit for bit; on others with the same sequences in each step."""
    whole, again, alone = (str(tmp_path / name) for name in ("whole", "again", "alone"))
    logs = [tmp_path / f"{n}.jsonl" for n in range(3)]
    more = "--save-every", "2", "--keep-last", "9", "--output", whole, "--json-log", str(logs[0])
    first, second = all_well(ranks_of(2, *common(text, nvme, *more)))
    assert second == ""
    assert first.count(f"What was trained is in {whole}/step-4") == 1
    for other in (again, alone):
        shutil.copytree(f"{whole}/step-2", f"{other}/step-2")
    goes_on = ["--resume", "--json-log", str(logs[1]), "--output"]
    all_well(ranks_of(2, *goes_on, again))
    assert steps_of(logs[1]) != []
    for ours, theirs in zip(steps_of(logs[1]), steps_of(logs[0])[2:], strict=True):
        for name in ("step", "loss", "grad_norm", "lr"):
            assert ours[name] == theirs[name]
    assert_same(f"{again}/step-4", f"{whole}/step-4")
    refused = [err for *_, err in ranks_of(3, *goes_on, alone)]
    assert "3 ranks cannot share the batches" in "".join(refused)
    assert "start 2 ranks" in "".join(refused)
    goes_on[2] = str(logs[2])
    assert run(["train", *goes_on, alone]) == 0
    for ours, theirs in zip(steps_of(logs[2]), steps_of(logs[0])[2:], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_signal_to_one_rank_has_all_save_the_same_step(text: str, nvme: str, tmp_path: Path) -> None:
    given = common(text, nvme, "--steps", "50", "--output", str(tmp_path / "out"))
    act = "os.kill(os.getpid(), signal.SIGTERM)"
    (code, out, err), (other, second, said) = ranks_of(2, *given, before=AFTER_TWO.format(act=act))
    assert (code, other) == (75, 75), (err, said)
    assert (second, said) == ("", "")
    assert "SIGTERM: ended after 3 of 50 steps" in out
    assert find(str(tmp_path / "out")).step == 3


def test_a_checkpoint_that_one_rank_cannot_write_is_told_and_the_run_goes_on(
    text: str, nvme: str, tmp_path: Path
) -> None:
    full = """
import errno, os
from infinity.api import save
from infinity.core.errors import DirectoryError
join = save.TensorFile.join
def refuse(*arguments, **more):
    save.TensorFile.join = join
    raise DirectoryError("no room", errno=errno.ENOSPC, path="out")
if os.environ["RANK"] == "1":
    save.TensorFile.join = refuse
"""
    given = common(text, nvme, "--save-every", "2", "--output", str(tmp_path / "out"))
    (code, out, err), (other, second, said) = ranks_of(2, *given, before=full)
    assert (code, other) == (1, 1), (err, said)
    assert (second, said) == ("", "")
    assert "no checkpoint of step 2: the run goes on" in out
    assert err.count("rank 1: no room") == 1
    assert [found.step for found in list_checkpoints(str(tmp_path / "out"), damaged=False)] == [4]


@pytest.mark.integration
def test_torchrun_that_is_told_to_end_has_its_ranks_save(text: str, nvme: str, tmp_path: Path) -> None:
    given = common(text, nvme, "--steps", "5000", "--output", str(tmp_path / "out"))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infinity", "train", *given]
    with started(*command) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=100)
    assert "SIGTERM: ended after" in out, err
    steps = find(str(tmp_path / "out")).step
    assert f"What was trained is in {tmp_path}/out/step-{steps}" in out


@pytest.mark.parametrize("name", ["train.seed", "text"])
def test_ranks_that_were_started_differently_do_not_train(
    name: str, text: str, nvme: str, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("not the same text as that of the first rank. " * 2000)
    more = {"train.seed": ["--seed", "3"], "text": ["--data", str(tmp_path / "other.txt")]}[name]
    differ = f"import os, sys\nif os.environ['RANK'] == '1':\n    sys.argv += {more}\n"
    results = ranks_of(2, *common(text, nvme, "--no-save"), before=differ)
    assert [code for code, *_ in results] == [2, 2]
    said = "".join(err for *_, err in results)
    assert said.count(f"ranks were started with a different {name}") == 1


@pytest.mark.parametrize("wrong", ["--layers", "--lr"])
def test_what_no_rank_can_do_is_said_once(wrong: str, text: str, nvme: str) -> None:
    results = ranks_of(2, *common(text, nvme, "--no-save", wrong, "-1"))
    assert [code for code, *_ in results] == [2, 2]
    assert sum(err.count("error: rank") for *_, err in results) == 1
    assert sum(bool(err) for *_, err in results) == 1


@pytest.mark.first
@pytest.mark.parametrize(
    ("act", "codes", "words"),
    [
        ("raise MemoryError('no more')", (2, 1), "after 2 steps; `infinity train --resume --output"),
        ("os.kill(os.getpid(), signal.SIGKILL)", (2, -9), "error: rank 0: rank 1 is gone"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", (2, 130), "rank 1 of 2:\ninterrupted"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", (2, 143), "rank 1 of 2:\nended by SIGTERM"),
    ],
)
def test_a_rank_that_fails_on_the_way_ends_all(
    act: str, codes: tuple[int, int], words: str, text: str, nvme: str, tmp_path: Path
) -> None:
    saved = ["--output", str(tmp_path / "out"), "--save-every", "1"] if "raise" in act else ["--no-save"]
    given = common(text, nvme, "--steps", "50", *saved)
    results = ranks_of(2, *given, before=AFTER_TWO.format(act=act))
    assert tuple(code for code, *_ in results) == codes, results
    said = [err for *_, err in results if err]
    assert len(said) == 1
    assert words in said[0]
    assert ("rank 1 of 2:\n" in said[0]) == ("KILL" not in act)
    assert "step 2/50" in results[0][1]


def test_muon_takes_what_is_planned(text: str, nvme: str) -> None:
    more = ["--optimizer", "muon", "--no-save", "--sample-tokens", "0", "--json"]
    first, second = all_well(ranks_of(2, *common(text, nvme, *more)))
    result = json.loads(first)
    assert second == ""
    rows = [row for row in result["planned_and_measured"] if row["at_most"]]
    assert len(rows) >= 4
    assert all(0 < row["measured"] <= row["planned"] for row in rows)
    assert result["last_loss"] < result["first_loss"]
