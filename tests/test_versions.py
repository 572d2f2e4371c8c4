"""The versions of parts with two slots: by name against a model, while transfers are under way."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infinity.core.errors import CorruptionError, StorageError
from infinity.core.sizes import Tier
from infinity.hardware.aio import RingSettings
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Part, Slot, Store, Version

from .small_store import HOST, NVME, PAGE, ROOM, UnderWay, arena_file, bytes_of, fill, pool_of

DEVICE = Tier.DEVICE
FRONT, BACK, NEWEST = Version.FRONT, Version.BACK, Version.NEWEST
SECTIONS = (PAGE, 2 * PAGE)
NBYTES = sum(SECTIONS)
CHUNKS = 3
KEYS = [(chunk, part) for chunk in range(CHUNKS) for part in ("copy", "gradient")]

keys = st.sampled_from(KEYS)
versions = st.sampled_from(Version)


class Cell:
    """What one slot holds."""

    def __init__(self) -> None:
        self.content = bytes(NBYTES)
        self.generation = -1


class Model:
    """The two versions of one part."""

    def __init__(self) -> None:
        self.front, self.back = Cell(), Cell()

    @property
    def newer(self) -> bool:
        return self.back.generation > self.front.generation

    def of(self, version: Version) -> Cell:
        return self.back if version is BACK or (version is NEWEST and self.newer) else self.front

    def flip(self) -> None:
        self.front, self.back = self.back, self.front


class Machine(RuleBasedStateMachine):
    """Random writes, flips and reads by version and by slot, transfers left under way, of parts on the host,
    on NVMe, on both, and with the first slot on the device, whose bytes are moved here."""

    @initialize(
        tiers=st.lists(
            st.sampled_from([(NVME, NVME), (NVME, NVME), (HOST, HOST), (HOST, NVME), (DEVICE, HOST)]),
            min_size=len(KEYS),
            max_size=len(KEYS),
        ),
        delay_seed=st.integers(0, 1 << 30),
    )
    def open(self, tiers: list[tuple[Tier, Tier]], delay_seed: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("INFINITY_DELAY_SEED", str(delay_seed))
        self.tiers = dict(zip(KEYS, tiers, strict=True))
        chunks: list[dict[str, Part]] = [{} for _ in range(CHUNKS)]
        for (chunk, part), of in self.tiers.items():
            chunks[chunk][part] = Part(SECTIONS, of)
        self.pool = PinnedPool({"a": (ROOM, 3)})
        self.store = Store(
            chunks,
            directories=[self.temporary.name],
            pool=self.pool,
            rings=RingSettings(block_bytes=PAGE, queue_depth=3, deadline=20.0),
        )
        self.device = {key: bytes(NBYTES) for key, of in self.tiers.items() if DEVICE in of}
        self.model = {key: Model() for key in KEYS}
        self.held: list[tuple[tuple[int, str], Slot, Cell]] = []
        self.under_way = UnderWay(self.pool)
        self.turn = 0

    def content(self, nbytes: int) -> bytes:
        self.turn += 1
        return bytes(
            (torch.arange(nbytes, dtype=torch.int64) // 512 * 7 + self.turn * 31).to(torch.uint8).numpy()
        )

    def put(self, key: tuple[int, str], version: Version | Slot, cell: Cell, begin: int, end: int) -> None:
        """Write sections `begin` to `end` of what is in `cell`."""
        at, nbytes = sum(SECTIONS[:begin]), sum(SECTIONS[begin:end])
        data = self.content(nbytes)
        cell.content = cell.content[:at] + data + cell.content[at + nbytes :]
        if self.store.tier(*key, version) is DEVICE:
            self.device[key] = cell.content
            return
        lease = self.under_way.lease()
        lease.tensor()[:nbytes].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        transfer = self.store.write(*key, lease, version=version, sections=range(begin, end))
        self.under_way.add(transfer, lease)

    def look(self, key: tuple[int, str], version: Version | Slot, cell: Cell) -> None:
        tier = self.store.tier(*key, version)
        if tier is DEVICE:
            assert self.device[key] == cell.content
            return
        if tier is HOST:
            assert bytes(self.store.view(*key, version=version).numpy()) == cell.content
        lease = self.under_way.lease()
        self.under_way.add(self.store.read(*key, lease, version=version), lease, cell.content)

    @rule(key=keys, version=versions, sections=st.sampled_from([(0, 1), (1, 2), (0, 2)]))
    def write(self, key: tuple[int, str], version: Version, sections: tuple[int, int]) -> None:
        self.put(key, version, self.model[key].of(version), *sections)

    @rule(key=keys, version=versions)
    def update(self, key: tuple[int, str], version: Version) -> None:
        cell = self.model[key].of(version)
        self.put(key, version, cell, 0, 2)
        self.store.versions.made(*key, version, self.turn)
        cell.generation = self.turn

    @rule(key=keys, version=versions)
    def read(self, key: tuple[int, str], version: Version) -> None:
        self.look(key, version, self.model[key].of(version))

    @rule(key=keys, version=versions)
    def hold(self, key: tuple[int, str], version: Version) -> None:
        self.held.append((key, self.store.versions.slot(*key, version), self.model[key].of(version)))

    @rule(index=st.integers(0, 63), write=st.booleans())
    def use_held(self, index: int, write: bool) -> None:
        if self.held:
            key, slot, cell = self.held[index % len(self.held)]
            if write:
                self.put(key, slot, cell, 0, 2)
            else:
                self.look(key, slot, cell)

    @rule(key=keys)
    def flip(self, key: tuple[int, str]) -> None:
        self.store.versions.flip(*key)
        self.model[key].flip()

    @rule(key=st.sampled_from(KEYS))
    def copy_to_the_front(self, key: tuple[int, str]) -> None:
        if key not in self.device:
            return
        model = self.model[key]
        if self.store.tier(*key) is DEVICE:
            self.device[key] = bytes(self.store.view(*key, version=BACK).numpy())
        else:
            self._to_host(key, FRONT, self.device[key])
        model.front.content, model.front.generation = model.back.content, model.back.generation
        self.store.versions.copied(*key)

    @rule(key=st.sampled_from(KEYS))
    def exchange(self, key: tuple[int, str]) -> None:
        if key not in self.device:
            return
        on_host = BACK if self.store.tier(*key) is DEVICE else FRONT
        here = bytes(self.store.view(*key, version=on_host).numpy())
        self._to_host(key, on_host, self.device[key])
        self.device[key] = here
        self.store.versions.exchanged(*key)
        # Who holds a slot has what is in it now; each version is the same as before.
        model = self.model[key]
        front, back = model.front, model.back
        front.content, back.content = back.content, front.content
        front.generation, back.generation = back.generation, front.generation
        model.flip()

    def _to_host(self, key: tuple[int, str], version: Version, content: bytes) -> None:
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.store.view(*key, version=version).copy_(flat)

    @rule(index=st.integers(0, 63))
    def wait(self, index: int) -> None:
        if self.under_way:
            self.under_way.end(index % len(self.under_way))

    @invariant()
    def what_is_newer_is_known(self) -> None:
        if not hasattr(self, "model"):
            return
        known = self.store.versions
        for key, model in self.model.items():
            assert known.is_newer(*key) == model.newer
            front, back, newest = (known.slot(*key, v) for v in (FRONT, BACK, NEWEST))
            assert front != back
            assert newest == (back if model.newer else front)
        for part in ("copy", "gradient"):
            assert known.any_newer(part) == any(m.newer for (_, p), m in self.model.items() if p == part)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for key, model in self.model.items():
                for version in Version:
                    self.look(key, version, model.of(version))
            self.under_way.end_all()
        finally:
            self.store.close()
            stats = self.pool.stats()["a"]
            self.pool.close()
            self.temporary.cleanup()
            self.patch.undo()
        assert (stats.in_use, stats.quarantined) == (0, 0)


def test_versions_are_what_a_model_says() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )


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


def test_a_slot_stays_right_when_the_slots_flip(tmp_path: Path) -> None:
    pool = pool_of()
    with two(tmp_path, pool, HOST, HOST) as store, pool.lease("a", ROOM) as lease:
        store.write(0, "copy", fill(lease, 1))
        front = store.versions.slot(0, "copy", FRONT)
        store.versions.flip(0, "copy")
        store.write(0, "copy", fill(lease, 2))
        assert store.versions.slot(0, "copy", BACK) == front
        assert set(store.view(0, "copy", version=front).tolist()) == {1}
        assert set(store.view(0, "copy").tolist()) == {2}


@pytest.mark.parametrize("version", [FRONT, BACK])
def test_each_slot_has_its_own_checksums_and_length(tmp_path: Path, version: Version) -> None:
    pool = pool_of()
    with two(tmp_path, pool, NVME, NVME) as store, pool.lease("a", ROOM) as lease:
        store.write(0, "copy", fill(lease, 1), nbytes=PAGE + 1, version=FRONT).wait()
        store.write(0, "copy", fill(lease, 2), version=BACK).wait()
        for flipped in (False, True):
            found = []
            for which in (BACK, FRONT) if flipped else (FRONT, BACK):
                transfer = store.read(0, "copy", lease, version=which)
                transfer.wait()
                found.append((transfer.nbytes, set(lease.tensor()[: transfer.nbytes].tolist())))
            assert found == [(PAGE + 1, {1}), (2 * PAGE, {2})]
            store.versions.flip(0, "copy")
        slot = store.versions.slot(0, "copy", version)
        with open(arena_file(store), "r+b") as file:
            file.seek(store.layout.extent(0, "copy", slot).offset)
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        store.read(0, "copy", lease, version=BACK if version is FRONT else FRONT).wait()
        with pytest.raises(CorruptionError, match="section 0 of part 'copy' of chunk 0"):
            store.read(0, "copy", lease, version=version).wait()


def test_where_there_is_one_slot_there_is_no_back(tmp_path: Path) -> None:
    pool = pool_of()
    with two(tmp_path, pool, NVME, NVME) as store, pool.lease("a", ROOM) as lease:
        known = store.versions
        assert len(known.slots(1, "copy")) == 1
        assert known.slot(1, "copy", NEWEST) == known.slot(1, "copy", FRONT) == known.slots(1, "copy")[0]
        for call in (known.flip, known.copied, known.exchanged):
            with pytest.raises(ValueError, match="'copy' of chunk 1 has one slot"):
                call(1, "copy")
        for transfer in (store.read, store.write):
            with pytest.raises(ValueError, match="has one slot"):
                transfer(1, "copy", lease, version=BACK)
        known.made(1, "copy", FRONT, 7)
        assert not known.any_newer("copy")
        assert known.has_two("copy")
        assert not known.has_two("state")


def test_the_store_keeps_no_bytes_of_the_device(tmp_path: Path) -> None:
    pool = pool_of()
    with two(tmp_path, pool, DEVICE, HOST) as store, pool.lease("a", ROOM) as lease:
        assert store.layout.host_nbytes == 2 * PAGE
        assert store.layout.arena_nbytes == [0]
        assert (store.tier(0, "copy"), store.tier(0, "copy", BACK)) == (DEVICE, HOST)
        for transfer in (store.read, store.write):
            with pytest.raises(StorageError, match="whose bytes the store does not have"):
                transfer(0, "copy", lease)
        with pytest.raises(StorageError, match="has no memory"):
            store.view(0, "copy")
        store.write(0, "copy", fill(lease, 3), version=BACK)
        store.versions.made(0, "copy", BACK, 1)
        assert set(store.view(0, "copy", version=NEWEST).tolist()) == {3}
        store.versions.exchanged(0, "copy")
        assert store.tier(0, "copy", NEWEST) is DEVICE
        store.versions.exchanged(0, "copy")
        store.versions.copied(0, "copy")
        assert store.tier(0, "copy", NEWEST) is DEVICE
        assert not store.versions.is_newer(0, "copy")
