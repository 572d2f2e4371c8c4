"""The run of `infinity train`: the loop that a user would write, its checkpoints, and what comes of it."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.api.checkpoint import writing_ring
from infinity.api.claimed import going_on
from infinity.api.load import load
from infinity.api.metrics import metrics
from infinity.api.random_state import random_state, set_random_state
from infinity.api.run import Run
from infinity.api.save import save
from infinity.api.together import together
from infinity.core.errors import BackendError, ConfigError, DataError, InfinityError
from infinity.core.sizes import GiB, Tier
from infinity.optim.optimizer import OffloadOptimizer
from infinity.planning.planner import Plan
from infinity.storage.checkpoints import find
from infinity.storage.step_log import StepLog

from .data import Corpus
from .ending import steps_begin
from .flops import most_tokens, peak_flops
from .job import Job
from .measure import Peak
from .output import anew, changes, check_steps, without_index
from .progress import Reporter
from .settings import RunSettings
from .workload import Workload
from .writer import Writer

_PROMPT = "def "
_DESCRIPTORS = 12  # that a save has open at once at most, beside its ring
#: Rows of the last table that are measured on the process as a whole: one for all, or one for each memory.
PROCESS = ("process: device + host + activations", "device, with activations", "process: host")


def _bytes(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    """Return the bytes read from and written to NVMe between two `metrics`."""
    names = {"read": "nvme/read(GiB)", "written": "nvme/written(GiB)"}
    return {f"nvme_{way}": round(now[name] * GiB) - round(before[name] * GiB) for way, name in names.items()}


class Training(Run):
    """The run of a command: the loop that a user would write, and what it leaves behind.

    Attributes:
        losses: of all steps, those of the runs before too.
        complete: whether it has come to its end.
        moved: bytes of all steps, without those of saves and evaluations.
    """

    def __init__(
        self,
        settings: RunSettings,
        workload: Workload,
        corpus: Corpus,
        active: int,
        model: nn.Module,
        optimizer: OffloadOptimizer,
        report: Reporter,
        root: str | None,
        job: Job,
    ) -> None:
        train = self.train = settings.train
        super().__init__(
            optimizer,
            root,
            save_every=train.save_every,
            save_minutes=train.save_minutes,
            keep_last=train.keep_last,
        )
        self.settings, self.workload, self.corpus, self.model = settings, workload, corpus, model
        self.report, self.job = report, job
        self.incomplete = report.incomplete
        self._log: StepLog | None = None
        self._figures: dict[str, Any] = {}
        self.losses: list[float] = []
        self.validation = math.nan
        self.seconds = 0.0
        self.moved: dict[str, int] = {}
        self.complete = False
        self._beside: Counter[str] = Counter()  # bytes, of no step
        self._evaluating = 0.0  # seconds
        self.device = self.engine.device.torch_device
        self.tokens_per_step = train.tokens_per_step * job.at.world
        peak = peak_flops(self.device, workload.dtype(self.engine.config), job.at.local_world)
        if train.peak_tflops is not None:
            peak = train.peak_tflops * 1e12
        [peaks] = job.sums([peak])  # devices may differ
        self._most_tokens = most_tokens(peaks, active, workload.attention, train.sequence)
        self.job.last_words = self._last_words
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, train.lr_factor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)  # the command says what came of it, and ends with its exit code

    def _take(self, stack: contextlib.ExitStack) -> None:
        """Open the log. The command had the directory before it built the model."""
        together(self.engine.comm, "the log of a run", self._open_log)
        stack.callback(self._end_log)

    def _open_log(self) -> None:
        if self.first and self.train.json_log is not None:
            self._log = StepLog(os.path.expanduser(self.train.json_log), self.begin, "--json-log")

    def _count(self) -> None:
        super()._count()
        if self._log is not None:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            scale = self.engine.optimizer.loss_scale
            record = {"step": self.step, "time": now, "run": self.id, "loss_scale": scale, **self._figures}
            self._lose_log(self._log, self._log.write(record))

    def _end_log(self) -> None:
        if self._log is not None:
            self._lose_log(self._log, self._log.close())

    def _lose_log(self, log: StepLog, error: InfinityError | None) -> None:
        if error is not None:
            what = f"the log {log.path!r} cannot be written ({log.why})"
            self._say(f"warning: {what}: the run goes on without it")
            self.incomplete.append(error)

    @property
    def made(self) -> int:
        """Steps that this process has made."""
        return self.step - self.begin

    @property
    def lost_steps(self) -> int:
        """Steps that are in no checkpoint, though they were to be."""
        return self.step - self.kept if self.lost else 0

    def resume(self) -> None:
        """Go on from the newest checkpoint in `root`.

        Raises:
            DataError: the text is not the one of before.
            ConfigError: no step is left to make.
            StorageError, StateDictError: it cannot be loaded.
        """
        assert self.root is not None
        with going_on(self.root):
            found = find(self.root)
            given = load(self.optimizer, found.path, state={"scheduler": self.scheduler, "train": None})
        told = given["train"]["run"]
        moved = self.settings.data.path != told["data"]["path"]
        text = self.corpus.fingerprints["text"]
        if given["train"]["text"] != text and not moved:
            raise DataError(
                "the text is not the one that the run began with, so its batches would be others",
                expected=given["train"]["text"],
                found=text,
                cure="bring it back as it was; or --data with the name of another text, to go on with that; "
                f"or {anew(found)}",
            )
        self.losses = given["train"]["losses"].tolist()
        self.begin = self.step = self.kept = len(self.losses)
        check_steps(self.train, self.begin)  # another run may have gone on since it was planned
        self.saved, self.id = found.path, given["train"].get("id", self.id)
        for name in without_index(self.root):
            self.report.line(f"left out: {name}, which has no index", style="yellow")
        self.report.line(f"goes on from {found.path}, after {self.begin} steps")
        before = self._set_rate()
        for change in changes(self.settings, told):
            self.report.line(f"changed: {change}")
        if before is not None:
            self.report.line(f"changed: the learning rate of step {self.begin + 1}, {before}")
        for name, found_now in self.corpus.fingerprints.items():
            was = given["train"].get(name)
            if was != found_now and None not in (was, found_now):
                self.report.line(f"changed: the {name}, {was} → {found_now}")

    def _set_rate(self) -> str | None:
        """Set the rate of the next step, by the schedule of now; return how it differs, if it does: that of
        the schedule that the checkpoint was made with is in it."""
        rate = self.train.lr * self.train.lr_factor(self.begin)
        before = self.optimizer.param_groups[0]["lr"]
        for group in self.optimizer.param_groups:
            group["lr"], group["initial_lr"] = rate, self.train.lr
        self.scheduler.base_lrs = [self.train.lr for _ in self.optimizer.param_groups]
        self.scheduler._last_lr = [rate for _ in self.optimizer.param_groups]
        return None if rate == before else f"{before:.6g} → {rate:.6g}"

    def check_descriptors(self) -> None:
        """Raise `ConfigError` if this process may not open the files of a checkpoint."""
        if self.root is None:
            return
        opened = 0
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(_DESCRIPTORS):
                    stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                    opened += 1
                stack.enter_context(writing_ring(self.root))
        except (OSError, BackendError) as error:
            number = getattr(error, "errno", None)
            if number not in (None, errno.EMFILE, errno.ENFILE):
                return  # a save says it better
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise ConfigError(
                "this process may not open as many files as a checkpoint takes",
                expected=f"{_DESCRIPTORS} more, and what I/O takes",
                found=f"{opened} more" if opened < _DESCRIPTORS else str(error).splitlines()[0],
                cure=f"ulimit -n {max(256, 2 * soft)}; or --no-save",
            ) from error

    def save(self) -> None:
        """Save everything that another process needs to go on."""
        assert self.root is not None
        began = time.perf_counter()
        state: dict[str, Any] = {
            "scheduler": self.scheduler,
            "train": {
                "run": self.settings.as_dict(),
                "id": self.id,
                "ranks": self.job.at.world,
                **self.corpus.fingerprints,
                "losses": torch.tensor(self.losses, dtype=torch.float64),
            },
        }
        if self.workload.tokenizer is not None:
            state["tokenizer"] = self.workload.tokenizer
        with self._apart():
            self.saved = save(
                self.optimizer,
                self.root,
                state=state,
                keep_last=self.train.keep_last,
                progress=self.report.saving,
            )
        self.kept = self.step
        self.report.line(f"saved {self.saved} in {time.perf_counter() - began:.1f} s")

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What moves in the block is no step's."""
        self.engine.states.quiesce()  # the update under way is the step's
        before = metrics(self.optimizer)
        yield
        self._beside.update(_bytes(metrics(self.optimizer), before))

    def _command(self) -> str:
        assert self.root is not None
        more = "" if self.kept < self.train.steps else " --steps N"
        return f"infinity train --resume --output {shlex.quote(self.root)}{more}"

    def _tell(self, text: str) -> None:
        self.report.line(text, style="yellow")

    def _show(self, error: InfinityError) -> None:
        self.report.fail(error)

    def say_saved(self) -> None:
        """Say where what was trained is, and how to use it."""
        if self.root is None:
            return
        self.report.line()
        if self.lost:
            there = f"the newest whole checkpoint is {self.saved}" if self.saved else "there is no checkpoint"
            text = f"NOT SAVED: {self.lost_steps} of the {self.step} steps are lost; {there}."
            self.report.line(text, style="bold red")
        if self.saved is None:
            return
        until = f" until step {self.kept}" if self.lost else ""
        self.report.line(f"What was trained{until} is in {self.saved}. To use it:")
        self.report.line(f"  {self._command()}    goes on")
        saved = shlex.quote(self.saved)
        self.report.line(f"  infinity generate {saved} --prompt TEXT    writes text with it")
        self.report.line(f"  infinity export {saved} DIR    for --init-from, and for transformers")
        self.report.line(f"  infinity.load(optimizer, {json.dumps(self.saved)})    loads it in Python")

    def _loss(self, size: int, step: int, micro: int = 0, *, part: str = "train") -> torch.Tensor:
        at = self.job.at
        tokens, targets = self.corpus.batch(size, step, micro, part=part, rank=at.rank, world=at.world)
        return self.workload.loss(self.model, tokens.to(self.device), targets.to(self.device))

    def loop(self) -> None:
        """Train, and evaluate."""
        start = metrics(self.optimizer)
        began = time.perf_counter()
        try:
            with self:
                steps_begin()
                for step in self.steps(self.train.steps):
                    self._make(step)
        except KeyboardInterrupt:
            self.report.pause()
            last = f", last loss {self.losses[-1]:.4f}" if self.losses else ""
            self._tell(f"interrupted after {self.step} of {self.train.steps} steps{last}")
            raise
        # The update that may still be under way behind the last step: its bytes count.
        self.engine.states.quiesce()
        moved = _bytes(metrics(self.optimizer), start)
        self.moved = {way: nbytes - self._beside[way] for way, nbytes in moved.items()}
        self.seconds = time.perf_counter() - began - self._evaluating
        self.complete = True

    def _make(self, step: int) -> None:
        """Make one step."""
        train, optimizer = self.train, self.engine.optimizer
        began, start = time.perf_counter(), metrics(optimizer)
        total = 0.0
        for micro in range(train.accumulation):
            loss = self._loss(train.batch, step, micro) / train.accumulation
            optimizer.scale(loss).backward()
            total += loss.item()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.scheduler.step()
        optimizer.zero_grad()
        now = metrics(optimizer)
        memory = {tier.value: round(now[f"memory/{tier}(GiB)"] * GiB) for tier in Tier}
        moved = _bytes(now, start)
        if self.job.at.world > 1:
            total, memory, moved = self._of_all(total, memory, moved)
        self.losses.append(total)
        seconds = time.perf_counter() - began
        record: dict[str, Any] = {
            "step": step + 1,
            "loss": total,
            "grad_norm": now["grad_norm"],
            "lr": lr,
            "tokens": self.tokens_per_step * (step + 1),
            "seconds": seconds,
            "update_seconds": now["time_metrics/update(s)"],
            "tokens_per_second": (rate := self.tokens_per_step / seconds),
            "memory": memory,
            **moved,
            "skipped": now["skipped_steps"] > start["skipped_steps"],
        }
        if not math.isnan(self._most_tokens):
            record["mfu"] = rate / self._most_tokens
        if self._is_evaluated(step + 1):
            record["eval_loss"] = self._evaluate()
        self.validation = record.get("eval_loss", math.nan)
        lost = self.report.step(record)
        figures = {name: value for name, value in record.items() if name != "step"}
        self._figures = {**figures, **({"output_lost": lost} if lost else {})}

    def _is_evaluated(self, steps: int) -> bool:
        """Return whether the step that is over after `steps` steps is."""
        train = self.train
        due = steps == train.steps or (train.eval_every is not None and steps % train.eval_every == 0)
        return due and self.corpus.validates

    def _evaluate(self) -> float:
        """Return the mean loss of text that is not trained on, of the same batches each time. What is trained
        does not depend on it: a model that draws random numbers even now takes none of those of training."""
        began, drawn = time.perf_counter(), random_state(self.device)
        with self._apart(), torch.no_grad():
            self.model.eval()
            batches = range(self.train.eval_batches)
            losses = [self._loss(self.train.batch, index, part="validation").item() for index in batches]
            self.model.train()
        set_random_state(drawn, self.device)
        [total] = self.job.sums([sum(losses) / len(losses)])
        self._evaluating += time.perf_counter() - began
        return total / self.job.at.world

    def _of_all(
        self, loss: float, memory: dict[str, int], moved: dict[str, int]
    ) -> tuple[float, dict[str, int], dict[str, int]]:
        """Return the mean loss of all ranks, and the sums of their bytes."""
        told = self.job.sums([loss, *memory.values(), *moved.values()])
        sums = iter(map(round, told[1:]))
        memory, moved = ({name: next(sums) for name in each} for each in (memory, moved))
        return told[0] / self.job.at.world, memory, moved

    def say_losses(self) -> tuple[float, float]:
        """Say whether the loss fell; return the mean of the first and of the last losses: a tenth of the
        steps, at most 10."""
        window = max(1, min(10, len(self.losses) // 10))
        first, last = sum(self.losses[:window]) / window, sum(self.losses[-window:]) / window
        validation = "" if math.isnan(self.validation) else f"; on text not trained on: {self.validation:.4f}"
        means = f" (means of {window} steps)" if window > 1 else ""
        self.report.line()
        if last < first:
            text = f"The loss fell from {first:.4f} to {last:.4f}{means}{validation}."
            self.report.line(text, style="green")
        else:
            self.report.line(
                f"The loss did NOT fall: {first:.4f} at first, {last:.4f} at last{means}{validation}. "
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
            return round(float(figures[f"{name}(GiB)"]) * GiB)

        if self.engine.device.staged:
            rows = [(PROCESS[1], device + plan.activations, peak.device_nbytes or 0)]
            rows.append((PROCESS[2], host, peak.nbytes))
        else:
            rows = [(PROCESS[0], device + host + plan.activations, peak.nbytes)]
        ahead = taken.working_nbytes + taken.prefetch_nbytes
        leases = sum(q.nbytes for q in taken.quotas.values())
        rows.append(("device: units in use and ahead", ahead, peak_of("memory/device_units_peak")))
        rows.append(("host: leases", leases, peak_of("memory/host_leases_peak")))
        if taken.activation_nbytes:
            rows.append(("host: activations", taken.activation_nbytes, peak_of("activations/host")))
        if self.engine.config.directories:
            steps, moved = self.made, plan.traffic
            rows.append(("nvme", taken.total(Tier.NVME), on_disk))
            rows.append(("nvme: read per step", moved.nvme_read, self.moved["nvme_read"] // steps))
            rows.append(("nvme: written per step", moved.nvme_written, self.moved["nvme_written"] // steps))
        no_promise = (*PROCESS, "nvme")
        return [
            {"what": what, "planned": planned, "measured": measured, "at_most": what not in no_promise}
            for what, planned, measured in rows
        ]

    def sample(self) -> str:
        """Generate text, shown as it comes; return it with its prompt."""
        train = self.train
        if not train.sample_tokens:
            return ""
        prompt = train.prompt if train.prompt is not None else _PROMPT
        writer = Writer(self.model, self.workload.tokenizer, self.workload.name)
        ids = writer.encode(prompt) or [int(self.corpus.batch(1, 0, part="train")[0][0, 0])]
        ids = ids[-max(1, self.workload.context - train.sample_tokens) :]
        count = max(1, min(train.sample_tokens, self.workload.context - len(ids)))
        self.report.line()
        self.report.line(f"A sample ({count} tokens; each loads the whole model once):")
        decoded, shown = writer.decoder(), [prompt]
        self.report.write(prompt)

        def told(tokens: list[int]) -> None:
            shown.append(decoded(tokens[0], False))
            self.report.write(shown[-1])

        self.model.eval()
        try:
            writer.write([ids], count, temperature=0.8, seed=train.seed, told=told, top_k=50)
        except DataError as error:  # what was trained is saved
            shown.append(f" [no more: {error.what}]")
            self.report.write(shown[-1])
        self.report.line()
        self.model.train()
        return "".join(shown)
