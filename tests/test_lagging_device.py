"""A device whose memory is not the host's, as far as a CPU can show it (tests/lagging): what crosses, by way
of what memory, and what waits for what. `--device lagging` runs others on it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import WrapError
from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.device import CudaDevice, HostDevice

from .lagging.lane import lagging_lane, note_calls
from .lagging.world import Finding, NotYet
from .models import case
from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, assert_same, config_for, train_offloaded, wrap_adamw
from .quick import covering
from .small_net import build, train

pytestmark = pytest.mark.lagging

WIDTH = 24
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
def test_placement_never_changes_results(dtype: str, update: str, place: str, tmp_path: Path) -> None:
    runs = []
    settings = {"dtype": dtype, "update": update, "delay_warmup_steps": 1, "max_grad_norm": 0.5}
    for where in ("nvme", place):
        folder = tmp_path / where
        folder.mkdir()
        config = config_for(folder, device_memory="64MiB", **settings, **PLACES[where])
        this = case("gpt", layers=2, width=32)
        runs.append(train_offloaded(this, config, steps=4, accumulate=2))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("state", ["host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_gradients_on_the_device_come_to_the_update_in_its_lease(
    state: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, update=update, **{**ON_DEVICE, "optimizer_state": state})
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine = engine_of(model)
    pool = [range(begin, begin + nbytes) for begin, nbytes in engine.pool.buffers()]
    crossed: list[tuple[int, int]] = []
    d2h = CudaDevice.d2h

    def noted(self: CudaDevice, target: torch.Tensor, source: torch.Tensor, *args: Any, **more: Any) -> Any:
        crossed.append((target.data_ptr(), source.data_ptr()))
        return d2h(self, target, source, *args, **more)

    monkeypatch.setattr(CudaDevice, "d2h", noted)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.zero_grad(set_to_none=False)  # zeros do not cross
        optimizer.step()
        infinity.flush(model)
        assert not crossed
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        infinity.flush(model)
        wanted = {
            engine.gradients.chunks.on_device(c).data_ptr()
            for u in engine.units
            for c in u.layout.trainable_chunks
        }
        assert {source for _, source in crossed} == wanted
        assert all(any(target in leased for leased in pool) for target, _ in crossed)
        crossed.clear()
        optimizer.zero_grad()
    infinity.close(optimizer)


def test_an_update_waits_for_no_copy_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who uses the unit has the device wait for the last of them; a lease is lent again behind its copy."""
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = config_for(tmp_path, parameters="device", optimizer_state="host", gradients="host")
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine = engine_of(model)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    calls = note_calls(monkeypatch, CudaDevice, "h2d", "wait_on_device")
    optimizer.step()
    engine.updates.wait_all()
    copied = [engine.updates.copied(unit.index) for unit in engine.units]
    assert all(copied)
    assert [name for name, _ in calls].count("h2d") == len(copied)
    awaited: list[Any] = []
    inner = CudaDevice.wait_on_device

    def noted(self: CudaDevice, event: Any) -> None:
        awaited.append(event)
        inner(self, event)

    monkeypatch.setattr(CudaDevice, "wait_on_device", noted)
    model(torch.ones(2, WIDTH)).sum().item()
    assert {*copied} <= {*awaited}
    infinity.close(optimizer)


def test_a_kernel_of_the_cpu_gets_no_memory_of_the_device(tmp_path: Path) -> None:
    with contextlib.ExitStack() as devices:
        devices.enter_context(lagging_lane())
        model: Any = nn.Linear(WIDTH, WIDTH)
        config = config_for(tmp_path, **ON_DEVICE)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
        state = engine_of(model).tiers.on_device[0].view(torch.float32)
        with pytest.raises(Finding, match="kernel of the CPU"):
            cpu_adam.sum_of_squares(state)
        infinity.close(optimizer)
        with pytest.raises(Finding, match="kernel of the CPU"):  # although nobody has seen it
            devices.close()


