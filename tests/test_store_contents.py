"""What a store's parts hold."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from infinity.core.errors import ClosedError, CorruptionError, StorageError
from infinity.hardware.aio import crc32c
from infinity.storage.store import Part, Store

from .pins import Pins
from .small_store import CHUNK, HOST, PAGE, ROOM, fill, get, need_backend, pool_of, put, store_of


def test_a_fresh_store_reads_as_zeros_and_writes_nothing(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        for part, spec in CHUNK.items():
            fill(lease, 9)
            assert get(store, lease, 1, part) == bytes(spec.nbytes)
        (stats,) = store.stats()
        assert (stats.bytes_read, stats.bytes_written, stats.reads) == (9 * PAGE, 0, 3)
        assert stats.arena_nbytes == 27 * PAGE
        assert store.ring_stats()[0].bytes_read == 9 * PAGE
    assert list((tmp_path / "drive").iterdir()) == []


def test_given_crcs_are_believed_and_checked(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        fill(lease, 3)
        right = crc32c(lease.address, PAGE)
        store.write(0, "state", lease, crcs=[right] * 3).wait()
        assert get(store, lease, 0, "state") == b"\3" * 3 * PAGE
        with pytest.raises(ValueError, match="2 CRCs for 3 sections"):
            store.write(0, "state", lease, crcs=[right] * 2)
        store.write(0, "state", lease, crcs=[right, right ^ 1, right]).wait()
        with pytest.raises(CorruptionError, match="section 1"):
            get(store, lease, 0, "state")


def test_parts_on_the_host_are_memory(tmp_path: Path) -> None:
    pins = Pins()
    spec = {
        "state": Part((PAGE, PAGE), (HOST,)),
        "gradient": Part((PAGE,), (HOST,)),
    }
    pool = pool_of()
    store = Store(
        [spec, spec],
        directories=[],
        pool=pool,
        pins=pins,
    )
    view = store.view(1, "state", torch.float32)
    assert view.numel() == 2 * PAGE // 4
    assert view.data_ptr() % PAGE == 0
    with pool.lease("a", ROOM) as lease:
        fill(lease, 5)
        assert store.write(1, "state", lease, PAGE, sections=range(1, 2)).done
        assert store.view(1, "state").tolist() == [0] * PAGE + [5] * PAGE
        store.view(1, "state").fill_(6)
        transfer = store.read(1, "state", lease, PAGE)
        transfer.wait()
        assert lease.tensor().tolist() == [5] * PAGE + [6] * 2 * PAGE + [5] * PAGE
        store.write(0, "gradient", lease, nbytes=10)
        assert store.read(0, "gradient", lease).nbytes == 10
    assert store.tier(0, "state") is HOST
    store.wait_written()
    store.close()
    assert [(what, n) for what, _, n in pins.calls] == [("pin", 6 * PAGE), ("unpin", 6 * PAGE)]


def test_ranges_that_do_not_fit_are_refused_before_anything_moves(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", 2 * PAGE) as lease:
        for call in (store.read, store.write):
            for offset in (1, -PAGE, 2 * PAGE):
                with pytest.raises(ValueError, match="do not fit a lease"):
                    call(0, "state", lease, offset)
            for sections in (range(0), range(2, 4), range(0, 3, 2)):
                with pytest.raises(ValueError, match="not neighbouring sections"):
                    call(0, "state", lease, sections=sections)
            with pytest.raises(IndexError):
                call(7, "state", lease)
            with pytest.raises(KeyError):
                call(0, "nothing", lease)
        for nbytes in (5 * PAGE, -1):
            with pytest.raises(ValueError, match="cannot be written"):
                store.write(0, "gradient", lease, nbytes=nbytes)
        with pytest.raises(ValueError, match="cannot be written"):
            store.write(0, "state", lease, sections=range(2), nbytes=PAGE)
        with pytest.raises(StorageError, match="has no memory"):
            store.view(0, "state")
        assert store.stats()[0].bytes_written == 0
        lease.release()
        with pytest.raises(ClosedError, match="released"):
            store.read(0, "state", lease)


def test_a_short_gradient_is_padded_so_that_it_stays_direct(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        store.write(0, "gradient", fill(lease, 1), nbytes=PAGE + 10).wait()
        assert get(store, lease, 0, "gradient") == b"\1" * (PAGE + 10)
        assert (store.stats()[0].bytes_written, store.stats()[0].bytes_read) == (2 * PAGE, 2 * PAGE)
        with pytest.raises(ValueError, match="does not hold all"):
            store.write(0, "gradient", lease, sections=range(1))
        store.write(0, "gradient", fill(lease, 2)).wait()
        assert get(store, lease, 0, "gradient") == b"\2" * 4 * PAGE


def test_the_table_is_small() -> None:
    chunk = {**CHUNK, "gradient": Part((4 * PAGE,), (HOST,))}
    with tempfile.TemporaryDirectory() as place:
        store = Store([chunk] * 1000, directories=[place], pool=pool_of())
        assert store.table.nbytes / 1000 <= 48
        store.close()


def test_directories_carry_their_weight(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    pool = pool_of()
    store = Store([CHUNK] * 8, directories=[str(p) for p in places], pool=pool, weights=[3, 1])
    with pool.lease("a", ROOM) as lease:
        for chunk in range(8):
            put(store, lease, chunk, chunk)
        assert [s.bytes_written // (5 * PAGE) for s in store.stats()] == [6, 2]
        assert [s.path for s in store.stats()] == [str(p) for p in places]
        for chunk in range(8):
            assert set(get(store, lease, chunk, "copy")) == {chunk}
    store.close()


@pytest.mark.parametrize("backend", ["libaio", "syscall", "uring", "threads"])
def test_every_backend_moves_the_right_bytes_through_a_protected_pool(tmp_path: Path, backend: str) -> None:
    need_backend(backend, tmp_path)
    pool = pool_of(protect=True)
    with store_of(tmp_path, pool=pool, backend=backend) as store, pool.lease("a", ROOM) as lease:
        for value in (3, 7):
            put(store, lease, 1, value)
            fill(lease, 0)
            assert get(store, lease, 1, "copy") == bytes([value]) * 2 * PAGE
