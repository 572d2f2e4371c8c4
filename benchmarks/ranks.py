"""Training steps of GPT-2 over two ranks (gloo, ZeRO stage 3) beside DeepSpeed and FSDP2.

    python benchmarks/ranks.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --layers 8 --width 768 --output results.json

Every contestant is two processes, each with one torch thread and a sequence of its own; in every round each
contestant takes one turn of some steps, in an order that rotates:

infinity-host  parameters, gradients and optimizer state in host memory
infinity-nvme  all of it on the drive
deepspeed      stage 3, optimizer and parameters offloaded to the CPU
fsdp2          torch's `fully_shard` of every block, CPUOffloadPolicy(pin_memory=False) where that works on a
               mesh of CPUs, and torch's fused AdamW

A turn ends when all of its work is complete on both ranks. ``seconds`` are those of a turn by the number of
its steps; peak memory is the larger of the two ranks' resident sets. That they do the same work is seen by
the first losses.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from children import Child, ChildError, forget_peak, lines, peak_memory, tell
from gpt2 import GPT2

WORLD = 2
OURS = ("infinity-host", "infinity-nvme")
WANTED = {"of_deepspeed": 1.5, "of_fsdp2": 1.0}
LR = 1e-4


class Ranks:
    """The processes of one contestant."""

    def __init__(self, name: str, folder: str, args: argparse.Namespace, port: int) -> None:
        python = args.deepspeed_python if name == "deepspeed" else sys.executable
        root = str(Path(__file__).resolve().parent.parent)
        told = {"name": name, "model": dataclasses.asdict(_model(args)), "tokens": args.tokens}
        told |= {"dtype": args.dtype, "directory": os.path.join(folder, name)}
        os.makedirs(told["directory"])

        def start(rank: int) -> Child:
            env = {
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                **{"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)},
                "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
                "PATH": os.pathsep.join((str(Path(python).absolute().parent), os.environ.get("PATH", ""))),
            }
            env |= {"DS_ACCELERATOR": "cpu"} if name == "deepspeed" else {}
            command = [python, "-u", os.path.abspath(__file__), "--serve", json.dumps(told)]
            return Child(f"{name}-{rank}", command, env=env, timeout=args.timeout)

        self._pool = ThreadPoolExecutor(WORLD)
        starting = [self._pool.submit(start, rank) for rank in range(WORLD)]
        self._children = []
        try:
            self._children = [each.result() for each in starting]
        except BaseException:
            self._children = [each.result() for each in starting if not each.exception()]
            self.close()
            raise
        self.ready = self._children[0].ready

    def turn(self, steps: int) -> dict[str, Any]:
        """Take steps; return seconds of one, losses of the first and the peak of memory."""
        begin = time.perf_counter()
        answers = list(self._pool.map(lambda child: child.ask(str(steps)), self._children))
        seconds = (time.perf_counter() - begin) / steps
        return {
            "seconds": seconds,
            "losses": [a["loss"] for a in answers],
            "peak_rss": max(a["peak_rss"] for a in answers),
        }

    def close(self) -> None:
        """End both."""
        list(self._pool.map(Child.close, self._children))
        self._pool.shutdown()


def _model(args: argparse.Namespace) -> GPT2:
    return GPT2(**{name: getattr(args, name) for name in ("layers", "width", "vocabulary", "positions")})


# -- the child --------------------------------------------------------------------------------


def with_infinity(told: dict[str, Any], model: GPT2) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """Return a model, what makes a step of its loss, and what waits for all that is under way."""
    import torch

    import infinity

    where = told["name"].partition("-")[2]
    config = infinity.Config(
        device="cpu",
        dtype=told["dtype"],
        nvme=told["directory"],
        threads=1,
        **dict.fromkeys(("parameters", "optimizer_state", "gradients"), where),
    )
    with infinity.init(config):
        built = model.build()
    built, optimizer = infinity.wrap(built, torch.optim.AdamW(built.parameters(), lr=LR), config)

    def step(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return built, step, lambda: infinity.flush(optimizer)


def with_deepspeed(
    told: dict[str, Any], model: GPT2
) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """As `with_infinity`: DeepSpeed's ZeRO-3, everything offloaded to the CPU."""
    import deepspeed

    offload = {"device": "cpu", "pin_memory": False}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": told["dtype"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
    }
    deepspeed.init_distributed("gloo")
    built = model.build()  # not within zero.Init, where transformers gives it other values
    engine, *_ = deepspeed.initialize(model=built, model_parameters=built.parameters(), config=config)

    def step(loss: Any) -> None:
        engine.backward(loss)
        engine.step()

    return engine, step, lambda: None


