"""All that is replaced inside the engine, so that its work takes the time of the modelled machine.

The rest of `emulated.py` uses what a user does. So a change of the engine's inside changes this file alone,
and figures of before and after can be compared:

- sizes that are fixed numbers of elements or bytes become 1/scale of themselves, as the model is;
- the device is the engine's `CudaDevice` over the modelled one;
- the native kernels of the CPU take time, and compute nothing;
- CRC-32C takes time on the thread that asks for it, and is 0;
- a transfer of a ring is over when the modelled drive has made it, and moves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import numpy as np

from .machine import Machine, lib, now

#: Of dtypes as the kernel numbers them: fp32, bf16, fp16, none, uint8.
_ITEMSIZES: Final = {0: 4, 1: 2, 2: 2, 3: 0, 4: 1}


def scale_sizes(scale: int) -> None:
    """Make norm blocks 1/scale of themselves, and with them the least chunk.

    Raises:
        RuntimeError: the engine was imported already, and has taken the number.
    """
    if "infinity.core.config" in sys.modules:
        raise RuntimeError("sizes are scaled before the engine is imported")
    from infinity.core import sizes

    sizes.NORM_BLOCK //= scale  # type: ignore[misc]


def norm_block() -> int:
    """Return the elements of a norm block, as the engine has them now."""
    from infinity.core import sizes

    return sizes.NORM_BLOCK


def largest_chunk(optimizer: Any) -> int:
    """Return the elements of the largest chunk of an engine."""
    from infinity.api.engine import engine_of

    return max(chunk.numel for unit in engine_of(optimizer).units for chunk in unit.layout.chunks)


class Native:
    """The native kernels of the CPU. Everything but their work is the real module's."""

    def __init__(self, inner: Any, machine: Machine) -> None:
        self._inner = inner
        self._machine = machine
        self.updates = 0  # calls of `update`, which has a chunk each

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(
        self,
        rule: int,
        master: int,
        is_split: bool,
        first: int,
        second: int,
        first_scales: int,
        second_scales: int,
        moments: int,
        grad: int,
        grad_code: int,
        out: int,
        out_code: int,
        numel: int,
        segments: bytes,
    ) -> None:
        self.updates += 1
        kept = (2 if is_split else 4) + _ITEMSIZES[moments] * ((first != 0) + (second != 0))
        self._machine.dram(numel * (2 * kept + _ITEMSIZES[grad_code] + _ITEMSIZES[out_code]))

    def sum_of_squares(self, data: int, code: int, pieces: int, count: int, sums: int) -> None:
        ctypes.memset(sums, 0, 8 * count)
        if count:
            each = np.ctypeslib.as_array((ctypes.c_int64 * (2 * count)).from_address(pieces))[1::2]
            self._machine.dram(int(each.sum()) * _ITEMSIZES[code])

    def accumulate(self, target: int, source: int, code: int, numel: int) -> None:
        self._machine.dram(numel * (4 + 4 + _ITEMSIZES[code]))

    def convert(self, target: int, target_code: int, source: int, source_code: int, numel: int) -> None:
        self._machine.dram(numel * (_ITEMSIZES[target_code] + _ITEMSIZES[source_code]))

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        self._machine.dram(2 * nbytes)


class Ticket:
    """One transfer of a ring: as `infinity.hardware.ticket.Ticket`."""

    __slots__ = ("__weakref__", "_begin", "_end", "nbytes", "offset", "order", "path", "quarantined")

    def __init__(self, end: float, path: str, offset: int, nbytes: int) -> None:
        self._begin, self._end = now(), end
        self.path, self.offset, self.nbytes = path, offset, nbytes
        self.quarantined, self.order = False, 1

    @property
    def done(self) -> bool:
        return now() >= self._end

    @property
    def times(self) -> tuple[int, int, int]:
        begin, end = (int(time * 1e9) for time in (self._begin, self._end))
        return begin, begin, end

    def wait(self, timeout: float | None = None) -> None:
        lib.sleep_until(self._end if timeout is None else min(self._end, now() + timeout))


class _AIO:
    """The native I/O module, without its checksums."""

    def __init__(self, inner: Any, machine: Machine) -> None:
        self._inner, self._machine = inner, machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def aio_crc32c(self, address: int, nbytes: int, crc: int) -> int:
        self._machine.crc(nbytes)
        return 0

    def aio_crc32c_zeros(self, nbytes: int) -> int:
        return 0


def _submit(machine: Machine) -> Callable[..., Ticket]:
    drives: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def submit(
        ring: Any, write: int, file: Any, offset: int, address: int, nbytes: int, priority: Any
    ) -> Ticket:
        drive = drives.setdefault(ring, len(drives))
        return Ticket(machine.transfer(drive, nbytes, write=bool(write)), file.path, offset, nbytes)

    return submit


@contextlib.contextmanager
def replaced(machine: Machine) -> Iterator[Native]:
    """Have engines that are made inside of this run on the modelled machine. Yields the CPU's kernels."""
    if norm_block() * machine.scale != 65_536:
        raise RuntimeError("scale_sizes comes first")
    import infinity.api.engine
    from infinity.core import config
    from infinity.hardware import aio, cpu_adam
    from infinity.hardware.cuda_device import CudaDevice
    from infinity.planning import footprint

    def open_device(name: str | None, recorder: Any = None) -> CudaDevice:
        return CudaDevice(machine.device, recorder)

    native = Native(cpu_adam._native, machine)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (infinity.api.engine, "open_device", open_device),
            (cpu_adam, "_native", native),
            (aio, "lib", _AIO(aio.lib, machine)),
            (aio.Ring, "_submit", _submit(machine)),
            (config, "MiB", config.MiB // machine.scale),  # of which the default chunk is a multiple
            (footprint, "_LOAD_TARGET", footprint._LOAD_TARGET // machine.scale),
            (footprint, "READ_AHEAD", footprint.READ_AHEAD // machine.scale),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield native
