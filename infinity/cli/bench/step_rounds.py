"""The rounds of `bench step`, and the figures that come of them.

A placement is measured as a group: one contestant for each update mode, plain torch with everything in
memory, and DeepSpeed (ZeRO-3) with its nearest placement, where it is installed. Every contestant is a
process of its own; in every round each takes one turn of some steps, in an order that rotates, and then
the drive and the kernel are measured for the bound ([Note: the bound of a step] in step_bound.py).
A contestant that fails is part of the result, with its error; the others go on.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infinity.cli.measure import scratch
from infinity.core.config import Config
from infinity.core.sizes import parse_dtype
from infinity.hardware import cpu_adam

from .contest import Child, ChildError, Watch
from .step_bound import Measured, Rates, bound, rates
from .step_case import PLACEMENTS, Request, check_room, start, task_of


class Group:
    """The contestants of one placement, and what came of them."""

    def __init__(self, placement: str, folder: str, request: Request) -> None:
        self.placement = placement
        self.ready: dict[str, Any] = {}
        self.errors: dict[str, Any] = {}
        self.samples: dict[str, list[dict[str, Any]]] = {}
        self.anonymous: dict[str, int] = {}
        self._folder = folder
        self._request = request
        self._children: dict[str, Child] = {}

    def run(self, rates: Rates, tell: Callable[[str], None]) -> None:
        """Start all, take turns, end all."""
        request = self._request
        try:
            for name in request.names:
                tell(f"{self.placement}: {name} starts")
                self._start(name)
            watch = Watch({name: child.pid for name, child in self._children.items()})
            watch.start()
            names = list(self._children)
            for turn in range(request.warmup + request.rounds):
                at = turn % max(1, len(names))
                for name in names[at:] + names[:at]:
                    tell(f"{self.placement}: round {turn + 1} of {request.warmup + request.rounds}, {name}")
                    self._turn(name, measured=turn >= request.warmup)
                rates.measure(nvme=PLACEMENTS[self.placement].on_nvme)
            watch.stop()
            self.anonymous = watch.anonymous
        finally:
            for child in self._children.values():
                child.close()

    def _start(self, name: str) -> None:
        python = self._request.deepspeed_python if name == "deepspeed" else None
        task = task_of(name, self.placement, self._folder, self._request)
        try:
            child = start(task, self._folder, python=python, timeout=self._request.timeout)
        except (ChildError, OSError) as error:
            return self._failed(name, error)
        self._children[name], self.ready[name], self.samples[name] = child, child.ready, []

    def _turn(self, name: str, *, measured: bool) -> None:
        child = self._children.get(name)
        if child is None:
            return
        try:
            answer = child.ask(str(self._request.steps))
        except ChildError as error:
            return self._failed(name, error)
        if measured:
            self.samples[name].append(answer)

    def _failed(self, name: str, error: ChildError | OSError) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.close()
        self.samples.pop(name, None)
        if isinstance(error, ChildError):
            said = [line for line in error.log.splitlines() if line.strip()]
            self.errors[name] = {"error": error.reason, "exit_status": error.code, "log": said[-25:]}
        else:
            self.errors[name] = {"error": str(error), "exit_status": None, "log": []}


def measure(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every placement; return everything as JSON has it. Seconds and bytes.

    Raises:
        BudgetError, DirectoryError: it does not fit; nothing was started.
    """
    check_room(request)
    threads = cpu_adam.threads()
    if request.threads is not None:
        cpu_adam.set_threads(request.threads)
    try:
        with scratch(request.directory) as folder, rates(folder if request.on_nvme else None) as measured:
            groups = {}
            for placement in request.placements:
                group = Group(placement, folder, request)
                measured.forget()
                group.run(measured, tell)
                groups[placement] = summary(group, measured, request)
    finally:
        cpu_adam.set_threads(threads)
    return {
        "benchmark": "step",
        "model": {**dataclasses.asdict(request.model), "parameters": request.model.parameters},
        "tokens": request.tokens,
        "batch": request.batch,
        "dtype": request.dtype,
        "device": request.device,
        "rounds": request.rounds,
        "warmup_rounds": request.warmup,
        "burst": request.steps,
        "threads": request.threads,
        "placements": groups,
    }


# ---- figures ----


