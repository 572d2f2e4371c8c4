"""Files that a command is to write: refused before anything is done if that would cost a file.

An existing file is kept. With ``--overwrite`` it is replaced if it is what the same option of an earlier
run wrote, and never if it is one that this run reads. Of a symbolic link the file that it leads to is
written. Pipes and devices are written to as they are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from typing import NoReturn

from infinity.core.errors import ConfigError

_HEAD = 4096  # bytes that say what a file is


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
        if not given:
            _refuse(
                option, given, "the name of a file", "no name", f"name a file with {option}, or leave it out"
            )
        path = os.path.expanduser(given)
        place = _identity(path) or os.path.realpath(path)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            found = None
        except OSError as error:
            _refuse(option, given, "a file that this user may write to", os.strerror(error.errno or 0))
        if found is not None and not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            continue
        if place in seen:
            _refuse(option, given, "a file of its own", f"the same as {seen[place]}")
        seen[place] = option
        folder = os.path.dirname(os.path.abspath(path))
        if found is None:
            if os.path.islink(path):
                missing = f"a link to {os.path.realpath(path)!r}, which does not exist"
                cure = f"remove the link {path!r}, or name another file with {option}"
                _refuse(option, given, "a file, or a link to one", missing, cure)
            if not os.access(folder, os.W_OK | os.X_OK):
                what = "no such directory" if not os.path.isdir(folder) else "no permission"
                _refuse(option, given, "a file in a directory that this user may write to", what)
            continue
        if stat.S_ISDIR(found.st_mode):
            _refuse(option, given, "a file", "a directory")
        if place in reads:
            _refuse(option, given, "a file that is only written", "a file that this run reads")
        if found.st_size == 0:
            continue
        if not is_ours(_head(path)):
            _refuse(
                option, given, "a new file", f"a file of {found.st_size} bytes that {option} did not write"
            )
        if overwrite is False:
            cure = f"add --overwrite to replace it, or name another file with {option}"
            _refuse(option, given, "a new file", f"that of an earlier run, {found.st_size} bytes", cure)


def is_log(head: bytes) -> bool:
    """Return whether a file that begins so is a log of ``--json-log``."""
    return head.startswith(b'{"step": ') and b'"loss": ' in head


def is_plot(head: bytes) -> bool:
    """Return whether a file that begins so was drawn by matplotlib (a PDF says so at its end only)."""
    return b"atplotlib" in head


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
