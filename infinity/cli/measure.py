"""What a run really takes: anonymous memory of the process, and bytes on disk; and where it may scribble."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

_M_MMAP_THRESHOLD: Final = -3


def anonymous_memory() -> int:
    """Return the bytes of anonymous memory that this process has in RAM (proc_pid_status(5))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def give_back_freed_memory() -> None:
    """Have glibc's malloc map every large block for itself, so that freeing one gives it back.

    By itself the threshold for that rises to 32 MiB as blocks are freed (mallopt(3)); activations
    then live on the heap, whose holes are memory that no plan knows of: measured, twice the plan.
    Nothing happens with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 128 * 1024)


def bytes_on_disk(directories: Sequence[str]) -> int:
    """Return the bytes that files below `directories` take on their drives, and files of this process there
    that have no name."""
    roots = [os.path.realpath(directory) for directory in directories]
    found: dict[tuple[int, int], int] = {}
    for root in roots:
        for folder, _, files in os.walk(root):
            for name in files:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    each = os.lstat(os.path.join(folder, name))
                    found[each.st_dev, each.st_ino] = each.st_blocks * 512
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            each = link.stat()
            path = os.readlink(link)
            if stat.S_ISREG(each.st_mode) and any(path.startswith(os.path.join(root, "")) for root in roots):
                found[each.st_dev, each.st_ino] = each.st_blocks * 512
    return sum(found.values())


def scratch(directory: str) -> tempfile.TemporaryDirectory[str]:
    """Lend a directory of its own in `directory`; it is removed afterwards, whatever it holds."""
    return tempfile.TemporaryDirectory(prefix="infinity-", dir=directory, ignore_cleanup_errors=True)


class Peak:
    """Samples anonymous memory on a thread of its own; `nbytes` is the most over the start.

    On a CUDA device `device_nbytes` is the most that torch's allocator has handed out.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._start = anonymous_memory()
        self._most = self._start
        self._thread = threading.Thread(target=self._sample, name="infinity-memory", daemon=True)

    def __enter__(self) -> Peak:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    @property
    def nbytes(self) -> int:
        """Bytes, so far."""
        self._most = max(self._most, anonymous_memory())
        return self._most - self._start

    @property
    def device_nbytes(self) -> int | None:
        """Bytes on the CUDA device, so far; None without one."""
        return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            with contextlib.suppress(OSError):  # no descriptor is left for it: the next look may have one
                self._most = max(self._most, anonymous_memory())
