"""Which version of each chunk's part is in which slot.

[Note: front and back] A part with two slots has a *front*, which everybody uses, and a *back*,
into which the next update writes; `flip` makes the back the front. Which slot is in front is a bit per chunk
and part, never a function of the update's number: a chunk that an update skips does not flip. Each slot has a
generation, the number of the update that wrote its content, so the back is *newer* than the front until they
flip.

The slots of a part may be on different tiers. The store does not hold bytes on the device, but this file
keeps their versions, too: code that moves bytes between the slots reports it (`copied`, `exchanged`).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NewType

from infinity.planning.parts import Part


class Version(enum.Enum):
    """One version of a part, as it is now. FRONT: what everybody uses. BACK: what the next version is made
    in. NEWEST: the back, where it is newer than the front. A part with one slot has no BACK."""

    FRONT = "front"
    BACK = "back"
    NEWEST = "newest"


#: A version by where it is. It stays the same one when the slots flip, until it is written again. Nobody
#: outside of the store computes with it.
Slot = NewType("Slot", int)

#: The one that is in front at first; of a part with one slot, that.
FIRST: Final = Slot(0)
#: Generation of what no update has made.
_NEVER: Final = -1


class Versions:
    """The versions of `chunks`' parts. Any thread may ask; of one chunk's part one thread at a time changes
    anything."""

    def __init__(self, chunks: Sequence[Mapping[str, Part]]) -> None:
        self._chunks = chunks
        count = len(chunks)
        names = {name for chunk in chunks for name, part in chunk.items() if len(part.tiers) > 1}
        self._front = {name: bytearray(count) for name in names}  # the slot
        self._generations = {name: [array("q", [_NEVER]) * count for _ in range(2)] for name in names}

    def has_two(self, part: str) -> bool:
        """Return whether any chunk has two slots of `part`."""
        return part in self._front

    def slots(self, chunk: int, part: str) -> tuple[Slot, ...]:
        """Return all slots of a part, the one that is in front at first as the first."""
        return tuple(Slot(slot) for slot in range(len(self._chunks[chunk][part].tiers)))

    def slot(self, chunk: int, part: str, version: Version | Slot = Version.FRONT) -> Slot:
        """Return the slot that a version is in now.

        Raises:
            ValueError: the back of a part that has one slot.
        """
        if not isinstance(version, Version):
            return version
        if version is Version.BACK:
            self._need_two(chunk, part)
        if part not in self._front:
            return FIRST
        back = version is Version.BACK or (version is Version.NEWEST and self.is_newer(chunk, part))
        return Slot(self._front[part][chunk] ^ back)

    def is_newer(self, chunk: int, part: str) -> bool:
        """Return whether the back is newer than the front."""
        if part not in self._front:
            return False
        front, generations = self._front[part][chunk], self._generations[part]
        return generations[1 - front][chunk] > generations[front][chunk]

    def any_newer(self, part: str) -> bool:
        """Return whether any chunk's back is newer than its front."""
        return part in self._front and any(self.is_newer(c, part) for c in range(len(self._chunks)))

    def made(self, chunk: int, part: str, version: Version | Slot, generation: int) -> None:
        """Note that the update of number `generation` has made what a version holds now. Where there is one
        slot there is nothing to tell apart."""
        if part in self._front:
            self._generations[part][self.slot(chunk, part, version)][chunk] = generation

    def flip(self, chunk: int, part: str) -> None:
        """Put the back in front, and the front in the back."""
        self._need_two(chunk, part)
        self._front[part][chunk] ^= 1

    def copied(self, chunk: int, part: str) -> None:
        """Note that the slot in front holds what the back holds: the bytes were copied."""
        self._need_two(chunk, part)
        front, generations = self._front[part][chunk], self._generations[part]
        generations[front][chunk] = generations[1 - front][chunk]

    def exchanged(self, chunk: int, part: str) -> None:
        """Note that each slot holds what the other held: the bytes were exchanged. Each version is the one
        that it was, in the other slot."""
        self.flip(chunk, part)
        one, other = self._generations[part]
        one[chunk], other[chunk] = other[chunk], one[chunk]

    def _need_two(self, chunk: int, part: str) -> None:
        if len(self._chunks[chunk][part].tiers) < 2:
            raise ValueError(f"part {part!r} of chunk {chunk} has one slot, and no back")
