"""The update behind the next forward is safe whatever the user does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import StorageError
from infinity.optim import chunk_io, update
from infinity.optim.chunk_io import ChunkIO
from infinity.params.param import PendingParameter

from .command_line import python
from .models import case
from .offloaded import assert_same, config_for, train_offloaded, wrap_adamw
from .quick import covering, quick
from .reference import two_groups

RESIDENT = {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"}


class Gate:
    """Holds the kernel of every chunk until it is opened; counts the chunks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.computed = 0
        inner = update._compute

        def compute(*args: Any, **mode: Any) -> None:
            assert self._open.wait(60)
            inner(*args, **mode)
            self.computed += 1

        monkeypatch.setattr(update, "_compute", compute)

    def open(self) -> None:
        self._open.set()

    def open_soon(self, seconds: float = 0.2) -> None:
        threading.Timer(seconds, self._open.set).start()


def wrapped(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    this = case("gpt")
    config = config_for(folder, **settings)
    model, optimizer = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters(), lr=1e-2), config)
    return this, model, optimizer


def backward(this: Any, step: int = 0) -> None:
    this.loss(this.model, this.batches[step]).backward()


@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
def test_step_returns_before_the_update_and_the_forward_waits_for_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, **settings)
    gate = Gate(monkeypatch)
    backward(this)
    optimizer.step()
    optimizer.zero_grad()
    assert gate.computed == 0
    assert engine_of(model).updates.busy()
    gate.open_soon()
    loss = this.loss(model, this.batches[1]).item()
    monkeypatch.undo()
    infinity.close(optimizer)

    (tmp_path / "sync").mkdir()
    that, sync_model, sync_optimizer = wrapped(tmp_path / "sync", update="sync", **settings)
    backward(that)
    sync_optimizer.step()
    assert that.loss(sync_model, that.batches[1]).item() == loss
    infinity.close(sync_optimizer)


@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
def test_a_delayed_update_runs_beside_forward_and_backward(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, update="delayed", delay_warmup_steps=1, **settings)
    for step in range(3):
        backward(this, step)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.updater.wait()
    backward(this, 3)
    gate = Gate(monkeypatch)
    optimizer.step()
    optimizer.zero_grad()
    backward(this, 4)  # all of it, gradients included
    engine.gradients.wait()
    assert gate.computed == 0
    assert engine.updates.busy()
    gate.open_soon()
    optimizer.step()
    assert gate.computed >= len(engine.updates._chunks)
    infinity.close(optimizer)


def test_a_look_at_a_resident_parameter_waits_for_its_unit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, **RESIDENT)
    before = model.head.weight.detach().clone()
    gate = Gate(monkeypatch)
    backward(this)
    optimizer.step()
    weight = model.head.weight
    assert isinstance(weight, PendingParameter)
    assert weight.shape == before.shape  # metadata waits for nothing
    assert weight.requires_grad
    assert gate.computed == 0
    gate.open_soon()
    assert not torch.equal(weight, before)
    assert not isinstance(weight, PendingParameter)
    infinity.close(optimizer)


