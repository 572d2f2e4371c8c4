"""Compute parameters that are read in place, from foreign files: which bytes of them, and where each goes.

[Note: windows] Direct I/O moves whole aligned blocks, and tensors in a file begin at any byte. A read covers
a *window*: the blocks around the bytes of one or more adjacent tensors. In a lease the
windows of a chunk are concatenated. The useful bytes are *stretches* of the windows, and each goes to its
own place in the compute parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infinity.core.sizes import ALIGNMENT, ceil_to


class Range(NamedTuple):
    """`nbytes` at `offset` of file number `file`, which belong at byte `begin` of a chunk's copy."""

    file: int
    offset: int
    nbytes: int
    begin: int


class Window(NamedTuple):
    """`nbytes` at `offset` (a multiple of 4096) of file number `file`, which are read to byte `at` of a
    lease."""

    file: int
    offset: int
    nbytes: int
    at: int


class Stretch(NamedTuple):
    """`nbytes` at byte `at` of a lease, which belong at byte `begin` of a chunk's copy."""

    at: int
    begin: int
    nbytes: int


class InPlace(NamedTuple):
    """How one chunk's copy is read. `lease_nbytes`: of the lease that its windows take."""

    windows: tuple[Window, ...]
    stretches: tuple[Stretch, ...]
    lease_nbytes: int


def in_place(ranges: Sequence[Range], sizes: Sequence[int]) -> InPlace:
    """Return how a copy is read that consists of `ranges`; `sizes`: bytes of each file."""
    windows: list[Window] = []
    stretches = []
    at = 0  # in the lease, where the next window begins
    for file, offset, nbytes, begin in sorted(ranges):
        low = offset // ALIGNMENT * ALIGNMENT
        high = min(ceil_to(offset + nbytes, ALIGNMENT), sizes[file])
        last = windows[-1] if windows else None
        if last is not None and last.file == file and low <= last.offset + last.nbytes:
            windows[-1] = last._replace(nbytes=max(last.nbytes, high - last.offset))
        else:
            windows.append(Window(file, low, high - low, at))
        window = windows[-1]
        stretches.append(Stretch(window.at + offset - window.offset, begin, nbytes))
        at = window.at + ceil_to(window.nbytes, ALIGNMENT)
    return InPlace(tuple(windows), tuple(stretches), at)
