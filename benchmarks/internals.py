"""What the timing of a GPU's step takes from inside of infinity. All else that it uses is public."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from adam_work import AdamWork
from link import host_buffers

from infinity.api.engine import engine_of
from infinity.hardware import cpu_adam
from infinity.hardware.device import CudaDevice

#: Set the threads of the CPU's Adam; say how many there are.
set_threads, threads = cpu_adam.set_threads, cpu_adam.threads


def updates(chunk: int, total: int) -> list[Callable[[], None]]:
    """Return updates of `total` parameters in host memory by the CPU's Adam, `chunk` at a time."""
    return [AdamWork(chunk).update for _ in range(total // chunk)]


@contextlib.contextmanager
def pinned(device: torch.device, nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Lend two (nbytes,) uint8 tensors of host memory that `device` copies from and to without staging."""
    opened = CudaDevice(device)
    try:
        with host_buffers("registered", nbytes, opened) as buffers:
            yield buffers
    finally:
        opened.close()


def updated_in_backward(optimizer: Any) -> Callable[[], int]:
    """Return what says how many units the last backward has begun to update before it ended: those of
    ``update="backward"``, which `Behind.end` has not to update any more."""
    behind, count = engine_of(optimizer).optimizer.backward_update, 0
    if behind is None:
        return lambda: 0
    end = behind.end

    def counted() -> None:
        nonlocal count
        count = len(behind._updates.used)
        end()

    behind.end = counted
    return lambda: count
