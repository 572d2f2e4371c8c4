"""Faults of the lagging device: memory that runs out at any allocation, a driver that refuses to pin.

python -m tests.lagging.faults CASE [--registrations] [FIRST:LAST[:STEP]]
Trains three steps, once for each of its allocations after `wrap`, which fails; tries again what raised, as a
user does; and compares every bit with a run in which none failed. `--registrations`: once for each time that
host memory is registered in `wrap`, which is refused; then wraps the same model again. Prints what differs,
and ends with 1 then.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from typing import Any

import torch

import infinity
from infinity.core.errors import ConfigError, InfinityError

from .cuda import lagging_cuda, make_known
from .run import CASES, built
from .world import Finding, World

STEPS = 3


def train(world: World, case: dict[str, Any], nvme: str, fails: int | None) -> tuple[list[torch.Tensor], str]:
    """Return the final values, and what was raised. `fails`: the number of the allocation that does."""
    given = built({"update": "sync", "max_grad_norm": None, **case}, nvme, 16)
    raised = "nothing"
    try:
        model, optimizer = infinity.wrap(*given)
    except ConfigError as error:
        raised = type(error).__name__
        if world.registered:
            raise Finding(f"{len(world.registered)} ranges stay registered") from error
        if (torch.ones(3, device="lagging") * 2).tolist() != [2.0] * 3:
            raise Finding("the next launch") from error
        model, optimizer = infinity.wrap(*given)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 16, generator=generator).to("lagging") for _ in range(STEPS)]
    world.counts["allocations"] = 0
    world.fails = fails
    try:
        for x in batches:
            for _ in range(3):
                try:
                    model(x).float().square().mean().backward()
                    optimizer.step()
                except (torch.OutOfMemoryError, InfinityError) as error:
                    raised = type(error).__name__
                    optimizer.zero_grad()
                    continue
                optimizer.zero_grad()
                break
        made = world.counts["allocations"]
        values = [value.detach().cpu().clone() for value in model.state_dict().values()]
    finally:
        infinity.close(model)
    world.counts["allocations"] = made
    return values, raised


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--registrations", action="store_true")
    parser.add_argument("which", nargs="?", default="0:")
    given = parser.parse_args()
    make_known()
    torch.set_num_threads(1)
    case = CASES[given.case]
    with tempfile.TemporaryDirectory() as nvme, lagging_cuda() as world:
        wanted, _ = train(world, case, nvme, None)
    count = world.counts["registrations" if given.registrations else "allocations"]
    which = slice(*(int(n) if n else None for n in given.which.split(":")))
    outcomes: collections.Counter[str] = collections.Counter()
    failed = 0
    for at in range(count)[which]:
        try:
            with tempfile.TemporaryDirectory() as nvme, lagging_cuda() as world:
                world.refuses = at if given.registrations else None
                values, raised = train(world, case, nvme, None if given.registrations else at)
            differ = sum(not torch.equal(a, b) for a, b in zip(wanted, values, strict=True))
            found = f"{differ} of {len(wanted)} tensors differ" if differ else ""
        except Finding as error:
            raised, found = "Finding", str(error)
        except Exception as error:
            raised, found = type(error).__name__, f"{type(error).__name__}: {error}"
        outcomes[raised] += 1
        if found:
            failed += 1
            sys.stdout.write(f"{at}: {raised}: {found}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{given.case}: {sum(outcomes.values())} of {count}, {failed} failed, {dict(outcomes)}\n"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
