"""The order in which units are used: recorded as it happens, then followed.

The record of the last cycle (one forward and its backward) predicts the next one. A unit that
comes out of order moves the position to where that unit comes next in the record; nothing ever
stalls to record again, and a wrong guess costs one fetch that was not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator


class Schedule:
    """Predicts which units come next. Not thread-safe: the user's thread notes and asks."""

    def __init__(self) -> None:
        self._recorded: list[int] = []  # the last complete cycle
        self._current: list[int] = []  # the one under way
        self._position = 0  # in _recorded, of what should come next

    def note(self, unit: int) -> None:
        """Note that `unit` is used now. The same unit twice in a row counts once."""
        if self._current and self._current[-1] == unit:
            return
        self._current.append(unit)
        recorded = self._recorded
        if self._position < len(recorded) and recorded[self._position] == unit:
            self._position += 1
            return
        for ahead in range(self._position, len(recorded)):
            if recorded[ahead] == unit:
                self._position = ahead + 1
                return

    def end_cycle(self) -> None:
        """Note that a cycle (a backward, or a forward without one) is complete."""
        if self._current:
            self._recorded, self._current = self._current, []
        self._position = 0

    def recorded(self) -> list[int]:
        """Return the last complete cycle: its first half is the order of the forward."""
        return list(self._recorded)

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected from here, nearest first, across the end of the cycle."""
        yield from self._recorded[self._position :]
        # The first half of the next cycle begins like this one.
        yield from self._recorded[: self._position]
