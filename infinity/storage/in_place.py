"""Compute parameters that are read from foreign files, as [Note: windows] describes.

The engine has not written such a file. So the first read of a window defines its content, and the engine
compares every later read with it: a file that changes during use is an error, and not another model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from infinity.hardware.aio import DirectFile, Ring, RingSettings, open_ring
from infinity.planning.in_place import InPlace, Range, in_place
from infinity.planning.partition import UnitLayout

from .layout import Extent
from .pinned import Lease
from .transfer import SlotState, check_room
from .weights import Weights


class Files:
    """Files that copies of chunks are read from, in place.

    Args:
        files: open to be read; whoever opened them closes them, after the store.
        places: of the chunks whose copies are in them, by chunk id. A range names a file by its index.
    """

    def __init__(self, files: Sequence[DirectFile], places: Mapping[int, InPlace]) -> None:
        self.files = tuple(files)
        self.places = places
        self.folder = os.path.dirname(os.path.abspath(files[0].path))
        self._windows: dict[int, list[SlotState]] = {}  # by chunk; the first read of each says what it holds

    def open_ring(self, settings: RingSettings) -> Ring:
        """Return a ring for them. Nothing is made in their directory."""
        ring = open_ring("files", self.folder, settings._replace(delay_seed=None), writable=False)
        for file in self.files:
            ring.register_file(file)
        return ring

    def windows(self, chunk: int, lease: Lease, offset: int, directory: int) -> list[tuple[SlotState, int]]:
        """Return what a chunk's copy is read from into `lease` from byte `offset` on, and where each window
        goes. `directory`: the number that their extents get."""
        place = self.places[chunk]
        check_room(lease, offset, place.lease_nbytes)
        if chunk not in self._windows:
            self._windows[chunk] = [
                SlotState(
                    chunk,
                    "copy",
                    (w.nbytes,),
                    Extent(directory, w.offset, w.nbytes),
                    (None,),
                    self.files[w.file],
                )
                for w in place.windows
            ]
        found = zip(self._windows[chunk], place.windows, strict=True)
        return [(window, offset + spec.at) for window, spec in found]


def find_places(layouts: Sequence[UnitLayout], weights: Weights) -> Files | None:
    """Return which chunks of some units can be read where `weights` has them, in the dtype of the copy, and
    how; None: none can. What cannot is copied.
    """
    places: dict[int, InPlace] = {}
    files: dict[DirectFile, int] = {}
    sizes: list[int] = []
    for unit in layouts:
        for chunk in unit.chunks:
            ranges = []
            for segment in chunk.segments:
                begin = segment.start * chunk.dtype.itemsize
                name = unit.params[segment.param].name
                found = weights.ranges(name, segment.offset, segment.numel, chunk.dtype)
                if found is None:
                    break
                for file, offset, nbytes in found:
                    if files.setdefault(file, len(files)) == len(sizes):
                        sizes.append(file.size)
                    ranges.append(Range(files[file], offset, nbytes, begin))
                    begin += nbytes
            else:
                if ranges:
                    places[chunk.id] = in_place(ranges, sizes)
    if not places:
        return None
    for unit in layouts:
        for chunk in unit.chunks:
            if chunk.id in places:
                for segment in chunk.segments:
                    weights.leave(unit.params[segment.param].name, segment.numel)
    return Files(list(files), places)
