"""`infinity plan`: what a run would take, in closed form, building nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from infinity.core.config import Config
from infinity.core.errors import ConfigError
from infinity.core.sizes import Tier, dtype_name, format_size
from infinity.planning.planner import Bandwidths, Plan, make_plan, step_bounds, wear
from infinity.storage.leftovers import free_nbytes
from infinity.training.activations import AHEAD, SMALLEST

from .model import Activations
from .settings import Run, RunCommand, read_run, run_options
from .workload import Workload, resolve_budget, workload_of

#: Stands for a drive that is not there yet.
_NO_DIRECTORY = "(a directory on an NVMe drive)"


def config_for_planning(run: Run) -> Config:
    """Return the engine's configuration; a drive need not be named to be planned for."""
    try:
        return run.config()
    except ConfigError:
        if run.engine.get("nvme"):
            raise
        return run.config(nvme=[_NO_DIRECTORY])


def free_bytes(directories: Sequence[str]) -> int | None:
    """Return the bytes that arenas in `directories` may take together; None if one of them is missing."""
    try:
        return free_nbytes(directories) if directories else None
    except OSError:
        return None


def plan_run(run: Run, config: Config, workload: Workload) -> Plan:
    """Return the plan of a run on this machine, within its budgets."""
    budget, staged = resolve_budget(config)
    train = run.train
    made = workload.activations(config, train.batch, train.sequence, train.recompute)
    return make_plan(
        workload.planned(config),
        config,
        budget,
        staged=staged,
        accumulation=train.accumulation,
        inputs=made.inputs,
        nvme_free=free_bytes(config.directories),
    )


def activations_on_device(run: Run, config: Config, workload: Workload, plan: Plan) -> Activations:
    """Return the activations that are on the device, where some of them wait on the host."""
    train = run.train
    made = workload.activations(config, train.batch, train.sequence, train.recompute)
    moved = min(made.inputs, plan.footprint.activation_nbytes) if made.largest >= SMALLEST else 0
    # Of those that move, one is in use while the next ones come (or the last ones go).
    away = max(0, moved - (1 + AHEAD) * made.largest)
    return made._replace(saved=made.saved - away, peak=made.peak - away)


def plan_as_dict(
    run: Run,
    config: Config,
    plan: Plan,
    activations: Activations,
    *,
    tbw: float,
    bandwidths: Bandwidths,
) -> dict[str, Any]:
    """Return everything that `infinity plan` says, as values that JSON has. Sizes are in bytes."""
    train = run.train
    tokens = train.tokens_per_step
    worn = wear(plan.traffic, steps=train.steps, tbw=tbw, drives=len(config.directories))
    bounds = step_bounds(plan, bandwidths, tokens=tokens, recompute=train.recompute)
    taken = plan.footprint
    return {
        "parameters": plan.parameters,
        "trainable": plan.trainable,
        "dtype": dtype_name(config.compute_dtype),
        "units": plan.units,
        "chunks": plan.chunks,
        "largest_unit": {"name": plan.largest_unit[0], "bytes": plan.largest_unit[1]},
        "device": dict(taken.device),
        "host": dict(taken.host),
        "nvme": dict(taken.nvme),
        "nvme_durable": dict(plan.durable_nvme),
        "activations": activations._asdict(),
        "per_step": {
            "tokens": tokens,
            "nvme_read": plan.traffic.nvme_read,
            "nvme_written": plan.traffic.nvme_written,
            "link": plan.traffic.link,
        },
        "wear": {**dataclasses.asdict(worn), "share": worn.share, "steps": train.steps},
        "bounds_seconds": bounds,
        "fits": plan.fits,
        "problems": [dataclasses.asdict(p) for p in plan.problems],
    }


