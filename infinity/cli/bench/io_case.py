"""One line of `bench io`: a pattern at one setting on one set of directories, measured several times; and
what only time or repetition shows: a write cache that fills up, and a read cache that answers.

Order of one case: fio, where it is compared; a pass that warms up and is not counted; the passes that count;
a pass of single blocks for latencies; then a sample of what was written is read back and compared.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from infinity.core.sizes import MiB, format_size
from infinity.hardware.aio import Ring

from .adam import AdamWork, spread
from .io_fio import best_of_fio, find_fio
from .io_load import Job, Load, Settings, run_pass

_SAMPLE: Final = 64 * MiB  # read back after a case that wrote
FASTER: Final = 1.2  #: a second read that is faster than a first one by more is a cache's
SLOWER: Final = 0.8  #: of the first rate: what counts as the end of a write cache
_REGION: Final = 32 * MiB
_REGIONS: Final = 9


class Case(NamedTuple):
    """What one line measures. `directories` are indices of the loads."""

    job: Job
    settings: Settings
    directories: tuple[int, ...] = (0,)
    adam: bool = False

    @property
    def window(self) -> int:
        """Return bytes of the buffers that its passes need."""
        jobs = self.job, self.job._replace(single=True), self.job.checking
        return max(job.window(self.settings) for job in jobs)

    def misfit(self, nbytes: int) -> str | None:
        """Return why it cannot run on files of `nbytes`, or None: two transfers under way must never have
        the same place, or no one could say what the file holds."""
        return None if nbytes >= 2 * self.window else f"it takes {format_size(2 * self.window)}"


def measure_case(
    case: Case, loads: Sequence[Load], seconds: float, repeats: int, *, fio: bool, work: AdamWork | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a case as JSON has them, and warnings.

    Args:
        seconds: of one pass.
        fio: whether it is compared, where it is installed and there is one directory: "one file" is what
            fio is good at. It runs once, as long as all passes together.
        work: what Adam updates beside the I/O, for cases that ask for it.
    """
    chosen = [loads[index] for index in case.directories]
    job, settings = case.job, case.settings
    compared = fio and find_fio() is not None and len(chosen) == 1 and not case.adam
    peers = {
        key: best_of_fio(chosen[0], settings, job, seconds * repeats, huge=key == "fio_huge")
        for key in (("fio", "fio_huge") if compared else ())
    }
    verified = sum(load.verified for load in chosen)
    with contextlib.ExitStack() as stack:
        pairs = [(load, stack.enter_context(load.ring(settings))) for load in chosen]
        rings = [ring for _, ring in pairs]
        adam = stack.enter_context(work.beside()) if case.adam and work is not None else None
        run_pass(pairs, settings, job, min(0.2, seconds))
        tallies = [run_pass(pairs, settings, job, seconds) for _ in range(repeats)]
        histogram = np.sum([ring.stats().submit_histogram for ring in rings], axis=0).tolist()
        alone = job._replace(single=True)
        singles = tallies if job.scattered else [run_pass(pairs, settings, alone, min(0.4, seconds))]
        updated = None if adam is None else adam()
        most = max(ring.stats().submit_max_seconds for ring in rings)
        for load, ring in pairs:
            load.verify(ring, settings, job, _SAMPLE // len(pairs))
        backends = sorted({ring.backend for ring in rings})
        reasons = sorted({ring.reason for ring in rings})
    rates = [tally.rate for tally in tallies]
    middle, moved = statistics.median(rates), sum(t.read + t.written for t in tallies)
    result = {
        **{"pattern": job.pattern, "order": job.order, "adam_beside": case.adam},
        "directories": [load.directory for load in chosen],
        **settings._asdict(),
        "backend": "+".join(backends),
        "backend_reason": "; ".join(reasons),
        "bytes_per_second": middle,
        "spread": spread(rates),
        "repeats": rates,
        "bytes_moved": moved,
        "latency_seconds": _percentiles([x for tally in singles for x in tally.latencies]),
        "cpu_seconds_per_gb": sum(t.cpu_seconds for t in tallies) / (moved / 1e9),
        "submit": {"less_than_2_to_the_i_microseconds": histogram, "max_seconds": most},
        "verified_bytes": sum(load.verified for load in chosen) - verified,
        "adam_parameters_per_second": updated,
        **dict.fromkeys(("fio", "fio_huge")),
        **{
            key: {**fio._asdict(), "percent": 100 * middle / fio.bytes_per_second}
            for key, (fio, _) in peers.items()
            if fio is not None
        },
    }
    return result, [text for _, said in peers.values() for text in said]


def _percentiles(values: Sequence[float]) -> dict[str, float | int]:
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9]).tolist()
    return {"p50": p50, "p99": p99, "p99.9": p999, "max": max(values), "blocks": len(values)}


