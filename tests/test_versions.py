"""The versions of parts with two slots. tests/test_delayed_machine.py has them in use."""

from __future__ import annotations

from pathlib import Path

from infinity.core.sizes import Tier
from infinity.hardware.aio import RingSettings
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Part, Store, Version

from .small_store import NVME, PAGE, ROOM, bytes_of, fill, pool_of

FRONT, BACK = Version.FRONT, Version.BACK


def two(tmp_path: Path, pool: PinnedPool, *tiers: Tier) -> Store:
    (tmp_path / "drive").mkdir(exist_ok=True)
    chunks = [{"copy": Part((2 * PAGE,), tiers)}, {"copy": Part((2 * PAGE,), tiers[:1])}]
    return Store(chunks, directories=[str(tmp_path / "drive")], pool=pool, rings=RingSettings(deadline=20.0))


def test_what_is_done_with_the_back_does_not_wait_for_the_front(tmp_path: Path) -> None:
    pool = pool_of(6)
    with two(tmp_path, pool, NVME, NVME) as store:
        a, b, c, d = (fill(pool.lease("a", ROOM), v) for v in (1, 2, 3, 4))
        store.write(0, "copy", a).wait()
        store._rings[0].hold(True)
        read = store.read(0, "copy", b)
        write = store.write(0, "copy", c, version=BACK)
        over = store.write(0, "copy", d, version=FRONT)
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
