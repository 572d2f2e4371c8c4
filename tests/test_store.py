"""The store: a plain dict as its model, order, versions, corruption, errors, the end of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from infinity.core.errors import (
    ClosedError,
    ConfigError,
    CorruptionError,
    DeadlineError,
    DirectoryError,
    ShortTransferError,
    StorageError,
    TransferError,
)
from infinity.core.sizes import Tier
from infinity.hardware.aio import DirectFile, Ticket, available_backends, crc32c
from infinity.storage.leftovers import MARK_NBYTES
from infinity.storage.pinned import Lease, PinnedPool
from infinity.storage.store import PartSpec, Store, Transfer

PAGE = 4096
NVME, HOST = Tier.NVME, Tier.HOST
CHUNK = {
    "copy": PartSpec((2 * PAGE,), NVME, True, "copy"),
    "state": PartSpec((PAGE, PAGE, PAGE), NVME, True, "state"),
    "gradient": PartSpec((4 * PAGE,), NVME, False, "gradient"),
}
ROOM = 4 * PAGE


def pool_of(slots: int = 4, *, protect: bool = False) -> PinnedPool:
    return PinnedPool({"a": (ROOM, slots)}, protect=protect)


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


def put(store: Store, lease: Lease, chunk: int, value: int, generation: int = 0) -> None:
    """Write all versioned parts of a chunk."""
    fill(lease, value)
    for part in ("copy", "state"):
        store.write(chunk, part, lease, generation=generation).wait()


def get(store: Store, lease: Lease, chunk: int, part: str) -> bytes:
    transfer = store.read(chunk, part, lease)
    transfer.wait()
    return bytes(lease.tensor()[: transfer.nbytes].numpy())


def arena_file(path: Path) -> Path:
    return path / "drive" / "infinity" / "rank0.arena"


# ------------------------------------------------------------------------------- the model


class Machine(RuleBasedStateMachine):
    """Random calls, transfers left under way, against a dict of bytes."""

    @initialize(
        slots=st.sampled_from([1, 2]),
        directories=st.integers(1, 3),
        tiers=st.lists(st.sampled_from([NVME, NVME, HOST]), min_size=6, max_size=6),
        protect=st.booleans(),
        backend=st.sampled_from(["threads", "auto"]),
        delay_seed=st.integers(0, 1 << 30),
    )
    def open(
        self, slots: int, directories: int, tiers: list[Tier], protect: bool, backend: str, delay_seed: int
    ) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        names = [os.path.join(self.temporary.name, str(d)) for d in range(directories)]
        for name in names:
            os.mkdir(name)
        chunks: list[dict[str, PartSpec]] = []
        for chunk in range(4):
            spec = {
                "copy": PartSpec((2 * PAGE,), tiers[chunk], True, "copy"),
                "state": PartSpec((PAGE, 2 * PAGE), tiers[(chunk + 2) % 6], True, "state"),
                "gradient": PartSpec((4 * PAGE,), tiers[(chunk + 4) % 6], False, "gradient"),
            }
            if chunk == 3:  # a frozen one
                spec = {"copy": PartSpec((PAGE,), tiers[5], False, "copy")}
            chunks.append(spec)
        self.pool = PinnedPool({"a": (ROOM, 3)}, protect=protect)
        self.store = Store(
            chunks,
            directories=names,
            pool=self.pool,
            slots=slots,
            weights=[1.0 + d for d in range(directories)],
            backend=backend,
            block_bytes=PAGE,
            queue_depth=3,
            deadline=20.0,
            delay_seed=delay_seed,
        )
        self.slots = slots
        self.chunks = chunks
        self.model: dict[tuple[int, str], bytes | None] = {
            (c, p): bytes(s.nbytes) for c, spec in enumerate(chunks) for p, s in spec.items()
        }
        self.generation = [-1] * 4
        self.under_way: list[tuple[Transfer, Lease, bytes | None]] = []
        self.turn = 0

    def lease(self) -> Lease:
        while (lease := self.pool.try_lease("a", ROOM)) is None:
            self.end(0)
        return lease

    def end(self, index: int) -> None:
        transfer, lease, expected = self.under_way.pop(index)
        transfer.wait(20)
        if expected is not None:
            assert bytes(lease.tensor()[: transfer.nbytes].numpy()) == expected, transfer
        lease.release()

    def content(self, nbytes: int) -> torch.Tensor:
        self.turn += 1
        return (torch.arange(nbytes, dtype=torch.int64) // 512 * 7 + self.turn * 31).to(torch.uint8)

    def send(self, chunk: int, part: str, *, nbytes: int | None = None, **kwargs: Any) -> None:
        size = self.chunks[chunk][part].nbytes if nbytes is None else nbytes
        lease = self.lease()
        data = self.content(size)
        lease.tensor()[:size].copy_(data)
        transfer = self.store.write(chunk, part, lease, nbytes=nbytes, **kwargs)
        self.model[chunk, part] = bytes(data.numpy())
        if self.turn % 3 == 0:  # let go at once: the store holds it
            lease.release()
            lease = self.lease()
        self.under_way.append((transfer, lease, None))

    @rule(chunk=st.integers(0, 2), again=st.booleans(), order=st.booleans())
    def write_generation(self, chunk: int, again: bool, order: bool) -> None:
        self.generation[chunk] += not (again and self.generation[chunk] >= 0)
        for part in ("copy", "state") if order else ("state", "copy"):
            self.send(chunk, part, generation=self.generation[chunk])

    @rule(chunk=st.integers(0, 2), section=st.integers(0, 1))
    def write_section(self, chunk: int, section: int) -> None:
        if self.chunks[chunk]["state"].tier is NVME:
            if self.slots == 2 and self.generation[chunk] < 0:
                return  # would leave the copy without this generation
            self.generation[chunk] = max(self.generation[chunk], 0)
        size = self.chunks[chunk]["state"].sections[section]
        lease = self.lease()
        data = self.content(size)
        lease.tensor()[:size].copy_(data)
        transfer = self.store.write(
            chunk,
            "state",
            lease,
            sections=range(section, section + 1),
            generation=max(self.generation[chunk], 0),
        )
        old = self.model[chunk, "state"]
        assert old is not None
        piece = bytes(data.numpy())
        self.model[chunk, "state"] = piece + old[PAGE:] if section == 0 else old[:PAGE] + piece
        self.under_way.append((transfer, lease, None))

    @rule(chunk=st.integers(0, 2), nbytes=st.sampled_from([0, 1, PAGE - 1, PAGE, 3 * PAGE + 5, 4 * PAGE]))
    def write_gradient(self, chunk: int, nbytes: int) -> None:
        self.send(chunk, "gradient", nbytes=nbytes)
        assert self.store.nbytes(chunk, "gradient") == nbytes

    @rule()
    def write_frozen(self) -> None:
        self.send(3, "copy")

    @rule(key=st.sampled_from([(c, p) for c in range(3) for p in CHUNK] + [(3, "copy")]))
    def read(self, key: tuple[int, str]) -> None:
        lease = self.lease()
        expected = self.model[key]
        if expected is None:
            with pytest.raises(StorageError, match="dropped"):
                self.store.read(*key, lease)
            lease.release()
            return
        transfer = self.store.read(*key, lease)
        assert transfer.nbytes == len(expected)
        self.under_way.append((transfer, lease, expected))

    @rule(chunk=st.integers(0, 2), section=st.integers(0, 1))
    def read_section(self, chunk: int, section: int) -> None:
        lease = self.lease()
        transfer = self.store.read(chunk, "state", lease, sections=range(section, section + 1))
        whole = self.model[chunk, "state"]
        assert whole is not None
        self.under_way.append((transfer, lease, whole[PAGE:] if section else whole[:PAGE]))

    @rule(chunk=st.integers(0, 2))
    def drop(self, chunk: int) -> None:
        self.store.drop(chunk, "gradient")
        self.model[chunk, "gradient"] = None

    @rule(index=st.integers(0, 63))
    def wait(self, index: int) -> None:
        if self.under_way:  # how many are depends on when leases come home
            self.end(index % len(self.under_way))

    @rule()
    def flush(self) -> None:
        self.store.flush()
        for chunk, generation in enumerate(self.generation[:3]):
            if {self.chunks[chunk][p].tier for p in ("copy", "state")} != {HOST}:
                assert self.store.table.generation[chunk] == generation

    @invariant()
    def no_lease_is_lost(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.stats()["a"].quarantined == 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            while self.under_way:
                self.end(0)
            for chunk, part in self.model:
                self.read((chunk, part))
            while self.under_way:
                self.end(0)
        finally:
            self.store.close()
            stats = self.pool.stats()["a"]
            self.pool.close()
            self.temporary.cleanup()
        assert stats.in_use == 0


def test_the_store_is_a_dict() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )


# ------------------------------------------------------------------------------- contents


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
    assert not arena_file(tmp_path).exists()


def test_given_crcs_are_believed_and_checked(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        fill(lease, 3)
        right = crc32c(lease.address, PAGE)
        store.write(0, "state", lease, crcs=[right] * 3).wait()
        assert get(store, lease, 0, "state") == b"\3" * 3 * PAGE
        with pytest.raises(ValueError, match="2 CRCs for 3 sections"):
            store.write(0, "state", lease, crcs=[right] * 2)
        store.write(0, "state", lease, crcs=[right, right ^ 1, right], generation=1).wait()
        with pytest.raises(CorruptionError, match="section 1"):
            get(store, lease, 0, "state")


def test_parts_on_the_host_are_memory(tmp_path: Path) -> None:
    calls: list[int] = []
    spec = {
        "state": PartSpec((PAGE, PAGE), HOST, True, "state"),
        "gradient": PartSpec((PAGE,), HOST, False, "g"),
    }
    pool = pool_of()
    store = Store(
        [spec, spec],
        directories=[],
        pool=pool,
        register=lambda a, n: calls.append(n),
        unregister=lambda a, n: calls.append(-n),
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
        assert store.nbytes(0, "gradient") == 10
    assert (store.tier(0, "state"), store.nbytes(0, "state")) == (HOST, 2 * PAGE)
    store.flush()
    store.close()
    assert calls == [6 * PAGE, -6 * PAGE]


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
        for part, nbytes in (("state", PAGE), ("gradient", 5 * PAGE), ("gradient", -1)):
            with pytest.raises(ValueError, match="cannot be written"):
                store.write(0, part, lease, nbytes=nbytes)
        with pytest.raises(ValueError, match="is versioned"):
            store.drop(0, "state")
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
        store.drop(0, "gradient")
        assert store.nbytes(0, "gradient") == 0
        with pytest.raises(StorageError, match="was dropped"):
            store.read(0, "gradient", lease)
        store.write(0, "gradient", fill(lease, 2)).wait()
        assert get(store, lease, 0, "gradient") == b"\2" * 4 * PAGE


def test_the_table_is_small() -> None:
    chunk = {**CHUNK, "gradient": CHUNK["gradient"]._replace(tier=HOST)}
    with tempfile.TemporaryDirectory() as place:
        store = Store([chunk] * 1000, directories=[place], pool=pool_of())
        table = store.table
        persistent = table.slot.nbytes + table.generation.nbytes + table._crcs.nbytes
        assert persistent / 1000 <= 32
        store.close()


# ------------------------------------------------------------------------------- order


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
        store.flush()


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
            store.flush()
        first.wait(20)
        with pytest.raises(StorageError, match="was interrupted"):
            second.wait(20)
        store.close()
        assert pool.stats()["a"].quarantined == ROOM


def test_a_newer_generation_does_not_wait_for_a_read_of_the_older_slot(tmp_path: Path) -> None:
    pool = pool_of(6)
    with store_of(tmp_path, pool=pool, slots=2) as store:
        a, b, c = (fill(pool.lease("a", ROOM), v) for v in (1, 2, 3))
        put(store, a, 0, 1, generation=0)
        assert (store.table.slot[0], store.table.generation[0]) == (1, 0)
        store._rings[0].hold(True)
        read = store.read(0, "copy", b)
        fill(a, 7)
        writes = [store.write(0, part, a, generation=1) for part in ("copy", "state")]
        assert all(t.ticket is not None for t in (read, *writes))
        # The one after that would overwrite what is in use, and what is being read.
        later = [store.write(0, part, c, generation=2) for part in ("copy", "state")]
        assert all(t.ticket is None for t in later)
        assert set(later[0].waits_for) == {read, *writes}
        assert set(later[1].waits_for) == set(writes)
        store._rings[0].hold(False)
        store.flush()
        read.wait()
        assert set(b.tensor()[: 2 * PAGE].tolist()) == {1}
        assert get(store, b, 0, "copy") == b"\3" * 2 * PAGE
        assert (store.table.slot[0], store.table.generation[0]) == (1, 2)


def test_a_slot_flips_when_all_parts_are_complete(tmp_path: Path) -> None:
    pool = pool_of(6)
    with store_of(tmp_path, pool=pool, slots=2) as store, pool.lease("a", ROOM) as lease:
        put(store, lease, 0, 1)
        store.write(0, "copy", fill(lease, 2), generation=1).wait()
        assert (store.table.slot[0], store.table.generation[0]) == (1, 0)
        assert get(store, lease, 0, "copy") == b"\2" * 2 * PAGE  # what was written last
        assert get(store, lease, 0, "state") == b"\1" * 3 * PAGE
        with pytest.raises(StorageError, match="no write of state"):
            store.write(0, "copy", lease, generation=2)
        with pytest.raises(StorageError, match="generation 1 of chunk 0 is not whole"):
            store.flush()
        with pytest.raises(ValueError, match="older than 1"):
            store.write(0, "state", lease, generation=0)
        with pytest.raises(ValueError, match="lacks the others"):
            store.write(0, "state", lease, sections=range(1), generation=1)
        store.write(0, "copy", fill(lease, 3), generation=1).wait()  # again, before it flipped
        store.write(0, "state", fill(lease, 4), generation=1).wait()
        assert (store.table.slot[0], store.table.generation[0]) == (0, 1)
        store.write(0, "state", fill(lease, 5), sections=range(2, 3), generation=1).wait()
        store.flush()
        assert get(store, lease, 0, "state") == b"\4" * 2 * PAGE + b"\5" * PAGE
        assert get(store, lease, 0, "copy") == b"\3" * 2 * PAGE
        assert [int(s) for s in store.table.slot] == [0, 0, 0]  # the others did not flip


def test_the_slot_in_use_stays_whole_until_the_flip(tmp_path: Path) -> None:
    pool = pool_of(6)
    with store_of(tmp_path, pool=pool, slots=2) as store, pool.lease("a", ROOM) as lease:
        for generation in range(5):
            slot = int(store.table.slot[0])
            before = {part: _bytes_of(store, tmp_path, 0, part, slot) for part in ("copy", "state")}
            store.write(0, "copy", fill(lease, generation + 1), generation=generation).wait()
            transfer = store.write(0, "state", lease, generation=generation)
            transfer.wait()
            for part, content in before.items():
                assert _bytes_of(store, tmp_path, 0, part, slot) == content
            assert int(store.table.slot[0]) == 1 - slot


def _bytes_of(store: Store, path: Path, chunk: int, part: str, slot: int = 0) -> bytes:
    extent = store.layout.extent(chunk, part, slot)
    with open(arena_file(path), "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)


def _overwrite(store: Store, path: Path, chunk: int, part: str, at: int, content: bytes) -> None:
    extent = store.layout.extent(chunk, part, store._order.newest_slot(chunk, part))
    with open(arena_file(path), "r+b") as file:
        file.seek(extent.offset + at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def test_many_threads(tmp_path: Path) -> None:
    pool = pool_of(5)
    failures: list[BaseException] = []
    with store_of(tmp_path, chunks=8, pool=pool, slots=2, delay_seed=1) as store:

        def work(number: int) -> None:
            try:
                for generation in range(12):
                    for chunk in (number, number + 4):
                        value = (generation * 8 + chunk) % 251 + 1
                        with pool.lease("a", ROOM, timeout=20) as lease:
                            fill(lease, value)
                            store.write(chunk, "copy", lease, generation=generation)
                            store.write(chunk, "state", lease, generation=generation)
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
        store.flush()
        assert store.table.generation.tolist() == [11] * 8
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
        store.flush()


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


# ------------------------------------------------------------------------------- corruption


@pytest.mark.parametrize("kind", ["flipped bit", "torn", "lost", "misdirected", "zeroed"])
@pytest.mark.parametrize(("part", "slots"), [("state", 1), ("copy", 2), ("gradient", 1)])
def test_a_write_that_went_wrong_is_found_at_the_next_read(
    tmp_path: Path, kind: str, part: str, slots: int
) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool, slots=slots) as store, pool.lease("a", ROOM) as lease:
        nbytes = CHUNK[part].nbytes
        for chunk in range(3):
            put(store, lease, chunk, chunk + 1)
            store.write(chunk, "gradient", lease).wait()
        old = _bytes_of(store, tmp_path, 1, part, store._order.newest_slot(1, part))
        put(store, lease, 1, 77)
        store.write(1, "gradient", lease).wait()
        assert get(store, lease, 1, part) == bytes([77]) * nbytes
        other = _bytes_of(store, tmp_path, 2, part, store._order.newest_slot(2, part))
        content = {
            "flipped bit": bytes([77]) * (nbytes - 1) + bytes([76]),
            "torn": bytes([77]) * (nbytes - 512) + old[-512:],
            "lost": old,
            "misdirected": other,
            "zeroed": bytes(nbytes),
        }[kind]
        _overwrite(store, tmp_path, 1, part, 0, content)
        with pytest.raises(CorruptionError, match=f"part '{part}' of chunk 1") as raised:
            get(store, lease, 1, part)
        error = raised.value
        sections = len(CHUNK[part].sections)
        section = sections - 1 if kind in ("flipped bit", "torn") else 0
        assert f"section {section} of" in str(error)
        extent = store.layout.extent(1, part, store._order.newest_slot(1, part), range(section, section + 1))
        assert (error.path, error.offset, error.nbytes) == (str(arena_file(tmp_path)), *extent[1:])
        with pytest.raises(CorruptionError):  # and from then on
            store.read(2, part, lease)


def test_only_the_sections_that_are_read_are_checked(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        put(store, lease, 0, 1)
        _overwrite(store, tmp_path, 0, "state", PAGE, b"x")
        store.read(0, "state", lease, sections=range(2, 3)).wait()
        store.read(0, "state", lease, sections=range(1)).wait()
        with pytest.raises(CorruptionError, match="section 1"):
            store.read(0, "state", lease, sections=range(1, 3)).wait()


# ------------------------------------------------------------------------------- errors


def test_a_short_read_names_what_it_hit_and_stays(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        os.truncate(arena_file(tmp_path), PAGE)
        with pytest.raises(ShortTransferError, match="read of part 'state' of chunk 2 failed") as raised:
            store.read(2, "state", lease).wait()
        assert raised.value.path == str(arena_file(tmp_path))
        for call in (store.check, store.flush, lambda: store.write(0, "copy", lease)):
            with pytest.raises(ShortTransferError, match="chunk 2"):
                call()
        store.close()  # everybody knows by now
        assert pool.stats()["a"].in_use == ROOM


def _read_only(store: Store, path: Path) -> None:
    """From now on writes fail (EBADF)."""
    arena = store._arenas[0]
    arena.file.close()
    arena.file = DirectFile.open(str(arena_file(path)), os.O_RDONLY)


def test_a_failed_write_that_nobody_waited_for_arrives(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        _read_only(store, tmp_path)
        with pool.lease("a", ROOM) as lease:
            first = store.write(1, "gradient", fill(lease, 1))
            after = store.read(1, "gradient", lease)
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            _check_for(store, 20)
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            after.wait(20)  # it depended on it
        with pytest.raises(TransferError):
            first.wait()
        with pytest.raises(TransferError):
            store.flush()
        assert pool.stats()["a"].in_use == 0


def _check_for(store: Store, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        store.check()


@pytest.mark.parametrize("by", ["flush", "close"])
def test_the_last_chance_to_tell(tmp_path: Path, by: str) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        _read_only(store, tmp_path)
        with pool.lease("a", ROOM) as lease:
            store.write(1, "gradient", fill(lease, 1))
        with pytest.raises(TransferError, match="chunk 1"):
            getattr(store, by)()
        store.close()
    assert not arena_file(tmp_path).exists()


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
        assert arena_file(tmp_path).exists()
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
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import PartSpec, Store
pool = PinnedPool({"a": (8192, 1)}, protect=True)
store = Store([{"x": PartSpec((4096,), Tier.NVME, False, "x")}], directories=[sys.argv[1]], pool=pool,
              backend=sys.argv[3])
lease = pool.lease("a", 8192)
view = lease.tensor()
store._rings[0].hold(True)
getattr(store, sys.argv[2])(0, "x", lease, 4096)
view[0] = 1                  # the other page is free
print("ready", flush=True)
view[4096] = 1
print("done", flush=True)
"""


