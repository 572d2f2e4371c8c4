"""Files of torch.save: torch reads them, no class that they name is imported, and damage is found."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.core.errors import CorruptionError, DataError, DirectoryError
from infinity.integrations.torch_file import Record, is_dense, load_bytes, load_saved, part


class Thing:
    def __init__(self) -> None:
        self.name, self.inner = "a", [1]


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
    read = load_saved(str(tmp_path / "file.pt"))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert is_dense(read[name])
            assert read[name].dtype is tensor.dtype
            assert torch.equal(read[name].detach().float(), tensor.detach().float())
    for name in ("base", "transposed"):
        assert torch.equal(part(read[name], 5, 10), tensors[name].reshape(-1)[5:15])
    assert part(read["base"], 40, 10).numel() == 2
    inner = io.BytesIO((tmp_path / "file.pt").read_bytes())
    assert torch.equal(load_bytes(inner, "a part")["base"], tensors["base"])


def test_objects_of_classes_are_records(tmp_path: Path) -> None:
    torch.save([Thing(), Thing, torch.bfloat16], tmp_path / "file.pt")
    thing, kind, dtype = load_saved(str(tmp_path / "file.pt"))
    assert isinstance(thing, Record)
    assert (thing.name, thing.args) == (f"{__name__}.Thing", ())
    assert (thing.attribute("name"), thing.attribute("inner"), thing.attribute("no")) == ("a", [1], None)
    assert issubclass(kind, Record)
    assert kind.name == f"{__name__}.Thing"
    assert dtype is torch.bfloat16
    assert not any(isinstance(each, tuple) for each in torch.serialization.get_safe_globals())


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError):
        load_saved(str(tmp_path / "nothing"))
    with pytest.raises(CorruptionError):
        load_saved(str(tmp_path))
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").touch()
    torch.save({"a": torch.zeros(100)}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new:
        content = {name: new.read(name) for name in new.namelist()}
    with zipfile.ZipFile(tmp_path / "compressed.pt", "w", zipfile.ZIP_DEFLATED) as other:
        for name, text in content.items():
            other.writestr(name, text)
    for kind, changed in {
        "lacking": {name: text for name, text in content.items() if name != "new/data/0"},
        "without": {name: text for name, text in content.items() if name != "new/data.pkl"},
    }.items():
        with zipfile.ZipFile(tmp_path / f"{kind}.pt", "w") as other:
            for name, text in changed.items():
                other.writestr(name, text)
    for kind in ("old", "empty", "compressed", "lacking", "without"):
        with pytest.raises((CorruptionError, DataError)) as raised:
            load_saved(str(tmp_path / f"{kind}.pt"))
        assert raised.value.cure, kind


def test_a_tensor_is_within_its_storage(tmp_path: Path) -> None:
    """The sizes that a pickle has for a tensor are not trusted."""
    path = tmp_path / "file.pt"
    torch.save(torch.zeros(6).view(2, 3), path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    sizes = b"K\x00K\x02K\x03\x86q"
    assert content["file/data.pkl"].count(sizes) == 1
    long = b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
    for other in (b"K\x01K\x02K\x03", b"K\x00K\x02K\x04", b"K\x00" + long + b"K\x03"):
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text.replace(sizes, other + b"\x86q"))
        try:
            assert not is_dense(load_saved(str(path)))
        except (CorruptionError, DataError):
            continue