def steady(sample: Mapping[str, Any]) -> float:
    """Return the median step of a turn in its steady state: from the second on, or the only one."""
    intervals = sample["intervals"]
    return float(statistics.median(intervals[1:] or intervals))


def median(values: Sequence[float]) -> float:
    """Return the median, or nan of nothing."""
    return statistics.median(values) if values else float("nan")


def paired(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast the first is: ratio of the medians, median of the ratios of the
    rounds, and the lowest and highest of those."""
    ratios = [t / o for o, t in zip(ours, theirs, strict=True)]
    return {
        "of_medians": round(median(theirs) / median(ours), 4),
        "median_of_rounds": round(median(ratios), 4),
        "lowest": round(min(ratios), 4),
        "highest": round(max(ratios), 4),
    }


def summary(group: Group, rates: Rates, request: Request) -> dict[str, Any]:
    """Return the figures of a group: medians, peaks, bounds, ratios and every sample."""
    table: dict[str, dict[str, Any]] = {}
    params = request.model.parameters
    for name, runs in group.samples.items():
        ours = name.startswith("infinity")
        row: dict[str, Any] = {
            "seconds": median([steady(r) for r in runs]),
            "seconds_with_drain": median([r["seconds"] for r in runs]),
            **{part: median([r[part] for r in runs]) for part in ("forward", "backward", "step")},
            "read_bytes": median([_moved(r, "read", request, ours) for r in runs]),
            "written_bytes": median([_moved(r, "written", request, ours) for r in runs]),
            "peak_rss": max(r["peak_rss"] for r in runs),
            "peak_anonymous": group.anonymous[name],
            "peak_anonymous_over_imports": group.anonymous[name] - group.ready[name]["anonymous_at_imports"],
            "device_peak": max(r["device_peak"] for r in runs),
            "last_loss": runs[-1]["losses"][-1],
        }
        params = group.ready[name]["params"]
        row["bytes_per_parameter"] = (row["read_bytes"] + row["written_bytes"]) / params
        table[name] = row
    torch_row = table.get("torch")
    for name, row in table.items():
        kind, _, update = name.partition("-")
        if kind == "infinity" and torch_row is not None:
            found = _measured(group.placement, torch_row, row, rates, request, params)
            row["bound"] = bound(update, found)
            row["efficiency"] = row["bound"] / row["seconds"]
            row["bound_of"] = {**dataclasses.asdict(found), "nvme_seconds": found.nvme}
    return {
        "placement": {
            "infinity": PLACEMENTS[group.placement].settings(),
            "deepspeed": dict(
                zip(("state", "parameters"), PLACEMENTS[group.placement].deepspeed, strict=True)
            ),
        },
        "table": table,
        "speedups": _speedups(group.samples),
        "rates": rates.as_dict(),
        "errors": group.errors,
        "contestants": group.ready,
        "samples": group.samples,
    }


def _moved(sample: Mapping[str, Any], way: str, request: Request, ours: bool) -> float:
    return float(sample[f"store_{way}"] if ours else sample[f"{way}_bytes"] / request.steps)


def _speedups(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """How many times as fast ours are as each peer, steady steps against steady steps."""
    times = {name: [steady(s) for s in runs] for name, runs in samples.items()}
    peers = [peer for peer in ("deepspeed", "torch") if peer in times]
    return {
        name: {f"of_{peer}": paired(times[name], times[peer]) for peer in peers}
        for name in times
        if name.startswith("infinity")
    }


def _measured(
    placement: str,
    torch_row: Mapping[str, Any],
    row: Mapping[str, Any],
    rates: Rates,
    request: Request,
    params: int,
) -> Measured:
    where = PLACEMENTS[placement]
    itemsize = parse_dtype(request.dtype).itemsize
    told = {k: v for k, v in request.settings.items() if k == "read_ahead_memory"}
    ahead = int(Config(**told).read_ahead_memory)
    return Measured(
        forward=torch_row["forward"],
        backward=torch_row["backward"],
        adam=torch_row["step"] if where.optimizer_state == "device" else params / rates.adam,
        moved=row["read_bytes"] + row["written_bytes"],
        nvme_rate=rates.nvme,
        read_ahead=min(ahead, 12 * params) if where.optimizer_state == "nvme" else 0,
        copies=params * itemsize if where.parameters == "nvme" else 0,
        gradients=params * itemsize if where.gradients == "nvme" else 0,
    )
