"""Tensors in one safetensors file, written and read piece by piece, with a checksum of every range.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes, little endian, with the length of
a header; the header, JSON of {name: {"dtype", "shape", "data_offsets": [begin, end]}} that may end in spaces;
the bytes of the tensors, without holes. Nothing in such a file is code.

[Note: ranges] A tensor's bytes are cut into ranges of `RANGE_NBYTES` from its beginning, each with a CRC-32C
of its own. They do not depend on how a run is cut into chunks, so that one may be saved in one way and loaded
in another. The pieces of a tensor come in order, so a range is checked as its last byte comes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from infinity.core.errors import CorruptionError, StateDictError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.hardware.aio import DirectFile, Ring, crc32c

from .folder import failed, pwrite
from .tensor_header import NAMES, Entry, Spec, entries_of, nbytes_of
from .under_way import UnderWay

#: Bytes of a tensor that one checksum covers: [Note: ranges].
RANGE_NBYTES: Final = 16 << 20
_BOUNCE: Final = 1 << 20  # bytes that go through memory of ours at once
_AHEAD: Final = 2  # such pieces that are written while the next one is made


class _Sums:
    """The checksums of tensors whose pieces come in order."""

    def __init__(self) -> None:
        self._done: dict[str, list[int]] = {}
        self._open: dict[str, tuple[int, int]] = {}  # bytes so far, and the CRC of the range they end in

    def add(self, name: str, begin: int, address: int, nbytes: int) -> range:
        """Take `nbytes` at `address`, which are the tensor's from byte `begin` on; return which ranges they
        complete."""
        at, crc = self._open.get(name, (0, 0))
        assert at == begin, (name, at, begin)
        done = self._done.setdefault(name, [])
        first = len(done)
        end = at + nbytes
        while at < end:
            upto = min(end, (at // RANGE_NBYTES + 1) * RANGE_NBYTES)
            crc = crc32c(address + at - begin, upto - at, crc)
            at = upto
            if at % RANGE_NBYTES == 0:
                done.append(crc)
                crc = 0
        self._open[name] = at, crc
        return range(first, len(done))

    def close(self, name: str) -> list[int]:
        """Return the checksums of a tensor that is complete."""
        at, crc = self._open.pop(name, (0, 0))
        return self._done.pop(name, []) + ([crc] if at % RANGE_NBYTES else [])


class TensorFile:
    """Tensors by name, in a file. Made by `create` or `open`."""

    def __init__(self, file: DirectFile, ring: Ring, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._file = file
        self._ring = ring
        self._sums = _Sums()
        self._expected: dict[str, Sequence[int]] = {}

    @classmethod
    def create(
        cls, path: str, tensors: Mapping[str, Spec], ring: Ring, metadata: Mapping[str, str] | None = None
    ) -> TensorFile:
        """Make a file for `tensors`, which `write` fills; there must be none of that name.

        Raises:
            DirectoryError: it cannot be made; `errno` says why.
            StateDictError: it cannot have a tensor of such a dtype.
        """
        entries: dict[str, Entry] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        at = 0
        # Those of whole blocks first: then each of them begins at one, and moves without the page cache.
        for name, (dtype, shape) in sorted(
            tensors.items(), key=lambda item: nbytes_of(*item[1]) % ALIGNMENT > 0
        ):
            if dtype not in NAMES:
                raise StateDictError(
                    f"{name!r} is of {dtype}, which a safetensors file cannot have",
                    expected=", ".join(str(d).removeprefix("torch.") for d in NAMES),
                    found=str(dtype).removeprefix("torch."),
                    cure="make it another dtype, or a buffer that is not persistent",
                )
            nbytes = nbytes_of(dtype, shape)
            header[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [at, at + nbytes]}
            entries[name] = Entry(dtype, tuple(shape), at, nbytes)
            at += nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        # Aligned, so that whole blocks of the first tensors are written directly.
        data = ceil_to(8 + len(text), ALIGNMENT)
        text = text.ljust(data - 8)
        entries = {name: e._replace(begin=e.begin + data) for name, e in entries.items()}
        file = DirectFile.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(file.plain_fd, data + at)
            pwrite(file.plain_fd, len(text).to_bytes(8, "little") + text, 0)
        except OSError as error:
            file.close()
            raise failed("write", path, error) from error
        except BaseException:
            file.close()
            raise
        return cls(file, ring, entries)

    @classmethod
    def open(cls, path: str, ring: Ring, expected: Mapping[str, Sequence[int]] | None = None) -> TensorFile:
        """Open a file to read it. `expected`: the checksums of each tensor's ranges.

        Raises:
            DirectoryError: it cannot be opened.
            CorruptionError: it is no safetensors file, or not all of one, or does not have the tensors of
                `expected`.
        """
        try:
            regular = stat.S_ISREG(os.stat(path).st_mode)
        except OSError:
            regular = False
        if not regular:  # and a pipe is not waited for
            raise CorruptionError(
                f"{path} is no file that can be read",
                path=path,
                expected="the file that the index of the checkpoint names",
                found="something else" if os.path.lexists(path) else "nothing",
                cure="load another checkpoint; or bring this one again from where it was copied",
            )
        file = DirectFile.open(path, os.O_RDONLY)
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
            count = None if entry is None else -(-entry.nbytes // RANGE_NBYTES)
            wanted = len(expected[name]) if name in expected else None
            if count != wanted:
                raise CorruptionError(
                    f"{self._file.path} is not the file that belongs here",
                    path=self._file.path,
                    expected=f"{wanted} ranges of {name!r}" if wanted is not None else f"no {name!r}",
                    found=f"{count}" if count is not None else "no such tensor",
                    cure="load another checkpoint; or bring this one again from where it was copied",
                )
        self._expected = dict(expected)

    @property
    def direct_file(self) -> DirectFile:
        """The open file, for whoever reads it without this object."""
        return self._file

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
            for begin, piece in _on_host(flat, entry.dtype):
                at = (first + begin) * entry.dtype.itemsize
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
        ticket = self._ring.read(
            self._file, entry.begin + first * entry.dtype.itemsize, out.data_ptr(), out.nbytes
        )

        def arrived() -> None:
            self._check(name, entry, first, out)
            then()

        under_way.add(ticket, arrived)

    def _check(self, name: str, entry: Entry, first: int, out: torch.Tensor) -> None:
        at = first * entry.dtype.itemsize
        expected = self._expected.get(name)
        if expected is None:
            return
        complete = self._sums.add(name, at, out.data_ptr(), out.nbytes)
        found = self._sums._done[name]
        for index in complete:
            self._compare(name, index, expected[index], found[index])
        if at + out.nbytes == entry.nbytes:
            found = self._sums.close(name)
            if len(found) > complete.stop:
                self._compare(name, complete.stop, expected[-1], found[-1])

    def _compare(self, name: str, index: int, expected: int, found: int) -> None:
        if expected == found:
            return
        entry = self.entries[name]
        begin = index * RANGE_NBYTES
        raise CorruptionError(
            f"{name!r} in {self.path} is not what was saved",
            path=self.path,
            offset=entry.begin + begin,
            nbytes=min(RANGE_NBYTES, entry.nbytes - begin),
            expected=f"CRC-32C {expected:08x} of bytes {begin}…{min(begin + RANGE_NBYTES, entry.nbytes)}",
            found=f"{found:08x}",
            cure="load another checkpoint; or bring this one again from where it was copied",
        )

    def checksums(self) -> dict[str, list[int]]:
        """Return the checksums of the ranges of each tensor, once every one is written."""
        return {name: self._sums.close(name) for name in self.entries}

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


def _let_go(tensor: torch.Tensor) -> None:
    """Hold a tensor until its transfer is over."""


def _on_host(flat: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the pieces of `flat`, as (first element, tensor on the host of that dtype)."""
    if not flat.numel():
        return
    if flat.device.type == "cpu" and flat.dtype is dtype:
        yield 0, flat
        return
    count = _BOUNCE // dtype.itemsize
    for begin in range(0, flat.numel(), count):
        yield begin, flat[begin : begin + count].to(dtype).cpu()
