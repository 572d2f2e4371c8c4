"""Which units come next of those that are away, and which may go: kept from visit to visit.

A look at all units at each visit would make a step quadratic in their number. So this file keeps what the
cache asks for while the schedule moves on. Its cost at a visit does not depend on the number of units, as
long as the program follows the record: each place of the record enters and leaves the stretch once in a
cycle. After another turn of the program, everything is made anew, once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from .schedule import Schedule


class Lookahead:
    """Follows a schedule. `sizes`: of each unit, in bytes; `fixed`: the units that never go.

    The *stretch* is what comes next up to the first unit that is away: none of its units is.

    Attributes:
        away: units that have to be loaded.
        there: units that may go when nothing uses them.
    """

    def __init__(self, schedule: Schedule, sizes: Sequence[int], fixed: Collection[int]) -> None:
        self.away: set[int] = set()
        self.there: set[int] = set()
        self._schedule = schedule
        self._sizes = sizes
        self._fixed = frozenset(fixed)
        self._ungathered: set[int] = set()
        self._lowest = 0  # no unit with a smaller number is ungathered
        self._keys: dict[int, float] = {}  # the next uses of those that may go
        self._heap: list[tuple[float, int]] = []  # of them, the last first; those count that are in `_keys`
        self._epoch = -1
        self._at = self._end = self._gathered = 0  # places: where the stretch begins and ends; see `_ahead`
        self._clear()

    def _clear(self) -> None:
        """Make the stretch empty."""
        self._end = self._at
        self._counts: Counter[int] = Counter()  # how often it has each unit
        self._nbytes = 0  # of its units
        #: places, and where their units come again: those that no later place of the stretch surpasses
        self._again: deque[tuple[int, float]] = deque()

    # -- changes ----------------------------------------------------------------------------

    def put(self, unit: int, *, away: bool, there: bool, gathered: bool) -> None:
        """Note how a unit is now."""
        if not away:
            self.away.discard(unit)
        elif unit not in self.away:
            self.away.add(unit)
            if self._end > self._at and self._next_use(unit) < self._end:
                self._clear()
        if gathered:
            self._ungathered.discard(unit)
        elif unit not in self._ungathered:
            self._ungathered.add(unit)
            self._lowest = min(self._lowest, unit)
            if self._gathered > self._at:
                self._gathered = int(min(self._gathered, self._next_use(unit)))
        if not there:
            self.there.discard(unit)
            self._keys.pop(unit, None)
        elif unit not in self.there:  # else it is a candidate already, or was taken
            self.there.add(unit)
            self.put_back(unit)

    def _next_use(self, unit: int) -> float:
        """Return the first place of a unit from `_at` on; infinity: what is kept is not of this record."""
        current = self._epoch == self._schedule.epoch
        return self._schedule.order.next_use(unit, self._at) if current else math.inf

    def put_back(self, unit: int) -> None:
        """Make a unit a candidate of `take_farthest`, if it may go."""
        if unit in self.there and self._epoch == self._schedule.epoch:
            key = self._keys[unit] = self._schedule.order.next_use(unit, self._schedule.at)
            heappush(self._heap, (-key, unit))
            if len(self._heap) > 4 * len(self.there) + 64:
                self._remake()

    def _remake(self) -> None:
        order, at = self._schedule.order, self._schedule.at
        self._keys = {unit: order.next_use(unit, at) for unit in self.there}
        self._heap = [(-key, unit) for unit, key in self._keys.items()]
        heapify(self._heap)

    def _follow(self) -> None:
        """Catch up with the schedule."""
        schedule = self._schedule
        if self._epoch != schedule.epoch or schedule.at - self._at > schedule.order.length:
            self._epoch = schedule.epoch
            self._at = self._gathered = schedule.at
            self._clear()
            self._remake()
            return
        for at in range(self._at, schedule.at):
            unit = schedule.order.unit(at)
            if at < self._end:
                self._leave(at, unit)
            self.put_back(unit)
        self._at = schedule.at
        self._end, self._gathered = max(self._end, self._at), max(self._gathered, self._at)

    def _enter(self, at: int, unit: int) -> None:
        if not self._counts[unit]:
            self._nbytes += self._sizes[unit]
        self._counts[unit] += 1
        if unit not in self._fixed:
            again = self._schedule.order.next_use(unit, at + 1)
            while self._again and self._again[-1][1] <= again:
                self._again.pop()
            self._again.append((at, again))

    def _leave(self, at: int, unit: int) -> None:
        self._counts[unit] -= 1
        if not self._counts[unit]:
            self._nbytes -= self._sizes[unit]
            del self._counts[unit]
        if self._again and self._again[0][0] == at:
            self._again.popleft()

    # -- questions --------------------------------------------------------------------------

    def next_away(self) -> tuple[int, int] | None:
        """Return the unit that comes next of those that are away, and its place; None: the record has none.
        The stretch ends there."""
        self._follow()
        order = self._schedule.order
        while self._end < self._at + order.length:
            unit = order.unit(self._end)
            if unit in self.away:
                return unit, self._end
            self._enter(self._end, unit)
            self._end += 1
        return None

    def nbytes_before(self, in_use: Collection[int]) -> int:
        """Return the bytes of the units of the stretch, without those that are `in_use`."""
        return self._nbytes - sum(self._sizes[unit] for unit in in_use if unit in self._counts)

    def come_again_before(self, place: float) -> bool:
        """Return whether each unit of the stretch that may go comes again behind it and before `place`."""
        return not self._again or self._again[0][1] < place

    def take_farthest(self, but: Collection[int]) -> tuple[int, float] | None:
        """Take out the unit whose next use is farthest away, of those that may go, but for some. Return it
        with the place of that use (infinity: the record has none). None: there is none. `put_back` undoes
        it."""
        self._follow()
        found, passed = None, []
        while self._heap and found is None:
            key, unit = heappop(self._heap)
            if self._keys.get(unit) != -key:
                continue  # what it was once
            del self._keys[unit]
            if unit in but:
                passed.append(unit)
            else:
                found = unit, -key
        for unit in passed:
            self.put_back(unit)
        return found

    def next_ungathered(self) -> int | None:
        """Return the unit that comes next in this cycle, of those that are not gathered."""
        self._follow()
        while self._gathered < self._schedule.end:
            unit = self._schedule.order.unit(self._gathered)
            if unit in self._ungathered:
                return unit
            self._gathered += 1
        return None

    def lowest_ungathered(self, count: int) -> int | None:
        """Return the first unit by number that is not gathered, of the first `count`."""
        while self._lowest < count:
            if self._lowest in self._ungathered:
                return self._lowest
            self._lowest += 1
        return None
