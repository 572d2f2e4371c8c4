"""What commands print: lines that fit, units that a person reads, and what a plan takes for granted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from infinity.cli.console import lines_of
from infinity.cli.doctor import Finding, show
from infinity.cli.main import run
from infinity.core.sizes import MiB
from infinity.planning.footprint import room

from .command_line import words

pytestmark = pytest.mark.usefixtures("own_environment")
MACHINE = str(Path(__file__).parents[1] / "docs" / "machine.yaml")


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


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (("--ranks", "0"), "--ranks 1"),
        (("--ranks", "3", "--ranks-per-node", "2"), "--ranks-per-node 1, or --ranks 4"),
    ],
)
def test_cures_of_ranks_work(
    given: tuple[str, ...], cure: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *words(nvme), "--json", *given]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["cure"] == cure
    assert run(["plan", *words(nvme), *given, *cure.split(",")[0].split()]) == 0
