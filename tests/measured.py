"""What a run really takes: anonymous memory of the process."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch


def anonymous_memory() -> int:
    """Return the bytes of anonymous memory that this process has in RAM (proc_pid_status(5))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


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
