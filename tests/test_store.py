"""The store: what its parts hold, in which order transfers begin, and what each kind of error leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
from infinity.hardware.aio import DirectFile
from infinity.storage.store import Part, Store, Version

from .command_line import python
from .shortage import Shortage
from .small_store import (
    CHUNK,
    NVME,
    PAGE,
    ROOM,
    arena_file,
    bytes_of,
    fill,
    get,
    need_backend,
    pool_of,
    put,
    store_of,
)

# ---------------------------------------------------------------------------- contents


def test_ranges_that_do_not_fit_are_refused_before_anything_moves(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", 2 * PAGE) as lease:
        for call in (store.read, store.write):
            for offset in (1, -PAGE, 2 * PAGE):
                with pytest.raises(ValueError, match="do not fit a lease"):
                    call(0, "state", lease, offset)
            with pytest.raises(IndexError):
                call(7, "state", lease)
            with pytest.raises(KeyError):
                call(0, "nothing", lease)
        for nbytes in (5 * PAGE, -1):
            with pytest.raises(ValueError, match="cannot be written"):
                store.write(0, "gradient", lease, nbytes=nbytes)
        with pytest.raises(ValueError, match="cannot be written"):
            store.write(0, "state", lease, nbytes=2 * PAGE)
        with pytest.raises(StorageError, match="has no memory"):
            store.view(0, "state")
        assert store.stats()[0].bytes_written == 0
        store.write(0, "gradient", lease, nbytes=PAGE + 10).wait()
        assert store.stats()[0].bytes_written == 2 * PAGE  # padded, so that it stays direct
        lease.release()
        with pytest.raises(ClosedError, match="released"):
            store.read(0, "state", lease)


def test_directories_carry_their_weight_and_one_that_is_missing_leaves_nothing(tmp_path: Path) -> None:
    places, pool = [tmp_path / "a", tmp_path / "b"], pool_of()
    names = [str(place) for place in places]
    places[0].mkdir()
    with pytest.raises(DirectoryError, match="is missing"):
        Store([CHUNK] * 4, directories=names, pool=pool)
    assert list(places[0].iterdir()) == []
    with pytest.raises(ConfigError, match="no directory"):
        Store([CHUNK], directories=[], pool=pool)
    with pytest.raises(ConfigError, match="one slot or two"):
        Store([{"copy": Part((PAGE,), (NVME,) * 3)}], directories=names[:1], pool=pool)
    places[1].mkdir()
    store = Store([CHUNK] * 8, directories=names, pool=pool, weights=[3, 1])
    with pool.lease("a", ROOM) as lease:
        for chunk in range(8):
            put(store, lease, chunk, chunk)
        assert [s.bytes_written // (5 * PAGE) for s in store.stats()] == [6, 2]
        assert [s.path for s in store.stats()] == names
        for chunk in range(8):
            assert set(get(store, lease, chunk, "copy")) == {chunk}
    store.close()


# ---------------------------------------------------------------------------- corruption


def _overwrite(store: Store, chunk: int, part: str, at: int, content: bytes) -> None:
    with open(arena_file(store), "r+b") as file:
        file.seek(store.layout.extent(chunk, part).offset + at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("flipped bit", "state"),
        ("torn", "state"),
        ("lost", "gradient"),
        ("misdirected", "copy"),
        ("zeroed", "state"),
    ],
)
def test_a_write_that_went_wrong_is_found_at_the_next_read(tmp_path: Path, kind: str, part: str) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        nbytes = CHUNK[part].nbytes
        for chunk in range(3):
            put(store, lease, chunk, chunk + 1)
            store.write(chunk, "gradient", lease).wait()
        old, other = bytes_of(store, 1, part), bytes_of(store, 2, part)
        put(store, lease, 1, 77)
        store.write(1, "gradient", lease).wait()
        assert get(store, lease, 1, part) == bytes([77]) * nbytes
        content = {
            "flipped bit": bytes([77]) * (nbytes - 1) + bytes([76]),
            "torn": bytes([77]) * (nbytes - 512) + old[-512:],
            "lost": old,
            "misdirected": other,
            "zeroed": bytes(nbytes),
        }[kind]
        _overwrite(store, 1, part, 0, content)
        with pytest.raises(CorruptionError, match=f"part '{part}' of chunk 1") as raised:
            get(store, lease, 1, part)
        error = raised.value
        section = len(CHUNK[part].sections) - 1 if kind in ("flipped bit", "torn") else 0
        assert f"section {section} of" in str(error)
        sections = CHUNK[part].sections
        at = store.layout.extent(1, part).offset + sum(sections[:section])
        assert (error.path, error.offset, error.nbytes) == (str(tmp_path / "drive"), at, sections[section])
        with pytest.raises(CorruptionError):  # and from then on
            store.read(2, part, lease)


# ---------------------------------------------------------------------------- order


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
        begun = [t.ticket is not None for t in (first, read, second, third, other)]
        assert begun == [True, False, False, False, True]
        assert not any(t.done for t in (first, read, second, third))
        with pytest.raises(DeadlineError, match="part 'copy' of chunk 0 is not complete"):
            read.wait(0.01)
        ring.hold(False)
        deadline = time.monotonic() + 20
        while not third.done:  # a look begins what waits, as a wait does
            assert time.monotonic() < deadline
        third.wait(0)
        assert all(t.finished for t in (first, read, second))
        assert set(b.tensor()[: 2 * PAGE].tolist()) == {1}
        assert set(a.tensor()[: 2 * PAGE].tolist()) == {3}
        other.wait(20)
        store.wait_written()


def test_what_is_done_with_the_back_does_not_wait_for_the_front(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    pool, chunk = pool_of(6), {"copy": Part((2 * PAGE,), (NVME, NVME))}
    with Store([chunk], directories=[str(tmp_path / "drive")], pool=pool) as store:
        a, b, c, d = (fill(pool.lease("a", ROOM), v) for v in (1, 2, 3, 4))
        store.write(0, "copy", a).wait()
        store._rings[0].hold(True)
        read = store.read(0, "copy", b)
        write = store.write(0, "copy", c, version=Version.BACK)
        over = store.write(0, "copy", d, version=Version.FRONT)
        assert [t.ticket is not None for t in (read, write, over)] == [True, True, False]
        assert over.waits_for == {read}
        store.versions.flip(0, "copy")  # what is under way stays where it is
        newer = store.read(0, "copy", a)
        assert newer.waits_for == {write}
        store._rings[0].hold(False)
        store.wait_written()
        for transfer, lease, value in ((read, b, 1), (newer, a, 3)):
            transfer.wait(20)
            assert set(lease.tensor()[: 2 * PAGE].tolist()) == {value}
        assert bytes_of(store, 0, "copy", 0) == b"\4" * 2 * PAGE
        assert bytes_of(store, 0, "copy", 1) == b"\3" * 2 * PAGE


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


def test_a_lack_of_memory_loses_no_lease_and_hangs_nothing(tmp_path: Path) -> None:
    """At each point of a write, of one that waits for it, of a read that waits for both, and of their ends: a
    call has changed nothing, or each later one says that the store is of no use any more."""
    for at in range(2000):
        pool, shortage = pool_of(3), Shortage(at, "storage")
        with store_of(tmp_path, pool=pool) as store:
            first, second, read = (fill(pool.lease("a", ROOM), value) for value in (1, 2, 3))
            store.write(0, "gradient", first).wait()
            with contextlib.suppress(MemoryError), shortage.here():
                store.write(0, "gradient", first)
                store.write(0, "gradient", second)
                store.read(0, "gradient", read).wait()
                store.wait_written()
            with contextlib.suppress(StorageError):
                store.read(0, "gradient", read).wait()
                assert read.tensor()[0] in (1, 2), shortage.fired
                store.wait_written()
                assert not store._order.pending(writes=True), shortage.fired
            for lease in (first, second, read):
                lease.release()
        assert pool.stats()["a"].in_use == 0, shortage.fired
        if not shortage.fired:
            return
    raise AssertionError(shortage.fired)


# ---------------------------------------------------------------------------- errors and ends


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


def _until_it_raises(call: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        call()


@pytest.mark.parametrize("by", ["check", "wait_written", "close"])
def test_a_failed_write_that_nobody_waited_for_arrives(tmp_path: Path, by: str) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store:
        arena = store._arenas[0]
        file = DirectFile.open(str(arena_file(store)), os.O_RDONLY)
        arena.file.close()
        arena.file = file  # from now on writes fail (EBADF)
        with pool.lease("a", ROOM) as lease:
            store._rings[0].hold(True)  # or the read may already be told
            first = store.write(1, "gradient", fill(lease, 1))
            after = store.read(1, "gradient", lease)
            store._rings[0].hold(False)
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            _until_it_raises(getattr(store, by))
        with pytest.raises(TransferError, match="write of part 'gradient' of chunk 1 failed"):
            after.wait(20)  # it depended on it
        with pytest.raises(TransferError):
            first.wait()
        store.close()
        assert pool.stats()["a"].in_use == 0


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
if sys.argv[2] == "read":
    view[4096].item()
view[4096] = 1
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("call", "backend"), [("read", "libaio"), ("write", "syscall"), ("read", "uring"), ("write", "threads")]
)
def test_touching_a_lease_under_way_is_a_fault_in_test_mode(tmp_path: Path, call: str, backend: str) -> None:
    need_backend(backend, tmp_path)
    done = python("-c", _TOUCH, str(tmp_path), call, backend)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "ready\n")
