"""Runs cases, each in a child forked from this process, which has imported torch and run nothing in it.

A child that dies of a signal or does not end is a failure, like a result that differs from torch's.
`python -m tests.fuzz.run --seeds 0:200`; one case in detail: `--case SEED -v`; smaller: `--shrink SEED`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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

from .generate import fitted, generate

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

    @property
    def family(self) -> str:
        """What the failure is put down to: the action that failed, or the case's theme."""
        own: str = self.at.get("family", "")
        theme: str = self.case["family"]
        return own if own in SPECIFIC or (theme == "plain" and own) else theme

    def line(self) -> str:
        where = f"action {self.at.get('at')} {self.at.get('do')}" if self.at else "before the first action"
        return f"seed {self.case['seed']}  {self.family}  {self.outcome} in {where}: {self.detail}"


#: Actions that are a family of their own beside the theme that they belong to.
SPECIFIC = {"side-channel-late", "grad-move"}


def prepare(tree: str | None = None) -> None:
    """Import what children need; start no thread."""
    if tree is not None:
        sys.path.insert(0, tree)
    import torch
    import torch.utils.checkpoint
    from torch import nn

    # Its first use imports torch's compiler, which takes more than a second.
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    import infinity

    for name in (
        "init",
        "wrap",
        "gathered",
        "metrics",
    ):  # their modules are imported when they are first used
        getattr(infinity, name)

    from . import program, worlds  # noqa: F401

    gc.freeze()  # a collection in a child would copy all pages that it shares with this process


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
            import faulthandler

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


def run_cases(cases: Iterable[Json], *, jobs: int = 2, seconds: float | None = None) -> Iterator[Result]:
    """Run cases, `jobs` at a time, and yield their results as they end; stop beginning after `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds
    waiting, children = iter(cases), {}  # type: Iterator[Json], dict[int, Child]
    count = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as base:
        try:
            while True:
                while len(children) < jobs and (end is None or time.monotonic() < end):
                    case = next(waiting, None)
                    if case is None:
                        break
                    count += 1
                    child = Child(case, Path(base) / str(count))
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


def run_one(case: Json, *, verbose: bool = False) -> Result:
    """Run one case in a child."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as base:
        child = Child(case, Path(base) / "case", verbose=verbose)
        while True:
            ready, _, _ = select.select([child.fd], [], [], 0.5)
            if not ready and child.late:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            if ready:
                result = child.read()
                if result is not None:
                    return result


# -- shrinking ----------------------------------------------------------------------------------


def smaller(case: Json) -> Iterator[Json]:
    """Yield cases that are a little simpler."""

    def changed(change: Callable[[Json], None]) -> Json:
        new = copy.deepcopy(case)
        change(new)
        return new

    for i in range(len(case["program"])):
        yield changed(lambda c, i=i: c["program"].pop(i))  # type: ignore[misc]
    tree = case["tree"]
    if len(tree["blocks"]) > 1:
        for i in range(len(tree["blocks"])):

            def without(c: Json, i: int = i) -> None:
                c["tree"]["blocks"].pop(i)
                c["tree"]["order"] = [j - (j > i) for j in c["tree"]["order"] if j != i]

            yield changed(without)
    plain = {"kind": "mlp", "output": "tensor", "recompute": None}
    for i, block in enumerate(tree["blocks"]):
        for key, value in plain.items():
            if block[key] != value:
                yield changed(lambda c, i=i, k=key, v=value: c["tree"]["blocks"][i].update({k: v}))  # type: ignore[misc]
    for key, value in {"tied": None, "direct": False, "output": "tensor", "banks": []}.items():
        if tree[key] != value:
            yield changed(lambda c, k=key, v=value: c["tree"].update({k: v}))  # type: ignore[misc]
    if tree["order"] != list(range(len(tree["blocks"]))):
        yield changed(lambda c: c["tree"].update(order=list(range(len(c["tree"]["blocks"])))))
    easy = {
        "dtype": "fp32",
        "update": "sync",
        "parameters": "host",
        "optimizer_state": "host",
        "gradients": "host",
        "device_memory": "large",
        "host_memory": "large",
        "max_grad_norm": None,
        "activations": "device",
        "optimizer": "AdamW",
        "state_dtype": "fp32",
        "split_master": False,
        "state_fp32": [],
        "groups": 1,
        "init": False,
        "ending": "close",
        "prefetch": True,
        "read_ahead": False,
        "depth": 1,
    }
    for key, value in easy.items():
        if case["config"][key] != value:
            yield changed(lambda c, k=key, v=value: c["config"].update({k: v}))  # type: ignore[misc]
    for i, action in enumerate(case["program"]):
        for key in ("micro", "clip", "zero", "grads", "partial", "aux", "third", "twice"):
            if key in action:
                yield changed(lambda c, i=i, k=key: c["program"][i].pop(k))  # type: ignore[misc]


