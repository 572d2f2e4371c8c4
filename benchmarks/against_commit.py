"""Seconds of this checkout by those of another one: whole steps of GPT-2 203 M, and the optimizer's alone.

    git worktree add ../old COMMIT && (cd ../old && python setup.py build_ext --inplace)
    python benchmarks/against_commit.py --old ../old --directory /mnt/nvme --output results.json

Cases: whole steps (forward, backward, `step()`, update="overlap", fp32, one sequence) with the placements of
steps.py, and ``optimizer-on-host``, ``optimizer-on-nvme``: `step()` alone, update="sync", with
the same gradients each time.

Each case has two child processes, one of each checkout (its own `infinity`, its own native modules, this
interpreter and this script, which knows of either only what a user does). Where a process's memory happens
to lie makes it some percent faster or slower for as long as it lives, so both are replaced by new ones every
--fresh pairs. A *turn* is a burst of steps and ends when all of it is complete, what goes on behind the last
step included, so that nobody works in the other's turn. A *pair* is a turn of each, old first in one pair
and new first in the next (ABBA), so that a machine that becomes faster or slower favours nobody. A pair's
ratio is new ÷ old of the seconds of a turn.

The figure is the median of the ratios, with 95 % bounds (`bounds` in common.py). A case falls short if its
lower bound is above 1.03. While its upper bound is above 1.06 pairs are added, up to --most. Have nothing
else run on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import common
from children import Child, lines, tell
from gpt2 import GPT2

WHOLE = ("state-on-host", "all-on-host", "state-on-nvme", "all-on-nvme")
OPTIMIZER = {"optimizer-on-host": "state-on-host", "optimizer-on-nvme": "state-on-nvme"}
FALLS_SHORT, ADD_PAIRS = 1.03, 1.06


# -- a child: of infinity nothing but its own checkout is imported, and by public names ---------


def serve(tree: str, text: str) -> None:
    """Build the model; for each line take as many steps as it says."""
    sys.path.insert(0, tree)  # before this checkout, which `common` puts first
    import torch

    import infinity

    if not Path(infinity.__file__).resolve().is_relative_to(Path(tree).resolve()):
        sys.exit(f"Error: infinity of {infinity.__file__}, not of {tree}")
    task = json.loads(text)
    torch.set_num_threads(task["settings"]["threads"])
    gpt2 = GPT2(**task["model"])
    config = infinity.Config(**task["settings"])
    with infinity.init(config):
        model = gpt2.build()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    model, optimizer = infinity.wrap(model, adam, config)
    engine = engine_of(model)
    loss_of = gpt2.loss_of(task["tokens"], engine.device.torch_device)
    if not task["whole"]:
        loss_of(model).backward()
        wait_written(engine)
    tell({"params": gpt2.parameters, "threads": torch.get_num_threads()})
    for line in lines():
        begin = time.perf_counter()
        for _ in range(int(line)):
            if task["whole"]:
                loss_of(model).backward()
            optimizer.step()
            if task["whole"]:  # else the gradients stay, so that each step has the same work
                optimizer.zero_grad()
        engine.updater.wait()
        wait_written(engine)
        tell({"seconds": (time.perf_counter() - begin) / int(line)})
    infinity.close(optimizer)


def wait_written(engine: Any) -> None:
    """Block until the store has no write pending; older checkouts call it `flush`."""
    (getattr(engine.store, "wait_written", None) or engine.store.flush)()


def engine_of(model: Any) -> Any:
    """Return the engine of a wrapped model, in whichever folder its checkout has the code: the module of
    `wrap` has always had this function."""
    import infinity

    return importlib.import_module(infinity.wrap.__module__).engine_of(model)


# -- figures ---------------------------------------------------------------------------------------


def figures(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the pairs of a case come to."""
    seconds = {who: [pair[who]["seconds"] for pair in pairs] for who in ("old", "new")}
    found = common.paired(seconds["old"], seconds["new"])
    return {
        "pairs": len(pairs),
        **found,
        "falls_short": found["low"] > FALLS_SHORT,
        **{f"{who}_seconds": statistics.median(taken) for who, taken in seconds.items()},
    }


# -- the parent --------------------------------------------------------------------------------------


def measure(case: str, trees: dict[str, Path], folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures and all samples of one case."""
    from steps import settings_of

    model, update = common.model_of(args), "overlap" if case in WHOLE else "sync"
    settings = settings_of(OPTIMIZER.get(case, case), update, model.largest_unit)
    task = {"model": asdict(model), "tokens": args.tokens, "whole": case in WHOLE}
    settings |= {"device": "cpu", "dtype": "fp32", "threads": args.threads, **json.loads(args.config)}

    def start(who: str) -> Child:
        paths = [str(trees[who]), *filter(None, [os.environ.get("PYTHONPATH")])]
        text = json.dumps({**task, "settings": {**settings, "nvme": os.path.join(folder, who)}})
        command = [sys.executable, "-u", os.path.abspath(__file__), "--serve", str(trees[who]), text]
        return Child(who, command, env={"PYTHONPATH": os.pathsep.join(paths)}, timeout=args.timeout)

    pairs: list[dict[str, Any]] = []
    while True:
        with common.Race(title=f"{case}, {len(pairs)} pairs") as race:
            # Old first in the next pair that counts, or new first if it was old before.
            for who in ("old", "new") if (len(pairs) + args.warmup) % 2 == 0 else ("new", "old"):
                race.start(who, partial(start, who), lambda child: child.ask(str(args.burst)))
            samples = race.run(args.warmup, args.fresh)
        if race.errors:
            sys.exit(f"{case}: " + "; ".join(f"{who}: {e['error']}" for who, e in race.errors.items()))
        pairs += [dict(zip(samples, pair, strict=True)) for pair in zip(*samples.values(), strict=True)]
        if len(pairs) >= args.rounds:
            found = figures(pairs)
            if found["high"] <= ADD_PAIRS or len(pairs) >= args.most:
                return {**found, "ready": race.ready, "samples": pairs}


def main() -> int:
    """Measure, print a table, write the JSON; 1 if a case falls short."""

    parser = common.step_arguments(__doc__)
    parser.add_argument("--old", type=Path, required=True, help="the other checkout, built")
    parser.add_argument("--cases", nargs="+", choices=(*WHOLE, *OPTIMIZER), default=[*WHOLE, *OPTIMIZER])
    parser.add_argument("--most", type=int, default=31, help="most pairs of a case; --rounds is the least")
    parser.add_argument("--fresh", type=int, default=4, help="pairs that two processes live for")
    parser.add_argument("--burst", type=int, default=4, help="steps of a turn")
    args = parser.parse_args()
    trees = {"old": args.old.resolve(), "new": common.ROOT}
    for tree in trees.values():
        for module in ("_aio", "_cpu_adam"):
            if not list((tree / "infinity").glob(f"{module}*.so")):
                parser.error(f"{tree} has no {module}: build it with `python setup.py build_ext --inplace`")
    hardware = common.hardware(args.directory)
    commits = {who: common.commit_of(tree) for who, tree in trees.items()}
    found: dict[str, Any] = {}
    for case in args.cases:
        with common.scratch(args.directory) as folder:
            for who in trees:
                os.makedirs(os.path.join(folder, who))
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
                "versions": common.versions(),
                "cases": found,
            },
        )
    return int(any(row["falls_short"] for row in found.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4])
    else:
        sys.exit(main())
