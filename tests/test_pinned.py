"""The pinned pool: leases, quotas, handles, quarantine."""

from __future__ import annotations

import threading
import time

import pytest

from infinity.core.errors import BudgetError, ClosedError, DeadlineError, StorageError
from infinity.hardware.streams import Task
from infinity.storage.pinned import Lease, PinnedPool

KIB = 1024


def pool_of(buffers: int = 2, nbytes: int = 8 * KIB, *, protect: bool = False) -> PinnedPool:
    return PinnedPool({"load": (nbytes, buffers), "update": (nbytes * 2, 1)}, protect=protect)


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


def test_memory_that_the_system_refuses_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match="refused host memory"):
        PinnedPool({"a": (1 << 60, 1)})
