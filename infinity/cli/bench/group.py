"""`infinity bench`: the group of measurements. A measurement's module is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Final

import click

#: name → (module, command in it, one line of help). A new measurement is one more line.
BENCHES: Final[dict[str, tuple[str, str, str]]] = {
    "io": ("infinity.cli.bench.io", "io_command", "What drives can do, as the engine uses them."),
    "link": ("infinity.cli.bench.link", "link_command", "Copies between host and device."),
    "adam": ("infinity.cli.bench.adam", "adam_command", "The CPU's Adam, beside what memory allows."),
    "step": ("infinity.cli.bench.step", "step_command", "Whole steps: placements, modes, peers."),
}


class _Benches(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a measurement."""
        if cmd_name not in BENCHES:
            return None
        module, attribute, _ = BENCHES[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them without importing them."""
        with formatter.section("Measurements"):
            formatter.write_dl([(name, line) for name, (_, _, line) in BENCHES.items()])


@click.group("bench", cls=_Benches)
def bench_group() -> None:
    """Measure this machine as the engine uses it: a part of it, or whole steps."""
