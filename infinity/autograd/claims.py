"""Units that are used outside of their scope, or for longer than its forward.

A recomputed scope keeps its units until its backward begins, or another scope's forward begins. A unit that
autograd or an operator needs elsewhere stays until another unit is needed; if the program has its address, it
stays until a scope begins or ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.params.discover import Scope
from infinity.params.residency import Residency


class Claims:
    """The claims of one engine that no hook takes back."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._lazy: Scope | None = None  # recomputed
        self._wanted: tuple[int, ...] = ()  # units that were asked for last
        self._addressed: set[int] = set()  # units asked for before, in whose memory somebody has an address

    def keep_lazy(self, scope: Scope) -> None:
        """Keep the units of a scope whose recomputation has ended."""
        self._lazy = scope

    def release_lazy(self, scope: Scope | None) -> None:
        """Let go of the recomputed scope, unless it is `scope`."""
        if self._lazy is not None and self._lazy is not scope:
            lazy, self._lazy = self._lazy, None
            self._residency.release(lazy.units, lazy)

    def want(self, units: Sequence[int], *, newest: bool, note: bool, address: bool = False) -> None:
        """Load `units`, and keep them until other units are needed or a scope begins or ends; with `address`,
        until a scope begins or ends."""
        wanted = tuple(dict.fromkeys(units))
        if address:  # and what was asked for just before: a kernel may take several
            self._addressed.update(self._wanted, wanted)
        if self._wanted != wanted:
            self._residency.release([u for u in self._wanted if u not in self._addressed], self)
            self._wanted = wanted
        self._residency.acquire(wanted, self, note=note, newest=newest)

    def release_wanted(self) -> None:
        """Let go of what was asked for; what was unpacked of it holds it as long as it lives."""
        units, self._wanted = {*self._wanted, *self._addressed}, ()
        self._addressed.clear()
        if units:
            self._residency.release(units, self)

    def forget(self) -> None:
        """Nothing is claimed any more; the units' users are dropped elsewhere."""
        self._lazy, self._wanted = None, ()
        self._addressed.clear()
