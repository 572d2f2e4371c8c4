"""A device whose memory is not the host's, as far as a CPU can show it (staged.py): what crosses, by way of
what memory, what waits for what, and what the device itself refuses. `--device staged` runs others on it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.grads.gradient_chunks import GradientIO
from infinity.hardware import cpu_adam
from infinity.hardware.device import CudaDevice, HostDevice
from infinity.optim.chunk_io import ChunkIO

from .models import case
from .offloaded import ON_HOST, ON_NVME, assert_same, config_for, train_offloaded
from .quick import covering
from .staged import Fault, Staged, staged_devices

WIDTH = 24
ON_DEVICE = {"parameters": "device", "optimizer_state": "device", "gradients": "device"}
PLACES: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "device": ON_DEVICE,
    "state on host": {**ON_DEVICE, "optimizer_state": "host"},
    "state on device": {**ON_HOST, "optimizer_state": "device"},
    "state on device, else nvme": {**ON_NVME, "optimizer_state": "device"},
    "gradients on device": {**ON_NVME, "gradients": "device"},
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"device": 0.4, "host": 0.3, "nvme": 0.3},
        "gradients": {"device": 0.4, "host": 0.3, "nvme": 0.3},
    },
}


@covering
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_placement_never_changes_results(
    dtype: str, update: str, place: str, tmp_path: Path, staged: list[Staged]
) -> None:
    """Though the host is well ahead of the device when a step begins."""

    def ahead(*_: Any) -> None:
        lag(staged[-1], lambda: time.sleep(0.02))

    runs = []
    settings = {"dtype": dtype, "update": update, "delay_warmup_steps": 1, "max_grad_norm": 0.5}
    for where in ("nvme", place):
        folder = tmp_path / where
        folder.mkdir()
        config = config_for(folder, device_memory="64MiB", **settings, **PLACES[where])
        this = case("gpt", layers=2, width=32)
        runs.append(train_offloaded(this, config, steps=4, accumulate=2, before_step=ahead))
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
            device.note(name, self.chunk.id)
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


def test_the_next_chunks_kernel_runs_while_a_copy_is_on_its_way(
    tmp_path: Path, staged: list[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last one's copy is waited for at once."""
    said: list[tuple[str, int]] = []

    def noted(name: str) -> None:
        inner = getattr(ChunkIO, name)

        def call(self: ChunkIO, *args: Any, **options: Any) -> Any:
            said.append((name, self.chunk.id))
            return inner(self, *args, **options)

        monkeypatch.setattr(ChunkIO, name, call)

    def slowly(self: Staged, *args: Any, **options: Any) -> Any:
        self._submit("h2d", lambda: time.sleep(0.3))
        return h2d(self, *args, **options)

    h2d = Staged.h2d
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, parameters="device", optimizer_state="host", gradients="host")
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    noted("make_copy")
    noted("wait_copied")
    monkeypatch.setattr(Staged, "h2d", slowly)
    optimizer.step()
    infinity.flush(model)
    (a, b, c) = [chunk for name, chunk in said if name == "make_copy"]
    kernels, waits = "make_copy", "wait_copied"
    assert said == [(kernels, a), (kernels, b), (waits, a), (kernels, c), (waits, b), (waits, c)]
    infinity.close(optimizer)


# -- what the device refuses ----------------------------------------------------------------------


def lag(device: Staged, what: Callable[[], Any]) -> None:
    """Have the user's compute do `what` before all that it is given from now on."""
    device._submit("compute", what)


class Link:
    """A device, memory of it and host memory that is registered."""

    def __init__(self) -> None:
        self.device = Staged(torch.device("cpu"))
        self.memory = self.device.memory(4096)
        self.host = torch.zeros(4096, dtype=torch.uint8)
        self.device.register(self.host.data_ptr(), 4096)

    def storage(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.memory.storage, 0, (4096,), (1,))

    def busy(self) -> threading.Event:
        """Have the user's compute lag behind until the event is set."""
        go = threading.Event()
        lag(self.device, lambda: go.wait(60))
        return go


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.device.close()


