"""The order in which units are used: recorded as it happens, then followed.

A record of a past cycle (one forward and its backward, or a forward alone) predicts the current cycle.
The schedule keeps the last few different cycles: mixture of experts, early exit and generation between
training steps each have orders that recur. If a unit is used out of order, the position moves to the next
place of that unit in the record, or to a record that has the last two units as neighbours. The engine never
stalls to record again, and a wrong prediction costs one load that nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Records that are kept.
_RECORDS = 8


class Schedule:
    """Predicts which units come next. Not thread-safe: the user's thread notes and asks."""

    def __init__(self) -> None:
        #: different complete cycles, and whether they had a backward to come; the last one first
        self._records: list[tuple[bool, list[int]]] = []
        self._grad = True
        self._current: list[int] = []  # the one under way
        self._followed: list[int] = []  # the record that predicts
        self._position = 0  # in it, of what should come next

    def expect(self, grad: bool) -> None:
        """Note that a forward begins, and whether a backward may follow it."""
        if self._current:
            return  # one of several forwards of a cycle
        self._grad = grad
        for kind, record in self._records:
            if kind == grad:
                self._followed, self._position = record, 0
                return

    def note(self, unit: int) -> None:
        """Note that `unit` is used now. The same unit twice in a row counts once."""
        previous = self._current[-1] if self._current else None
        if previous == unit:
            return
        self._current.append(unit)
        followed = self._followed
        if self._position < len(followed) and followed[self._position] == unit:
            self._position += 1
            return
        for ahead in range(self._position, len(followed)):
            if followed[ahead] == unit:
                self._position = ahead + 1
                return
        for _, record in self._records:
            for at in range(1, len(record)):
                if record[at] == unit and record[at - 1] == previous:
                    self._followed, self._position = record, at + 1
                    return

    def end_cycle(self) -> None:
        """Note that a cycle (a backward, or a forward without one) is complete."""
        if self._current:
            last = (self._grad, self._current)
            self._records = [last, *(r for r in self._records if r != last)][:_RECORDS]
            self._current = []
        self._followed = self._records[0][1] if self._records else []
        self._position = 0

    def recorded(self) -> list[int]:
        """Return the last complete cycle: its first half is the order of the forward."""
        return list(self._records[0][1]) if self._records else []

    def rest(self) -> list[int]:
        """Return the units expected until the cycle's end, nearest first."""
        return self._followed[self._position :]

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected from here, nearest first, across the end of the cycle."""
        yield from self.rest()
        # The first half of the next cycle begins like this one.
        yield from self._followed[: self._position]
