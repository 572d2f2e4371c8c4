"""Tensors by name in safetensors files of a bounded size, with an index, as Hugging Face has them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Final

import torch

from infinity.hardware.aio import Ring

from .folder import Folder
from .tensor_file import TensorFile
from .tensor_header import Spec

_METADATA: Final = {"format": "pt"}  # that tensors are torch's: transformers asks for it


class Shards:
    """The files of a folder that are to have `tensors`: a `with` block, which ends in `finish`.

    They are filled in the order of `tensors`, each with as many as fit `limit` bytes, and at least one: a
    tensor is never cut. A file is open from the first of its bytes that comes to the last.

    Args:
        stem: the files are <stem>.safetensors, or <stem>-00001-of-00002.safetensors and so on.
        limit: None: one file.
        tied: names that belong to other tensors, too: name → the tensor. They are noted in the files.
        metadata: more for the headers of the files.
        told: called with how many bytes were written.
        rank: of several ranks, each of which writes a part of the tensors: the first one calls `make` before
            any begins. None: there is one.
    """

    def __init__(
        self,
        folder: Folder,
        ring: Ring,
        stem: str,
        tensors: Mapping[str, Spec],
        *,
        limit: int | None = None,
        tied: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        told: Callable[[int], None] = lambda nbytes: None,
        rank: int | None = None,
    ) -> None:
        self.nbytes = 0
        self._rank = rank
        self._ring = ring
        self._stem = stem
        self._folder = folder
        self._told = told
        self._tied = dict(tied or {})
        self._metadata = {**(metadata or {}), **_METADATA}
        self._tensors: list[dict[str, Spec]] = [{}]  # of each file
        self._left = [0]  # bytes of each that have not come yet
        for name, spec in tensors.items():
            dtype, shape = spec
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            if limit is not None and self._tensors[-1] and self._left[-1] + nbytes > limit:
                self._tensors.append({})
                self._left.append(0)
            self._tensors[-1][name] = spec
            self._left[-1] += nbytes
            self.nbytes += nbytes
        self._of = {name: index for index, names in enumerate(self._tensors) for name in names}
        self._names = [f"{stem}.safetensors"]
        if len(self._tensors) > 1:
            count = len(self._tensors)
            self._names = [f"{stem}-{k:05}-of-{count:05}.safetensors" for k in range(1, count + 1)]
        self.paths = [folder.file(name) for name in self._names]
        self._open: dict[int, TensorFile] = {}
        self._closing = contextlib.ExitStack()

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write the tensor's elements from element `first` on; see `TensorFile.write`."""
        if not values.numel():
            return
        index = self._of[name]
        file = self._file(index)
        file.write(name, first, values)
        nbytes = values.numel() * file.entries[name].dtype.itemsize
        self._left[index] -= nbytes
        if not self._left[index]:
            self._end(index)
        self._told(nbytes)

    def make(self) -> None:
        """Make all files, for all ranks to write."""
        for index in range(len(self._names)):
            with self._opened(index, TensorFile.create) as file:
                file.sync()

    def _file(self, index: int) -> TensorFile:
        if index not in self._open:
            file = self._opened(index, TensorFile.create if self._rank is None else TensorFile.join)
            self._open[index] = self._closing.enter_context(file)
        return self._open[index]

    def _opened(self, index: int, how: Callable[..., TensorFile]) -> TensorFile:
        tensors = self._tensors[index]
        tied = {name: kept for name, kept in self._tied.items() if kept in tensors}
        return how(self.paths[index], tensors, self._ring, {**tied, **self._metadata})

    def _end(self, index: int) -> None:
        file = self._open[index]
        file.sync()
        file.close()

    def finish(self) -> None:
        """Complete every file, and write the index if there are several files. With several ranks, each rank
        syncs its own writes, and the first one writes the index."""
        if self._rank is not None:
            for index in self._open:
                if self._left[index]:
                    self._end(index)
        else:
            assert not any(self._left), self._left
            for index in range(len(self._names)):
                if index not in self._open:  # it has no bytes
                    self._file(index)
                    self._end(index)
        if len(self._names) > 1 and not self._rank:
            numel = sum(torch.Size(shape).numel() for file in self._tensors for _, shape in file.values())
            content = {
                "metadata": {"total_parameters": numel, "total_size": self.nbytes},
                "weight_map": {name: self._names[file] for name, file in self._of.items()},
            }
            text = json.dumps(content, indent=2, sort_keys=True) + "\n"
            self._folder.write(f"{self._stem}.safetensors.index.json", text)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
