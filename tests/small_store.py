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
from infinity.hardware.aio import RingSettings, available_backends
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import Part, Store, Transfer

PAGE = 4096
NVME = Tier.NVME
CHUNK = {
    "copy": Part((2 * PAGE,), (NVME,)),
    "state": Part((PAGE, PAGE, PAGE), (NVME,)),
    "gradient": Part((4 * PAGE,), (NVME,)),
}
ROOM = 4 * PAGE


class Pins:
    """A device that notes which host memory is pinned for it: (what, address, bytes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory."""
        self.calls.append(("pin", address, nbytes))

    def unregister(self, address: int, nbytes: int) -> None:
        """Undo `register`."""
        self.calls.append(("unpin", address, nbytes))


def pool_of(buffers: int = 4, *, protect: bool = False) -> PinnedPool:
    return PinnedPool({"a": (ROOM, buffers)}, protect=protect)


def need_backend(backend: str, path: Path) -> None:
    """Skip where `backend` does not work; fail in CI, which must see all of them."""
    reason = available_backends(str(path))[backend]
    if reason != "ok":
        if os.environ.get("CI"):
            pytest.fail(f"{backend} does not work here: {reason}")
        pytest.skip(f"{backend} does not work here: {reason}")


class UnderWay:
    """Transfers under way, with their leases and what the reads among them must bring."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._transfers: list[tuple[Transfer, Lease, bytes | None]] = []

    def __len__(self) -> int:
        return len(self._transfers)

    def lease(self) -> Lease:
        while (lease := self._pool.try_lease("a", ROOM)) is None:
            self.end(0)
        return lease

    def add(self, transfer: Transfer, lease: Lease, expected: bytes | None = None) -> None:
        self._transfers.append((transfer, lease, expected))

    def end(self, index: int) -> None:
        transfer, lease, expected = self._transfers.pop(index)
        transfer.wait(20)
        if expected is not None:
            assert bytes(lease.tensor()[: transfer.nbytes].numpy()) == expected, transfer
        lease.release()

    def end_all(self) -> None:
        while self._transfers:
            self.end(0)


@contextlib.contextmanager
def store_of(path: Path, chunks: int = 3, *, pool: PinnedPool | None = None, **rings: Any) -> Iterator[Store]:
    directory = path / "drive"
    directory.mkdir(exist_ok=True)
    settings = RingSettings(**{"deadline": 20.0, **rings})
    store = Store([CHUNK] * chunks, directories=[str(directory)], pool=pool or pool_of(), rings=settings)
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


def arena_file(store: Store) -> Path:
    """A path to the bytes of a store with one directory, while it is open."""
    return Path(f"/proc/self/fd/{store._arenas[0].file.plain_fd}")


def bytes_of(store: Store, chunk: int, part: str, slot: int = 0) -> bytes:
    extent = store.layout.extent(chunk, part, slot)
    with open(arena_file(store), "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)