@click.command("plan", cls=RunCommand)
@run_options
@click.option(
    "--endurance-tbw", type=float, default=600.0, show_default=True, help="TB a drive is rated for."
)
@click.option("--nvme-read", type=float, help="GB/s of all drives together, for bounds on a step's time.")
@click.option("--nvme-write", type=float, help="GB/s of all drives together.")
@click.option("--link", type=float, help="GB/s between host and device.")
@click.option("--dram", type=float, help="GB/s of host memory.")
@click.option("--tflops", type=float, help="TFLOP/s that the device reaches.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def plan_command(
    config_file: str | None,
    endurance_tbw: float,
    nvme_read: float | None,
    nvme_write: float | None,
    link: float | None,
    dram: float | None,
    tflops: float | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Say what a run would take on each tier, building nothing.

    Takes the arguments of `infinity train`. Exit code 1 when the run does not fit.
    """
    run = read_run(config_file, given)
    config = config_for_planning(run)
    workload = workload_of(run)
    plan = plan_run(run, config, workload)
    activations = activations_on_device(run, config, workload, plan)
    result = plan_as_dict(
        run,
        config,
        plan,
        activations,
        tbw=endurance_tbw,
        bandwidths=Bandwidths(nvme_read, nvme_write, link, dram, tflops),
    )
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(workload.name, config, result, exact=run.model.init_from is None)
    return 0 if plan.fits else 1


def show(name: str, config: Config, result: Mapping[str, Any], *, exact: bool) -> None:
    """Print a plan for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(
        f"{name}: {result['parameters']:,} parameters in {result['units']} units and "
        f"{result['chunks']} chunks, {result['dtype']}"
    )
    table = Table("tier", "what for", "bytes", "", title="Memory and disk")
    for column in table.columns[2:]:
        column.justify = "right"
    for tier in Tier:
        purposes = result[tier.value]
        for purpose, nbytes in purposes.items():
            table.add_row(tier.value, purpose, f"{nbytes:,}", format_size(nbytes))
        total = sum(purposes.values())
        table.add_row(tier.value, "total", f"{total:,}", format_size(total), style="bold", end_section=True)
    if result["nvme"]:
        durable = sum(result["nvme_durable"].values())
        table.add_row("nvme", "total with durable steps", f"{durable:,}", format_size(durable))
    activations = result["activations"]["peak"]
    where = "activations" if exact else "activations (estimate)"
    table.add_row("yours", f"{where}, on top of device memory", f"{activations:,}", format_size(activations))
    console.print(table)
    inputs, room = result["activations"]["inputs"], result["host"].get("activations", 0)
    if config.activations == "host" and not inputs:
        console.print("No block is recomputed, so no activation goes to the host (--recompute).")
    elif room and inputs > room:
        console.print(
            f"The inputs of recomputed blocks take {format_size(inputs)}, the host has {format_size(room)} "
            "for them: the rest stays on the device (--activation-memory)."
        )

    moved = result["per_step"]
    console.print(
        f"One step of {moved['tokens']:,} tokens reads at most {format_size(moved['nvme_read'])} from NVMe, "
        f"writes {format_size(moved['nvme_written'])} to it, and moves {format_size(moved['link'])} between "
        "host and device."
    )
    worn = result["wear"]
    if worn["steps_rated"] is not None:
        console.print(
            f"{worn['steps']:,} steps write {worn['run_bytes'] / 1e12:,.3f} TB: {worn['share']:.2%} of the "
            f"{worn['rated_bytes'] / 1e12:,.0f} TB that {max(len(config.directories), 1)} drive(s) are rated "
            f"for, which last {worn['steps_rated']:,.0f} steps."
        )
    bounds = result["bounds_seconds"]
    if bounds:
        slowest = max(bounds, key=lambda k: bounds[k])
        parts = ", ".join(f"{k} {v:.3g} s" for k, v in sorted(bounds.items(), key=lambda kv: -kv[1]))
        console.print(f"A step takes at least {bounds[slowest]:.3g} s, for {slowest} ({parts}).")
    for problem in result["problems"]:
        console.print(
            f"DOES NOT FIT {problem['tier']}: needs at least {format_size(problem['needed'])} "
            f"({problem['needed']:,} bytes), has {format_size(problem['available'])}.\n"
            f"  to change: {problem['cure']}",
            style="bold red",
            markup=False,
        )
    if result["fits"]:
        console.print("It fits.", style="green")
