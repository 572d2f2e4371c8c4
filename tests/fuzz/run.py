"""Runs cases, each in a child that has run nothing before.

A child that dies of a signal or does not end is a failure, like a result that differs from torch's.
`python -m tests.fuzz.run --seeds 0:200`; one case in detail: `--case SEED -v`; smaller: `--shrink SEED`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import children
from .generate import fitted, generate

Json = dict[str, Any]

#: Seconds after which a child hangs.
LIMIT = 20.0


@dataclass
class Result:
    """What became of a case. `outcome`: "same", "typed:NAME", or of a failure "differs", "raised", "crash",
    "hang"; `at`: the action that was the last one to begin."""

    case: Json = field(repr=False)
    outcome: str
    detail: str = ""
    at: Json = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome != "same" and not self.outcome.startswith("typed:")

    def line(self) -> str:
        where = f"action {self.at.get('at')} {self.at.get('do')}" if self.at else "before the first action"
        case = f"seed {self.case['seed']}  {self.at.get('family', self.case['family'])}"
        return f"{case}  {self.outcome} in {where}: {self.detail}"


# -- in a child -----------------------------------------------------------------------------------

_AROUND = ("outside", "outside-reentrant")  # recomputed blocks are called without autocast


def run_here(case: Json, folder: Path, tell: Callable[[Json], None]) -> str:
    """Run a case in this process, first in plain torch; return "same" or "typed:NAME"."""
    import torch

    from .program import ALLOWED, Log, Mismatch, Program
    from .worlds import OffloadedWorld, PlainWorld

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Gradients have the same bits in both, and the update rounds as ours does; factors are multiplied in
    # another order, and what a normalisation makes of the last bit shows.
    clips = case["config"]["max_grad_norm"] is not None or any(a.get("clip") for a in case["program"])
    tolerance = (1e-4, 1e-4) if clips else (1e-5, 1e-5)
    recorded = Log(None, tolerance)
    Program(case, PlainWorld(case["tree"], case["config"], case["seed"]), recorded, lambda _: None).run()
    from infinity.core.errors import InfinityError

    try:
        world = OffloadedWorld(case["tree"], case["config"], case["seed"], folder)
    except InfinityError as error:
        if case["tree"]["tied"] in ALLOWED["wrap"].values() and type(error).__name__ in ALLOWED["wrap"]:
            return f"typed:{type(error).__name__}"
        raise
    if case["tree"]["tied"] == "storage":
        raise Mismatch("parameters that share storage were taken over")
    outcome = Program(case, world, Log(recorded.entries, tolerance), tell).run()
    cast = any(b.get("autocast") and b["recompute"] not in _AROUND for b in case["tree"]["blocks"])
    if case["family"] == "autocast" and cast and outcome == "same":
        raise Mismatch("autocast inside a forward was accepted")
    tell({"at": -1, "do": "close", "family": case["family"]})
    try:
        world.close()
    except InfinityError:
        if outcome == "same":
            raise
    return outcome


def _child(case: Json, folder: Path) -> None:
    """Run the case, print a line of JSON for each action and the result, and end the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected of what this looks for

    def tell(what: Json) -> None:
        os.write(1, json.dumps(what).encode() + b"\n")

    try:
        outcome, detail = run_here(case, folder, tell), ""
    except BaseException as error:
        traceback.print_exc()
        outcome, detail = "differs", str(error).splitlines()[0] if str(error) else ""
        if type(error).__name__ != "Mismatch":
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            outcome, detail = "raised", f"{type(error).__name__}: {detail} ({where})"
    tell({"outcome": outcome, "detail": detail})
    os._exit(0)


# -- children ---------------------------------------------------------------------------------------


def run_one(case: Json, *, verbose: bool = False) -> Result:
    """Run one case in a child."""
    arguments = [sys.executable, "-m", "tests.fuzz.run", "--child", json.dumps(case)]
    imports = ("torch.utils.checkpoint", "tests.fuzz.program")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            done = children.run([*arguments, folder], timeout=LIMIT, cwd=children.ROOT, imports=imports)
        except subprocess.TimeoutExpired as late:
            code, said, trace = -signal.SIGKILL, late.output or b"", b""
        else:
            code, said, trace = done.returncode, done.stdout, done.stderr
    lines = [json.loads(line) for line in said.splitlines()]
    if verbose:
        sys.stderr.write("".join(f"  {json.dumps(line)}\n" for line in lines) + trace.decode())
    result = lines.pop() if lines and "outcome" in lines[-1] else {}
    at = lines[-1] if lines else {}
    if code == 0 and result:
        return Result(case, result["outcome"], result["detail"], at)
    if code == -signal.SIGKILL:
        return Result(case, "hang", f"after {LIMIT:.0f} s", at)
    detail = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Result(case, "crash", detail, at)


