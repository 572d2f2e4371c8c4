"""Checkpoints that other programs have written, in archives beside the tests."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from infinity.core.errors import CorruptionError, DataError
from infinity.storage.checkpoints import find

from .test_torch_file import mutated


def unpack(archive: Path, folder: Path) -> Path:
    """Put what `archive` has into `folder`, and return that."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder


def saved_in(path: str | Path, stem: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of one of our checkpoints; nothing if it has no such file."""
    file = find(str(path)).file(stem)
    return {} if file is None else safetensors.torch.load_file(file)


def check_damage(
    file: Path,
    read: Callable[[str], str],
    out: Path,
    wanted: dict[str, dict[str, torch.Tensor]],
    *,
    strict: bool = True,
) -> int:
    """Damage a file in many ways, one at a time: each is an error that leaves nothing in `out`, or it has
    changed no value (and, if `strict`, no name). Return how many were errors."""
    whole, errors = file.read_bytes(), 0
    cut = (whole[:length] for length in range(0, len(whole), len(whole) // 5))
    for data in [*mutated(whole, 0, 12), *cut]:
        file.write_bytes(data)
        try:
            path = read(str(out))
        except (CorruptionError, DataError):
            errors += 1
            assert not list(out.glob("*"))
            continue
        for stem, expected in wanted.items():
            there = saved_in(path, stem)
            assert not strict or there.keys() == expected.keys()
            assert all(torch.equal(there[n], expected[n]) for n in there.keys() & expected.keys())
        shutil.rmtree(out)
    file.write_bytes(whole)
    return errors
