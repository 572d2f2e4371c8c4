"""stdout and stderr: how a command speaks on a terminal with few characters, and goes on when nobody hears.

A reader that ends (`| head`), a log on a full file system, a terminal that hangs up: each makes every later
write fail. stderr never ends a command. stdout does, as of `plan | head`.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from typing import Any, Final, TextIO

#: What stands for the characters that we print, where the terminal has them not.
_PLAIN: Final = str.maketrans(
    {"×": "x", "–": "-", "−": "-", "÷": "/", "µ": "u", "≥": ">=", "…": "...", "→": "->", "█": "#", "•": "*"}
)
#: Exit code of a command whose reader has gone: what a shell reports for SIGPIPE.
_BROKEN_PIPE: Final = 141
_NAMES: Final = ("stdout", "stderr")


class _Lasting(io.RawIOBase):
    """The descriptor of a stream. `lost`: why it takes no more, if a write has failed that ends nothing."""

    def __init__(self, fd: int, ends: bool) -> None:
        super().__init__()
        self._fd = fd
        self.ends = ends
        self.lost: OSError | None = None

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, or drop it."""
        left = memoryview(data).cast("B")
        nbytes = len(left)
        while left and self.lost is None:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # a pipe that somebody has made non-blocking: its reader is slow
                there = select.poll()
                there.register(self._fd, select.POLLOUT)
                there.poll()
            except OSError as error:
                if self.ends and not isinstance(error, BrokenPipeError):
                    raise
                self.lost = error
                if self.ends:  # rich would make exit code 1 of it
                    raise SystemExit(_BROKEN_PIPE) from error
        return nbytes


_lasting: dict[str, _Lasting] = {}


def take_streams() -> None:
    """Have stdout and stderr take every character, and stderr end nothing. Once, as the process begins.

    A standard descriptor that was closed (``>&-``) leads nowhere from now on. A file of ours would have its
    number, and what a library writes to its stderr would land in that file.
    """
    codecs.register_error("infinity", _in_other_words)
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in _NAMES:
        stream: TextIO | None = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and name not in _lasting:
            raw = _lasting[name] = _Lasting(stream.fileno(), ends=name == "stdout")
            # A raw stream has what TextIOWrapper asks for: each of its writes takes all.
            inner: Any = raw if stream.write_through else io.BufferedWriter(raw)
            taken = io.TextIOWrapper(
                inner,
                encoding=stream.encoding,
                errors="infinity",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, taken)


def _in_other_words(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError):
        words = error.object[error.start : error.end].translate(_PLAIN)
        return words.encode("ascii", "backslashreplace"), error.end
    raise error


def let_go_of_streams() -> bool:
    """Write out what stdout and stderr still hold, at the end; return whether that could be done. If not, it
    is dropped: Python would end with another exit code."""
    written = True
    for name in _NAMES:
        stream: TextIO | None = getattr(sys, name)
        try:
            if stream is not None:  # closed before the start
                stream.flush()
        except OSError as error:
            written = False
            if name in _lasting:
                _lasting[name].lost = error
    return written
