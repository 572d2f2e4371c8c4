"""Chunks that a pass over the state has yielded, and whose work is not complete."""

from __future__ import annotations

from collections import deque

from infinity.storage.pipeline import abandon
from infinity.storage.store import Version
from infinity.storage.under_way import UnderWay

from .chunk_io import ChunkIO


class LeavingChunk:
    """A chunk that was yielded: what is under way with its tensors, then the way to its tiers, then the end.

    Args:
        io: the chunk, with its lease.
        under_way: what the caller has under way from or into its tensors; it is taken from there.
        state, copy: what is written when that is over.
        back: the generation of the copy, if it is the other version; None: it is the newest as it was.
    """

    def __init__(
        self,
        io: ChunkIO,
        under_way: UnderWay,
        *,
        state: bool = False,
        copy: bool = False,
        back: int | None = None,
    ) -> None:
        self._io = io
        self._parts = state, copy
        self._back = back
        self._under_way = under_way.take()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._under_way and not any(self._parts)

    def send(self) -> None:
        """Wait for what is under way with the tensors, and write them, once."""
        self._under_way.wait()
        (state, copy), self._parts = self._parts, (False, False)
        if state or copy:
            self._io.write(state=state, copy=copy)
        if copy and self._back is not None:
            self._io.made(Version.BACK, self._back)

    def close(self) -> None:
        """Let go of the chunk when all of that is over."""
        try:
            self.send()
        finally:
            self.drop()

    def drop(self) -> None:
        """Let go of it, whatever comes of what is under way."""
        self._under_way.drop()
        self._io.close()


def give_up(under_way: UnderWay, leaving: deque[LeavingChunk], open_: deque[ChunkIO]) -> None:
    """End a pass: nothing of it stays, also where it raised."""
    under_way.drop()
    while leaving:
        abandon(leaving.popleft().drop)
    while open_:
        abandon(open_.popleft().close)
