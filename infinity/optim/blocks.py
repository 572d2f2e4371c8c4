"""Which `gathered` blocks are open, and how they end.

[Note: the end of a block] An error may come anywhere in the end of a `with` statement, even before it calls
any code of the engine: a RecursionError does. So a block lasts as long as its `with` statement refers to its
`Use`, and not until its end was called. The reference goes with the statement, or the first action of the
statement's end drops it. If an interrupt ends an end, the next call of the engine ends the
block first, and no edit is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from infinity.core import handlers
from infinity.core.commits import Hold, commit
from infinity.core.errors import ParameterChangedError
from infinity.params.residency import Residency
from infinity.params.uses import UseKind

from .edits import Block, Edits


class Blocks:
    """The `gathered` blocks of an engine. See [Note: the end of a block]."""

    def __init__(self, residency: Residency, edits: Edits) -> None:
        self.commits = residency.commits
        self._residency = residency
        self._edits = edits

    def begin(self, hold: Hold, named: dict[int, set[int]], *, write: bool, source: int) -> Block:
        """Claim the units of `named`, in their newest version, until there is no reference to `hold`."""
        block = Block(hold, named, source)
        del hold  # an error that a user keeps has this frame
        self._residency.uses.begin(block)  # before its claims: an interrupt may come in between
        self.commits.run(lambda: self._residency.acquire(named, block, note=False, newest=True))
        if write:
            self._edits.begin(block)
        return block

    def end_left(self, lose: Callable[[str], None]) -> None:
        """End the blocks that were left, innermost first: their edits count, their claims go. `lose` is told
        of what could not be ended.

        Raises:
            ParameterChangedError: there are edits that cannot be kept. Those blocks have ended, too.
            StorageError: a transfer failed; only a load goes on from there.
        """
        if self._left():
            self._end_left(lose)

    def _left(self) -> list[Block]:
        """Return the blocks that were left and have not ended, innermost first."""
        blocks = [use for use in self._residency.uses if isinstance(use, Block)]
        return [block for block in reversed(blocks) if block.is_left]

    @commit
    def _end_left(self, lose: Callable[[str], None]) -> None:
        errors: list[ParameterChangedError] = []
        for block in self._left():
            try:
                for index in reversed(block.named):
                    try:
                        self._edits.end(block, index)
                    except ParameterChangedError as error:
                        errors.append(error)
            except Exception as error:
                if not handlers.has_raised(error):  # after an interrupt the next call goes on
                    for index in block.named:
                        self._edits.drop(block, index)
                    self._residency.uses.end(block)
                    lose(f"the end of a `gathered` block that {type(error).__name__} has ended")
                raise
            try:
                self._residency.release(block)
            except ParameterChangedError as error:
                errors.append(error)
        for first, then in itertools.pairwise(errors):
            then.__context__ = then.__context__ or first
        if errors:
            raise errors[-1]

    def close(self) -> None:
        """The engine closes: its blocks are over, and their ends have nothing to do."""
        self._residency.uses.drop(UseKind.BLOCK)
