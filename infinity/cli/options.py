"""Options that several commands have, and groups whose commands are imported when they are used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from infinity.core.errors import ConfigError
from infinity.core.paths import local_path

Decorator = Callable[[Any], Any]
json_option: Final = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
device_option: Final = click.option("--device", help="cpu, cuda or cuda:N. Default: cuda where there is one.")


def named(_: click.Context, parameter: click.Parameter, path: str) -> str:
    """Return the directory that an argument names; its callback."""
    if not path:  # such as an unset "$DIR"; it would be the current one
        raise ConfigError(
            f"{parameter.human_readable_name.strip('[.]')} names no directory",
            expected="a path",
            found="''",
            cure="name the directory; '.' is this one",
        )
    return local_path(path, parameter.human_readable_name.strip("[.]"), "/mnt/nvme/run1")


def _absolute(
    context: click.Context, parameter: click.Parameter, directories: Sequence[str]
) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.abspath(named(context, parameter, path)) for path in directories))


def directories_argument(*, required: bool = True) -> Decorator:
    """Return the argument DIR...: absolute paths, each once."""
    metavar = "DIR..." if required else "[DIR...]"
    return click.argument("directories", nargs=-1, required=required, metavar=metavar, callback=_absolute)


def several(of: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the callback of an option that takes values of a type, with commas between them."""
    kind: Any = click.types.convert_type(of)

    def parse(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Any, ...]:
        parts = [part.strip() for part in (text or "").split(",") if part.strip()]
        return tuple(dict.fromkeys(kind.convert(part, parameter, context) for part in parts))

    return parse


class LazyGroup(click.Group):
    """A group of commands that are imported when they are asked for.

    Args:
        title: above their list in `--help`.
        table: name → (module, one line of help). In a module the command `a-b` is called `a_b_command`.
    """

    def __init__(self, *args: Any, title: str, table: Mapping[str, tuple[str, str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self._title, self._table = title, table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._table:
            return None
        module, _ = self._table[cmd_name]
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(module), f"{name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List them without importing them."""
        with formatter.section(self._title):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])
