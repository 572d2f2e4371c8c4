"""How a command ends when somebody ends it.

SIGTERM and SIGHUP end a command as Ctrl-C does: what it has open is closed, and nothing stays behind. Where
there is something to be saved first (`AfterThis`), SIGHUP and the first SIGTERM only ask for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final

from .streams import hang_up

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
#: Their names.
SIGNALS: Final = tuple(number.name for number in _SIGNALS)
#: Exit code of a run that a signal has ended after all was saved: EX_TEMPFAIL of sysexits.h, "try again".
SAVED: Final = 75


#: The signal that came: what an import or a library makes of its exception does not tell.
_came: list[Ended] = []


class Ended(KeyboardInterrupt):
    """A signal asks this process to end. `number`: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Quiet(Exception):
    """This process ends with exit code `code`; why, another one says."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def ignore_signals() -> None:
    """From now on SIGTERM and SIGHUP, which come to all ranks of a job, disturb no end that is under way."""
    for number in _SIGNALS:
        if signal.getsignal(number) in (_end_at_once, _end, _ignore):
            signal.signal(number, signal.SIG_IGN)


def end_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP end this process. One that is ignored (nohup) or handled stays so.

    Until `close_on_signals` at once: nothing is open yet, and an exception amid the imports of others would
    become one of theirs.
    """
    for number in (*_SIGNALS, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end_at_once)


def close_on_signals() -> None:
    """From now on they raise `Ended`, once; Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _SIGNALS:
        if signal.getsignal(number) is _end_at_once:
            signal.signal(number, _end)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(say_ended(Ended(number) if number in _SIGNALS else None))


def _end(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:  # a hang-up comes with a second one: it must not disturb the closing
        if signal.getsignal(other) is _end:
            signal.signal(other, _ignore)
    _came.append(Ended(number))
    raise _came[0]


class AfterThis:
    """A `with` block in which SIGTERM and SIGHUP only set `asked`, to the name of what came first, if that is
    `wanted`. A second SIGTERM ends the command. SIGHUP never does: a terminal that is lost sends several."""

    def __init__(self, wanted: bool) -> None:
        self.asked = ""
        self._wanted = wanted

    def __enter__(self) -> AfterThis:
        if self._wanted and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is _end:
                    signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) == self._ask:
                late = self.asked and number == signal.SIGHUP  # what is left to say ends soon
                signal.signal(number, _ignore if late else _end)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
        if number == signal.SIGHUP:
            hang_up()
        else:
            signal.signal(number, _end)


def ended() -> Ended | None:
    """Return the signal that has come, if one has."""
    return _came[0] if _came else None


def _ignore(number: int, frame: FrameType | None) -> None:
    """Python complains of a signal that came just before it is ignored; of this one it does not."""


def say_ended(error: BaseException | None) -> int:
    """Say on stderr what ended the command; return its exit code: 128 + the signal's number."""
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    text = f"ended by {signal.Signals(number).name}" if isinstance(error, Ended) else "interrupted"
    with contextlib.suppress(OSError):  # a terminal that has hung up hears nothing
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    return 128 + number


def leave_signals() -> None:
    """Have signals end the process as they do any other: nothing is open any more."""
    for number in (*_SIGNALS, signal.SIGINT):
        if signal.getsignal(number) in (_end_at_once, _end, _ignore):
            signal.signal(number, signal.SIG_DFL)
