"""Gradients in flat buffers: what crosses and how often, what arrives beside what is there, with the least
leases, and how much of the device they take."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.api import engine as engine_module
from infinity.api.engine import engine_of
from infinity.core.errors import CorruptionError
from infinity.core.sizes import Tier
from infinity.grads.buffer import Arrival, UnitBuffer
from infinity.grads.gradient_chunks import ChunkGradients
from infinity.hardware import cpu_adam
from infinity.hardware.device import Event, HostDevice
from infinity.planning.footprint import LEAST_BUFFERS
from infinity.planning.partition import ParamSpec, UnitLayout, partition

from .offloaded import config_for

SIZES = {"large": (300, 300), "odd": (7, 33), "bias": (301,), "small": (5,)}
PLACES = ["device", "host", "nvme"]
places = pytest.mark.parametrize("place", PLACES)
dtypes = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


class Watched(HostDevice):
    """A device with memory of its own, as far as a CPU can be one. Notes chunk and bytes of each copy."""

    staged = True
    copies: list[tuple[int, int]]

    def d2h(self, target: torch.Tensor, source: torch.Tensor, *after: Event | None, **options: Any) -> Event:
        self.copies.append((options["chunk"], source.nbytes))
        return super().d2h(target, source, *after, **options)


@pytest.fixture(params=[False, True], ids=["host's", "its own"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine's device, as the only element once it is open: the CPU, or one with memory of its own."""
    made: list[Any] = []

    def open_device(name: str | None, recorder: Any) -> HostDevice:
        kind = Watched if request.param else HostDevice
        made[:] = [kind(torch.device("cpu"), recorder)]
        made[0].copies = []
        return made[0]

    monkeypatch.setattr(engine_module, "open_device", open_device)
    return made


