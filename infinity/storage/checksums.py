"""Checksums of tensors in files, range by range; and checksums of ranges of which each rank has a piece.

[Note: ranges] A tensor's bytes are cut into ranges of `RANGE_NBYTES` from its beginning, each with a CRC-32C
of its own. The ranges do not depend on chunks and ranks, so a run may save with other chunks and ranks than
the one that loads. The bytes of a tensor on one rank come in order. If they begin or end inside a range, the
range's checksum is combined from those of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from infinity.hardware.aio import crc32c

#: Bytes of a tensor that one checksum covers: [Note: ranges].
RANGE_NBYTES: Final = 16 << 20
_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's; the highest bit of a word is x^0
_ONE: Final = 1 << 31


class RangeCrc(NamedTuple):
    """Bytes `begin` to `end` of a tensor, which lie in one range, and their CRC-32C."""

    begin: int
    end: int
    crc: int

    def is_whole(self, nbytes: int) -> bool:
        """Return whether it is a whole range of a tensor of `nbytes`."""
        return self.begin % RANGE_NBYTES == 0 and self.end == min(self.begin + RANGE_NBYTES, nbytes)


def count_of(nbytes: int) -> int:
    """Return how many ranges a tensor of `nbytes` has."""
    return -(-nbytes // RANGE_NBYTES)


class Sums:
    """The pieces of tensors whose bytes come in order, from wherever they begin."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[RangeCrc]] = {}
        self._at: dict[str, int] = {}

    def add(self, name: str, begin: int, address: int, nbytes: int) -> None:
        """Take `nbytes` at `address`, which are the tensor's from byte `begin` on."""
        at, end = self._at.setdefault(name, begin), begin + nbytes
        assert at == begin, (name, at, begin)
        pieces = self._pieces.setdefault(name, [])
        while at < end:
            upto = min(end, (at // RANGE_NBYTES + 1) * RANGE_NBYTES)
            goes_on = pieces and pieces[-1].end == at and at % RANGE_NBYTES
            before = pieces.pop() if goes_on else RangeCrc(at, at, 0)
            pieces.append(RangeCrc(before.begin, upto, crc32c(address + at - begin, upto - at, before.crc)))
            at = upto
        self._at[name] = end

    def take(self) -> dict[str, list[RangeCrc]]:
        """Return all pieces, by tensor; none are left."""
        taken, self._pieces = self._pieces, {}
        self._at.clear()
        return taken

    def take_whole(self, name: str, nbytes: int) -> list[RangeCrc]:
        """Return the ranges of a tensor of `nbytes` that are complete; they are not left."""
        pieces = self._pieces.get(name, [])
        whole = [p for p in pieces if p.is_whole(nbytes)]
        self._pieces[name] = [p for p in pieces if not p.is_whole(nbytes)]
        if self._at.get(name) == nbytes:  # it may be read again
            del self._at[name]
        return whole


def join(pieces: Iterable[RangeCrc]) -> list[RangeCrc]:
    """Return the pieces of one tensor, in order, with those of one range put together where they adjoin."""
    joined: list[RangeCrc] = []
    for piece in sorted(pieces):
        if joined and joined[-1].end == piece.begin and piece.begin % RANGE_NBYTES:
            before = joined.pop()
            crc = combine(before.crc, piece.crc, piece.end - piece.begin)
            piece = RangeCrc(before.begin, piece.end, crc)
        joined.append(piece)
    return joined


def combine(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32C of bytes with CRC `first`, followed by `nbytes` with CRC `second`."""
    power, square = _ONE, _ONE >> 8  # x^0, and x^8, which is one byte
    while nbytes:
        if nbytes & 1:
            power = _times(power, square)
        square = _times(square, square)
        nbytes >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def by_name(of_ranks: Iterable[Mapping[str, Iterable[Sequence[int]]]]) -> dict[str, list[RangeCrc]]:
    """Return the pieces of each tensor that the ranks have, together."""
    found: dict[str, list[RangeCrc]] = {}
    for one in of_ranks:
        for name, pieces in one.items():
            found.setdefault(name, []).extend(RangeCrc(*p) for p in pieces)
    return found


def sums_of(
    of_ranks: Iterable[Mapping[str, Iterable[Sequence[int]]]], sizes: Mapping[str, int]
) -> dict[str, list[int]]:
    """Return the checksums of the ranges of each tensor, from the pieces of each rank; `sizes`: in bytes."""
    found, sums = by_name(of_ranks), {}
    for name, nbytes in sizes.items():
        pieces = join(found.get(name, ()))
        count, whole = count_of(nbytes), [p.is_whole(nbytes) for p in pieces]
        assert whole == [True] * count, (name, pieces)
        sums[name] = [p.crc for p in pieces]
    return sums