def shrink(case: Json) -> Result:
    """Return the smallest case found that fails with the same outcome in an action of the same kind."""
    best = run_one(case)
    if not best.failed:
        return best
    found = True
    while found:
        found = False
        for candidate in smaller(best.case):
            result = run_one(candidate)
            alike = result.outcome == best.outcome and result.at.get("do") == best.at.get("do")
            if result.failed and alike:
                best, found = result, True
                break
    return best


# -- the command --------------------------------------------------------------------------------


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
    parser.add_argument("--seconds", type=float, help="begin no case after this many seconds")
    parser.add_argument("--tree", help="a directory with another version of the package `infinity`")
    parser.add_argument("--family", help="only cases of this family")
    parser.add_argument("--set", action="append", default=[], help="KEY=JSON: a setting of every case")
    parser.add_argument("--case", type=int, help="run this seed alone and print the case")
    parser.add_argument("--shrink", type=int, help="run this seed and look for a smaller case that fails")
    parser.add_argument("--json", help="a file with a case: run it alone (or `-`)")
    parser.add_argument("-v", "--verbose", action="store_true")
    given = parser.parse_args()
    fixed = {key: json.loads(value) for key, _, value in (s.partition("=") for s in given.set)}

    def made(seed: int) -> Json:
        case = generate(seed)
        case["config"].update(fixed)
        return fitted(case)

    prepare(given.tree)
    say = sys.stdout.write
    if given.case is not None or given.shrink is not None or given.json:
        if given.json:
            case = json.loads(sys.stdin.read() if given.json == "-" else Path(given.json).read_text())
        else:
            case = made(given.case if given.case is not None else given.shrink)
        result = shrink(case) if given.shrink is not None else run_one(case, verbose=given.verbose)
        say(json.dumps(result.case, indent=1) + "\n" + result.line() + "\n")
        return int(result.failed)
    cases = (c for c in map(made, seeds_of(given.seeds)) if given.family in (None, c["family"]))
    outcomes: Counter[str] = Counter()
    families: Counter[str] = Counter()
    total: Counter[str] = Counter()
    begun, slowest = time.monotonic(), 0.0
    for result in run_cases(cases, jobs=given.jobs, seconds=given.seconds):
        outcomes[result.outcome] += 1
        total[result.case["family"]] += 1
        slowest = max(slowest, result.seconds)
        if result.failed:
            families[result.family] += 1
        if result.failed or given.verbose:
            say(result.line() + "\n")
            sys.stdout.flush()
    say(f"{sum(outcomes.values())} cases in {time.monotonic() - begun:.0f} s, the slowest {slowest:.1f} s: ")
    say(", ".join(f"{n} {k}" for k, n in outcomes.most_common()) + "\n")
    say("cases: " + ", ".join(f"{n} {k}" for k, n in total.most_common()) + "\n")
    if families:
        say("failures: " + ", ".join(f"{n} {k}" for k, n in families.most_common()) + "\n")
    return int(bool(families))


if __name__ == "__main__":
    sys.exit(main())
