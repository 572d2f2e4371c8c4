"""Pickles of other programs are read as data: nothing in them runs, and sizes in them are not trusted."""

from __future__ import annotations

import collections
import io
import os
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.core.errors import CorruptionError, DirectoryError
from infinity.storage.pickled import Global, Record, SavedTensor, TorchFile, dtype_of, values_of


def in_memory(value: Any) -> Any:
    """Values with tensors of torch in place of ours, and dicts and lists of no class of their own."""
    if isinstance(value, SavedTensor):
        return value.whole()
    if isinstance(value, dict):
        return {key: in_memory(inner) for key, inner in value.items()}
    return type(value)(map(in_memory, value)) if isinstance(value, (list, tuple)) else value


def assert_same(here: Any, there: Any) -> None:
    if isinstance(there, torch.Tensor):
        assert here.dtype == there.dtype
        assert here.shape == there.shape
        assert torch.equal(here, there.detach())
    elif isinstance(there, dict):
        assert list(here) == list(there)
        for key, inner in there.items():
            assert_same(here[key], inner)
    elif isinstance(there, (list, tuple)):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            assert_same(one, other)
    else:
        assert here == there
        assert type(here) is type(there)


PLAIN: Any = {
    "numbers": [0, 1, -1, 255, 256, 70000, -70000, 1 << 40, -(1 << 100), 0.5, -1e300, True, False, None],
    "texts": ["", "a", "é" * 300, "\ud800", b"", b"ab", b"x" * 300],
    (1, ("a", None)): {"in": ({1, 2}, frozenset({"a"}), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4))},
    "lists": [[], [[]], list(range(2000)), {i: str(i) for i in range(2000)}],
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values(protocol: int) -> None:
    assert_same(values_of(pickle.dumps(PLAIN, protocol), "file"), PLAIN)
    same: list[Any] = [1]
    read = values_of(pickle.dumps([same, same], protocol), "file")
    assert read[0] is read[1]
    ordered = collections.OrderedDict(b=1, a=2)
    counted = collections.defaultdict(list, {"a": [1]})
    assert_same(values_of(pickle.dumps([ordered, counted], protocol), "file"), [dict(ordered), dict(counted)])


class Thing:
    def __init__(self) -> None:
        self.name, self.inner = "a", [1]


class Made:
    def __reduce__(self) -> Any:
        return os.system, ("exit 3",), None, iter([1, 2]), iter([("a", 3)])


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_objects_are_records(protocol: int) -> None:
    thing, made, dtype = values_of(pickle.dumps([Thing(), Made(), torch.bfloat16], protocol), "file")
    assert isinstance(thing, Record)
    assert (thing.name, thing.args) == (f"{__name__}.Thing", ())
    assert (thing.attribute("name"), thing.attribute("inner"), thing.attribute("no")) == ("a", [1], None)
    assert isinstance(made, Record)
    assert (made.name, made.args, made.content) == (f"{os.name}.system", ("exit 3",), [1, 2, ("a", 3)])
    assert isinstance(dtype, Global)
    assert dtype_of(dtype) is torch.bfloat16
    assert dtype_of(Global("torch.load")) is None


def test_known_names_are_called() -> None:
    data = pickle.dumps(Path("a/b"), 2)
    made = values_of(data, "file")
    assert isinstance(made, Record)
    assert values_of(data, "file", {made.name: lambda *parts: "-".join(parts)}) == "a-b"
    with pytest.raises(CorruptionError):  # a function that does not take what the file has for it
        values_of(data, "file", {made.name: lambda: 0})


def _tensors() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 7)
    named = nn.Parameter(torch.ones(3))
    named.name_of_mine = "a"  # type: ignore[attr-defined]
    plain = torch.ones(2)
    plain.ds_numel = 2  # type: ignore[attr-defined]
    dtypes = (
        *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn),
    )
    return {
        "base": base,
        "view": base[2:4],
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 4),
        "number": torch.tensor(4),
        "parameter": nn.Parameter(torch.randn(3), requires_grad=False),
        "with attributes": [named, plain],
        **{str(dtype): torch.tensor([0, 1, 2]).to(dtype) for dtype in dtypes},
    }


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    tensors = _tensors()
    torch.save(tensors, tmp_path / "file.pt")
    with TorchFile(str(tmp_path / "file.pt")) as file:
        read = file.value
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float8_e4m3fn:
                assert torch.equal(read[name].whole().float(), tensor.float())
            else:
                assert_same(in_memory(read[name]), tensor)
        assert torch.equal(read["base"].part(5, 10), tensors["base"].reshape(-1)[5:15])
        assert torch.equal(read["transposed"].part(5, 10), tensors["transposed"].reshape(-1)[5:15])
        assert read["base"].part(40, 10).numel() == 2
        assert read["base"].storage is read["view"].storage
        with pytest.raises(CorruptionError):
            read["view"].read(10, torch.empty(5))
        file.check()


