"""Requests of signals and the clock to a run: to save or to stop; the same on all ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from infinity.core.errors import ConfigError
from infinity.core.signals import Asked

from .engine import Engine
from .together import agree


def check_minutes(save_minutes: object) -> None:
    """Raise `ConfigError` unless the minutes between two saves are None or a number ≥ 0."""
    right = isinstance(save_minutes, (int, float)) and type(save_minutes) is not bool and save_minutes >= 0
    if save_minutes is not None and not right:
        raise ConfigError(
            f"save_minutes={save_minutes!r} is not valid",
            expected="None, or a number ≥ 0",
            cure="save_minutes=30",
        )


class Wanted(Asked):
    """The requests to the run of an engine. `minutes`: time between two saves; None: the clock requests none.

    `came` is the signal that this process has received, `end` the signal that all ranks know.
    """

    def __init__(self, engine: Engine, minutes: float | None) -> None:
        super().__init__()
        self.end = ""
        self._engine = engine
        self._minutes = minutes
        self._saved_at = time.monotonic()

    def agreed(self, due: bool = False) -> tuple[str, bool]:
        """Return the signal that ends the run, if any rank has received one, and whether to save now: because
        a save is `due`, or because of a signal or the clock on any rank. Collective."""
        engine = self._engine
        late = self._minutes is not None and time.monotonic() - self._saved_at >= 60 * self._minutes
        due = due or self.save or late
        told: list[Any] = [[self.came, due]]  # what comes from here on, the next call tells
        if engine.comm.world > 1:
            told = engine.commits.run(lambda: agree(engine.comm, "the end of a step", *told))
        self.end, due = next((end for end, _ in told if end), ""), any(due for _, due in told)
        self.came = self.came or self.end
        if due or self.end:
            self.save, self._saved_at = False, time.monotonic()
        return self.end, due

    def pass_on(self) -> None:
        """Send a signal again that arrived after the ranks had agreed for the last time. After `give_back` it
        does what it does without a run."""
        if self.came and not self.end:
            os.kill(os.getpid(), signal.Signals[self.came])
