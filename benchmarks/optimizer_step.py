"""AdamW step of GPT-2 203 M: fp32 state on NVMe, gradients in host memory, parameters on the device.

    python benchmarks/optimizer_step.py --directory /mnt/nvme --output results.json \\
        --deepspeed-python /path/to/python

Every round runs each contestant once, in an order that rotates:

step       infinity's `optimizer.step()`, update="sync": it returns when the last write is complete
merely     the same engine reads and writes those bytes and computes nothing: the very store, leases,
           chunks, order and depth of `step`, checksums included
ring       the same chunks and depth on the I/O engine alone, without the store and its checksums,
           in a file of its own in the same directory
deepspeed  `step()` of DeepSpeed's ZeRO-3 with its pipelined NVMe swapper, after a forward and a
           backward that are not counted. It moves more bytes: it keeps its gradients on NVMe too
           (with --deepspeed-python)
fio        its mixed rate for as many bytes (with --fio)

`step` and its baselines take turns in one process; DeepSpeed is another process, and waits meanwhile.
A drive's speed drifts, so compare what one run says, not runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from typing import Any

import common

PACKAGES = ("torch", "transformers", "infinity-offload")


# -- the child: the engine and its baselines ----------------------------------------------------


class Engine:
    """The wrapped model after one backward, and what moves its bytes without an update."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        import infinity
        from infinity.api.engine import engine_of
        from infinity.hardware.aio import DirectFile, open_ring

        torch.set_num_threads(args.threads)
        task = common.model_of(args)
        model = task.build()
        self.config = infinity.Config(
            nvme=args.directory,
            device="cpu",
            dtype="fp32",
            parameters="device",
            optimizer_state="nvme",
            gradients="host",
            update="sync",
            threads=args.threads,
            **json.loads(args.config),
        )
        optimizer = torch.optim.AdamW(model.parameters(), **common.ADAMW)
        self.model, self.optimizer = infinity.wrap(model, optimizer, self.config)
        self.loss = task.loss_of(1, args.tokens, "cpu")(self.model)
        self.loss.backward()
        self.engine = engine_of(self.model)
        self.plans = self.engine.places.plans
        self.chunks = [c for u in self.engine.units for c in u.layout.trainable_chunks]
        self.sizes = [sum(self.plans[c.id].state_sections) for c in self.chunks]
        self.depth = self.engine.footprint.quotas["update"].slots
        # The ring's own file: every chunk, one after the other.
        self.path = os.path.join(args.directory, "ring.dat")
        self.nbytes = sum(self.sizes)
        with open(self.path, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, self.nbytes)
            piece = os.urandom(1 << 22)
            for start in range(0, self.nbytes, len(piece)):
                file.write(piece[: self.nbytes - start])
            os.fsync(file.fileno())
        self.ring = open_ring("benchmark", args.directory, "auto", None, None, 120.0, None)
        self.file = DirectFile.open(self.path)
        self.ring.register_file(self.file)
        for address, size in self.engine.pool.buffers():
            self.ring.register_buffer(address, size)

    def step(self) -> None:
        """The optimizer's step. The gradients stay, so that each step has the same work."""
        self.optimizer.step()

    def merely(self) -> None:
        """Read each chunk's state through the store and write it back."""
        store = self.engine.store
        self._move(
            lambda k, lease: store.read(self.chunks[k].id, "state", lease),
            lambda k, lease: store.write(self.chunks[k].id, "state", lease),
        )
        store.flush()

    def raw(self) -> None:
        """The same through the ring alone."""
        starts = [sum(self.sizes[:k]) for k in range(len(self.sizes))]
        self._move(
            lambda k, lease: self.ring.read(self.file, starts[k], lease.io_address, self.sizes[k]),
            lambda k, lease: self.ring.write(self.file, starts[k], lease.io_address, self.sizes[k]),
        )

    def _move(self, read: Any, write: Any) -> None:
        """Every chunk through a lease: as many at once as the engine's depth, in its order; what
        was begun first is waited for first."""
        todo = deque(range(len(self.chunks)))
        under_way: deque[tuple[int, Any, Any, bool]] = deque()
        while todo or under_way:
            lease = None
            if todo and len(under_way) < self.depth:
                lease = self.engine.pool.try_lease("update", self.sizes[todo[0]])
            if lease is not None:
                k = todo.popleft()
                under_way.append((k, lease, read(k, lease), False))
                continue
            k, lease, transfer, written = under_way.popleft()
            transfer.wait()
            if written:
                lease.release()
            else:
                under_way.append((k, lease, write(k, lease), True))

    def close(self) -> None:
        """Give everything back."""
        import infinity

        self.ring.close()
        self.file.close()
        infinity.close(self.model)


