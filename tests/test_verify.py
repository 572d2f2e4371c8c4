"""`infinity verify`: what is the same, and what it says of a wrong bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from infinity.cli import verify as verify_module
from infinity.cli.commands import verify_command
from infinity.cli.verify import (
    DTYPES,
    HOST,
    NVME,
    PLACEMENTS,
    Difference,
    Trace,
    cases_of,
    compare,
    reference_of,
)
from infinity.core.config import UPDATES
from infinity.core.errors import DirectoryError, StorageError
from infinity.hardware import cpu_adam

from .command_line import python

BACKENDS = ("libaio", "threads")


def trace(**changes: Any) -> Trace:
    told = {"losses": [2.0, 1.0], "norms": [3.0, float("nan")], "scales": [1.0, 1.0], **changes}
    tensors = told.pop("tensors", {("master", "w"): torch.tensor([1.0, -0.0, float("nan")])})
    return Trace([*zip(*told.values(), strict=True)], tensors)


def test_bits_are_compared_not_values() -> None:
    assert compare(trace(), trace()) is None
    zero = trace(tensors={("master", "w"): torch.tensor([1.0, 0.0, float("nan")])})
    assert compare(zero, trace()) == Difference(2, "master", "w", 1, 0.0, -0.0)
    found = compare(trace(losses=[2.0, 1.5], scales=[1.0, 2.0]), trace())
    assert found == Difference(2, "loss", None, 1, 1.5, 1.0)
    assert str(found) == "the loss after step 2: 1.5 instead of 1.0"
    assert "norm" in str(compare(trace(norms=[3.5, 1.0]), trace()))
    assert "depends on timing" in str(Difference(2, "master", "w", 7, 0.0, 1.0, again=False))


def test_the_cases_cover_what_could_change_a_bit() -> None:
    isas = cpu_adam.ISAS
    cases = cases_of(isas, BACKENDS, isas[-1])
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for update in UPDATES:
        for dtype in ("fp32", "bf16"):
            for place in PLACEMENTS:
                assert f"{place}, {update}, {dtype}" in names
    assert {case.settings["dtype"] for case in cases} == set(DTYPES)
    assert {case.isa for case in cases} == {None, *isas[:-1]}
    assert {case.settings.get("aio_backend") for case in cases} == {None, *BACKENDS}
    for number, case in enumerate(cases):  # what it is compared with comes first
        wanted = reference_of(case)
        assert wanted.name in names[: number + 1]
        assert wanted.settings["parameters"] == "host"
        assert wanted.settings["update"] == ("delayed" if case.settings["update"] == "delayed" else "sync")
        assert wanted.settings.get("accumulation") == case.settings.get("accumulation")
        behind = case.settings["update"] == "backward" or "behind" in case.name
        assert bool(case.settings.get("accumulation")) == behind


def some(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def chosen(*given: Any) -> Any:
        return [case for case in cases_of(*given) if case.name in names]

    monkeypatch.setattr(verify_module, "cases_of", chosen)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(
        verify_command,
        ["--device", "cpu", "--json", *arguments],
        catch_exceptions=False,
        standalone_mode=False,
    )
    return done.return_value, json.loads(done.stdout)


def test_the_same_bits_and_torch_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp16 = f"{HOST}, sync, fp16", f"{NVME}, {UPDATES[0]}, fp16"
    behind = f"{HOST}, sync, bf16, as behind the backward", f"{NVME}, backward, bf16"
    some(monkeypatch, f"{HOST}, sync, fp32", f"split, {UPDATES[0]}, fp32", *fp16, *behind)
    code, result = run("--nvme", str(tmp_path))
    assert code == 0
    assert result["same"]
    assert len(result["cases"]) == 6
    assert all(case["same"] and case["problem"] is None for case in result["cases"])
    assert result["torch"]["fp32"]["same"]
    assert 0 < result["clipped_share"] < 1  # some norms are clipped, and some are not
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_case_is_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some(monkeypatch, f"{HOST}, sync, fp32", f"{NVME}, sync, fp32")

    def failing(case: Any, *_: Any) -> Trace:
        raise StorageError("the drive is gone")

    monkeypatch.setattr(verify_module, "train", failing)
    code, result = run("--nvme", str(tmp_path))
    assert code == 1
    assert [case["same"] for case in result["cases"]] == [False, False]
    assert "the drive is gone" in result["cases"][1]["problem"]
    words = ["--device", "cpu", "--nvme", str(tmp_path)]
    told = CliRunner().invoke(verify_command, words, catch_exceptions=False, standalone_mode=False).output
    assert "No case gave other bits" in told  # so it is no fault of the machine's
    assert "suspect memory" not in told
    with pytest.raises(DirectoryError):
        run("--nvme", str(tmp_path / "missing"))


#: Flips the lowest bit of one master, in one case, in the second update of the first chunk.
WRONG = """
import sys
import torch
from infinity.hardware import cpu_adam
from infinity.cli import main as cli, verify

names = ("all on host, sync, bf16", "all on NVMe, sync, bf16", "state on NVMe, sync, bf16")
every = verify.cases_of
verify.cases_of = lambda *given: [case for case in every(*given) if case.name in names]
now = {}

def noting(case, *given):
    now.update(case=case.name, flip=True)
    return train(case, *given)

def update(master, moments, grad, out, segments):
    real(master, moments, grad, out, segments)
    if now["case"] == names[2] and now["flip"] and segments[0].step == 2:
        now["flip"] = False
        master.view(torch.int32)[5] ^= 1

train, real = verify.train, cpu_adam.update_segments
verify.train = noting
cpu_adam.update_segments = update
sys.exit(cli.run(["verify", "--device", "cpu", "--nvme", sys.argv[1], *sys.argv[2:]]))
"""


def wrong(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", WRONG, *arguments, env={"COLUMNS": "200"}, timeout=120)


def test_a_wrong_bit_is_named(tmp_path: Path) -> None:
    done = wrong(str(tmp_path), "--json")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    cases = {case["case"]: case for case in result["cases"]}
    assert [name for name, case in cases.items() if not case["same"]] == ["state on NVMe, sync, bf16"]
    assert len(cases) == 3
    case = cases["state on NVMe, sync, bf16"]
    found = case["difference"]
    assert (found["step"], found["what"], found["parameter"]) == (2, "master", "embed.weight")
    assert found["elements"] == 1
    assert found["again"]
    assert "differs from all on host, sync, bf16: master of embed.weight after step 2" in case["problem"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_person_is_told(tmp_path: Path) -> None:
    done = wrong(str(tmp_path))
    assert done.returncode == 1
    assert "state on NVMe, sync, bf16: differs from all on host, sync, bf16" in done.stdout
    assert "2 of 3 cases" in done.stdout


@pytest.mark.slow
def test_everything_is_the_same_here(tmp_path: Path) -> None:
    code, result = run("--nvme", str(tmp_path))
    assert code == 0, [case["problem"] for case in result["cases"] if not case["same"]]
    assert len(result["cases"]) > 2 * len(UPDATES) * len(PLACEMENTS)
    assert set(result["torch"]) == {"fp32", "bf16"}


@pytest.mark.gpu
def test_everything_is_the_same_on_a_gpu(tmp_path: Path) -> None:
    command = ["-m", "infinity", "verify", "--device", "cuda", "--nvme", str(tmp_path), "--json"]
    done = python(*command, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert json.loads(done.stdout)["device"].startswith("cuda")
