"""What commands show: what is being done, tables and warnings."""

from __future__ import annotations

import contextlib
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from infinity.core.sizes import format_size

_PAUSE = 5.0  # seconds from one line of progress to the next, where there is no terminal


#: Shows a text and, if given, that `done` of `total` is complete: `tell(text, done, total)`.
Tell = Callable[..., None]


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Lend a function that shows on stderr what is under way and how far it has come: as a bar on a
    terminal, and not at all elsewhere (also where TERM is dumb). Any thread may call it."""
    console = Console(stderr=True, highlight=False)
    text_column = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text_column, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("", total=None)

        def tell(text: str, done: float = 0.0, total: float | None = None) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield tell


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, wide enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def lines_of(text: str, *, hang: int = 0, width: int = 80) -> str:
    """Return text in lines of at most `width`, those after the first behind `hang` spaces. Words stay whole:
    a path or a command can be copied."""
    return textwrap.fill(
        text, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )


def table_of(*columns: str, title: str | None = None, left: int = 1) -> Table:
    """Return an empty table, whose columns after the first `left` are figures."""
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for column in table.columns[left:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def show_warnings(console: Console, texts: Iterable[str]) -> None:
    """Print what a person should know beside the figures."""
    for text in texts:
        console.print(f"warning: {text}", style="yellow", markup=False)


def finite(value: Any) -> Any:
    """Return `value` with None for each number that JSON does not have (NaN, infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finish(
    result: Mapping[str, Any], show: Callable[[Any], None], *, as_json: bool, failed: bool = False
) -> int:
    """Print the result of a command: as one JSON object, or by `show`, for a person. Return the exit code."""
    if as_json:
        click.echo(json.dumps(finite(result)))
    else:
        show(result)
    return int(failed)


def sizes(ring: Any) -> str:
    """Return the block and the depth of a ring, or of what opens one, for a person."""
    return f"{format_size(ring.block_bytes)} × {ring.queue_depth}"


def gigabytes(rate: float) -> str:
    """Return bytes per second as GB/s."""
    return f"{rate / 1e9:.2f}" if rate >= 1e8 else f"{rate / 1e9:.3f}"
