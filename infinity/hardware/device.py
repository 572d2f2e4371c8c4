"""The device: `HostDevice` (device memory is host memory) or `CudaDevice`, which have one interface.

Copies are asynchronous on both: a CUDA stream there, a *host stream* here (streams.py).
Other folders import devices, streams and events from here.
"""

from __future__ import annotations

import os

import torch

from infinity.core.errors import ConfigError
from infinity.core.spans import Recorder

from .cuda_device import CudaDevice
from .host_device import HostDevice
from .streams import POLL, Event, HostStream, Task

__all__ = [
    "POLL",
    "CudaDevice",
    "Device",
    "Event",
    "HostDevice",
    "HostStream",
    "Task",
    "open_device",
]

Device = HostDevice | CudaDevice


def open_device(name: str | None, recorder: Recorder | None = None) -> Device:
    """Return the device called `name`; None: cuda if the machine has it, else the CPU. The device reports
    copies to `recorder` while a trace is on.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # torch has no such word; nor can this one be computed on
    if device.type == "cpu":
        return HostDevice(torch.device("cpu"), recorder)
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(
            f"there is no device {name!r}",
            expected=f"one of {torch.cuda.device_count()} CUDA devices, or the CPU",
            found=repr(name),
            cure='device="cpu", or a torch build with CUDA',
        )
    index = _index() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index), recorder)


def _index() -> int:
    """Return the number of the device that this process is to use: the one that its user has chosen; else,
    where a launcher says which process of this node it is, that one of the node's, which is the current one
    from here on, as `.cuda()` takes it."""
    local, chosen = os.environ.get("LOCAL_RANK", ""), torch.cuda.current_device()
    if chosen == 0 and local.isdecimal() and int(local) < torch.cuda.device_count():
        chosen = int(local)
        torch.cuda.set_device(chosen)
    return chosen