def serve(args: argparse.Namespace) -> None:
    """Do what the parent asks for, and time it."""
    engine = Engine(args)
    calls = {"step": engine.step, "merely": engine.merely, "ring": engine.raw}
    common.tell(
        {
            "params": sum(c.numel for c in engine.chunks),
            "chunks": len(engine.chunks),
            "depth": engine.depth,
            "bytes_each_way": engine.nbytes,
            "loss": float(engine.loss.detach()),
            "settings": {
                name: getattr(engine.config, name)
                for name in ("chunk_elements", "update_depth", "block_bytes", "queue_depth", "aio_backend")
            },
            "versions": common.versions(*PACKAGES),
        }
    )
    for line in common.lines():
        before = time.process_time()
        start = time.perf_counter()
        calls[line]()
        seconds = time.perf_counter() - start
        common.tell({"seconds": seconds, "cpu_seconds": time.process_time() - before})
    engine.close()


# -- the parent -----------------------------------------------------------------------------------


def fio(directory: str, nbytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return fio's seconds for reading and writing `nbytes` each, at once."""
    command = [
        "fio",
        "--name=mixed",
        f"--filename={directory}/fio.dat",
        f"--size={min(2 * nbytes, 4 << 30)}",
        f"--io_size={2 * nbytes}",
        "--bs=1M",
        "--iodepth=32",
        "--ioengine=libaio",
        "--direct=1",
        "--rw=rw",
        "--overwrite=1",
        "--output-format=json",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    runtime = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    return {"seconds": runtime * 2 * nbytes / moved}


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return what all contestants took."""
    sizes = [f"--{n}={getattr(args, n)}" for n in ("layers", "width", "vocabulary", "positions", "tokens")]
    shared = [*sizes, f"--threads={args.threads}"]
    children: dict[str, common.Child] = {}
    try:
        own = os.path.join(folder, "infinity")
        os.makedirs(own)
        command = [sys.executable, "-u", os.path.abspath(__file__), "--serve", "--directory", own]
        env = {"PYTHONPATH": os.pathsep.join([str(common.ROOT), os.environ.get("PYTHONPATH", "")])}
        ours = common.Child(
            "infinity", [*command, *shared, "--config", args.config], env=env, timeout=args.timeout
        )
        children["infinity"] = ours
        runs: dict[str, Any] = {name: lambda n=name: ours.ask(n) for name in ("step", "merely", "ring")}
        if args.deepspeed_python:
            peer = os.path.join(folder, "deepspeed")
            os.makedirs(peer)
            task = common.Task(
                contestant="deepspeed",
                model=common.model_of(args),
                tokens=args.tokens,
                directory=peer,
                threads=args.threads,
                settings={"state": "nvme", "parameters": "device"},
            )
            theirs = common.start(task, folder, python=args.deepspeed_python, timeout=args.timeout)
            children["deepspeed"] = theirs
            runs["deepspeed"] = lambda: theirs.ask("1")
        if args.fio:
            runs["fio"] = lambda: fio(folder, ours.ready["bytes_each_way"], args)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        names = list(runs)
        for turn in range(args.warmup + args.rounds):
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                answer = runs[name]()
                if turn >= args.warmup:
                    samples[name].append(answer)
        return {"samples": samples, "ready": {name: child.ready for name, child in children.items()}}
    finally:
        for child in children.values():
            child.close()


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = common.arguments(__doc__)
    parser.add_argument("--config", default="{}", help="more settings of infinity.Config, as JSON")
    parser.add_argument("--fio", action="store_true", help="measure fio's mixed rate in each round too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a start or a step")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    hardware = common.hardware(args.directory)
    with common.scratch(args.directory) as folder:
        found = measure(args, folder)
    samples, ready = found["samples"], found["ready"]["infinity"]
    seconds = {
        name: [s["step"] if name == "deepspeed" else s["seconds"] for s in runs]
        for name, runs in samples.items()
    }
    moved = 2 * ready["bytes_each_way"]
    table = {name: {"median_s": round(common.median(times), 4)} for name, times in seconds.items()}
    for name, row in table.items():
        if name != "deepspeed":
            row["GB_per_s"] = round(moved / row["median_s"] / 1e9, 4)
    speedups = {
        f"step_of_{name}": common.paired(seconds["step"], times)
        for name, times in seconds.items()
        if name != "step"
    }
    targets = {"step_of_merely": 0.9, "step_of_deepspeed": 1.1}
    for name, row in table.items():
        print(f"{name:10} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    for name, ratio in speedups.items():
        wanted = f"  (target {targets[name]})" if name in targets else ""
        print(f"{name:20} {ratio['of_medians']:.3f}  {ratio['lowest']:.3f}–{ratio['highest']:.3f}{wanted}")
    common.publish(
        args.output,
        {
            "benchmark": "optimizer_step: AdamW, fp32 state on NVMe, gradients in host memory",
            "what": (__doc__ or "").split("\n\n")[2:],
            "params": ready["params"],
            "bytes_each_way": ready["bytes_each_way"],
            "rounds": args.rounds,
            "warmup_rounds": args.warmup,
            "table": table,
            "speedups": speedups,
            "targets": targets,
            "hardware": hardware,
            "contestants": found["ready"],
            "samples": samples,
        },
    )


if __name__ == "__main__":
    main()
