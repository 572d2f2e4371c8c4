"""The I/O engine against fio, and against DeepSpeed's aio_handle, on one file, in paired runs.

    python benchmarks/io_fio.py --directory /mnt/nvme --json results.json
    python benchmarks/io_fio.py --deepspeed-python /path/to/python  # with DeepSpeed installed

Every repeat runs each contender once, in an order that rotates, with the same block size and depth,
O_DIRECT, on the same file; a ratio is the median of the ratios of the repeats, so that a drive whose
speed drifts hits both. `fio` is fio as it comes; `fio-huge` is fio with its buffers in transparent
huge pages, as ours are: the kernel then hands the drive a few large segments instead of many pages.
CPU is what the whole process used (user and system), per GB moved. `mixed` reads as many bytes as it
writes, as the optimizer does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infinity.hardware.aio import DirectFile, Ring, Ticket

MODES = ("read", "write", "mixed")
_DEEPSPEED = """
import json, resource, sys, time
from deepspeed.ops.op_builder import AsyncIOBuilder
import torch
path, size, block, depth, mode = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
handle = AsyncIOBuilder().load().aio_handle(block, depth, False, True, 1)
buffer = handle.new_cpu_locked_tensor(size // 4, torch.empty(0, dtype=torch.float32))
buffer.fill_(1.0)
call = handle.sync_pread if mode == "read" else handle.sync_pwrite
if mode == "write":
    call(buffer, path, 0)
began, used = time.perf_counter(), time.process_time()
call(buffer, path, 0)
print(json.dumps([time.perf_counter() - began, time.process_time() - used]))
"""


class Run(NamedTuple):
    """One measured run."""

    gb_per_s: float
    cpu_s_per_gb: float


def run_fio(path: str, mode: str, args: argparse.Namespace, *, huge: bool) -> Run:
    """Run fio once over the whole file, with its buffers in huge pages or as it comes."""
    command = [
        "fio",
        "--name=job",
        f"--filename={path}",
        f"--size={args.nbytes}",
        f"--bs={args.block}",
        f"--iodepth={args.depth}",
        "--ioengine=libaio",
        "--direct=1",
        "--rw=" + {"read": "read", "write": "write", "mixed": "rw"}[mode],
        "--overwrite=1",
        "--output-format=json",
    ]
    environment = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=environment
    ).stdout
    job = json.loads(output[output.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Run(moved / seconds / 1e9, cpu / (moved / 1e9))


class Engine:
    """Our side: one ring, one file, buffers made once, as in a training run."""

    def __init__(self, path: str, backend: str, args: argparse.Namespace) -> None:
        self.args = args
        self.ring = Ring(
            "bench", path=args.directory, backend=backend, block_bytes=args.block, queue_depth=args.depth
        )
        self.file = DirectFile.open(path)
        self.buffers = max(2, -(-2 * args.depth * args.block // args.ticket))
        self.memory = mmap.mmap(-1, self.buffers * args.ticket, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.write(os.urandom(1 << 20) * (len(self.memory) >> 20))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.ring.register_buffer(self.address, len(self.memory))
        self.ring.register_file(self.file)

    def run(self, mode: str) -> Run:
        """Move the whole file once: tickets of `--ticket` bytes, two depths of them under way."""
        size, half = self.args.ticket, self.args.nbytes // 2
        count = self.args.nbytes // size
        began, used = time.perf_counter(), time.process_time()
        tickets: deque[Ticket] = deque()
        for k in range(count):
            if len(tickets) == self.buffers:
                tickets.popleft().wait()
            write = mode == "write" or (mode == "mixed" and k % 2 == 1)
            offset = k * size if mode != "mixed" else k // 2 * size + (half if write else 0)
            move = self.ring.write if write else self.ring.read
            tickets.append(move(self.file, offset, self.address + k % self.buffers * size, size))
        for ticket in tickets:
            ticket.wait()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        moved = count * size
        return Run(moved / seconds / 1e9, cpu / (moved / 1e9))

    def close(self) -> None:
        """Close ring and file."""
        self.ring.close()
        self.file.close()


def run_deepspeed(python: str, path: str, mode: str, args: argparse.Namespace) -> Run:
    """Run DeepSpeed's aio_handle once over the whole file, in its own interpreter."""
    command = [python, "-c", _DEEPSPEED, path, str(args.nbytes), str(args.block), str(args.depth), mode]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=900, env=environment
    ).stdout
    seconds, cpu = json.loads(output.strip().splitlines()[-1])
    return Run(args.nbytes / seconds / 1e9, cpu / (args.nbytes / 1e9))


