"""The order in which units are used: recorded as it happens, then followed.

A record of a past cycle (one forward and its backward, or a forward alone) predicts the current cycle.
The schedule keeps the last few different cycles: mixture of experts, early exit and generation between
training steps each have orders that recur. If a unit is used out of order, the position moves to the next
place of that unit in the record, or to a record that has the last two units as neighbours. The engine never
stalls to record again, and a wrong prediction costs one load that nothing hides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

#: Records that are kept.
_RECORDS = 8


class Order:
    """A record, and where in it each unit comes. It repeats: the place `at` is that of `at % len(units)`."""

    def __init__(self, units: list[int]) -> None:
        self.units = units
        self.length = len(units)
        self._places: dict[int, list[int]] = {}
        for at, unit in enumerate(units):
            self._places.setdefault(unit, []).append(at)
        self._pairs: dict[tuple[int, int], int] = {}  # of neighbours, where the second is first
        for at, pair in enumerate(pairwise(units), 1):
            self._pairs.setdefault(pair, at)

    def unit(self, at: int) -> int:
        """Return the unit at a place."""
        return self.units[at % self.length]

    def next_use(self, unit: int, at: int) -> float:
        """Return the first place of a unit from `at` on; infinity: the record does not have it."""
        places = self._places.get(unit)
        if places is None:
            return math.inf
        position = at % self.length
        i = bisect_left(places, position)
        return at - position + (places[i] if i < len(places) else self.length + places[0])

    def behind(self, previous: int | None, unit: int) -> int | None:
        """Return the first place of `unit` right behind `previous`; None: there is none."""
        return None if previous is None else self._pairs.get((previous, unit))


class Schedule:
    """Predicts which units come next. Not thread-safe: the user's thread notes and asks.

    Attributes:
        order: the record that predicts.
        at: the place in it of the unit that should come next. It only grows while `epoch` stays the same.
        epoch: counts the changes of `order`, and the steps back in it.
    """

    def __init__(self) -> None:
        #: different complete cycles, and whether they had a backward to come; the last one first
        self._records: list[tuple[bool, Order]] = []
        self._grad = True
        self._current: list[int] = []  # the one under way
        self.order = Order([])
        self.at = self.epoch = 0
        self._begin = 0  # the place where the cycle under way began

    @property
    def end(self) -> int:
        """The place where the cycle under way ends."""
        return self._begin + self.order.length

    def expect(self, grad: bool) -> None:
        """Note that a forward begins, and whether a backward may follow it."""
        if self._current:
            return  # one of several forwards of a cycle
        self._grad = grad
        for kind, record in self._records:
            if kind == grad:
                self._follow(record, 0)
                return

    def _follow(self, record: Order, position: int) -> None:
        if record is self.order and self.at == self._begin + position:
            return
        if record is not self.order or position or self.at != self.end:
            self.epoch += 1
            self._begin = 0
        else:
            self._begin = self.end  # once more, from its beginning
        self.order, self.at = record, self._begin + position

    def note(self, unit: int) -> None:
        """Note that `unit` is used now. The same unit twice in a row counts once."""
        previous = self._current[-1] if self._current else None
        if previous == unit:
            return
        self._current.append(unit)
        end = self._begin + self.order.length
        if self.at < end:
            if self.order.units[self.at - self._begin] == unit:
                self.at += 1
                return
            ahead = self.order.next_use(unit, self.at)
            if ahead < end:
                self.at = int(ahead) + 1
                return
        for _, record in self._records:
            if (at := record.behind(previous, unit)) is not None:
                self.epoch += 1
                self.order, self._begin, self.at = record, 0, at + 1
                return

    def end_cycle(self) -> None:
        """Note that a cycle (a backward, or a forward without one) is complete."""
        if self._current:
            same = [r for r in self._records if r[0] == self._grad and r[1].units == self._current]
            last = same[0] if same else (self._grad, Order(self._current))
            self._records = [last, *(r for r in self._records if r is not last)][:_RECORDS]
            self._current = []
        self._follow(self._records[0][1] if self._records else self.order, 0)

    def recorded(self) -> list[int]:
        """Return the last complete cycle: its first half is the order of the forward."""
        return list(self._records[0][1].units) if self._records else []

    def rest(self) -> list[int]:
        """Return the units expected until the cycle's end, nearest first."""
        return self.order.units[self.at - self._begin :]
