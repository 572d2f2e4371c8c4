"""What `train` and `plan` take. What they do is imported when arguments are right: torch takes seconds."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Mapping
from typing import Any, Final

import click

from infinity.core.errors import ConfigError

from .ending import close_on_signals
from .options import FIGURE, is_figure, json_option
from .settings import RunCommand, read_values, run_of, run_options

#: TB that a drive is rated for where nobody says.
ENDURANCE: Final = 600.0
_MOST_RANKS: Final = 1 << 16
_BANDWIDTHS: Final = ("nvme_read", "nvme_write", "link", "dram", "tflops", "network")


def refuse(config_file: str | None, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where settings are wrong by themselves. Of several ranks one has to tell that, so
    these look when they have met; and those of a run that goes on are beside its checkpoint."""
    if any(name in os.environ for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")):
        return
    values = read_values(config_file, given)
    if not values["train"].get("resume"):
        run_of(values)


def _imported(name: str) -> Any:
    """Import a module; from then on signals close what it has open, and until then they end all at once."""
    module = importlib.import_module(name)
    close_on_signals()
    return module


@click.command("train", cls=RunCommand)
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; the rest on stderr.")
def train_command(config_file: str | None, as_json: bool, **given: Any) -> int:
    """Train the built-in GPT, or a Hugging Face model, on text.

    Without arguments: 30 million parameters on the sources of Python's standard library. On several ranks:
    `torchrun --nproc-per-node N -m infinity train ...` or `srun infinity train ...`; --batch is each rank's
    then, and losses and figures of steps are those of all. What was trained is
    saved as a checkpoint; --resume goes on from one. SIGTERM and SIGHUP (a connection that is lost) save
    after the step under way; a second SIGTERM, like Ctrl-C, ends at once. Exit code 1 when it was trained but
    the log, the trace, what it prints or a checkpoint, on the way or at the end, is not complete (then it
    says how many steps are lost, and which checkpoint is whole), 75 when SIGTERM or SIGHUP has ended it and
    all is saved.
    """
    refuse(config_file, given)
    return int(_imported("infinity.cli.train").train_command(config_file, as_json, given))


def _figure(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not is_figure(value):
        option = parameter.opts[0]
        raise ConfigError(
            f"{option} cannot be used",
            expected=FIGURE,
            found=repr(value),
            cure=f"leave {option} out, or give what the hardware does",
        )
    return value


_figure_option = functools.partial(click.option, type=float, callback=_figure)


@click.command("plan", cls=RunCommand)
@run_options
@click.option(
    "--machine",
    "machine_file",
    metavar="FILE",
    help="Plan for the machine that this YAML file describes (see docs/machine.yaml), not for this one.",
)
@click.option("--ranks", type=int, default=1, help="How many ranks train the model together. [1]")
@click.option("--ranks-per-node", type=int, help="How many of them share a machine. [all]")
@click.option(
    "--fit", is_flag=True, help="Find the fastest placement that fits, and print the command for it."
)
@_figure_option("--endurance-tbw", help=f"TB a drive is rated for. [as described, or {ENDURANCE:.0f}]")
@_figure_option("--nvme-read", help="GB/s of all drives together, for bounds on a step's time.")
@_figure_option("--nvme-write", help="GB/s of all drives together.")
@_figure_option("--link", help="GB/s between host and device.")
@_figure_option("--dram", help="GB/s of host memory.")
@_figure_option("--tflops", help="TFLOP/s that the device reaches.")
@_figure_option("--network", help="GB/s that a rank can send to others.")
@json_option
def plan_command(
    config_file: str | None,
    machine_file: str | None,
    ranks: int,
    ranks_per_node: int | None,
    fit: bool,
    endurance_tbw: float | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Say what a run would take on each tier, building nothing.

    Takes the arguments of `infinity train`. With --ranks, bytes are those of each rank: none is started.
    Exit code 1 when the run does not fit.
    """
    here = ranks if ranks_per_node is None else ranks_per_node
    for name, value, most in (("--ranks", ranks, _MOST_RANKS), ("--ranks-per-node", here, ranks)):
        if not 1 <= value <= most:
            nearest = max(1, min(value, most))
            raise ConfigError(
                f"{name} cannot be used", expected=f"from 1 to {most}", found=value, cure=f"{name} {nearest}"
            )
    if ranks % here:
        fewer = max(n for n in range(1, here) if ranks % n == 0)
        raise ConfigError(
            "--ranks-per-node cannot be used",
            expected=f"as many ranks on each machine: a number that divides {ranks}",
            found=here,
            cure=f"--ranks-per-node {fewer}, or --ranks {ranks + -ranks % here}",
        )
    figures = {name: given.pop(name) for name in _BANDWIDTHS}
    refuse(config_file, given)
    return int(
        _imported("infinity.cli.plan").plan_command(
            config_file,
            given,
            figures,
            machine_file=machine_file,
            ranks=ranks,
            here=here,
            fit=fit,
            endurance=endurance_tbw,
            as_json=as_json,
        )
    )
