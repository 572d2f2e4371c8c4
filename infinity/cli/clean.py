"""`infinity clean`: removes what killed runs have left in a directory, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import click

from infinity.core.errors import DirectoryError
from infinity.core.sizes import format_size
from infinity.storage.leftovers import Leftover, arenas

from .console import finish
from .options import directories_argument, json_option

_SAID = {"dead": "removed", "live": "kept: a run has it", "foreign": "kept"}


@click.command("clean")
@directories_argument()
@json_option
def clean_command(directories: tuple[str, ...], as_json: bool) -> None:
    """Remove the arenas that killed runs have left in each DIR.

    An arena that a run has, and whatever else is there, stays. The next run would take the space of what is
    removed here by itself.
    """
    found = [each for directory in directories for each in clean(directory)]
    rows = [
        {"path": each.path, "bytes": each.nbytes, "removed": each.state == "dead", "why": each.why}
        for each in found
    ]
    finish({"arenas": rows}, lambda _: show(found), as_json=as_json)


def show(found: Sequence[Leftover]) -> None:
    """Print for a person what was found."""
    for each in found:
        why = f": {each.why}" if each.why else ""
        click.echo(f"{each.path}, {format_size(each.nbytes)}: {_SAID[each.state]}{why}")
    if not any(each.state == "dead" for each in found):
        click.echo("nothing to remove")


def clean(directory: str) -> list[Leftover]:
    """Remove the dead arenas in `directory`; return everything there that has an arena's name.

    Raises:
        DirectoryError: the directory is missing, closed to this user or read-only.
    """
    try:
        return arenas(directory, remove=True)
    except OSError as error:
        cures = {
            errno.ENOENT: "correct the path",
            errno.ENOTDIR: "name the directory that a run was given",
            errno.EROFS: "mount the file system read-write",
        }
        raise DirectoryError(
            f"{directory} cannot be cleaned",
            errno=error.errno,
            path=directory,
            expected="a directory that runs were given, and permission to remove their arenas",
            found=os.strerror(error.errno or 0),
            cure=cures.get(error.errno or 0, "run it as the user whose run was killed"),
        ) from error
