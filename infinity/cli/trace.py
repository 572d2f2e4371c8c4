"""`infinity trace`: where the time of a step went, from a file of `infinity train --trace`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape

from infinity.core.errors import DataError
from infinity.core.sizes import format_size
from infinity.core.spans import FORMAT

from .console import (
    check_plot,
    figure_in,
    finish,
    gigabytes,
    lines_of,
    show_warnings,
    table_of,
    wide_console,
)
from .options import json_option
from .roofline import analyse, spans_of, union, window_of

_COST: Final = 0.01  # of a step: what recording may cost
_WORST: Final = 3  # units that are named
_TRACKS: Final = {
    "compute": "#4878a8",
    "stall": "#c44e52",
    "step": "#999999",
    "unshard": "#8c8c3c",
    "h2d": "#64b5cd",
    "d2h": "#64b5cd",
    "reduce": "#8172b2",
    "update": "#55a868",
    "crc": "#a1c9a9",
    "read": "#d1802a",
    "write": "#b0603a",
}


@click.command("trace")
@click.argument("file")
@click.option("--plot", "plot_file", metavar="FILE", help="Draw it: one step and the roofline (matplotlib).")
@json_option
def trace_command(file: str, plot_file: str | None, as_json: bool) -> int:
    """Say where the time of a step went, and what bounds it.

    FILE is what `infinity train --trace FILE` or `infinity.trace(model, FILE)` wrote. It can also be
    loaded at ui.perfetto.dev.
    """
    check_plot(plot_file)
    content = read_trace(file)
    result = analyse(content)
    if plot_file is not None:
        plot(content, result, plot_file)
    return finish(result, show, as_json=as_json)


def show(result: Mapping[str, Any]) -> None:
    """Print an analysis for a person. Times are means over the steps of the trace."""
    console = wide_console()
    step = result["step_seconds"]
    title = f"{result['steps']} steps of {_seconds(step)}: where the user's thread was"
    where = table_of("", "per step", "of it", title=title)
    for name, value in result["where"].items():
        if value >= 0.0005 * step or name == "compute":
            phases = ""
            if name == "compute" and result["phases"]:
                phases = f" ({', '.join(f'{k} {_seconds(v)}' for k, v in result['phases'].items())})"
            where.add_row(escape(name + phases), _seconds(value), f"{value / step:.1%}")
    console.print(where)
    title = "What each resource needs at its bandwidth"
    roof = table_of("", "bytes", "GB/s", "needs", "of a step", title=title)
    for resource in result["resources"]:
        rate = gigabytes(resource["bandwidth"]) if resource["bytes"] else "–"
        roof.add_row(
            resource["name"],
            format_size(resource["bytes"]) if resource["bytes"] else "–",
            rate + (" (tuned)" if resource["bandwidth_from"] == "tune" else ""),
            _seconds(resource["seconds"]),
            f"{resource['share']:.1%}",
        )
    console.print(roof)
    waited = {unit: kinds["stall"] for unit, kinds in result["units"].items() if "stall" in kinds}
    worst = sorted(waited, key=lambda unit: -waited[unit])[:_WORST]
    if worst:
        text = ", ".join(f"{unit} {_seconds(waited[unit])}" for unit in worst)
        console.print(f"Stalled most for the units {text}", markup=False)
    console.print(f"Efficiency: {result['efficiency']:.1%} (the largest need by the step)", markup=False)
    sentence = f"{result['sentence'][:1].upper()}{result['sentence'][1:]}."
    console.print(lines_of(sentence), markup=False, style="bold")
    _notes(console, result)


def _notes(console: Console, result: Mapping[str, Any]) -> None:
    cost = result["cost"]
    text = (
        f"Recording: {cost['spans_per_step']:,.0f} spans × {cost['ns_per_span']:,.0f} ns = "
        f"{cost['share']:.2%} of a step"
    )
    dear = cost["share"] > _COST
    console.print(text + (": too much; figures above are of a slower step" if dear else ""), markup=False)
    if result["dropped_spans"]:
        text = f"the trace was full; {result['dropped_spans']:,} spans are missing. "
        show_warnings(console, [text + "Only whole steps before that count. Trace fewer steps."])


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def plot(content: Mapping[str, Any], result: Mapping[str, Any], path: str) -> None:
    """Draw one step of a trace (the last) and the roofline; the ending of `path` says in which format.

    Raises:
        ConfigError: matplotlib does not know the format.
    """
    with figure_in(path, 12, 7) as figure:
        _draw(figure, content, result)


def _draw(figure: Any, content: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    spans = spans_of(content)
    (_, last), _ = window_of(content, spans)
    ends = sorted(s.end for s in spans if s.kind == "step" and s.end <= last)
    first = ends[-2] if len(ends) > 1 else 0
    for row, (name, color) in enumerate(_TRACKS.items()):
        here = union(
            (max(s.begin, first), min(s.end, last))
            for s in spans
            if s.kind in (name, f"device {name}") and s.end > first and s.begin < last
        )
        bars = [((begin - first) * 1e-9, (end - begin) * 1e-9) for begin, end in here]
        upper.broken_barh(bars, (row - 0.4, 0.8), color=color)
    upper.set_yticks(range(len(_TRACKS)), list(_TRACKS))
    upper.invert_yaxis()
    upper.set_xlim(0, (last - first) * 1e-9)
    upper.set_xlabel("seconds of the last step in the trace")
    resources = result["resources"]
    step = result["step_seconds"]
    lower.barh([r["name"] for r in resources], [r["seconds"] for r in resources], color="#4878a8")
    lower.axvline(step, color="#222222", linestyle="--", label=f"step: {_seconds(step)}")
    lower.invert_yaxis()
    lower.set_xlabel(f"seconds needed per step; efficiency {result['efficiency']:.1%}")
    lower.legend(loc="lower right")
    figure.suptitle(result["sentence"], fontsize=9, wrap=True)


# -- the file -------------------------------------------------------------------------------


def read_trace(path: str) -> dict[str, Any]:
    """Return the content of a file that `infinity.trace` wrote. What is in it, `analyse` finds out.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise _not_a_trace(path, str(error)) from error
    about = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else "none of our own"
        raise _not_a_trace(path, f"format {found}")
    return dict(content)


def _not_a_trace(path: str, found: str) -> DataError:
    return DataError(
        f"{path!r} is no trace of infinity",
        expected=f"a file of `infinity train --trace` or `infinity.trace`, format {FORMAT}",
        found=found,
        cure="record one: infinity train --trace t.json",
    )
