"""fio as the measure: the same file, blocks, depth and pattern, in a process of its own; by its report."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
from typing import Final, NamedTuple

from .io_load import Job, Load, Settings

ENGINES: Final = ("libaio", "io_uring")
_MODES: Final = {"read": "read", "write": "write", "mixed": "rw"}


class FioResult(NamedTuple):
    """What fio reports; latencies from submission."""

    engine: str
    huge_pages: bool
    bytes_per_second: float
    cpu_seconds_per_gb: float
    latency_seconds: dict[str, float]


class FioFailed(Exception):
    """fio did not run to its end; the message says why."""


@functools.lru_cache(maxsize=1)
def find_fio() -> str | None:
    """Return the version of fio, or None if it is not installed."""
    try:
        asked = subprocess.run(["fio", "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def run_fio(
    load: Load, settings: Settings, job: Job, seconds: float, *, engine: str = ENGINES[0], huge: bool = False
) -> FioResult:
    """Run fio for `seconds` on the file of a load. What it writes there, the load does not know.

    Args:
        huge: with its buffers in transparent huge pages, as the engine's are (glibc ≥ 2.35): the drive
            is handed a few large segments instead of many pages. False: fio as it comes.

    Raises:
        FioFailed: it is not installed, does not end, or reports an error.
    """
    if job.pattern != "read":
        load.forget()
    command = [
        *("fio", "--name=bench", f"--filename={load.name}", "--allow_file_create=0"),
        *(f"--direct={int(load.file.direct)}", f"--ioengine={engine}", f"--iodepth={settings.queue_depth}"),
        f"--bs={settings.block_bytes}",
        f"--rw={_MODES[job.pattern]}",
        f"--size={load.nbytes // settings.block_bytes * settings.block_bytes}",
        f"--runtime={max(1, round(seconds * 1000))}ms",
        *("--time_based", "--thread", "--norandommap", "--randrepeat=0"),
        *("--percentile_list=50:99:99.9", "--output-format=json"),
    ]
    environment = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})}
    most = seconds + 60
    try:
        # On an interrupt `run` kills the child before it lets the exception through.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=most, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise FioFailed(f"it did not end within {most:.0f} s") from error
    except OSError as error:
        raise FioFailed("not installed" if isinstance(error, FileNotFoundError) else str(error)) from error
    said = next((line.strip() for line in done.stderr.splitlines() if line.strip()), "")
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, LookupError) as error:
        raise FioFailed(said or f"exit status {done.returncode}") from error
    if done.returncode or report.get("error"):
        raise FioFailed(said or f"error {report.get('error', done.returncode)}")
    ways = [report[way] for way in ("read", "write")]
    moved = sum(int(way["io_bytes"]) for way in ways)
    took = max(float(way["runtime"]) for way in ways) / 1000
    if not moved or not took:
        raise FioFailed("it moved nothing")
    busy = (float(report["usr_cpu"]) + float(report["sys_cpu"])) / 100 * float(report["job_runtime"]) / 1000
    tails: dict[str, float] = {}
    for way in ways:  # of a mixed job the worse of both
        for name, value in way.get("clat_ns", {}).get("percentile", {}).items():
            key = f"p{float(name):g}"
            tails[key] = max(tails.get(key, 0.0), float(value) * 1e-9)
    return FioResult(engine, huge, moved / took, busy / (moved / 1e9), tails)


def best_of_fio(
    load: Load, settings: Settings, job: Job, seconds: float
) -> tuple[FioResult | None, list[str]]:
    """Run fio with each of its engines, as it comes and with huge pages; return what the fastest reports, and
    why one could not run."""
    results, warnings = [], []
    for engine, huge in itertools.product(ENGINES, (False, True)):
        try:
            results.append(run_fio(load, settings, job, seconds, engine=engine, huge=huge))
        except FioFailed as error:
            pages = " and huge pages" if huge else ""
            warnings.append(f"fio with {engine}{pages} could not run: {error}")
    return max(results, key=lambda result: result.bytes_per_second, default=None), warnings
