"""Errors of a store's transfers, and a store that is closed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from infinity.core.errors import ClosedError, DeadlineError, ShortTransferError, TransferError
from infinity.hardware.aio import DirectFile
from infinity.storage.store import Store

from .forked import run_forked
from .quick import covering
from .small_store import PAGE, ROOM, arena_file, fill, get, need_backend, pool_of, store_of


def test_a_short_read_names_what_it_hit_and_stays(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        os.truncate(arena_file(store), PAGE)
        with pytest.raises(ShortTransferError, match="read of part 'state' of chunk 2 failed") as raised:
            store.read(2, "state", lease).wait()
        assert raised.value.path == str(tmp_path / "drive")
        for call in (store.check, store.wait_written, lambda: store.write(0, "copy", lease)):
            with pytest.raises(ShortTransferError, match="chunk 2"):
                call()
        store.close()  # everybody knows by now
        assert pool.stats()["a"].in_use == ROOM


def _read_only(store: Store) -> None:
    """From now on writes fail (EBADF)."""
    arena = store._arenas[0]
    file = DirectFile.open(str(arena_file(store)), os.O_RDONLY)
    arena.file.close()
    arena.file = file


def test_a_failed_write_that_nobody_waited_for_arrives(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        _read_only(store)
        with pool.lease("a", ROOM) as lease:
            store._rings[0].hold(True)  # or the read may already be told
            first = store.write(1, "gradient", fill(lease, 1))
            after = store.read(1, "gradient", lease)
            store._rings[0].hold(False)
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            _check_for(store, 20)
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            after.wait(20)  # it depended on it
        with pytest.raises(TransferError):
            first.wait()
        with pytest.raises(TransferError):
            store.wait_written()
        assert pool.stats()["a"].in_use == 0


def _check_for(store: Store, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        store.check()


@pytest.mark.parametrize("by", ["wait_written", "close"])
def test_the_last_chance_to_tell(tmp_path: Path, by: str) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        _read_only(store)
        with pool.lease("a", ROOM) as lease:
            store.write(1, "gradient", fill(lease, 1))
        with pytest.raises(TransferError, match="chunk 1"):
            getattr(store, by)()
        store.close()


class _Stuck:
    """A ticket whose transfer never ends."""

    done = quarantined = True

    def wait(self, timeout: float | None = None) -> None:
        raise DeadlineError("missed its deadline")


def test_the_lease_of_a_transfer_that_never_ended_is_quarantined(tmp_path: Path) -> None:
    pool = pool_of(2)
    with store_of(tmp_path, pool=pool) as store:
        lease = pool.lease("a", ROOM)
        transfer = store.read(0, "state", lease)
        assert transfer.ticket is not None
        transfer.ticket.wait()
        transfer.ticket = _Stuck()  # type: ignore[assignment]
        with pytest.raises(DeadlineError, match="read of part 'state' of chunk 0 failed: missed"):
            transfer.wait()
        lease.release()
        stats = pool.stats()["a"]
        assert (stats.quarantined, stats.in_use) == (ROOM, 0)


def test_a_closed_store_says_so_and_a_child_has_none(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        lease = pool.lease("a", ROOM)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                store.read(0, "copy", lease)
            except ClosedError:
                store.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert get(store, lease, 0, "copy") == bytes(2 * PAGE)
        store.write(0, "copy", fill(lease, 1))
        lease.release()
        store.close()
        store.close()
        with pytest.raises(ClosedError):
            store.read(0, "copy", lease)
        assert pool.stats()["a"].in_use == 0


_TOUCH = """
import sys
from infinity.core.sizes import Tier
from infinity.hardware.aio import RingSettings
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Part, Store
pool = PinnedPool({"a": (8192, 1)}, protect=True)
store = Store([{"x": Part((4096,), (Tier.NVME,))}], directories=[sys.argv[1]], pool=pool,
              rings=RingSettings(sys.argv[3]))
lease = pool.lease("a", 8192)
view = lease.tensor()
store._rings[0].hold(True)
getattr(store, sys.argv[2])(0, "x", lease, 4096)
view[0] = 1                  # the other page is free
print("ready", flush=True)
view[4096] = 1
print("done", flush=True)
"""


@covering
@pytest.mark.parametrize("backend", ["libaio", "syscall", "uring", "threads"])
@pytest.mark.parametrize("call", ["read", "write"])
def test_touching_a_lease_under_way_is_a_fault_in_test_mode(tmp_path: Path, call: str, backend: str) -> None:
    need_backend(backend, tmp_path)
    assert run_forked(_TOUCH, str(tmp_path), call, backend) == (-signal.SIGSEGV, "ready\n")
