"""A chunk that a pass over the state yields: what is under way with its tensors, its writes, and its end."""

from __future__ import annotations

from infinity.storage.store import Version
from infinity.storage.under_way import UnderWay

from .chunk_io import ChunkIO


class Visited:
    """A chunk with its lease, until all is over that has to do with its tensors.

    Args:
        io: the chunk.
        under_way: what the caller has under way from or into its tensors; until `leave`, it may be about
            other chunks, too.
    """

    def __init__(self, io: ChunkIO, under_way: UnderWay) -> None:
        self.io = io
        self._under_way = under_way
        self._state = self._copy = False  # what is to be written
        self._back: int | None = None

    def leave(self, *, state: bool, copy: bool, back: int | None) -> None:
        """The caller is done with the tensors, but for what is under way. `state`, `copy`: what is written
        when that is over. `back`: the generation of the copy, if it is the back; None: it is the newest as
        it was."""
        self._under_way = self._under_way.take()
        self._state, self._copy, self._back = state, copy, back

    def send(self) -> None:
        """Wait for what is under way with the tensors, and write them, once."""
        state, copy, self._state, self._copy = self._state, self._copy, False, False
        self._under_way.wait()  # what is wrong with the values is not written, also where this is closed
        if state or copy:
            self.io.write(state=state, copy=copy)
        if copy and self._back is not None:
            self.io.made(Version.BACK, self._back)

    def close(self, *, wait: bool = True) -> bool:
        """Let go of the chunk when all of that is over."""
        if not wait and (self._under_way or self._state or self._copy):
            return False
        try:
            self.send()
        except BaseException:
            self._under_way.drop()
            self.io.close()
            raise
        return self.io.close(wait=wait)
