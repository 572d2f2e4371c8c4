"""What a chunk and a visit of a unit cost: Python's part of it; and how large a chunk has to be.

    python benchmarks/chunks.py --directory /mnt/nvme --output results.json

python     CPU time of the threads that update, take gradients and load, per chunk of 65,536 elements on the
           host tier, without what the native kernel takes: a thread's CPU clock (pthread_getcpuclockid(3)),
           minus that clock over each native call
visit      CPU time of the user's thread per visit of a unit (one in a forward, one in a
           backward) that is on the device already: hooks, acquire, release. Minus that of the same model
           unwrapped, in turns. The units are tiny, and all but the first frozen. Two threads hand over four
           times a visit, so it is measured with both on one core: a sleeping core that is woken may cost as
           waits for the update and the load of its unit, too
sizes      time of `optimizer.step()` (update="sync") and of a whole step by the size of a chunk, for state on
           the host and on NVMe; each size takes turns with the largest, so two models are there at once

On a GPU (`--device cuda`) a chunk crosses the link: `--steps 0` leaves Python's time out, which is the CPU's.
"""

from __future__ import annotations

import argparse
import collections
import copy
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
from infinity.core.sizes import NORM_BLOCK
from infinity.hardware import cpu_adam

THREADS = {"update": "infinity-update", "gradient": "infinity-gradients", "load": "infinity-load"}
WANTED_MS = {"update": 0.1, "gradient": 0.15, "load": 0.15, "visit": 0.15}
SIZES = [NORM_BLOCK << shift for shift in range(0, 10)]


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
    return _cpu_time(ident) - native.seconds[ident]


def _cpu_time(ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def visit_time(steps: int, units: int, *, trained: bool = False) -> float:
    """Return milliseconds of Python per visit of a unit; `trained`: of one that makes gradients."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(units)))
    for layer in plain[1:]:
        layer.requires_grad_(trained)
    wrapped = copy.deepcopy(plain)
    host = {"parameters": "host", "optimizer_state": "host", "gradients": "host"}
    config = infinity.Config(
        device="cpu", units=["Linear"], host_memory="1GiB", device_memory="256MiB", **host
    )
    wrapped, optimizer = infinity.wrap(wrapped, torch.optim.AdamW(wrapped.parameters()), config)
    me = threading.get_ident()
    x = torch.randn(2, 16, requires_grad=True)

    def seconds(model: Any) -> float:
        begun = _cpu_time(me)
        model(x).sum().backward()
        taken = _cpu_time(me) - begun
        if model is wrapped and trained:
            optimizer.step()
        model.zero_grad()
        x.grad = None
        return taken

    try:
        calls = {"ours": partial(seconds, wrapped), "torch": partial(seconds, plain)}
        times = common.Race(calls).run(3, steps)
    finally:
        infinity.close(optimizer)
    more = statistics.median(a - b for a, b in zip(times["ours"], times["torch"], strict=True))
    return round(more / (2 * units) * 1e3, 4)


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
    """Return the seconds of each size and of the largest, and their ratio round by round, by tier."""
    result: dict[str, Any] = {}

    def made(tier: str, size: int) -> Sized:
        place = os.path.join(directory, f"{tier}-{size}")  # a run has its directory to itself
        os.mkdir(place)
        return Sized(place, tier, size, device, args)

    for tier in args.tiers:
        largest = made(tier, args.sizes[-1])
        try:
            for size in args.sizes[:-1]:
                one = made(tier, size)
                try:
                    for name in ("update", "whole"):
                        calls = {"one": getattr(one, name), "largest": getattr(largest, name)}
                        times = common.Race(calls).run(args.warmup, args.rounds)
                        result.setdefault(f"{tier} {name}", {})[str(size)] = {
                            "seconds": round(statistics.median(times["one"]), 5),
                            "largest_seconds": round(statistics.median(times["largest"]), 5),
                            "of_largest": common.paired(times["largest"], times["one"]),
                        }
                finally:
                    infinity.close(one.model)
        finally:
            infinity.close(largest.model)
    return result


def main() -> None:
    """Measure, say and store."""
    parser = common.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of the sizes; 0: none")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those")
    parser.add_argument(
        "--steps", type=int, default=20, help="that Python's time is the median of; 0: not measured"
    )
    parser.add_argument("--layers", type=int, default=4, help="units")
    parser.add_argument(
        "--width", type=int, default=5792, help="a unit has its square in parameters: by default just 32 Mi"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="elements of a chunk, the largest last"
    )
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
        visits = {
            "visit": visit_time(args.steps, units=64),
            "visit_with_gradients": visit_time(args.steps, units=64, trained=True),
        }
        print(", ".join(f"{what} {ms:.3f} ms" for what, ms in {**python, **visits}.items()))
        result |= {"python_ms_per_chunk": python, "python_ms_per_visit": visits, "wanted_ms": WANTED_MS}
    if args.rounds:
        with common.scratch(args.directory) as directory, opened(args.device) as device:
            result["sizes"] = sizes(directory, device, args)
    common.publish(args.output, result)


if __name__ == "__main__":
    main()
