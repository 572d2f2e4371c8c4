"""What commands show: what is being done, tables, warnings, plots."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from infinity.core.errors import ConfigError
from infinity.core.sizes import format_size

from .outputs import check_outputs, is_plot


@contextlib.contextmanager
def status_line(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Lend what says on stderr what is being done: one line that changes on a terminal, plain lines
    elsewhere, unless `quiet`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield (lambda text: None) if quiet else functools.partial(console.print, markup=False)


def wide_console() -> Console:
    """Return a console for tables: as wide as the terminal, wide enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


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


def finish(
    result: Mapping[str, Any], show: Callable[[Any], None], *, as_json: bool, failed: bool = False
) -> int:
    """Print the result of a command: as one JSON object, or by `show`, for a person. Return the exit code."""
    if as_json:
        click.echo(json.dumps(finite(result)))
    else:
        show(result)
    return int(failed)


def finite(value: Any) -> Any:
    """Return `value` with None for each number that JSON does not have (NaN, infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sizes(ring: Any) -> str:
    """Return the block and the depth of a ring, or of what opens one, for a person."""
    return f"{format_size(ring.block_bytes)} × {ring.queue_depth}"


def gigabytes(rate: float) -> str:
    """Return bytes per second as GB/s."""
    return f"{rate / 1e9:.2f}" if rate >= 1e8 else f"{rate / 1e9:.3f}"


# ---- plots ----


def check_plot(path: str | None) -> None:
    """Raise ConfigError if a plot is asked for that cannot be drawn or written, or would cost a file."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "a plot needs matplotlib",
            expected="matplotlib, an optional dependency",
            found="it is not installed",
            cure="pip install 'infinity-offload[plot]', or leave --plot out",
        )
    check_outputs([("--plot", path, is_plot)])


@contextlib.contextmanager
def figure_in(path: str, width: float, height: float) -> Iterator[Any]:
    """Lend a matplotlib figure of this size in inches; write it to `path`, whose ending says in which
    format.

    Raises:
        ConfigError: matplotlib does not know the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    yield figure
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(
            f"the plot {path!r} cannot be drawn",
            expected="a name that ends in .png, .svg or .pdf",
            found=str(error),
            cure="--plot out.png",
        ) from error
