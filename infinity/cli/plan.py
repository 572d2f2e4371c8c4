"""`infinity plan`: what a run would take, in closed form, building nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from infinity.core.errors import ConfigError
from infinity.core.sizes import Tier, format_size
from infinity.hardware.launch import RankPlace
from infinity.planning.cures import as_settings
from infinity.planning.machine import Machine
from infinity.planning.planner import Bandwidths, Plan, Wear, checkpoint_nbytes, step_bounds, wear

from .case import Case, changed
from .console import finish, table_of
from .machine import load_machine
from .options import json_option
from .plot import draw_plan, plot_option
from .settings import PRESET_DTYPE, RunCommand, read_run, run_options

if TYPE_CHECKING:
    from infinity.integrations.deepspeed.settings import Translation

#: TB that a drive is rated for where nobody says.
ENDURANCE: Final = 600.0
_MOST_RANKS: Final = 1 << 16


def shares_of(machine: Machine) -> list[float]:
    """Return the share of the traffic that each drive has: chunks are spread by their bytes."""
    weights = [d.weight for d in machine.drives]
    return [w / sum(weights) for w in weights]


def bandwidths_of(machine: Machine) -> Bandwidths:
    """Return what the hardware does for each rank, as the machine is described. Of all drives together: the
    one whose share takes longest decides."""
    found = {name: getattr(machine, name) for name in ("link", "dram", "tflops", "network")}
    for name, rates in (
        ("nvme_read", [d.read for d in machine.drives]),
        ("nvme_write", [d.write for d in machine.drives]),
    ):
        known = [r for r in rates if r is not None]
        if known and len(known) == len(rates):
            found[name] = min(r / s for r, s in zip(known, shares_of(machine), strict=True))
    ranks = max((d.ranks for d in machine.drives), default=1)
    shared = {"nvme_read": ranks, "nvme_write": ranks, "dram": machine.local_ranks}
    return Bandwidths(**{k: None if v is None else v / shared.get(k, 1) for k, v in found.items()})


def wear_of(plan: Plan, machine: Machine, steps: int) -> Wear:
    """Return what a run means for its drives; the one that wears out first decides."""
    rated = [ENDURANCE if d.endurance is None else d.endurance for d in machine.drives]
    ranks = max((d.ranks for d in machine.drives), default=1)
    written = [s * d.ranks / ranks for s, d in zip(shares_of(machine), machine.drives, strict=True)]
    most = min((r / w for r, w in zip(rated, written, strict=True)), default=ENDURANCE)
    return wear(plan.traffic, steps=steps, tbw=most, drives=1, ranks=ranks)


def plan_as_dict(case: Case, plan: Plan, worn: Wear, bandwidths: Bandwidths) -> dict[str, Any]:
    """Return everything that `infinity plan` says, as values that JSON has. Sizes are in bytes."""
    run, config = case.run, case.config
    train = run.train
    tokens = train.tokens_per_step
    activations = case.activations(run, config, plan.footprint.activation_nbytes)
    bounds = step_bounds(plan, bandwidths, tokens=tokens, recompute=train.recompute)
    taken = plan.footprint
    return {
        "ranks": case.at.world,
        "ranks_per_node": case.at.local_world,
        "zero_stage": config.zero_stage if case.at.world > 1 else None,
        "parameters": plan.parameters,
        "trainable": plan.trainable,
        "dtype": case.workload.dtype(config),
        "units": plan.units,
        "chunks": plan.chunks,
        "matrices": {"largest": plan.matrix, "flops": plan.matrix_flops} if plan.matrix else None,
        "largest_unit": {"name": plan.largest_unit[0], "bytes": plan.largest_unit[1]},
        "device": dict(taken.device),
        "host": dict(taken.host),
        "nvme": dict(taken.nvme),
        "activations": activations._asdict(),
        "checkpoint": checkpoint_nbytes(case.planner.model, config),
        "standing": [{**dataclasses.asdict(s), "needed": s.needed} for s in plan.standing],
        "per_step": {"tokens": tokens * case.at.world, **dataclasses.asdict(plan.traffic)},
        "wear": {**dataclasses.asdict(worn), "share": worn.share, "steps": train.steps},
        "bounds_seconds": bounds,
        "fits": plan.fits,
        "problems": [dataclasses.asdict(p) for p in plan.problems],
    }


def _beneath(found: Translation, ranks: int) -> dict[str, dict[str, Any]]:
    """Return what a settings file of DeepSpeed says of a run, by section. As DeepSpeed does, it gets a number
    of the batches that is missing from the others."""
    batch, accumulation = found.batch, found.accumulation
    if found.total is not None and batch is None:
        batch = max(1, found.total // ranks // (accumulation or 1))
    elif found.total is not None and batch is not None and accumulation is None:
        accumulation = max(1, found.total // batch // ranks)
    if found.total is not None and batch is not None and found.total != batch * (accumulation or 1) * ranks:
        raise ConfigError(
            "the batch sizes of the settings of DeepSpeed contradict each other",
            expected="train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × "
            f"{ranks} ranks",
            found=f"train_batch_size = {found.total}; {batch} × {accumulation or 1} × {ranks} = "
            f"{batch * (accumulation or 1) * ranks}",
            cure="correct one of them, or plan for another number of ranks",
        )
    train: dict[str, Any] = {"batch": batch, "accumulation": accumulation, "optimizer": found.optimizer}
    return {"engine": found.settings, "train": {k: v for k, v in train.items() if v is not None}}


@click.command("plan", cls=RunCommand)
@run_options
@click.option(
    "--machine",
    "machine_file",
    metavar="FILE",
    help="Plan for the machine that this YAML file describes (see docs/machine.yaml), not for this one.",
)
@click.option(
    "--deepspeed",
    "deepspeed_file",
    metavar="FILE",
    help="A settings file of DeepSpeed; options win over it, and replace its auto.",
)
@click.option("--ranks", type=int, default=1, help="How many ranks train the model together. [1]")
@click.option("--ranks-per-node", type=int, help="How many of them share a machine. [all]")
@click.option("--fit", is_flag=True, help="Find the fastest placement that fits, and print its Config.")
@plot_option
@json_option
def plan_command(
    machine_file: str | None,
    deepspeed_file: str | None,
    ranks: int,
    ranks_per_node: int | None,
    fit: bool,
    plot: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Say what a run would take on each tier, building nothing.

    With --ranks, bytes are those of each rank: none is started. Exit code 1 when the run does not fit.
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
    at = RankPlace(world=ranks, local_world=here)
    machine = None if machine_file is None else load_machine(machine_file)
    theirs = None
    if deepspeed_file is not None:
        from infinity.integrations.deepspeed.settings import translate

        dtype = given.get("dtype") or PRESET_DTYPE
        theirs = translate(deepspeed_file, SimpleNamespace(fp16=dtype == "fp16", bf16=dtype == "bf16"))
    run = read_run(given, theirs and _beneath(theirs, ranks))
    case = Case(run, machine, at=at)
    found = case.fastest(bandwidths_of) if fit else None
    if found is not None:
        case = Case(changed(case.run, found), machine, at=at)
    plan = case.plan()
    worn = wear_of(plan, case.machine, case.run.train.steps)
    result = plan_as_dict(case, plan, worn, bandwidths_of(case.machine))
    if theirs is not None:
        result["notes"] = theirs.notes
    if found is not None:
        dtype = {} if run.model.init_from is not None else {"dtype": PRESET_DTYPE}
        result["settings"] = {**dtype, **case.run.engine}
        result["recompute"] = case.run.train.recompute
    if plot is not None:
        draw_plan(plot, result, case.machine)
    return finish(result, functools.partial(show, case), as_json=as_json, failed=not plan.fits)


def show(case: Case, result: Mapping[str, Any]) -> None:
    """Print a plan for a person."""
    console = Console(highlight=False)
    console.print(
        f"{case.workload.name}: {result['parameters']:,} parameters in {result['units']} units and "
        f"{result['chunks']} chunks, {result['dtype']}"
    )
    train = case.run.train
    console.print(
        f"{train.batch} sequences of {train.sequence} tokens at once (--batch, --sequence); "
        f"the model takes up to {case.workload.context}"
    )
    ranks, local = result["ranks"], result["ranks_per_node"]
    title = "Memory and disk"
    if ranks > 1:
        title += f", of each of {ranks} ranks (ZeRO stage {result['zero_stage']})"
    table = table_of("tier", "what for", "bytes", "", title=title, left=2)

    def row(tier: str, what: str, nbytes: int, **style: Any) -> None:
        table.add_row(tier, what, f"{nbytes:,}", format_size(nbytes), **style)

    for tier in Tier:
        purposes = result[tier.value]
        for purpose, nbytes in purposes.items():
            row(tier.value, purpose, nbytes)
        row(tier.value, "total", sum(purposes.values()), style="bold", end_section=True)
    where = "activations" if case.run.model.init_from is None else "activations (estimate)"
    row("yours", f"{where}, on the device", result["activations"]["peak"])
    for there in result["standing"]:
        if there["scratch"]:
            row("disk", f"the model as it is built, in {there['directory']}", there["scratch"])
    row("disk", "a checkpoint, where you save it", result["checkpoint"])
    console.print(table)
    inputs, room = result["activations"]["inputs"], result["host"].get("activations", 0)
    if case.config.activations == "host" and not inputs:
        console.print("No block is recomputed, so no activation goes to the host (--recompute).")
    elif room and inputs > room:
        console.print(
            f"The inputs of checkpointed blocks take {format_size(inputs)}, the host has {format_size(room)} "
            "for them: the rest stays on the device (--host-memory)."
        )

    moved = result["per_step"]
    console.print(
        f"One step of {moved['tokens']:,} tokens reads at most {format_size(moved['nvme_read'])} from NVMe, "
        f"writes {format_size(moved['nvme_written'])} to it, and moves {format_size(moved['link'])} between "
        "host and device."
    )
    if ranks > 1:
        console.print(
            f"These bytes are each rank's, and {format_size(moved['sent'])} that it sends to others at most; "
            f"{local} of them share a machine's memory, and what is said of disks is of all of these."
        )
    if (matrices := result["matrices"]) is not None:
        console.print(
            f"Muon orthogonalizes the matrices of a step with {matrices['flops'] / 1e12:.3g} TFLOP"
            f"{' on the rank that has the most' if ranks > 1 else ''}; the largest one is "
            f"{matrices['largest']}.",
            markup=False,
        )
    worn = result["wear"]
    if worn["steps_rated"] is not None:
        console.print(
            f"{worn['steps']:,} steps write {worn['run_bytes'] / 1e12:,.3f} TB: {worn['share']:.2%} of the "
            f"{worn['rated_bytes'] / 1e12:,.0f} TB that {max(len(case.config.directories), 1)} drive(s) are "
            f"rated for, which last {worn['steps_rated']:,.0f} steps."
        )
    bounds = result["bounds_seconds"]
    if bounds:
        slowest = max(bounds, key=lambda k: bounds[k])
        parts = ", ".join(f"{k} {v:.3g} s" for k, v in sorted(bounds.items(), key=lambda kv: -kv[1]))
        console.print(f"A step takes at least {bounds[slowest]:.3g} s, for {slowest} ({parts}).")
    if case.described is not None and not result["standing"]:
        console.print(
            f"Where the model is built ({format_size(sum(case.workload.scratch()))}) is not described: "
            "not checked."
        )
    for problem in result["problems"]:
        console.print(
            f"DOES NOT FIT {problem['tier']}: needs at least {format_size(problem['needed'])} "
            f"({problem['needed']:,} bytes), has {format_size(problem['available'])}: {problem['what']}.",
            style="bold red",
            markup=False,
        )
    if result["problems"]:
        console.print(
            f"  to change, in place of your options of these names: {result['problems'][0]['cure']}",
            style="bold red",
            markup=False,
            soft_wrap=True,
        )
    if result["fits"]:
        console.print("It fits.", style="green")
    for note in result.get("notes", ()):
        console.print(f"- {note}", markup=False, soft_wrap=True)
    if "settings" in result:
        said = f"infinity.Config({as_settings(result['settings'])})"
        console.print(said, markup=False, soft_wrap=True)
        if result["recompute"]:
            console.print("with model.gradient_checkpointing_enable(): the backward computes blocks again")
