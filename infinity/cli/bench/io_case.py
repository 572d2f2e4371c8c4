"""One line of `bench io`: a pattern at one setting on one set of directories, measured several times.

Order of one case: a pass that warms up and is not counted; then for each repeat a pass of ours and,
where it is compared, one of fio, in alternating order, so that a slow moment meets both; then a pass
of single blocks for latencies; then a sample of what was written is read back and compared.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from infinity.core.errors import ConfigError
from infinity.core.sizes import ALIGNMENT, GiB, MiB, format_size
from infinity.hardware.aio import Ring

from .adam import AdamWork, Beside, spread
from .io_fio import ENGINES, FioFailed, FioResult, find_fio, run_fio
from .io_load import Job, Load, Settings, Tally

_POLL: Final = 0.05
_SAMPLE: Final = 64 * MiB  # read back after a case that wrote


class Case(NamedTuple):
    """What one line measures. `directories` are indices of the loads."""

    job: Job
    settings: Settings
    directories: tuple[int, ...] = (0,)
    adam: bool = False


@dataclass(frozen=True)
class Effort:
    """How long and how often. Seconds of one pass; `fio`: compare with it."""

    seconds: float = 0.5
    repeats: int = 3
    fio: bool = True


def check_sizes(nbytes: int, settings: Settings, jobs: Sequence[Job]) -> str | None:
    """Return why `jobs` cannot run on a file of `nbytes`, or None: two transfers under way must never
    have the same place, or no one could say what the file holds."""
    for job in jobs:
        if nbytes < 2 * job.window(settings):
            return f"{format_size(2 * job.window(settings))} needed for {job.tickets(settings)} transfers"
    return None


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for a block or depth that no ring takes."""
    block, depth = settings.block_bytes, settings.queue_depth
    if block % ALIGNMENT or not 0 < block <= GiB or not 0 < depth <= 4096:
        raise ConfigError(
            "a ring cannot be opened with these sizes",
            expected="blocks of a multiple of 4096 bytes up to 1 GiB, a depth from 1 to 4096",
            found=f"block {block}, depth {depth}",
            cure="--block 1MiB --depth 32",
        )


def run_pass(
    pairs: Sequence[tuple[Load, Ring]],
    settings: Settings,
    job: Job,
    seconds: float,
    *,
    limit: int | None = None,
) -> Tally:
    """Run one pass on several directories at once, each with a thread of its own; add them up.

    It ends after `seconds`, or `limit` bytes per directory. CPU seconds are those of the rings and of
    the threads that feed them.
    """
    if job.pattern != "read":
        for load, _ in pairs:
            load.refresh(job.window(settings))
    before = sum(ring.stats().cpu_seconds for _, ring in pairs)
    stop, tallies, errors = threading.Event(), [], []
    until = time.perf_counter() + seconds

    def one(load: Load, ring: Ring) -> None:
        try:
            tallies.append(load.run(ring, settings, job, stop, until=until, limit=limit))
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=one, args=pair, name="infinity-bench", daemon=True) for pair in pairs]
    start = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_POLL)
    except BaseException:
        stop.set()
        for thread in threads:  # an interrupt; what is under way ends first, or at its deadline
            if thread.ident is not None:
                thread.join(5.0)
        raise
    if errors:
        raise errors[0]
    total = Tally(seconds=max(t.seconds for t in tallies))
    for tally in tallies:
        total.read += tally.read
        total.written += tally.written
        total.cpu_seconds += tally.cpu_seconds
        total.latencies += tally.latencies
        total.timeline += [(at - start, nbytes) for at, nbytes in tally.timeline]
    total.timeline.sort()
    total.cpu_seconds += sum(ring.stats().cpu_seconds for _, ring in pairs) - before
    return total


