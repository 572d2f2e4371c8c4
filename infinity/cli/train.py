"""`infinity train`: a language model on text, with its state on the tiers that have room.

The run of a few minutes, whose state is a multiple of the host memory that it is given::

    mkdir -p runs/train && infinity train --device cpu --dtype fp32 --preset 30m --nvme runs/train \
        --parameters nvme --optimizer-state nvme --gradients nvme \
        --host-memory 96MiB --device-memory 64MiB --chunk-elements 1048576 --recompute \
        --batch 4 --sequence 256 --steps 80 --max-grad-norm 1.0

The loop is the one that a user would write (see `_loop`); what surrounds it plans, measures and reports.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from infinity.api.engine import engine_of
from infinity.api.init import init
from infinity.api.metrics import metrics
from infinity.api.trace import is_trace, trace
from infinity.api.wrap import close, wrap
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import GiB, Tier, format_size
from infinity.optim.optimizer import OffloadOptimizer
from infinity.planning.planner import Plan
from infinity.storage.leftovers import reclaim

from .case import Case
from .console import finite
from .data import Corpus, find_files, open_stream
from .measure import Peak, bytes_on_disk, give_back_freed_memory
from .outputs import check_outputs, is_log
from .progress import Reporter
from .sample import generate
from .settings import Run, RunCommand, TrainSettings, read_run, run_options
from .shown import error_as_dict
from .workload import Workload, param_groups

_VALIDATION_BATCHES = 4
_PROMPT = "def "
_DIVERGED = " [no more: the model's outputs are not finite numbers]"
#: Rows of the last table that are measured on the process as a whole: one for all, or one for each memory.
_PROCESS = (
    "process: device + host + activations",
    "device, with activations",
    "process: host",
)


@dataclass
class _Trained:
    """What the loop leaves behind."""

    losses: list[float]
    validation: float
    seconds: float
    nvme_read: int  # in all steps
    nvme_written: int


@click.command("train", cls=RunCommand)
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; the rest on stderr.")
def train_command(config_file: str | None, as_json: bool, **given: Any) -> int:
    """Train the built-in GPT, or a Hugging Face model, on text.

    Without arguments: 30 million parameters on the sources of Python's standard library. Exit code 1 when
    it was trained but the log or the trace is not complete.
    """
    result = train(read_run(config_file, given), to_stderr=as_json)
    if as_json:
        click.echo(json.dumps(result))
    return 1 if result["incomplete"] else 0


def train(run: Run, *, to_stderr: bool = False) -> dict[str, Any]:
    """Train as `run` says; return what came of it, as values that JSON has (sizes in bytes).

    Raises:
        ConfigError, BudgetError: the run contradicts itself, does not fit or would cost a file; nothing was
            built.
        DataError: the text or the model cannot be read.
    """
    train = run.train
    case = Case(run, planning=False)
    config, workload = case.config, case.workload
    _check_files(run)
    reclaim(config.directories)  # before anything needs the space, and before bytes on disk are counted
    scratch = config.directories[0] if config.directories and not case.unnamed else None
    stream = open_stream(run.data.path, workload.tokenizer, directory=scratch)
    if stream.vocab > workload.vocab:
        raise ConfigError(
            "the tokenizer has more tokens than the model",
            expected=f"at most {workload.vocab}",
            found=stream.vocab,
            cure="use the tokenizer that belongs to the model",
        )
    corpus = Corpus(stream, train.sequence, seed=train.seed, validation=run.data.validation)
    plan = Case(run, planning=False).plan()  # with the tokens on the drive, where there are some
    plan.check()
    before = bytes_on_disk(config.directories)
    give_back_freed_memory()
    importlib.import_module("torch._dynamo")  # torch's optimizers would: not memory of the run
    with (
        Reporter(train.steps, every=train.log_every, to_stderr=to_stderr) as report,
        Peak() as peak,
    ):
        report.line(f"{workload.name}: {plan.parameters:,} parameters; {corpus.describe()}")
        _promise(report, plan)
        model, optimizer = _build(run, config, workload)
        try:
            if train.json_log is not None:  # not before: a run that is refused writes nothing
                report.open_log(train.json_log)
            on_disk = bytes_on_disk(config.directories) - before
            traced = os.path.expanduser(train.trace) if train.trace else None
            trained = None
            try:
                with trace(optimizer, traced) if traced else contextlib.nullcontext():
                    trained = _loop(run, workload, corpus, model, optimizer, report)
            except DirectoryError as error:
                if trained is None:
                    raise
                report.incomplete.append(error)  # of the trace: what was trained is told all the same
            report.end_log()
            measured = _measure(config, model, optimizer, plan, trained, peak, on_disk)
            report.pause()
            fell = _summary(report, trained)
            _table(report, measured)
            text = _sample(run, workload, corpus, model, report)
        finally:
            close(optimizer)
    result = {
        "run": run.as_dict(),
        "parameters": plan.parameters,
        "steps": len(trained.losses),
        "first_loss": _ends(trained.losses)[0],
        "last_loss": _ends(trained.losses)[1],
        "validation_loss": trained.validation,
        "loss_fell": fell,
        "seconds": trained.seconds,
        "tokens_per_second": train.tokens_per_step * train.steps / trained.seconds,
        "planned_and_measured": measured,
        "sample": text,
        "incomplete": [error_as_dict(error) for error in report.incomplete],
    }
    strict: dict[str, Any] = finite(result)
    return strict


def _check_files(run: Run) -> None:
    outputs = (("--json-log", run.train.json_log, is_log), ("--trace", run.train.trace, is_trace))
    if any(path is not None for _, path, _ in outputs):
        inputs: list[str | Path] = list(find_files(run.data.path))
        model = run.model.init_from
        if model is not None and os.path.isdir(model):
            inputs += [entry.path for entry in os.scandir(model)]
        check_outputs(outputs, inputs, overwrite=run.train.overwrite)


def _build(run: Run, config: Config, workload: Workload) -> tuple[nn.Module, OffloadOptimizer]:
    train = run.train
    torch.manual_seed(train.seed)
    with init(config):
        model = workload.build(train.recompute)
    optimizer = torch.optim.AdamW(
        param_groups(model, train.weight_decay), lr=train.lr, betas=(train.beta1, train.beta2)
    )
    return wrap(model, optimizer, config)


def _loop(
    run: Run,
    workload: Workload,
    corpus: Corpus,
    model: nn.Module,
    optimizer: OffloadOptimizer,
    report: Reporter,
) -> _Trained:
    train = run.train
    device = engine_of(optimizer).device.torch_device
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, train.lr_factor)
    losses: list[float] = []
    start = metrics(optimizer)
    began = time.perf_counter()
    try:
        for step in range(train.steps):
            step_began, step_start = time.perf_counter(), metrics(optimizer)
            total = 0.0
            for micro in range(train.accumulation):
                tokens, targets = corpus.batch(train.batch, step, micro)
                loss = workload.loss(model, tokens.to(device), targets.to(device)) / train.accumulation
                optimizer.scale(loss).backward()
                total += loss.item()
            lr = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            figures = metrics(optimizer)
            seconds = time.perf_counter() - step_began
            report.step(_record(train, step, total, lr, seconds, figures, step_start))
    except KeyboardInterrupt:
        report.pause()
        last = f", last loss {losses[-1]:.4f}" if losses else ""
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            report.line(f"interrupted after {len(losses)} of {train.steps} steps{last}", style="yellow")
        raise
    _finish_updates(optimizer)
    end = metrics(optimizer)
    seconds = time.perf_counter() - began
    validation = _validate(run, workload, corpus, model, device)
    return _Trained(
        losses,
        validation,
        seconds,
        _read(end) - _read(start),
        _written(end) - _written(start),
    )


def _finish_updates(optimizer: OffloadOptimizer) -> None:
    """Wait for the update that may still be under way behind the last step: its bytes count."""
    engine_of(optimizer).quiesce()


def _record(
    train: TrainSettings,
    step: int,
    loss: float,
    lr: float,
    seconds: float,
    now: Mapping[str, float],
    before: Mapping[str, float],
) -> dict[str, Any]:
    tokens = train.tokens_per_step
    return {
        "step": step + 1,
        "loss": loss,
        "grad_norm": now["grad_norm"],
        "lr": lr,
        "tokens": tokens * (step + 1),
        "seconds": seconds,
        "update_seconds": now["time_metrics/update(s)"],
        "tokens_per_second": tokens / seconds,
        "memory": {tier.value: round(now[f"memory/{tier}(GiB)"] * GiB) for tier in Tier},
        "nvme_read": _read(now) - _read(before),
        "nvme_written": _written(now) - _written(before),
        "loss_scale": now["loss_scale"],
        "skipped": now["skipped_steps"] > before["skipped_steps"],
    }


def _read(figures: Mapping[str, float]) -> int:
    return round(figures["nvme/read(GiB)"] * GiB)


def _written(figures: Mapping[str, float]) -> int:
    return round(figures["nvme/written(TB)"] * 1e12)


def _validate(run: Run, workload: Workload, corpus: Corpus, model: nn.Module, device: torch.device) -> float:
    """Return the mean loss of batches that were not trained on; NaN if none are kept."""
    if not run.data.validation:
        return math.nan
    model.eval()
    losses = []
    with torch.no_grad():
        for index in range(_VALIDATION_BATCHES):
            tokens, targets = corpus.batch(run.train.batch, index, part="validation")
            losses.append(workload.loss(model, tokens.to(device), targets.to(device)).item())
    model.train()
    return sum(losses) / len(losses)


# -- what is said before and after ----------------------------------------------------------


def _promise(report: Reporter, plan: Plan) -> None:
    taken = plan.footprint
    tiers = " + ".join(f"{format_size(taken.total(t))} {t}" for t in Tier if taken.total(t))
    report.line(f"planned: {tiers}; NVMe per step: {format_size(plan.traffic.nvme_written)} written")


def _ends(losses: list[float]) -> tuple[float, float]:
    """Return the mean of the first and of the last losses: a tenth of the steps, at most 10."""
    window = max(1, min(10, len(losses) // 10))
    return sum(losses[:window]) / window, sum(losses[-window:]) / window


def _summary(report: Reporter, trained: _Trained) -> bool:
    first, last = _ends(trained.losses)
    fell = last < first
    validation = (
        "" if math.isnan(trained.validation) else f"; on text not trained on: {trained.validation:.4f}"
    )
    report.line()
    if fell:
        report.line(f"The loss fell from {first:.4f} to {last:.4f}{validation}.", style="green")
    else:
        report.line(
            f"The loss did NOT fall: {first:.4f} at first, {last:.4f} at last{validation}. "
            "Train for more steps, or try another --lr.",
            style="bold yellow",
        )
    return fell


def _measure(
    config: Config,
    model: nn.Module,
    optimizer: OffloadOptimizer,
    plan: Plan,
    trained: _Trained,
    peak: Peak,
    on_disk: int,
) -> list[dict[str, Any]]:
    """Return rows of what was planned and measured, in bytes; `at_most`: whether the plan is a promise.

    It is none for what the process takes as a whole: torch's kernels generate code and keep workspaces
    (some MiB, more in half precision), Python has objects, a trace spans. Nor on the drive, where a file
    system has blocks of its own.
    """
    taken = plan.footprint
    figures = metrics(optimizer)
    activations = plan.activations
    device, host = taken.total(Tier.DEVICE), taken.total(Tier.HOST)
    leases = sum(q.nbytes for q in taken.quotas.values())
    rows: list[tuple[str, int, int]] = []
    on_cuda = engine_of(optimizer).device.staged
    if on_cuda:
        rows.append((_PROCESS[1], device + activations, peak.device_nbytes or 0))
        rows.append((_PROCESS[2], host, peak.nbytes))
    else:
        rows.append((_PROCESS[0], device + host + activations, peak.nbytes))
    rows.append(
        (
            "device: units in use and ahead",
            taken.working_nbytes + taken.prefetch_nbytes,
            round(figures["memory/device_units_peak(GiB)"] * GiB),
        )
    )
    rows.append(("host: leases", leases, round(figures["memory/host_leases_peak(GiB)"] * GiB)))
    if taken.activation_nbytes:
        rows.append(
            ("host: activations", taken.activation_nbytes, round(figures["activations/host(GiB)"] * GiB))
        )
    if config.directories:
        steps = len(trained.losses)
        rows.append(("nvme", taken.total(Tier.NVME), on_disk))
        rows.append(("nvme: read per step", plan.traffic.nvme_read, trained.nvme_read // steps))
        rows.append(("nvme: written per step", plan.traffic.nvme_written, trained.nvme_written // steps))
    no_promise = (*_PROCESS, "nvme")
    return [
        {"what": what, "planned": planned, "measured": measured, "at_most": what not in no_promise}
        for what, planned, measured in rows
    ]


def _table(report: Reporter, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("", "planned", "measured", title="Bytes", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        planned = ("at most " if row["at_most"] else "") + format_size(row["planned"])
        table.add_row(row["what"], planned, format_size(row["measured"]))
    report.console.print(table)
    for row in rows:
        more = row["measured"] - row["planned"]
        if more > 0 and row["what"] in _PROCESS:
            report.line(
                f"{row['what']}: {format_size(more)} more than planned. What torch's kernels (generated "
                "code, workspaces), Python's objects and the spans of a trace take is in no plan."
            )


def _sample(run: Run, workload: Workload, corpus: Corpus, model: nn.Module, report: Reporter) -> str:
    """Generate text, shown as it comes; return it with its prompt."""
    train = run.train
    if not train.sample_tokens:
        return ""
    prompt = train.prompt if train.prompt is not None else _PROMPT
    tokenizer = workload.tokenizer
    ids = tokenizer(prompt)["input_ids"] if tokenizer is not None else list(prompt.encode())
    if not ids:
        ids = [int(corpus.batch(1, 0, part="train")[0][0, 0])]
    device = engine_of(model).device.torch_device
    model.eval()
    made = generate(
        lambda tokens: workload.logits(model, tokens),
        torch.tensor(ids, device=device),
        train.sample_tokens,
        context=min(train.sequence, workload.context),
        seed=train.seed,
    )
    report.line()
    report.line(f"A sample ({train.sample_tokens} tokens; each fetches the whole model once):")
    shown = []
    if tokenizer is not None:
        shown = [*ids, *made]
        text = str(tokenizer.decode(shown))
        report.write(text)
    else:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for token in itertools.chain(ids, made):
            shown.append(token)
            piece = decoder.decode(bytes([token if token < 256 else 0x3F]))
            report.write(piece)
            text += piece
    if len(shown) < len(ids) + train.sample_tokens:
        report.write(_DIVERGED)
        text += _DIVERGED
    report.line()
    model.train()
    return text
