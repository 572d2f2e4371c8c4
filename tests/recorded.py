"""Checkpoints that other programs have written, in archives beside the tests."""

from __future__ import annotations

import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors.torch
import torch

from infinity.core.errors import CorruptionError, DataError
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


def mutated(data: bytes, count: int) -> Iterator[bytes]:
    """The same bytes, each time with a few others, fewer, or more of them."""
    generator = random.Random(0)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 5))):
            at = generator.randrange(len(changed))
            match generator.randrange(4):
                case 0:
                    changed[at] = generator.randrange(256)
                case 1:
                    changed[at : at + generator.randrange(1, 9)] = b""
                case 2:
                    changed[at:at] = generator.randbytes(generator.randrange(1, 5))
                case _:
                    begin = generator.randrange(len(changed))
                    changed[at:at] = changed[begin : begin + generator.randrange(1, 40)]
        yield bytes(changed)


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
    for data in [*mutated(whole, 12), *cut]:
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