def test_a_part_of_a_file(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save(torch.arange(5), inner)
    data = inner.getvalue()
    (tmp_path / "file").write_bytes(b"x" * 11 + data + b"y" * 7)
    with TorchFile(str(tmp_path / "file"), begin=11, nbytes=len(data)) as file:
        assert torch.equal(file.value.whole(), torch.arange(5))
    for begin, nbytes in ((11, len(data) + 8), (-1, 5), (11, -1), (12, len(data))):
        with pytest.raises(CorruptionError):
            TorchFile(str(tmp_path / "file"), begin=begin, nbytes=nbytes)


def test_files_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([torch.arange(5)], tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with TorchFile(str(tmp_path / "file.pt")) as file:
        assert torch.equal(file.value[0].whole(), torch.arange(5))
        file.check()


def test_damage_in_a_part_that_nobody_read_is_found(tmp_path: Path) -> None:
    """The checksum is that of a whole storage: its other parts are read for it."""
    path = tmp_path / "file.pt"
    torch.save(torch.arange(3_000_000, dtype=torch.int32), path)
    whole = path.read_bytes()
    at = whole.index(torch.arange(2_500_000, 2_500_002, dtype=torch.int32).numpy().tobytes())
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with TorchFile(str(path)) as file:
        assert file.value.part(10, 2).tolist() == [10, 11]
        assert file.value.part(2, 2).tolist() == [2, 3]
        with pytest.raises(CorruptionError, match="not a readable file of torch"):
            file.check()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError):
        TorchFile(str(tmp_path / "nothing"))
    with pytest.raises((CorruptionError, DirectoryError)):
        TorchFile(str(tmp_path))
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").touch()
    torch.save({"a": torch.zeros(100)}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new:
        content = {name: new.read(name) for name in new.namelist()}
    for kind, changed in {
        "compressed": content,
        "big": {**content, "new/byteorder": b"big"},
        "short": {**content, "new/data/0": bytes(399)},
        "lacking": {name: text for name, text in content.items() if name != "new/data/0"},
        "without": {name: text for name, text in content.items() if name != "new/data.pkl"},
    }.items():
        how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(tmp_path / f"{kind}.pt", "w", how) as other:
            for name, text in changed.items():
                other.writestr(name, text)
    for kind in ("old", "empty", "compressed", "big", "short", "lacking", "without"):
        with pytest.raises(CorruptionError) as raised:
            TorchFile(str(tmp_path / f"{kind}.pt"))
        assert raised.value.cure, kind


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def nested(depth: int, begin: bytes, each: bytes) -> bytes:
    return b"\x80\x02" + begin + each * depth


#: Programs that no writer makes.
HARMFUL = {
    "more bytes than there are": b"\x8e" + number(1 << 40, 8) + b"a.",
    "more text than there is": b"\x8d" + number((1 << 63) + 5, 8) + b"a.",
    "a long integer": b"\x8b" + number(1000, 4) + b"\x01" * 1000 + b".",
    "an integer of negative size": b"\x8b" + number(0xFFFFFFFF, 4) + b".",
    "no end": b"N",
    "nothing on the stack": b".",
    "a mark": b"(.",
    "two values": b"NN.",
    "values of nowhere": b"h\x05.",
    "a deep key": nested(100_000, b"})", b"\x85") + b"Ns.",
    "a deep element": nested(100_000, b"\x8f()", b"\x85") + b"\x90.",
    "a deep frozenset": b"(" + b"(\x91" * 1 + b"\x91.",
    "a list as a key": b"}]Ns.",
    "a list as an element": b"\x8f(]\x90.",
    "attributes of a number": b"K\x01Nb.",
    "a call of a number": b"K\x01)R.",
    "a call of a text": b"X\x04\x00\x00\x00exit)R.",
    "a call of a record": b"cos\nsystem\n)R)R.",
    "a number as bytes": b"c_codecs\nencode\nK\x01K\x01\x86R.",
    "a size of a number": b"ctorch\nSize\nK\x01\x85R.",
    "a reference": b"K\x01Q.",
    "an extension": b"\x82\x01.",
    "numbers as text": b"I1\n.",
    "an old object": b"(ios\nsystem\n.",
    "a name without an end": b"cos\nsystem",
    "a name that is no text": b"c\xff\xfe\nsystem\n.",
    "keys without values": b"}(K\x01u.",
    "items of a tuple": b")(K\x01e.",
}


@pytest.mark.parametrize("what", HARMFUL)
def test_harmful_programs_are_refused(what: str) -> None:
    with pytest.raises(CorruptionError) as raised:
        values_of(HARMFUL[what], "file")
    assert "file is not a readable file of torch" in str(raised.value)


def test_programs_of_great_depth_end() -> None:
    for begin, each in ((b"]", b"]"), (b")", b"\x85")):
        data = nested(500_000, begin, each)
        data += (b"a" * 500_000 if each == b"]" else b"") + b"."
        assert values_of(data, "file")


def test_a_tensor_is_within_its_file(tmp_path: Path) -> None:
    """Of sizes that a pickle has for a tensor none is trusted."""
    path = tmp_path / "file.pt"
    torch.save(torch.zeros(6).view(2, 3), path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    sizes = b"K\x00K\x02K\x03\x86q"
    program = content["file/data.pkl"]
    assert program.count(sizes) == 1
    long = b"\x8a\x06" + number(1 << 40, 6)
    for other in (
        b"K\x01K\x02K\x03",
        b"K\x00K\x02K\x04",
        b"K\x00" + long + b"K\x03",
        b"K\x00" + long + b"K\x00",
        b"K\x00J" + number(0xFFFFFFFF, 4) + b"K\x03",
        b"K\x00G" + bytes(8) + b"K\x03",
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text.replace(sizes, other + b"\x86q"))
        try:
            with TorchFile(str(path)) as file:
                assert file.value.whole().numel() == 0
        except CorruptionError:
            continue


def mutated(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """The same bytes, each time with a few others, fewer, or more of them."""
    generator = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 5))):
            at = generator.randrange(len(changed))
            kind = generator.randrange(4)
            if kind == 0:
                changed[at] = generator.randrange(256)
            elif kind == 1:
                changed[at : at + generator.randrange(1, 9)] = b""
            elif kind == 2:
                changed[at:at] = generator.randbytes(generator.randrange(1, 5))
            else:
                begin = generator.randrange(len(changed))
                changed[at:at] = changed[begin : begin + generator.randrange(1, 40)]
            changed = changed or bytearray(b".")
        yield bytes(changed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_mutated_programs_take_no_more_than_they_have(seed: int) -> None:
    """Each is read as something, or is an error that says so."""
    program = pickle.dumps([PLAIN["numbers"], PLAIN["texts"], Thing(), Made(), torch.Size([3])], 2 + seed % 4)
    errors = 0
    tracemalloc.start()
    try:
        for data in mutated(program, seed, 1500):
            try:
                values_of(data, "file")
            except CorruptionError:
                errors += 1
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert errors > 500


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_mutated_files_are_right_or_refused(seed: int, tmp_path: Path) -> None:
    saved = {"a": torch.arange(9.0), "b": [torch.arange(4), "text"], "c": Thing()}
    path = tmp_path / "file.pt"
    torch.save(saved, path)
    errors = 0
    for data in mutated(path.read_bytes(), seed, 500):
        path.write_bytes(data)
        try:
            with TorchFile(str(path)) as file:
                tensors = file.value["a"].whole(), file.value["b"][0].whole()
                file.check()
                assert file.value["b"][1] == "text"
                assert file.value["c"].attribute("name") == "a"
        except CorruptionError:
            errors += 1
        else:
            assert torch.equal(tensors[0], torch.arange(9.0))
            assert torch.equal(tensors[1], torch.arange(4))
    assert errors > 100
