"""Plans for machines that are not here, and the fastest placement on one."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from infinity.cli.machine import load_machine
from infinity.cli.main import run
from infinity.core.errors import ConfigError
from infinity.planning.cures import as_options

MODEL = ["--layers", "4", "--width", "256", "--heads", "4", "--batch", "2", "--sequence", "48"]
CHUNKS = ["--chunk-elements", "65536"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["plan", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def options_of(found: dict[str, Any]) -> list[str]:
    """Return the settings that `--fit` has found, as options."""
    return [*shlex.split(as_options(found["settings"])), *["--recompute"] * found["recompute"]]


def machine(folder: Path, **sections: Any) -> str:
    path = folder / "machine.json"
    content = {
        "device": {"memory": "32MiB", "link": 20, "tflops": 100},
        "host": {"memory": "40MiB", "bandwidth": 50},
        "drives": [
            {"directory": "/drives/a", "capacity": "1GB", "read": 6, "write": 4, "endurance": 100},
            {"directory": "/drives/b", "capacity": "1GB", "read": 3, "write": 2, "endurance": 400},
        ],
        **sections,
    }
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("host: {memory: 1GiB}\nhots: 3", "hots"),
        ("device: {memory: 1GiB}", "host"),
        ("host: {memory: much}", "much"),
        ("host: {memory: 1GiB, bandwidth: .nan}", "bandwidth"),
        ("host: {memory: 1GiB, bandwidth: 1.0e-300}", "bandwidth"),
        ("{host: {memory: 1GiB}, drives: {directory: /a}}", "list"),
        ("{host: {memory: 1GiB}, drives: [{directory: a, capacity: 1}]}", "absolute"),
        ("{host: {memory: 1GiB}, drives: [{directory: /a}]}", "capacity"),
        ("", "name: value"),
        ("a: b: c", "YAML"),
        ("[" * 5000, "YAML"),
    ],
)
def test_a_file_that_describes_no_machine(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        load_machine(str(path))
    assert caught.value.cure


def test_nothing_of_this_machine_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("this machine was looked at")

    for place in (
        *("infinity.api.this_machine.available_host_memory", "infinity.hardware.probe.available_host_memory"),
        *("infinity.api.this_machine.bandwidths", "infinity.hardware.tuned.bandwidths"),
        *("infinity.api.this_machine.nameless_file", "infinity.cli.machine.has_cuda"),
        "infinity.hardware.device.open_device",
    ):
        monkeypatch.setattr(place, never)
    monkeypatch.setattr(os, "statvfs", never)
    monkeypatch.setattr(torch.cuda, "is_available", never)
    described = ["--machine", machine(tmp_path), *MODEL, *CHUNKS]
    assert plan(capsys, *described, "--fit")[0] == 0
    assert plan(capsys, *described, "--optimizer-state", "nvme", "--nvme", "/drives/b/run1")[0] == 0
    code, result = plan(capsys, *described, "--optimizer-state", "nvme")
    assert code == 1
    assert "--nvme /drives/a" in result["problems"][0]["cure"]


@pytest.mark.parametrize(
    ("arguments", "cure"), [(("--nvme", "/mnt"), "--nvme /drives/a"), (("--device", "cuda"), "--device cpu")]
)
def test_what_the_description_does_not_have(
    arguments: tuple[str, ...], cure: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = machine(tmp_path, device=None, host={"memory": "1GiB"})
    code, result = plan(capsys, "--machine", path, *MODEL, *arguments)
    assert (code, result["error"]["cure"]) == (2, cure)
    words = shlex.split(cure)
    kept = arguments if words[0] not in arguments else ()
    assert plan(capsys, "--machine", path, *MODEL, *kept, *words)[0] == 0


def test_the_slower_drive_and_the_one_that_wears_out_first_decide(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    both = ["--nvme", "/drives/a", "--nvme", "/drives/b", "--optimizer-state", "nvme", *CHUNKS]
    code, result = plan(capsys, "--machine", machine(tmp_path), *MODEL, *both)
    assert code == 0
    moved = result["per_step"]
    assert result["bounds_seconds"]["nvme read"] == pytest.approx(moved["nvme_read"] / 2 / 3e9)
    assert result["bounds_seconds"]["nvme write"] == pytest.approx(moved["nvme_written"] / 2 / 2e9)
    assert result["wear"]["rated_bytes"] == 2 * 100e12


def bound(result: dict[str, Any]) -> float:
    return max(result["bounds_seconds"].values())


@pytest.mark.parametrize(("device", "host"), [("16MiB", "40MiB"), ("70MiB", "10MiB")])
def test_no_placement_that_fits_is_faster(
    host: str, device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = {"memory": device, "link": 20, "tflops": 100}
    path = machine(tmp_path, device=given, host={"memory": host, "bandwidth": 50})
    case = ["--machine", path, *MODEL, *CHUNKS]
    code, best = plan(capsys, *case, "--fit")
    assert code == 0
    words = options_of(best)
    # The settings are those of the run that was planned.
    code, again = plan(capsys, "--machine", path, *MODEL, *words)
    assert code == 0
    assert again == {k: v for k, v in best.items() if k not in ("settings", "recompute")}
    kinds = ("--parameters", "--optimizer-state", "--gradients")
    fitted = 0
    recompute = ["--recompute"] if "--recompute" in words else []
    drives = ["--nvme", "/drives/a", "--nvme", "/drives/b"]
    for places in itertools.product(("device", "host", "nvme"), repeat=3):
        placed = [w for pair in zip(kinds, places, strict=True) for w in pair]
        code, other = plan(capsys, *case, *placed, *drives, *recompute)
        if code == 0:
            fitted += 1
            assert bound(best) <= bound(other) * (1 + 1e-9), places
    assert fitted


def test_chunks_are_smaller_where_nothing_fits_without_and_what_is_missing_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = machine(tmp_path, host={"memory": "16MiB", "bandwidth": 50})
    case = ["--machine", path, *MODEL, "--chunk-elements", "1048576"]
    assert plan(capsys, *case)[0] == 1
    code, best = plan(capsys, *case, "--fit")
    assert code == 0
    words = options_of(best)
    assert words[words.index("--chunk-elements") + 1] == "262144"
    assert "--recompute" not in words
    path = machine(tmp_path, host={"memory": "1MiB"})
    code, result = plan(capsys, "--machine", path, *MODEL, *CHUNKS, "--fit")
    assert code == 1
    assert "settings" not in result
    assert "no setting is enough" in result["problems"][0]["cure"]
