"""Pages of units on a CPU device: what comes has those of what goes, and nobody sees another's values."""

from __future__ import annotations

import errno
import itertools
import os
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
from infinity.hardware.pages import PagedMemory, Pages

from .command_line import python
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


@pytest.mark.integration
def test_training_has_the_same_bits_on_pages_that_move(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", "64MiB")
    short, device = trained(tmp_path / "short", "18MiB")
    assert not isinstance(device, HostDevice) or device.pages.moved >= 32 * MiB
    assert all(torch.equal(a, b) for a, b in zip(whole, short, strict=True))


def test_a_limit_on_address_space_is_named() -> None:
    script = (
        "import resource, infinity.hardware.pages as p\n"
        "size = 1 << 32\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "try:\n    p.PagedMemory(size, p.Pages())\n"
        "except p.OutOfMemoryError as error:\n    print(error)\n"
    )
    done = python("-c", script)
    assert done.returncode == 0
    assert "no room for 4.00 GiB of address space" in done.stdout
    assert "raise the limit on address space of a process: ulimit -v" in done.stdout
