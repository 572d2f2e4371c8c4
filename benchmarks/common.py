"""What the benchmarks share: options, turns and their ratios, what a machine is, results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import runner
from gpt2 import GPT2
from runner import ROOT

sys.path.insert(0, str(ROOT))  # this tree's infinity is measured, whatever is installed

PACKAGES = ("torch", "transformers", "infinity-offload")


# -- turns --------------------------------------------------------------------------------------


def turns(names: Sequence[str], warmup: int, rounds: int) -> Iterator[tuple[str, bool]]:
    """Yield whose turn is next, and whether it counts: in every round each has one, in an order that
    rotates, so that a slow moment of the machine meets all of them."""
    for turn in range(warmup + rounds):
        at = turn % len(names)
        for name in [*names[at:], *names[:at]]:
            yield name, turn >= warmup


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast the first is: ratio of the medians, median of the ratios of the
    rounds, and the lowest and highest of those."""
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    return {
        "of_medians": round(statistics.median(theirs) / statistics.median(ours), 4),
        "median_of_rounds": round(statistics.median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "highest": round(max(ratios), 4),
    }


# -- what is measured on ----------------------------------------------------------------------


def drive(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is known of the drive under `directory`."""
    number = os.stat(directory).st_dev
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == f"{os.major(number)}:{os.minor(number)}":
                found["file_system"] = after.split()[0]
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with contextlib.suppress(OSError):
        block = block.resolve(strict=True)
        if (block / "partition").exists():
            block = block.parent
        found["device"] = block.name
        for key, path in (
            ("model", "device/model"),
            ("rotational", "queue/rotational"),
            ("scheduler", "queue/scheduler"),
            ("max_request_kb", "queue/max_sectors_kb"),
            ("blocks_of_512", "size"),
        ):
            with contextlib.suppress(OSError):
                found[key] = (block / path).read_text().strip()
    found["free_bytes"] = shutil.disk_usage(directory).free
    return found


def hardware(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return what this machine is."""
    cpu = platform.processor() or "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "transparent_hugepage": huge.read_text().strip() if huge.exists() else None,
        "load_average_at_start": os.getloadavg()[0],
    }
    if directory is not None:
        found["drive"] = drive(directory)
    return found


def versions() -> dict[str, str | None]:
    """Return versions of this interpreter, of infinity's commit and of the packages that are measured."""
    found: dict[str, str | None] = {**dict.fromkeys(PACKAGES), **runner.versions(*PACKAGES)}
    return {**found, "commit": commit_of(ROOT)}


def commit_of(tree: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` if it was changed; None: it is none."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() or None


# -- options, results -------------------------------------------------------------------------


def arguments(description: str | None, *, directory: bool = True) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes; `directory`: and what those on a drive take."""
    # So that a benchmark that is told to end takes its files and children along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if directory:
        parser.add_argument(
            "--directory", default=".", help="on the drive to measure; a folder is made in it"
        )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON"),
        help="an interpreter that has DeepSpeed and transformers",
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser


def step_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what the benchmarks of steps take besides."""
    parser = arguments(description)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (a median needs 7)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those")
    for name in ("layers", "width", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, default=getattr(GPT2, name))
    parser.add_argument("--tokens", type=int, default=128, help="per step, in one sequence")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a start or a turn")
    return parser


def model_of(args: argparse.Namespace) -> GPT2:
    """Return the model that the options describe."""
    return GPT2(**{name: getattr(args, name) for name in ("layers", "width", "vocabulary", "positions")})


def publish(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result with the command and the time; without a path only what was printed stays."""
    if path is None:
        return
    result = {
        "benchmark": result.pop("benchmark"),
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *_public(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _public(words: Sequence[str]) -> list[str]:
    """Return the command line without the paths of this machine."""
    return [os.path.basename(w.rstrip("/")) if w.startswith("/") else w for w in words]
