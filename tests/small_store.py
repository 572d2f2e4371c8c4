"""A store of small chunks, and what reads and writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infinity.core.errors import StorageError
from infinity.core.sizes import Tier
from infinity.hardware.aio import available_backends
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Part, Store

PAGE = 4096


NVME, HOST = Tier.NVME, Tier.HOST


CHUNK = {
    "copy": Part((2 * PAGE,), (NVME,)),
    "state": Part((PAGE, PAGE, PAGE), (NVME,)),
    "gradient": Part((4 * PAGE,), (NVME,)),
}


ROOM = 4 * PAGE


def pool_of(buffers: int = 4, *, protect: bool = False) -> PinnedPool:
    return PinnedPool({"a": (ROOM, buffers)}, protect=protect)


def need_backend(backend: str, path: Path) -> None:
    """Skip where `backend` does not work; fail in CI, which must see all of them."""
    reason = available_backends(str(path))[backend]
    if reason != "ok":
        if os.environ.get("CI"):
            pytest.fail(f"{backend} does not work here: {reason}")
        pytest.skip(f"{backend} does not work here: {reason}")


@contextlib.contextmanager
def store_of(
    path: Path, chunks: int = 3, *, pool: PinnedPool | None = None, **kwargs: Any
) -> Iterator[Store]:
    directory = path / "drive"
    directory.mkdir(exist_ok=True)
    store = Store(
        [CHUNK] * chunks, directories=[str(directory)], pool=pool or pool_of(), **{"deadline": 20.0, **kwargs}
    )
    try:
        yield store
    finally:
        with contextlib.suppress(StorageError):  # a test that has failed already
            store.close()


def fill(lease: Lease, value: int) -> Lease:
    lease.tensor().fill_(value)
    return lease


def put(store: Store, lease: Lease, chunk: int, value: int) -> None:
    """Write copy and state of a chunk."""
    fill(lease, value)
    for part in ("copy", "state"):
        store.write(chunk, part, lease).wait()


def get(store: Store, lease: Lease, chunk: int, part: str) -> bytes:
    transfer = store.read(chunk, part, lease)
    transfer.wait()
    return bytes(lease.tensor()[: transfer.nbytes].numpy())


def arena_file(path: Path) -> Path:
    return path / "drive" / "infinity" / "rank0.arena"


def bytes_of(store: Store, path: Path, chunk: int, part: str, slot: int = 0) -> bytes:
    extent = store.layout.extent(chunk, part, slot)
    with open(arena_file(path), "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)
