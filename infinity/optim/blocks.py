"""Which `gathered` blocks are open, and how they end.

[Note: the end of a block] An error may come anywhere in the end of a `with` statement, even before it calls
any code of the engine: a RecursionError does. So a block lasts as long as its `with` statement refers to its
`Use`, and not until its end was called. The reference goes with the statement, or the first action of the
statement's end drops it. The engine can repeat the work of an end, and keeps a record of it here: if an end
did not complete, the next call of the engine ends the block first, and no edit is lost.
"""

from __future__ import annotations

import itertools

import torch

from infinity.core import handlers
from infinity.core.commits import Hold, commit
from infinity.core.errors import InfinityError, ParameterChangedError
from infinity.params.residency import Residency
from infinity.params.uses import UseKind

from .edits import Block, Edits

#: What may not come again when the end of a block is made again.
_PASSING = (MemoryError, RecursionError, torch.OutOfMemoryError)


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
        self._residency.acquire(named, block, note=False, newest=True)
        if write:
            self._edits.begin(block)
        return block

    def end_left(self) -> None:
        """End the blocks that were left, innermost first: their edits count, their claims go.

        Raises:
            ParameterChangedError: there are edits that cannot be kept. Those blocks have ended, too.
            StorageError: a transfer failed; the next call tries again, and gives up what fails once more.
        """
        if self._left():
            self._end_left()

    def _left(self) -> list[Block]:
        """Return the blocks that were left and have not ended, innermost first."""
        blocks = [use for use in self._residency.uses if isinstance(use, Block)]
        return [block for block in reversed(blocks) if block.is_left]

    @commit
    def _end_left(self) -> None:
        errors: list[Exception] = []
        for block in self._left():
            errors += self._end(block)
        for first, then in itertools.pairwise(errors):
            then.__context__ = then.__context__ or first
        if errors:
            raise errors[-1]

    def _end(self, block: Block) -> list[Exception]:
        """End a block, as far as that goes; it has `failed` if that is not all."""
        errors: list[Exception] = []
        tried, block.failed = block.failed, True
        failed = False
        for index in reversed(block.named):
            try:
                self._edits.end(block, index)
            except ParameterChangedError as error:
                errors.append(error)
            except Exception as error:
                if tried and not isinstance(error, _PASSING) and not handlers.has_raised(error):
                    errors.append(self._give_up(block, index, error))
                else:
                    failed = True
                    errors.append(error)
        if failed:
            return errors
        try:
            self._residency.release(block)
        except ParameterChangedError as error:
            errors.append(error)
        block.failed = False
        return errors

    def _give_up(self, block: Block, index: int, error: Exception) -> InfinityError:
        self._edits.drop(block, index)
        unit = self._residency.units[index]
        lost = ParameterChangedError(
            f"the edits of unit {unit.layout.name!r} in a `gathered` block are lost",
            expected="an end of the block, or a second attempt, that takes the edits over",
            found=f"two attempts that failed, the last with {type(error).__name__}: {error}",
            cure="fix the cause of the failure, and edit again; or load a checkpoint, with `infinity.load`",
        )
        lost.__cause__ = error
        return lost

    def close(self) -> None:
        """The engine closes: its blocks are over, and their ends have nothing to do."""
        self._residency.uses.drop(UseKind.BLOCK)
