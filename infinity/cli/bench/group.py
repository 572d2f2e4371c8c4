"""`infinity bench`: the group of measurements. A measurement's module is imported when it is used."""

from __future__ import annotations

from typing import Final

import click

from infinity.cli.options import LazyGroup

#: name → (module of its command, one line of help). A new measurement is one more line.
BENCHES: Final[dict[str, tuple[str, str]]] = {
    "io": ("infinity.cli.bench.io", "What drives can do, as the engine uses them."),
    "link": ("infinity.cli.bench.link", "Copies between host and device."),
    "adam": ("infinity.cli.bench.adam", "The CPU's Adam, beside what memory allows."),
    "step": ("infinity.cli.bench.step", "Whole steps: placements and update modes."),
}


@click.group("bench", cls=LazyGroup, title="Measurements", table=BENCHES)
def bench_command() -> None:
    """Measure this machine as the engine uses it: a part of it, or whole steps."""
