"""`infinity.save` and `infinity.load` beside the rate at which the same engine moves those bytes.

    python benchmarks/checkpoints.py --directory /mnt/nvme --output results.json

GPT-2 203 M in bf16 with everything on NVMe, checkpoints on the same drive. In every round, in an order that
rotates:

save       `infinity.save`: 12 bytes per parameter are read from the arena and written to new files, with
           their checksums; over when all of it would survive a power failure
replace    the same in the place of an older one, which is removed in the end
load       `infinity.load` of that: 12 bytes per parameter are read from files, checked, and written to
           the arena, with the 2 of the copy
merely     the engine reads and writes 12 bytes per parameter of the arena and computes nothing: its store,
           leases, chunks, order and depth, checksums included

The page cache is dropped before each turn, where this may be done, and what a save leaves in it is synced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from steps import ADAMW

import infinity
from infinity.api.engine import engine_of
from infinity.planning.footprint import UPDATE_DEPTH

WANTED = 0.8


class Engine:
    """A wrapped model after one step, and what moves its bytes."""

    def __init__(self, directory: str, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        gpt2 = common.model_of(args)
        os.mkdir(own := os.path.join(directory, "run"))
        self.root, self.another = (os.path.join(directory, n) for n in ("checkpoints", "another"))
        config = infinity.Config(
            nvme=own,
            device="cpu",
            dtype="bf16",
            parameters="nvme",
            optimizer_state="nvme",
            gradients="nvme",
            update="sync",
            threads=args.threads,
        )
        model = gpt2.build()
        self.model, self.optimizer = infinity.wrap(
            model, torch.optim.AdamW(model.parameters(), **ADAMW), config
        )
        gpt2.loss_of(args.tokens, "cpu")(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine = engine_of(self.model)
        self.depth = UPDATE_DEPTH
        self.chunks = [c for u in self.engine.units for c in u.layout.trainable_chunks]
        self.sizes = [self.engine.tiers.places[c.id].lease_nbytes for c in self.chunks]
        self.nbytes = sum(self.engine.tiers.plans[c.id].parts["state"].nbytes for c in self.chunks)
        infinity.save(self.optimizer, self.root)

    def save(self) -> None:
        infinity.save(self.optimizer, self.another)

    def replace(self) -> None:
        infinity.save(self.optimizer, self.root)

    def load(self) -> None:
        infinity.load(self.optimizer, self.root)
        self.engine.store.wait_written()

    def merely(self) -> None:
        """Read the state of each chunk and write it back, as many at once as the update's depth."""
        common.read_and_write(self.engine, self.chunks, self.sizes, self.depth)


def timed(engine: Engine, call: Callable[[], None]) -> float:
    """Return the seconds that `call` takes, from an empty page cache."""
    shutil.rmtree(engine.another, ignore_errors=True)
    os.sync()
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("1")
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, say and store."""
    args = common.step_arguments(__doc__).parse_args()
    with common.scratch(args.directory) as directory:
        engine = Engine(directory, args)
        try:
            names = ("save", "replace", "load", "merely")
            calls = {name: partial(timed, engine, getattr(engine, name)) for name in names}
            samples = common.Race(calls).run(args.warmup, args.rounds)
        finally:
            infinity.close(engine.optimizer)
            for root in (engine.root, engine.another):
                shutil.rmtree(root, ignore_errors=True)
    result: dict[str, Any] = {
        "benchmark": "checkpoints",
        "hardware": common.hardware(args.directory),
        "versions": common.versions(),
        "bytes_each_way": engine.nbytes,
        "seconds": {name: round(statistics.median(s), 4) for name, s in samples.items()},
        "of_merely": {n: common.paired(samples[n], samples["merely"]) for n in ("save", "replace", "load")},
        "wanted": WANTED,
        "samples": samples,
    }
    for name, ratio in result["of_merely"].items():
        print(f"{name}, times the engine's own rate: {common.ratio_text(ratio, WANTED)}")
    common.publish(args.output, result)


if __name__ == "__main__":
    main()
