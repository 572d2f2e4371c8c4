"""The header of a safetensors file: which tensors it has, and where. It is checked before anything is read.

The format is in infinity/storage/tensor_file.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from infinity.core.errors import CorruptionError, StateDictError
from infinity.core.sizes import ALIGNMENT, ceil_to
from infinity.hardware.aio import DirectFile

#: The longest header that is read: what the safetensors library reads, too.
HEADER_LIMIT: Final = 100_000_000

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
#: What to do about a file of a checkpoint that is damaged.
AGAIN: Final = "copy this checkpoint again from its source; or load another one, if there is one"


#: What a tensor that is to be written is like: its dtype and its shape.
Spec: TypeAlias = tuple[torch.dtype, Sequence[int]]


class Entry(NamedTuple):
    """Where a tensor is in its file: `begin` in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.nbytes // self.dtype.itemsize


def nbytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def laid_out(
    tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry], int]:
    """Return what is before the first tensor of a file, where each tensor is, and the size of the file.

    Raises:
        StateDictError: such a file cannot have a tensor of such a dtype.
    """
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
    return begin, {name: e._replace(begin=e.begin + data) for name, e in entries.items()}, data + at


def entries_of(path: str, file: DirectFile) -> dict[str, Entry]:
    """Read and check a file's header."""

    def wrong(expected: str, found: object) -> CorruptionError:
        return CorruptionError(
            f"{path} is not a readable safetensors file",
            path=path,
            expected=expected,
            found=found,
            cure=AGAIN,
        )

    size = file.size
    length = int.from_bytes(os.pread(file.plain_fd, 8, 0), "little") if size >= 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise wrong(f"a header of 2 to {HEADER_LIMIT} bytes in a file that holds it", f"{length} of {size}")
    text = b""
    while len(text) < length:
        piece = os.pread(file.plain_fd, length - len(text), 8 + len(text))
        if not piece:
            raise wrong("a file that keeps its size", "one that became shorter")
        text += piece
    header: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
        raise wrong("a header of JSON with one entry for each tensor", "something else")
    header.pop("__metadata__", None)
    entries = {}
    for name, value in header.items():
        entry = _entry(value)
        if entry is None:
            raise wrong(
                "a dtype, a shape, and offsets that hold just so many bytes", f"{name!r}: {value!r:.200}"
            )
        entries[name] = entry
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != at:
            raise wrong("tensors without holes that do not overlap", f"{name!r} at {entry.begin}, not {at}")
        at += entry.nbytes
    if 8 + length + at != size:
        raise wrong(f"{8 + length + at} bytes", f"{size} bytes")
    return {name: e._replace(begin=e.begin + 8 + length) for name, e in entries.items()}


def _entry(value: Any) -> Entry | None:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES or not _counts(shape) or not _counts(offsets):
        return None
    if len(shape) > 64 or len(offsets) != 2:
        return None
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        return None
    return Entry(DTYPES[dtype], tuple(shape), offsets[0], nbytes)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key that comes twice")
    return made
