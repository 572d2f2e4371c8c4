"""fio as the measure: the same file, blocks, depth and pattern, in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from typing import Any, Final, NamedTuple

ENGINES: Final = ("libaio", "io_uring")
_MODES: Final = {"read": "read", "write": "write", "mixed": "rw"}


class FioResult(NamedTuple):
    """What fio reports. `rate` in bytes per second; latencies in seconds, from submission."""

    engine: str
    rate: float
    cpu_seconds_per_gb: float
    percentiles: dict[str, float]


class FioFailed(Exception):
    """fio did not run to its end; the message says why."""


@functools.lru_cache(maxsize=1)
def find_fio() -> tuple[str, str] | None:
    """Return the path and the version of fio, or None if it is not installed."""
    path = shutil.which("fio")
    if path is None:
        return None
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (path, asked.stdout.strip()) if asked.returncode == 0 else None


def run_fio(
    filename: str,
    *,
    nbytes: int,
    pattern: str,
    scattered: bool,
    engine: str,
    block_bytes: int,
    queue_depth: int,
    direct: bool,
    seconds: float,
    huge: bool = False,
) -> FioResult:
    """Run fio for `seconds` on one existing file.

    Args:
        pattern: ``read``, ``write`` or ``mixed`` (half of each).
        huge: with its buffers in transparent huge pages, as the engine's are (glibc ≥ 2.35): the drive
            is handed a few large segments instead of many pages. False: fio as it comes.

    Raises:
        FioFailed: it is not installed, does not end, or reports an error.
    """
    found = find_fio()
    if found is None:
        raise FioFailed("not installed")
    command = [
        found[0],
        "--name=bench",
        f"--filename={filename}",
        "--allow_file_create=0",
        f"--direct={int(direct)}",
        f"--ioengine={engine}",
        f"--iodepth={queue_depth}",
        f"--bs={block_bytes}",
        f"--rw={'rand' if scattered else ''}{_MODES[pattern]}",
        f"--size={nbytes // block_bytes * block_bytes}",
        "--time_based",
        f"--runtime={max(1, round(seconds * 1000))}ms",
        "--thread",
        "--norandommap",
        "--randrepeat=0",
        "--percentile_list=50:99:99.9",
        "--output-format=json",
    ]
    try:
        # On an interrupt `run` kills the child before it lets the exception through.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
            env={**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})},
        )
    except subprocess.TimeoutExpired as error:
        raise FioFailed(f"it did not end within {seconds + 60:.0f} s") from error
    except OSError as error:
        raise FioFailed(str(error)) from error
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
        job = report["jobs"][0]
    except (ValueError, LookupError) as error:
        raise FioFailed(_first_line(done.stderr) or f"exit status {done.returncode}") from error
    if done.returncode or job.get("error"):
        raise FioFailed(_first_line(done.stderr) or f"error {job.get('error', done.returncode)}")
    return _parse(engine, job)


def _parse(engine: str, job: dict[str, Any]) -> FioResult:
    moved = sum(int(job[way]["io_bytes"]) for way in ("read", "write"))
    seconds = max(float(job[way]["runtime"]) for way in ("read", "write")) / 1000
    if not moved or not seconds:
        raise FioFailed("it moved nothing")
    busy = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100 * float(job["job_runtime"]) / 1000
    tails: dict[str, float] = {}
    for way in ("read", "write"):  # of a mixed job the worse of both
        for name, value in job[way].get("clat_ns", {}).get("percentile", {}).items():
            key = f"p{float(name):g}"
            tails[key] = max(tails.get(key, 0.0), float(value) * 1e-9)
    return FioResult(engine, moved / seconds, busy / (moved / 1e9), tails)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