def test_all_devices_have_the_same_interface() -> None:
    here, there = ({n for n in dir(kind) if not n.startswith("_")} for kind in (HostDevice, CudaDevice))
    assert here - {"pages"} == there


# -- what reading CUDA's path has found -----------------------------------------------------------


def test_a_unit_gets_its_memory_once_when_it_is_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
def test_inference_mode_leaves_no_inference_tensors(place: str, tmp_path: Path) -> None:
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
                this.loss(model, {name: value.to("lagging:0") for name, value in this.batches[0].items()})

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


@pytest.mark.parametrize("looks", [True, False])
def test_memory_that_one_thread_has_seen_to_be_free_is_anothers(looks: bool) -> None:
    """The allocator looks in its lock. Memory that it was not told of is found."""
    with lagging_lane() as here:
        beside = torch.cuda.Stream()
        block = torch.ones(1024, device="lagging:0")
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            block.add_(1.0)
        if looks:
            block.record_stream(beside)
        del block
        over: list[torch.Tensor] = []

        def other() -> None:
            beside.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):  # what it asks for comes from there
                over.append(torch.empty(4096, device="lagging:0"))

        looker = threading.Thread(target=other)
        looker.start()
        while not over:
            time.sleep(0.001)
        assert torch.zeros(1024, device="lagging:0").cpu().sum() == 0
        looker.join()
        assert bool(here.findings) == (not looks)
        here.findings.clear()


def test_others_go_on_while_one_waits_for_a_device_that_waits_for_another_rank() -> None:
    comes = threading.Event()

    def collective() -> None:
        if not comes.is_set():
            raise NotYet

    with lagging_lane() as here:
        here.put(here.current(), collective, [], [], "a collective")
        end = here.record(here.current())
        waits = threading.Thread(target=here.wait, args=(end,))
        waits.start()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.ones(4, device="lagging:0").cpu().sum() == 4
        assert waits.is_alive()
        comes.set()
        waits.join(60)
        assert not waits.is_alive()


@pytest.mark.parametrize("looks", [True, False])
def test_who_sees_that_a_thread_has_ended_comes_after_it(looks: bool) -> None:
    """Also where `join` was over before the thread. Who does not look is found."""
    memory = bytearray(4096)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with lagging_lane() as here:
        here.register(begin, len(memory))
        span = begin, begin + len(memory)
        reader = threading.Thread(target=lambda: here.host_access([span], [], "a read"))
        reader.start()
        while Path(f"/proc/self/task/{reader.native_id}").exists():
            time.sleep(0.001)
        if looks:
            assert not reader.is_alive()
        here.unregister(begin)
        assert bool(here.findings) == (not looks)
        here.findings.clear()


