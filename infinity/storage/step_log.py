"""The log of a run: a line with a JSON object for each step. A resumed run truncates it to its own steps."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from infinity.core.errors import DataError
from infinity.core.system_errors import cure, reason

#: How a log begins.
BEGINNING: Final = b'{"step": '


class StepLog:
    """A log that is open. Where the file takes no more, the log ends at a whole line, and `write` or `close`
    returns the error, once. `why`: what the system said then."""

    def __init__(self, path: str, after: int, option: str = "log=") -> None:
        """Open the log behind the lines of the first `after` steps; what else is in it goes.

        Args:
            option: what names the file, for messages.

        Raises:
            DataError: it cannot be written, or is another file than a log.
        """
        self.path = path
        self._option = option
        self._file, self._nbytes = self._open(after)
        self.why = ""
        self._steps = 0  # whose lines were written here

    def write(self, record: Mapping[str, Any]) -> DataError | None:
        """Write a line, which begins with the number of the step."""
        line = json.dumps(finite(record)).encode() + b"\n"
        if self._file.closed:
            return None
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
        except OSError as error:
            return self._lose(error)
        self._steps += 1
        self._nbytes += len(line)
        return None

    def close(self) -> DataError | None:
        """Close the file. Some file systems say only now that they had no room."""
        try:
            self._file.close()
        except OSError as error:
            return self._lose(error)
        return None

    def _open(self, after: int) -> tuple[BinaryIO, int]:
        """Return the file, open behind the lines that stay, and their bytes."""
        path = self.path
        try:
            if not os.path.exists(path):
                return open(path, "xb", buffering=0), 0
            if not os.path.isfile(path):
                # A pipe that nobody reads is an error, and no wait.
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.set_blocking(fd, True)
                return open(fd, "wb", buffering=0), 0
            kept = 0
            with open(path, "rb") as lines:
                head = lines.read(len(BEGINNING))
                lines.seek(0)
                if head == BEGINNING[: len(head)]:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        for line in lines:  # the last one may be a part of a line
                            if json.loads(line)["step"] > after or not line.endswith(b"\n"):
                                break
                            kept += len(line)
                    head = b""
            if head:
                raise DataError(
                    f"{path!r} is not the log of a run, and this run would overwrite it",
                    expected="a log, or a new file",
                    found=f"a file that begins with {head!r}",
                    cure=f"change {self._option}",
                )
            os.truncate(path, kept)
            return open(path, "ab", buffering=0), kept
        except OSError as error:
            raise DataError(
                f"the log {path!r} cannot be written",
                expected="a file in a directory that exists and has room",
                found="a pipe that nobody reads" if error.errno == errno.ENXIO else reason(error.errno),
                cure=f"change {self._option}",
            ) from error

    def _lose(self, error: OSError) -> DataError:
        """Cut the log back to whole lines, close it, and return why."""
        with contextlib.suppress(OSError):  # pipes and devices have no end to cut
            if not self._file.closed:
                os.ftruncate(self._file.fileno(), self._nbytes)
        with contextlib.suppress(OSError):
            self._file.close()
        self.why = reason(error.errno)
        return DataError(
            f"the log {self.path!r} is not complete",
            expected="a line for each step",
            found=f"{self.why}, after {self._steps} steps",
            cure=cure(error.errno, "make room") + f", or name another file with {self._option}",
        )


def finite(value: Any) -> Any:
    """Return `value` with None for each number that JSON does not have (NaN, infinities)."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