def test_a_copy_begins_when_its_mark_is_done(link: Link) -> None:
    link.memory.fill()
    target, go = link.storage(), link.busy()
    assert bool((target == 255).all())  # what is not filled yet is not a number
    mark = link.device.mark()
    copied = link.device.h2d(target, link.host, mark)
    assert mark is not None
    assert not mark.done()
    assert not copied.done()
    assert bool((target == 255).all())
    go.set()
    link.device.wait_on_device(copied)
    assert mark.done()
    assert torch.equal(target, link.host)


def test_what_a_worker_computes_may_be_done_later(link: Link) -> None:
    made = torch.zeros(1)
    late: list[bool] = []

    def work() -> None:
        go = threading.Event()
        link.device.compute(lambda: (go.wait(60), made.add_(1))[0])
        mark = link.device.mark()
        late.append(mark is not None and not mark.done() and not made.item())
        go.set()
        assert mark is not None
        mark.wait()

    worker = threading.Thread(target=work, name="infinity-update")
    worker.start()
    worker.join(60)
    assert late == [True]
    assert made.item() == 1


def _copy_of_pageable_memory(link: Link) -> None:
    link.memory.fill()
    link.device.h2d(link.storage(), torch.zeros(4096, dtype=torch.uint8), link.device.mark())


def _copy_after_nothing(link: Link) -> None:
    link.memory.fill()
    link.device.d2h(link.host, link.storage())


def _mark_before_fill(link: Link) -> None:
    mark = link.device.mark()
    link.memory.fill()
    link.device.h2d(link.storage(), link.host, mark)


def _drop_under_a_copy(link: Link) -> None:
    link.memory.fill()
    lag(link.device, lambda: time.sleep(0.2))
    link.device.d2h(link.host, link.storage(), link.device.mark())
    link.memory.drop()


def _unregister_under_a_copy(link: Link) -> None:
    link.memory.fill()
    go = link.busy()
    link.device.h2d(link.storage(), link.host, link.device.mark())
    try:
        link.device.unregister(link.host.data_ptr(), 4096)
    finally:
        go.set()


def _let_go_under_a_copy(link: Link) -> None:
    go = link.busy()
    copied = link.device.d2h(link.host, torch.ones(4096, dtype=torch.uint8), link.device.mark(), kept=True)
    go.set()
    copied.wait()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (_copy_of_pageable_memory, "not registered"),
        (_copy_after_nothing, "after nothing"),
        (_mark_before_fill, "before the memory was given out"),
        (_drop_under_a_copy, "goes under a copy"),
        (_unregister_under_a_copy, "unregistered under a copy"),
        (_let_go_under_a_copy, "did not keep its memory"),
    ],
)
def test_what_cuda_would_not_tell_is_a_fault(wrong: Callable[[Link], None], what: str, link: Link) -> None:
    with pytest.raises(Fault, match=what):
        wrong(link)
    assert what in link.device.faults[0]


def test_a_kernel_of_the_cpu_gets_no_memory_of_the_device(tmp_path: Path) -> None:
    with contextlib.ExitStack() as devices:
        devices.enter_context(staged_devices())
        model: Any = nn.Linear(WIDTH, WIDTH)
        config = config_for(tmp_path, **ON_DEVICE)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
        state = engine_of(model).tiers.on_device[0].view(torch.float32)
        with pytest.raises(Fault, match="kernel of the CPU"):
            cpu_adam.sum_of_squares(state)
        infinity.close(optimizer)
        with pytest.raises(Fault, match="kernel of the CPU"):  # although nobody has seen it
            devices.close()


def test_all_devices_have_the_same_interface() -> None:
    for there in (HostDevice, CudaDevice):
        assert {n for n in vars(there) if not n.startswith("_")} <= {*dir(Staged), "staged"}


# -- what reading CUDA's path has found -----------------------------------------------------------


