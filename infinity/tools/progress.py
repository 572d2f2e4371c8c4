"""What a person sees while a run is under way: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from infinity.core.errors import DataError
from infinity.core.sizes import format_size


class Reporter:
    """Shows steps, and writes each of them to the JSON log.

    Args:
        total: number of steps.
        every: steps between plain lines.
        to_stderr: leave stdout to a machine.
    """

    def __init__(self, total: int, *, every: int = 1, to_stderr: bool = False):
        self.console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._total = total
        self._every = every
        self._log: TextIO | None = None
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=self.console
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            self._live = Live(self._progress, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        if self._log is not None:
            with contextlib.suppress(OSError):  # each line was flushed, or has raised
                self._log.close()

    def open_log(self, path: str) -> None:
        """Write each step from now on to a file, one JSON object per line. What it holds by now is lost:
        see `check_outputs`.

        Raises:
            DataError: the log cannot be written, or another run has made it meanwhile.
        """
        self._log = _open_log(os.path.expanduser(path))

    def pause(self) -> None:
        """End the bar; lines still work."""
        if self._live is not None:
            with contextlib.suppress(OSError):  # a terminal that has hung up
                self._live.stop()
            self._live = None

    def line(self, text: str = "", style: str | None = None) -> None:
        """Show one line as it is."""
        self.console.print(text, style=style, markup=False)

    def write(self, text: str) -> None:
        """Show text without ending the line; control characters are left out."""
        kept = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self.console.out(kept, end="", highlight=False)
        self.console.file.flush()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one step and write it to the log.

        Raises:
            DataError: the log has no room.
        """
        if self._log is not None:
            try:
                self._log.write(json.dumps({key: finite(value) for key, value in record.items()}) + "\n")
                self._log.flush()
            except OSError as error:
                raise _unwritable(self._log.name, error) from error
        text = step_text(record)
        if self._live is not None:
            self._progress.update(self._task, completed=record["step"])
            self._live.update(Group(self._progress, Text(text)))
        elif record["step"] % self._every == 0 or record["step"] in (1, self._total):
            self.line(f"step {record['step']}/{self._total}  {text}")


def finite(value: Any) -> Any:
    """Return `value`, or None for a number that JSON does not have (NaN, infinities)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def step_text(record: Mapping[str, Any]) -> str:
    """Return the figures of a step for a person."""
    memory = record["memory"]
    parts = [
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3f}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
        "memory " + " + ".join(f"{format_size(memory[t])} {t}" for t in ("device", "host", "nvme")),
        f"read {format_size(record['nvme_read'])}",
        f"written {format_size(record['nvme_written'])}",
    ]
    if record.get("skipped"):
        parts.append("skipped (overflow)")
    return "  ".join(parts)


def _open_log(path: str) -> TextIO:
    try:
        return open(path, "w" if os.path.exists(path) else "x", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> DataError:
    return DataError(
        f"the log {path!r} cannot be written",
        expected="a file in a directory that exists and has room",
        found=os.strerror(error.errno or 0),
        cure="change --json-log",
    )
