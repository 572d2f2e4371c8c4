"""`infinity bench step`: bounds, room, cases and what they come to."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from infinity.cli.bench import io_load, step
from infinity.cli.bench.group import bench_command
from infinity.cli.bench.step import Request, check_room
from infinity.cli.bench.step_run import PLACEMENTS, Measured, bound, in_memory, settings_of, steady
from infinity.core.config import UPDATES, Config
from infinity.core.errors import BudgetError, ConfigError, DirectoryError, StorageError

SMALL: dict[str, Any] = {"layers": 2, "width": 64, "heads": 2}
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--tokens", "16", "--device", "cpu"]


# ---- bounds ----


def test_the_bound_of_each_update_mode() -> None:
    found = Measured(forward=1.0, backward=2.0, adam=0.5, moved=10.0, nvme_rate=1.0)
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


def test_without_a_drive_the_kernel_is_what_is_left() -> None:
    found = Measured(forward=1.0, backward=2.0, adam=0.5)
    assert bound("sync", found) == 3.5
    assert bound("overlap", found) == 3.0
    assert bound("overlap", dataclasses.replace(found, adam=1.25)) == 3.25
    assert bound("delayed", found) == bound("backward", found) == 3.0


def test_steady_steps_have_an_update_behind_them() -> None:
    assert steady({"intervals": [1.0, 5.0, 7.0, 6.0]}) == 6.0
    assert steady({"intervals": [3.0]}) == 3.0


# ---- room ----


def test_what_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(**SMALL, directory=str(tmp_path))
    check_room(request)
    with pytest.raises(BudgetError, match="host memory") as caught:
        check_room(dataclasses.replace(request, width=1 << 16))
    assert "--preset" in str(caught.value.cure)
    with pytest.raises(DirectoryError, match="no file can be made"):
        check_room(dataclasses.replace(request, directory=str(tmp_path / "missing")))
    monkeypatch.setattr(io_load, "usable_bytes", lambda _: (1 << 20, 1 << 20))
    with pytest.raises(DirectoryError, match="not the room"):
        check_room(request)
    check_room(dataclasses.replace(request, placements=("all-on-host",)))


def test_every_update_mode_and_tier_is_measured(tmp_path: Path) -> None:
    request = Request(**SMALL, directory=".")
    assert request.updates == UPDATES
    assert {p.optimizer_state for p in PLACEMENTS.values()} == {"device", "host", "nvme"}
    assert {p.parameters for p in PLACEMENTS.values()} == {"device", "host", "nvme"}
    for placement in PLACEMENTS:
        for update in UPDATES:
            Config(nvme=str(tmp_path), device="cpu", **settings_of(placement, update, 1 << 20))


def test_its_sizes_are_those_of_the_model() -> None:
    for size in (SMALL, {**SMALL, "vocab": 4096}):
        request = Request(**size, directory=".")
        model = request.build()
        units = [*model.blocks, model.embed]
        assert request.parameters == sum(p.numel() for p in model.parameters())
        assert request.largest_unit == max(sum(p.numel() for p in unit.parameters()) for unit in units)


# ---- cases ----


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(
        bench_command, ["step", *TINY, "--json", *arguments], catch_exceptions=False, standalone_mode=False
    )
    return done.return_value, json.loads(done.stdout)


def check(row: dict[str, Any], nbytes: float | None) -> None:
    assert row["seconds"] > 0
    assert row["seconds_with_drain"] > 0
    assert row["bound"] > 0
    assert row["efficiency"] == pytest.approx(row["bound"] / row["seconds"])
    assert row["memory"] > 0
    if nbytes is not None:  # padding of small parameters comes on top
        assert nbytes <= row["bytes_per_parameter"] < 2 * nbytes + 1


@pytest.mark.parametrize(("moments", "nbytes"), [("fp32", 24), ("bf16", 16), ("8bit", 12)])
def test_a_case_beside_its_bound(moments: str, nbytes: int, tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    threads = torch.get_num_threads()
    code, result = run(
        *("--directory", str(place), "--placement", "state-on-nvme", "--update", "overlap"),
        *("--steps", "2", "--warmup", "1", "--threads", "1", "--moments", moments),
    )
    assert code == 0
    assert torch.get_num_threads() == threads
    group = result["placements"]["state-on-nvme"]
    assert set(group["table"]) == {"overlap"}
    assert group["errors"] == {}
    row = group["table"]["overlap"]
    check(row, nbytes)
    assert row["read_bytes"] == row["written_bytes"]
    assert row["bound_of"]["nvme_rate"] == row["rates"]["nvme_mixed_bytes_per_second"]
    samples = group["samples"]["overlap"]
    assert [len(samples[name][0]["intervals"]) for name in ("infinity", "torch")] == [2, 2]
    ours, torchs = (samples[name][-1]["losses"] for name in ("infinity", "torch"))
    assert ours == pytest.approx(torchs, rel=1e-4)  # the same model, data and optimizer
    assert os.listdir(place) == []


QUICK = ("--placement", "all-on-host", "--update", "sync", "--steps", "1", "--warmup", "0")


def test_a_split_master_has_the_cases_that_there_are(tmp_path: Path) -> None:
    place = *("--directory", str(tmp_path)), *QUICK[:2], *QUICK[4:]
    code, result = run(*place, "--dtype", "bf16", "--split-master")
    assert code == 0
    assert set(result["placements"]["all-on-host"]["table"]) == {"sync", "overlap", "backward"}
    for wrong in (("--dtype", "fp32"), ("--dtype", "bf16", "--update", "delayed")):
        with pytest.raises(ConfigError, match="split_master=True cannot be used"):
            run(*place, "--split-master", *wrong)


def test_a_case_that_fails_is_part_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.offloaded

    def offloaded(build: Any, **settings: Any) -> Any:
        made = real(build, **settings)
        if settings["update"] == "sync":
            failing = dataclasses.replace(made, settle=lambda: (_ for _ in ()).throw(StorageError("lost")))
            return failing
        return made

    monkeypatch.setattr(step, "offloaded", offloaded)
    code, result = run("--directory", str(tmp_path), *QUICK, "--update", "overlap")
    assert code == 1
    group = result["placements"]["all-on-host"]
    assert set(group["table"]) == {"overlap"}
    assert "lost" in group["errors"]["sync"]["error"]
    assert list(tmp_path.iterdir()) == []
    done = CliRunner().invoke(bench_command, ["step", *TINY, "--directory", str(tmp_path), *QUICK])
    assert "all-on-host: sync failed" in done.stdout


def test_torch_steps_in_halves(tmp_path: Path) -> None:
    request = Request(**SMALL, directory=".")
    who = in_memory(request.build, device="cpu", dtype=torch.bfloat16)
    data = torch.arange(16)[None]
    turn = who.turn(lambda model: model(data, data.roll(-1, 1)), 3)
    assert steady(turn) > 0
    assert turn["losses"][2] < turn["losses"][0]
    assert turn["read"] == turn["written"] == 0


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    for option in (
        ["--placement", "nowhere"],
        ["--update", "never"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--preset", "31m"],
        ["--output", str(tmp_path / "x.json")],
    ):
        with pytest.raises(ConfigError) as caught:
            run("--directory", str(tmp_path), *option)
        assert caught.value.cure
    with pytest.raises(ConfigError) as caught:
        run("--update", "delayd")
    assert caught.value.cure == "--update delayed"


@pytest.mark.slow
def test_all_placements_and_update_modes(tmp_path: Path) -> None:
    code, result = run("--directory", str(tmp_path), "--warmup", "0", "--steps", "3")
    assert code == 0
    assert list(result["placements"]) == list(PLACEMENTS)
    wanted = {"in-memory": 0, "state-on-host": 0, "all-on-host": 0, "state-on-nvme": 24}
    for name, group in result["placements"].items():
        assert group["errors"] == {}
        for update in UPDATES:
            check(group["table"][update], wanted.get(name))
    assert list(tmp_path.iterdir()) == []
