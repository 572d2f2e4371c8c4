"""Copies between host and device, by kind of host memory.

pageable    ordinary memory: the driver copies it through a small pinned buffer of its own
pinned      memory from the driver (torch's pin_memory)
registered  the engine's own: a mapping on huge pages, then cudaHostRegister
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from infinity.core.errors import InfinityError
from infinity.hardware.device import CudaDevice
from infinity.storage.memory import HostMapping

KINDS: Final = ("pageable", "pinned", "registered")


@contextlib.contextmanager
def host_buffers(kind: str, nbytes: int, device: CudaDevice) -> Iterator[list[torch.Tensor]]:
    """Lend two (nbytes,) uint8 tensors of this kind of host memory."""
    if kind != "registered":
        pin = kind == "pinned"
        yield [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        return
    mapping = HostMapping(2 * nbytes, populate=True)
    device.register(mapping.address, mapping.nbytes)
    try:
        yield [mapping.tensor(at, nbytes) for at in (0, nbytes)]
    finally:
        device.synchronize()
        device.unregister(mapping.address, mapping.nbytes)


def measure_cuda(
    device: CudaDevice, nbytes: int, repeats: int, kinds: Sequence[str] = KINDS
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows of figures for each kind and direction (h2d, d2h, both at once), and warnings."""
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    for kind in kinds:
        try:
            with torch.cuda.device(device.torch_device), host_buffers(kind, nbytes, device) as (up, down):
                rows += _measure_kind(device, kind, up, down, repeats)
        except (InfinityError, RuntimeError) as error:
            warnings.append(f"{kind} memory cannot be measured: {error}")
    return rows, warnings


def _measure_kind(
    device: CudaDevice, kind: str, up: torch.Tensor, down: torch.Tensor, repeats: int
) -> list[dict[str, Any]]:
    up.fill_(3)
    there = torch.zeros(up.numel(), dtype=torch.uint8, device=device.torch_device)
    back = torch.full_like(there, 5)
    torch.cuda.synchronize(device.torch_device)
    rows = []
    for direction in ("h2d", "d2h", "both"):
        moved, rates = up.numel() * (2 if direction == "both" else 1), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            if direction != "d2h":
                device.h2d(there, up)
            if direction != "h2d":
                device.d2h(down, back)
            device.synchronize()
            rates.append(moved / (time.perf_counter() - start))
        middle = statistics.median(counted := rates[1:])  # the first one warms up
        spread = (max(counted) - min(counted)) / middle
        rows.append({"kind": kind, "direction": direction, "bytes_per_second": middle, "spread": spread})
    if not bool((there == 3).all()) or not bool((down == 5).all()):
        raise RuntimeError("other bytes arrived than were sent: run the vendor's test of memory")
    return rows