@pytest.mark.parametrize("place", quick(["nvme", "host"], ["nvme"]))
def test_a_load_behind_an_update_does_not_keep_others_back(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model[1].requires_grad_(False)
    places = {"parameters": place, "optimizer_state": place, "gradients": place}
    config = config_for(tmp_path, units=["Linear"], prefetch_memory=0, **places)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
    engine = engine_of(model)
    try:
        x = torch.ones(2, 16)
        model(x).sum().backward()
        engine.residency.reshard_all()
        optimizer.step()
        first, second, last = (engine.units[engine.params[layer.weight].unit] for layer in model)
        for unit in (first, second, last):
            if unit.is_away:  # else it is loaded ahead
                engine.residency.cache.load(unit)
        assert second.last_load.issued.wait(30)
        assert not first.last_load.issued.is_open
        assert not last.last_load.issued.is_open
        gate.open()
        model(x).sum().backward()
        optimizer.step()
    finally:
        gate.open()
        infinity.close(optimizer)


def test_everything_a_user_may_do_after_step_means_what_it_means_in_torch(tmp_path: Path) -> None:
    """The scalars are those of the call; gradients may be dropped or made at once."""
    runs = []
    for mode in ("sync", "overlap"):
        folder = tmp_path / mode
        folder.mkdir()
        this, model, optimizer = wrapped(folder, update=mode, max_grad_norm=0.5)
        losses = []
        for step in range(6):
            for _ in range(1 + step % 3):  # accumulation that changes
                loss = this.loss(model, this.batches[step])
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
            if step == 2:
                backward(this, 5)  # onto the gradients that the update still reads
                optimizer.step()
            if step == 3:
                model.eval()
                with torch.no_grad():
                    losses.append(this.loss(model, this.batches[0]).item())
                model.train()
            if step == 4:
                losses.append(float(sum(v.double().sum() for v in model.state_dict().values())))
            optimizer.zero_grad(set_to_none=step != 1)
        state = optimizer.state_dict()["state"]
        runs.append((losses, model.state_dict(), state))
        infinity.close(optimizer)
    (a, params_a, state_a), (b, params_b, state_b) = runs
    assert a == b
    for name, value in params_a.items():
        assert torch.equal(value, params_b[name]), name
    for index, values in state_a.items():
        for key, value in values.items():
            assert torch.equal(value, state_b[index][key]), (index, key)


def test_state_is_read_ahead_during_the_backward(tmp_path: Path) -> None:
    this, model, optimizer = wrapped(tmp_path)
    engine = engine_of(model)
    backward(this)
    optimizer.step()
    optimizer.zero_grad()
    engine.updater.wait()  # what is not written yet is not read ahead
    backward(this, 1)
    assert engine.updater.ahead > 0
    infinity.gradient(model.head.weight)
    optimizer.step()
    assert engine.updater.ahead == 0
    backward(this, 2)
    with infinity.gathered(model.head.weight, write=True), torch.no_grad():
        model.head.weight.mul_(0.5)  # state changes: what was read ahead is given up
    assert engine.updater.ahead == 0
    infinity.close(optimizer)


def test_the_work_on_a_chunk_does_not_grow_with_what_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads under way are not looked through once for each chunk."""
    looks: list[int] = []

    class Watched(ChunkIO):
        """Counts who asks which chunk it is."""

        @property
        def chunk(self) -> Any:
            looks.append(self.__dict__["chunk"].id)
            return self.__dict__["chunk"]

        @chunk.setter
        def chunk(self, chunk: Any) -> None:
            self.__dict__["chunk"] = chunk

    monkeypatch.setattr(chunk_io, "ChunkIO", Watched)
    counts = []
    for depth in (2, 16):
        model: Any = nn.Linear(1024, 1536)
        settings = {"update_depth": depth, "read_ahead_memory": 0, "device_memory": "64MiB"}
        model, adam = wrap_adamw(model, config_for(tmp_path, **settings))
        try:
            model(torch.ones(1, 1024)).sum().backward()
            looks.clear()
            adam.step()
            infinity.flush(adam)
            chunks = engine_of(model).units[0].layout.trainable_chunks
            assert len(chunks) > 16
            counts.append(len(looks) / len(chunks))
        finally:
            infinity.close(adam)
    assert counts[1] <= counts[0] + 2, counts


def test_a_failing_update_surfaces_at_the_next_call_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, model, optimizer = wrapped(tmp_path, **RESIDENT)

    def fail(*args: Any) -> None:
        raise StorageError("the drive is gone", cure="another drive")

    monkeypatch.setattr(update, "_compute", fail)
    backward(this)
    optimizer.step()
    for use in (
        lambda: backward(this, 1),
        optimizer.step,
        model.state_dict,
        optimizer.state_dict,
        lambda: model.head.weight.sum(),
    ):
        with pytest.raises(StorageError, match="the drive is gone"):
            use()
    monkeypatch.undo()
    infinity.close(optimizer)


@pytest.mark.parametrize("settings", [{}, {"update": "delayed", "delay_warmup_steps": 0}, RESIDENT])
def test_nothing_grows_in_the_steady_state(tmp_path: Path, settings: dict[str, Any]) -> None:
    this, model, optimizer = wrapped(tmp_path, **settings)
    engine = engine_of(model)

    def step(number: int) -> tuple[int, int, int]:
        backward(this, number % 8)
        optimizer.step()
        optimizer.zero_grad()
        in_use = sum(q.total for q in engine.pool.stats().values())
        files = len(list(Path("/proc/self/fd").iterdir()))
        return in_use, files, threading.active_count()

    step(0)
    first = step(1)
    assert all(step(i) == first for i in range(2, 8))
    infinity.close(optimizer)
    assert all(q.in_use == 0 for q in engine.pool.stats().values())


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("how", quick(["end", "raise"], ["raise"]))
def test_the_interpreter_ends_with_an_update_under_way(how: str, tmp_path: Path) -> None:
    script = """
import sys, torch, infinity
from tests.models import case
from tests.offloaded import config_for
from pathlib import Path
this = case("gpt")
model, optimizer = infinity.wrap(
    this.model, torch.optim.AdamW(this.model.parameters()), config_for(Path(sys.argv[1]))
)
this.loss(model, this.batches[0]).backward()
optimizer.step()
if sys.argv[2] == "raise":
    raise KeyError("mine")
"""
    done = python("-c", script, str(tmp_path), how, timeout=60)
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    assert "Exception ignored" not in done.stderr


@covering
@pytest.mark.parametrize("settings", [RESIDENT, {}], ids=["resident", "nvme"])
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(s, marks=pytest.mark.nightly) for s in range(2, 50))]
)
def test_random_delays_change_nothing(
    seed: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def train(folder: Path, mode: str) -> Any:
        config = config_for(
            folder,
            device_memory="2MiB",
            host_memory="24MiB",
            max_grad_norm=0.5,
            update=mode,
            delay_warmup_steps=1,
            **settings,
        )
        return train_offloaded(case("gpt"), config, steps=4, accumulate=1 + seed % 2, groups=two_groups)

    wanted, late = train(folders[0], "sync"), train(folders[0], "delayed")
    monkeypatch.setenv("INFINITY_DELAY_SEED", str(seed))
    assert_same(train(folders[1], "overlap"), wanted)
    assert_same(train(folders[1], "delayed"), late)


class Stack(nn.Module):
    """Linear layers of which a forward may leave some out or stop early."""

    def __init__(self, layers: int = 10, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


_ALL = tuple(range(10))
_ORDERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "as recorded": (_ALL, _ALL, _ALL),
    "early exit": (_ALL, _ALL[:5], _ALL, _ALL[:7], _ALL),
    "skipped": (_ALL, _ALL[::2], _ALL, (0, 1, 2, 7, 8, 9)),
    "experts": ((0, 1, 2, 9), (0, 3, 4, 9), (0, 5, 6, 9), (0, 1, 2, 9), (0, 3, 4, 9), (0, 5, 6, 9)),
    "shared": ((0, 1, 2, 1, 2, 1, 2, 3),) * 3,
    "reversed": (_ALL, _ALL[::-1], _ALL, _ALL[::-1]),
}


@pytest.mark.parametrize("name", _ORDERS)
def test_a_changed_order_costs_the_loads_that_it_changes_and_no_more(
    tmp_path: Path, name: str, pytestconfig: pytest.Config
) -> None:
    """Mixture of experts, early exit, skipped and shared layers: what was seen before is prefetched."""
    orders = _ORDERS[name]
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    # Room for five of ten, beside the gradient that autograd makes on a device of its own.
    room = "448KiB" if pytestconfig.getoption("--device") == "cpu" else "512KiB"
    config = config_for(tmp_path, device_memory=room)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=False)
    residency = engine_of(model).residency
    x = torch.randn(4, 128)
    try:
        missed = []
        for order in (*orders, *orders):  # the second time, every order is known
            before = residency.missed
            for net, opt in ((model, optimizer), (plain, adam)):
                net(x, order).square().mean().backward()
                opt.step()
                opt.zero_grad()
            missed.append(residency.missed - before)
            with torch.no_grad():
                assert torch.allclose(model(x, order), plain(x, order), rtol=1e-5, atol=1e-6)
        turns = len(orders)
        # Some where the order departs from the last one, while loads begun in vain still hold room.
        assert sum(missed[turns:]) <= sum(2 * len(o) for o in orders) // 3, missed
    finally:
        infinity.close(optimizer)


def test_several_forwards_before_a_backward_and_generation_are_prefetched(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    config = config_for(tmp_path, device_memory="448KiB")
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    residency = engine_of(model).residency
    x = torch.randn(4, 128)
    try:
        for turn in range(4):
            before = residency.missed
            (model(x, _ALL).mean() + model(2 * x, _ALL).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(5):
                    model(x, _ALL)
            if turn > 1:
                assert residency.missed - before <= 3
    finally:
        infinity.close(optimizer)
