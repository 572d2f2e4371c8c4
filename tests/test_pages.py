"""Pages of units on a CPU device: what comes has those of what goes, and nobody sees another's values."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.sizes import MiB
from infinity.hardware import pages as module
from infinity.hardware.device import HostDevice
from infinity.hardware.pages import GRAIN, PagedMemory, Pages

from .offloaded import config_for

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="counts pages of Linux")


def bytes_of(memory: PagedMemory) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(memory.storage)


def only(memory: PagedMemory) -> int:
    """The value of every byte; takes no memory."""
    low, high = torch.aminmax(bytes_of(memory))
    assert low == high
    return int(low)


def is_protected(memory: PagedMemory, offset: int = 0) -> bool:
    """Ask the kernel, which says so without a fault."""
    read, write = os.pipe()
    try:
        os.write(write, memoryview(bytes_of(memory).numpy())[offset : offset + 1])
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return True
    finally:
        os.close(read)
        os.close(write)
    return False


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_what_comes_has_the_pages_of_what_went() -> None:
    pages = Pages()
    pages.most = 8 * MiB
    first, second = PagedMemory(7 * MiB + 5, pages), PagedMemory(7 * MiB + 5, pages)
    first.fill()
    bytes_of(first).fill_(1)
    first.drop()
    assert is_protected(first)
    assert is_protected(first, 7 * MiB)
    assert (pages.filled, pages.kept, pages.moved) == (0, 6 * MiB, 0)
    second.fill()
    assert (pages.filled, pages.kept, pages.moved) == (7 * MiB + 5, 0, 6 * MiB)
    assert is_protected(first)
    before = faults()
    bytes_of(second)[: 6 * MiB].fill_(2)
    assert faults() - before < 16  # fresh ones: 1536, or one for each huge page and its beginning
    assert bytes_of(second)[6 * MiB :].sum() == 0
    first.fill()  # nothing is kept, so its pages are fresh
    assert only(first) == 0
    assert pages.moved == 6 * MiB


def test_what_is_loaded_again_has_its_own_pages() -> None:
    pages = Pages()
    pages.most = 8 * MiB
    memory = PagedMemory(4 * MiB, pages)
    memory.fill()
    bytes_of(memory).fill_(3)
    memory.drop()
    memory.fill()
    assert pages.moved == 4 * MiB
    memory.fill()  # again: nothing changes
    assert pages.filled == 4 * MiB
    assert only(memory) == 3
    memory.drop()
    memory.drop()
    assert (pages.filled, pages.kept) == (0, 4 * MiB)


@pytest.mark.first
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_sizes_exceeds_the_budget_or_touches_what_is_filled(seed: int) -> None:
    draw = random.Random(seed)
    pages = Pages()
    pages.most = 24 * MiB
    sizes = [*[draw.randint(1, 12 * MiB) for _ in range(6)], 4 * MiB, 4 * MiB, 4 * MiB, 100]
    memories = [PagedMemory(n, pages) for n in sizes]
    values: dict[PagedMemory, int] = {}
    before = anonymous()
    for value in range(60):
        memory = draw.choice(memories)
        held = sum(m.storage.nbytes() for m in values)
        if memory in values:
            assert only(memory) == values.pop(memory)
            memory.drop()
            assert is_protected(memory)
        elif held + memory.storage.nbytes() <= pages.most:
            memory.fill()
            values[memory] = value
            bytes_of(memory).fill_(value)
        assert pages.filled == sum(m.storage.nbytes() for m in values)
        assert pages.filled + pages.kept <= pages.most
        assert anonymous() - before < pages.filled + pages.kept + len(sizes) * 4096 + MiB
        assert all(len(m.pieces) <= 24 // 2 for m in memories)
    assert all(only(m) == v for m, v in values.items())
    assert pages.moved > 0
    for memory in values:
        memory.drop()
    pages.most = 0
    pages.trim()
    assert anonymous() - before < 2 * MiB


def test_nothing_is_kept_beyond_the_budget_nor_in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages()
    pages.most = 8 * MiB
    small, large = PagedMemory(4 * MiB, pages), PagedMemory(12 * MiB, pages)
    small.fill()
    large.fill()  # what is needed may be more than the budget
    small.drop()
    assert pages.kept == 0
    large.drop()
    assert pages.kept == 0
    monkeypatch.setattr(module, "_MOST_PIECES", 1)
    parts = [PagedMemory(GRAIN, pages) for _ in range(4)]
    for part in parts:
        part.fill()
    for part in parts:
        part.drop()
    assert pages.kept == 8 * MiB
    whole = PagedMemory(8 * MiB, pages)
    whole.fill()
    assert pages.moved == 8 * MiB
    whole.drop()
    assert pages.kept == 0


def test_a_kernel_that_cannot_move_pages_gives_fresh_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages()
    pages.most = 16 * MiB
    first, second = PagedMemory(8 * MiB, pages), PagedMemory(6 * MiB, pages)
    first.fill()
    bytes_of(first).fill_(1)
    first.drop()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MOVE", 1 << 10)  # no such flag
        second.fill()
    assert (pages.most, pages.moved, pages.kept) == (0, 0, 0)
    assert only(second) == 0
    second.drop()
    assert is_protected(second)
    assert pages.kept == 0


# -- an engine --------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (512, 1024, 1024, 640, 1024, 512)  # units of 2 to 4 MiB and a little
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check(device: Any) -> None:
    if isinstance(device, HostDevice):  # not with --device lagging
        assert device.pages.filled + device.pages.kept <= device.pages.most


def trained(folder: Path, room: str) -> tuple[list[torch.Tensor], Any]:
    """Train five steps with `room` for units; return losses and parameters, and the device."""
    folder.mkdir()
    torch.manual_seed(0)
    model: Any = Layers()
    config = config_for(folder, units=["Linear"], device_memory=room)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    device, found = engine_of(model).device, []
    for step in range(5):
        x = torch.randn(4, 512, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
        check(device)
    infinity.unwrap(model)
    assert not isinstance(device, HostDevice) or device.pages.kept == 0
    return [*found, *(p.detach().clone() for p in model.parameters())], device


def test_training_has_the_same_bits_on_pages_that_move(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", "64MiB")
    short, device = trained(tmp_path / "short", "18MiB")
    assert not isinstance(device, HostDevice) or device.pages.moved >= 32 * MiB
    assert all(torch.equal(a, b) for a, b in zip(whole, short, strict=True))


@pytest.mark.filterwarnings("ignore:.*refers to them:RuntimeWarning")
def test_what_somebody_holds_is_moved_nowhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Layers()
    x = torch.randn(4, 512)
    expected = plain(x).detach()
    model = infinity.inference(plain, config_for(tmp_path, units=["Linear"], device_memory="9MiB"))
    device: Any = engine_of(model).device
    for layer in model.layers:
        with infinity.gathered(layer.weight):
            alias = layer.weight.detach()
        values = alias.clone()
        for _ in range(3):
            assert torch.equal(model(x), expected)
            assert torch.equal(alias, values)
        assert infinity.metrics(model)["memory/held_units"] == 1
        del alias
    assert torch.equal(model(x), expected)
    check(device)
    assert not isinstance(device, HostDevice) or device.pages.moved >= 32 * MiB
    infinity.close(model)
    assert not isinstance(device, HostDevice) or device.pages.kept == device.pages.most == 0


def test_a_limit_on_address_space_is_named() -> None:
    script = (
        "import resource, infinity.hardware.pages as p\n"
        "size = 1 << 32\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "try:\n    p.PagedMemory(size, p.Pages())\n"
        "except p.OutOfMemoryError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "no room for 4.00 GiB of address space" in done.stdout, done.stderr
    assert "raise the limit on address space of a process: ulimit -v" in done.stdout
