"""CPU Adam: bf16 gradient → fp32 state → bf16 copy, beside its peers and beside what memory allows.

    python benchmarks/adam.py --output benchmarks/results/adam.json
    python benchmarks/adam.py --deepspeed-python /path/to/venv/bin/python

Each repetition runs every contestant once, in an order that rotates, so that a slow moment of the machine
meets all of them. What is compared:

kernel      infinity's update: one pass
kernel_bf16 the same with moments in bf16, rounded stochastically: 10 B read and 10 B written
kernel_8bit the same with moments in 8 bits: 8.03 B read and 8.03 B written
ceiling     the loads and stores of that pass and none of its arithmetic: 14 B read and 14 B written
            per parameter, with ordinary stores and with stores past the caches; the better counts
torch       grad32.copy_(grad); AdamW(fused=True).step(); copy.copy_(master)
deepspeed   the same with DeepSpeedCPUAdam, in a process of its own, if there is one

The kernel and the ceiling work on huge pages, as the engine's pool does. A peer works on what torch
allocates, as its user would have it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from children import Child, lines, tell

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def peer_step(name: str, numel: int) -> Callable[[], None]:
    """Return one update of `numel` parameters by a peer: cast, step, cast."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=generator))
    grad, copy = parameter.detach().bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    parameter.grad = torch.zeros(numel)
    if name == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], fused=True, **HYPER)
        count: Any = torch.tensor(0.0)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer, count = DeepSpeedCPUAdam([parameter], adamw_mode=True, **HYPER), 0
    exp_avg = parameter.detach() * 0.1
    optimizer.state[parameter] = {"step": count, "exp_avg": exp_avg, "exp_avg_sq": exp_avg.square()}

    def step() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(grad)
        optimizer.step()
        copy.copy_(parameter.detach())

    return step


def timed(step: Callable[[], None]) -> float:
    """Return the seconds that `step` takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def serve(numel: int, threads: int) -> None:
    """Be DeepSpeed's process: answer each line with the seconds of one step."""
    torch.set_num_threads(threads)
    step = peer_step("deepspeed", numel)
    step()
    tell({"peer_deepspeed": sys.modules["deepspeed"].__version__, "peer_torch": torch.__version__})
    for _ in lines():
        tell({"seconds": timed(step)})


def main() -> None:
    """Measure, print a table, write the JSON."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(*map(int, sys.argv[2:4]))
    import common
    from adam_work import MOMENTS, AdamWork

    from infinity.hardware import cpu_adam

    parser = common.arguments((__doc__ or "").split("\n\n")[0], directory=False)
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=11, help="at least 7")
    args: argparse.Namespace = parser.parse_args()
    if args.repetitions < 7:
        parser.error("--repetitions: a median of fewer than 7 says little")
    torch.set_num_threads(args.threads)
    cpu_adam.set_threads(args.threads)
    forms = {
        "kernel" + ("" if form == "fp32" else f"_{form}") + ("_split" if split else ""): (form, split)
        for split in (False, True)
        for form in MOMENTS
    }
    works = {name: AdamWork(args.params, form, split_master=split) for name, (form, split) in forms.items()}
    work = works["kernel"]

    def ceiling(past_caches: bool) -> float:
        took = timed(functools.partial(work.traffic, past_caches=past_caches))
        work.reset()  # moving exchanges values, and a kernel on nonsense is no measure
        return took

    runs: dict[str, Callable[[], float]] = {
        **{name: functools.partial(timed, each.update) for name, each in works.items()},
        "torch": functools.partial(timed, peer_step("torch", args.params)),
        "ceiling_past_caches": functools.partial(ceiling, True),
        "ceiling_ordinary": functools.partial(ceiling, False),
    }
    with common.Race(runs) as race:
        if args.deepspeed_python:
            command = [args.deepspeed_python, os.path.abspath(__file__), "--serve"]
            command += [str(args.params), str(args.threads)]
            start = functools.partial(Child, "deepspeed", command, env={"DS_ACCELERATOR": "cpu"}, timeout=900)
            race.start("deepspeed", start, lambda child: float(child.ask("go")["seconds"]))
        else:
            print("DeepSpeed is not measured: no --deepspeed-python", file=sys.stderr)
        seconds = race.run(2, args.repetitions)

    rate = {name: args.params / statistics.median(times) / 1e6 for name, times in seconds.items()}
    most = max(rate["ceiling_past_caches"], rate["ceiling_ordinary"])
    ratios = {"of_ceiling": rate["kernel"] / most}
    ratios |= {f"of_{name}": rate["kernel"] / rate[name] for name in works if name != "kernel"}
    ratios |= {f"of_{name}": rate["kernel"] / rate[name] for name in ("torch", "deepspeed") if name in rate}
    for name, value in rate.items():
        moved = works.get(name, work).moved
        print(f"{name:22s} {value:8.1f} Mparam/s  {value * moved / 1e3:6.2f} GB/s")
    for name, value in ratios.items():
        print(f"kernel {name:15s} {value:8.3f}")
    common.publish(
        args.output,
        {
            "benchmark": "adam: bf16 gradient, fp32 state, bf16 copy",
            "params": args.params,
            "repetitions": args.repetitions,
            "isa": cpu_adam.isa(),
            "threads": args.threads,
            "mparam_per_s": {name: round(value, 1) for name, value in rate.items()},
            "ceiling_gb_per_s": round(most * work.moved / 1e3, 2),
            "ratios": {name: round(value, 4) for name, value in ratios.items()},
            "seconds": {name: [round(t, 5) for t in times] for name, times in seconds.items()},
            "hardware": common.hardware(),
            "versions": {**common.versions(), **race.ready.get("deepspeed", {})},
            "errors": race.errors,
        },
    )


if __name__ == "__main__":
    main()
