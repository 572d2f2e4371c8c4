"""The device: `HostDevice` (device memory is host memory) or `CudaDevice`, which have one interface.

Copies are asynchronous on both: a CUDA stream there, a *host stream* here (streams.py).
Other folders import devices, streams and events from here.
"""

from __future__ import annotations

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
    """Return the device called `name`; None: cuda where there is one, else the CPU. `recorder` is
    told of copies while a trace is on.

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
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaDevice(torch.device("cuda", index), recorder)
