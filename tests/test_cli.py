"""The command line: verbs, settings from options and files, errors as a person meets them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from infinity.cli.main import VERBS, cli, run, show_error
from infinity.core.errors import ConfigError
from infinity.version import __version__

from .command_line import python, words

MACHINE = str(Path(__file__).parents[1] / "docs" / "machine.yaml")
SMALL = ["--device", "cpu", "--layers", "2", "--width", "64", "--heads", "2", "--host-memory", "1GiB"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["plan", "--json", *SMALL, "--device-memory", "1GiB", *arguments])
    return code, json.loads(capsys.readouterr().out)


#: What runs without torch, and how it ends.
WITHOUT_TORCH: list[tuple[list[str], int]] = [
    *(([verb, "--help"], 0) for verb in VERBS),
    (["plan", "--stepz", "3"], 2),
    *((["plan", option, "0"], 2) for option in ("--steps", "--ranks")),
    *(
        (["plan", "--preset", "10m", *("--device", "cpu"), *more], code)
        for more, code in (
            (["--json"], 0),
            (["--nvme", ".", "--optimizer-state", "nvme", "--update", "delayed"], 0),
            (["--experts", "4", "--tied", "--recompute", "--activations", "host"], 0),
            (["--fit", "--ranks", "2"], 0),
            (["--host-memory", "1MiB"], 1),  # it does not fit, and says what to change
            (["--dtype", "fp8"], 2),
            (["--optimizer-state", "nvme", "--nvme", "nowhere"], 2),
            (["--ranks", "2", "--update", "delayed"], 2),
        )
    ),
    (["plan", "--preset", "10m", "--device", "tpu"], 2),
    (["plan", "--preset", "10m", "--machine", MACHINE, "--fit", "--json", "--ranks", "8"], 0),
    (["plan", "--preset", "10m", "--machine", MACHINE, "--device", "cuda", "--dtype", "fp16"], 0),
]


@pytest.mark.processes
def test_help_refusals_and_plans_of_presets_wait_for_no_import(tmp_path: Path) -> None:
    """How long that takes is not asserted: machines differ."""
    code = (
        "import json, os, sys\n"
        "from infinity.cli.main import run\n"
        "os.chdir(sys.argv[1])\n"
        "assert run(['--help']) == run(['--version']) == 0\n"
        f"assert not {{*sys.modules}} & { ({module for module, _ in VERBS.values()})!r}\n"
        "for arguments, code in json.loads(sys.argv[2]):\n"
        "    assert run(arguments) == code, arguments\n"
        "    assert not {*sys.modules} & {'torch', 'numpy', 'transformers'}, arguments\n"
    )
    done = python("-c", code, str(tmp_path), json.dumps(WITHOUT_TORCH), cold=True)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout
    for verb, (_, line) in VERBS.items():
        assert verb in done.stdout
        assert line in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = cli.get_command(click.Context(cli), verb)
    subverbs: list[list[str]] = [[]]
    if isinstance(command, click.Group):
        subverbs = [[name] for name in command.list_commands(click.Context(command))]
    for subverb in subverbs:
        assert run([verb, *subverb, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_a_wrong_word_is_an_error_with_a_cure_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, found, cure in (
        ("--update", "overlp", "'overlp'", 'update="overlap"'),
        ("--activations", "nvme", "'nvme'", 'activations="device"'),
        ("--optimizer", "adamv", "'adamv'", "did you mean 'adamw'?"),
        ("--preset", "7t", "7t", None),
    ):
        small = SMALL[:2] if option == "--preset" else SMALL
        assert run(["plan", "--json", *small, option, value]) == 2
        shown = capsys.readouterr()
        error = json.loads(shown.out)["error"]
        assert "Traceback" not in shown.err
        assert error["type"] == "ConfigError"
        assert found.strip("'") in str(error["found"])
        assert error["cure"] == (cure or error["cure"])
    assert run(["plan", "--optimizer-stat", "nvme"]) == 2
    assert "--optimizer-state" in capsys.readouterr().err
    assert run(["plann"]) == 2
    assert "plan" in capsys.readouterr().err


def test_an_error_on_a_terminal_is_a_panel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_error(ConfigError("this [is] wrong", expected="[b]right[/b]", found=1, cure="change it"))
    shown = capsys.readouterr().err
    assert "╭" in shown
    assert "this [is] wrong" in shown
    assert "[b]right[/b]" in shown


def test_plan_says_what_a_run_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = ["--nvme", str(tmp_path), "--parameters", "nvme", "--gradients", "host"]
    places += ["--optimizer-state", "host:0.5,nvme:0.5", "--steps", "1000"]
    code, result = plan(capsys, *places)
    assert code == 0
    assert result["fits"]
    assert result["nvme"]["parameters"] > 0
    assert result["host"]["optimizer state"] > 0
    assert result["wear"]["run_bytes"] == 1000 * result["per_step"]["nvme_written"]
    code, of_two = plan(capsys, *places, "--ranks", "2")  # both write to the one drive
    assert code == 0
    assert of_two["wear"]["run_bytes"] == 2 * 1000 * of_two["per_step"]["nvme_written"]
    assert of_two["wear"]["rated_bytes"] == result["wear"]["rated_bytes"] == 600e12


@pytest.mark.integration
def test_plan_for_a_machine_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    everything = [f"--{k}=nvme" for k in ("parameters", "optimizer-state", "gradients")]
    machine = ["--machine", MACHINE, "--nvme", "/mnt/nvme0", "--batch", "1", "--recompute"]
    code = run(["plan", "--json", "--preset", "13b", *everything, *machine])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["parameters"] == pytest.approx(13e9, rel=0.01)
    # copy 2, state 12, room for a gradient 4
    assert sum(result["nvme"].values()) == pytest.approx(18 * result["parameters"], rel=1e-3)
    run(["plan", "--preset", "llama-3.1-70b", "--machine", MACHINE])
    said = capsys.readouterr().out
    assert "8 sequences of 256 tokens at once (--batch, --sequence); the model takes up to" in said
    assert not re.search(r"\d{5,}MiB free", said), "large sizes are said in GiB"
    if not torch.cuda.is_available():
        assert run(["plan", "--json", *SMALL, "--device", "cuda"]) == 2
        assert "--machine FILE" in json.loads(capsys.readouterr().out)["error"]["cure"]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        (["--ranks", "0"], "--ranks 1"),
        (["--ranks", "3", "--ranks-per-node", "2"], "--ranks-per-node 1, or --ranks 4"),
    ],
)
def test_ranks_that_no_node_takes_are_refused_with_a_cure_that_works(
    given: list[str], cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = plan(capsys, *given)
    assert (code, result["error"]["cure"]) == (2, cure)
    assert plan(capsys, *given, *cure.split(",")[0].split())[0] == 0


@pytest.mark.parametrize(
    ("to", "form", "code", "said"),
    [
        (">/dev/full", "--json", 2, "Error: the output cannot be written: No space left on device\n"),
        (">/dev/full", "--tied", 2, "Error: the output cannot be written: No space left on device\n"),
        (">&-", "--json", 0, ""),
    ],
    ids=["full", "full, for a person", "closed"],
)
def test_an_output_that_takes_no_more(to: str, form: str, code: int, said: str) -> None:
    """Exit code 1 says that a run does not fit; this is 2. Nobody to write to at all is no error."""
    command = [sys.executable, "-m", "infinity", "plan", form, *SMALL, "--device-memory", "1GiB"]
    shell = ["sh", "-c", f'exec "$@" {to}', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.integration
def test_no_terminal_is_too_plain(tmp_path: Path) -> None:
    """A locale without UTF-8, and a directory whose name needs it."""
    drive = tmp_path / "größe-大"
    drive.mkdir()
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = python("-m", "infinity", "plan", *words(str(drive)), env=env, text=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"2 blocks \\xd7 64 wide" in done.stdout
