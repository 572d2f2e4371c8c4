"""Counts what the device is given, and who waits for it, in one step of a small model on the lagging device.

python -m tests.lagging.counts CASE …
Prints a line of JSON for each case: its name, and its parameters, units and chunks, bytes of the compute
parameters; for `forward`, `backward` and `step`, with the update behind that, launches, copies, those that
block, events, waits of streams and of each thread, and bytes that were read of compute parameters. `clip` and
`foreach` are torch's clip_grad_norm_.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import infinity
from infinity.api.engine import engine_of

from .cuda import lagging_cuda, make_known
from .programs import Loop
from .run import CASES, built
from .world import World

#: Autograd's own threads have no name of ours.
_AUTOGRAD = "host waits: Dummy"


def count(case: dict[str, Any], nvme: str) -> dict[str, Any]:
    """Return the counts of the fourth step, after which the order of units is known."""
    case = {**case, "accumulation": 1} if case.get("accumulation") else case
    phases: dict[str, collections.Counter[str]] = {}
    with lagging_cuda() as world:

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            before = world.counts.copy()
            yield
            phases[name] = world.counts - before

        plain, adam, config = built(case, nvme)
        model, optimizer = infinity.wrap(plain, adam, config)
        loop = Loop(model, optimizer, "lagging:0")
        _count_reads(world, [unit.storage for unit in engine_of(model).units])
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
                if config.update == "delayed":  # `flush` would put into use what the next step publishes
                    engine_of(model).updater.wait()
                else:
                    infinity.flush(optimizer)
        pinned = world.counts["registrations"] - registrations
        if config.update != "backward":
            loop.backward()
            engine_of(model).gradients.wait()
            for name, foreach in (("clip", None), ("foreach", True)):
                with phase(name):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        nbytes = sum(unit.storage.nbytes() for unit in engine_of(model).units)
        units = [unit.layout for unit in engine_of(model).units]
        infinity.close(model)
    for counts in phases.values():
        for name in [name for name in counts if name.startswith(_AUTOGRAD)]:
            counts["host waits: autograd"] += counts.pop(name)
    return {
        "parameters": sum(len(unit.params) for unit in units),
        "units": len(units),
        "chunks": sum(len(unit.trainable_chunks) for unit in units),
        "bytes": nbytes,
        "registrations after wrap": pinned,
        **phases,
    }


def _count_reads(world: World, storages: Sequence[torch.UntypedStorage]) -> None:
    """Count the bytes of `storages` that are read on the device."""
    put = world.put

    def counted(stream: Any, call: Any, reads: Any, writes: Any, what: str) -> None:
        for begin, end in reads:
            if any(s.data_ptr() <= begin < s.data_ptr() + s.nbytes() for s in storages):
                world.counts["bytes read"] += end - begin
        put(stream, call, reads, writes, what)

    world.put = counted  # type: ignore[method-assign]


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    given = parser.parse_args()
    make_known()
    torch.set_num_threads(1)
    for case in given.cases:
        with tempfile.TemporaryDirectory() as nvme:
            sys.stdout.write(json.dumps([case, count(CASES[case], nvme)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