def with_fsdp2(told: dict[str, Any], model: GPT2) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """As `with_infinity`: torch's `fully_shard`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,))
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if told["dtype"] == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    built = model.build()
    for block in built.transformer.h:
        fully_shard(block, **settings)
    fully_shard(built, **settings)
    optimizer = torch.optim.AdamW(built.parameters(), lr=LR, fused=True)

    def step(loss: Any) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return built, step, lambda: None


def serve(told: dict[str, Any]) -> None:
    """Build; then take as many steps as each line says."""
    import torch
    from runner import PACKAGES, versions

    torch.set_num_threads(1)
    model = GPT2(**told["model"])
    makers = {"deepspeed": with_deepspeed, "fsdp2": with_fsdp2}
    built, step, settle = makers.get(told["name"], with_infinity)(told, model)
    random = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    data = torch.randint(0, model.vocabulary, (1, told["tokens"]), generator=random)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building took is not what steps take
    tell({"versions": versions(*PACKAGES)})
    forget_peak()
    for line in lines():
        losses = []
        for _ in range(int(line)):
            loss = built(input_ids=data, labels=data).loss
            step(loss)
            losses.append(float(loss))
        settle()
        tell({"loss": losses[0], "peak_rss": peak_memory()})


# -- the race ---------------------------------------------------------------------------------


def main() -> None:
    """Measure, print a table, write the JSON."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(json.loads(sys.argv[2]))

    import common

    from infinity.cli.measure import scratch

    parser = common.step_arguments(__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--burst", type=int, default=4, help="steps of a turn")
    parser.add_argument("--contestants", nargs="+", default=[*OURS, "deepspeed", "fsdp2"])
    args = parser.parse_args()
    names = [n for n in args.contestants if n != "deepspeed" or args.deepspeed_python]
    hardware = common.hardware(args.directory)
    samples: dict[str, list[dict[str, Any]]] = {}
    first: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    ready: dict[str, Any] = {}
    all_ranks: dict[str, Ranks] = {}
    with scratch(os.path.abspath(args.directory)) as folder:
        try:
            for number, name in enumerate(names):
                try:
                    all_ranks[name] = Ranks(name, folder, args, 20_000 + os.getpid() % 9_000 + number)
                    ready[name], samples[name] = all_ranks[name].ready, []
                except ChildError as error:
                    errors[name] = error.reason
            for name, counts in common.turns(list(all_ranks), args.warmup, args.rounds):
                print(name, file=sys.stderr)
                sample = all_ranks[name].turn(args.burst)
                first.setdefault(name, sample["losses"])
                if counts:
                    samples[name].append(sample)
        finally:
            for ranks in all_ranks.values():
                ranks.close()
    times = {name: [s["seconds"] for s in runs] for name, runs in samples.items()}
    table = {
        name: {
            "seconds": statistics.median(times[name]),
            "peak_rss": max(s["peak_rss"] for s in runs),
            "first_losses": first[name],
        }
        for name, runs in samples.items()
    }
    peers = [peer for peer in ("deepspeed", "fsdp2") if peer in times]
    speedups = {
        name: {f"of_{peer}": common.paired(times[name], times[peer]) for peer in peers}
        for name in OURS
        if name in times
    }
    for name, row in table.items():
        print(f"{name:14} {row['seconds']:.3f} s  {row['peak_rss'] / 1e9:.2f} GB  {row['first_losses']}")
    for name, ratios in speedups.items():
        for peer, ratio in ratios.items():
            wanted = f"  (wanted ≥ {WANTED[peer]})" if name == "infinity-host" else ""
            print(f"  {name} {peer} {ratio['of_medians']}{wanted}")
    for name, reason in errors.items():
        print(f"  {name} failed: {reason[:160]}")
    model = _model(args)
    result = {
        "benchmark": f"ranks: GPT-2 over {WORLD} ranks, gloo, stage 3, {args.tokens} tokens, {args.dtype}",
        "model": {**dataclasses.asdict(model), "parameters": model.parameters},
        **{name: getattr(args, name) for name in ("tokens", "dtype", "rounds", "burst")},
        "warmup_rounds": args.warmup,
        "table": table,
        "speedups": speedups,
        "wanted": WANTED,
        "errors": errors,
        "contestants": ready,
        "samples": samples,
        "versions": common.versions(),
        "hardware": hardware,
    }
    common.publish(args.output, result)
    if any(name in errors for name in OURS):
        sys.exit(1)


if __name__ == "__main__":
    main()
