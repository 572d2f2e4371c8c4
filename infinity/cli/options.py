"""Options that several commands have, and groups whose commands are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from infinity.core.errors import ConfigError
from infinity.core.paths import local_path
from infinity.core.sizes import parse_size

Decorator = Callable[[Any], Any]
json_option: Final = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
device_option: Final = click.option("--device", help="cpu, cuda or cuda:N. Default: cuda where there is one.")

#: Beyond these no figure of a plan would be a number any more.
_LEAST, _MOST = 1e-6, 1e9
FIGURE: Final = f"a number from {_LEAST:g} to {_MOST:g}"


def is_figure(value: object) -> bool:
    """Return whether `value` may be a rate of hardware, or what it is rated for: see `FIGURE`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _LEAST <= value <= _MOST  # type: ignore[operator]


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


def words_option(
    flag: str, variable: str, known: Sequence[str], text: str, *, what: str | None = None
) -> Decorator:
    """Return an option that takes `known` words: given again, or several at once with commas.

    A command that is given another one raises ConfigError, which says `what` is wrong.
    """

    def parse(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(_listed(values)))
        for word in words:
            if word not in known:
                close = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or known
                raise ConfigError(
                    what or f"unknown {flag}",
                    expected=", ".join(known),
                    found=repr(word),
                    cure=f"{flag} {close[0]}",
                )
        return words

    return click.option(flag, variable, multiple=True, callback=parse, help=text)


def numbers_option(flag: str, variable: str, text: str, *, size: bool = False) -> Decorator:
    """Return an option that takes numbers, or sizes in bytes, in the same way."""

    def parse(_: click.Context, __: click.Parameter, values: Sequence[str]) -> tuple[int, ...]:
        try:
            return tuple(parse_size(v, flag[2:]) if size else int(v) for v in _listed(values))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(
                f"{flag} is not a number", expected="4, or 4,16", found=", ".join(values), cure=f"{flag} 4"
            ) from error

    return click.option(flag, variable, multiple=True, callback=parse, help=text)


def _listed(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


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
