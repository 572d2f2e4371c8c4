"""`infinity bench`: the group of measurements. A measurement's module is imported when it is used."""

from __future__ import annotations

import click

from infinity.cli.options import LazyGroup


@click.group(
    "bench",
    cls=LazyGroup,
    title="Measurements",
    table={"io": ("infinity.cli.bench.io", "What drives can do, as the engine uses them.")},
)
def bench_command() -> None:
    """Measure this machine as the engine uses it."""
