"""The loop that moves data: it reads the next items ahead, and closes those behind when they are written."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar


class Opened(Protocol):
    """What holds the memory of one item, from its read to the end of its writes."""

    def close(self, *, wait: bool = True) -> bool:
        """Let go of the memory when nothing is under way, and return True; return False where that is not so
        yet. `wait`: until it is."""


_Item = TypeVar("_Item")
_IO = TypeVar("_IO", bound=Opened)


def pipeline(
    items: Iterator[_Item] | Callable[[bool], _Item | None],
    open_: Callable[[_Item, bool], _IO | None],
    read: Callable[[_Item, _IO], None] | None = None,
    *,
    closing: deque[_IO] | None = None,
    keep: bool = False,
    most: int = 1 << 30,
) -> Generator[tuple[_Item, _IO]]:
    """Yield each item with what is open for it. The caller waits for its reads, works, and begins its writes;
    meanwhile the next items are read, and those before it are written. After an error, and where the caller
    breaks off, all that is open is closed.

    Args:
        items: an iterator; or what returns the next item, None: there is none. Its argument: wait, until
            there is one or never will be; nothing is open then.
        open_: returns the memory of an item; None: there is none now. Its argument: wait for it; nothing is
            open then, so that nothing of this loop could come home. Or it raises.
        read: starts the reads of an item that was opened; None: that has done it.
        closing: what was worked on, oldest first; None: a deque of its own. It is empty at the end, unless
            that `keep`s what is left.
        most: items that are read ahead, or written behind.
    """
    opened: deque[tuple[_Item, _IO]] = deque()
    closing = deque() if closing is None else closing
    item: _Item | None = None
    try:
        while True:
            while closing and closing[0].close(wait=len(closing) > most):
                closing.popleft()  # not before: what has no memory for its end is given up with the rest
            while len(opened) < most:
                if item is None:
                    item = items(False) if callable(items) else next(items, None)
                io = None if item is None else open_(item, not (opened or closing))
                if item is None or io is None:
                    break
                opened.append((item, io))
                if read is not None:
                    read(item, io)
                item = None
            if opened:
                now, io = opened.popleft()
                closing.append(io)
                yield now, io
            elif closing and not (keep and item is None):
                closing[0].close()
                closing.popleft()
            elif item is None and (not callable(items) or (item := items(True)) is None):
                return
    except BaseException:
        while closing:  # one by one: there may be no memory for a list
            abandon(closing.popleft().close)
        while opened:
            abandon(opened.popleft()[1].close)
        raise


def close_all(closing: deque[_IO]) -> None:
    """Close what a pipeline has left, oldest first."""
    while closing:
        closing[0].close()
        closing.popleft()


def abandon(close: Callable[[], object]) -> None:
    """Make a call that closes something after an error, which is on its way to the user: what fails now comes
    of that, and the store keeps the rest."""
    with contextlib.suppress(Exception):
        close()
