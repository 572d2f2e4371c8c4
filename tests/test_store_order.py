"""The order of a store's transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinity.core.errors import DeadlineError, StorageError
from infinity.hardware.aio import Ticket

from .shortage import Shortage
from .small_store import PAGE, ROOM, fill, get, pool_of, store_of


def test_a_read_begins_after_the_write_before_it_and_a_write_after_the_reads(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        a, b, c = (fill(pool.lease("a", ROOM), v) for v in (1, 2, 3))
        ring = store._rings[0]
        ring.hold(True)
        first = store.write(0, "copy", a)
        read = store.read(0, "copy", b)
        second = store.write(0, "copy", c)
        third = store.read(0, "copy", a.retain())
        other = store.write(1, "copy", c)
        assert [t.ticket is not None for t in (first, read, second, third, other)] == [
            True,
            *[False] * 3,
            True,
        ]
        assert not any(t.done for t in (first, read, second, third))
        with pytest.raises(DeadlineError, match="part 'copy' of chunk 0 is not complete"):
            read.wait(0.01)
        ring.hold(False)
        third.wait(20)
        assert all(t.finished for t in (first, read, second))
        assert set(b.tensor()[: 2 * PAGE].tolist()) == {1}
        assert set(a.tensor()[: 2 * PAGE].tolist()) == {3}
        other.wait(20)
        store.wait_written()


def test_polling_begins_what_waited(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool, delay_seed=1) as store:
        a, b = fill(pool.lease("a", ROOM), 1), pool.lease("a", ROOM)
        store.write(0, "copy", a)
        store.write(0, "copy", a)
        read = store.read(0, "copy", b)
        deadline = time.monotonic() + 20
        while not read.done:
            assert time.monotonic() < deadline
        read.wait(0)
        assert set(b.tensor()[: 2 * PAGE].tolist()) == {1}


def test_an_interrupt_in_the_middle_of_a_call_does_not_hang_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        lease = pool.lease("a", ROOM)
        store._rings[0].hold(True)
        first = store.write(0, "copy", lease)
        second = store.write(0, "copy", lease)

        def interrupt(*args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(store._rings[0], "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.read(1, "copy", lease)
        store._rings[0].hold(False)
        with pytest.raises(StorageError, match="read of part 'copy' of chunk 1 was interrupted"):
            store.wait_written()
        first.wait(20)
        with pytest.raises(StorageError, match="was interrupted"):
            second.wait(20)
        store.close()
        assert pool.stats()["a"].quarantined == ROOM


def test_many_threads(tmp_path: Path) -> None:
    pool = pool_of(5)
    failures: list[BaseException] = []
    with store_of(tmp_path, chunks=8, pool=pool, delay_seed=1) as store:

        def work(number: int) -> None:
            try:
                for turn in range(12):
                    for chunk in (number, number + 4):
                        value = (turn * 8 + chunk) % 251 + 1
                        with pool.lease("a", ROOM, timeout=20) as lease:
                            fill(lease, value)
                            store.write(chunk, "copy", lease)
                            store.write(chunk, "state", lease)
                        with pool.lease("a", ROOM, timeout=20) as lease:
                            assert set(get(store, lease, chunk, "state")) == {value}
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert failures == []
        store.wait_written()
        assert pool.stats()["a"].in_use == 0


def test_a_write_that_ends_as_a_wait_for_it_times_out_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Ticket.wait

    def late(self: Ticket, timeout: float | None = None) -> None:
        try:
            wait(self, timeout)
        except DeadlineError:
            wait(self)  # the transfer ends before the caller hears of the timeout
            raise

    monkeypatch.setattr(Ticket, "wait", late)
    pool = pool_of(1)
    with store_of(tmp_path, pool=pool) as store:
        for value in range(50):
            with pool.lease("a", ROOM, timeout=20) as lease:
                transfer = store.write(0, "gradient", fill(lease, value))
            transfer.wait(0.0)
        store.wait_written()


def test_a_thread_that_waits_for_a_lease_ends_the_writes_that_hold_one(tmp_path: Path) -> None:
    pool = pool_of(1)
    with store_of(tmp_path, pool=pool, delay_seed=5) as store:
        for turn in range(20):
            with pool.lease("a", ROOM, timeout=20) as lease:
                store.write(turn % 3, "gradient", fill(lease, turn))
        deadline = time.monotonic() + 20
        while (lease2 := pool.try_lease("a", ROOM)) is None:
            assert time.monotonic() < deadline
        assert get(store, lease2, 1, "gradient") == bytes([19]) * 4 * PAGE
        lease2.release()


def test_a_transfer_that_finds_no_memory_is_made_again(tmp_path: Path) -> None:
    """At each point of a write, of one that waits for it, of a read that waits for both, and of their ends: a
    call that raised has changed nothing, and no lease is lost."""
    pool = pool_of(3)
    with store_of(tmp_path, pool=pool) as store:

        def again(call: Callable[[], Any]) -> Any:
            while True:
                with shortage.here():
                    return call()

        for at in range(2000):
            shortage = Shortage(at, "storage")
            with (
                pool.lease("a", ROOM) as first,
                pool.lease("a", ROOM) as second,
                pool.lease("a", ROOM) as read,
            ):
                fill(first, at % 251)
                fill(second, (at + 1) % 251)
                again(lambda lease=first: store.write(0, "gradient", lease))
                again(lambda lease=second: store.write(0, "gradient", lease))
                transfer = again(lambda lease=read: store.read(0, "gradient", lease))
                again(transfer.wait)
                assert set(read.tensor().tolist()) == {(at + 1) % 251}, shortage.fired
            again(store.wait_written)
            assert not store.unfinished, shortage.fired
            assert pool.stats()["a"].in_use == pool.stats()["a"].quarantined == 0, shortage.fired
            if not shortage.fired:
                break
        assert not shortage.fired
