"""What a person sees while a run is under way: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from infinity.core.errors import DataError, InfinityError
from infinity.core.sizes import format_size

from .shown import show_error
from .streams import lost


class _Bar(Progress):
    """The bar of the steps, with `text` below it."""

    text = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield what stands on the terminal."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.text)


class Reporter:
    """Shows steps.

    Args:
        total: number of steps.
        every: steps between plain lines.
        to_stderr: leave stdout to a machine.
        quiet: show nothing: another rank does.

    Attributes:
        incomplete: why files of this run are not complete though it went on; shown at the end, if not before.

    It goes on without stdout and stderr, too. What a stream has lost the other one says.
    """

    def __init__(self, total: int, *, every: int = 1, to_stderr: bool = False, quiet: bool = False):
        self.console = Console(stderr=to_stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._quiet, self._machine = quiet, to_stderr
        self._total = total
        self._every = every
        self.incomplete: list[InfinityError] = []
        self._shown: list[InfinityError] = []
        self._lost: dict[str, str] = {}  # stream → why, as far as it has been told
        self._details: dict[str, str] = {}  # as they were shown last
        self._text = ""  # of the last step
        self._bar = _Bar(
            *(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()),
            console=self.console,
            refresh_per_second=4,
            # Into a file goes what is for a file; a descriptor that was closed at the start has no stream.
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total)

    @property
    def _live(self) -> bool:
        return self._bar.live.is_started

    def __enter__(self) -> Reporter:
        if self.console.is_interactive and not self._quiet:  # what cannot move its cursor gets lines
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        for error in self.incomplete if not self._quiet else ():
            if error not in self._shown:
                show_error(error)

    def saving(self, done: int, total: int) -> None:
        """Show how far a save has come; another thread may call it."""
        if total:
            share = f"\nsaving: {done * 100 // total} %" if done < total else ""
            self._bar.text = self._text + share

    def pause(self) -> None:
        """End the bar; lines still work."""
        if self._live:
            self._bar.stop()

    def line(self, text: str = "", style: str | None = None) -> None:
        """Show one line as it is."""
        self.console.print(text, style=style, markup=False)

    def write(self, text: str) -> None:
        """Show text without ending the line; control characters are left out."""
        kept = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self.console.out(kept, end="", highlight=False)
        self.console.file.flush()

    def step(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Show one step; return the streams that take no more since the last one, and why."""
        new = self._newly_lost()
        text = step_text(record)
        line = f"step {record['step']}/{self._total}  {text}"
        self._text = self._bar.text = "\n".join([text, *details(record).values()])
        if self._live:
            self._bar.update(self._task, completed=record["step"])
            if "eval_loss" in record:  # stays, above the bar
                self.line(line)
        elif record["step"] % self._every == 0 or record["step"] in (1, self._total) or "eval_loss" in record:
            self.line(line)
            for name, value in details(record).items():
                if self._details.get(name) != value:  # what does not change is not repeated
                    self._details[name] = value
                    self.line(f"  {value}")
        return new

    def _newly_lost(self) -> dict[str, str]:
        """Return the streams that take no more since the last call, and why; say so on the other one."""
        new = {name: why for name, why in lost().items() if name not in self._lost}
        self._lost |= new
        for name, why in new.items():
            text = f"warning: {name} cannot be written any more ({why}): the run goes on without it"
            if name == "stdout":
                click.echo(text, err=True)
            elif not self._machine:
                self.line(text, style="yellow")
        return new

    def end_steps(self) -> None:
        """What is said from now on is the end of a run. It goes to stderr where stdout takes no more."""
        self.pause()
        self._newly_lost()
        if "stdout" in self._lost and not self._machine:
            self.console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=self._quiet)

    def fail(self, error: InfinityError) -> None:
        """Show now why a file of this run is not complete."""
        self._shown.append(error)
        if not self._quiet:
            show_error(error)

    def lost_output(self) -> list[InfinityError]:
        """Return what a run is told at its end that has gone on without stdout or stderr."""
        return [
            DataError(
                f"{name} of this run is not complete",
                expected="a reader, or a file with room, until the run ends",
                found=why,
                cure="write it to a file that has room (> FILE); --json-log keeps every step",
            )
            for name, why in lost().items()
        ]


def step_text(record: Mapping[str, Any]) -> str:
    """Return the figures of a step for a person, which no other step has."""
    parts = [
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
    ]
    if "mfu" in record:
        parts.append(f"mfu {record['mfu']:.1%}")
    if "eval_loss" in record:
        parts.append(f"eval loss {record['eval_loss']:.4f}")
    if record.get("skipped"):
        parts.append("skipped (gradients not finite)")
    return "  ".join(parts)


def details(record: Mapping[str, Any]) -> dict[str, str]:
    """Return those that most steps share. Bytes that are moved are rounded: an update that is behind makes
    them differ a little from step to step."""
    memory = record["memory"]
    told = (("read", record["nvme_read"]), ("written", record["nvme_written"]))
    return {
        "memory": "memory " + " + ".join(f"{format_size(memory[t])} {t}" for t in ("device", "host", "nvme")),
        "moved": "  ".join(f"{way} {_roughly(nbytes)}" for way, nbytes in told),
    }


def _roughly(nbytes: int) -> str:
    """Return a size to its leading bit: what differs less is the same."""
    return "nothing" if not nbytes else f"about {format_size(1 << round(math.log2(nbytes)))}"