@pytest.mark.parametrize("backend", ["libaio", "syscall", "uring", "threads"])
@pytest.mark.parametrize("call", ["read", "write"])
def test_touching_a_lease_under_way_is_a_fault_in_test_mode(tmp_path: Path, call: str, backend: str) -> None:
    need_backend(backend, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", _TOUCH, str(tmp_path), call, backend],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "ready\n", result
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("backend", ["libaio", "syscall", "uring", "threads"])
def test_every_backend_moves_the_right_bytes_through_a_protected_pool(tmp_path: Path, backend: str) -> None:
    need_backend(backend, tmp_path)
    pool = pool_of(protect=True)
    with store_of(tmp_path, pool=pool, backend=backend) as store, pool.lease("a", ROOM) as lease:
        for value in (3, 7):
            put(store, lease, 1, value)
            fill(lease, 0)
            assert get(store, lease, 1, "copy") == bytes([value]) * 2 * PAGE


# ------------------------------------------------------------------------------- runs


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        put(store, lease, 0, 5)
        with pytest.raises(DirectoryError, match="in use by another run"):
            Store([CHUNK], directories=[str(tmp_path / "drive")], pool=pool)
        assert get(store, lease, 0, "copy") == b"\5" * 2 * PAGE
        Store([CHUNK], directories=[str(tmp_path / "drive")], pool=pool, rank=1).close()


def test_a_refused_store_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pool = pool_of()
    with pytest.raises(DirectoryError, match="is missing"):
        Store([CHUNK] * 4, directories=[str(tmp_path / "a"), str(tmp_path / "b")], pool=pool)
    assert list((tmp_path / "a" / "infinity").iterdir()) == []
    with pytest.raises(ConfigError, match="no directory"):
        Store([CHUNK], directories=[], pool=pool)
    with pytest.raises(ConfigError, match="one slot or two"):
        Store([CHUNK], directories=[str(tmp_path / "a")], pool=pool, slots=3)
    Store([CHUNK] * 4, directories=[str(tmp_path / "a")], pool=pool).close()


@pytest.mark.root
def test_a_full_file_system_is_refused_at_the_start() -> None:
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("this test needs root")
        pytest.skip("needs root")
    pool = pool_of()
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", place], check=True, timeout=20)
        try:
            with pytest.raises(DirectoryError, match="not enough free space"):
                Store([CHUNK] * 10, directories=[place], pool=pool)
            with Store([CHUNK] * 6, directories=[place], pool=pool) as store, pool.lease("a", ROOM) as lease:
                put(store, lease, 5, 9)
                assert set(get(store, lease, 5, "state")) == {9}
        finally:
            subprocess.run(["umount", "-l", place], check=True, timeout=20)


_RUN = """
import sys
from infinity.core.sizes import Tier
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import PartSpec, Store
pool = PinnedPool({"a": (1 << 20, 4)})
spec = {"x": PartSpec((1 << 20,), Tier.NVME, True, "x")}
store = Store([spec] * 16, directories=[sys.argv[1]], pool=pool)
step = 0
while True:
    for chunk in range(16):
        with pool.lease("a", 1 << 20) as lease:
            lease.tensor().fill_(step % 256)
            store.write(chunk, "x", lease, generation=step)
    step += 1
    if step == 3:
        print("ready", flush=True)
"""


def test_kill_then_start_again(tmp_path: Path) -> None:
    pool = pool_of()
    (tmp_path / "drive").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(tmp_path / "drive")], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(20)
    assert arena_file(tmp_path).stat().st_size == (16 << 20) + MARK_NBYTES
    with store_of(tmp_path, chunks=50, pool=pool) as store, pool.lease("a", ROOM) as lease:
        for chunk in range(50):
            assert not any(get(store, lease, chunk, "state"))
            put(store, lease, chunk, chunk)
            assert set(get(store, lease, chunk, "state")) == {chunk}
    assert not arena_file(tmp_path).exists()
