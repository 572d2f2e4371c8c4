"""`infinity verify`: what is the same, and what it says of a wrong bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from infinity.cli import verify as module
from infinity.cli.commands import verify_command
from infinity.cli.verify import (
    CLIP,
    NVME,
    OTHERS,
    SPLIT,
    case_of,
    difference,
    train,
)
from infinity.core.config import UPDATES
from infinity.core.errors import DirectoryError, StorageError
from infinity.hardware import cpu_adam

from .command_line import python

pytestmark = pytest.mark.integration

FEW = [
    *(case_of(NVME, update, dtype="bf16") for update in UPDATES),
    *(case_of(SPLIT, "overlap", word, **more) for word, more in OTHERS.items()),
]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        verify_command, ["--device", "cpu", *arguments], catch_exceptions=False, standalone_mode=False
    )
    return done.return_value, done.stdout


def test_bits_are_compared_not_values() -> None:
    wanted = {"losses": torch.tensor([2.0, 1.0]).double(), "w": torch.tensor([1.0, -0.0, float("nan")])}
    assert difference(wanted, wanted) is None
    zero = {**wanted, "w": torch.tensor([1.0, 0.0, float("nan")])}
    assert difference(zero, wanted) == "w: 1 of 3 elements differ, number 1: 0.0 instead of -0.0"
    loss = {**zero, "losses": torch.tensor([2.0, 1.5]).double()}  # losses come first
    assert difference(loss, wanted) == "losses: 1 of 2 elements differ, number 1: 1.5 instead of 1.0"


def test_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cases_of", lambda *_: FEW)
    code, said = run("--nvme", str(tmp_path), "--json")
    result = json.loads(said)
    assert code == 0, [row["problem"] for row in result["cases"]]
    assert len(result["cases"]) == len(FEW)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "first").mkdir()
    norms = train(FEW[0], "cpu", str(tmp_path))["gradient norms"]
    assert 0 < (norms > CLIP).sum() < len(norms)  # some norms are clipped, and some are not


def test_an_error_of_a_case_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cases_of", lambda *_: FEW[:2])

    def failing(*_: Any) -> Any:
        raise StorageError("the drive is gone")

    monkeypatch.setattr(module, "train", failing)
    code, said = run("--nvme", str(tmp_path))
    assert code == 1
    assert f"{FEW[0].name}, sync failed: the drive is gone" in said
    assert "0 of 2 cases are the same" in said
    assert "suspect" not in said  # it is no fault of the machine's
    with pytest.raises(DirectoryError):
        run("--nvme", str(tmp_path / "missing"))


def test_a_wrong_bit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "cases_of", lambda *_: [case_of(NVME, u, dtype="bf16") for u in UPDATES[:2]])
    real_train, real_update, wrong = module.train, cpu_adam.update_segments, False

    def noting(case: Any, *more: Any) -> Any:
        nonlocal wrong
        wrong = case.settings["parameters"] == "nvme" and case.settings["update"] == UPDATES[1]
        return real_train(case, *more)

    def update(master: Any, moments: Any, grad: Any, out: Any, segments: Any) -> None:
        real_update(master, moments, grad, out, segments)
        if wrong and segments[0].step == module.STEPS:
            master.view(torch.int32)[5] ^= 1  # the lowest bit of a master, in the last step

    monkeypatch.setattr(module, "train", noting)
    monkeypatch.setattr(cpu_adam, "update_segments", update)
    code, said = run("--nvme", str(tmp_path), "--json")
    assert code == 1
    result = json.loads(said)
    verdicts = {row["settings"]["update"]: row for row in result["cases"]}
    assert verdicts[UPDATES[0]]["verdict"] == "same"
    assert verdicts[UPDATES[1]]["verdict"] == "differs"
    assert "master of 0.weight: 1 of" in verdicts[UPDATES[1]]["problem"]
    module.show(result)
    said = capsys.readouterr().out
    assert f"{NVME}, bf16, {UPDATES[1]} differs: master of 0.weight" in said
    assert "1 of 2 cases are the same" in said
    assert "suspect memory" in said


@pytest.mark.nightly
def test_everything_is_the_same_here(tmp_path: Path) -> None:
    code, said = run("--nvme", str(tmp_path), "--json")
    assert code == 0, [row["problem"] for row in json.loads(said)["cases"]]


@pytest.mark.gpu
def test_everything_is_the_same_on_a_gpu(tmp_path: Path) -> None:
    command = ["-m", "infinity", "verify", "--device", "cuda", "--nvme", str(tmp_path), "--json"]
    done = python(*command, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads(done.stdout)["device"].startswith("cuda")
