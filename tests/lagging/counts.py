"""Counts what the device is given, and who waits for it, in one step of a small model on the lagging device.

python -m tests.lagging.counts CASE
Prints JSON: parameters, units and chunks; for `forward`, `backward` and `step`, with the update behind that,
launches, copies, those that block, events, waits of streams and of each thread.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

import infinity
from infinity.api.engine import engine_of

from .cuda import lagging_cuda, make_known
from .programs import Loop
from .run import CASES, Net

#: Autograd's own threads have no name of ours.
_AUTOGRAD = "host waits: Dummy"


def count(case: dict[str, Any], nvme: str) -> dict[str, Any]:
    """Return the counts of the fourth step, after which the order of units is known."""
    settings = {"dtype": "bf16", "max_grad_norm": 0.5, "update": "overlap", "device_memory": "64MiB", **case}
    settings = {"units": ["Block", "head"], "host_memory": "256MiB", "threads": 1, **settings}
    config = infinity.Config(device="cpu", nvme=nvme, **settings)
    phases: dict[str, collections.Counter[str]] = {}
    with lagging_cuda() as world:

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            before = world.counts.copy()
            yield
            phases[name] = world.counts - before

        torch.manual_seed(0)
        model = Net()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = infinity.wrap(model, adam, config)
        loop = Loop(model, optimizer, "lagging:0")
        registrations = world.counts["registrations"]
        for _ in range(4):
            batch = loop.batch()
            with phase("forward"):
                loss = loop.loss(batch)
            with phase("backward"):
                loss.backward()
                engine_of(model).gradients.wait()  # those that are on their way belong to it
            with phase("step"):
                optimizer.step()
                optimizer.zero_grad()
                infinity.flush(optimizer)
        pinned = world.counts["registrations"] - registrations
        units = [unit.layout for unit in engine_of(model).units]
        infinity.close(model)
    for counts in phases.values():
        for name in [name for name in counts if name.startswith(_AUTOGRAD)]:
            counts["host waits: autograd"] += counts.pop(name)
    return {
        "parameters": sum(len(unit.params) for unit in units),
        "units": len(units),
        "chunks": sum(len(unit.trainable_chunks) for unit in units),
        "registrations after wrap": pinned,
        **phases,
    }


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    given = parser.parse_args()
    make_known()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as nvme:
        sys.stdout.write(json.dumps(count(CASES[given.case], nvme)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
