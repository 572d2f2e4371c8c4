"""Seconds of this checkout by those of another one: whole steps of GPT-2 203 M, and the optimizer's alone.

    git worktree add ../old COMMIT && (cd ../old && python setup.py build_ext --inplace)
    python benchmarks/against_commit.py --old ../old --directory /mnt/nvme --output results.json

Cases: whole steps (forward, backward, `step()`, update="overlap", fp32, one sequence) with the placements of
`infinity bench step`, and ``optimizer-on-host``, ``optimizer-on-nvme``: `step()` alone, update="sync", with
the same gradients each time.

Each case has two child processes, one of each checkout (its own `infinity`, its own native modules, this
interpreter). Where a process's memory happens to lie makes it some percent faster or slower for as long as
it lives, so both are replaced by new ones every --fresh pairs. A *turn* is a burst of steps and ends when all
of it is complete, what goes on behind the last step included, so that nobody works in the other's turn. A
*pair* is a turn of each, old first in one pair and new first in the next (ABBA), so that a machine that
becomes faster or slower favours nobody. A pair's ratio is new ÷ old of the seconds of a turn.

The figure is the median of the ratios. Its 95 % bounds are order statistics: the k-th smallest and the k-th
largest ratio, with the largest k for which the median of what the ratios are drawn from lies outside in at
most 5 % of all runs, whatever their distribution (2 of 9; with fewer than 6 pairs there are no such bounds,
and the extremes stand for them). A case falls short if its lower bound is above 1.03. While its upper bound
is above 1.06 pairs are added, up to --most. Have nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

WHOLE = ("state-on-host", "all-on-host", "state-on-nvme", "all-on-nvme")
OPTIMIZER = {"optimizer-on-host": "state-on-host", "optimizer-on-nvme": "state-on-nvme"}
FALLS_SHORT, ADD_PAIRS = 1.03, 1.06
PACKAGES = ("torch", "transformers")


# -- a child: nothing but its own checkout is imported ------------------------------------------


def serve(tree: str, case: str, task_json: str) -> None:
    """Build the contestant; for each line take as many steps as it says."""
    from infinity.cli.bench import step_child as child

    if not Path(child.__file__ or "").resolve().is_relative_to(Path(tree).resolve()):
        sys.exit(f"Error: infinity of {child.__file__}, not of {tree}")
    task = child.Task.from_json(task_json)
    if case in WHOLE:
        return child.serve(task)
    import torch

    torch.set_num_threads(task.threads)
    who = child.build_infinity(task)
    who.backward(task.model.loss_of(task.batch, task.tokens, who.device)(who.model))
    who.settle()
    child.tell({"params": who.numel, "threads": torch.get_num_threads()})
    for line in child.lines():
        begin = time.perf_counter()
        for _ in range(int(line)):
            who.engine.optimizer.step()  # the gradients stay, so that each step has the same work
        who.settle()
        child.tell({"seconds": (time.perf_counter() - begin) / int(line)})
    who.close()


# -- figures ---------------------------------------------------------------------------------------


def bounds(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bounds by order statistics."""
    ordered = sorted(ratios)
    count, rank, tail, term = len(ordered), 0, 0.0, 0.5 ** len(ordered)
    while rank < count and tail + term <= 0.025:  # of Binomial(count, 1/2), up to `rank`
        tail += term
        term *= (count - rank) / (rank + 1)
        rank += 1
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return middle, ordered[max(0, rank - 1)], ordered[min(count - 1, count - rank)]


