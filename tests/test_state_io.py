"""State, segment by segment: each chunk is read once and written once, through few leases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.core.sizes import NORM_BLOCK
from infinity.storage.store import Store


def net() -> nn.Sequential:
    """Blocks of many small parameters: a chunk holds several, and a large one lies in several chunks."""
    torch.manual_seed(3)
    small = [nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)), nn.LayerNorm(24)) for _ in range(3)]
    return nn.Sequential(*small, nn.Linear(24, 6000))


class Counting:
    """Transfers of a store by kind and part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[str, int, str]] = Counter()
        for kind in ("read", "write"):
            inner = getattr(Store, kind)

            def call(
                store: Store, chunk: int, part: str, *args: Any, _: Any = (kind, inner), **more: Any
            ) -> Any:
                self.counts[_[0], chunk, part] += 1
                return _[1](store, chunk, part, *args, **more)

            monkeypatch.setattr(Store, kind, call)

    def take(self) -> dict[tuple[str, str], int]:
        """Return the most transfers of one chunk, by kind and part, since the last call."""
        most: dict[tuple[str, str], int] = {}
        for (kind, _, part), count in self.counts.items():
            most[kind, part] = max(most.get((kind, part), 0), count)
        self.counts.clear()
        return most


def wrapped(path: Path, dtype: str) -> tuple[nn.Module, Any, Engine]:
    config = infinity.Config(
        nvme=str(path), parameters="nvme", optimizer_state="nvme", gradients="nvme", dtype=dtype,
        host_memory="96MiB", chunk_elements=NORM_BLOCK, update="sync", read_ahead_memory=0,
    )  # fmt: skip
    model, optimizer = infinity.wrap(m := net(), torch.optim.AdamW(m.parameters()), config)
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(3, 24)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.quiesce()
    engine.store.wait_written()
    return model, optimizer, engine


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_state_dict_reads_each_chunk_once(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = wrapped(tmp_path, dtype)
    try:
        engine.residency.reshard_all({u.index for u in engine.units})
        counting = Counting(monkeypatch)
        state = optimizer.state_dict()
        assert counting.take() == {("read", "state"): 1} | ({("read", "copy"): 1} if dtype == "fp32" else {})
        values = model.state_dict()
        assert set(counting.take().values()) == {1}
        optimizer.load_state_dict(state)
        assert set(counting.take().values()) == {1}
        again = optimizer.state_dict()
        for index, entry in state["state"].items():
            assert all(torch.equal(value, again["state"][index][key]) for key, value in entry.items())
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    finally:
        infinity.close(optimizer)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_segments_cover_every_element_once(dtype: str, tmp_path: Path) -> None:
    _, optimizer, engine = wrapped(tmp_path, dtype)
    try:
        params = list(engine.params.values())
        seen = {s: torch.zeros(s.spec.numel) for s in params}
        kinds = ("copy", "master", "exp_avg", "exp_avg_sq")
        order = []
        for sharded, segment, tensors in engine.states.segments(kinds, reversed(params)):
            seen[sharded][segment.offset : segment.offset + segment.numel] += 1
            order.append((sharded.unit, sharded.index, segment.offset))
            assert all(t.numel() == segment.numel for t in tensors.values())
            assert set(tensors) == set(kinds) - ({"master"} if dtype == "fp32" else set())
            assert engine.pool.stats()["update"].in_use == engine.footprint.quotas["update"].buffer_nbytes
        assert all((count == 1).all() for count in seen.values())
        assert [unit for unit, *_ in order] == sorted(unit for unit, *_ in order)
        assert engine.pool.stats()["update"].in_use == 0
    finally:
        infinity.close(optimizer)


def test_what_ends_early_gives_its_lease_back(tmp_path: Path) -> None:
    _, optimizer, engine = wrapped(tmp_path, "bf16")
    try:
        for _ in engine.states.segments(("exp_avg",), engine.params.values()):
            break
        assert engine.pool.stats()["update"].in_use == 0
    finally:
        infinity.close(optimizer)
