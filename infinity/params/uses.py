"""What is under way in an engine: one list of uses.

[Note: uses] A forward, a backward, an operator that needs a unit outside of its scope and a `gathered` block
are uses. Each says of which kind it is and which units it keeps on the device. Whether a forward or a
backward is under way, who keeps a unit, and which block takes over a unit's edits are questions to this list.
To reset is to drop uses. torch tells of neither a backward that raised nor a forward that an interrupt ended,
so a use may be left in the list: the next forward from outside drops it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Collection, Iterable, Iterator


class UseKind(enum.IntEnum):  # whose hash is that of a number, without a call of Python
    """What a use is.

    ROOT: a forward of the model. FORWARD: a forward of a scope. RECOMPUTED: a forward of a scope inside of a
    backward, which has ended: it keeps its units until its backward, which follows at once, or until another
    scope comes. BACKWARD: the backward of a scope. OPERATOR: autograd or an operator needs units outside of
    their scope. BLOCK: a `gathered` block.
    """

    ROOT = enum.auto()
    FORWARD = enum.auto()
    RECOMPUTED = enum.auto()
    BACKWARD = enum.auto()
    OPERATOR = enum.auto()
    BLOCK = enum.auto()


class Use:
    """One use. `Uses` changes it.

    Attributes:
        units: the indices of the units that it keeps.
        writes: of these, the units whose edits it takes over when it ends: of a block.
        thread: the number of the thread that began it.
    """

    kind: UseKind
    units: set[int]
    writes: Collection[int] = ()
    thread: int

    def __init__(self, kind: UseKind) -> None:
        self.kind = kind
        self.units = set()
        self.thread = threading.get_ident()


class Uses:
    """The uses of one engine, by kind and by unit, each time the one that began first at the head. What
    changes it is in a commit.

    Attributes:
        of: for each kind the uses under way.
        users: for each unit the uses that keep it.
        tasks: autograd's numbers of the backwards under way, inner ones included.
    """

    def __init__(self, units: int) -> None:
        self.of: dict[UseKind, dict[Use, None]] = {kind: {} for kind in UseKind}
        self.users: list[dict[Use, None]] = [{} for _ in range(units)]
        self.tasks: set[int] = set()

    def __iter__(self) -> Iterator[Use]:
        return iter([use for uses in self.of.values() for use in uses])

    def begin(self, use: Use, units: Iterable[int] = ()) -> None:
        """Note a use, and that it keeps `units` as well. Does not load them."""
        self.of[use.kind][use] = None
        for unit in units:
            use.units.add(unit)
            self.users[unit][use] = None

    def turn(self, use: Use, kind: UseKind) -> None:
        """Make a use one of another kind; it is the last that began of that."""
        self.of[use.kind].pop(use, None)
        use.kind = kind
        self.of[kind][use] = None

    def drop_units(self, use: Use, units: Iterable[int]) -> None:
        """Have a use keep `units` no more."""
        for unit in units:
            use.units.discard(unit)
            self.users[unit].pop(use, None)

    def end(self, use: Use) -> set[int]:
        """Drop a use; return the units that it kept. Nothing if it is gone already."""
        self.of[use.kind].pop(use, None)
        units, use.units = use.units, set()
        for unit in units:
            self.users[unit].pop(use, None)
        return units

    def drop(self, *kinds: UseKind) -> None:
        """Drop all uses of some kinds."""
        for kind in kinds:
            for use in [*self.of[kind]]:
                self.end(use)

    def has(self, *kinds: UseKind) -> bool:
        """Return whether a use of one of these kinds is under way."""
        return any(self.of[kind] for kind in kinds)

    def units(self) -> set[int]:
        """Return the units that any use keeps."""
        found: set[int] = set()
        for uses in self.of.values():
            for use in uses:
                found |= use.units
        return found

    def writes(self) -> set[int]:
        """Return the units whose edits any use takes over when it ends."""
        return {unit for use in self.of[UseKind.BLOCK] for unit in use.writes}

    def forget_units(self, units: Collection[int]) -> None:
        """Drop what is kept of `units`, but for what `gathered` blocks keep."""
        for unit in units:
            for use in [*self.users[unit]]:
                if use.kind is not UseKind.BLOCK:
                    self.drop_units(use, (unit,))