def figures(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the pairs of a case come to."""
    ratios = [pair["new"]["seconds"] / pair["old"]["seconds"] for pair in pairs]
    middle, low, high = bounds(ratios)
    return {
        "pairs": len(pairs),
        "ratio": middle,
        "low": low,
        "high": high,
        "falls_short": low > FALLS_SHORT,
        **{f"{who}_seconds": bounds([pair[who]["seconds"] for pair in pairs])[0] for who in ("old", "new")},
        "ratios": ratios,
    }


# -- the parent --------------------------------------------------------------------------------------


def measure(case: str, trees: dict[str, Path], folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures and all samples of one case."""
    import common

    from infinity.cli.bench.step_case import Request, task_of

    request = Request(
        model=common.model_of(args),
        directory=folder,
        tokens=args.tokens,
        threads=args.threads,
        settings=json.loads(args.config),
    )
    update = "infinity-overlap" if case in WHOLE else "infinity-sync"
    tasks = {
        who: task_of(update, OPTIMIZER.get(case, case), os.path.join(folder, f"{case}-{who}"), request)
        for who in trees
    }
    pairs: list[dict[str, Any]] = []
    while True:
        children: dict[str, common.Child] = {}
        try:
            for who, tree in trees.items():
                paths = [str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
                command = [sys.executable, "-u", os.path.abspath(__file__), "--serve", str(tree), case]
                children[who] = common.Child(
                    who,
                    [*command, tasks[who].as_json()],
                    env={"PYTHONPATH": os.pathsep.join(paths)},
                    timeout=args.timeout,
                )
            for _ in range(args.warmup):
                for child in children.values():
                    child.ask(str(args.burst))
            for _ in range(args.fresh):
                names = ("old", "new") if len(pairs) % 2 == 0 else ("new", "old")
                pairs.append({name: children[name].ask(str(args.burst)) for name in names})
                print(f"{case}: pair {len(pairs)}", file=sys.stderr)
            ready = {name: child.ready for name, child in children.items()}
        finally:
            for child in children.values():
                child.close()
        if len(pairs) >= args.rounds:
            found = figures(pairs)
            if found["high"] <= ADD_PAIRS or len(pairs) >= args.most:
                return {**found, "ready": ready, "samples": pairs}


def commit_of(tree: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` if it was changed; None: it is none."""
    import subprocess

    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() or None


def main() -> int:
    """Measure, print a table, write the JSON; 1 if a case falls short."""
    import common

    parser = common.arguments(__doc__)
    parser.add_argument("--old", type=Path, required=True, help="the other checkout, built")
    parser.add_argument("--cases", nargs="+", choices=(*WHOLE, *OPTIMIZER), default=[*WHOLE, *OPTIMIZER])
    parser.add_argument("--most", type=int, default=31, help="most pairs of a case; --rounds is the least")
    parser.add_argument("--fresh", type=int, default=4, help="pairs that two processes live for")
    parser.add_argument("--burst", type=int, default=4, help="steps of a turn")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a start or a turn")
    args = parser.parse_args()
    trees = {"old": args.old.resolve(), "new": common.ROOT}
    for tree in trees.values():
        for module in ("_aio", "_cpu_adam"):
            if not list((tree / "infinity").glob(f"{module}*.so")):
                parser.error(f"{tree} has no {module}: build it with `python setup.py build_ext --inplace`")
    hardware = common.hardware(args.directory)
    commits = {who: commit_of(tree) for who, tree in trees.items()}
    found: dict[str, Any] = {}
    for case in args.cases:
        with common.scratch(args.directory) as folder:
            for who in trees:
                os.makedirs(os.path.join(folder, f"{case}-{who}"))
            row = found[case] = measure(case, trees, folder, args)
        seconds = f"new {row['new_seconds']:.3f} s ÷ old {row['old_seconds']:.3f} s"
        span = f"({row['low']:.3f}–{row['high']:.3f}, {row['pairs']} pairs)"
        verdict = "  FALLS SHORT" if row["falls_short"] else ""
        print(f"{case:18} {seconds} = {row['ratio']:.3f} {span}{verdict}", flush=True)
        common.publish(
            args.output,
            {
                "benchmark": f"against_commit: GPT-2, {args.tokens} tokens, fp32, new ÷ old seconds",
                "commits": commits,
                "wanted": {"low_at_most": FALLS_SHORT, "high_at_most_before_adding_pairs": ADD_PAIRS},
                "burst": args.burst,
                "pairs_of_two_processes": args.fresh,
                "warmup_turns": args.warmup,
                "hardware": hardware,
                "versions": common.versions(*PACKAGES),
                "cases": found,
            },
        )
    return int(any(row["falls_short"] for row in found.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:5])
    else:
        sys.exit(main())
