"""Ctrl-C in a backward that autograd runs on threads of its own.

[Note: a deaf main thread] On a CUDA device, hooks run on autograd's threads, and the main thread is in C++
until the backward ends. Python runs no signal handler meanwhile, and a wait for a drive that no longer
answers would last for the drive's deadline. CPython's C handler writes the number of each signal to the
descriptor of `signal.set_wakeup_fd`, whatever the main thread does. So a wait on one of autograd's threads
reads the descriptor, and raises KeyboardInterrupt in place of the main thread; autograd passes the exception
on. The engine does this only in a long wait: a backward that goes on ends by itself, and then the main thread
runs the handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Final

import torch

from infinity.core import waiting

#: Seconds that a wait lasts before it is one that an interrupt ends.
PATIENCE: Final = 0.5


class _Heard:
    """The signals that came in the backward that is under way, and since when a thread of it waits."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._task = -1
        self._interrupted = False
        self._bell: waiting.Bell | None = None
        self._since = self._seen = 0.0

    def look(self, bell: waiting.Bell) -> None:
        """A thread is about to wait for `bell`, or goes on to."""
        task = torch._C._current_graph_task_id()
        if task == -1 or threading.current_thread() is threading.main_thread():
            return
        came = b""
        with contextlib.suppress(BlockingIOError):
            came = os.read(self._read, 4096)
        now = time.monotonic()
        if task != self._task:  # what came before it is the main thread's
            self._task, self._interrupted = task, False
        elif signal.SIGINT in came:
            self._interrupted = True
        if bell is not self._bell or now - self._seen > 3 * waiting.POLL:
            self._bell, self._since = bell, now
        self._seen = now
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._interrupted and default and now - self._since > PATIENCE:
            self._interrupted = False
            raise KeyboardInterrupt


_heard: _Heard | None = None


def hear_in_backwards() -> None:
    """Make waits of autograd's threads handle Ctrl-C from now on. Does nothing if the program has a wakeup
    descriptor of its own, and on other threads than the main one."""
    global _heard
    if threading.current_thread() is not threading.main_thread():
        return
    if _heard is None:
        _heard = _Heard()
    before = signal.set_wakeup_fd(_heard.write, warn_on_full_buffer=False)
    if before in (-1, _heard.write):
        waiting.look = _heard.look
    else:
        signal.set_wakeup_fd(before)


def _after_fork() -> None:
    """A child's signals are not its parent's."""
    global _heard
    if _heard is not None:
        with contextlib.suppress(ValueError):
            if (before := signal.set_wakeup_fd(-1)) != _heard.write:
                signal.set_wakeup_fd(before)
        waiting.look = _heard = None


os.register_at_fork(after_in_child=_after_fork)
