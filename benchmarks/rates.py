"""The rates that the bound of a step is made of: of the CPU's Adam, and of the engine's rings on a drive."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from adam_work import AdamWork
from steps import Measured, bound

from infinity.cli.bench.io_load import Job, Load, Settings, run_pass, usable_bytes
from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH, Config
from infinity.core.sizes import GiB, MiB, parse_dtype
from infinity.hardware.tuned import tuned
from infinity.planning.footprint import READ_AHEAD
from infinity.planning.parts import ADAM, moments_of

#: Bytes of the drive's probe at most and at least, seconds of one pass, parameters of the kernel's.
_PROBE: Final = (GiB, 128 * MiB)
_SECONDS: Final = 0.75
_ADAM: Final = 16 * MiB  # larger than caches
_MIXED: Final = Job("mixed")


class Rates:
    """Measures the kernel and, with a `load`, the drive."""

    def __init__(self, load: Load | None, settings: Settings) -> None:
        self._load, self._settings = load, settings

    @functools.cached_property
    def _work(self) -> AdamWork:
        work = AdamWork(_ADAM)
        work.update()  # warms up
        return work

    def _update(self) -> float:
        start = time.perf_counter()
        self._work.update()
        return _ADAM / (time.perf_counter() - start)

    def drive(self, job: Job = _MIXED) -> float | None:
        """Return the bytes per second of a pass, read and written together; None: there is no drive."""
        if self._load is None:
            return None
        with self._load.ring(self._settings) as ring:
            return run_pass([(self._load, ring)], self._settings, job, _SECONDS).rate

    def measure(self, *, nvme: bool) -> dict[str, Any]:
        """Measure the kernel, and with `nvme` the drive; return both as JSON has them."""
        return {
            "adam_parameters_per_second": statistics.median(self._update() for _ in range(3)),
            "nvme_mixed_bytes_per_second": self.drive() if nvme else None,
            "ring": self._settings._asdict(),
        }


def beside(
    row: Mapping[str, Any],
    torch_row: Mapping[str, Any],
    rates: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    dtype: str,
    params: int,
) -> dict[str, Any]:
    """Return the bound of a step whose `figures` are `row`, and how near it came.

    Args:
        torch_row: the same figures of plain torch in memory.
        rates: what `Rates.measure` returned.
        settings: of `infinity.Config`, as the run was given them.
    """
    of_state = ("optimizer_state_dtype", "split_master")
    config = Config(**{k: v for k, v in settings.items() if k in of_state})
    state = (2 if config.split_master else 4) * params + sum(
        moment.nbytes(params) for moment in moments_of(ADAM, config)
    )
    ahead = min(READ_AHEAD, state)
    copies = params * parse_dtype(dtype).itemsize
    on_nvme = {name for name, value in settings.items() if value == "nvme"}
    in_torch = settings["optimizer_state"] == "device"
    found = Measured(
        forward=torch_row["forward"],
        backward=torch_row["backward"],
        adam=torch_row["step"] if in_torch else params / rates["adam_parameters_per_second"],
        moved=row["read_bytes"] + row["written_bytes"],
        nvme_rate=rates["nvme_mixed_bytes_per_second"],
        read_ahead=ahead if "optimizer_state" in on_nvme else 0,
        copies=copies if "parameters" in on_nvme else 0,
        gradients=copies if "gradients" in on_nvme else 0,
    )
    least = bound(settings["update"], found)
    return {
        "bound": least,
        "efficiency": least / row["seconds"],
        "bound_of": {**dataclasses.asdict(found), "nvme_seconds": found.nvme},
    }


@contextlib.contextmanager
def rates(directory: str | None) -> Iterator[Rates]:
    """Lend what measures the rates; the drive's file is gone afterwards. The ring is opened as the
    store opens its own: as tuned, or with the defaults.

    Args:
        directory: on the drive to be measured; None: no drive.

    Raises:
        DirectoryError: the directory is unfit, or has not the room.
    """
    found = None if directory is None else tuned(directory)
    settings = Settings("auto", BLOCK_BYTES, QUEUE_DEPTH) if found is None else Settings(**found._asdict())
    if directory is None:
        yield Rates(None, settings)
        return
    window = max(job.window(settings) for job in (_MIXED, _MIXED.checking))
    probe = max(_PROBE[1], min(_PROBE[0], usable_bytes(directory)[0] // 4))
    nbytes = max(2 * window, probe) // MiB * MiB
    with Load(directory, nbytes, grain=settings.block_bytes, window=window) as load:
        load.fill(settings)
        yield Rates(load, settings)
