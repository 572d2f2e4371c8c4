"""Whole training steps of GPT-2 203 M (128 tokens, batch 1) beside DeepSpeed and plain torch.

    python benchmarks/whole_step.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --modes state-on-nvme all-on-host all-on-nvme --update overlap sync --output results.json

A mode is a placement of steps.py, and for DeepSpeed (ZeRO-3) its nearest: it keeps its gradients on NVMe
where its state is. Every contestant is a process of its own; in every round each takes one turn of some
steps, in an order that rotates, and the drive and the kernel are measured for the bound ([Note: the bound of
a step] in steps.py). One that fails is part of the result, with its error; the others go on.

With an update that goes on behind the next forward (--update overlap or delayed), a turn is a burst of
steps (--burst, 4 unless told otherwise) and ends when all of it is complete, so that nobody works in
another's turn. ``seconds`` is the median step from the second on; ``seconds_with_drain`` the time of a
turn by the number of its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import sys
from functools import partial
from typing import Any

import common
import runner
from children import Child
from rates import Rates, beside, rates
from steps import PLACEMENTS, figures, settings_of, steady

from infinity.cli.console import finite
from infinity.core.config import UPDATES
from infinity.core.errors import InfinityError
from infinity.hardware import cpu_adam

PEERS = ("deepspeed", "torch")
#: By mode: where DeepSpeed keeps its state and its parameters; where nothing is said, on the host.
DEEPSPEED = {
    "state-on-nvme": ("nvme", "device"),
    "state-and-gradients-on-nvme": ("nvme", "device"),
    "all-on-nvme": ("nvme", "nvme"),
}
#: By mode and update: least times as fast as a peer, and most times the bound.
WANTED: dict[tuple[str, str], dict[str, float]] = {
    ("state-on-nvme", "sync"): {"of_deepspeed": 1.5},
    ("state-on-nvme", "overlap"): {"of_deepspeed": 1.8, "of_bound": 1.15},
    ("state-on-nvme", "delayed"): {"of_bound": 1.15},
    ("all-on-nvme", "overlap"): {"of_bound": 1.25},
    ("all-on-host", "overlap"): {"of_torch": 1 / 1.25},
}


def race(mode: str, folder: str, rates: Rates, args: argparse.Namespace) -> dict[str, Any]:
    """Have all contestants of a mode take turns; return medians, peaks, bounds, ratios and every sample."""
    model = common.model_of(args)
    forms = ["" if dtype == "fp32" else f"-{dtype}" for dtype in args.state_dtypes]
    names = [*(f"infinity-{update}{form}" for update in args.update for form in forms), *PEERS]
    if not args.deepspeed_python:
        names.remove("deepspeed")
    names = [name for name in names if name.partition("-")[0] in args.contestants]

    def settings(name: str) -> dict[str, Any]:
        kind, _, rest = name.partition("-")
        if kind == "infinity":
            update, _, form = rest.partition("-")
            dtype, _, split = form.partition("+")
            of_form = {"optimizer_state_dtype": dtype, "split_master": bool(split)} if form else {}
            return settings_of(mode, update, model.largest_unit) | of_form | json.loads(args.config)
        state, parameters = DEEPSPEED.get(mode, ("cpu", "device"))
        return {"state": state, "parameters": parameters} if kind == "deepspeed" else {}

    def start(name: str) -> Child:
        task = runner.Task(
            kind=name.partition("-")[0],
            model=model,
            tokens=args.tokens,
            threads=args.threads,
            directory=os.path.join(folder, f"{mode}-{name}"),
            dtype=args.dtype,
            device=args.device,
            settings=settings(name),
        )
        python = args.deepspeed_python if task.kind == "deepspeed" else None
        return runner.start(name, task, python=python, timeout=args.timeout)

    def turn(child: Child) -> dict[str, Any]:
        sample = child.ask(str(args.burst))
        if child.name in PEERS:  # a peer does not say what it reads and writes; the system does
            sample |= {way: sample[f"{way}_bytes"] / args.burst for way in ("read", "written")}
        return sample

    with common.Race({"rates": partial(rates.measure, nvme="nvme" in PLACEMENTS[mode])}, title=mode) as run:
        for name in names:
            run.start(name, partial(start, name), turn)
        samples = run.run(args.warmup, args.rounds)
    measured = samples.pop("rates")
    middle = {
        k: statistics.median(m[k] for m in measured) for k, v in measured[0].items() if type(v) is float
    }
    found = {**measured[0], **middle}
    table = {
        name: {**figures(runs, model.parameters), "peak_rss": max(r["peak_rss"] for r in runs)}
        for name, runs in samples.items()
    }
    times = {name: [steady(each) for each in runs] for name, runs in samples.items()}
    ours = [name for name in table if name not in PEERS]
    exact = [name for name in ours if name.count("-") == 1]  # `rates` has the kernel's for fp32 moments
    for name in exact if "torch" in table else ():
        told = {"settings": settings(name), "dtype": args.dtype, "params": model.parameters}
        table[name] |= beside(table[name], table["torch"], found, **told)
    return {
        "placement": PLACEMENTS[mode]._asdict(),
        "table": table,
        "speedups": {
            n: {
                f"of_{p}": common.paired(times[n], times[p])
                for p in (*PEERS, *(each for each in exact if n.startswith(f"{each}-")))
                if p in times
            }
            for n in ours
        },
        "wanted": {f"infinity-{u}": WANTED[mode, u] for u in args.update if (mode, u) in WANTED},
        "rates": found,
        "errors": run.errors,
        "contestants": run.ready,
        "samples": samples,
    }


def show(mode: str, group: dict[str, Any]) -> None:
    """Print one mode."""
    print(f"\n{mode}")
    for name, row in group["table"].items():
        parts = "  ".join(f"{p} {row[p]:.3f}" for p in ("forward", "backward", "step"))
        moved = f"read {row['read_bytes'] / 1e9:.2f} written {row['written_bytes'] / 1e9:.2f} GB"
        drain = f"with drain {row['seconds_with_drain']:.3f}"
        rss = f"RSS {row['peak_rss'] / 1e9:.2f} GB"
        print(f"  {name:16} {row['seconds']:.3f} s, {drain}  ({parts})  {rss}  {moved}")
    for name, ratios in group["speedups"].items():
        wanted = group["wanted"].get(name, {})
        row = group["table"][name]
        for peer, ratio in ratios.items():
            print(f"  {name} {peer:13} {common.ratio_text(ratio, wanted.get(peer))}")
        if "bound" in row:
            target = f"  (wanted ≤ {wanted['of_bound']:.2f})" if "of_bound" in wanted else ""
            times = f"{row['seconds'] / row['bound']:.3f} × {row['bound']:.3f} s"
            print(f"  {name} of its bound  {times}{target}")


def main() -> None:
    """Measure, print tables, write the JSON."""
    parser = common.step_arguments(__doc__)
    everybody = ("infinity", "deepspeed", "torch")
    parser.add_argument("--modes", nargs="+", choices=tuple(PLACEMENTS), default=["state-on-nvme"])
    parser.add_argument("--contestants", nargs="+", choices=everybody, default=list(everybody))
    parser.add_argument("--device", default="cpu", help="cpu, cuda (or lagging: devices.py)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", nargs="+", choices=UPDATES, default=["sync"], help="of infinity's Config")
    parser.add_argument(
        "--state-dtypes",
        nargs="+",
        choices=[dtype + split for dtype in ("fp32", "bf16", "8bit") for split in ("", "+split")],
        default=["fp32"],
        help="of the moments; +split: with split masters, for --dtype bf16",
    )
    parser.add_argument("--burst", type=int, help="steps of a turn; 1 with --update sync, else 4")
    args = parser.parse_args()
    args.burst = args.burst or (1 if set(args.update) == {"sync"} else 4)
    if not args.deepspeed_python and importlib.util.find_spec("deepspeed"):
        args.deepspeed_python = sys.executable
    hardware = common.hardware(args.directory)
    cpu_adam.set_threads(args.threads)
    modes: dict[str, Any] = {}
    try:
        on_nvme = any("nvme" in PLACEMENTS[mode] for mode in args.modes)
        with (
            common.scratch(os.path.abspath(args.directory)) as folder,
            rates(folder if on_nvme else None) as measured,
        ):
            for mode in args.modes:
                modes[mode] = race(mode, folder, measured, args)
                show(mode, modes[mode])
    except InfinityError as error:
        sys.exit(str(error))
    model, updates = common.model_of(args), ", ".join(args.update)
    result = {
        "benchmark": f"whole_step: GPT-2, {args.tokens} tokens, {args.dtype}, {updates}",
        "model": {**dataclasses.asdict(model), "heads": model.heads, "parameters": model.parameters},
        **{name: getattr(args, name) for name in ("tokens", "dtype", "device", "rounds", "burst", "threads")},
        "warmup_rounds": args.warmup,
        "placements": modes,
        "versions": common.versions(),
        "hardware": hardware,
    }
    common.publish(args.output, finite(result))
    if any(name.startswith("infinity") for group in modes.values() for name in group["errors"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