def measure(path: str, args: argparse.Namespace) -> dict[str, dict[str, list[Run]]]:
    """Return for each mode, for each contender, the runs of all repeats."""
    engines = {name: Engine(path, name, args) for name in args.backends}
    results: dict[str, dict[str, list[Run]]] = {}
    try:
        for mode in MODES:
            contenders: dict[str, Callable[[], Run]] = {
                "fio": partial(run_fio, path, mode, args, huge=False),
                "fio-huge": partial(run_fio, path, mode, args, huge=True),
            }
            contenders |= {name: partial(engine.run, mode) for name, engine in engines.items()}
            if args.deepspeed_python and mode != "mixed":
                contenders["deepspeed"] = partial(run_deepspeed, args.deepspeed_python, path, mode, args)
            results[mode] = {name: [] for name in contenders}
            names = list(contenders)
            for repeat in range(args.repeats + 1):
                turn = repeat % len(names)
                for name in names[turn:] + names[:turn]:
                    run = contenders[name]()
                    if repeat:  # the first round warms up
                        results[mode][name].append(run)
    finally:
        for engine in engines.values():
            engine.close()
    return results


def summarize(results: dict[str, dict[str, list[Run]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return medians, and medians of the paired ratios to fio and DeepSpeed."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for mode, runs in results.items():
        table[mode] = {}
        for name, own in runs.items():
            row = {
                "GB/s": statistics.median(r.gb_per_s for r in own),
                "spread": max(r.gb_per_s for r in own) - min(r.gb_per_s for r in own),
                "CPU s/GB": statistics.median(r.cpu_s_per_gb for r in own),
            }
            for peer in ("fio", "fio-huge", "deepspeed"):
                if peer in runs and peer != name:
                    pairs = list(zip(own, runs[peer], strict=True))
                    row[f"of {peer}"] = statistics.median(a.gb_per_s / b.gb_per_s for a, b in pairs)
                    row[f"CPU of {peer}"] = statistics.median(
                        a.cpu_s_per_gb / b.cpu_s_per_gb for a, b in pairs
                    )
            table[mode][name] = row
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=".", help="on the drive to measure")
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--ticket", type=int, default=8 << 20, help="bytes per transfer of the engine")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backends", nargs="+", default=["libaio", "uring", "threads"])
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--json", help="where to write all runs")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed")
    if shutil.disk_usage(args.directory).free < 2 * args.nbytes:
        sys.exit(f"{args.directory} has less than {2 * args.nbytes} bytes free")
    path = os.path.join(args.directory, f"infinity-io-fio-{os.getpid()}.dat")
    try:
        with open(path, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, args.nbytes)
            piece = os.urandom(1 << 22)
            for _ in range(args.nbytes // len(piece)):
                file.write(piece)
            os.fsync(file.fileno())
        results = measure(path, args)
    finally:
        if os.path.exists(path):
            os.unlink(path)
    table = summarize(results)
    for mode, rows in table.items():
        for name, row in rows.items():
            print(f"{mode:6} {name:10} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    if args.json:
        fio = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        content = {
            "benchmark": "io_fio",
            "command": "python " + " ".join(["benchmarks/io_fio.py", *map(os.path.basename, sys.argv[1:])]),
            "fio": fio,
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "settings": {
                k: v for k, v in vars(args).items() if k not in ("json", "deepspeed_python", "directory")
            },
            "table": table,
            "runs": {
                m: {n: [r._asdict() for r in runs] for n, runs in by.items()} for m, by in results.items()
            },
        }
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
