"""Whole training steps of GPT-2 203 M (128 tokens, batch 1) beside DeepSpeed and plain torch.

    python benchmarks/whole_step.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --modes state-on-nvme all-on-host all-on-nvme --update overlap sync --output results.json

A mode is a placement of `infinity bench step`, and for DeepSpeed (ZeRO-3) its nearest: it keeps its
gradients on NVMe where its state is. Every contestant is a process of its own; in every round each takes one
turn of some steps, in an order that rotates, and the drive and the kernel are measured for the bound
([Note: the bound of a step] in infinity/cli/bench/step_run.py). One that fails is part of the result, with
its error; the others go on.

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
import sys
from typing import Any

import common
import runner
from children import Child, ChildError

from infinity.cli.bench.step import Rates, rates
from infinity.cli.bench.step_run import PLACEMENTS, figures, settings_of, steady
from infinity.cli.measure import scratch
from infinity.core.config import UPDATES
from infinity.core.errors import InfinityError
from infinity.hardware import cpu_adam
from infinity.storage.step_log import finite

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


class Race:
    """The contestants of one mode, and what came of them."""

    def __init__(self, mode: str, folder: str, args: argparse.Namespace) -> None:
        self.mode = mode
        self.args = args
        self.model = common.model_of(args)
        self.ready: dict[str, Any] = {}
        self.errors: dict[str, Any] = {}
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self._folder = folder
        self._children: dict[str, Child] = {}

    def run(self, rates: Rates) -> None:
        """Start all, take turns, end all."""
        ours = [f"infinity-{update}" for update in self.args.update]
        peers = ["deepspeed"] if self.args.deepspeed_python else []
        names = [n for n in (*ours, *peers, "torch") if n.partition("-")[0] in self.args.contestants]
        try:
            for name in names:
                self._start(name)
            for name, counts in common.turns([*names, "rates"], self.args.warmup, self.args.rounds):
                print(f"{self.mode}: {name}", file=sys.stderr)
                if name == "rates":
                    rates.measure(nvme="nvme" in PLACEMENTS[self.mode])
                else:
                    self._turn(name, counts)
        finally:
            for child in self._children.values():
                child.close()

    def settings(self, name: str) -> dict[str, Any]:
        """Return what a contestant is told."""
        kind, _, update = name.partition("-")
        if kind == "infinity":
            settings = settings_of(self.mode, update, self.model.largest_unit)
            return settings | json.loads(self.args.config)
        if kind == "deepspeed":
            state, parameters = DEEPSPEED.get(self.mode, ("cpu", "device"))
            return {"state": state, "parameters": parameters}
        return {}

    def _start(self, name: str) -> None:
        args, kind = self.args, name.partition("-")[0]
        task = runner.Task(
            kind=kind,
            model=self.model,
            tokens=args.tokens,
            threads=args.threads,
            directory=os.path.join(self._folder, f"{self.mode}-{name}"),
            dtype=args.dtype,
            device=args.device,
            settings=self.settings(name),
        )
        python = args.deepspeed_python if kind == "deepspeed" else None
        try:
            child = runner.start(name, task, python=python, timeout=args.timeout)
        except (ChildError, OSError) as error:
            return self._failed(name, error)
        self._children[name], self.ready[name], self.samples[name] = child, child.ready, []

    def _turn(self, name: str, counts: bool) -> None:
        child = self._children.get(name)
        if child is None:
            return
        try:
            sample = child.ask(str(self.args.burst))
        except ChildError as error:
            return self._failed(name, error)
        if not name.startswith("infinity"):  # a peer does not say what it reads and writes; the system does
            sample |= {way: sample[f"{way}_bytes"] / self.args.burst for way in ("read", "written")}
        if counts:
            self.samples[name].append(sample)

    def _failed(self, name: str, error: ChildError | OSError) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.close()
        self.samples.pop(name, None)
        crashed = isinstance(error, ChildError)
        self.errors[name] = {
            "error": error.reason if crashed else str(error),
            "exit_status": error.code if crashed else None,
            "log": error.said[-25:] if crashed else [],
        }

    def result(self, rates: Rates) -> dict[str, Any]:
        """Return medians, peaks, bounds, ratios and every sample."""
        params = self.model.parameters
        table = {
            name: {**figures(runs, params), "peak_rss": max(r["peak_rss"] for r in runs)}
            for name, runs in self.samples.items()
        }
        times = {name: [steady(run) for run in runs] for name, runs in self.samples.items()}
        peers = [peer for peer in ("deepspeed", "torch") if peer in times]
        ours = [name for name in table if name.startswith("infinity")]
        for name in ours if "torch" in table else ():
            told = {"settings": self.settings(name), "dtype": self.args.dtype, "params": params}
            table[name] |= rates.beside(table[name], table["torch"], **told)
        return {
            "placement": PLACEMENTS[self.mode]._asdict(),
            "table": table,
            "speedups": {n: {f"of_{p}": common.paired(times[n], times[p]) for p in peers} for n in ours},
            "wanted": {
                f"infinity-{u}": WANTED[self.mode, u] for u in self.args.update if (self.mode, u) in WANTED
            },
            "rates": rates.as_dict(),
            "errors": self.errors,
            "contestants": self.ready,
            "samples": self.samples,
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
            target = f"  (wanted ≥ {wanted[peer]:.2f})" if peer in wanted else ""
            span = f"{ratio['lowest']:.3f}–{ratio['highest']:.3f}"
            print(f"  {name} {peer:13} {ratio['of_medians']:.3f}  {span}{target}")
        if "bound" in row:
            target = f"  (wanted ≤ {wanted['of_bound']:.2f})" if "of_bound" in wanted else ""
            times = f"{row['seconds'] / row['bound']:.3f} × {row['bound']:.3f} s"
            print(f"  {name} of its bound  {times}{target}")
    for name, error in group["errors"].items():
        print(f"  {name:16} failed: {error['error'][:160]}")


def main() -> None:
    """Measure, print tables, write the JSON."""
    parser = common.step_arguments(__doc__)
    everybody = ("infinity", "deepspeed", "torch")
    parser.add_argument("--modes", nargs="+", choices=tuple(PLACEMENTS), default=["state-on-nvme"])
    parser.add_argument("--contestants", nargs="+", choices=everybody, default=list(everybody))
    parser.add_argument("--device", default="cpu", help="cpu, cuda (or lagging: devices.py)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--update", nargs="+", choices=UPDATES, default=["sync"], help="of infinity's Config")
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
            scratch(os.path.abspath(args.directory)) as folder,
            rates(folder if on_nvme else None) as measured,
        ):
            for mode in args.modes:
                measured.forget()
                race = Race(mode, folder, args)
                race.run(measured)
                modes[mode] = race.result(measured)
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
