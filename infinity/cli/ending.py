"""How a command ends when somebody ends it: SIGTERM and SIGHUP do it as Ctrl-C does."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Final

from infinity.core.signals import ENDING, Ended, end, ignore

#: Seconds until a signal whose exception was lost is sent again: a finalizer has ended by then.
_AGAIN: Final = 0.05


def end_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP end this process. One that is ignored (nohup) or handled stays so.

    Until `close_on_signals` at once: nothing is open yet, and an exception amid the imports of others would
    become one of theirs.
    """
    for number in (*ENDING, signal.SIGINT):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end_at_once)


def close_on_signals() -> None:
    """From now on they raise `Ended`, once; Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ENDING:
        if signal.getsignal(number) is _end_at_once:
            signal.signal(number, end)
    if not _sends_again():
        sys.unraisablehook = functools.partial(_send_again, sys.unraisablehook)


def _sends_again() -> bool:
    return getattr(sys.unraisablehook, "func", None) is _send_again


def _send_again(inner: Any, found: Any) -> None:
    """A hook for exceptions that Python cannot raise. `Ended` in a finalizer (torch has some) is one: without
    this the signal would be lost, and those that follow are ignored."""
    if not isinstance(error := found.exc_value, Ended):
        inner(found)
        return
    signal.signal(error.number, end)
    again = threading.Timer(_AGAIN, os.kill, (os.getpid(), error.number))
    again.daemon = True
    again.start()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(say_ended(Ended(number) if number in ENDING else None))


def say_ended(error: BaseException | None) -> int:
    """Say on stderr what ended the command; return its exit code."""
    number = error.number if isinstance(error, Ended) else signal.SIGINT
    text = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    with contextlib.suppress(OSError):  # a terminal that has hung up hears nothing
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    return 128 + number


def leave_signals() -> None:
    """Have signals end the process as they do any other: nothing is open any more."""
    for number in (*ENDING, signal.SIGINT):
        if signal.getsignal(number) in (_end_at_once, end, ignore):
            signal.signal(number, signal.SIG_DFL)
    if _sends_again():
        sys.unraisablehook = sys.unraisablehook.args[0]  # type: ignore[attr-defined]
