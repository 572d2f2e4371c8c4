"""Runs cases, each in a child forked from this process, which has imported torch and run nothing in it.

A child that dies of a signal or does not end is a failure, like a result that differs from torch's.
`python -m tests.fuzz.run --seeds 0:200`; one case in detail: `--seeds SEED -v`.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .generate import generate

Json = dict[str, Any]

#: Seconds after which a child hangs.
LIMIT = 20.0


@dataclass
class Result:
    """What became of a case. `outcome`: "same", "typed:NAME", or of a failure "differs", "crash", "hang"."""

    case: Json = field(repr=False)
    outcome: str
    detail: str = ""
    at: Json = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.outcome != "same" and not self.outcome.startswith("typed:")

    def line(self) -> str:
        where = f"action {self.at.get('at')} {self.at.get('do')}" if self.at else "before the first action"
        return f"seed {self.case['seed']}  {self.case['family']}  {self.outcome} in {where}: {self.detail}\n"


def prepare() -> None:
    """Import what children need; start no thread."""
    import torch
    from torch import nn

    # Its first use imports torch's compiler, which takes more than a second.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    import infinity

    for name in infinity.__all__:  # their modules are imported when they are first used
        getattr(infinity, name)

    from . import program, worlds  # noqa: F401

    gc.freeze()  # a collection in a child would copy all pages that it shares with this process


def run_here(case: Json, folder: Path, tell: Callable[[Json], None]) -> str:
    """Run a case in this process, first in plain torch; return "same" or "typed:NAME"."""
    import torch

    from infinity.core.errors import InfinityError

    from .program import Log, Program
    from .worlds import OffloadedWorld, PlainWorld

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Gradients have the same bits in both, and the update rounds as ours does; factors are multiplied in
    # another order, and what a normalisation makes of the last bit shows.
    clips = case["config"]["max_grad_norm"] is not None or any(a.get("clip") for a in case["program"])
    tolerance = 1e-4 if clips else 1e-5
    recorded = Log(None, tolerance)
    Program(case, PlainWorld(case["tree"], case["config"], case["seed"]), recorded, lambda _: None).run()
    world = OffloadedWorld(case["tree"], case["config"], case["seed"], folder)
    outcome = Program(case, world, Log(recorded.entries, tolerance), tell).run()
    tell({"at": -1, "do": "close"})
    try:
        world.close()
    except InfinityError:
        if outcome == "same":
            raise
    return outcome


class Child:
    """One case in a process of its own."""

    def __init__(self, case: Json, folder: Path, *, verbose: bool = False) -> None:
        self.case, self.begun, self.at = case, time.monotonic(), {}  # type: tuple[Json, float, Json]
        self.folder = folder
        folder.mkdir()
        self._text = b""
        self._result: Json | None = None
        sys.stdout.flush()
        self.fd, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.fd)
            _child(case, folder, out, verbose)
        os.close(out)

    def read(self) -> Result | None:
        """Take what the child says; return the result when it has ended."""
        text = os.read(self.fd, 1 << 16)
        self._text += text
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "outcome" in said:
                self._result = said
            else:
                self.at = said
        if text:
            return None
        os.close(self.fd)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            outcome, detail = "crash", signal.Signals(number).name
            if number == signal.SIGKILL and self.late:
                outcome, detail = "hang", f"after {LIMIT:.0f} s"
        elif self._result is None:
            outcome, detail = "crash", f"exit code {os.WEXITSTATUS(status)}"
        else:
            outcome, detail = self._result["outcome"], self._result["detail"]
        shutil.rmtree(self.folder, ignore_errors=True)
        return Result(self.case, outcome, detail, self.at, time.monotonic() - self.begun)

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begun > LIMIT

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _child(case: Json, folder: Path, out: int, verbose: bool) -> None:
    """Run the case and end the process."""
    code = 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected of what this looks for
    try:
        if verbose:
            faulthandler.enable()
        else:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)

        def tell(what: Json) -> None:
            if verbose:
                sys.stderr.write(f"  {json.dumps(what)}\n")
            os.write(out, json.dumps(what).encode() + b"\n")

        try:
            outcome, detail = run_here(case, folder, tell), ""
        except BaseException as error:
            if verbose:
                traceback.print_exc()
            outcome, detail = "differs", str(error).splitlines()[0] if str(error) else ""
            if type(error).__name__ != "Mismatch":
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                outcome, detail = "raised", f"{type(error).__name__}: {detail} ({where})"
        tell({"outcome": outcome, "detail": detail})
        code = 0
    finally:
        os._exit(code)


def run_cases(cases: Iterable[Json], *, jobs: int, verbose: bool) -> Iterator[Result]:
    """Run cases, `jobs` at a time, and yield their results as they end."""
    waiting, children = iter(cases), {}  # type: Iterator[Json], dict[int, Child]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as base:
        try:
            while True:
                while len(children) < jobs and (case := next(waiting, None)) is not None:
                    child = Child(case, Path(base) / str(case["seed"]), verbose=verbose)
                    children[child.fd] = child
                if not children:
                    return
                ready, _, _ = select.select(list(children), [], [], 0.5)
                for fd in ready:
                    result = children[fd].read()
                    if result is not None:
                        del children[fd]
                        yield result
                for child in children.values():
                    if child.late:
                        child.kill()
        finally:
            for child in children.values():
                child.kill()
                os.waitpid(child.pid, 0)


def seeds_of(text: str) -> Iterator[int]:
    """Yield the seeds of "0:200,317"."""
    for part in text.split(","):
        first, _, last = part.partition(":")
        yield from range(int(first), int(last or int(first) + 1))


def main() -> int:
    """Run from the command line; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", default="0:200", help="FIRST:LAST, without the last, and single ones: 0:200,317"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-v", "--verbose", action="store_true", help="print each case and its actions")
    given = parser.parse_args()
    prepare()
    outcomes: Counter[str] = Counter()
    begun, slowest, failed = time.monotonic(), 0.0, False
    cases = map(generate, seeds_of(given.seeds))
    for result in run_cases(cases, jobs=given.jobs, verbose=given.verbose):
        outcomes[result.outcome] += 1
        slowest, failed = max(slowest, result.seconds), failed or result.failed
        if given.verbose:
            sys.stdout.write(json.dumps(result.case, indent=1) + "\n")
        if result.failed or given.verbose:
            sys.stdout.write(result.line())
            sys.stdout.flush()
    took = time.monotonic() - begun
    sys.stdout.write(f"{sum(outcomes.values())} cases in {took:.0f} s, the slowest {slowest:.1f} s: ")
    sys.stdout.write(", ".join(f"{n} {k}" for k, n in outcomes.most_common()) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
