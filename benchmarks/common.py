"""What the benchmarks share: options, turns and their ratios, what a machine is, results as JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import runner
from gpt2 import GPT2
from runner import ROOT

sys.path.insert(0, str(ROOT))  # this tree's infinity is measured, whatever is installed

PACKAGES = ("torch", "transformers", "infinity-offload")
T = TypeVar("T")


# -- turns --------------------------------------------------------------------------------------


def turns(names: Sequence[str], warmup: int, rounds: int) -> Iterator[tuple[str, bool]]:
    """Yield whose turn is next, and whether it counts: in every round each has one, in an order that
    rotates, so that a slow moment of the machine meets all of them."""
    for turn in range(warmup + rounds):
        at = turn % len(names)
        for name in [*names[at:], *names[:at]]:
            yield name, turn >= warmup


def race(calls: Mapping[str, Callable[[], T]], warmup: int, rounds: int) -> dict[str, list[T]]:
    """Return what each answered in the rounds that count, taking turns."""
    answers: dict[str, list[T]] = {name: [] for name in calls}
    for name, counts in turns(list(calls), warmup, rounds):
        answer = calls[name]()
        if counts:
            answers[name].append(answer)
    return answers


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


def hardware(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return what this machine is, with `directory` what that stands on, too."""
    from infinity.cli.bench.io import facts_of

    cpu = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    drive = {} if directory is None else facts_of(os.fspath(directory))
    drive.pop("path", None)
    return {
        "cpu": cpu[1] if cpu is not None else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "transparent_hugepage": huge.read_text().strip() if huge.exists() else None,
        "load_average_at_start": os.getloadavg()[0],
        **({"drive": drive} if drive else {}),
    }


def versions() -> dict[str, str | None]:
    """Return versions of this interpreter, of infinity's commit and of the packages that are measured."""
    return {**dict.fromkeys(PACKAGES), **runner.versions(*PACKAGES), "commit": commit_of(ROOT)}


def commit_of(tree: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` if it was changed, or why nobody knows it; None: it is
    none."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError as error:  # a measurement is worth no less on a machine that has no git
        return f"unknown: git cannot be run ({error.strerror})"
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
    parser.add_argument("--repeated", action="store_true", help="draw few of the values (values.py)")
    parser.add_argument("--tokens", type=int, default=128, help="per step, in one sequence")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a start or a turn")
    return parser


def model_of(args: argparse.Namespace) -> GPT2:
    """Return the model that the options describe."""
    names = ("layers", "width", "vocabulary", "positions", "repeated")
    return GPT2(**{name: getattr(args, name) for name in names})


def read_and_write(engine: Any, chunks: Sequence[Any], sizes: Sequence[int], depth: int) -> None:
    """Read each chunk's state by the engine's store and write it back, `depth` at once; `sizes`: of their
    leases. What was begun first is waited for first."""
    store = engine.store
    todo = deque(zip(chunks, sizes, strict=True))
    under_way: deque[tuple[Any, Any, Any, bool]] = deque()
    while todo or under_way:
        lease = None
        if todo and len(under_way) < depth:
            lease = engine.pool.try_lease("update", todo[0][1])
        if lease is not None:
            chunk, _ = todo.popleft()
            under_way.append((chunk, lease, store.read(chunk.id, "state", lease), False))
            continue
        chunk, lease, transfer, written = under_way.popleft()
        transfer.wait()
        if written:
            lease.release()
        else:
            under_way.append((chunk, lease, store.write(chunk.id, "state", lease), True))
    store.wait_written()


def publish(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result with the command and the time; without a path only what was printed stays."""
    if path is None:
        return
    script, *words = sys.argv
    public = [os.path.basename(w.rstrip("/")) if w.startswith("/") else w for w in words]  # no path of ours
    result = {
        "benchmark": result.pop("benchmark"),
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *public]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
