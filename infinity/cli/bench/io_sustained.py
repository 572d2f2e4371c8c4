"""What only time or repetition shows: a write cache that fills up, and a read cache that answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

from infinity.core.sizes import MiB, format_size
from infinity.hardware.aio import Ring

from .io_case import run_pass
from .io_load import Job, Load, Settings

FASTER: Final = 1.2  #: a second read that is faster than a first one by more is a cache's
SLOWER: Final = 0.8  #: of the first rate: what counts as the end of a write cache
_REGION: Final = 32 * MiB
_REGIONS: Final = 9


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
    fresh: list[float] = []
    again: list[float] = []
    for number in range(count):
        offset = load.nbytes // count * number // transfer * transfer
        for rates in (fresh, again):
            start = time.perf_counter()
            tickets = [
                ring.read(load.file, offset + at, load.mapping.io_address + at, transfer)
                for at in range(0, region, transfer)
            ]
            for ticket in tickets:
                ticket.wait()
            rates.append(region / (time.perf_counter() - start))
    ratios = [b / a for a, b in zip(fresh[1:], again[1:], strict=True)]  # the first region warms up
    return {
        "first_bytes_per_second": statistics.median(fresh[1:]),
        "again_bytes_per_second": statistics.median(again[1:]),
        "ratio": statistics.median(ratios),
    }


def cache_warning(found: dict[str, Any] | None, directory: str) -> list[str]:
    """Return what to say about `read_twice`'s answer, if anything."""
    if found is None or found["ratio"] <= FASTER:
        return []
    return [
        f"{directory}: what was read before comes back {found['ratio'] - 1:.0%} faster: a cache answers "
        "instead of the drive. Reads of a file larger than that cache (--size) will be slower than shown here"
    ]


def sustained(
    pairs: Sequence[tuple[Load, Ring]],
    settings: Settings,
    job: Job,
    seconds: float,
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
    after: int | None = None
    for index in range(1, len(rates) - 1):
        slow = [rate < SLOWER * first for rate in rates[index:]]
        if slow[0] and sum(slow) >= 0.9 * len(slow):
            after = sum(moved[:index])
            break
    return {"first_bytes_per_second": first, "last_bytes_per_second": last, "fell_after_bytes": after}


def sustained_text(found: dict[str, Any]) -> str:
    """Return what a sustained run shows, in a sentence or two."""
    first, last = (found[f"{when}_bytes_per_second"] / 1e9 for when in ("first", "last"))
    moved = f"{format_size(found['bytes_written'])} were written"
    if found["bytes_read"]:
        moved = f"{format_size(found['bytes_read'])} were read and {moved}"
    wrote = f"{moved} in {found['seconds']:.0f} s: first {first:.2f} GB/s, last {last:.2f} GB/s."
    if found["fell_after_bytes"] is None:
        return f"{wrote} The rate did not fall for good."
    after = format_size(found["fell_after_bytes"])
    return f"{wrote} The rate fell for good after {after}: a write cache was full. Plan with the last figure."
