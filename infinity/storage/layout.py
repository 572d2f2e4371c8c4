"""Where each chunk's parts lie: pure arithmetic, from the specs and the directories' weights.

A chunk lies in one directory. Within a directory's arena come the regions, ``copy`` first, then
``state``, then ``gradient``, then others by name; within a region slot 0 of every part, in chunk
order (so that the copies of neighbouring chunks are contiguous), then slot 1 of those that are
versioned. Nothing of this is written down anywhere: offsets are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from infinity.core.errors import ConfigError
from infinity.core.sizes import ALIGNMENT, Tier
from infinity.planning.parts import Part
from infinity.planning.placement import spread_over_directories

_REGIONS: Final = ("copy", "state", "gradient")


class Extent(NamedTuple):
    """Bytes of one arena. `directory` is the index of the directory that it is in."""

    directory: int
    offset: int
    nbytes: int


class DirectoryStats(NamedTuple):
    """What was given to one directory's ring: bytes (padding included) and transfers."""

    path: str
    arena_nbytes: int
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int


class Layout:
    """The extents of all parts of all chunks.

    Args:
        chunks: the parts of each chunk, by chunk id.
        directories: number of directories.
        weights: bandwidth of each directory, in any unit; None: all equal.
        slots: versions of each versioned part.

    Raises:
        ConfigError: a section is not a multiple of 4096, a part is on a tier that the store does
            not have, there is no directory for it, or the weights are wrong.
    """

    def __init__(
        self,
        chunks: Sequence[Mapping[str, Part]],
        directories: int,
        *,
        weights: Sequence[float] | None = None,
        slots: int = 1,
    ) -> None:
        self.chunks = tuple(dict(c) for c in chunks)
        self.slots = slots
        if slots not in (1, 2):
            raise ConfigError("a chunk has one slot or two", expected="slots=1 or 2", found=slots)
        sizes = []
        for number, chunk in enumerate(self.chunks):
            for name, spec in chunk.items():
                _check(number, name, spec)
            sizes.append(sum(s.nbytes for s in chunk.values() if s.tier is Tier.NVME))
        if any(sizes) and not directories:
            raise ConfigError(
                "parts are placed on NVMe, but no directory is named",
                expected="a directory on an NVMe drive",
                found="none",
                cure='nvme="/path/on/a/drive"',
            )
        self.directory = _spread(sizes, directories, weights)
        self._offsets: tuple[dict[str, npt.NDArray[np.int64]], ...] = tuple({} for _ in range(self.slots))
        self.arena_nbytes = [0] * directories
        self._place()

    def _place(self) -> None:
        names = {name: spec.region for chunk in self.chunks for name, spec in chunk.items()}
        regions = {s.region for chunk in self.chunks for s in chunk.values()}
        order = [r for r in _REGIONS if r in regions] + sorted(regions.difference(_REGIONS))
        for slot_offsets in self._offsets:
            for name in names:
                slot_offsets[name] = np.full(len(self.chunks), -1, np.int64)
        for region in order:
            for slot, slot_offsets in enumerate(self._offsets):
                for number, chunk in enumerate(self.chunks):
                    for name, spec in chunk.items():
                        if spec.region != region or spec.tier is not Tier.NVME:
                            continue
                        if slot and not spec.versioned:
                            continue
                        directory = int(self.directory[number])
                        slot_offsets[name][number] = self.arena_nbytes[directory]
                        self.arena_nbytes[directory] += spec.nbytes

    def extent(self, chunk: int, part: str, slot: int = 0, sections: range | None = None) -> Extent:
        """Return where a slot of an NVMe part lies, or some neighbouring sections of it."""
        sizes = self.chunks[chunk][part].sections
        chosen = range(len(sizes)) if sections is None else sections
        begin = sum(sizes[: chosen.start])
        nbytes = sum(sizes[chosen.start : chosen.stop])
        return Extent(int(self.directory[chunk]), int(self._offsets[slot][part][chunk]) + begin, nbytes)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all parts on the host tier."""
        return sum(s.nbytes for c in self.chunks for s in c.values() if s.tier is Tier.HOST)


def _check(number: int, name: str, spec: Part) -> None:
    if any(size <= 0 or size % ALIGNMENT for size in spec.sections) or not spec.sections:
        raise ConfigError(
            f"part {name!r} of chunk {number} has a section that cannot be transferred",
            expected=f"multiples of {ALIGNMENT} bytes, more than 0",
            found=str(spec.sections),
        )
    if spec.tier not in (Tier.HOST, Tier.NVME):
        raise ConfigError(
            f"part {name!r} of chunk {number} is on a tier that the store does not have",
            expected="host or nvme",
            found=str(spec.tier),
        )


def _spread(sizes: Sequence[int], directories: int, weights: Sequence[float] | None) -> npt.NDArray[np.int16]:
    shares = [1.0] * directories if weights is None else [float(w) for w in weights]
    if len(shares) != directories or not all(math.isfinite(w) and w > 0 for w in shares):
        raise ConfigError(
            "the weights of the NVMe directories are wrong",
            expected=f"{directories} numbers > 0",
            found=str(weights),
        )
    return np.array(spread_over_directories(sizes, shares), np.int16)
