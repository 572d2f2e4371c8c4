"""What commands show: what is being done, tables and warnings; and the files that they write.

An output is refused before anything is done if writing it would cost a file. An existing file is kept. With
``--overwrite`` it is replaced if it is what the same option of an earlier run wrote, and never if it is one
that this run reads. Of a symbolic link the file that it leads to is written. Pipes and devices are written to
as they are.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import stat
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

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

from infinity.core.errors import ConfigError
from infinity.core.sizes import format_size

_PAUSE = 5.0  # seconds from one line of progress to the next, where there is no terminal
_HEAD = 4096  # bytes that say what a file is


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


@contextlib.contextmanager
def status_line(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Lend what says on stderr what is being done: one line that changes on a terminal, plain lines
    elsewhere (also where TERM is dumb), unless `quiet`."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if console.is_interactive:
        with console.status("") as status:
            yield status.update
    else:
        yield (lambda text: None) if quiet else functools.partial(console.print, markup=False)


def seldom(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return what says how far something has come: as often as it is told to on a terminal, elsewhere a line
    in some seconds, and none before these are over."""
    if Console(stderr=True).is_interactive:
        return say
    last = time.monotonic()

    def now_and_then(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            say(text)

    return now_and_then


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


# ---- files ----


def check_outputs(
    outputs: Iterable[tuple[str, str | None, Callable[[bytes], bool]]],
    inputs: Iterable[str | os.PathLike[str]] = (),
    *,
    overwrite: bool | None = None,
) -> None:
    """Raise unless each output may be written.

    Args:
        outputs: option, path (None: not asked for), and whether the beginning of a file (bytes) is that
            of one which the option wrote.
        inputs: files that the command reads.
        overwrite: whether files of earlier runs are replaced; None: they are, there is no option for it.

    Raises:
        ConfigError: a file is there, is named twice, or cannot be made.
    """
    reads = {_identity(os.fspath(path)) for path in inputs}
    seen: dict[object, str] = {}
    for option, given, is_ours in outputs:
        if given is None:
            continue
        no = functools.partial(_refuse, option, given)
        if not given:
            no("the name of a file", "no name", f"name a file with {option}, or leave it out")
        path = os.path.expanduser(given)
        place = _identity(path) or os.path.realpath(path)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            found = None
        except OSError as error:
            no("a file that this user may write to", os.strerror(error.errno or 0))
        if found is not None and not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            continue
        if place in seen:
            no("a file of its own", f"the same as {seen[place]}")
        seen[place] = option
        if found is None:
            if os.path.islink(path):
                missing = f"a link to {os.path.realpath(path)!r}, which does not exist"
                cure = f"remove the link {path!r}, or name another file with {option}"
                no("a file, or a link to one", missing, cure)
            folder = os.path.dirname(os.path.abspath(path))
            if not os.access(folder, os.W_OK | os.X_OK):
                what = "no such directory" if not os.path.isdir(folder) else "no permission"
                with contextlib.suppress(OSError):
                    if os.statvfs(folder).f_flag & os.ST_RDONLY:
                        what = "a file system that is mounted read-only"
                no("a file in a directory that this user may write to", what)
        elif stat.S_ISDIR(found.st_mode):
            no("a file", "a directory")
        elif place in reads:
            no("a file that is only written", "a file that this run reads")
        elif found.st_size and not is_ours(_head(path)):
            no("a new file", f"a file of {found.st_size} bytes that {option} did not write")
        elif found.st_size and overwrite is False:
            cure = f"add --overwrite to replace it, or name another file with {option}"
            no("a new file", f"that of an earlier run, {found.st_size} bytes", cure)


def is_log(head: bytes) -> bool:
    """Return whether a file that begins so is a log of ``--json-log``."""
    return head.startswith(b'{"step": ') and b'"loss": ' in head


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _refuse(option: str, path: str, expected: str, found: str, cure: str | None = None) -> NoReturn:
    raise ConfigError(
        f"{option} {path!r} cannot be written",
        expected=expected,
        found=found,
        cure=cure or f"name another file with {option}",
    )
