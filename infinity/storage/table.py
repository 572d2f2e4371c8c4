"""The chunk table: which content is valid on NVMe, and its checksums.

[Note: every read is checked] For each slot of a part the table holds its length and one CRC32C per section: 8
bytes, and 4 per section, in memory, and none in the payload. So transfers stay aligned, and a write that was
lost, torn, stale or misdirected shows as a mismatch at the next read. A fresh arena reads as zeros, so the
table starts with the CRCs of zeros, and the engine need not write anything first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from infinity.core.sizes import Tier
from infinity.hardware.aio import crc32c_zeros

from .layout import Layout


class ChunkTable:
    """The table of one store. Not locked: the store guards it."""

    def __init__(self, layout: Layout) -> None:
        count = len(layout.chunks)
        # By part and slot; of each chunk.
        self._first: dict[tuple[str, int], npt.NDArray[np.int32]] = {}
        self._length: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
        zeros: dict[int, int] = {}
        crcs: list[int] = []
        for number, chunk in enumerate(layout.chunks):
            for name, spec in chunk.items():
                for slot, tier in enumerate(spec.tiers):
                    lengths = self._length.setdefault((name, slot), np.zeros(count, np.int64))
                    lengths[number] = spec.nbytes
                    if tier is not Tier.NVME or spec.in_place:
                        continue
                    first = self._first.setdefault((name, slot), np.full(count, -1, np.int32))
                    first[number] = len(crcs)
                    for size in spec.sections:
                        if size not in zeros:
                            zeros[size] = crc32c_zeros(size)
                        crcs.append(zeros[size])
        self._crcs: npt.NDArray[np.uint32] = np.array(crcs, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        places = sum(a.nbytes for a in self._first.values()) + sum(a.nbytes for a in self._length.values())
        return self._crcs.nbytes + places

    def crcs(self, chunk: int, part: str, slot: int, sections: range) -> tuple[int, ...]:
        """Return the CRC32C of each of `sections`, as they must be in a slot on NVMe."""
        first = int(self._first[part, slot][chunk])
        return tuple(int(c) for c in self._crcs[first + sections.start : first + sections.stop])

    def set_crcs(self, chunk: int, part: str, slot: int, sections: range, crcs: Sequence[int]) -> None:
        """Remember the CRC32C of each of `sections`."""
        first = int(self._first[part, slot][chunk])
        self._crcs[first + sections.start : first + sections.stop] = crcs

    def length(self, chunk: int, part: str, slot: int) -> int:
        """Return the bytes that a slot holds: all of the part's, or fewer where fewer were written."""
        return int(self._length[part, slot][chunk])

    def set_length(self, chunk: int, part: str, slot: int, nbytes: int) -> None:
        """Remember the bytes that a slot holds."""
        self._length[part, slot][chunk] = nbytes
