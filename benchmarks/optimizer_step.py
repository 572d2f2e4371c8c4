"""AdamW step of GPT-2 203 M: fp32 state on NVMe, gradients in host memory, parameters on the device.

    python benchmarks/optimizer_step.py --directory /mnt/nvme --output results.json \\
        --deepspeed-python /path/to/python

Every round runs each contestant once, in an order that rotates:

step       infinity's `optimizer.step()`, update="sync": it returns when the last write is complete
merely     the same engine reads and writes those bytes and computes nothing: the very store, leases,
           chunks, order and depth of `step`, checksums included
deepspeed  `step()` of DeepSpeed's ZeRO-3 with its pipelined NVMe swapper, after a forward and a
           backward that are not counted. It moves more bytes: it keeps its gradients on NVMe too
           (with --deepspeed-python)

`step` and `merely` take turns in this process; DeepSpeed is another process, and waits meanwhile.
A drive's speed drifts, so compare what one run says, not runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import runner
import torch
from steps import ADAMW

import infinity
from infinity.api.engine import engine_of

TARGETS = {"step_of_merely": 0.9, "step_of_deepspeed": 1.1}


class Engine:
    """The wrapped model after one backward, and what moves its bytes without an update."""

    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        gpt2 = common.model_of(args)
        model = gpt2.build()
        self.config = infinity.Config(
            nvme=directory,
            device="cpu",
            dtype="fp32",
            parameters="device",
            optimizer_state="nvme",
            gradients="host",
            update="sync",
            threads=args.threads,
            **json.loads(args.config),
        )
        adamw = torch.optim.AdamW(model.parameters(), **ADAMW)
        self.model, self.optimizer = infinity.wrap(model, adamw, self.config)
        gpt2.loss_of(args.tokens, "cpu")(self.model).backward()
        self.engine = engine_of(self.model)
        self.chunks = [c for u in self.engine.units for c in u.layout.trainable_chunks]
        self.sizes = [self.engine.tiers.plans[c.id].parts["state"].nbytes for c in self.chunks]
        self.depth = self.engine.footprint.quotas["update"].buffers

    def step(self) -> None:
        """The optimizer's step. The gradients stay, so that each step has the same work."""
        self.optimizer.step()

    def merely(self) -> None:
        """Read each chunk's state through the store and write it back: as many at once as the engine's
        depth, in its order; what was begun first is waited for first."""
        common.read_and_write(self.engine, self.chunks, self.sizes, self.depth)


def timed(call: Callable[[], None]) -> dict[str, Any]:
    """Return the seconds and the CPU seconds that `call` takes."""
    begin, cpu = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return what all contestants took."""
    own = os.path.join(folder, "infinity")
    os.makedirs(own)
    engine = Engine(own, args)
    calls = {"step": partial(timed, engine.step), "merely": partial(timed, engine.merely)}
    with contextlib.ExitStack() as stack:
        stack.callback(infinity.close, engine.model)
        race = stack.enter_context(common.Race(calls))
        if args.deepspeed_python:
            task = runner.Task(
                kind="deepspeed",
                model=common.model_of(args),
                tokens=args.tokens,
                directory=os.path.join(folder, "deepspeed"),
                threads=args.threads,
                settings={"state": "nvme", "parameters": "device"},
            )
            python, timeout = args.deepspeed_python, args.timeout
            race.start("deepspeed", partial(runner.start, "deepspeed", task, python=python, timeout=timeout))
        samples = race.run(args.warmup, args.rounds)
    names = ["chunk_elements", "block_bytes", "queue_depth", "aio_backend"]
    return {
        "params": sum(c.numel for c in engine.chunks),
        "bytes_each_way": sum(engine.sizes),
        "chunks": len(engine.chunks),
        "depth": engine.depth,
        "settings": {name: getattr(engine.config, name) for name in names},
        "contestants": race.ready,
        "errors": race.errors,
        "samples": samples,
    }


def main() -> None:
    """Measure, print a table, write the JSON."""
    args = common.step_arguments(__doc__).parse_args()
    hardware = common.hardware(args.directory)
    with common.scratch(args.directory) as folder:
        found = measure(args, folder)
    seconds = {
        name: [s["step" if name == "deepspeed" else "seconds"] for s in runs]
        for name, runs in found["samples"].items()
    }
    table = {name: {"median_s": round(statistics.median(times), 4)} for name, times in seconds.items()}
    for name in ("step", "merely"):
        table[name]["GB_per_s"] = round(2 * found["bytes_each_way"] / table[name]["median_s"] / 1e9, 4)
    speedups = {
        f"step_of_{name}": common.paired(seconds["step"], times)
        for name, times in seconds.items()
        if name != "step"
    }
    for name, row in table.items():
        print(f"{name:10} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    for name, ratio in speedups.items():
        print(f"{name:20} {common.ratio_text(ratio, TARGETS[name])}")
    common.publish(
        args.output,
        {
            "benchmark": "optimizer_step: AdamW, fp32 state on NVMe, gradients in host memory",
            "what": (__doc__ or "").split("\n\n")[2:],
            "rounds": args.rounds,
            "warmup_rounds": args.warmup,
            "table": table,
            "speedups": speedups,
            "targets": TARGETS,
            "hardware": hardware,
            "versions": common.versions(),
            **found,
        },
    )


if __name__ == "__main__":
    main()