class Parts(nn.Module):
    """One unit of a few parameters, of which one chunk has several and one has several chunks."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parts() for _ in range(layers))

    def forward(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """The gradient of a parameter is what `weights` has for its name."""
        total = torch.zeros(())
        for name, param in self.named_parameters():
            if name in weights:
                total = total + (param * weights[name].to(param.dtype)).sum().float()
        return total


def wrapped(
    folder: Path, place: str, dtype: str = "bf16", layers: int = 2, **settings: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = Net(layers)
    where = {"parameters": "device", "optimizer_state": place, "gradients": place}
    config = config_for(folder, dtype=dtype, device_memory="32MiB", **{**where, **settings})
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)


def needed(folder: Path, place: str, dtype: str = "bf16") -> int:
    """The least host memory that such a model takes, in bytes."""
    model, optimizer = wrapped(folder, place, dtype)
    engine = engine_of(model)
    quotas = engine.footprint.quotas
    more = sum(q.buffer_nbytes * (q.buffers - LEAST_BUFFERS[n]) for n, q in quotas.items())
    infinity.close(optimizer)
    return engine.footprint.total(Tier.HOST) - more


def draw(model: nn.Module, seed: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    generator, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
    return {
        n: torch.randn(p.shape, generator=generator).to(p.dtype)
        for n, p in model.named_parameters()
        if chosen.random() < share
    }


# -- what crosses -------------------------------------------------------------------------------------------


@places
@dtypes
def test_a_chunk_crosses_in_one_copy(place: str, dtype: str, tmp_path: Path, device: list[Any]) -> None:
    """Whatever the number of its parameters, new, replaced, added or some of them absent; in the compute
    dtype; and nobody copies where device memory is host memory, or where the gradient stays on the device."""
    model, optimizer = wrapped(tmp_path, place, dtype)
    layouts = [u.layout for u in engine_of(model).units]
    for number, share in enumerate((1.0, 1.0, 0.5, 1.0)):  # new; added; some; what is there is replaced
        weights = draw(model, number, share)
        if number == 3:
            optimizer.zero_grad()
        device[0].copies.clear()
        model(weights).backward()
        engine_of(model).gradients.wait()
        names = {
            (s.unit, s.index)
            for n, p in model.named_parameters()
            if n in weights
            for s in [sharded(p, model)]
        }
        wanted = [
            (c.id, c.copy_nbytes)
            for layout in layouts
            for c in layout.trainable_chunks
            if any((layout.index, s.param) in names for s in c.segments)
        ]
        crossing = device[0].staged and place != "device"
        assert sorted(device[0].copies) == (wanted if crossing else [])
    infinity.close(optimizer)


def sharded(param: nn.Parameter, model: nn.Module) -> Any:
    return engine_of(model).params[param]


def test_all_copies_of_a_unit_are_issued_before_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Copy:
        def __init__(self, event: Event) -> None:
            self.event = event

        def done(self) -> bool:
            return self.event.done()

        def wait(self) -> None:
            calls.append("wait")
            self.event.wait()

    class Device(HostDevice):
        staged = True

        def d2h(self, *args: Any, **options: Any) -> Event:
            calls.append("copy")
            return Copy(super().d2h(*args, **options))

        def wait_on_device(self, event: Event | None) -> None:
            return  # as on a device: its stream waits, the host does not

    monkeypatch.setattr(
        engine_module, "open_device", lambda name, recorder: Device(torch.device("cpu"), recorder)
    )
    model, optimizer = wrapped(tmp_path, "host", layers=1)
    (unit,) = engine_of(model).units
    model(draw(model, 0)).backward()
    engine_of(model).gradients.wait()
    chunks = len(unit.layout.trainable_chunks)
    assert chunks > 1
    assert calls[:chunks] == ["copy"] * chunks
    assert set(calls[chunks:]) == {"wait"}
    infinity.close(optimizer)


def test_zeros_do_not_cross(tmp_path: Path, device: list[Any]) -> None:
    """Beside zeros they are a note, beside values they are written where these are."""
    model, optimizer = wrapped(tmp_path, "host")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    device[0].copies.clear()
    engine_of(model).gradients.wait()
    assert device[0].copies == []
    model(draw(model, 1)).backward()
    engine_of(model).gradients.wait()
    device[0].copies.clear()
    model.layers[0].large.grad.zero_()
    engine_of(model).gradients.wait()
    assert device[0].copies == []
    assert not infinity.gradient(model.layers[0].large).any()
    assert infinity.gradient(model.layers[0].odd).any()
    infinity.close(optimizer)


# -- what arrives -------------------------------------------------------------------------------------------


@places
@dtypes
@pytest.mark.parametrize("leases", ["most", "least"])
def test_whatever_arrives_is_what_a_plain_model_has(
    place: str, dtype: str, leases: str, tmp_path: Path, device: list[Any]
) -> None:
    """After backwards of some, zeros, values put there or added, factors, gradients dropped; squares, too."""
    least = {"host_memory": needed(tmp_path, place, dtype)} if leases == "least" else {}
    model, optimizer = wrapped(tmp_path, place, dtype, **least)
    quota = engine_of(model).footprint.quotas.get("gradient")
    assert quota is None or quota.buffers == (2 if leases == "least" else 4)
    gradients = engine_of(model).gradients
    chosen = random.Random(7)
    plain: dict[str, torch.Tensor | None] = {n: None for n, _ in model.named_parameters()}
    named = dict(model.named_parameters())
    for number in range(30):
        some = [n for n in named if chosen.random() < 0.4] or list(named)
        kind = chosen.choice(["backward"] * 4 + ["zero", "put", "add", "factor", "drop"])
        values = draw(model, number)
        if kind == "backward":
            model({n: values[n] for n in some}).backward()
        for name in some:
            param, before, value = named[name], plain[name], values[name].float()
            if kind == "backward":
                plain[name] = value if before is None else before + value
            elif kind == "put":
                param.grad, plain[name] = values[name], value.clone()
            elif kind == "drop":
                param.grad = plain[name] = None
            elif before is not None and kind == "zero":
                param.grad.zero_()
                plain[name] = torch.zeros_like(before)
            elif before is not None and kind == "add":
                param.grad.add_(values[name])
                param.grad.add_(values[name])
                plain[name] = before + value + value
            elif before is not None and kind == "factor":
                param.grad.mul_(0.5)
                plain[name] = before * 0.5
        if kind == "put":
            optimizer.clip_grad_norm_(float("inf"))  # takes over what was put there
        if number % 5:
            continue
        for name, param in named.items():
            found, wanted = infinity.gradient(param), plain[name]
            assert (found is None) == (wanted is None), (number, name)
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=f"{number} {name}")
        gradients.chunks.sum_squares()
        for unit in engine_of(model).units:
            for chunk in unit.layout.trainable_chunks:
                entry = gradients.chunks.entries[chunk.id]
                with gradients.chunks.open(chunk) as work:
                    pieces = np.array(chunk.norm_pieces, dtype=np.int64)[:, 1:].copy()
                    squares = cpu_adam.sum_of_squares(work.buffer(entry.dtype or chunk.dtype), pieces)
                assert entry.dtype is None or (entry.squares == squares).all()
    infinity.close(optimizer)


@dtypes
def test_what_did_not_arrive_is_zero_in_the_buffer(dtype: str) -> None:
    """Padding too, in memory that was another's."""
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    params = [ParamSpec(n, s, dtype, n != "odd", 0) for n, s in SIZES.items()]
    layout: UnitLayout = partition([("unit", params)], 65536)[0]
    device = Watched(torch.device("cpu"))
    for put in ((), (0,), (2, 3), (0, 2, 3)):
        buffer = UnitBuffer(layout, device)
        buffer.put(0, torch.ones(SIZES["large"], dtype=kind))
        for run in buffer._runs.values():
            run.view(torch.uint8).fill_(255)
        for index in put:
            buffer.put(index, torch.full(params[index].shape, index + 1.0, dtype=kind))
            buffer.arrivals[index] = Arrival(True)
        buffer.seal()
        for chunk in layout.trainable_chunks:
            wanted = torch.zeros(chunk.numel, dtype=kind)
            for s in chunk.segments:
                if s.param in put:
                    wanted[s.start : s.start + s.numel] = s.param + 1.0
            assert torch.equal(buffer.chunk(chunk), wanted)
    device.close()


