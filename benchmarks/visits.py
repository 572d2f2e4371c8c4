"""The cost of a visit of a unit, by the number of units: forward and backward, in microseconds.

    python benchmarks/visits.py --output benchmarks/results/visits.json

The units are tiny layers, so the figures are the engine's own time for a unit: the elapsed time of a pass,
divided by the number of units. In `all fit` the parameters are on the host, and the device has room for all.
In `half fit` it has room for half of them. In `device` they are placed on the device, and nothing moves. In
`inference` they are placed there, and nothing is trained. `torch` is the plain model. The time of a visit
must not depend on the number of units.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import arguments, hardware, publish, turns, versions
from torch import nn

import infinity

WIDTH = 16
CASES = ("torch", "all fit", "half fit", "device", "inference")


def layers(units: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))


@contextlib.contextmanager
def contestant(case: str, units: int) -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield a call that makes a forward and a backward, and returns the seconds of both."""
    model: Any = layers(units)
    nbytes = sum(p.nbytes for p in model.parameters())
    there = "device" if case in ("device", "inference") else "host"
    config = infinity.Config(
        device="cpu",
        dtype="fp32",
        units=["Linear"],
        parameters=there,
        optimizer_state="host",
        gradients="host",
        device_memory=nbytes // 2 if case == "half fit" else 64 * nbytes + (64 << 20),
        host_memory=64 * nbytes + (256 << 20),
    )
    owner: Any = None
    if case == "inference":
        model = owner = infinity.inference(model, config)
    elif case != "torch":
        model, owner = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    x = torch.ones(2, WIDTH)

    def cycle() -> tuple[float, float]:
        begin = time.perf_counter()
        with torch.set_grad_enabled(case != "inference"):
            y = model(x)
        between = time.perf_counter()
        if case != "inference":
            y.sum().backward()
        end = time.perf_counter()
        (owner if case not in ("torch", "inference") else model).zero_grad()
        return between - begin, end - between

    try:
        yield cycle
    finally:
        if owner is not None:
            infinity.close(owner)


def measure(units: int, warmup: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of all cases with so many units, in microseconds for one visit."""
    samples: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    with contextlib.ExitStack() as stack:
        cycles = {case: stack.enter_context(contestant(case, units)) for case in CASES}
        for case, counts in turns(CASES, warmup, rounds):
            seconds = cycles[case]()
            if counts:
                samples[case].append(seconds)
    result: dict[str, dict[str, float]] = {}
    for case, seconds in samples.items():
        forward, backward = (statistics.median(s) * 1e6 / units for s in zip(*seconds, strict=True))
        result[case] = {"forward": round(forward, 2)}
        if case != "inference":
            result[case]["backward"] = round(backward, 2)
        print(f"{units:6} units  {case:10}", "  ".join(f"{k} {v:9.1f} µs" for k, v in result[case].items()))
    return result


def main() -> None:
    parser = arguments(__doc__, directory=False)
    parser.add_argument("--units", type=int, nargs="+", default=[50, 200, 800, 3200])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = hardware()
    found = {str(units): measure(units, args.warmup, args.rounds) for units in args.units}
    publish(
        args.output,
        {
            "benchmark": "visits",
            "hardware": machine,
            "versions": versions(),
            "microseconds_of_a_visit": found,
        },
    )


if __name__ == "__main__":
    main()
