"""The places of tensors in safetensors files: in one file that has all, or in several that each have parts.

[Note: files of parts] If ranks share no file system, each file system has a file with its ranks' parts
of the tensors. In it elements b to e of tensor x are a flat tensor ``x[b:e]``. Readers and writers
see whole tensors: checksums cover their ranges, in whichever file these are.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from infinity.core.errors import CorruptionError, StateDictError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.hardware.aio import DirectFile

from .tensor_header import NAMES, Entry, Spec, entries_of, nbytes_of

#: Of each tensor the elements, from one to before another, that a file has: [Note: files of parts].
Parts: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
_PART: Final = re.compile(r"(.*)\[(\d{1,18}):(\d{1,18})\]", re.DOTALL)


class Place(NamedTuple):
    """Where bytes of a tensor are: `begin` to `end` of them, from byte `at` of a file on."""

    begin: int
    end: int
    file: DirectFile
    at: int


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of elements, from one to before another, in their order, with those that touch as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(found.pop()[1], end)
        found.append((begin, end))
    return found


def opened_to_read(path: str, stack: contextlib.ExitStack | None = None) -> DirectFile:
    """Open a file to read it; `stack` closes it."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        regular = False
    if not regular:  # and a pipe is not waited for
        raise CorruptionError(
            f"{path} is not a readable file",
            path=path,
            expected="the file that the index of the checkpoint names",
            found="something else" if os.path.lexists(path) else "nothing",
            cure="copy this checkpoint again from its source; or load another one, if there is one",
        )
    file = DirectFile.open(path, os.O_RDONLY)
    if stack is not None:
        stack.callback(file.close)
    return file


def not_the_file(path: str, expected: str, found: str) -> CorruptionError:
    """Return the error of a file that is another one."""
    return CorruptionError(
        f"{path} is not the file that belongs here",
        path=path,
        expected=expected,
        found=found,
        cure="copy this checkpoint again from its source; or load another one, if there is one",
    )


def whole(file: DirectFile, entries: Mapping[str, Entry]) -> dict[str, list[Place]]:
    """Return where tensors are in a file that has all of each."""
    return {name: [Place(0, entry.nbytes, file, entry.begin)] for name, entry in entries.items()}


def entries_for(tensors: Mapping[str, Spec]) -> dict[str, Entry]:
    """Return what tensors are like that are not in one file."""
    specs = tensors.items()
    return {name: Entry(dtype, tuple(shape), 0, nbytes_of(dtype, shape)) for name, (dtype, shape) in specs}


def located(
    file: DirectFile, tensors: Mapping[str, Spec], within: Mapping[str, Entry], parts: Parts | None
) -> tuple[Mapping[str, Entry], dict[str, list[Place]]]:
    """Return `tensors`, and where they are in a file that has `within`: all of them, or `parts`."""
    if parts is None:
        return within, whole(file, within)
    places = {}
    for name, (dtype, _) in tensors.items():
        size = dtype.itemsize
        there = [(begin, end, within[_part(name, begin, end)].begin) for begin, end in parts.get(name, ())]
        places[name] = [Place(begin * size, end * size, file, at) for begin, end, at in there]
    return entries_for(tensors), places


def places_of(files: Sequence[DirectFile], tensors: Mapping[str, Spec]) -> dict[str, list[Place]]:
    """Return where the parts of `tensors` are that files have.

    Raises:
        CorruptionError: a file cannot be read, or has something else.
    """
    places: dict[str, list[Place]] = {name: [] for name in tensors}
    for file in files:
        for name, entry in entries_of(file.path, file).items():
            match = _PART.fullmatch(name)
            place = _place_of(match, entry, file, tensors) if match is not None else None
            if match is None or place is None:
                raise not_the_file(file.path, "parts of the tensors that were saved", repr(name))
            places[match[1]].append(place)
    for name, found in places.items():
        found.sort(key=lambda place: place.begin)
        for one, other in itertools.pairwise(found):
            if one.end > other.begin:
                raise not_the_file(other.file.path, "parts that do not overlap", f"those of {name!r}")
    return places


def _place_of(
    match: re.Match[str], entry: Entry, file: DirectFile, tensors: Mapping[str, Spec]
) -> Place | None:
    """Return which bytes of one of `tensors` an entry of a file of parts is; None: of none."""
    if match[1] not in tensors:
        return None
    dtype, shape = tensors[match[1]]
    begin, end = (int(number) * dtype.itemsize for number in match.groups()[1:])
    fits = entry.dtype is dtype and end - begin == entry.nbytes and end <= nbytes_of(dtype, shape)
    return Place(begin, end, file, entry.begin) if fits else None


def _part(name: str, begin: int, end: int) -> str:
    return f"{name}[{begin}:{end}]"


def laid_out(
    tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None, parts: Parts | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Return what is before the first tensor of a file, and where each tensor is; with `parts`, each part."""
    if parts is not None:
        tensors = {
            _part(name, begin, end): (dtype, (end - begin,))
            for name, (dtype, _) in tensors.items()
            for begin, end in parts.get(name, ())
        }
    entries: dict[str, Entry] = {}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    # Those of whole blocks first: then each of them begins at one, and moves without the page cache.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: nbytes_of(*item[1]) % ALIGNMENT > 0):
        if dtype not in NAMES:
            raise StateDictError(
                f"{name!r} has the dtype {dtype}, which safetensors files do not support",
                expected=", ".join(str(d).removeprefix("torch.") for d in NAMES),
                found=str(dtype).removeprefix("torch."),
                cure="cast it to another dtype, or make it a buffer that is not persistent",
            )
        nbytes = nbytes_of(dtype, shape)
        header[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [at, at + nbytes]}
        entries[name] = Entry(dtype, tuple(shape), at, nbytes)
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Aligned, so that whole blocks of the first tensors are written directly.
    data = ceil_to(8 + len(text), ALIGNMENT)
    text = text.ljust(data - 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: e._replace(begin=e.begin + data) for name, e in entries.items()}


def end_of(text: bytes, entries: Mapping[str, Entry]) -> int:
    """Return the size of a file."""
    return len(text) + sum(entry.nbytes for entry in entries.values())
