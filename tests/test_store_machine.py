"""The store against a plain dict as its model."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infinity.hardware.aio import RingSettings
from infinity.storage.pinned import PinnedPool
from infinity.storage.store import Part, Store

from .small_store import CHUNK, NVME, PAGE, ROOM, UnderWay


class Machine(RuleBasedStateMachine):
    """Random calls, transfers left under way, against a dict of bytes."""

    @initialize(
        directories=st.integers(1, 3),
        protect=st.booleans(),
        backend=st.sampled_from(["threads", "auto"]),
        delay_seed=st.integers(0, 1 << 30),
    )
    def open(self, directories: int, protect: bool, backend: str, delay_seed: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        names = [os.path.join(self.temporary.name, str(d)) for d in range(directories)]
        for name in names:
            os.mkdir(name)
        chunks: list[dict[str, Part]] = []
        for chunk in range(4):
            spec = {
                "copy": Part((2 * PAGE,), (NVME,)),
                "state": Part((PAGE, 2 * PAGE), (NVME,)),
                "gradient": Part((4 * PAGE,), (NVME,)),
            }
            if chunk == 3:  # a frozen one
                spec = {"copy": Part((PAGE,), (NVME,))}
            chunks.append(spec)
        self.pool = PinnedPool({"a": (ROOM, 3)}, protect=protect)
        self.store = Store(
            chunks,
            directories=names,
            pool=self.pool,
            weights=[1.0 + d for d in range(directories)],
            rings=RingSettings(backend, PAGE, 3, 20.0, delay_seed),
        )
        self.chunks = chunks
        self.model: dict[tuple[int, str], bytes] = {
            (c, p): bytes(s.nbytes) for c, spec in enumerate(chunks) for p, s in spec.items()
        }
        self.under_way = UnderWay(self.pool)
        self.turn = 0

    def content(self, nbytes: int) -> torch.Tensor:
        self.turn += 1
        return (torch.arange(nbytes, dtype=torch.int64) // 512 * 7 + self.turn * 31).to(torch.uint8)

    def send(self, chunk: int, part: str, *, nbytes: int | None = None) -> None:
        size = self.chunks[chunk][part].nbytes if nbytes is None else nbytes
        lease = self.under_way.lease()
        data = self.content(size)
        lease.tensor()[:size].copy_(data)
        transfer = self.store.write(chunk, part, lease, nbytes=nbytes)
        self.model[chunk, part] = bytes(data.numpy())
        if self.turn % 3 == 0:  # let go at once: the store holds it
            lease.release()
            lease = self.under_way.lease()
        self.under_way.add(transfer, lease)

    @rule(chunk=st.integers(0, 2), order=st.booleans())
    def write_chunk(self, chunk: int, order: bool) -> None:
        for part in ("copy", "state") if order else ("state", "copy"):
            self.send(chunk, part)

    @rule(chunk=st.integers(0, 2), nbytes=st.sampled_from([0, 1, PAGE - 1, PAGE, 3 * PAGE + 5, 4 * PAGE]))
    def write_gradient(self, chunk: int, nbytes: int) -> None:
        self.send(chunk, "gradient", nbytes=nbytes)

    @rule()
    def write_frozen(self) -> None:
        self.send(3, "copy")

    @rule(key=st.sampled_from([(c, p) for c in range(3) for p in CHUNK] + [(3, "copy")]))
    def read(self, key: tuple[int, str]) -> None:
        lease = self.under_way.lease()
        expected = self.model[key]
        transfer = self.store.read(*key, lease)
        assert transfer.nbytes == len(expected)
        self.under_way.add(transfer, lease, expected)

    @rule(index=st.integers(0, 63))
    def wait(self, index: int) -> None:
        if self.under_way:  # how many are depends on when leases come home
            self.under_way.end(index % len(self.under_way))

    @rule()
    def flush(self) -> None:
        self.store.wait_written()

    @invariant()
    def no_lease_is_lost(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.stats()["a"].quarantined == 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.under_way.end_all()
            for chunk, part in self.model:
                self.read((chunk, part))
            self.under_way.end_all()
        finally:
            self.store.close()
            stats = self.pool.stats()["a"]
            self.pool.close()
            self.temporary.cleanup()
        assert stats.in_use == 0


@pytest.mark.integration
def test_the_store_is_a_dict() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None)
    )
