"""What two runs have saved, compared."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from infinity.storage.checkpoints import find


def tensors(folder: object) -> dict[str, torch.Tensor]:
    """Everything of the newest checkpoint that is a tensor, but for the generators that nobody draws from."""
    found = find(str(folder))
    return {
        f"{stem} {name}": tensor
        for stem in found.content["files"]
        for name, tensor in load_file(Path(found.file(stem) or "")).items()
        if "numpy" not in name and "python" not in name
    }


def assert_same(one: object, other: object) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
