"""Where each chunk's parts lie: pure arithmetic, from the specs and the directories' weights.

A chunk lies in one directory. Within a directory's arena every part has a region, ``copy`` first, then
``state``, then ``gradient``, then others by name; within a region comes the first slot of all chunks, in
their order (so that the copies of neighbouring chunks are contiguous), then the second of those that have
two. Nothing of this is written down anywhere: offsets are computed.
"""

from __future__ import annotations

import itertools
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

    Raises:
        ConfigError: a section is not a multiple of 4096, a part has neither one slot nor two, there is no
            directory for it, or the weights are wrong.
    """

    def __init__(
        self,
        chunks: Sequence[Mapping[str, Part]],
        directories: int,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.chunks = tuple(dict(c) for c in chunks)
        sizes = []
        for number, chunk in enumerate(self.chunks):
            for name, spec in chunk.items():
                _check(number, name, spec)
            sizes.append(sum(spec.nvme_nbytes for spec in chunk.values()))
        if any(sizes) and not directories:
            raise ConfigError(
                "parts are placed on NVMe, but no directory is named",
                expected="a directory on an NVMe drive",
                found="none",
                cure='nvme="/path/on/a/drive"',
            )
        self.directory = _spread(sizes, directories, weights)
        self._offsets: dict[tuple[str, int], npt.NDArray[np.int64]] = {}  # by part and slot
        self.arena_nbytes = [0] * directories
        self._place()

    def _place(self) -> None:
        names = {name for chunk in self.chunks for name in chunk}
        order = [n for n in _REGIONS if n in names] + sorted(names.difference(_REGIONS))
        for name, slot in itertools.product(order, range(2)):
            offsets = self._offsets[name, slot] = np.full(len(self.chunks), -1, np.int64)
            for number, chunk in enumerate(self.chunks):
                spec = chunk.get(name)
                if spec is not None and Tier.NVME in spec.tiers[slot : slot + 1] and not spec.in_place:
                    directory = int(self.directory[number])
                    offsets[number] = self.arena_nbytes[directory]
                    self.arena_nbytes[directory] += spec.nbytes

    def extent(self, chunk: int, part: str, slot: int = 0) -> Extent:
        """Return where a slot on NVMe lies."""
        begin, nbytes = int(self._offsets[part, slot][chunk]), self.chunks[chunk][part].nbytes
        return Extent(int(self.directory[chunk]), begin, nbytes)

    @property
    def host_nbytes(self) -> int:
        """Bytes of all slots on the host tier."""
        return sum(s.nbytes * s.tiers.count(Tier.HOST) for c in self.chunks for s in c.values())


def _check(number: int, name: str, spec: Part) -> None:
    if any(size <= 0 or size % ALIGNMENT for size in spec.sections) or not spec.sections:
        raise ConfigError(
            f"part {name!r} of chunk {number} has a section that cannot be transferred",
            expected=f"multiples of {ALIGNMENT} bytes, more than 0",
            found=str(spec.sections),
        )
    if len(spec.tiers) not in (1, 2):
        raise ConfigError(
            f"part {name!r} of chunk {number} has {len(spec.tiers)} slots",
            expected="one slot or two",
            found=", ".join(map(str, spec.tiers)),
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
