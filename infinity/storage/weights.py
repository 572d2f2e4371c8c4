"""Values of parameters in files that the engine only reads: those of a published or saved model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The tensors of parameters, by each of a parameter's names. Whoever opened the files closes them.

    Attributes:
        progress: called with the bytes that were read, and all bytes; None: nobody is told.
    """

    def __init__(self, tensors: Mapping[str, FileTensor]) -> None:
        self._tensors = tensors
        self.progress: Callable[[int, int], None] | None = None
        self._done = 0
        self._left: dict[str, None] = {}  # the parameters of which elements stay where they are
        once = {(t.file, t.name): t for t in tensors.values()}  # a parameter may have several names
        self._total = sum(t.numel * t.dtype.itemsize for t in once.values())

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter in its file."""
        return self._tensors[name].dtype

    def read(self, name: str, first: int, out: torch.Tensor) -> None:
        """Read the elements of a parameter from element `first` on into `out`, flat, of whichever dtype and
        device.

        Raises:
            CorruptionError, TransferError: see `TensorFile.read`.
        """
        if out.numel():
            tensor = self._tensors[name]
            tensor.file.read(tensor.name, first, out)
            self._tell(out.numel() * tensor.dtype.itemsize)

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        if self.progress is not None:
            self.progress(min(self._done, self._total), self._total)

    def ranges(
        self, name: str, first: int, numel: int, dtype: torch.dtype
    ) -> list[tuple[DirectFile, int, int]] | None:
        """Return where the bytes of these elements are: file, offset and number, one after the other; None:
        not as `dtype` has them, aligned to its size."""
        tensor = self._tensors[name]
        if tensor.dtype is not dtype:
            return None
        file, begin = tensor.file.where(tensor.name)
        begin += first * dtype.itemsize
        return None if begin % dtype.itemsize else [(file, begin, numel * dtype.itemsize)]

    def leave(self, name: str, numel: int) -> None:
        """Note that so many elements of a parameter are not to be read from here, but where they are."""
        self._left[name] = None
        tensor = self._tensors[name]
        if not tensor.file.has_checksums(tensor.name):
            self._total -= numel * tensor.dtype.itemsize

    def check(self) -> None:
        """Hold what stays where it is to its checksums, where there are some: it is read once for that.

        Raises:
            CorruptionError: it is not what was saved.
        """
        for tensor in map(self._tensors.__getitem__, self._left):
            if tensor.file.check(tensor.name):
                self._tell(tensor.numel * tensor.dtype.itemsize)
