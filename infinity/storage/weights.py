"""Values of parameters in files that the engine only reads: those of a published or saved model.

A parameter's values are one tensor of a file, or a concatenation of several: libraries combine a list of
tensors in their files into one parameter (the experts of a mixture).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from infinity.hardware.aio import DirectFile

from .tensor_file import TensorFile


class FileTensor(NamedTuple):
    """A tensor of a file, `numel` elements."""

    file: TensorFile
    name: str
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return self.file.entries[self.name].dtype


class Weights:
    """The pieces of parameters, by each of a parameter's names. Whoever opened the files closes them.

    Attributes:
        progress: called with the bytes that were read, and all bytes; None: nobody is told.
    """

    def __init__(self, pieces: Mapping[str, Sequence[FileTensor]]) -> None:
        self.pieces = pieces
        self.progress: Callable[[int, int], None] | None = None
        self._done = 0
        self._left: dict[str, None] = {}  # the parameters of which elements stay where they are
        once = {id(parts): parts for parts in pieces.values()}  # a parameter may have several names
        self._total = sum(_nbytes(p, p.numel) for parts in once.values() for p in parts)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter in its files; of several tensors, one that holds all."""
        return functools.reduce(torch.promote_types, (piece.dtype for piece in self.pieces[name]))

    def read(self, name: str, first: int, out: torch.Tensor) -> None:
        """Read the elements of a parameter from element `first` on into `out`, flat, of whichever dtype and
        device.

        Raises:
            CorruptionError, TransferError: see `TensorFile.read`.
        """
        for piece, low, high, at in self._parts(name, first, out.numel()):
            piece.file.read(piece.name, low, out[at : at + high - low])
            self._tell(_nbytes(piece, high - low))

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        if self.progress is not None:
            self.progress(min(self._done, self._total), self._total)

    def ranges(
        self, name: str, first: int, numel: int, dtype: torch.dtype
    ) -> list[tuple[DirectFile, int, int]] | None:
        """Return where the bytes of these elements are: file, offset and number, one after the other; None:
        not as `dtype` has them, aligned to its size."""
        found = []
        for piece, low, high, _ in self._parts(name, first, numel):
            nbytes = (high - low) * dtype.itemsize
            if piece.dtype is not dtype:
                return None
            file, begin = piece.file.where(piece.name)
            begin += low * dtype.itemsize
            if begin % dtype.itemsize:
                return None
            found.append((file, begin, nbytes))
        return found

    def leave(self, name: str, numel: int) -> None:
        """Note that so many elements of a parameter are not to be read from here, but where they are."""
        self._left[name] = None
        if not any(p.file.has_checksums(p.name) for p in self.pieces[name]):
            self._total -= numel * self.pieces[name][0].dtype.itemsize

    def check(self) -> None:
        """Hold what stays where it is to its checksums, where there are some: it is read once for that.

        Raises:
            CorruptionError: it is not what was saved.
        """
        for name in self._left:
            for piece in self.pieces[name]:
                if piece.file.check(piece.name):
                    self._tell(_nbytes(piece, piece.numel))

    def _parts(self, name: str, first: int, numel: int) -> Iterator[tuple[FileTensor, int, int, int]]:
        """Yield the pieces that hold these elements: each with its first of them, the one after its last,
        and where its first is among them."""
        begin = 0
        for piece in self.pieces[name]:
            low, high = max(first - begin, 0), min(first + numel - begin, piece.numel)
            if low < high:
                yield piece, low, high, begin + low - first
            begin += piece.numel


def _nbytes(piece: FileTensor, numel: int) -> int:
    return numel * piece.dtype.itemsize