def measure_case(
    case: Case, loads: Sequence[Load], effort: Effort, work: AdamWork | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a case as JSON has them, and warnings.

    Args:
        work: what Adam updates beside the I/O, for cases that ask for it.
    """
    chosen = [loads[index] for index in case.directories]
    job, settings = case.job, case.settings
    warnings: list[str] = []
    verified = sum(load.verified for load in chosen)
    with contextlib.ExitStack() as stack:
        pairs = [(load, stack.enter_context(load.ring(settings))) for load in chosen]
        beside = Beside(work) if case.adam and work is not None else contextlib.nullcontext()
        peers = [_Fio(chosen, job, settings, effort, huge=huge) for huge in (False, True) if not case.adam]
        with beside:
            run_pass(pairs, settings, job, min(0.2, effort.seconds))
            submitted = _submits(pairs)
            tallies: list[Tally] = []
            for repeat in range(effort.repeats):
                for peer in peers if repeat % 2 == 0 else ():
                    peer.turn()
                tallies.append(run_pass(pairs, settings, job, effort.seconds))
                for peer in peers[::-1] if repeat % 2 == 1 else ():
                    peer.turn()
            histogram = [after - before for before, after in zip(submitted, _submits(pairs), strict=True)]
            singles = tallies
            if not job.scattered:
                single = job._replace(single=True)
                singles = [run_pass(pairs, settings, single, min(0.4, effort.seconds))]
        most = max(ring.stats().submit_max_seconds for _, ring in pairs)
        for load, ring in pairs:
            load.verify(ring, settings, job, _SAMPLE // len(pairs))
        backends = sorted({ring.backend for _, ring in pairs})
        reasons = sorted({ring.reason for _, ring in pairs})
    rates = [tally.rate for tally in tallies]
    moved = sum(t.read + t.written for t in tallies)
    result: dict[str, Any] = {
        "pattern": job.pattern,
        "order": "scattered" if job.scattered else "sequential",
        "adam_beside": case.adam,
        "directories": [load.directory for load in chosen],
        "backend": "+".join(backends),
        "backend_reason": "; ".join(reasons),
        "block_bytes": settings.block_bytes,
        "queue_depth": settings.queue_depth,
        "threads": settings.threads,
        "bytes_per_second": statistics.median(rates),
        "spread": spread(rates),
        "repeats": rates,
        "bytes_moved": moved,
        "latency_seconds": _percentiles([x for tally in singles for x in tally.latencies]),
        "cpu_seconds_per_gb": sum(t.cpu_seconds for t in tallies) / (moved / 1e9) if moved else None,
        "submit": {"less_than_2_to_the_i_microseconds": histogram, "max_seconds": most},
        "verified_bytes": sum(load.verified for load in chosen) - verified,
        "adam_parameters_per_second": (beside.parameters_per_second if isinstance(beside, Beside) else None),
        "fio": None,
        "fio_huge": None,
    }
    for peer in peers:
        result["fio_huge" if peer.huge else "fio"] = peer.compare(rates)
        warnings += peer.warnings
    return result, warnings


def _submits(pairs: Sequence[tuple[Load, Ring]]) -> list[int]:
    histograms = [ring.stats().submit_histogram for _, ring in pairs]
    return [sum(counts) for counts in zip(*histograms, strict=True)]


def _percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    if not values:
        return {"p50": None, "p99": None, "p99.9": None, "max": None, "blocks": 0}
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9]).tolist()
    return {"p50": p50, "p99": p99, "p99.9": p999, "max": max(values), "blocks": len(values)}


class _Fio:
    """fio's side of a case, as it comes or with its buffers in huge pages (`huge`). Only for one
    directory: "one file" is what fio is good at."""

    def __init__(
        self, loads: Sequence[Load], job: Job, settings: Settings, effort: Effort, *, huge: bool
    ) -> None:
        self.huge = huge
        self.wanted = effort.fio and find_fio() is not None and len(loads) == 1
        self.warnings: list[str] = []
        self._load, self._job, self._settings, self._seconds = loads[0], job, settings, effort.seconds
        self._engine: str | None = None
        self._results: list[FioResult] = []

    def turn(self) -> None:
        """Run it once; the first time with every engine, to stay with the best."""
        if not self.wanted:
            return
        tried: list[FioResult] = []
        for engine in ENGINES if self._engine is None else (self._engine,):
            try:
                tried.append(self._run(engine))
            except FioFailed as error:
                pages = " and huge pages" if self.huge else ""
                self.warnings.append(f"fio with {engine}{pages} could not run: {error}")
        if not tried:
            self.wanted = False
            return
        best = max(tried, key=lambda result: result.rate)
        self._engine = best.engine
        self._results.append(best)

    def _run(self, engine: str) -> FioResult:
        if self._job.pattern != "read":
            self._load.forget()
        return run_fio(
            self._load.name,
            nbytes=self._load.nbytes,
            pattern=self._job.pattern,
            scattered=self._job.scattered,
            engine=engine,
            block_bytes=self._settings.block_bytes,
            queue_depth=self._settings.queue_depth,
            direct=self._load.file.direct,
            seconds=self._seconds,
            huge=self.huge,
        )

    def compare(self, rates: Sequence[float]) -> dict[str, Any] | None:
        """Return fio's figures and how ours compare, pair by pair."""
        if not self._results:
            return None
        theirs = [result.rate for result in self._results]
        ratios = [ours / peer for ours, peer in zip(rates, theirs, strict=False)]
        return {
            "engine": self._engine,
            "bytes_per_second": statistics.median(theirs),
            "repeats": theirs,
            "percent": 100 * statistics.median(ratios),
            "spread": spread(ratios),
            "cpu_seconds_per_gb": statistics.median(r.cpu_seconds_per_gb for r in self._results),
            "latency_seconds": self._results[0].percentiles,
        }
