"""How long the use of a unit takes, and how fast units come: what prefetch needs to know.

[Note: the horizon] A unit whose use is farther away than its fetch takes, `MARGIN` times over, is left for
later. Both times are measured as a run goes, and err towards fetching early: the figures follow a faster
compute or a slower fetch at once, and the contrary only step by step.
"""

from __future__ import annotations

#: A fetch is left for later only if it would take less than this part of the time that is left.
MARGIN = 4.0
_EASE = 1.25  # how much a figure may ease from one measurement to the next


class Pace:
    """Seconds between the uses of units, by unit, and bytes per second of fetches."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seconds_per_byte = 0.0

    def used(self, unit: int, seconds: float) -> None:
        """Note that the next unit was asked for `seconds` after `unit` was there."""
        self._seconds[unit] = min(seconds, self._seconds.get(unit, seconds) * _EASE)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Note that `nbytes` came in `seconds` in which nothing else was waited for."""
        if nbytes:
            self._seconds_per_byte = max(seconds / nbytes, self._seconds_per_byte / _EASE)

    def seconds(self, unit: int) -> float:
        """Return how long the use of a unit takes; 0.0 if that is not known."""
        return self._seconds.get(unit, 0.0)

    def can_wait(self, lead: float, nbytes: int) -> bool:
        """Return whether `nbytes` that are needed in `lead` seconds would come in time even if they
        were asked for later."""
        return 0.0 < self._seconds_per_byte * nbytes * MARGIN < lead
