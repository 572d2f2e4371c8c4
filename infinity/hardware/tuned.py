"""The results of `infinity tune` for each drive, in one JSON file, for rings set to ``auto``.

The file is ``$XDG_CONFIG_HOME/infinity/tuned.json`` (``~/.config/infinity/tuned.json``). An entry
belongs to a drive and a file system on it, not to a directory. An entry is advice: its backend worked
at the time of the measurement, and the engine tries it again before it uses it. A file that is damaged, or
that a later version wrote, counts as empty.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from infinity.core.config import MOST_BLOCK_BYTES, MOST_QUEUE_DEPTH
from infinity.core.sizes import ALIGNMENT

from .probe import drive_of, mount_of

VERSION: Final = 1
_LARGEST: Final = {"block_bytes": MOST_BLOCK_BYTES, "queue_depth": MOST_QUEUE_DEPTH, "threads": 256}
_log = logging.getLogger("infinity.tuned")


class TunedSettings(NamedTuple):
    """The arguments of a `Ring` that suit a drive.

    `block_bytes` is a multiple of 4096; `threads` matters to the backend ``threads`` alone.
    """

    block_bytes: int
    queue_depth: int
    backend: str
    threads: int


def settings_file() -> Path:
    """Return where the settings are kept; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base, "infinity", "tuned.json")


def drive_key(path: str) -> str:
    """Return the name under which the drive below `path`, with its file system, is remembered.

    A drive with a serial number keeps its settings when the kernel numbers it differently.

    Raises:
        OSError: there is nothing at `path`.
    """
    drive, mount = drive_of(path), mount_of(path)
    filesystem = mount.filesystem if mount is not None else "unknown"
    if drive is None:
        return f"{mount.source if mount is not None else os.stat(path).st_dev}|{filesystem}"
    place = drive.serial or f"{drive.name} {drive.number}"
    return "|".join((drive.model or "drive", place, filesystem))


def tuned(path: str | None) -> TunedSettings | None:
    """Return what was found for the drive below `path`, or None. Never raises.

    Args:
        path: a directory; None: no directory, so None.
    """
    if path is None:
        return None
    try:
        entry = entries().get(drive_key(path))
    except OSError:
        return None
    if entry is None:
        return None
    found = parse(entry)
    if found is None:
        _log.warning("%s: the settings for %s are damaged; run `infinity tune` again", settings_file(), path)
    return found


def bandwidths(paths: Sequence[str]) -> list[float] | None:
    """Return bytes per second of the mixed traffic that `infinity tune` measured on the drive below
    each of `paths`; None unless it has measured them all."""
    found = []
    for path in paths:
        try:
            entry: Any = entries().get(drive_key(path))
        except OSError:
            return None
        measured = entry.get("measured") if parse(entry) is not None else None
        value: Any = measured.get("score_bytes_per_second") if isinstance(measured, dict) else None
        if type(value) not in (int, float) or not 1e4 < value < 1e14:
            return None
        found.append(float(value))
    return found


def entries() -> dict[str, Any]:
    """Return drive key → entry; nothing if there is no file, or none that can be used."""
    file = settings_file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be read (%s) and counts as empty", file, error)
        return {}
    if not isinstance(content, dict) or content.get("version") != VERSION:
        _log.warning("%s is of another version and counts as empty", file)
        return {}
    drives = content.get("drives")
    return drives if isinstance(drives, dict) else {}


def parse(entry: object) -> TunedSettings | None:
    """Return the settings of an entry; None: it is damaged."""
    if not isinstance(entry, dict):
        return None
    values = [entry.get(name) for name in _LARGEST]
    in_range = zip(values, _LARGEST.values(), strict=True)
    if not all(type(value) is int and 0 < value <= most for value, most in in_range):
        return None
    if entry["block_bytes"] % ALIGNMENT or not isinstance(entry.get("backend"), str):
        return None
    return TunedSettings(entry["block_bytes"], entry["queue_depth"], entry["backend"], entry["threads"])
