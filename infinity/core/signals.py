"""Signals that ask a process to end, or a run to save.

SIGTERM and SIGHUP end a process as Ctrl-C does: the process closes everything that it has open. If it has to
save first (`Asked`), SIGHUP and the first SIGTERM only ask for the save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterable
from types import FrameType
from typing import Any, Final

from .handlers import of_program

#: Signals that end a process.
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
#: Seconds in which a second SIGTERM is the first one by another way: whoever stops a job sends it to all of
#: its processes (systemd, `scancel`), and torchrun passes its own on to its ranks.
TOGETHER: Final = 1.0
#: Exit code of a run that a signal has ended after all was saved: EX_TEMPFAIL of sysexits.h, "try again".
SAVED: Final = 75


class Ended(KeyboardInterrupt, SystemExit):
    """A signal asks this process to end. `number`: which.

    What interrupts a wait takes it for a KeyboardInterrupt. Where nobody catches it, Python ends the process
    with `code`, and without a traceback: it would end a subclass of KeyboardInterrupt alone with 1.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.code = 128 + number


def end(number: int, frame: FrameType | None) -> None:
    """A handler that raises `Ended`, once."""
    for other in ENDING:  # a hang-up comes with a second one: it must not disturb the closing
        if of_program(other) is end:
            signal.signal(other, ignore)
    raise Ended(number)


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. SIG_IGN would make Python report a signal that arrived just before it was
    set."""


class Asked:
    """From `take` to `give_back`, signals only set attributes: SIGTERM and SIGHUP set `came` to the name of
    the first of them, and SIGUSR1 sets `save`. A second SIGTERM, after `TOGETHER`, raises `Ended`. A second
    SIGHUP does not, because a lost terminal sends several.
    """

    def __init__(self) -> None:
        self.came = ""
        self.save = False
        self._hung_up = False
        self._terminated = 0.0  # when, by SIGTERM
        self._before: dict[int, Any] = {}

    def take(self, also: Collection[Any] = ()) -> None:
        """Set the handlers, on the main thread; on other threads do nothing. A signal that the program
        ignores (nohup) or handles itself keeps its handler, unless the handler is in `also`."""
        if threading.current_thread() is threading.main_thread():
            for number in {*ENDING, signal.SIGUSR1} - self._before.keys():
                before = of_program(number)
                if before in (signal.SIG_DFL, end, ignore, *also):
                    self._before[number] = before
                    signal.signal(number, self._ask)

    def give_back(self, numbers: Iterable[int] = (*ENDING, signal.SIGUSR1)) -> None:
        """Restore the handlers. After a SIGHUP, ignore the next one: the process is about to end, and the
        signal must not disturb that. SIGUSR1 never becomes fatal again: a scheduler may send it late, to a
        run that has just saved all it has."""
        for number in self._before.keys() & set(numbers):
            before = self._before.pop(number)
            now = of_program(number)
            if number == signal.SIGHUP and now == self._ask and self._hung_up:
                signal.signal(number, ignore)
            elif now in (self._ask, end, ignore):
                late = number == signal.SIGUSR1 and before is signal.SIG_DFL
                signal.signal(number, ignore if late else before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        self.came = self.came or signal.Signals(number).name
        if number == signal.SIGHUP:
            self._hung_up = True
        elif not self._terminated:
            self._terminated = time.monotonic()
        elif time.monotonic() - self._terminated > TOGETHER:
            signal.signal(number, end)
            end(number, frame)
