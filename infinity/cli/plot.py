"""Plots of a plan and of the bandwidth of drives. They need matplotlib, the extra `plot`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from infinity.core.errors import ConfigError
from infinity.core.sizes import GiB, Tier, format_size
from infinity.planning.machine import Machine

_ENDINGS: Final = (".png", ".svg", ".pdf")
_MARK: Final = b"atplotlib"  # in every file that it has drawn


def _checked(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Return the path of a plot, or raise before anything is done if the plot cannot be drawn or written."""
    if path is None:
        return None

    def refuse(expected: str, found: str, cure: str = "--plot out.png") -> None:
        raise ConfigError(f"--plot {path!r} cannot be used", expected=expected, found=found, cure=cure)

    if importlib.util.find_spec("matplotlib") is None:
        cure = "pip install 'infinity-offload[plot]', or leave --plot out"
        refuse("matplotlib, an optional dependency", "it is not installed", cure)
    path = os.path.abspath(os.path.expanduser(path))
    if not path.endswith(_ENDINGS):
        refuse(f"a name that ends in {', '.join(_ENDINGS)}", os.path.basename(path))
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        refuse("a file in a directory that this user may write to", os.path.dirname(path))
    if os.path.lexists(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if _MARK in file.read():
                return path
        refuse("a new file, or an earlier plot", "a file that is no plot")
    return path


plot_option: Final = click.option(
    "--plot", metavar="FILE", callback=_checked, help="Draw the result, in a .png, .svg or .pdf file."
)


@contextlib.contextmanager
def figure_in(path: str, width: float, height: float) -> Iterator[Any]:
    """Lend a matplotlib figure of this size in inches; write it to `path`, whose ending names the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(width, height), layout="tight")
    FigureCanvasAgg(figure)
    yield figure
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_plan(path: str, result: Mapping[str, Any], machine: Machine) -> None:
    """Draw where the bytes of a plan lie, by tier and purpose, beside what the machine has, and the least
    time of a step by resource. `result` is what `infinity plan --json` prints."""
    budgets: dict[str, int | None] = {"device": machine.device_memory, "host": machine.host_memory}
    if machine.drives and all(drive.free is not None for drive in machine.drives):
        rooms = {drive.system: drive.free or 0 for drive in machine.drives}
        budgets["nvme"] = sum(rooms.values())
    bounds = sorted(result["bounds_seconds"].items(), key=lambda each: each[1])
    places = [[tier.value, "time"] if bounds else [tier.value] for tier in Tier]
    with figure_in(path, 12, 5) as figure:
        axes = figure.subplot_mosaic(places, width_ratios=(3, 2) if bounds else None)
        for tier in Tier:
            purposes = dict(result[tier.value])
            if tier is Tier.DEVICE:
                purposes["activations"] = result["activations"]["peak"]
            left, at = axes[tier.value], 0.0
            for purpose, nbytes in sorted(purposes.items(), key=lambda each: -each[1]):
                label = f"{purpose}: {format_size(nbytes)}"
                left.barh(0, nbytes / GiB, left=at, edgecolor="white", label=label)
                at += nbytes / GiB
            if (most := budgets.get(tier.value)) is not None:
                near = most / GiB < 3 * at  # else it would make all of the bar thin
                xs = [most / GiB] * 2 if near else []
                left.plot(xs, [-0.5, 0.5][: len(xs)], color="black", label=f"available: {format_size(most)}")
            left.set_yticks([0], [tier.value])
            left.set_xlabel("GiB")
            if left.get_legend_handles_labels()[0]:
                left.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
        if bounds:
            axes["time"].barh([name for name, _ in bounds], [seconds for _, seconds in bounds])
            axes["time"].set_xlabel("seconds of a step, at least")


def draw_io(path: str, result: Mapping[str, Any], needed: float | None) -> None:
    """Draw bandwidth by queue depth and block size.

    Args:
        result: what `infinity bench io --json` prints.
        needed: GB/s that a run needs: a line.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in result["cases"]:
        where = f", {', '.join(case['directories'])}" if len(result["directories"]) > 1 else ""
        name = f"{case['pattern']}, {case['backend']}, {format_size(case['block_bytes'])}{where}"
        lines.setdefault(name, []).append((case["queue_depth"], case["bytes_per_second"] / 1e9))
    with figure_in(path, 9, 5) as figure:
        axes = figure.subplots()
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        if needed is not None:
            axes.axhline(needed, color="black", linestyle="--", label=f"needed: {needed:g} GB/s")
        depths = sorted({case["queue_depth"] for case in result["cases"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, list(map(str, depths)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("queue depth")
        axes.set_ylabel("GB/s")
        axes.legend(fontsize=8, frameon=False)
