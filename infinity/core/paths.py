"""Paths that a user gives: of this machine, and with "~" for the user's directory."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import Final

from .errors import ConfigError

_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def local_path(path: str, what: str, example: str) -> str:
    """Return a path with the user's directory in the place of a "~" at its begin.

    Raises:
        ConfigError: it is an address, such as s3://bucket/x. The error says `what` names it, and that a path
            like `example` is right.
    """
    address = _ADDRESS.match(path)
    if address is None:
        return os.path.expanduser(path)
    parts = urllib.parse.urlsplit(path)
    file = parts.scheme.lower() == "file" and parts.netloc in ("", "localhost") and parts.path
    raise ConfigError(
        f"{what} is an address, and the engine reads and writes files of this machine only",
        expected="a path on a file system of this machine",
        found=repr(path),
        cure=f"the path {urllib.parse.unquote(parts.path)!r}"
        if file
        else f"a path, such as {example!r}; copy the files from the address or to it by yourself",
    )
