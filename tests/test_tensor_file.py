"""Files of tensors: what is written is read by everybody, and what is not as it was written is named."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.errors import CorruptionError
from infinity.hardware.aio import Ring
from infinity.storage import checksums
from infinity.storage.tensor_file import TensorFile, read_all, write_all
from infinity.storage.tensor_header import DTYPES


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    with Ring("test", path=str(tmp_path)) as ring:
        yield ring


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    flat = torch.arange(torch.Size(shape).numel() * dtype.itemsize) * 7 % 251
    return flat.to(torch.uint8).view(dtype).view(shape) if dtype is not torch.bool else flat.view(shape) > 100


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@pytest.mark.integration
def test_the_safetensors_library_reads_it_and_writes_what_is_read(tmp_path: Path, ring: Ring) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {f"a {n}": values(d, 3, 5) for n, d in DTYPES.items() if n != "C64"}
    tensors |= {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
        "large": values(torch.float32, 70_001),
    }
    sums = write_all(str(tmp_path / "ours"), tensors, ring)
    theirs = safetensors.load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype is tensor.dtype
        assert theirs[name].shape == tensor.shape
        assert bytes(theirs[name].view(-1).view(torch.uint8)) == bytes(tensor.view(-1).view(torch.uint8)), (
            name
        )
    safetensors.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    for file in ("ours", "theirs"):
        for name, tensor in read_all(str(tmp_path / file), ring, sums).items():
            assert content(tensor) == content(tensors[name])


@pytest.mark.integration
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_pieces_of_any_size_have_the_same_checksums(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    old, checksums.RANGE_NBYTES = checksums.RANGE_NBYTES, 4096  # type: ignore[misc]
    try:
        tensor = values(torch.float32, data.draw(st.integers(0, 5000)))
        cuts = st.lists(st.integers(0, tensor.numel()), max_size=6)
        with Ring("test", path=str(folder)) as ring:
            sums = write_all(str(folder / "whole"), {"x": tensor}, ring)
            points = [0, *sorted(data.draw(cuts)), tensor.numel()]
            with TensorFile.create(str(folder / "cut"), {"x": (tensor.dtype, tensor.shape)}, ring) as file:
                for begin, end in itertools.pairwise(points):
                    file.write("x", begin, tensor[begin:end])
                assert file.checksums() == sums
            out = torch.empty(
                tensor.numel(), dtype=data.draw(st.sampled_from([torch.float32, torch.float64]))
            )
            points = [0, *sorted(data.draw(cuts)), tensor.numel()]
            with TensorFile.open(str(folder / "cut"), ring, sums) as file:
                for begin, end in itertools.pairwise(points):
                    file.read("x", begin, out[begin:end])
            assert torch.equal(torch.nan_to_num(out.float()), torch.nan_to_num(tensor))
    finally:
        checksums.RANGE_NBYTES = old  # type: ignore[misc]


def test_every_flip_is_named(tmp_path: Path, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "RANGE_NBYTES", 4096)
    path = str(tmp_path / "x")
    tensors = {"a": values(torch.float32, 3000), "b": values(torch.bfloat16, 77)}
    sums = write_all(path, tensors, ring)
    begin = os.path.getsize(path) - sum(t.nbytes for t in tensors.values())
    for at, name, first in [
        (0, "a", 0),
        (4096, "a", 4096),
        (11999, "a", 8192),
        (12000, "b", 0),
        (12153, "b", 0),
    ]:
        with open(path, "r+b") as file:
            file.seek(begin + at)
            byte = file.read(1)[0]
            file.seek(begin + at)
            file.write(bytes([byte ^ 16]))
        with pytest.raises(CorruptionError, match=f"'{name}' in .*is not what was saved") as caught:
            read_all(path, ring, sums)
        assert f"of bytes {first}…" in str(caught.value)
        with open(path, "r+b") as file:
            file.seek(begin + at)
            file.write(bytes([byte]))
    read_all(path, ring, sums)


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(begin: int, end: int, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "nothing": b"",
    "a header of many bytes": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "a pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94",
    "no JSON": (4).to_bytes(8, "little") + b"abcd",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "nested": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "twice": (13).to_bytes(8, "little") + b'{"a":1,"a":1}',
    "an overlap": header({"a": entry(0, 4), "b": entry(2, 6)}) + bytes(6),
    "a hole": header({"a": entry(0, 4), "b": entry(5, 6)}) + bytes(6),
    "beyond the end": header({"a": entry(0, 4)}) + bytes(3),
    "more than it says": header({"a": entry(0, 4)}) + bytes(5),
    "a shape of its own": header({"a": entry(0, 4, shape=[5])}) + bytes(4),
    "a negative shape": header({"a": entry(0, 4, shape=[-2, -2])}) + bytes(4),
    "shapes beyond count": header({"a": entry(0, 4, shape=[1 << 62] * 40)}) + bytes(4),
    "an unknown dtype": header({"a": entry(0, 4, dtype="PICKLE")}) + bytes(4),
    "a dtype that is a list": header({"a": entry(0, 4, dtype=["U8"])}) + bytes(4),
    "backwards": header({"a": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}) + bytes(2),
    "floats": header({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}}) + bytes(4),
}  # fmt: skip


def test_hostile_files_are_refused(tmp_path: Path, ring: Ring) -> None:
    path = tmp_path / "x"
    for kind, content in HOSTILE.items():
        path.write_bytes(content)
        with pytest.raises(CorruptionError, match="not a readable safetensors file"):
            pytest.fail(f"was read: {kind}, {TensorFile.open(str(path), ring)}")
