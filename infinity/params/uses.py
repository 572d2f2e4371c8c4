"""What is under way in an engine: one list of uses.

[Note: uses] A forward, a backward, an operator that needs a unit outside of its scope, a thread that a
forward starts and a `gathered` block are uses. Each says of which kind it is and which units it keeps on the
device. Whether a forward or a backward is under way, who keeps a unit, and which block takes over a unit's
edits are questions to this list; nothing else records it. To reset is to drop uses. torch tells of neither a
backward that raised nor a forward that an interrupt ended, so a use may be left in the list: the next forward
from outside drops it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Iterable, Iterator


class UseKind(enum.Enum):
    """What a use is.

    ROOT: a forward of the model. FORWARD: a forward of a scope. RECOMPUTED: a forward of a scope inside of a
    backward, which has ended: it keeps its units until its backward, which follows at once, or until another
    scope comes. BACKWARD: the backward of a scope. TASK: a backward of autograd, inner ones included.
    OPERATOR: autograd or an operator needs units outside of their scope. GUEST: a thread that a forward has
    started needs them. BLOCK: a `gathered` block. ONCE: all units, for a moment.
    """

    ROOT = enum.auto()
    FORWARD = enum.auto()
    RECOMPUTED = enum.auto()
    BACKWARD = enum.auto()
    TASK = enum.auto()
    OPERATOR = enum.auto()
    GUEST = enum.auto()
    BLOCK = enum.auto()
    ONCE = enum.auto()


class Use:
    """One use.

    Attributes:
        units: the indices of the units that it keeps.
        writes: of these, the units whose edits it takes over when it ends: of a block.
        thread: the number of the thread that began it.
        task: autograd's number of the backward that it belongs to; -1: none.
    """

    def __init__(self, kind: UseKind, *, task: int = -1) -> None:
        self.kind = kind
        self.units: set[int] = set()
        self.writes: set[int] = set()
        self.thread = threading.get_ident()
        self.task = task


class Uses:
    """The list of one engine, the use that began first at its head. Threads that a forward starts change it
    side by side: each change is one operation of a list, and each question goes through a copy."""

    def __init__(self) -> None:
        self._uses: list[Use] = []

    def __iter__(self) -> Iterator[Use]:
        return iter(tuple(self._uses))

    def begin(self, use: Use, units: Iterable[int] = ()) -> None:
        """Note a use, and that it keeps `units` as well. Does not load them."""
        use.units.update(units)
        if use not in self._uses:
            self._uses.append(use)

    def end(self, use: Use) -> set[int]:
        """Drop a use; return the units that it kept. Nothing if it is gone already."""
        if use in self._uses:
            self._uses.remove(use)
        units, use.units = use.units, set()
        return units

    def drop(self, *kinds: UseKind) -> None:
        """Drop all uses of some kinds."""
        for use in self:
            if use.kind in kinds:
                self.end(use)

    def has(self, *kinds: UseKind) -> bool:
        """Return whether a use of one of these kinds is under way."""
        return not {use.kind for use in tuple(self._uses)}.isdisjoint(kinds)  # asked at each use of a unit

    def units(self) -> set[int]:
        """Return the units that any use keeps."""
        return set().union(*(use.units for use in self))

    def writes(self) -> set[int]:
        """Return the units whose edits any use takes over when it ends."""
        return set().union(*(use.writes for use in self))

    def forget_units(self, units: Collection[int]) -> None:
        """Drop what is kept of `units`, but for what `gathered` blocks keep."""
        for use in self:
            if use.kind is not UseKind.BLOCK:
                use.units.difference_update(units)
