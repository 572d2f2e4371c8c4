"""`infinity train`: a language model on text, with its state on the tiers that have room.

The run of a few minutes, whose state is a multiple of the host memory that it is given::

    mkdir -p runs/train && infinity train --device cpu --dtype fp32 --preset 30m --nvme runs/train \
        --parameters nvme --optimizer-state nvme --gradients nvme \
        --host-memory 96MiB --device-memory 64MiB --chunk-elements 1048576 --recompute \
        --batch 4 --sequence 256 --steps 80 --max-grad-norm 1.0

The loop is the one that a user would write (infinity/cli/training.py); what surrounds it plans and measures.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from infinity.api.init import init
from infinity.api.random_state import seed_generators
from infinity.api.ranks import OWN
from infinity.api.trace import is_trace, trace
from infinity.api.wrap import close, wrap
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DirectoryError, InfinityError
from infinity.core.signals import SAVED
from infinity.core.sizes import Tier, format_size
from infinity.optim.lion import Lion
from infinity.optim.muon import Muon
from infinity.optim.optimizer import OffloadOptimizer

from .case import Case
from .console import check_outputs, finite, is_log, table_of
from .data import Corpus, find_files, open_stream
from .job import Job, joined
from .measure import Peak, bytes_on_disk, give_back_freed_memory
from .output import check_unused, read_run, taken
from .progress import Reporter
from .settings import RunSettings, TrainSettings
from .shown import error_as_dict
from .streams import going_on, lost
from .training import PROCESS, Training
from .workload import Workload, param_groups


def train_command(config_file: str | None, as_json: bool, given: Mapping[str, Any]) -> int:
    """Train as the parameters of a command say, as one rank of its job; return the exit code."""
    with going_on(), joined(config_file, given) as job:
        result = train(read_run(config_file, given, job.at.world), to_stderr=as_json, job=job)
        if as_json and job.first:
            click.echo(json.dumps(result))
        code = 1 if result["incomplete"] or (job.first and lost()) else 0
        if result["stopped"] and not result["lost_steps"]:
            code = SAVED
        return job.most("the end of the run", code)


def _of_all(run: RunSettings) -> dict[str, Any]:
    """Return the settings that all ranks have to have: not where their files are, or what the first one keeps
    of the run."""
    own = {*OWN, "path", "eval_data", "tokenizer", "init_from", "output", "json_log", "trace", "overwrite"}
    said = ((f"{section}.{name}", v) for section, of_it in run.as_dict().items() for name, v in of_it.items())
    return {name: value for name, value in said if name.partition(".")[2] not in own}


def train(run: RunSettings, *, to_stderr: bool = False, job: Job | None = None) -> dict[str, Any]:
    """Train as `run` says; return what came of it, as values that JSON has (sizes in bytes). Collective: what
    is said of memory and drives is the first rank's.

    Raises:
        ConfigError, BudgetError: the run contradicts itself, does not fit or would cost a file; nothing was
            built.
        DataError: the text or the model cannot be read.
        DirectoryError: another run has the directory of checkpoints.
        RankError: another rank failed, or is gone.
    """
    job = Job() if job is None else job
    train = run.train
    case = Case(run, planning=False, at=job.at)
    config, workload = case.config, case.workload
    workload.load_code()  # or the run ends here; and what an import takes is not memory of the run
    _check_files(run)
    scratch = config.directories[0] if config.directories and not case.unnamed else None
    stream = open_stream(run.data.path, workload.tokenizer, directory=scratch)
    if stream.vocab > workload.vocab:
        raise ConfigError(
            "the tokenizer has more tokens than the model",
            expected=f"at most {workload.vocab}",
            found=stream.vocab,
            cure="use the tokenizer that belongs to the model, or leave out --vocab",
        )
    source, held_out = run.data.eval_data, None
    if source is not None:
        held_out = open_stream(source, workload.tokenizer, directory=scratch, option="--eval-data")
    corpus = Corpus(
        stream, train.sequence, seed=train.seed, validation=run.data.validation, held_out=held_out
    )
    if case.place is not None and train.output is not None and not train.resume:
        check_unused(case.place)
    job.check_same("the settings of a run", {**_of_all(run), **corpus.fingerprints})
    job.wait("the plan")  # so that all find room as it is before any of them takes it
    plan = Case(run, planning=False, at=job.at).plan()  # with the tokens on the drive, where there are some
    plan.check()
    before = bytes_on_disk(config.directories)
    give_back_freed_memory()
    importlib.import_module("torch._dynamo")  # torch's optimizers would: not memory of the run
    with (
        taken(train, case.place, job) as root,
        Reporter(train.steps, every=train.log_every, to_stderr=to_stderr, quiet=not job.first) as report,
        Peak() as peak,
    ):
        report.line(f"{workload.name}: {plan.parameters:,} parameters; {corpus.describe()}")
        among = ""
        if job.at.world > 1:
            together = train.batch * train.accumulation * job.at.world
            report.line(
                f"{job.at.world} ranks, ZeRO stage {config.zero_stage}: {together} sequences in a step, "
                f"{format_size(plan.traffic.sent)} sent by each at most"
            )
            among = " on each rank"
        tiers = " + ".join(f"{format_size(n)} {t}" for t in Tier if (n := plan.footprint.total(t)))
        written = format_size(plan.traffic.nvme_written)
        report.line(f"planned{among}: {tiers}; NVMe per step: {written} written")
        model, optimizer = _build(run, config, workload, job.at.rank)
        training = Training(run, workload, corpus, plan.active, model, optimizer, report, root, job)
        try:
            training.check_descriptors()
            if train.resume:
                training.resume()
            on_disk = bytes_on_disk(config.directories) - before
            traced = os.path.expanduser(train.trace) if train.trace and job.first else None
            try:
                with trace(optimizer, traced) if traced else contextlib.nullcontext():
                    training.loop()
            except DirectoryError as error:
                if not training.complete:
                    raise
                report.incomplete.append(error)  # of the trace: what was trained is told all the same
            measured = training.measure(plan, peak, on_disk)
            report.end_steps()
            first, last = training.say_losses()
            _table(report, measured)
            text = "" if training.stopped or training.lost else training.sample()
            training.say_saved()
        except BaseException as error:
            job.failed(error)
            try:
                close(optimizer)
            except InfinityError as then:  # often of the same cause, which the first one names
                report.line(f"and at the end of the run: {then.what}", style="yellow")
            raise
        close(optimizer)
    incomplete = [*report.incomplete, *(report.lost_output() if job.first else [])]
    result: dict[str, Any] = finite(
        {
            "run": run.as_dict(),
            "ranks": job.at.world,
            "parameters": plan.parameters,
            "steps": training.step,
            "first_loss": first,
            "last_loss": last,
            "validation_loss": training.validation,
            "loss_fell": last < first,
            "seconds": training.seconds,
            "tokens_per_second": training.tokens_per_step * training.made / training.seconds,
            "planned_and_measured": measured,
            "sample": text,
            "checkpoint": training.saved,
            "lost_steps": training.lost_steps,
            "stopped": training.stopped,
            "incomplete": [error_as_dict(error) for error in incomplete],
        }
    )
    return result


def _check_files(run: RunSettings) -> None:
    train = run.train
    logs, traces = (("--json-log", train.json_log, is_log),), (("--trace", train.trace, is_trace),)
    outputs = logs + traces
    if any(path is not None for _, path, _ in outputs):
        inputs: list[str | Path] = list(find_files(run.data.path))
        if run.data.eval_data is not None:
            inputs += find_files(run.data.eval_data, "--eval-data")
        for folder in filter(None, (run.model.init_from, run.data.tokenizer)):
            inputs += [entry.path for entry in os.scandir(os.path.expanduser(folder))]
        check_outputs(outputs, inputs, overwrite=train.overwrite or (None if train.resume else False))
        if train.resume:  # the log goes on, too
            check_outputs(traces, inputs, overwrite=train.overwrite)


def _build(
    run: RunSettings, config: Config, workload: Workload, rank: int
) -> tuple[nn.Module, OffloadOptimizer]:
    train = run.train
    seed_generators(train.seed, rank)
    with init(config):
        model = workload.build(train.recompute)
    optimizer = _OPTIMIZERS[train.optimizer](
        train, param_groups(model, train.weight_decay, muon=train.optimizer == "muon")
    )
    return wrap(model, optimizer, config)


_OPTIMIZERS: Final[Mapping[str, Callable[[TrainSettings, Any], torch.optim.Optimizer]]] = {
    "adamw": lambda train, groups: AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2)),
    "lion": lambda train, groups: Lion(groups, lr=train.lr, betas=(train.beta1, train.beta2)),
    "sgd": lambda train, groups: SGD(groups, lr=train.lr, momentum=train.beta1),
    "adagrad": lambda train, groups: Adagrad(groups, lr=train.lr),
    # With this factor matrices learn well at a rate for AdamW, of which there is one for all.
    "muon": lambda train, groups: Muon(
        {**group, "lr": train.lr}
        | (
            {"adjust_lr_fn": "match_rms_adamw"}
            if group["use_muon"]
            else {"betas": (train.beta1, train.beta2)}
        )
        for group in groups
    ),
}


def _table(report: Reporter, rows: list[dict[str, Any]]) -> None:
    table = table_of("", "planned", "measured", title="Bytes")
    for row in rows:
        planned = ("at most " if row["at_most"] else "") + format_size(row["planned"])
        table.add_row(row["what"], planned, format_size(row["measured"]))
    report.console.print(table)
    for row in rows:
        more = row["measured"] - row["planned"]
        if more > 0 and row["what"] in PROCESS:
            report.line(
                f"{row['what']}: {format_size(more)} more than planned. What torch's kernels (generated "
                "code, workspaces), Python's objects and the spans of a trace take is in no plan."
            )
