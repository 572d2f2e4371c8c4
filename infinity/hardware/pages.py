"""Memory of units on a CPU device: at constant addresses, on pages that move between units.

[Note: pages that move] The engine constantly frees the memory of one unit for another, and the kernel fills
fresh pages with zeros. So the engine keeps the pages of a freed unit, protects them, and moves them to the
address of the next unit: mremap(2) moves entries of page tables, and copies nothing. It keeps no more pages
than the filled units leave of their budget. It does not free memory that is held, so an alias never shows
another unit's values. If the kernel cannot move pages (before Linux 5.7), pages are fresh each time.

The engine keeps pages in pieces of whole huge pages, at multiples of their size, so that the kernel need not
split any. Each piece is in a mapping of its own, and the kernel allows a process some ten thousand mappings:
memory that has split into many pieces is returned to the system when it is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Final

import torch

from infinity.core.errors import OutOfMemoryError, StorageError
from infinity.core.sizes import MiB, format_size
from infinity.core.system_errors import cure, reason

#: Bytes of a huge page; what is smaller is not kept.
GRAIN: Final = 2 * MiB
_MOST_PIECES: Final = 16
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_MAP_FIXED: Final = 0x10
_MOVE: Final = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mprotect.argtypes = [_pointer, _size, _int]
_libc.mmap.argtypes = [_pointer, _size, _int, _int, _int, ctypes.c_long]
_libc.mmap.restype = _pointer
_libc.mremap.argtypes = [_pointer, _size, _size, _int, _pointer]
_libc.mremap.restype = _pointer


class Pages:
    """The pages of one device's units. The thread that holds the engine lock uses them.

    Attributes:
        most: bytes that may be filled and kept at once; what would be more is not kept.
        filled: bytes that are filled.
        moved: bytes, of all that were filled so far, that were kept before.
    """

    def __init__(self) -> None:
        self.most = self.filled = self.moved = 0
        self._kept: list[PagedMemory] = []

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return sum(sum(memory.pieces.values()) for memory in self._kept)

    def keep(self, memory: PagedMemory) -> bool:
        """Keep the pieces of `memory`, which is not filled any more; return whether that may be done."""
        nbytes = sum(memory.pieces.values())
        may = 0 < len(memory.pieces) <= _MOST_PIECES and self.filled + self.kept + nbytes <= self.most
        if may:
            self._kept.append(memory)
        return may

    def unkeep(self, memory: PagedMemory) -> bool:
        """Leave its pieces to `memory`; return whether it was kept."""
        was = memory in self._kept
        if was:
            self._kept.remove(memory)
        return was

    def best(self, nbytes: int) -> tuple[PagedMemory, int] | None:
        """Return the piece that serves best where `nbytes` are needed, as memory and offset: the smallest
        that is enough, else the largest; None: nothing is kept."""
        pieces = [(n, i, at) for i, memory in enumerate(self._kept) for at, n in memory.pieces.items()]
        if not pieces:
            return None
        _, i, at = min((p for p in pieces if p[0] >= nbytes), default=max(pieces))
        return self._kept[i], at

    def trim(self) -> None:
        """Give back what is more than `most`, what was kept first before the rest."""
        while self._kept and self.filled + self.kept > self.most:
            self._kept.pop(0).give_back()


class PagedMemory:
    """The storage of one unit: a range of addresses that stays, so that views stay valid (it costs nothing).

    Not torch's allocator: blocks of some megabytes that come and go between small ones leave the C heap in
    pieces, and the process then holds far more than was planned. Without pages it is protected, so a stray
    use is a fault and not a zero. What is in it when it is filled is not defined.

    Attributes:
        pieces: the whole huge pages that it has: bytes by offset.
    """

    def __init__(self, nbytes: int, pages: Pages) -> None:
        self.pieces: dict[int, int] = {}
        self._pages = pages
        self._nbytes, self._whole = nbytes, nbytes // GRAIN * GRAIN
        self._filled = False
        # The mapping is never closed: the storage holds it, and the last of its tensors unmaps it.
        try:
            self._map = mmap.mmap(-1, nbytes + (GRAIN if self._whole else 0), flags=_FLAGS)
        except OSError as error:
            raise OutOfMemoryError(
                f"no room for {format_size(nbytes)} of address space",
                expected="room for the parameters of a unit as torch sees them",
                found=reason(error.errno),
                cure=cure(error.errno, "let fewer processes share the memory of this machine"),
            ) from error
        begin = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        skipped = -begin % GRAIN if self._whole else 0
        tensor = torch.frombuffer(self._map, dtype=torch.uint8, offset=skipped, count=nbytes)
        self.storage, self._address = tensor.untyped_storage(), begin + skipped
        _protect(begin, len(self._map), 0)
        self._advise()

    def fill(self) -> None:
        """Make it usable."""
        if self._filled:
            return
        pages, at = self._pages, self._whole
        if not pages.unkeep(self) or sum(self.pieces.values()) < self._whole:
            at = 0
            if self.pieces:
                self.give_back()
            try:
                while at < self._whole and (found := pages.best(self._whole - at)) is not None:
                    at += self._take(*found, at)
            except OSError:  # a kernel that cannot do it, or gives us no more mappings
                pages.most = at = 0
                self.give_back()
            if at < self._whole:
                self.pieces[at] = self._whole - at
        _protect(self._address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._filled = True
        pages.filled += self._nbytes
        pages.moved += at
        pages.trim()

    def used(self) -> None:
        """Nothing to do: what is asked for is done when the call returns."""

    def drop(self) -> None:
        """Let its pages go."""
        if not self._filled:
            return
        self._filled = False
        self._pages.filled -= self._nbytes
        if not self._pages.keep(self):
            self.give_back()
            return
        if self._whole < self._nbytes:
            self._map_anew(self._whole)
        _protect(self._address, self._whole, 0)

    def give_back(self) -> None:
        """Drop all pages."""
        self.pieces.clear()
        self._map_anew(0)

    def _take(self, other: PagedMemory, offset: int, at: int) -> int:
        """Take the end of a piece of another memory at byte `at`, as much of it as is needed; return its
        bytes."""
        there = other.pieces.pop(offset)
        nbytes = min(there, self._whole - at)
        if nbytes < there:
            other.pieces[offset] = there - nbytes
        source = other._address + offset + there - nbytes
        if _libc.mremap(source, nbytes, nbytes, _MOVE, self._address + at) == _FAILED:
            raise OSError(ctypes.get_errno(), "mremap")
        self.pieces[at] = nbytes
        if not other.pieces:
            self._pages.unkeep(other)
            other.give_back()
        return nbytes

    def _map_anew(self, offset: int) -> None:
        """Drop the pages from byte `offset` on, and map this range once, protected."""
        place, nbytes = self._address + offset, self._nbytes - offset
        if _libc.mmap(place, nbytes, 0, _FLAGS | _MAP_FIXED, -1, 0) == _FAILED:
            raise _refused("mmap")
        self._advise()

    def _advise(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)


def _protect(address: int, nbytes: int, protection: int) -> None:
    if _libc.mprotect(address, nbytes, protection):
        raise _refused("mprotect")


def _refused(call: str) -> StorageError:
    number = ctypes.get_errno()
    return StorageError(f"{call} failed: {os.strerror(number)}", errno=number)
