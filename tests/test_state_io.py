"""State, segment by segment: each chunk is read once and written once, through few leases."""

from __future__ import annotations

import sys
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
            # The one that is here, and the one that is read meanwhile.
            assert engine.pool.stats()["update"].in_use <= 2 * engine.footprint.quotas["update"].buffer_nbytes
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


def test_memory_of_what_is_not_contiguous_is_one_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer, _ = wrapped(tmp_path, "fp32")
    try:
        state = optimizer.state_dict()
        for values in state["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = values[key].t().contiguous().t() if values[key].dim() == 2 else values[key]
        expected = {i: {k: v.clone() for k, v in values.items()} for i, values in state["state"].items()}
        copies: list[torch.Tensor] = []
        most = 0
        inner = torch.Tensor.reshape

        def reshape(self: torch.Tensor, *shape: Any) -> torch.Tensor:
            nonlocal most
            made = inner(self, *shape)
            if made.data_ptr() != self.data_ptr():
                copies.append(made)
            most = max(most, sum(sys.getrefcount(c) > 3 for c in copies))
            return made

        monkeypatch.setattr(torch.Tensor, "reshape", reshape)
        optimizer.load_state_dict(state)
        monkeypatch.undo()
        assert len(copies) > 20
        assert most <= 5
        again = optimizer.state_dict()["state"]
        assert all(torch.equal(v, again[i][k]) for i, values in expected.items() for k, v in values.items())
    finally:
        infinity.close(optimizer)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_of_what_is_frozen_now_is_left_out(dtype: str, tmp_path: Path) -> None:
    model, optimizer, _ = wrapped(tmp_path, dtype)
    state, values = optimizer.state_dict(), model.state_dict()
    infinity.close(optimizer)
    other = net()
    other[1].requires_grad_(False)
    config = infinity.Config(
        nvme=str(tmp_path), optimizer_state="nvme", dtype=dtype, chunk_elements=NORM_BLOCK
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


def test_load_hooks_of_the_optimizer_are_called_as_in_torch(tmp_path: Path) -> None:
    _, optimizer, _ = wrapped(tmp_path, "fp32")
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    try:
        called = []
        for each in (optimizer, plain):
            each.register_load_state_dict_pre_hook(lambda o, s: called.append("before"))
            each.register_load_state_dict_pre_hook(
                lambda o, s: {**s, "param_groups": [{**g, "lr": 0.5} for g in s["param_groups"]]}
            )
            each.register_load_state_dict_post_hook(lambda o: called.append(o.param_groups[0]["lr"]))
            each.load_state_dict(each.state_dict())
        assert called == ["before", 0.5] * 2
    finally:
        infinity.close(optimizer)
