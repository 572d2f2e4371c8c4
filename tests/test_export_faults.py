"""Exports that end halfway: nothing that looks whole is left, and the next one works."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import infinity
from infinity.core.errors import DirectoryError, StorageError
from infinity.storage.folder import Folder

from .offloaded import ON_HOST
from .test_checkpoint_faults import Interrupt, faulty, start, step  # noqa: F401

SHARD = "100KB"
NAMES = [f"model-{k:05}-of-00004.safetensors" for k in range(1, 5)] + ["model.safetensors.index.json"]


def whole(folder: Path, state: dict[str, torch.Tensor]) -> bool:
    """Whether an export is there; if so, all of it must be."""
    names = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if NAMES[-1] not in names:
        return False
    assert names == NAMES
    found: dict[str, torch.Tensor] = {}
    for name in NAMES[:-1]:
        found |= safetensors.torch.load_file(folder / name)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], v) for n, v in state.items())
    return True


@pytest.mark.first
@pytest.mark.parametrize(
    ("of", "op"),
    [
        ("model", "write"),
        ("checkpoint", "fsync"),
        ("model", "create"),
        ("checkpoint", "truncate"),
        ("model", "mkdir"),
    ],
)
def test_an_export_that_meets_an_error_leaves_nothing(
    op: str,
    of: str,
    faulty: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    step(model, adam)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    source = model if of == "model" else infinity.save(adam, tmp_path / "saved")
    failures, out = 0, faulty.path / "deep" / "out"
    for nth in range(1, 100):
        faulty.arm(op, "error", nth, value=errno.ENOSPC if nth % 2 else errno.EIO)
        raised: StorageError | None = None
        try:
            infinity.export(source, out, max_shard_size=SHARD)
        except StorageError as error:
            raised = error
        fired = faulty.get("fired")
        faulty.disarm()
        if raised is not None:
            assert raised.errno in (errno.EIO, errno.ENOSPC)
            assert list(faulty.path.iterdir()) == []
            failures += 1
        elif not fired:
            break
        else:  # what failed was none of ours, or was tried again
            assert whole(out, state)
            shutil.rmtree(out.parent)
    assert whole(out, state)
    assert failures > 1
    step(model, adam)
    infinity.close(adam)


def test_a_full_drive_is_refused_before_anything_is_written(
    faulty: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    (faulty.path / "ballast").write_bytes(bytes((8 << 20) - 100_000))
    with pytest.raises(DirectoryError, match="no room") as caught:
        infinity.export(model, faulty.path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert [p.name for p in faulty.path.iterdir()] == ["ballast"]
    infinity.close(adam)


@pytest.mark.processes
def test_an_export_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    saved, out, moments = infinity.save(adam, tmp_path / "saved"), tmp_path / "out", random.Random(0)
    infinity.close(adam)
    ends = set()
    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                infinity.export(saved, out, max_shard_size=SHARD)
                time.sleep(60)
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        there = whole(out, state)
        ends.add(there)
        if there:
            for path in out.iterdir():
                path.unlink()
        elif any(not p.name.endswith(".incomplete") for p in out.glob("*")):
            for path in out.iterdir():  # between two renames: the user must say that it may go
                path.unlink()
    infinity.export(saved, out, max_shard_size=SHARD)
    assert whole(out, state)


def test_two_exports_at_once_and_what_killed_ones_left(tmp_path: Path) -> None:
    model, adam = start(tmp_path / "run", **ON_HOST)
    out = tmp_path / "out"
    with Folder(str(out)) as folder:
        folder.write("config.json", "{}")
        with pytest.raises(DirectoryError, match="another export"):
            infinity.export(model, out)
        [left] = out.iterdir()
        assert left.name.startswith("config.json.")
    assert not out.exists()
    out.mkdir()
    for name in (left.name, "model-00001-of-00002.safetensors.01234567.incomplete"):
        (out / name).write_text("left")
    infinity.export(model, out)
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]
    infinity.close(adam)