def test_a_unit_gets_its_memory_once_when_it_is_wrapped(
    tmp_path: Path, staged: list[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives it back: `set_` would let the storage grow for each of its parameters."""
    sizes: list[tuple[int, int]] = []
    resize = torch.UntypedStorage.resize_

    def counted(self: torch.UntypedStorage, nbytes: int) -> Any:
        sizes.append((self.nbytes(), nbytes))
        return resize(self, nbytes)

    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", counted)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    whole = [u.layout.gathered_nbytes for u in engine_of(model).units]
    assert sizes == [pair for nbytes in whole for pair in ((0, nbytes), (nbytes, 0))]
    infinity.close(optimizer)


@pytest.mark.parametrize("place", PLACES)
def test_inference_mode_leaves_no_inference_tensors(place: str, tmp_path: Path, staged: list[Staged]) -> None:
    """Neither of `wrap` in that mode, nor of forwards in it, on the main thread and on another one: the
    engine's threads, which are not in it, change all of that."""
    runs = []
    for mode in (False, True):
        folder = tmp_path / str(mode)
        folder.mkdir()
        this = case("gpt", layers=2, width=32)
        model: Any = this.model
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with torch.inference_mode(mode):
            model, optimizer = infinity.wrap(model, adam, config_for(folder, dtype="bf16", **PLACES[place]))

        def look(model: Any = model, this: Any = this, mode: bool = mode) -> None:
            engine_of(model).residency.reshard_all()
            with torch.inference_mode(mode), torch.no_grad():
                this.loss(model, this.batches[0])

        found = []
        for batch in this.batches[:3]:
            look()
            other = threading.Thread(target=look)
            other.start()
            other.join(60)
            loss = this.loss(model, batch)
            loss.backward()
            this.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        infinity.close(optimizer)
        runs.append(found)
    assert runs[0] == runs[1]


def test_a_unit_that_goes_unused_waits_for_its_copies(tmp_path: Path, staged: list[Staged]) -> None:
    """The host waits until they are issued, and the device's compute until they are done."""
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    residency = engine_of(model).residency
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
    residency.reshard_all()
    lag(staged[0], lambda: time.sleep(0.2))
    residency.prefetch()
    assert residency.cache.allocated
    residency.reshard_all()
    assert not residency.cache.allocated
    infinity.close(optimizer)


def test_activations_are_unpinned_when_their_copies_are_done(
    tmp_path: Path, staged: list[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.autograd.activations.SMALLEST", 1)
    this = case("gpt", layers=2, width=32, recompute="non-reentrant")
    config = config_for(tmp_path, activations="host", **ON_DEVICE)
    adam = torch.optim.AdamW(this.model.parameters())
    model, optimizer = infinity.wrap(this.model, adam, config)
    lag(staged[0], lambda: time.sleep(1.0))
    loss = this.loss(model, this.batches[0])
    assert "d2h" in [call for _, call, _ in staged[0].calls]
    infinity.close(optimizer)
    del loss


def test_activations_are_neither_dropped_nor_used_before_their_copies_are_done(
    tmp_path: Path, staged: list[Staged], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(self: Staged, *args: Any, **options: Any) -> Any:
        self._submit("h2d", lambda: time.sleep(0.05))
        return h2d(self, *args, **options)

    h2d = Staged.h2d
    monkeypatch.setattr(Staged, "h2d", slowly)
    monkeypatch.setattr("infinity.autograd.activations.SMALLEST", 1)
    found = []
    for where in ("device", "host"):
        folder = tmp_path / where
        folder.mkdir()
        this = case("gpt", layers=6, width=32, recompute="non-reentrant")
        config = config_for(folder, activations=where, **ON_DEVICE)
        model, optimizer = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters()), config)
        lag(staged[-1], lambda: time.sleep(0.3))
        this.loss(model, this.batches[0]).backward()
        found.append({n: infinity.gradient(p) for n, p in model.named_parameters()})
        infinity.close(optimizer)
    assert all(torch.equal(g, found[0][n]) for n, g in found[1].items())
