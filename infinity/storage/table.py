"""The chunk table: what is valid on NVMe, and what it must look like.

[Note: every read is checked] For each chunk the slot in use (a bit, never a function of the
generation: chunks that a step skips do not flip), the generation it belongs to, and one CRC32C per
section: about 32 bytes a chunk, in memory, nothing of it in the payload. So transfers stay aligned,
and a write that was lost, torn, stale or misdirected shows as a mismatch at the next read. A fresh
arena reads as zeros, and so the table begins with the CRCs of zeros: nothing need be written first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from infinity.core.sizes import Tier
from infinity.hardware.aio import crc32c_zeros

from .layout import Layout

#: Length of a part whose contents were given up.
DROPPED: Final = -1
#: Generation of a chunk that was never written.
NEVER: Final = -1


class ChunkTable:
    """The table of one store. Not locked: the store guards it.

    Attributes:
        slot: uint8 [chunks], the slot in use.
        generation: int64 [chunks], of the versioned parts in that slot; -1: never written.
    """

    def __init__(self, layout: Layout) -> None:
        count = len(layout.chunks)
        self.slot: npt.NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.generation: npt.NDArray[np.int64] = np.full(count, NEVER, np.int64)
        self._first: dict[str, npt.NDArray[np.int32]] = {}
        self._length: dict[str, npt.NDArray[np.int64]] = {}
        zeros: dict[int, int] = {}
        crcs: list[int] = []
        for number, chunk in enumerate(layout.chunks):
            for name, spec in chunk.items():
                if not spec.versioned:
                    lengths = self._length.setdefault(name, np.full(count, DROPPED, np.int64))
                    lengths[number] = spec.nbytes
                if spec.tier is not Tier.NVME:
                    continue
                first = self._first.setdefault(name, np.full(count, -1, np.int32))
                first[number] = len(crcs)
                for size in spec.sections:
                    if size not in zeros:
                        zeros[size] = crc32c_zeros(size)
                    crcs.append(zeros[size])
        self._crcs: npt.NDArray[np.uint32] = np.array(crcs, np.uint32)

    def crcs(self, chunk: int, part: str, sections: range) -> tuple[int, ...]:
        """Return the CRC32C of each of `sections`, as they must be in the newest slot."""
        first = int(self._first[part][chunk])
        return tuple(int(c) for c in self._crcs[first + sections.start : first + sections.stop])

    def set_crcs(self, chunk: int, part: str, sections: range, crcs: Sequence[int]) -> None:
        """Remember the CRC32C of each of `sections`."""
        first = int(self._first[part][chunk])
        self._crcs[first + sections.start : first + sections.stop] = crcs

    def length(self, chunk: int, part: str) -> int:
        """Return the bytes that an unversioned part holds, or DROPPED."""
        return int(self._length[part][chunk])

    def set_length(self, chunk: int, part: str, nbytes: int) -> None:
        """Remember the bytes that an unversioned part holds."""
        self._length[part][chunk] = nbytes