def run_cases(cases: Iterable[Json], *, jobs: int = 2, seconds: float | None = None) -> Iterator[Result]:
    """Run cases, `jobs` at a time, and yield their results as they end; stop beginning after `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds
    running: set[Future[Result]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        for case in cases:
            if len(running) == jobs:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in done)
            if end is not None and time.monotonic() > end:
                break
            running.add(pool.submit(run_one, case))
        yield from (each.result() for each in as_completed(running))


# -- shrinking ----------------------------------------------------------------------------------

#: The simplest values of the configuration, of the tree and of each of its blocks.
_EASY = {
    **{"dtype": "fp32", "update": "sync", "max_grad_norm": None, "activations": "device", "init": False},
    **dict.fromkeys(("parameters", "optimizer_state", "gradients"), "host"),
    **{"device_memory": "large", "host_memory": "large", "prefetch": True, "read_ahead": False, "depth": 1},
    **{"optimizer": "AdamW", "state_dtype": "fp32", "split_master": False, "state_fp32": [], "groups": 1},
    "ending": "close",
}
_TREE = {"tied": None, "direct": False, "output": "tensor", "banks": []}
_BLOCK = {"kind": "mlp", "output": "tensor", "recompute": None}


def smaller(case: Json) -> Iterator[Json]:
    """Yield cases that are a little simpler."""
    for i in range(len(case["program"])):
        new = copy.deepcopy(case)
        new["program"].pop(i)
        yield new
    count = len(case["tree"]["blocks"])
    for i in range(count if count > 1 else 0):
        new = copy.deepcopy(case)
        new["tree"]["blocks"].pop(i)
        new["tree"]["order"] = [j - (j > i) for j in case["tree"]["order"] if j != i]
        yield new

    def parts(of: Json) -> list[tuple[Json, Json]]:
        return [(of["config"], _EASY), (of["tree"], _TREE), *((b, _BLOCK) for b in of["tree"]["blocks"])]

    for i, (part, easy) in enumerate(parts(case)):
        for key, value in easy.items():
            if part[key] != value:
                new = copy.deepcopy(case)
                parts(new)[i][0][key] = value
                yield new


def shrink(case: Json) -> Result:
    """Return the smallest case found that fails with the same outcome in an action of the same kind."""
    best = run_one(case)
    found = best.failed
    while found:
        found = False
        for result in map(run_one, smaller(best.case)):
            if result.outcome == best.outcome and result.at.get("do") == best.at.get("do"):
                best, found = result, True
                break
    return best


# -- the command --------------------------------------------------------------------------------


def main() -> int:
    """Run from the command line; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="FIRST:LAST, without the last")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="begin no case after this many seconds")
    parser.add_argument("--set", action="append", default=[], help="KEY=JSON: a setting of every case")
    parser.add_argument("--case", type=int, help="run this seed alone and print the case")
    parser.add_argument("--shrink", type=int, help="run this seed and look for a smaller case that fails")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    if given.child is not None:
        _child(json.loads(given.child[0]), Path(given.child[1]))
    fixed = {key: json.loads(value) for key, _, value in (s.partition("=") for s in given.set)}

    def made(seed: int) -> Json:
        case = generate(seed)
        case["config"].update(fixed)
        return fitted(case)

    say = sys.stdout.write
    if given.case is not None or given.shrink is not None:
        alone = given.shrink is None
        result = run_one(made(given.case), verbose=given.verbose) if alone else shrink(made(given.shrink))
        say(json.dumps(result.case, indent=1) + "\n" + result.line() + "\n")
        return int(result.failed)
    outcomes: Counter[str] = Counter()
    failed = 0
    for result in run_cases(
        map(made, range(*map(int, given.seeds.split(":")))), **{"jobs": given.jobs, "seconds": given.seconds}
    ):
        outcomes[result.outcome] += 1
        failed += result.failed
        if result.failed or given.verbose:
            say(result.line() + "\n")
            sys.stdout.flush()
    say(f"{sum(outcomes.values())} cases: " + ", ".join(f"{n} {k}" for k, n in outcomes.most_common()) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
