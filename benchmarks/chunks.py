"""What a chunk costs: Python's part of it, and how large one has to be.

    python benchmarks/chunks.py --directory /mnt/nvme --output results.json

python     CPU time of the threads that update, take gradients and load, per chunk of 65,536 elements on the
           host tier, without what the native kernel takes: a thread's CPU clock (pthread_getcpuclockid(3)),
           minus that clock over each native call
sizes      time of `optimizer.step()` (update="sync") and of a whole step by the size of a chunk, for state on
           the host and on NVMe; the sizes take turns, in an order that rotates

On a GPU (`--device cuda`) a chunk crosses the link: `--steps 0` leaves Python's time out, which is the CPU's.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import threading
import time
from functools import partial
from typing import Any

import common
import torch
from devices import opened
from torch import nn
from values import Repeated

import infinity
from infinity.api.engine import engine_of
from infinity.cli.measure import scratch
from infinity.core.sizes import NORM_BLOCK
from infinity.hardware import cpu_adam

WANTED_MS = 0.15
THREADS = {"update": "infinity-update", "gradient": "infinity-gradients", "load": "infinity-load"}
SIZES = [NORM_BLOCK << shift for shift in range(0, 8)]


class Native:
    """The native kernel, with the CPU time of each calling thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds: collections.Counter[int] = collections.Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._timed, found) if callable(found) else found

    def _timed(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[threading.get_ident()] += time.thread_time() - begin


def thread_of(name: str) -> threading.Thread:
    """Return the newest thread of that name."""
    return next(t for t in reversed(list(threading.enumerate())) if t.name == name)


def python_time(steps: int, units: int, chunks: int) -> dict[str, Any]:
    """Return milliseconds of Python per chunk, of each thread."""
    width = 256  # rows of a unit's weight: one chunk each
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(256, width * chunks, bias=False) for _ in range(units)))
    for index, layer in enumerate(model):  # each takes the first columns of what the one before made
        layer.register_forward_pre_hook(lambda _, args, first=index == 0: args if first else args[0][:, :256])
    host = {"parameters": "host", "optimizer_state": "host", "gradients": "host"}
    config = infinity.Config(
        device="cpu",
        dtype="bf16",
        units=["Linear"],
        chunk_elements=NORM_BLOCK,
        host_memory="4GiB",
        device_memory=f"{2 * NORM_BLOCK * chunks * 6}",
        **host,
    )
    native = Native(cpu_adam._native)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    engine = engine_of(model)
    count = sum(len(u.layout.chunks) for u in engine.units)
    x = torch.randn(2, 256)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        infinity.flush(optimizer)
        optimizer.zero_grad()

    cpu_adam._native = native  # type: ignore[assignment]
    try:
        for _ in range(2):
            step()
        clocks = {what: thread_of(name).ident or 0 for what, name in THREADS.items()}
        taken: dict[str, list[float]] = {what: [] for what in clocks}
        for _ in range(steps):
            begun = {w: _python(ident, native) for w, ident in clocks.items()}
            loads = engine.residency.cache.loads
            step()
            loaded = (engine.residency.cache.loads - loads) * chunks
            for what, ident in clocks.items():
                number = loaded if what == "load" else count
                taken[what].append((_python(ident, native) - begun[what]) / number * 1e3)
    finally:
        cpu_adam._native = native._inner  # type: ignore[assignment]
        infinity.close(optimizer)
    return {what: round(statistics.median(times), 4) for what, times in taken.items()}


def _python(ident: int, native: Native) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(ident)) - native.seconds[ident]


class Sized:
    """A model whose state is on one tier, in chunks of one size."""

    def __init__(self, directory: str, tier: str, size: int, device: str, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        with Repeated():
            self.model: Any = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
        settings = {
            "nvme": directory,
            "device": device,
            "dtype": "bf16",
            "units": ["Linear"],
            "chunk_elements": size,
            "host_memory": "8GiB",
            "parameters": "host",
            "optimizer_state": tier,
            "gradients": "host",
            "update": "sync",
            "threads": args.threads,
        }
        config = infinity.Config(**{**settings, **json.loads(args.config)})
        self.model, self.optimizer = infinity.wrap(
            self.model, torch.optim.AdamW(self.model.parameters()), config
        )
        self.x = torch.randn(32, args.width).to(args.device)
        self.backward()

    def backward(self) -> None:
        self.model(self.x).float().square().mean().backward()

    def update(self) -> float:
        """Return the seconds of a step with the gradients that there are."""
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin

    def whole(self) -> float:
        """Return the seconds of backward and step."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def sizes(directory: str, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of each size, and their ratio to the largest in the same round, by tier."""
    result: dict[str, Any] = {}
    for tier in args.tiers:
        made: dict[int, Sized] = {}
        try:
            for size in args.sizes:
                place = os.path.join(directory, f"{tier}-{size}")  # a run has its directory to itself
                os.mkdir(place)
                made[size] = Sized(place, tier, size, device, args)
            for name in ("update", "whole"):
                calls = {str(size): getattr(m, name) for size, m in made.items()}
                times = common.race(calls, args.warmup, args.rounds)
                last = times[str(args.sizes[-1])]
                result[f"{tier} {name}"] = {
                    size: {
                        "seconds": round(statistics.median(t), 5),
                        "of_largest": round(
                            statistics.median(a / b for a, b in zip(t, last, strict=True)), 4
                        ),
                    }
                    for size, t in times.items()
                }
        finally:
            for each in made.values():
                infinity.close(each.model)
    return result


def main() -> None:
    """Measure, say and store."""
    parser = common.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of the sizes; 0: none")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those")
    parser.add_argument(
        "--steps", type=int, default=20, help="that Python's time is the median of; 0: not measured"
    )
    parser.add_argument("--layers", type=int, default=12, help="units")
    parser.add_argument("--width", type=int, default=2048, help="a unit has its square in parameters")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="elements of a chunk")
    parser.add_argument("--tiers", nargs="+", choices=("host", "nvme"), default=["host", "nvme"])
    parser.add_argument("--device", default="cpu", help="of the sizes: cpu, cuda (or lagging: devices.py)")
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "chunks",
        "hardware": common.hardware(args.directory),
        "versions": common.versions(),
        "device": args.device,
    }
    if args.steps:
        python = python_time(args.steps, units=4, chunks=32)
        print(", ".join(f"{what} {ms:.3f} ms" for what, ms in python.items()))
        result |= {"python_ms_per_chunk": python, "wanted_ms": WANTED_MS}
    if args.rounds:
        with scratch(args.directory) as directory, opened(args.device) as device:
            result["sizes"] = sizes(directory, device, args)
    common.publish(args.output, result)


if __name__ == "__main__":
    main()
