"""Training steps of GPT-2 over two ranks (gloo, ZeRO stage 3) beside DeepSpeed and FSDP2.

    python benchmarks/ranks.py --directory /mnt/nvme --deepspeed-python /path/to/python \\
        --layers 8 --width 768 --output results.json

Every contestant is two processes, each with one torch thread and a sequence of its own, that wait for a line
while others work; in every round each contestant takes one turn of some steps, in an order that rotates:

infinity-host  parameters, gradients and optimizer state in host memory
infinity-nvme  all of it on the drive
deepspeed      stage 3, optimizer and parameters offloaded to the CPU
fsdp2          torch's `fully_shard` of every block, CPUOffloadPolicy(pin_memory=False) where that works on a
               mesh of CPUs, and torch's fused AdamW

A turn ends when all of its work is complete on both ranks. ``seconds`` are those of a turn by the number of
its steps. A ratio is that of the same round; the figure is their median, with 95 % bounds as in
common.py (of 7 rounds: the lowest and the highest; of 9: the second of either end). Memory is the
peak of the larger rank while it takes steps: the resident set, and that without pages of files, which are
those of libraries. It counts as the same work if every rank's first loss, and within a hundredth the last one
of the first turn, agree (DeepSpeed's updates differ a little from torch's); if not, the run fails. One that
fails is part of the result, with its error; the others go on.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import common
from children import Child, forget_peak, lines, peak_anonymous, peak_memory, tell
from gpt2 import GPT2

WORLD = 2
OURS = ("infinity-host", "infinity-nvme")
PEERS = ("deepspeed", "fsdp2")
WANTED = {"of_deepspeed": 1.5, "of_fsdp2": 1.0}
LR = 1e-4
#: What a rank says of a turn.
ANSWERS = ("losses", "peak_rss", "peak_anonymous")
#: By how much losses of the same work may differ, as a share: the first one, and one after updates.
AGREE = {"fp32": (1e-4, 1e-2), "bf16": (1e-2, 1e-2)}


class Ranks:
    """The processes of one contestant."""

    def __init__(self, name: str, dtype: str, folder: str, args: argparse.Namespace) -> None:
        python = args.deepspeed_python if name == "deepspeed" else sys.executable
        root = str(Path(__file__).resolve().parent.parent)
        told = {"name": name, "model": dataclasses.asdict(_model(args)), "tokens": args.tokens}
        told |= {"dtype": dtype, "directory": os.path.join(folder, f"{dtype}-{name}")}
        told |= {"config": json.loads(args.config), "zero": json.loads(args.zero), "limit": args.limit}
        os.makedirs(told["directory"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

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
        first = _first_error(starting)
        self._children = [each.result() for each in starting if not each.exception()]
        if first is not None:
            self.close()
            raise first
        self.ready = self._children[0].ready

    def turn(self, steps: int) -> dict[str, Any]:
        """Take steps; return seconds of one, the losses of the first and the last, and peaks of memory.

        Raises:
            ChildError: a rank ended, or did not answer in time.
        """
        begin = time.perf_counter()
        asked = [self._pool.submit(child.ask, str(steps)) for child in self._children]
        first = _first_error(asked)
        if first is not None:
            raise first
        seconds = (time.perf_counter() - begin) / steps
        answers = [each.result() for each in asked]
        return {"seconds": seconds, **{key: [a[key] for a in answers] for key in ANSWERS}}

    def close(self) -> None:
        """End both."""
        list(self._pool.map(Child.close, self._children))
        self._pool.shutdown()


def _first_error(futures: list[Future[Any]]) -> BaseException | None:
    """Wait for all; return the error of the one that failed first: the others' follow from it."""
    errors = [each.exception() for each in as_completed(futures)]
    return next((error for error in errors if error is not None), None)


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
        **told["config"],
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
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0, **told["zero"]},
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

    signal.alarm(told["limit"])  # whatever it hangs in, and even if the parent was killed
    torch.set_num_threads(1)
    model = GPT2(**told["model"])
    makers = {"deepspeed": with_deepspeed, "fsdp2": with_fsdp2}
    built, step, settle = makers.get(told["name"], with_infinity)(told, model)
    random = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    data = torch.randint(0, model.vocabulary, (1, told["tokens"]), generator=random)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building took is not what steps take
    tell({"versions": versions(*PACKAGES), "threads": torch.get_num_threads()})
    forget_peak()
    for line in lines():
        losses = []
        for _ in range(int(line)):
            loss = built(input_ids=data, labels=data).loss
            step(loss)
            losses.append(float(loss))
        settle()
        tell({"losses": losses, "peak_rss": peak_memory(), "peak_anonymous": peak_anonymous()})