# ---- caches ----


def read_twice(load: Load, ring: Ring, settings: Settings, job: Job) -> dict[str, Any] | None:
    """Read regions all over the file for the first time, and again at once.

    Returns:
        bytes per second of first and second readings (medians) and the median of their ratios, or
        None if the file is too small.
    """
    transfer = job.checking.transfer(settings)
    region = max(transfer, min(_REGION, load.mapping.nbytes) // transfer * transfer)
    count = min(_REGIONS, load.nbytes // region)
    if count < 3:
        return None
    rates = np.zeros((count, 2))
    for number, turn in np.ndindex(*rates.shape):
        offset = load.nbytes // count * number // transfer * transfer
        start = time.perf_counter()
        load.read(ring, range(offset, offset + region, transfer), transfer)
        rates[number, turn] = region / (time.perf_counter() - start)
    first, again = rates[1:].T  # the first region warms up
    found = {"first_bytes_per_second": first, "again_bytes_per_second": again, "ratio": again / first}
    return {name: float(np.median(values)) for name, values in found.items()}


def cache_warning(found: dict[str, Any] | None, directory: str) -> list[str]:
    """Return what to say about `read_twice`'s answer, if anything."""
    if found is None or found["ratio"] <= FASTER:
        return []
    return [
        f"{directory}: what was read before comes back {found['ratio'] - 1:.0%} faster: a cache answers "
        "instead of the drive. Reads of a file larger than that cache (--size) will be slower than shown here"
    ]


def sustained(
    pairs: Sequence[tuple[Load, Ring]], settings: Settings, job: Job, seconds: float
) -> dict[str, Any]:
    """Write (or mix) for `seconds`, round and round the files; return bandwidth over time.

    The result has `buckets` of a second or more, at most fifty (of a fifth, if the time is short); the
    rates of the first and of the last tenth; and, if the rate fell for good, after how many bytes.
    """
    tally = run_pass(pairs, settings, job, seconds)
    count = max(5, min(50, int(tally.seconds)))
    width = tally.seconds / count
    moved = [0] * count
    for at, nbytes in tally.timeline:
        moved[min(count - 1, int(at / width))] += nbytes
    rates = [nbytes / width for nbytes in moved]
    return {
        "pattern": job.pattern,
        "seconds": tally.seconds,
        "bytes_read": tally.read,
        "bytes_written": tally.written,
        "bytes_per_second": tally.rate,
        "bucket_seconds": width,
        "buckets": rates,
        **fall(rates, moved),
    }


def fall(rates: Sequence[float], moved: Sequence[int]) -> dict[str, Any]:
    """Return the first and the last rate, and the bytes moved before the rate fell for good (or None).

    It fell at the first bucket from which on nine in ten buckets, at least two, stay below `SLOWER`
    times the first rate: single slow seconds are not the end of a cache.
    """
    tenth = max(1, len(rates) // 10)
    first, last = statistics.median(rates[:tenth]), statistics.median(rates[-tenth:])
    slow = [rate < SLOWER * first for rate in rates]
    ends = (at for at in range(1, len(rates) - 1) if slow[at] and sum(slow[at:]) >= 0.9 * len(slow[at:]))
    after = next((sum(moved[:at]) for at in ends), None)
    return {"first_bytes_per_second": first, "last_bytes_per_second": last, "fell_after_bytes": after}
