"""What a step must take at least: from torch's times in memory, the drive's rate and the kernel's.

[Note: the bound of a step] F, B: forward and backward of the same model in plain torch, all in memory. A:
the update by the engine's kernel, or torch's optimizer where the state is on the device. N: the bytes that
the step moved to and from NVMe, at the rate of the engine's own mixed reads and writes on that directory.
All are measured in the run that they are compared with, in turns with it. H: the part of N that a backward
can hide, which is at most B: state read ahead (`read_ahead_memory`), copies that the backward itself reads,
gradients that it writes. C: copies that the forward itself reads, at most F.

    sync      F + B + max(N − H − C, A)      nothing else of the update can be hidden
    overlap   B + max(F, N − H, A)           the update stands behind the next forward
    delayed   max(F + B, N, A)               it stands behind a whole step

The link between host and device is not in it, and cores that Adam and the forward share count as if each
had its own: the bound is low rather than high. efficiency = bound ÷ measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH, Config
from infinity.core.sizes import GiB, MiB, parse_dtype
from infinity.hardware.tuned import tuned

from .adam import AdamWork, rate
from .io_load import Job, Load, Settings, run_pass, usable_bytes
from .step_run import PLACEMENTS

_FILE: Final = GiB  # of the drive's probe
_LEAST_FILE: Final = 128 * MiB
_MIXED: Final = Job("mixed")
_SECONDS: Final = 0.75  # of one pass
_ADAM: Final = 16 * MiB  # parameters: larger than caches


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a bound is made of: seconds, and bytes of one step. See [Note: the bound of a step].

    `nvme_rate` is in bytes per second; None where nothing is on NVMe. `read_ahead`, `copies` and
    `gradients` are the bytes on NVMe of the state that may be read ahead, of one reading of all copies,
    and of the gradients as the backward writes them.
    """

    forward: float
    backward: float
    adam: float
    moved: float = 0.0
    nvme_rate: float | None = None
    read_ahead: float = 0.0
    copies: float = 0.0
    gradients: float = 0.0

    @property
    def nvme(self) -> float:
        """N."""
        return self._seconds(self.moved)

    def _seconds(self, nbytes: float) -> float:
        return nbytes / self.nvme_rate if self.nvme_rate else 0.0


def bound(update: str, found: Measured) -> float:
    """Return the seconds that a step takes at least. See [Note: the bound of a step]."""
    nvme, compute = found.nvme, found.forward + found.backward
    hidden = min(
        found.backward, found._seconds(min(found.moved, found.read_ahead + found.copies + found.gradients))
    )
    if update == "sync":
        fetched = min(found.forward, found._seconds(found.copies))
        return compute + max(nvme - hidden - fetched, found.adam, 0.0)
    if update == "overlap":
        return found.backward + max(found.forward, nvme - hidden, found.adam)
    return max(compute, nvme, found.adam)


@dataclass
class Rates:
    """Measures the kernel and, with a `load`, the drive: once per round; medians of all rounds so far."""

    load: Load | None
    settings: Settings
    _work: AdamWork = dataclasses.field(default_factory=lambda: AdamWork(_ADAM))
    _adam: list[float] = dataclasses.field(default_factory=list)
    _nvme: list[float] = dataclasses.field(default_factory=list)

    def measure(self, *, nvme: bool) -> None:
        """Measure the kernel, and with `nvme` the drive."""
        self._adam += rate(self._work.update, self._work.numel, 2)
        if nvme and self.load is not None:
            with self.load.ring(self.settings) as ring:
                self._nvme.append(run_pass([(self.load, ring)], self.settings, _MIXED, _SECONDS).rate)

    def forget(self) -> None:
        """Begin anew: rates drift, and those of other rounds say nothing."""
        self._adam, self._nvme = [], []

    @property
    def adam(self) -> float:
        """Parameters per second."""
        return statistics.median(self._adam)

    @property
    def nvme(self) -> float | None:
        """Bytes per second, read and written together; None: not measured."""
        return statistics.median(self._nvme) if self._nvme else None

    def as_dict(self) -> dict[str, Any]:
        """Return both, as JSON has them."""
        return {
            "adam_parameters_per_second": self.adam,
            "nvme_mixed_bytes_per_second": self.nvme,
            "ring": self.settings._asdict(),
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
    settings = Settings("auto", BLOCK_BYTES, QUEUE_DEPTH)
    if directory is None:
        yield Rates(None, settings)
        return
    if (found := tuned(directory)) is not None:
        settings = Settings(found.backend, found.block_bytes, found.queue_depth, found.threads)
    window = max(job.window(settings) for job in (_MIXED, _MIXED.checking))
    nbytes = max(2 * window, probe_bytes(directory)) // MiB * MiB
    with Load(directory, nbytes, grain=settings.block_bytes, window=window) as load:
        with load.ring(settings) as ring:  # what was never written is read without the drive
            run_pass([(load, ring)], settings, Job("write"), 3600, limit=nbytes)
        yield Rates(load, settings)


def probe_bytes(directory: str) -> int:
    """Return the bytes of the drive's probe."""
    return max(_LEAST_FILE, min(_FILE, usable_bytes(directory)[0] // 4))


# ---- figures ----


def steady(turn: Mapping[str, Any]) -> float:
    """Return the median step of a turn in its steady state: from the second on, or the only one."""
    intervals = turn["intervals"]
    return float(statistics.median(intervals[1:] or intervals))


def figures(turns: Sequence[Mapping[str, Any]], params: int) -> dict[str, Any]:
    """Return medians of turns (see `Stepper.turn`); seconds and bytes of a step."""
    row = {
        "seconds": statistics.median(steady(turn) for turn in turns),
        "seconds_with_drain": statistics.median(turn["seconds"] for turn in turns),
        **{part: statistics.median(t[part] for t in turns) for part in ("forward", "backward", "step")},
        "read_bytes": statistics.median(turn["read"] for turn in turns),
        "written_bytes": statistics.median(turn["written"] for turn in turns),
        "device_peak": max(turn["device_peak"] for turn in turns),
        "last_loss": turns[-1]["losses"][-1],
    }
    row["bytes_per_parameter"] = (row["read_bytes"] + row["written_bytes"]) / params
    return row


def beside_bound(
    row: Mapping[str, Any],
    torch_row: Mapping[str, Any],
    rates: Rates,
    *,
    placement: str,
    update: str,
    dtype: str,
    params: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the bound of a step whose `figures` are `row`, and how near it came.

    Args:
        torch_row: the same figures of plain torch in memory.
        settings: of `infinity.Config`, as the run was given them.
    """
    where = PLACEMENTS[placement]
    told = {k: v for k, v in settings.items() if k == "read_ahead_memory"}
    ahead = int(Config(**told).read_ahead_memory)
    copies = params * parse_dtype(dtype).itemsize
    found = Measured(
        forward=torch_row["forward"],
        backward=torch_row["backward"],
        adam=torch_row["step"] if where.optimizer_state == "device" else params / rates.adam,
        moved=row["read_bytes"] + row["written_bytes"],
        nvme_rate=rates.nvme,
        read_ahead=min(ahead, 12 * params) if where.optimizer_state == "nvme" else 0,
        copies=copies if where.parameters == "nvme" else 0,
        gradients=copies if where.gradients == "nvme" else 0,
    )
    least = bound(update, found)
    return {
        "bound": least,
        "efficiency": least / row["seconds"],
        "bound_of": {**dataclasses.asdict(found), "nvme_seconds": found.nvme},
    }
