"""What the benchmarks share: options, turns and their ratios, what a machine is, results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import runner
from children import ChildError
from gpt2 import GPT2
from runner import ROOT

sys.path.insert(0, str(ROOT))  # this tree's infinity is measured, whatever is installed

PACKAGES = ("torch", "transformers", "infinity-offload")


def scratch(directory: str) -> tempfile.TemporaryDirectory[str]:
    """Lend a directory of its own in `directory`; it is removed afterwards, whatever it holds."""
    return tempfile.TemporaryDirectory(prefix="infinity-", dir=directory, ignore_cleanup_errors=True)


# -- turns --------------------------------------------------------------------------------------


def turns(names: Sequence[str], warmup: int, rounds: int) -> Iterator[tuple[str, bool]]:
    """Yield whose turn is next, and whether it counts: in every round each has one, in an order that
    rotates, so that a slow moment of the machine meets all of them (of two: ABBA)."""
    for turn in range(warmup + rounds):
        at = turn % len(names)
        for name in [*names[at:], *names[:at]]:
            yield name, turn >= warmup


class Race(contextlib.AbstractContextManager["Race"]):
    """Contestants that take turns, and what came of them.

    A contestant is a call, or a child process that is asked. A child that does not start, or ends, is part of
    the result, with its error; the others go on. The children end with the race.

    Args:
        calls: contestants; what a call raises ends the race.
        title: before their names, where it says whose turn it is.

    Attributes:
        samples: what each answered in the rounds that count.
        first: what each answered first, in whichever round.
        ready: what each child said before its first turn.
        errors: what came of children that failed.
    """

    def __init__(
        self, calls: Mapping[str, Callable[[], Any]] | None = None, *, title: str | None = None
    ) -> None:
        self.samples: dict[str, list[Any]] = {}
        self.first: dict[str, Any] = {}
        self.ready: dict[str, Any] = {}
        self.errors: dict[str, dict[str, Any]] = {}
        self._title = title
        self._children: dict[str, Any] = {}
        self._calls = dict(calls or {})

    def start(
        self, name: str, start: Callable[[], Any], ask: Callable[[Any], Any] = lambda child: child.ask("1")
    ) -> None:
        """Have a child take part, as `start` returns it (a `Child`, or what has its `ready` and `close`).

        Args:
            ask: has it take a turn; returns the answer.
        """
        if self._title is not None:
            print(f"{self._title}: {name} starts", file=sys.stderr, flush=True)
        try:
            child = self._children[name] = start()
        except (ChildError, OSError) as error:
            self._failed(name, error)
        else:
            self.ready[name] = child.ready
            self._calls[name] = functools.partial(ask, child)

    def run(self, warmup: int, rounds: int) -> dict[str, list[Any]]:
        """Have all take their turns; return the samples."""
        self.samples = {name: [] for name in self._calls}
        for name, counts in turns(list(self._calls), warmup, rounds):
            if name not in self._calls:
                continue
            if self._title is not None:
                print(f"{self._title}: {name}", file=sys.stderr)
            try:
                answer = self._calls[name]()
            except (ChildError, OSError) as error:
                if name not in self._children:
                    raise
                self._failed(name, error)
                continue
            self.first.setdefault(name, answer)
            if counts:
                self.samples[name].append(answer)
        return self.samples

    def _failed(self, name: str, error: ChildError | OSError) -> None:
        self.errors[name] = {"error": str(error), "exit_status": None, "log": []}
        if isinstance(error, ChildError):
            self.errors[name] = {"error": error.reason, "exit_status": error.code, "log": error.said[-25:]}
        print(f"{name} failed: {self.errors[name]['error'][:400]}", file=sys.stderr)
        for kept in (self._calls, self.samples, self.first):
            kept.pop(name, None)
        if name in self._children:
            self._children.pop(name).close()

    def __exit__(self, *_: object) -> None:
        for child in self._children.values():
            child.close()


def bounds(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bounds by order statistics: the k-th smallest and the k-th largest, with
    the largest k for which the median of what the ratios are drawn from lies outside in at most 5 % of all
    runs, whatever their distribution (2 of 9; with fewer than 6 the extremes stand for them)."""
    ordered = sorted(ratios)
    count, rank, tail, term = len(ordered), 0, 0.0, 0.5 ** len(ordered)
    while rank < count and tail + term <= 0.025:  # of Binomial(count, 1/2), up to `rank`
        tail += term
        term *= (count - rank) / (rank + 1)
        rank += 1
    return statistics.median(ordered), ordered[max(0, rank - 1)], ordered[min(count - 1, count - rank)]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return how many times as fast the first is, of seconds: the median of the ratios of the rounds, its
    `bounds`, the ratio of the medians, and all ratios."""
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    middle, low, high = bounds(ratios)
    return {
        "ratio": round(middle, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "of_medians": round(statistics.median(theirs) / statistics.median(ours), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def ratio_text(ratio: Mapping[str, Any], wanted: float | None = None) -> str:
    """Return what is `paired` in a line: how many times as fast, with its bounds."""
    target = "" if wanted is None else f"  (wanted ≥ {wanted})"
    return f"{ratio['ratio']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}){target}"


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
    """Write a result with the command and the time; without a path only what was printed stays. Whatever ends
    this process, the file has a whole result, this one or that of before."""
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
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