def test_norms_of_the_device_cost_few_launches_for_each_chunk() -> None:
    """Also where there is not the memory for that: their bits are the same."""
    chunk = torch.randn(4 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    (wanted,) = adam_reference.sums_of_squares_reference([(chunk, None)])
    with lagging_lane() as here:
        parts = [(chunk.to("lagging"), None)] * 12
        before = here.counts.copy()
        found = adam_reference.sums_of_squares_reference(parts)
        counts = here.counts - before
        assert [sums.tobytes() for sums in found] == [wanted.tobytes()] * len(parts)
        assert counts["launches"] <= 4 * len(parts)
        assert counts["copies that block"] == 1
        here.counts["allocations"], here.fails = 0, 3
        (found_with_less,) = adam_reference.sums_of_squares_reference(parts[:1])
        assert here.fails is None
        assert found_with_less.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("looks", [True, False])
def test_who_sees_that_another_thread_has_ended_a_read_comes_after_it(looks: bool, tmp_path: Path) -> None:
    """The transfer itself tells it: no latch, no lock, no end of a thread. Who does not look is found."""
    with contextlib.ExitStack() as found:
        here = found.enter_context(lagging_lane())
        model: Any = nn.Linear(WIDTH, WIDTH)
        config = config_for(tmp_path, **ON_NVME)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
        engine = engine_of(model)
        chunk = engine.units[0].layout.chunks[0]
        target = torch.empty(chunk.copy_nbytes, dtype=torch.uint8, device="lagging:0")
        lease = engine.pool.lease("load", chunk.copy_nbytes)
        read = engine.store.read(chunk.id, "copy", lease)
        over: list[bool] = []
        ends = threading.Thread(target=lambda: over.append(read.complete(None)))
        ends.start()
        while not over:
            time.sleep(0.001)
        if looks:
            read.wait()
        source = lease.tensor(torch.uint8, 0, chunk.copy_nbytes)
        lease.release(engine.device.h2d(target, source, engine.device.mark()))
        ends.join()
        infinity.close(optimizer)
        assert ["[I/O]" in finding for finding in here.findings] == [True] * (not looks)
        here.findings.clear()


def test_a_unit_that_goes_unused_waits_for_its_copies(tmp_path: Path) -> None:
    """The host waits until they are issued, and what takes its memory next until they are done."""
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    residency = engine_of(model).residency
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
    residency.reshard_all()
    residency.prefetch()
    assert residency.cache.allocated
    residency.reshard_all()
    assert not residency.cache.allocated
    infinity.close(optimizer)


def test_activations_are_unpinned_when_their_copies_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = note_calls(monkeypatch, CudaDevice, "d2h")
    monkeypatch.setattr("infinity.autograd.activations.SMALLEST", 1)
    this = case("gpt", layers=2, width=32, recompute="non-reentrant")
    config = config_for(tmp_path, activations="host", **ON_DEVICE)
    model, optimizer = wrap_adamw(this.model, config)
    loss = this.loss(model, this.batches[0])
    assert calls
    infinity.close(optimizer)
    del loss


def test_activations_are_neither_dropped_nor_used_before_their_copies_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.autograd.activations.SMALLEST", 1)
    found = []
    for where in ("device", "host"):
        folder = tmp_path / where
        folder.mkdir()
        this = case("gpt", layers=6, width=32, recompute="non-reentrant")
        config = config_for(folder, activations=where, **ON_DEVICE)
        model, optimizer = infinity.wrap(this.model, torch.optim.AdamW(this.model.parameters()), config)
        this.loss(model, this.batches[0]).backward()
        found.append({n: infinity.gradient(p) for n, p in model.named_parameters()})
        infinity.close(optimizer)
    assert all(torch.equal(g, found[0][n]) for n, g in found[1].items())


# -- pinned memory ------------------------------------------------------------


def assert_unpinned_last(calls: list[tuple[str, Any]]) -> None:
    """All of it, when no copy was under way any more."""
    ends = [name for name, _ in calls if name != "register"]
    assert ends[0] == "close"
    assert ends.count("unregister") == len(calls) - len(ends) >= 2


_PINNING = ("register", "unregister", "close")


def test_memory_is_unpinned_when_no_copy_can_read_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = note_calls(monkeypatch, CudaDevice, *_PINNING)
    config = config_for(tmp_path, optimizer_state="host", parameters="host")
    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 1)
    infinity.close(model)
    assert_unpinned_last(calls)


def test_memory_is_unpinned_in_that_order_when_wrap_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise WrapError("what comes last")

    calls = note_calls(monkeypatch, CudaDevice, *_PINNING)
    monkeypatch.setattr("infinity.api.engine.install", fails)
    with pytest.raises(WrapError, match="comes last"):
        infinity.wrap(*build(), config_for(tmp_path, optimizer_state="host", parameters="host"))
    assert_unpinned_last(calls)


def test_the_activation_region_prefers_the_node_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("infinity.api.engine.node_for", lambda *_: 1)
    monkeypatch.setattr(
        "infinity.storage.memory.prefer_node", lambda _, nbytes, node: asked.append((nbytes, node))
    )
    config = config_for(tmp_path, activations="host", activation_memory="1MiB")
    infinity.close(infinity.wrap(*build(), config)[0])
    assert (1 << 20, 1) in asked
