"""Units that are used outside of their scope, or for longer than its forward.

A recomputed scope keeps its units until its backward begins, or another scope's forward begins. A unit that
autograd or an operator needs elsewhere stays until another unit is needed; if the program has its address,
it stays until a scope begins or ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.params.discover import Scope
from infinity.params.residency import Residency
from infinity.params.uses import Use, UseKind


class Forward(Use):
    """A forward of one scope, and then its backward."""

    def __init__(self, scope: Scope, start: int, *, newest: bool, recomputes: bool) -> None:
        super().__init__(UseKind.FORWARD)
        self.scope = scope
        self.recomputes = recomputes
        self.frame: object = None  # of hooks on saved tensors
        self.newest = newest  # the version that it used: [Note: two versions]
        self.start = start  # of all nodes that it makes, the first
        self.ended = False  # a backward of it
        self.still = False  # nothing moved for its forward: [Note: nothing moves]


class Claims:
    """The uses of one engine that no hook ends."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._operator = Use(UseKind.OPERATOR)
        self._wanted: tuple[int, ...] = ()  # units that were asked for last
        self._addressed: set[int] = set()  # units asked for before, in whose memory somebody has an address

    def release_recomputed(self, scope: Scope | None) -> None:
        """Let go of recomputed scopes, but for `scope`."""
        for use in [*self._residency.uses.of[UseKind.RECOMPUTED]]:
            if isinstance(use, Forward) and use.scope is not scope:
                self._residency.release(use)

    def want(self, units: Sequence[int], *, newest: bool, note: bool, address: bool = False) -> None:
        """Load `units`, and keep them until other units are needed or a scope begins or ends; with `address`,
        until a scope begins or ends."""
        wanted = tuple(dict.fromkeys(units))
        if address:  # and what was asked for just before: a kernel may take several
            self._addressed.update(self._wanted, wanted)
        if self._wanted != wanted:
            self._residency.keep_only(self._operator, self._addressed)
            self._wanted = wanted
        self._residency.acquire(wanted, self._operator, note=note, newest=newest)

    def release_wanted(self) -> None:
        """Let go of what was asked for; what was unpacked of it holds it as long as it lives."""
        self._wanted = ()
        self._addressed.clear()
        if self._operator.units:
            self._residency.release(self._operator)

    def forget(self) -> None:
        """Nothing is asked for any more."""
        self._wanted = ()
        self._addressed.clear()
        self._residency.uses.end(self._operator)