# -- memory, leases, errors ---------------------------------------------------------------------------------


class Nested(nn.Module):
    """What the root owns waits for the whole backward, beside the layers' own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(300, 300))
        self.last = nn.Parameter(torch.ones(300, 300))
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.last).square().mean()


@places
def test_buffers_take_what_was_planned_and_no_more(
    place: str, tmp_path: Path, device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model: Any = Nested()
    plain = Nested()
    plain.load_state_dict(model.state_dict())
    where = {"parameters": "device", "optimizer_state": place, "gradients": place}
    config = config_for(tmp_path, device_memory="32MiB", **where)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine, most = engine_of(model), 0
    put = UnitBuffer.put

    def watched(self: UnitBuffer, *args: Any, **options: Any) -> None:
        nonlocal most
        put(self, *args, **options)
        gradients = engine.gradients
        leaving = [each.buffer for each in gradients.chunks.leaving]
        most = max(most, sum(b.nbytes for b in [*gradients._filling.values(), *leaving]))

    monkeypatch.setattr(UnitBuffer, "put", watched)
    x = torch.randn(300, 300)
    for _ in range(2):
        for net in (model, plain):
            net(x).backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert wanted.grad is not None
        largest = wanted.grad.abs().max().item()
        torch.testing.assert_close(infinity.gradient(found), wanted.grad, rtol=1e-6, atol=1e-6 * largest)
    assert 0 < most <= engine.footprint.gradients_nbytes
    optimizer.step()
    assert not engine.gradients._filling
    assert not engine.gradients.chunks.leaving
    infinity.close(optimizer)


def test_leases_come_home(tmp_path: Path, device: list[Any]) -> None:
    """All of them, also when a transfer fails; and a chunk takes both that it needs or none."""
    model, optimizer = wrapped(tmp_path, "nvme", host_memory=needed(tmp_path, "nvme"))
    engine = engine_of(model)
    stats = lambda: engine.pool.stats()["gradient"]  # noqa: E731
    assert stats().total // (65536 * 4) == 2
    for number in range(3):
        model(draw(model, number)).backward()
    engine.gradients.wait()
    assert stats().in_use == 0
    assert stats().peak == stats().total
    chunks: ChunkGradients = engine.gradients.chunks
    layout = engine.units[0].layout
    with chunks.open(layout.trainable_chunks[0]):
        assert chunks._try_leases(2, chunks.plans[layout.trainable_chunks[0].id]) is None
        assert stats().in_use == 65536 * 4
    assert stats().in_use == 0
    (arena,) = engine.store._arenas
    os.pwrite(arena.file.plain_fd, b"\xa5" * arena.nbytes, 0)  # what was written is not what is read

    def backward() -> None:
        model(draw(model, 9)).backward()
        engine.gradients.wait()

    with pytest.raises(CorruptionError):
        backward()
    while chunks.writes:
        with contextlib.suppress(CorruptionError):  # told already
            chunks.finish_write()
    assert stats().in_use == 0
    infinity.close(optimizer)
