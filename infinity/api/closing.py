"""The thread that closes an engine that the program has not closed. It does nothing else.

[Note: finalizers only signal] The last reference to a model can go in any thread, also in one of the engine's
own (a task's closure, or the garbage collector that happens to run there). `close` waits for those
threads, so a finalizer that closed the engine would wait for its own thread. It puts one word into a queue
instead, and takes no lock that a waiting thread holds. The engine's reaper reads the word and closes the
engine. The next `wrap` waits for running reapers, so that their directories and memory are free again. So
does the end of the program, for engines that are still open.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final

from infinity.core.at_exit import arm
from infinity.core.sizes import MiB
from infinity.core.threads import start
from infinity.hardware.device import POLL
from infinity.storage.interrupt import before_exit

_log = logging.getLogger("infinity.api")


class Reaper:
    """Calls `shut_down` once: in `close`, or on a thread of its own when `owner` is garbage.

    Args:
        shut_down: holds no reference to `owner`; may wait.
        nbytes: bytes that `owner` may hold until it is garbage, also when it is closed.
    """

    def __init__(self, owner: object, shut_down: Callable[[], None], nbytes: int) -> None:
        _held[owner] = nbytes
        self._shut_down = shut_down
        self._pid = os.getpid()
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="infinity-reaper", daemon=True)
        start(self._thread)
        # SimpleQueue.put may be called from a finalizer, whatever the thread is in the middle of.
        self._finalizer = weakref.finalize(owner, self._signals.put, True)
        self._finalizer.atexit = False  # `_finish` sees to it
        _reapers.add(self)
        arm()

    def close(self) -> None:
        """Shut down on this thread, and end the reaper's; raise what went wrong."""
        try:
            self._shut_down()
        finally:
            self._signals.put(False)
            self._finalizer.detach()
            self._join()

    def _serve(self) -> None:
        try:
            if self._signals.get():
                self._shut_down()
        except Exception as error:  # there is nobody whom it could be raised to
            _log.error("a model that was dropped without infinity.close(): %s", error)
        finally:
            del self._shut_down
            _reapers.discard(self)

    def _join(self) -> None:
        while self._thread.is_alive() and self._pid == os.getpid():
            self._thread.join(POLL)


_reapers: set[Reaper] = set()
_held: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
_MUCH: Final = 16 * MiB  # a collector takes a tenth of a second


def wait_for_dropped() -> None:
    """Block until the engines of models that were dropped without `close` are closed, also of those that only
    a collector of cycles finds: with an error's frames, say. Has it look for closed ones where they may hold
    much: their models' parameters."""
    if _reapers or sum(_held.values()) > _MUCH:
        gc.collect()
    for reaper in _reapers.copy():
        if not reaper._finalizer.alive:
            reaper._join()


def _finish() -> None:
    """The program ends: close what was not closed."""
    ours = [reaper for reaper in _reapers.copy() if reaper._pid == os.getpid()]
    for reaper in ours:
        reaper._signals.put(True)
    for reaper in ours:
        reaper._join()


before_exit(_finish)
