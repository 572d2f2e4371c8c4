"""Tensors in one safetensors file, written and read piece by piece, with a checksum of every range.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes, little endian, with the length of
a header; the header, JSON of {name: {"dtype", "shape", "data_offsets": [begin, end]}} that may end in spaces;
the bytes of the tensors, without holes. Nothing in such a file is code.

Several ranks may write and read one file, each its own part of every tensor: [Note: one file of all ranks].
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch

from infinity.core.errors import CorruptionError
from infinity.hardware.aio import DirectFile, Ring

from . import checksums
from .checksums import RangeCrc, Sums, by_name, join
from .folder import failed, kind_of, pwrite
from .tensor_header import AGAIN, Entry, Spec, entries_of, laid_out
from .under_way import UnderWay

_BOUNCE: Final = 1 << 20  # bytes that go through memory of ours at once
_AHEAD: Final = 2  # such pieces that are written while the next one is made
_Pieces: TypeAlias = Mapping[str, Iterable[RangeCrc]]  # of one rank, by tensor


class TensorFile:
    """Tensors by name, in a file. Made by `create`, `join` or `open`.

    Attributes:
        entries: the tensors, and where each is in the file.
    """

    def __init__(self, file: DirectFile, ring: Ring, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._file = file
        self._ring = ring
        self._sums = Sums()
        self._expected: dict[str, Sequence[int]] = {}

    @classmethod
    def create(
        cls,
        path: str,
        tensors: Mapping[str, Spec],
        ring: Ring,
        metadata: Mapping[str, str] | None = None,
    ) -> TensorFile:
        """Make a file for `tensors`, which `write` fills; there must be none of that name.

        Raises:
            DirectoryError: it cannot be made; `errno` says why.
            StateDictError: it cannot have a tensor of such a dtype.
        """
        text, entries, nbytes = laid_out(tensors, metadata)
        file = DirectFile.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(file.plain_fd, nbytes)
            pwrite(file.plain_fd, text, 0)
        except OSError as error:
            file.close()
            raise failed("write", path, error) from error
        except BaseException:
            file.close()
            raise
        return cls(file, ring, entries)

    @classmethod
    def join(
        cls,
        path: str,
        tensors: Mapping[str, Spec],
        ring: Ring,
        metadata: Mapping[str, str] | None = None,
    ) -> TensorFile:
        """Open a file that another rank has made for the same `tensors`, to `write` a part of each.

        [Note: one file of all ranks] A rank writes the blocks that are its own directly. What of its part of
        a tensor shares a block with that of another rank goes through the page cache, as all that is no whole
        block does, and nobody reads the file: so no rank writes an old version of another one's bytes.

        Raises:
            DirectoryError: it cannot be opened.
            CorruptionError: it is not the file that was made for them.
        """
        _, entries, nbytes = laid_out(tensors, metadata)
        file = DirectFile.open(path, os.O_WRONLY)
        if file.size != nbytes:
            found = file.size
            file.close()
            raise CorruptionError(
                f"{path} is not the file that another rank has created",
                path=path,
                expected=f"{nbytes} bytes",
                found=f"{found} bytes",
                cure="use a directory on a file system that shows each rank at once what the others write",
            )
        return cls(file, ring, entries)

    @classmethod
    def open(cls, path: str, ring: Ring, expected: Mapping[str, Sequence[int]] | None = None) -> TensorFile:
        """Open a file to read it. `expected`: the checksums of each tensor's ranges.

        Raises:
            DirectoryError: it cannot be opened.
            CorruptionError: it is no safetensors file, or not all of one, or does not have the tensors of
                `expected`.
        """
        file = opened_to_read(path)
        try:
            opened = cls(file, ring, entries_of(path, file))
            if expected is not None:
                opened._expect(expected)
        except BaseException:
            file.close()
            raise
        return opened

    def _expect(self, expected: Mapping[str, Sequence[int]]) -> None:
        for name in expected.keys() | self.entries.keys():
            entry = self.entries.get(name)
            count = None if entry is None else checksums.count_of(entry.nbytes)
            wanted = len(expected[name]) if name in expected else None
            if count != wanted:
                raise not_the_file(
                    self.path,
                    f"{wanted} ranges of {name!r}" if wanted is not None else f"no {name!r}",
                    f"{count}" if count is not None else "no such tensor",
                )
        self._expected = dict(expected)

    def where(self, name: str) -> tuple[DirectFile, int]:
        """Return the open file, and at which of its bytes a tensor begins."""
        return self._file, self.entries[name].begin

    def has_checksums(self, name: str) -> bool:
        """Return whether reads of this tensor are held to checksums."""
        return name in self._expected

    def check(self, name: str) -> bool:
        """Hold a tensor to its checksums, and return True, or False if there are none. It may be read in any
        order then, and is not held to them again.

        Raises:
            CorruptionError: it is not what was written.
        """
        if name not in self._expected:
            return False
        entry = self.entries[name]
        bounce = torch.empty(min(4 * _BOUNCE, entry.nbytes) // entry.dtype.itemsize, dtype=entry.dtype)
        for begin in range(0, entry.numel, max(1, bounce.numel())):
            self.read(name, begin, bounce[: entry.numel - begin])
        del self._expected[name]
        return True

    @property
    def path(self) -> str:
        """The file's path."""
        return self._file.path

    def write(self, name: str, first: int, tensor: torch.Tensor, under_way: UnderWay | None = None) -> None:
        """Write the elements of `tensor`, of whichever dtype and device: the file's from element `first` on.
        The pieces of a tensor come in order. With `under_way`, it may go on after this returns.

        Raises:
            TransferError: the drive does not take them; `errno` says why.
        """
        entry = self.entries[name]
        flat = tensor.reshape(-1)
        as_it_is = flat.dtype is entry.dtype and flat.device.type == "cpu"
        own = under_way if under_way is not None and as_it_is else UnderWay()
        try:
            for begin, piece in on_host(flat, entry.dtype):
                at = (first + begin) * entry.dtype.itemsize
                if piece.nbytes:
                    ticket = self._ring.write(self._file, entry.begin + at, piece.data_ptr(), piece.nbytes)
                    own.add(ticket, partial(_let_go, piece))
                self._sums.add(name, at, piece.data_ptr(), piece.nbytes)
                if own is not under_way:
                    own.wait(_AHEAD)
            if own is not under_way:
                own.wait()
        finally:
            if own is not under_way:
                own.drop()

    def read(
        self,
        name: str,
        first: int,
        out: torch.Tensor,
        under_way: UnderWay | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Read the tensor's elements from element `first` on into `out`, of whichever dtype and device. Where
        there are checksums, the pieces of a tensor come in order. `then` is called when they are there: with
        `under_way`, that may be after this returns.

        Raises:
            CorruptionError: they are not those that were written. They are in `out` all the same.
            TransferError: the drive does not give them.
        """
        entry = self.entries[name]
        flat = out.view(-1)
        if flat.dtype is entry.dtype and flat.device.type == "cpu":
            own = UnderWay() if under_way is None else under_way
            self._read(name, entry, first, flat, own, then)
            if under_way is None:
                own.wait()
            return
        count = _BOUNCE // entry.dtype.itemsize
        bounce = torch.empty(min(count, flat.numel()), dtype=entry.dtype)
        for begin in range(0, flat.numel(), count):
            piece = bounce[: flat.numel() - begin]
            own = UnderWay()
            self._read(name, entry, first + begin, piece, own)
            own.wait()
            flat[begin : begin + piece.numel()].copy_(piece)
        then()

    def _read(
        self,
        name: str,
        entry: Entry,
        first: int,
        out: torch.Tensor,
        under_way: UnderWay,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        if not out.numel():
            then()
            return

        def arrived() -> None:
            self._check(name, entry, first, out)
            then()

        at = entry.begin + first * entry.dtype.itemsize
        under_way.add(self._ring.read(self._file, at, out.data_ptr(), out.nbytes), arrived)

    def _check(self, name: str, entry: Entry, first: int, out: torch.Tensor) -> None:
        if name in self._expected:
            self._sums.add(name, first * entry.dtype.itemsize, out.data_ptr(), out.nbytes)
            for piece in self._sums.take_whole(name, entry.nbytes):
                self._compare(name, piece)

    def _compare(self, name: str, piece: RangeCrc) -> None:
        entry = self.entries[name]
        expected = self._expected[name][piece.begin // checksums.RANGE_NBYTES]
        if piece.is_whole(entry.nbytes) and expected == piece.crc:
            return
        raise CorruptionError(
            f"{name!r} in {self.path} is not what was saved",
            path=self.path,
            offset=entry.begin + piece.begin,
            nbytes=piece.end - piece.begin,
            expected=f"CRC-32C {expected:08x} of bytes {piece.begin}…{piece.end}",
            found=f"{piece.crc:08x}",
            cure=AGAIN,
        )

    def pieces(self) -> dict[str, list[RangeCrc]]:
        """Return what was written of each tensor; or of one that is read and held to checksums, what could
        not be compared yet, because other ranks read the rest of a range."""
        return self._sums.take()

    def compare(self, of_ranks: Iterable[_Pieces]) -> None:
        """Hold to their checksums the ranges of which several ranks have read pieces.

        Raises:
            CorruptionError: one is not what was written.
        """
        for name, pieces in by_name(of_ranks).items():
            for piece in join(pieces):
                self._compare(name, piece)

    def checksums(self, of_ranks: Iterable[_Pieces] | None = None) -> dict[str, list[int]]:
        """Return the checksums of the ranges of each tensor, once every one is written; by several ranks:
        from the `pieces` of each."""
        sizes = {name: entry.nbytes for name, entry in self.entries.items()}
        return checksums.sums_of([self.pieces()] if of_ranks is None else of_ranks, sizes)

    def sync(self) -> None:
        """Block until every byte that was written survives a power failure.

        Raises:
            DirectoryError: the drive reports a failure.
        """
        try:
            os.fsync(self._file.plain_fd)
        except OSError as error:
            raise failed("write", self.path, error) from error

    def close(self) -> None:
        """Close the file. Nothing may be under way."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_all(path: str, tensors: Mapping[str, torch.Tensor], ring: Ring) -> dict[str, list[int]]:
    """Write a file of `tensors`, and wait until it would survive a power failure; return the checksums."""
    specs = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    with TensorFile.create(path, specs, ring) as file:
        for name, tensor in tensors.items():
            file.write(name, 0, tensor)
        file.sync()
        return file.checksums()


def read_all(path: str, ring: Ring, expected: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return every tensor of a file, checked."""
    with TensorFile.open(path, ring, expected) as file:
        tensors = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in file.entries.items()}
        for name, tensor in tensors.items():
            file.read(name, 0, tensor)
    return tensors


def opened_to_read(path: str) -> DirectFile:
    """Open a file to read it.

    Raises:
        CorruptionError: there is no file.
        DirectoryError: it cannot be opened.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        mode = 0
    if not stat.S_ISREG(mode):  # and a pipe is not waited for
        raise CorruptionError(
            f"{path} is not a readable file",
            path=path,
            expected="the file that the index of the checkpoint names",
            found=kind_of(mode) if mode else "nothing",
            cure=AGAIN,
        )
    return DirectFile.open(path, os.O_RDONLY)


def not_the_file(path: str, expected: str, found: str) -> CorruptionError:
    """Return the error of a file that is another one."""
    return CorruptionError(
        f"{path} is not the file that belongs here", path=path, expected=expected, found=found, cure=AGAIN
    )


def _let_go(tensor: torch.Tensor) -> None:
    """Hold a tensor until its transfer is over."""


def on_host(flat: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the pieces of `flat`, as (first element, tensor on the host of that dtype)."""
    if not flat.numel():
        return
    if flat.device.type == "cpu" and flat.dtype is dtype:
        yield 0, flat
        return
    count = _BOUNCE // dtype.itemsize
    for begin in range(0, flat.numel(), count):
        yield begin, flat[begin : begin + count].to(dtype).cpu()
