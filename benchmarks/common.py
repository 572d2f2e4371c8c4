"""What the benchmarks share: options, what a machine is, results as JSON.

Contestants and their children are those of `infinity bench step`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this tree's infinity is measured, whatever is installed

from infinity.cli.bench.contest import Child, lines, tell  # noqa: E402
from infinity.cli.bench.step_case import start  # noqa: E402
from infinity.cli.bench.step_child import ADAMW, Model, Task  # noqa: E402
from infinity.cli.bench.step_rounds import median, paired  # noqa: E402
from infinity.cli.measure import scratch  # noqa: E402

__all__ = ["ADAMW", "Child", "Model", "Task", "lines", "median", "paired", "scratch", "start", "tell"]

#: GPT-2 with 203 M parameters, the size that the peers' figures are for.
GPT2 = {"layers": 12, "width": 1024, "vocabulary": 50257, "positions": 256}


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


def versions(*packages: str) -> dict[str, str | None]:
    """Return versions of this interpreter, of infinity's commit and of `packages`."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    found["commit"] = git.stdout.strip() or None
    return found


# -- results ----------------------------------------------------------------------------------


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    # So that a benchmark that is told to end takes its files and children along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=".", help="on the drive to measure; a folder is made in it")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (a median needs 7)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON"),
        help="an interpreter that has DeepSpeed and transformers",
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    for name in ("layers", "width", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, default=GPT2[name])
    parser.add_argument("--tokens", type=int, default=128, help="per step, in one sequence")
    return parser


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


# -- the model --------------------------------------------------------------------------------


def model_of(args: argparse.Namespace) -> Model:
    """Return the GPT-2 of transformers that the options describe."""
    return Model(
        kind="gpt2",
        layers=args.layers,
        width=args.width,
        heads=max(1, args.width // 64),
        vocab=args.vocabulary,
        context=args.positions,
    )
