"""What signals and the clock want of a run: that it is saved, or ends; on all of its ranks alike."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from infinity.core.signals import Asked

from .engine import Engine
from .together import agree


class Wanted(Asked):
    """What is wanted of the run of an engine. `minutes`: between two saves, if the clock wants any.

    `came` is the signal that this process has had, `end` the one that all ranks know of.
    """

    def __init__(self, engine: Engine, minutes: float | None) -> None:
        super().__init__()
        self.end = ""
        self._engine = engine
        self._minutes = minutes
        self._saved_at = time.monotonic()

    def agreed(self, due: bool = False) -> tuple[str, bool]:
        """Return the signal that ends the run, if one has reached any rank, and whether to save now, as is
        `due` or as a signal or the clock of any rank wants it. Collective."""
        engine = self._engine
        late = self._minutes is not None and time.monotonic() - self._saved_at >= 60 * self._minutes
        due = due or self.save or late
        told: list[Any] = [[self.came, due]]  # what comes from here on, the next call tells
        if engine.comm.world > 1:
            told = engine.shelter.run(lambda: agree(engine.comm, "the end of a step", *told))
        self.end, due = next((end for end, _ in told if end), ""), any(due for _, due in told)
        self.came = self.came or self.end
        if due or self.end:
            self.save, self._saved_at = False, time.monotonic()
        return self.end, due

    def pass_on(self) -> None:
        """Send a signal again that came when the ranks had agreed for the last time. After `give_back` it
        does what it does without a run."""
        if self.came and not self.end:
            os.kill(os.getpid(), signal.Signals[self.came])
