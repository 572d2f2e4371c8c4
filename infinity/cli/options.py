"""Options that several commands have, and groups whose commands are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from infinity.core.errors import ConfigError

json_option: Final = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
device_option: Final = click.option("--device", help="cpu, cuda or cuda:N. Default: cuda where there is one.")
directories_argument: Final = click.argument("directories", nargs=-1, required=True, metavar="DIR...")


def absolute(directories: Sequence[str]) -> list[str]:
    """Return the absolute paths of directories that were named, each once."""
    return list(dict.fromkeys(map(os.path.abspath, directories)))


def chosen(name: str, values: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the words of an option that may be given again, or several at once with commas.

    Raises:
        ConfigError: one is not among the `known` ones.
    """
    words = tuple(dict.fromkeys(listed(values)))
    for word in words:
        if word not in known:
            close = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or known
            raise ConfigError(
                f"unknown --{name}", expected=", ".join(known), found=repr(word), cure=f"--{name} {close[0]}"
            )
    return words


def listed(values: Sequence[str]) -> list[str]:
    """Return what such an option was given, one by one."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


class LazyGroup(click.Group):
    """A group of commands that are imported when they are asked for.

    Args:
        title: above their list in `--help`.
        table: name → (module, command in it, one line of help).
    """

    def __init__(
        self, *args: Any, title: str, table: Mapping[str, tuple[str, str, str]], **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._title, self._table = title, table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._table:
            return None
        module, attribute, _ = self._table[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them without importing them."""
        with formatter.section(self._title):
            formatter.write_dl([(name, line) for name, (_, _, line) in self._table.items()])
