"""The pinned pool: leases, quotas, handles, quarantine, protection of buffers in flight."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, ClosedError, DeadlineError, StorageError
from infinity.hardware.streams import Task, is_over, wait_over
from infinity.params.load import Load
from infinity.storage.pinned import Lease, PinnedPool

from .small_net import Wrapped
from .small_store import Pins

KIB = 1024


def pool_of(buffers: int = 2, nbytes: int = 8 * KIB, *, protect: bool = False) -> PinnedPool:
    return PinnedPool({"load": (nbytes, buffers), "update": (nbytes * 2, 1)}, protect=protect)


def test_memory_is_only_taken_when_touched_unless_registered() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    size = 64 << 20
    before = resident()
    untouched = PinnedPool({"a": (size, 1)})
    assert resident() - before < size // 8
    pins = Pins()
    registered = PinnedPool({"a": (size, 1), "b": (4096, 2)}, pins=pins)
    assert resident() - before >= size
    assert [nbytes for _, _, nbytes in pins.calls] == [size, 8192]
    registered.close()
    assert [c[1:] for c in pins.calls[:2]] == [c[1:] for c in pins.calls[2:]]
    untouched.close()


def test_a_failing_registration_undoes_the_others() -> None:
    class Full(Pins):
        def register(self, address: int, nbytes: int) -> None:
            if self.calls:
                raise MemoryError("no")
            super().register(address, nbytes)

    pins = Full()
    with pytest.raises(MemoryError):
        PinnedPool({"a": (4096, 1), "b": (4096, 1)}, pins=pins)
    assert [(what, address) for what, address, _ in pins.calls] == [
        ("pin", address := pins.calls[0][1]),
        ("unpin", address),
    ]


def test_try_lease_and_deadline_name_the_quota() -> None:
    pool = pool_of()
    held = [pool.try_lease("load", 1), pool.try_lease("load", 8 * KIB)]
    assert None not in held
    assert pool.try_lease("load", 1) is None
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="'load'"):
        pool.lease("load", 1, timeout=0.05)
    assert 0.04 < time.monotonic() - start < 5
    with pytest.raises(BudgetError, match="'load'"):
        pool.try_lease("load", 8 * KIB + 1)
    with pytest.raises(BudgetError, match="'nothing'"):
        pool.lease("nothing", 1)
    stats = pool.stats()["load"]
    assert (stats.total, stats.in_use, stats.peak) == (16 * KIB, 16 * KIB, 16 * KIB)
    assert stats.waits == 1
    assert stats.wait_seconds > 0.04
    assert pool.stats()["update"].in_use == 0  # quotas do not lend to each other
    with pool.lease("update", 1):
        assert pool.stats()["update"].in_use == 16 * KIB
    assert pool.stats()["update"].in_use == 0


def test_what_a_copy_still_reads_is_not_lent_and_nobody_waits_to_give_it_up() -> None:
    pool = pool_of(2)
    copies = [Task(lambda: None), Task(lambda: 1 / 0), Task(lambda: None)]
    first, second = pool.lease("load", 1), pool.lease("load", 1)
    shared = first.retain()
    first.release(copies[0])
    second.release(copies[1])
    assert pool.try_lease("load", 1) is None
    copies[0].run()
    assert pool.try_lease("load", 1) is None  # it has another user
    shared.release(copies[2])
    assert pool.stats()["load"].in_use == 16 * KIB
    copies[1].run()  # whoever waits for it is told of the error
    again = pool.try_lease("load", 1)
    assert again is not None
    assert again.address == second.address
    got: list[Lease] = []
    waiter = threading.Thread(target=lambda: got.append(pool.lease("load", 1)), daemon=True)
    waiter.start()
    while pool.stats()["load"].waits == 0:
        time.sleep(0.001)
    assert not got
    copies[2].run()
    waiter.join(20)
    assert [x.address for x in got] == [first.address]
    for lease in (again, *got):
        lease.release()
    assert pool.stats()["load"].in_use == 0


class Short:
    """An event: there is no memory for the first looks and waits, and then it happens."""

    def __init__(self) -> None:
        self.failures, self.happened = 3, False

    def _ask(self) -> None:
        if self.failures:
            self.failures -= 1
            raise MemoryError

    def done(self) -> bool:
        self._ask()
        return self.happened

    def wait(self) -> None:
        self._ask()
        self.happened = True


def test_a_look_that_finds_no_memory_says_nothing_of_what_it_looks_at() -> None:
    pool, event = pool_of(1), Short()
    pool.lease("load", 1).release(event)
    assert pool.try_lease("load", 1) is None
    wait_over(event)
    assert event.happened
    assert pool.try_lease("load", 1) is not None
    failed = Task(lambda: bytearray(1 << 62))
    failed.run()
    assert isinstance(failed.error, MemoryError)
    assert is_over(failed)
    wait_over(failed)


def test_the_loader_reads_on_while_a_copy_waits(wrapped: Wrapped) -> None:
    """A copy may wait for all that the device has to do; what is loaded next does not."""
    engine = engine_of(wrapped[0])
    gate, loads = threading.Event(), []
    engine.device._h2d.submit(lambda: gate.wait(60))
    try:
        for unit in engine.units[:2]:
            chunks = unit.layout.chunks
            slots = {chunk.id: engine.store.versions.slot(chunk.id, "copy") for chunk in chunks}
            target = torch.empty(unit.layout.gathered_nbytes, dtype=torch.uint8)
            loads.append(Load(target, chunks, slots, None))
            engine.loader.start(loads[-1])
            assert loads[-1].issued.wait(30)
        assert not any(load.is_over() for load in loads)
    finally:
        gate.set()
    for load in loads:
        event = load.wait_issued()
        assert event is not None
        event.wait()
    assert engine.pool.stats()["load"].in_use == 0


def test_a_buffer_goes_home_with_its_last_user_and_release_is_idempotent() -> None:
    pool = pool_of(1)
    first = pool.lease("load", 100)
    second = first.retain()
    assert second.address == first.address
    first.release()
    first.release()
    assert pool.try_lease("load", 1) is None
    assert second.tensor().numel() == 100
    with pytest.raises(ClosedError):
        first.retain()
    second.release()
    third = pool.try_lease("load", 1)
    assert third is not None
    second.release()  # must not give away the buffer of `third`
    assert pool.try_lease("load", 1) is None


def test_quarantine_never_goes_home() -> None:
    pool = pool_of(2)
    lost, other = pool.lease("load", 1), pool.lease("load", 1)
    user = lost.retain()
    lost.quarantine()
    user.quarantine()
    lost.release()
    user.release()
    assert pool.try_lease("load", 1) is None
    stats = pool.stats()["load"]
    assert (stats.quarantined, stats.in_use) == (8 * KIB, 8 * KIB)
    other.quarantine()
    with pytest.raises(StorageError, match="no buffer left"):
        pool.lease("load", 1)
    # What a transfer may still write to stays mapped, whatever is closed or dropped.
    start, end = lost.address, lost.address + lost.room
    pool.close()
    del pool, lost, user, other
    with open("/proc/self/maps") as file:
        ranges = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in file]
    assert any(low <= start and end <= high for low, high in ranges)


def test_close_wakes_waiters_and_lends_nothing_more() -> None:
    pool = pool_of(1)
    held = pool.lease("load", 16)
    held.tensor().fill_(7)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.lease("load", 1)
        except BaseException as error:
            errors.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    while pool.stats()["load"].waits == 0:
        time.sleep(0.001)
    pool.close()
    waiter.join(20)
    assert [type(e) for e in errors] == [ClosedError]
    with pytest.raises(ClosedError):
        pool.try_lease("update", 1)
    assert held.tensor().tolist() == [7] * 16  # what is out keeps its memory
    held.release()


def test_a_child_has_no_pinned_memory() -> None:
    pool = pool_of()
    lease = pool.lease("load", 16)
    child = os.fork()
    if child == 0:
        code = 0
        for call in (lease.tensor, lambda: pool.lease("load", 1)):
            try:
                call()
                code = 1
            except ClosedError:
                continue
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert lease.tensor().numel() == 16


def test_protection_is_by_range_and_nests() -> None:
    pool = pool_of(protect=True)
    lease = pool.lease("load", 8 * KIB)
    assert lease.io_address != lease.address
    lease.begin_io(0, 4096, into=True)
    lease.tensor(offset=4096).fill_(3)  # the other page is free
    lease.begin_io(4096, 4096, into=False)
    assert int(lease.tensor(offset=4096).sum()) == 3 * 4096  # may be read while it is written out
    lease.end_io(4096, 4096, into=False)
    lease.end_io(0, 4096, into=True)
    lease.tensor().fill_(1)


def test_memory_that_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match="refused host memory"):
        PinnedPool({"a": (1 << 60, 1)})
