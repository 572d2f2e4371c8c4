"""What commands print: lines that fit, units that a person reads, and what a plan takes for granted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.console import lines_of
from infinity.cli.doctor import Finding, show
from infinity.cli.main import run
from infinity.cli.progress import Reporter
from infinity.core.sizes import GiB, MiB
from infinity.planning.footprint import room

from .command_line import words

pytestmark = pytest.mark.usefixtures("own_environment")
MACHINE = str(Path(__file__).parents[1] / "docs" / "machine.yaml")


def step(number: int, read: int, host: int) -> dict[str, Any]:
    memory = {"device": 12 * GiB + 1, "host": host, "nvme": 900 * GiB}
    moved = {"nvme_read": read, "nvme_written": 700 * GiB}
    return {
        "step": number,
        "loss": 5.58,
        "grad_norm": 5.83,
        "tokens_per_second": 1965.0,
        "memory": memory,
        **moved,
    }


def test_steps_fit_a_terminal_and_repeat_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(100_000) as report:
        report.step(step(1, 900 * GiB, 50 * GiB))
        report.step(step(2, 910 * GiB, 50 * GiB))
        report.step(step(3, 910 * GiB, 51 * GiB))
        report.step(step(4, 300 * GiB, 51 * GiB))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    firsts = ["step 1/", "  memory", "  read", "step 2/", "step 3/", "  memory", "step 4/", "  read"]
    assert [line[: len(first)] for line, first in zip(lines, firsts, strict=True)] == firsts


def test_a_terminal_that_moves_no_cursor_gets_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what is captured for a terminal
    monkeypatch.setenv("TERM", "dumb")
    with Reporter(2) as report:
        report.step(step(1, GiB, GiB))
        assert "step 1/2" in capsys.readouterr().out
        report.step(step(2, GiB, GiB))
    assert "step 2/2" in capsys.readouterr().out


def test_findings_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Adam takes 2 beside torch on the CPU, 1 with a GPU and one NVMe directory " * 3
    show([Finding("threads", "warning", text, "do this")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("warning threads: Adam takes 2")
    assert " ".join(" ".join(lines[:-2]).split()).endswith(text.strip())
    path = "/a" * 60
    assert path in lines_of(f"something is in {path} now").splitlines(), "a path stays whole"


def test_room_is_said_in_gibibytes() -> None:
    assert (room(3 * MiB + 1), room(369088 * MiB)) == ("4MiB", "361GiB")


def test_a_plan_says_which_sequences_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    run(["plan", "--preset", "llama-3.1-70b", "--machine", MACHINE])
    said = capsys.readouterr().out
    assert "8 sequences of 256 tokens at once (--batch, --sequence); the model takes up to" in said
    assert not re.search(r"\d{5,}MiB free", said)


def test_a_plan_names_the_directory_that_checkpoints_go_to(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of `train`, which makes one of its own in runs/."""
    assert run(["plan", *words(text, nvme)]) == 0
    assert f"Checkpoints go to a new directory in {nvme}/runs\n" in capsys.readouterr().out
    assert run(["plan", *words(text, nvme, "--output", str(tmp_path / "out"))]) == 0
    assert f"Checkpoints go to {tmp_path}/out\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (("--ranks", "0"), "--ranks 1"),
        (("--ranks", "3", "--ranks-per-node", "2"), "--ranks-per-node 1, or --ranks 4"),
    ],
)
def test_cures_of_ranks_work(
    given: tuple[str, ...], cure: str, text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *words(text, nvme), "--json", *given]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["cure"] == cure
    assert run(["plan", *words(text, nvme), *given, *cure.split(",")[0].split()]) == 0
