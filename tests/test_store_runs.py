"""The beginning and the end of runs on a store's directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.core.errors import ConfigError, DirectoryError
from infinity.storage.store import Part, Store

from .command_line import mounted, started, wait_for_line
from .small_store import CHUNK, NVME, PAGE, ROOM, get, pool_of, put, store_of


def test_two_runs_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    pool = pool_of()
    with store_of(tmp_path, pool=pool) as store, pool.lease("a", ROOM) as lease:
        put(store, lease, 0, 5)
        with store_of(tmp_path, pool=pool) as other:
            put(other, lease, 0, 6)
        assert get(store, lease, 0, "copy") == b"\5" * 2 * PAGE


def test_a_refused_store_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pool = pool_of()
    with pytest.raises(DirectoryError, match="is missing"):
        Store([CHUNK] * 4, directories=[str(tmp_path / "a"), str(tmp_path / "b")], pool=pool)
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(ConfigError, match="no directory"):
        Store([CHUNK], directories=[], pool=pool)
    three = {"copy": Part((PAGE,), (NVME,) * 3)}
    with pytest.raises(ConfigError, match="one slot or two"):
        Store([three], directories=[str(tmp_path / "a")], pool=pool)
    Store([CHUNK] * 4, directories=[str(tmp_path / "a")], pool=pool).close()


@pytest.mark.root
def test_a_full_file_system_is_refused_at_the_start() -> None:
    pool = pool_of()
    with mounted("-t", "tmpfs", "-o", "size=256k", "none") as place:
        with pytest.raises(DirectoryError, match="not enough free space"):
            Store([CHUNK] * 10, directories=[place], pool=pool)
        with Store([CHUNK] * 6, directories=[place], pool=pool) as store, pool.lease("a", ROOM) as lease:
            put(store, lease, 5, 9)
            assert set(get(store, lease, 5, "state")) == {9}


_RUN = """
import sys
from infinity.core.sizes import Tier
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Part, Store
pool = PinnedPool({"a": (1 << 20, 4)})
spec = {"x": Part((1 << 20,), (Tier.NVME,))}
store = Store([spec] * 16, directories=[sys.argv[1]], pool=pool)
step = 0
while True:
    for chunk in range(16):
        with pool.lease("a", 1 << 20) as lease:
            lease.tensor().fill_(step % 256)
            store.write(chunk, "x", lease)
    step += 1
    if step == 3:
        print("ready", flush=True)
"""


def test_kill_then_start_again(tmp_path: Path) -> None:
    pool = pool_of()
    (tmp_path / "drive").mkdir()
    with started("-c", _RUN, str(tmp_path / "drive")) as process:
        wait_for_line(process, "ready")
    assert list((tmp_path / "drive").iterdir()) == []
    with store_of(tmp_path, chunks=50, pool=pool) as store, pool.lease("a", ROOM) as lease:
        for chunk in range(50):
            assert not any(get(store, lease, chunk, "state"))
            put(store, lease, chunk, chunk)
            assert set(get(store, lease, chunk, "state")) == {chunk}
