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

from . import inner


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
    config = inner.config(
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
    engine.states.quiesce()
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
        # Of the model once for each module: a hook between two of them may change what is read.
        assert set(counting.take().values()) == {len(model[0])}  # type: ignore[index]
        optimizer.load_state_dict(state)
        assert set(counting.take().values()) == {1}
        again = optimizer.state_dict()
        for index, entry in state["state"].items():
            assert all(torch.equal(value, again["state"][index][key]) for key, value in entry.items())
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    finally:
        infinity.close(optimizer)


def test_state_that_is_not_contiguous_is_loaded(tmp_path: Path) -> None:
    _, optimizer, _ = wrapped(tmp_path, "fp32")
    state = optimizer.state_dict()
    wanted = {i: -values["exp_avg"] for i, values in state["state"].items()}
    for i, values in state["state"].items():
        values["exp_avg"] = wanted[i].t().contiguous().t() if wanted[i].dim() == 2 else wanted[i]
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()["state"]
    assert all(torch.equal(again[i]["exp_avg"], value) for i, value in wanted.items())
    infinity.close(optimizer)


def test_state_of_what_is_frozen_now_is_left_out(tmp_path: Path) -> None:
    model, optimizer, _ = wrapped(tmp_path, "bf16")
    state, values = optimizer.state_dict(), model.state_dict()
    infinity.close(optimizer)
    other = net()
    other[1].requires_grad_(False)
    config = infinity.Config(
        nvme=str(tmp_path), optimizer_state="nvme", dtype="bf16", chunk_elements=NORM_BLOCK
    )
    other, optimizer = infinity.wrap(other, torch.optim.AdamW(other.parameters()), config)
    try:
        frozen = [p.detach().clone() for p in other[1].parameters()]
        optimizer.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(frozen, other[1].parameters(), strict=True))
        other.load_state_dict(values)
        kept = optimizer.state_dict()["state"]
        assert set(kept) < set(state["state"])
        assert all(
            torch.equal(v, state["state"][i][k]) for i, entry in kept.items() for k, v in entry.items()
        )
    finally:
        infinity.close(optimizer)
