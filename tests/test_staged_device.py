"""A device whose memory is not the host's, as far as a CPU can show it: what crosses, by way of what
memory, and what waits for the user's stream. The device is the host's with leases for all that crosses."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api import engine as engine_module
from infinity.api.engine import engine_of
from infinity.grads.gradient_chunks import GradientIO
from infinity.hardware.device import Event, HostDevice

from .models import case
from .offloaded import ON_HOST, ON_NVME, assert_same, config_for, train_offloaded

WIDTH = 24
ON_DEVICE = {"parameters": "device", "optimizer_state": "device", "gradients": "device"}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "device": ON_DEVICE,
    "state on host": {**ON_DEVICE, "optimizer_state": "host"},
    "state on device": {**ON_HOST, "optimizer_state": "device"},
}


class Mark:
    """The user's stream as it stood."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class Staged(HostDevice):
    """Notes what is asked of it, by thread."""

    staged = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[tuple[str, str, Any]] = []

    def note(self, call: str, what: Any) -> None:
        self.calls.append((threading.current_thread().name, call, what))

    def mark(self) -> Event | None:
        return Mark()

    def wait_on_device(self, event: Event | None) -> None:
        self.note("wait", event)
        super().wait_on_device(event)

    def d2h(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, **options: Any) -> Event:
        self.note("d2h", (target.data_ptr(), source.data_ptr(), source.nbytes))
        return super().d2h(target, source, *after, **options)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Staged]:
    made: list[Staged] = []

    def open_device(name: str | None, recorder: Any) -> Staged:
        made.append(Staged(torch.device("cpu"), recorder))
        return made[-1]

    monkeypatch.setattr(engine_module, "open_device", open_device)
    return made


@pytest.mark.parametrize(("dtype", "update"), [("fp32", "overlap"), ("bf16", "sync")])
@pytest.mark.parametrize("place", ["device", "state on host", "state on device"])
def test_leases_never_change_results(
    dtype: str, update: str, place: str, tmp_path: Path, staged: list[Staged]
) -> None:
    runs = []
    for number, where in enumerate(("nvme", place)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = config_for(folder, dtype=dtype, update=update, device_memory="64MiB", **PLACES[where])
        this = case("gpt", layers=2, width=32)
        runs.append(train_offloaded(this, config, steps=2, accumulate=2))
    assert_same(runs[1], runs[0])
    assert len(staged) == 2


@pytest.mark.parametrize("state", ["host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_gradients_on_the_device_come_to_the_update_in_its_lease(
    state: str, update: str, tmp_path: Path, staged: list[Staged]
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, update=update, **{**ON_DEVICE, "optimizer_state": state})
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine, (device,) = engine_of(model), staged
    pool = [range(a, a + n) for a, n in engine.pool.buffers()]
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)  # zeros do not cross
        optimizer.step()
        infinity.flush(model)
        assert not [c for c in device.calls if c[1] == "d2h"]
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        infinity.flush(model)
        wanted = {
            engine.gradients.chunks.on_device(c).data_ptr()
            for u in engine.units
            for c in u.layout.trainable_chunks
        }
        crossed = [c[2] for c in device.calls if c[1] == "d2h"]
        assert {source for _, source, _ in crossed} == wanted
        assert all(any(target in leased for leased in pool) for target, _, _ in crossed)
        device.calls.clear()
        optimizer.zero_grad()
    infinity.close(optimizer)


def test_gradients_on_the_device_wait_for_the_users_stream_first(
    tmp_path: Path, staged: list[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are zeroed, widened, multiplied, written over or added to: it may still read them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, dtype="bf16", **ON_DEVICE)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    (device,) = staged

    def noted(name: str) -> None:
        inner = getattr(GradientIO, name)

        def call(self: GradientIO, *args: Any) -> Any:
            device.note(name, self._chunk.id)
            return inner(self, *args)

        monkeypatch.setattr(GradientIO, name, call)

    for name in ("buffer", "widen", "put", "add", "store"):
        noted(name)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    model[1].weight.grad.zero_()
    model(torch.ones(2, WIDTH)).square().mean().backward()
    engine_of(model).gradients.wait()
    calls = [(call, what) for thread, call, what in device.calls if thread == "infinity-gradients"]
    assert {"widen", "put", "add"} <= {call for call, _ in calls}
    visits: list[list[str]] = [[]]
    for call, what in calls:
        if call == "wait" and what is None:
            continue  # a look at a gradient, which the worker itself has made
        visits[-1].append(call)
        if call == "store":
            visits.append([])
    made = [v for v in visits if "store" in v]
    assert made
    for visit in made:
        # What comes before is a look at another gradient, which changes nothing.
        first = next(i for i, call in enumerate(visit) if call != "buffer")
        assert visit[first] == "wait"
        assert "widen" not in visit[:first]
    infinity.close(optimizer)
