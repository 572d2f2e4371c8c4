"""CPU Adam: bf16 gradient → fp32 state → bf16 copy, beside its peers and beside what memory allows.

    python benchmarks/adam.py --output benchmarks/results/adam.json
    python benchmarks/adam.py --deepspeed-python /path/to/venv/bin/python

Each repetition runs every contestant once, in a new order, so that a slow moment of the machine meets
all of them. What is compared:

kernel      infinity's update: one pass
ceiling     the loads and stores of that pass and none of its arithmetic: 14 B read and 14 B written
            per parameter, with ordinary stores and with stores past the caches; the better counts
torch       grad32.copy_(grad); AdamW(fused=True).step(); copy.copy_(master)
deepspeed   the same with DeepSpeedCPUAdam, in a process of its own, if there is one

The kernel and the ceiling work on huge pages, as the engine's pool does. A peer works on what torch
allocates, as its user would have it; `torch_huge_pages` shows what the pages alone bring.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BYTES_PER_PARAM = 28
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
HUGE = 2 << 20


def flat(numel: int, dtype: torch.dtype, huge: bool) -> torch.Tensor:
    """Return (numel,) zeros; `huge`: on huge pages, beginning at one."""
    if not huge:
        return torch.zeros(numel, dtype=dtype)
    nbytes = numel * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % HUGE
    return whole[skip : skip + nbytes].view(dtype).zero_()


class Buffers:
    """Master, moments, gradient and copy of `numel` parameters, with plausible values."""

    def __init__(self, numel: int, *, huge: bool) -> None:
        self._huge = huge
        generator = torch.Generator().manual_seed(0)
        self.master, self.exp_avg, self.exp_avg_sq = (flat(numel, torch.float32, huge) for _ in range(3))
        self.grad, self.copy = (flat(numel, torch.bfloat16, huge) for _ in range(2))
        self._generator = generator
        self.reset()

    def reset(self) -> None:
        """Fill with values such as training has."""
        self.master.normal_(generator=self._generator)
        self.grad.copy_(self.master)
        self.exp_avg.copy_(self.master).mul_(0.1)
        self.exp_avg_sq.copy_(self.exp_avg).square_()

    def grad32(self) -> torch.Tensor:
        """Return room for the gradient in fp32, which the peers need."""
        return flat(self.grad.numel(), torch.float32, self._huge)


def peer_step(name: str, buffers: Buffers) -> Callable[[], None]:
    """Return one update by a peer: cast, step, cast."""
    parameter = torch.nn.Parameter(buffers.master)
    parameter.grad = buffers.grad32()
    if name == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([parameter], fused=True, **HYPER)
        count: Any = torch.tensor(0.0)
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **HYPER)
        count = 0
    moments = {"exp_avg": buffers.exp_avg, "exp_avg_sq": buffers.exp_avg_sq}
    optimizer.state[parameter] = {"step": count, **moments}

    def step() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(buffers.grad)
        optimizer.step()
        buffers.copy.copy_(parameter.detach())

    return step


def timed(step: Callable[[], None]) -> float:
    """Return the seconds that `step` takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class Child:
    """The peer in another interpreter: one step each time it is asked."""

    def __init__(self, python: str, numel: int, threads: int) -> None:
        command = [python, os.path.abspath(__file__), "--serve", "deepspeed", "--params", str(numel)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions: dict[str, str] = json.loads(self._line("ready "))

    def _line(self, prefix: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # DeepSpeed prints what it likes
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        raise RuntimeError(f"the peer's process ended with status {self._process.wait()}")

    def step(self) -> float:
        """Return the seconds of one step there."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._line("took "))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def serve(name: str, numel: int, threads: int) -> None:
    """Be the peer's process: answer each line with the seconds of one step."""
    torch.set_num_threads(threads)
    step = peer_step(name, Buffers(numel, huge=False))
    step()
    module = sys.modules[name]
    print("ready " + json.dumps({name: module.__version__, "torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        print(f"took {timed(step)!r}", flush=True)


def hardware(threads: int) -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu, memory = platform.machine(), 0
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "memory_bytes": memory,
        "kernel": platform.release(),
        "transparent_hugepage": huge.read_text().strip() if huge.exists() else None,
    }


def contestants(numel: int, threads: int, python: str | None) -> tuple[dict[str, Callable[[], float]], Any]:
    """Return name → one timed run, and the peer's process if there is one."""
    from infinity import _cpu_adam
    from infinity.hardware import cpu_adam

    ours = Buffers(numel, huge=True)
    count = 0

    def kernel() -> None:
        nonlocal count
        count += 1
        cpu_adam.adamw_update(
            *(ours.master, ours.exp_avg, ours.exp_avg_sq, ours.grad, ours.copy),
            lr=HYPER["lr"],
            beta1=HYPER["betas"][0],
            beta2=HYPER["betas"][1],
            eps=HYPER["eps"],
            weight_decay=HYPER["weight_decay"],
            step=count,
        )

    def traffic(stream: bool) -> Callable[[], float]:
        # On the kernel's own buffers: other pages may be smaller, or farther away.
        def move() -> None:
            p, m, v = ours.master.data_ptr(), ours.exp_avg.data_ptr(), ours.exp_avg_sq.data_ptr()
            _cpu_adam.measure(p, m, v, ours.grad.data_ptr(), 1, ours.copy.data_ptr(), 1, numel, stream)

        def run() -> float:
            took = timed(move)
            ours.reset()  # moving exchanges values, and a kernel on nonsense is no measure
            return took

        return run

    steps: dict[str, Callable[[], None]] = {
        "kernel": kernel,
        "torch": peer_step("torch", Buffers(numel, huge=False)),
        "torch_huge_pages": peer_step("torch", Buffers(numel, huge=True)),
    }
    runs: dict[str, Callable[[], float]] = {
        **{name: functools.partial(timed, step) for name, step in steps.items()},
        "ceiling_past_caches": traffic(True),
        "ceiling_ordinary": traffic(False),
    }
    child = None
    if python is None:
        if importlib.util.find_spec("deepspeed"):
            python = sys.executable
        else:
            print("DeepSpeed is not measured: not installed, and no --deepspeed-python", file=sys.stderr)
    if python is not None:
        child = Child(python, numel, threads)
        runs["deepspeed"] = child.step
    return runs, child


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--repetitions", type=int, default=11, help="at least 7")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--deepspeed-python", default=os.environ.get("DEEPSPEED_PYTHON"))
    parser.add_argument("--output", type=Path, help="a JSON file, such as benchmarks/results/adam.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return serve(args.serve, args.params, args.threads)
    if args.repetitions < 7:
        parser.error("--repetitions: a median of fewer than 7 says little")

    from infinity.hardware import cpu_adam
    from infinity.version import __version__

    torch.set_num_threads(args.threads)
    cpu_adam.set_threads(args.threads)
    runs, child = contestants(args.params, args.threads, args.deepspeed_python)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    shuffle = random.Random(0).shuffle
    for repetition in range(args.repetitions + 2):
        shuffle(order)
        for name in order:
            took = runs[name]()
            if repetition >= 2:  # the first two warm up
                seconds[name].append(took)
    if child is not None:
        child.close()

    rate = {name: args.params / statistics.median(times) / 1e6 for name, times in seconds.items()}
    ceiling = max(rate["ceiling_past_caches"], rate["ceiling_ordinary"])
    ratios = {"of_ceiling": rate["kernel"] / ceiling}
    for name in ("torch", "torch_huge_pages", "deepspeed"):
        if name in rate:
            ratios[f"of_{name}"] = rate["kernel"] / rate[name]
    result = {
        "benchmark": "adam: bf16 gradient, fp32 state, bf16 copy",
        "command": "python " + " ".join(["benchmarks/adam.py", *map(os.path.basename, sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "params": args.params,
        "repetitions": args.repetitions,
        "isa": cpu_adam.isa(),
        "mparam_per_s": {name: round(value, 1) for name, value in rate.items()},
        "ceiling_gb_per_s": round(ceiling * BYTES_PER_PARAM / 1e3, 2),
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "seconds": {name: [round(t, 5) for t in times] for name, times in seconds.items()},
        "hardware": hardware(args.threads),
        "versions": {
            "infinity": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **({} if child is None else {f"peer_{k}": v for k, v in child.versions.items()}),
        },
    }
    for name, value in rate.items():
        print(f"{name:22s} {value:8.1f} Mparam/s  {value * BYTES_PER_PARAM / 1e3:6.2f} GB/s")
    for name, value in ratios.items():
        print(f"kernel {name:15s} {value:8.3f}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