# -- the race ---------------------------------------------------------------------------------


def race(names: list[str], dtype: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Have all contestants take turns; return what came of it."""
    with common.Race(title=dtype) as run:
        for name in names:
            run.start(name, partial(Ranks, name, dtype, folder, args), lambda ranks: ranks.turn(args.burst))
        samples = run.run(args.warmup, args.rounds)
    first = {name: run.first[name]["losses"] for name in samples}
    return {
        **figures(samples),
        "first_losses": first,
        "same_work": agree(first, *AGREE[dtype]),
        "errors": run.errors,
        "contestants": run.ready,
        "samples": samples,
    }


def figures(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each contestant's medians and peaks, and how many times as fast ours are, with bounds."""
    times = {name: [s["seconds"] for s in runs] for name, runs in samples.items()}
    table = {
        name: {
            "seconds": statistics.median(times[name]),
            **{key: max(max(s[key]) for s in runs) for key in ("peak_rss", "peak_anonymous")},
        }
        for name, runs in samples.items()
    }
    speedups: dict[str, dict[str, Any]] = {}
    for name in (n for n in OURS if n in times):
        speedups[name] = {}
        for peer in (p for p in PEERS if p in times):
            memory = table[peer]["peak_anonymous"] / table[name]["peak_anonymous"]
            speedups[name][f"of_{peer}"] = {**common.paired(times[name], times[peer]), "memory": memory}
    return {"table": table, "speedups": speedups}


def agree(losses: dict[str, list[list[float]]], at_first: float, at_last: float) -> bool:
    """Return whether all have the same losses (contestant → rank → step of the first turn): those of the
    first step and of the last, within such shares of the first contestant's."""
    all_of_them = list(losses.values())
    return all(
        abs(mine[step] - other[step]) <= share * abs(other[step])
        for each in all_of_them
        for mine, other in zip(each, all_of_them[0], strict=True)
        for step, share in ((0, at_first), (-1, at_last))
    )


def show(dtype: str, group: dict[str, Any]) -> None:
    """Print one race."""
    print(f"\n{dtype}: seconds per step, peak of a rank in GB (without pages of files), losses at first")
    for name, row in group["table"].items():
        memory = f"{row['peak_rss'] / 1e9:.2f} ({row['peak_anonymous'] / 1e9:.2f})"
        losses = " ".join(f"{rank[0]:.5f}" for rank in group["first_losses"][name])
        print(f"  {name:14} {row['seconds']:.3f} s  {memory} GB  {losses}")
    for name, ratios in group["speedups"].items():
        for peer, ratio in ratios.items():
            said = common.ratio_text(ratio, WANTED[peer] if name == "infinity-host" else None)
            print(f"  {name} {peer:12} {said}; that takes {ratio['memory']:.2f} × the memory")
    if not group["same_work"]:
        print(f"  the losses differ, so this is not the same work: {group['first_losses']}")


def main() -> None:
    """Measure, print tables, write the JSON."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(json.loads(sys.argv[2]))

    parser = common.step_arguments(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(AGREE), default=["fp32"])
    parser.add_argument("--burst", type=int, default=3, help="steps of a turn")
    everybody = (*OURS, *PEERS)
    parser.add_argument("--contestants", nargs="+", choices=everybody, default=list(everybody))
    parser.add_argument("--zero", default="{}", help="more of DeepSpeed's zero_optimization, as JSON")
    parser.add_argument("--limit", type=int, default=1200, help="seconds after which a rank ends itself")
    parser.set_defaults(timeout=240, warmup=1)
    args = parser.parse_args()
    names = [n for n in args.contestants if n != "deepspeed" or args.deepspeed_python]
    if not names:
        parser.error("DeepSpeed needs --deepspeed-python")
    hardware = common.hardware(args.directory)
    groups: dict[str, Any] = {}
    with common.scratch(os.path.abspath(args.directory)) as folder:
        for dtype in args.dtypes:
            groups[dtype] = race(names, dtype, folder, args)
            show(dtype, groups[dtype])
    model = _model(args)
    result = {
        "benchmark": f"ranks: GPT-2 over {WORLD} ranks, gloo, stage 3, {args.tokens} tokens",
        "model": {**dataclasses.asdict(model), "parameters": model.parameters},
        **{name: getattr(args, name) for name in ("tokens", "rounds", "burst")},
        "warmup_rounds": args.warmup,
        "dtypes": groups,
        "wanted": WANTED,
        "versions": common.versions(),
        "hardware": hardware,
    }
    common.publish(args.output, result)
    if any(not g["same_work"] or not g["errors"].keys().isdisjoint(OURS) for g in groups.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
