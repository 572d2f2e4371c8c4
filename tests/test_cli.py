"""The command line: verbs, settings from options and files, errors as a person meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from infinity.cli.main import VERBS, cli, run, show_error
from infinity.cli.settings import OPTIONS, parse_placement, read_run
from infinity.core.config import UPDATES
from infinity.core.errors import ConfigError
from infinity.version import __version__

from .command_line import python
from .quick import covering

MACHINE = str(Path(__file__).parents[1] / "docs" / "machine.yaml")


def test_help_imports_no_verb() -> None:
    code = (
        "import sys; from infinity.cli.main import run; assert run(['--help']) == 0; "
        f"assert not [m for m in sys.modules if m in {[v[0] for v in VERBS.values()]!r}]"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    for verb, (_, line) in VERBS.items():
        assert verb in done.stdout
        assert line in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        *(([verb, "--help"], 0) for verb in VERBS),
        (["plan", "--stepz", "3"], 2),
        (["plan", "--steps", "0"], 2),
        (["plan", "--ranks", "0"], 2),
    ],
)
def test_what_is_refused_waits_for_no_import(arguments: list[str], code: int) -> None:
    slow = ("torch", "numpy", "transformers")
    done = python(
        "-c",
        f"import sys; from infinity.cli.main import run; assert run({arguments!r}) == {code}; "
        f"assert not [m for m in {slow!r} if m in sys.modules]",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--json"], 0),
        (["--nvme", ".", "--optimizer-state", "nvme", "--update", "delayed"], 0),
        (["--experts", "4", "--tied", "--recompute", "--activations", "host"], 0),
        (["--fit", "--ranks", "2"], 0),
        (["--host-memory", "1MiB"], 1),  # it does not fit, and says what to change
        (["--dtype", "fp8"], 2),
        (["--device", "tpu"], 2),
        (["--optimizer-state", "nvme", "--nvme", "nowhere"], 2),
        (["--ranks", "2", "--update", "delayed"], 2),
        (["--machine", MACHINE], 0),
        (["--machine", MACHINE, "--fit", "--json", "--ranks", "8", "--ranks-per-node", "4"], 0),
        (["--machine", MACHINE, "--device", "cuda", "--activations", "host", "--dtype", "fp16"], 0),
    ],
)
def test_a_plan_of_a_preset_needs_no_torch(arguments: list[str], code: int, tmp_path: Path) -> None:
    """How long that takes is not asserted: machines differ."""
    if not {"--machine", "--device"} & {*arguments}:
        arguments = [*arguments, "--device", "cpu"]  # elsewhere torch may be asked for a GPU
    done = python(
        "-c",
        "import os, sys; from infinity.cli.main import run; "
        f"os.chdir({str(tmp_path)!r}); code = run({['plan', '--preset', '10m', *arguments]!r}); "
        "print(code, *({'torch', 'transformers'} & {*sys.modules}), file=sys.stderr)",
    )
    assert done.stderr.splitlines()[-1] == str(code), done.stdout + done.stderr


def test_python_m_infinity() -> None:
    done = python("-m", "infinity", "--version")
    assert done.returncode == 0
    assert __version__ in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = cli.get_command(click.Context(cli), verb)
    subverbs: list[list[str]] = [[]]
    if isinstance(command, click.Group):
        subverbs = [[name] for name in command.list_commands(click.Context(command))]
    for subverb in subverbs:
        assert run([verb, *subverb, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_options_follow_from_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    options = {(option.section, option.name): option for option in OPTIONS}
    assert all(option.help for option in OPTIONS)
    assert options["engine", "update"].kind.metavar == "|".join(UPDATES)
    assert options["train", "optimizer"].kind.metavar == "adamw|lion|sgd|adagrad|muon"
    assert options["engine", "block_bytes"].kind.metavar == "SIZE"
    assert options["engine", "gradients"].kind.metavar == "PLACE"
    assert options["train", "recompute"].flags == "--recompute/--no-recompute"
    several = [name for (_, name), option in options.items() if option.kind.many]
    assert several == ["nvme", "optimizer_state_fp32", "units"]
    run(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "moments stay fp32 where optimizer_state_dtype is" in said


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--update", "overlp", 'update="overlap"'),
        ("--aio-backend", "threds", 'aio_backend="threads"'),
        ("--activations", "nvme", 'activations="device"'),
        ("--optimizer", "adamv", "did you mean 'adamw'?"),
    ],
)
def test_a_choice_that_is_none(
    option: str, value: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--json", *SMALL, option, value]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["found"], error["cure"]) == (repr(value), cure)


def test_unknown_things_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--optimizer-stat", "nvme"]) == 2
    assert "--optimizer-state" in capsys.readouterr().err
    assert run(["plann"]) == 2
    assert "plan" in capsys.readouterr().err


def test_an_error_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--preset", "7t", "--device", "cpu", "--json"]) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert "unknown preset" in shown.err
    error = json.loads(shown.out)["error"]
    assert error["type"] == "ConfigError"
    assert error["cure"]


def test_an_error_on_a_terminal_is_a_panel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show_error(ConfigError("this [is] wrong", expected="[b]right[/b]", found=1, cure="change it"))
    shown = capsys.readouterr().err
    assert "╭" in shown
    assert "this [is] wrong" in shown
    assert "[b]right[/b]" in shown


SMALL = ["--device", "cpu", "--layers", "2", "--width", "64", "--heads", "2", "--host-memory", "1GiB"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["plan", "--json", *SMALL, "--device-memory", "1GiB", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_plan_says_what_a_run_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = (
        "--nvme",
        str(tmp_path),
        "--parameters",
        "nvme",
        "--optimizer-state",
        "host:0.5,nvme:0.5",
        "--gradients",
        "host",
    )
    code, result = plan(capsys, *places, "--steps", "1000")
    assert code == 0
    assert result["fits"]
    assert result["nvme"]["parameters"] > 0
    assert result["host"]["optimizer state"] > 0
    assert result["wear"]["run_bytes"] == 1000 * result["per_step"]["nvme_written"]
    code, of_two = plan(capsys, *places, "--steps", "1000", "--ranks", "2")  # both write to the one drive
    assert code == 0
    assert of_two["wear"]["run_bytes"] == 2 * 1000 * of_two["per_step"]["nvme_written"]
    assert of_two["wear"]["rated_bytes"] == result["wear"]["rated_bytes"] == 600e12


def test_plan_of_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = plan(capsys, "--host-memory", "100KB")
    assert code == 1
    assert not result["fits"]
    assert result["problems"][0]["tier"] == "host"
    assert "--host-memory" in result["problems"][0]["cure"]
    assert run(["plan", *SMALL, "--host-memory", "100KB"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_plan_for_a_machine_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    everything = [f"--{k}=nvme" for k in ("parameters", "optimizer-state", "gradients")]
    machine = ["--machine", str(EXAMPLE), "--nvme", "/mnt/nvme0", "--batch", "1", "--recompute"]
    code = run(["plan", "--json", "--preset", "13b", *everything, *machine])
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["parameters"] == pytest.approx(13e9, rel=0.01)
    # copy 2, state 12, room for a gradient 4
    assert sum(result["nvme"].values()) == pytest.approx(18 * result["parameters"], rel=1e-3)


def test_plan_counts_moments_that_stay_fp32(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nvme = ["--nvme", str(tmp_path), "--optimizer-state", "nvme", "--optimizer-state-dtype", "8bit"]
    cases = [[], ["--optimizer-state-fp32", "*embed*", "--optimizer-state-fp32", "*norm*"]]
    plans = [plan(capsys, "--width", "512", *nvme, *more)[1] for more in cases]
    wanted = 6 * (256 + 5) * 512 - 2 * 4 * (256 + 5) * 2  # without codes and scales
    assert plans[1]["checkpoint"] - plans[0]["checkpoint"] == wanted
    for section, name in (("nvme", "optimizer state"), ("per_step", "nvme_written")):
        more = plans[1][section][name] - plans[0][section][name]
        assert more == pytest.approx(wanted, rel=0.1), name  # chunks are padded
    assert run(["plan", *SMALL, *nvme, "--optimizer-state-fp32", "*embde*"]) == 2
    assert "optimizer_state_fp32 matches no trainable parameter" in capsys.readouterr().err


def test_a_device_that_is_not_here_must_be_described(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        return
    assert run(["plan", "--json", *SMALL, "--device", "cuda"]) == 2
    assert "--machine FILE" in json.loads(capsys.readouterr().out)["error"]["cure"]


EXAMPLE = Path(__file__).parents[1] / "docs" / "machine.yaml"


@pytest.mark.parametrize(("option", "value"), [("--queue-depth", "1000000"), ("--block-bytes", "1TiB")])
def test_what_no_ring_takes_is_refused_at_the_start(
    option: str, value: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    on_nvme = [*SMALL, "--optimizer-state", "nvme", "--nvme", str(tmp_path)]
    assert run(["plan", "--json", *on_nvme, option, value]) == 2
    name = option.removeprefix("--").replace("-", "_")
    assert json.loads(capsys.readouterr().out)["error"]["what"] == f"{name} cannot be used"


@covering
@pytest.mark.parametrize("form", [["--json"], []])
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        (">/dev/full", 2, "Error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
    ids=["full", "closed"],
)
def test_an_output_that_takes_no_more(to: str, code: int, said: str, form: list[str]) -> None:
    """Exit code 1 says that a run does not fit; this is 2. Nobody to write to at all is no error."""
    command = [sys.executable, "-m", "infinity", "plan", *form, *SMALL, "--device-memory", "1GiB"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {to}', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_an_interrupt_while_it_begins(tmp_path: Path) -> None:
    """What is imported makes other errors of an exception."""
    for delay in (0.15, 0.3, 0.6, 1.2):
        child = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGINT)
        error = child.communicate(timeout=120)[1]
        assert (child.returncode, error) == (130, "interrupted\n"), delay


_BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from infinity.__main__ import main
from infinity.cli.ending import begin
begin()
print(flush=True)
sys.argv = ["infinity", "verify", "--json", "--nvme", sys.argv[1]]
main()
"""


def test_a_directory_and_dimensions_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="dimensions of its own"):
        read_run({"init_from": "/model", "layers": 3})


def test_placements() -> None:
    assert parse_placement("nvme") == "nvme"
    assert parse_placement("host:0.3, nvme:0.7") == {"host": 0.3, "nvme": 0.7}
    with pytest.raises(ConfigError):
        parse_placement("host:most")
