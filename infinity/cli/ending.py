"""How a command ends when somebody ends it, and how it speaks to a terminal with few characters."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any


def begin() -> None:
    """Prepare this process for a command: its streams take every character, a reader that goes away ends it
    (SIGPIPE), and Ctrl-C ends it at once, until `close_on_signals`: an exception amid the imports of others
    would become one of theirs.

    A standard descriptor that was closed (``>&-``) leads nowhere from now on. A file of ours would have its
    number, and what a library writes to its stderr would land in that file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    streams: tuple[Any, ...] = sys.stdout, sys.stderr
    for stream in streams:
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def close_on_signals() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, and SIGTERM raises SystemExit: what is open is closed."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
