"""`infinity train`: a language model on text, with its state on the tiers that have room.

The run of a few minutes, whose state is a multiple of the host memory that it is given::

    mkdir -p runs/train && infinity train --device cpu --dtype fp32 --preset 30m --nvme runs/train \
        --parameters nvme --optimizer-state nvme --gradients nvme \
        --host-memory 96MiB --device-memory 64MiB --chunk-elements 1048576 --recompute \
        --batch 4 --sequence 256 --steps 80 --max-grad-norm 1.0

The loop is the one that a user would write (`_Training.loop`); what surrounds it plans, measures and reports.
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
from dataclasses import dataclass, field
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
from .console import check_outputs, finite, is_log, table_of
from .data import Corpus, find_files, open_stream
from .measure import Peak, bytes_on_disk, give_back_freed_memory
from .progress import Reporter
from .settings import Run, RunCommand, read_run, run_options
from .shown import error_as_dict
from .workload import Workload, generate, param_groups

_VALIDATION_BATCHES = 4
_PROMPT = "def "
_DIVERGED = " [no more: the model's outputs are not finite numbers]"
#: Rows of the last table that are measured on the process as a whole: one for all, or one for each memory.
_PROCESS = ("process: device + host + activations", "device, with activations", "process: host")


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
    with Reporter(train.steps, every=train.log_every, to_stderr=to_stderr) as report, Peak() as peak:
        report.line(f"{workload.name}: {plan.parameters:,} parameters; {corpus.describe()}")
        tiers = " + ".join(f"{format_size(n)} {t}" for t in Tier if (n := plan.footprint.total(t)))
        written = format_size(plan.traffic.nvme_written)
        report.line(f"planned: {tiers}; NVMe per step: {written} written")
        model, optimizer = _build(run, config, workload)
        training = _Training(run, workload, corpus, model, optimizer, report)
        try:
            if train.json_log is not None:  # not before: a run that is refused writes nothing
                report.open_log(train.json_log)
            on_disk = bytes_on_disk(config.directories) - before
            traced = os.path.expanduser(train.trace) if train.trace else None
            try:
                with trace(optimizer, traced) if traced else contextlib.nullcontext():
                    training.loop()
            except DirectoryError as error:
                if not training.complete:
                    raise
                report.incomplete.append(error)  # of the trace: what was trained is told all the same
            report.end_log()
            measured = training.measure(plan, peak, on_disk)
            report.pause()
            first, last = training.say_losses()
            _table(report, measured)
            text = training.sample()
        finally:
            close(optimizer)
    result: dict[str, Any] = finite(
        {
            "run": run.as_dict(),
            "parameters": plan.parameters,
            "steps": len(training.losses),
            "first_loss": first,
            "last_loss": last,
            "validation_loss": training.validation,
            "loss_fell": last < first,
            "seconds": training.seconds,
            "tokens_per_second": train.tokens_per_step * train.steps / training.seconds,
            "planned_and_measured": measured,
            "sample": text,
            "incomplete": [error_as_dict(error) for error in report.incomplete],
        }
    )
    return result


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


def _bytes(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    """Return the bytes read from and written to NVMe between two `metrics`."""
    factors = {"read": ("nvme/read(GiB)", GiB), "written": ("nvme/written(TB)", 1e12)}
    return {
        f"nvme_{way}": round(now[name] * factor) - round(before[name] * factor)
        for way, (name, factor) in factors.items()
    }


@dataclass
class _Training:
    """The loop that a user would write, and what it leaves behind; `complete`: it came to its end."""

    run: Run
    workload: Workload
    corpus: Corpus
    model: nn.Module
    optimizer: OffloadOptimizer
    report: Reporter
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    seconds: float = 0.0
    moved: dict[str, int] = field(default_factory=dict)  #: bytes of all steps
    complete: bool = False

    def __post_init__(self) -> None:
        self.engine = engine_of(self.optimizer)
        self.device = self.engine.device.torch_device

    def _loss(self, size: int, step: int, micro: int = 0, *, part: str = "train") -> torch.Tensor:
        tokens, targets = self.corpus.batch(size, step, micro, part=part)
        return self.workload.loss(self.model, tokens.to(self.device), targets.to(self.device))

    def loop(self) -> None:
        """Train, and validate."""
        train, optimizer = self.run.train, self.optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, train.lr_factor)
        start = metrics(optimizer)
        began = time.perf_counter()
        try:
            for step in range(train.steps):
                step_began, step_start = time.perf_counter(), metrics(optimizer)
                total = 0.0
                for micro in range(train.accumulation):
                    loss = self._loss(train.batch, step, micro) / train.accumulation
                    optimizer.scale(loss).backward()
                    total += loss.item()
                lr = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                self.losses.append(total)
                now = metrics(optimizer)
                seconds = time.perf_counter() - step_began
                self.report.step(
                    {
                        "step": step + 1,
                        "loss": total,
                        "grad_norm": now["grad_norm"],
                        "lr": lr,
                        "tokens": train.tokens_per_step * (step + 1),
                        "seconds": seconds,
                        "update_seconds": now["time_metrics/update(s)"],
                        "tokens_per_second": train.tokens_per_step / seconds,
                        "memory": {tier.value: round(now[f"memory/{tier}(GiB)"] * GiB) for tier in Tier},
                        **_bytes(now, step_start),
                        "loss_scale": now["loss_scale"],
                        "skipped": now["skipped_steps"] > step_start["skipped_steps"],
                    }
                )
        except KeyboardInterrupt:
            self.report.pause()
            last = f", last loss {self.losses[-1]:.4f}" if self.losses else ""
            text = f"interrupted after {len(self.losses)} of {train.steps} steps{last}"
            with contextlib.suppress(OSError):  # the terminal may be what has gone
                self.report.line(text, style="yellow")
            raise
        # The update that may still be under way behind the last step: its bytes count.
        self.engine.states.quiesce()
        self.moved = _bytes(metrics(optimizer), start)
        self.seconds = time.perf_counter() - began
        if self.run.data.validation:  # the mean loss of batches that were not trained on
            self.model.eval()
            with torch.no_grad():
                losses = [
                    self._loss(train.batch, index, part="validation").item()
                    for index in range(_VALIDATION_BATCHES)
                ]
            self.model.train()
            self.validation = sum(losses) / len(losses)
        self.complete = True

    def say_losses(self) -> tuple[float, float]:
        """Say whether the loss fell; return the mean of the first and of the last losses: a tenth of the
        steps, at most 10."""
        window = max(1, min(10, len(self.losses) // 10))
        first, last = sum(self.losses[:window]) / window, sum(self.losses[-window:]) / window
        validation = "" if math.isnan(self.validation) else f"; on text not trained on: {self.validation:.4f}"
        self.report.line()
        if last < first:
            self.report.line(f"The loss fell from {first:.4f} to {last:.4f}{validation}.", style="green")
        else:
            self.report.line(
                f"The loss did NOT fall: {first:.4f} at first, {last:.4f} at last{validation}. "
                "Train for more steps, or try another --lr.",
                style="bold yellow",
            )
        return first, last

    def measure(self, plan: Plan, peak: Peak, on_disk: int) -> list[dict[str, Any]]:
        """Return rows of what was planned and measured, in bytes; `at_most`: whether the plan is a promise.

        It is none for what the process takes as a whole: torch's kernels generate code and keep workspaces
        (some MiB, more in half precision), Python has objects, a trace spans. Nor on the drive, where a file
        system has blocks of its own.
        """
        taken = plan.footprint
        figures = metrics(self.optimizer)
        device, host = taken.total(Tier.DEVICE), taken.total(Tier.HOST)

        def peak_of(name: str) -> int:
            return round(figures[f"{name}(GiB)"] * GiB)

        if self.engine.device.staged:
            rows = [(_PROCESS[1], device + plan.activations, peak.device_nbytes or 0)]
            rows.append((_PROCESS[2], host, peak.nbytes))
        else:
            rows = [(_PROCESS[0], device + host + plan.activations, peak.nbytes)]
        ahead = taken.working_nbytes + taken.prefetch_nbytes
        leases = sum(q.nbytes for q in taken.quotas.values())
        rows.append(("device: units in use and ahead", ahead, peak_of("memory/device_units_peak")))
        rows.append(("host: leases", leases, peak_of("memory/host_leases_peak")))
        if taken.activation_nbytes:
            rows.append(("host: activations", taken.activation_nbytes, peak_of("activations/host")))
        if self.engine.config.directories:
            steps, moved = len(self.losses), plan.traffic
            rows.append(("nvme", taken.total(Tier.NVME), on_disk))
            rows.append(("nvme: read per step", moved.nvme_read, self.moved["nvme_read"] // steps))
            rows.append(("nvme: written per step", moved.nvme_written, self.moved["nvme_written"] // steps))
        no_promise = (*_PROCESS, "nvme")
        return [
            {"what": what, "planned": planned, "measured": measured, "at_most": what not in no_promise}
            for what, planned, measured in rows
        ]

    def sample(self) -> str:
        """Generate text, shown as it comes; return it with its prompt."""
        train, tokenizer = self.run.train, self.workload.tokenizer
        if not train.sample_tokens:
            return ""
        prompt = train.prompt if train.prompt is not None else _PROMPT
        ids = tokenizer(prompt)["input_ids"] if tokenizer is not None else list(prompt.encode())
        if not ids:
            ids = [int(self.corpus.batch(1, 0, part="train")[0][0, 0])]
        self.model.eval()
        made = generate(
            lambda tokens: self.workload.logits(self.model, tokens),
            torch.tensor(ids, device=self.device),
            train.sample_tokens,
            context=min(train.sequence, self.workload.context),
            seed=train.seed,
        )
        self.report.line()
        self.report.line(f"A sample ({train.sample_tokens} tokens; each loads the whole model once):")
        shown = []
        if tokenizer is not None:
            shown = [*ids, *made]
            text = str(tokenizer.decode(shown))
            self.report.write(text)
        else:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            text = ""
            for token in itertools.chain(ids, made):
                shown.append(token)
                piece = decoder.decode(bytes([token if token < 256 else 0x3F]))
                self.report.write(piece)
                text += piece
        if len(shown) < len(ids) + train.sample_tokens:
            self.report.write(_DIVERGED)
            text += _DIVERGED
        self.report.line()
        self.model.train()
        return text


def _table(report: Reporter, rows: list[dict[str, Any]]) -> None:
    table = table_of("", "planned", "measured", title="Bytes")
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
