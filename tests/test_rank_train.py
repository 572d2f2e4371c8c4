"""`infinity train` on several ranks: the batches of one, one report, and one end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.main import run

from .command_line import words
from .ranks import Result, all_well, run_ranks

pytestmark = pytest.mark.usefixtures("own_environment")

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
    return run_ranks(world, before + MAIN, "train", *arguments, seconds=seconds)


def steps_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.open()]


def common(text: str, nvme: str, *more: str, batch: int = 2) -> list[str]:
    return [*words(text, nvme), "--steps", "4", "--threads", "1", "--batch", str(batch), *more]


def test_ranks_train_on_the_batches_of_one(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [tmp_path / f"{n}.jsonl" for n in (1, 2)]
    more = "--accumulation", "2", "--max-grad-norm", "1", "--no-save", "--sample-tokens", "4"
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
    state = [s["memory"]["nvme"] for s in (ours[0], theirs[0])]
    assert state[0] == pytest.approx(state[1], rel=0.2)  # of both, with their padding
    [planned] = [r for r in found["planned_and_measured"] if r["what"] == "nvme"]
    assert planned["measured"] == pytest.approx(planned["planned"], rel=0.1)
    assert not list(Path(nvme).rglob("*.arena"))


def test_stages_train_alike(text: str, nvme: str, tmp_path: Path) -> None:
    logs = [tmp_path / f"{n}.jsonl" for n in (2, 3)]
    for stage, log in zip((2, 3), logs, strict=True):
        more = "--parameters", "device", "--zero-stage", str(stage), "--json-log", str(log), "--no-save"
        all_well(ranks_of(2, *common(text, nvme, *more)))
    ours, theirs = ([(s["loss"], s["grad_norm"]) for s in steps_of(log)] for log in logs)
    assert ours == theirs


def test_what_one_rank_cannot_do_ends_all(text: str, nvme: str) -> None:
    """The rank whose error it is says so, with its number."""
    Path(nvme, "0").mkdir()
    given = common(text, f"{nvme}/{{rank}}", "--no-save")
    (code, out, said), (other, _, error) = ranks_of(2, *given)
    assert (code, other) == (2, 2)
    assert (out, said) == ("", "")
    assert error.startswith("error: rank 1: the directory")
    assert f"mkdir -p {nvme}/1" in error
    assert not list(Path(nvme).rglob("*.arena"))


@pytest.mark.parametrize("wrong", ["--layers", "--lr"])
def test_what_no_rank_can_do_is_said_once(wrong: str, text: str, nvme: str) -> None:
    results = ranks_of(2, *common(text, nvme, "--no-save", wrong, "-1"))
    assert [code for code, *_ in results] == [2, 2]
    assert sum(err.count("error: rank") for *_, err in results) == 1
    assert sum(bool(err) for *_, err in results) == 1


@pytest.mark.parametrize(
    ("act", "codes", "words"),
    [
        ("raise MemoryError('no more')", (2, 1), "rank 1 of 2:\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", (2, -9), "error: rank 0: rank 1 is gone"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", (2, 130), "rank 1 of 2:\ninterrupted"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", (2, 143), "rank 1 of 2:\nended by SIGTERM"),
    ],
)
def test_a_rank_that_fails_on_the_way_ends_all(
    act: str, codes: tuple[int, int], words: str, text: str, nvme: str, tmp_path: Path
) -> None:
    given = common(text, nvme, "--steps", "50", "--no-save")
    results = ranks_of(2, *given, before=AFTER_TWO.format(act=act))
    assert tuple(code for code, *_ in results) == codes, results
    said = [err for *_, err in results if err]
    assert len(said) == 1
    assert words in said[0]
    assert "step 2/50" in results[0][1]
