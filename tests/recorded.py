"""Checkpoints that other programs have written, in archives beside the tests."""

from __future__ import annotations

import tarfile
from pathlib import Path

import safetensors.torch
import torch

from infinity.storage.checkpoints import find


def unpack(archive: Path, folder: Path) -> Path:
    """Put what `archive` has into `folder`, and return that."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder


def saved_in(path: str | Path, stem: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of one of our checkpoints; nothing if it has no such file."""
    file = find(str(path)).file(stem)
    return {} if file is None else safetensors.torch.load_file(file)
