"""The I/O engine against fio, and against DeepSpeed's aio_handle, on one file, in paired runs.

    python benchmarks/io_fio.py --directory /mnt/nvme --output results.json --plot results.png
    python benchmarks/io_fio.py --deepspeed-python /path/to/python  # with DeepSpeed installed

Every repeat runs each contender once, in an order that rotates, with the same block size and depth,
O_DIRECT, on the same file; a ratio is the median of the ratios of the repeats, so that a drive whose
speed drifts hits both. `fio` is fio as it comes; `fio-huge` is fio with its buffers in transparent
huge pages, as ours are: the kernel then hands the drive a few large segments instead of many pages.
Ours move the whole file once, as `infinity bench io` does (see infinity/cli/bench/io_load.py); fio runs
for --seconds. CPU is what the whole process used (user and system) per GB moved, of ours that of the rings
and of the thread that feeds them. `mixed` reads as many bytes as it writes, as the optimizer does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common

from infinity.cli.bench.io_load import PATTERNS, Job, Load, Settings, run_pass
from infinity.hardware.aio import Ring

_DEEPSPEED = """
import json, sys, time
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
_MODES = {"read": "read", "write": "write", "mixed": "rw"}
_PEERS = ("fio", "fio-huge", "deepspeed")
_NAMES = {"fio": "fio", "fio-huge": "fio, huge pages", "deepspeed": "DeepSpeed aio_handle"}


class Run(NamedTuple):
    """One measured run."""

    gb_per_s: float
    cpu_s_per_gb: float


def ours(load: Load, ring: Ring, settings: Settings, pattern: str, ticket: int) -> Run:
    """Move the whole file once."""
    passed = run_pass([(load, ring)], settings, Job(pattern, chunk=ticket), 3600, limit=load.nbytes)
    return Run(passed.rate / 1e9, passed.cpu_seconds / ((passed.read + passed.written) / 1e9))


def fio(load: Load, settings: Settings, pattern: str, seconds: float, *, huge: bool) -> Run:
    """Run fio for `seconds` on the file of a load, with its buffers in huge pages or as it comes.

    What it writes there, the load does not know.
    """
    if pattern != "read":
        load.forget()
    command = [
        *("fio", "--name=bench", f"--filename={load.name}", "--allow_file_create=0"),
        *(f"--direct={int(load.file.direct)}", "--ioengine=libaio", f"--iodepth={settings.queue_depth}"),
        f"--bs={settings.block_bytes}",
        f"--rw={_MODES[pattern]}",
        f"--size={load.nbytes // settings.block_bytes * settings.block_bytes}",
        f"--runtime={max(1, round(seconds * 1000))}ms",
        *("--time_based", "--thread", "--norandommap", "--randrepeat=0"),
        "--output-format=json",
    ]
    environment = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})}
    # On an interrupt `run` kills the child before it lets the exception through.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds + 60, check=True, env=environment
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if report.get("error"):
        sys.exit(f"fio: error {report['error']}: {done.stderr}")
    ways = [report[way] for way in ("read", "write")]
    moved = sum(int(way["io_bytes"]) for way in ways)
    took = max(float(way["runtime"]) for way in ways) / 1000
    busy = (float(report["usr_cpu"]) + float(report["sys_cpu"])) / 100 * float(report["job_runtime"]) / 1000
    return Run(moved / took / 1e9, busy / (moved / 1e9))


def deepspeed(load: Load, pattern: str, args: argparse.Namespace) -> Run:
    """Run DeepSpeed's aio_handle once over the whole file, in its own interpreter."""
    if pattern != "read":
        load.forget()
    numbers = map(str, (load.nbytes, args.block, args.depth))
    command = [args.deepspeed_python, "-c", _DEEPSPEED, load.name, *numbers, pattern]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=environment)
    seconds, cpu = json.loads(done.stdout.strip().splitlines()[-1])
    return Run(load.nbytes / seconds / 1e9, cpu / (load.nbytes / 1e9))


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[Run]]]:
    """Return for each pattern, for each contender, the runs of all repeats."""
    results: dict[str, dict[str, list[Run]]] = {}
    sizes = [Settings(name, args.block, args.depth) for name in args.backends]
    window = max(Job(pattern, chunk=args.ticket).window(sizes[0]) for pattern in PATTERNS)
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(Load(args.directory, args.nbytes, grain=args.block, window=window))
        rings = [stack.enter_context(load.ring(each)) for each in sizes]
        load.fill(sizes[0], args.ticket)
        for pattern in PATTERNS:
            contenders: dict[str, Callable[[], Run]] = {
                each.backend: partial(ours, load, ring, each, pattern, args.ticket)
                for each, ring in zip(sizes, rings, strict=True)
            }
            for peer, huge in (("fio", False), ("fio-huge", True)):
                contenders[peer] = partial(fio, load, sizes[0], pattern, args.seconds, huge=huge)
            if args.deepspeed_python and pattern != "mixed":
                contenders["deepspeed"] = partial(deepspeed, load, pattern, args)
            results[pattern] = common.Race(contenders).run(1, args.repeats)
    return results


def summarize(results: dict[str, dict[str, list[Run]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return medians, and medians of the paired ratios to fio and DeepSpeed."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for pattern, runs in results.items():
        table[pattern] = {}
        for name, own in runs.items():
            rates = [r.gb_per_s for r in own]
            row = {
                "GB/s": statistics.median(rates),
                "spread": max(rates) - min(rates),
                "CPU s/GB": statistics.median(r.cpu_s_per_gb for r in own),
            }
            for peer in _PEERS:
                if peer in runs and peer != name:
                    pairs = list(zip(own, runs[peer], strict=True))
                    row[f"of {peer}"] = statistics.median(a.gb_per_s / b.gb_per_s for a, b in pairs)
                    # fio's share of a run of some milliseconds may be 0 %.
                    if cpu := [a.cpu_s_per_gb / b.cpu_s_per_gb for a, b in pairs if b.cpu_s_per_gb]:
                        row[f"CPU of {peer}"] = statistics.median(cpu)
            table[pattern][name] = row
    return table


def plot(table: dict[str, dict[str, dict[str, float]]], args: argparse.Namespace) -> None:
    """Draw the medians."""
    from infinity.cli.plot import figure_in

    everybody = list(dict.fromkeys(who for rows in table.values() for who in rows))
    width = 0.8 / len(everybody)
    with figure_in(str(args.plot), 8, 3.4) as figure:
        axes = figure.add_subplot()
        for i, who in enumerate(everybody):
            places = [k + (i + 0.5) * width - 0.4 for k, rows in enumerate(table.values()) if who in rows]
            values = [rows[who]["GB/s"] for rows in table.values() if who in rows]
            axes.bar(places, values, width, label=_NAMES.get(who, f"infinity, {who}"))
        axes.set_xticks(range(len(table)), list(table))
        axes.set_ylabel("GB/s (median)")
        axes.set_title(f"{args.block >> 20} MiB × {args.depth}, O_DIRECT, one file", fontsize=10)
        axes.legend(fontsize=8, frameon=False)


def main() -> None:
    """Measure, print a table, write the JSON and draw it."""
    parser = common.arguments(__doc__)
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--ticket", type=int, default=8 << 20, help="bytes per transfer of the engine")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one run of fio")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backends", nargs="+", default=["libaio", "uring", "threads"])
    parser.add_argument("--plot", type=Path, help="a picture of the results (matplotlib)")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian: apt install fio)")
    found = subprocess.run(
        ["fio", "--version"], capture_output=True, text=True, check=True, timeout=20
    ).stdout
    hardware = common.hardware(args.directory)
    results = measure(args)
    table = summarize(results)
    for pattern, rows in table.items():
        for name, row in rows.items():
            print(f"{pattern:6} {name:10} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))
    names = ("nbytes", "block", "depth", "ticket", "seconds", "repeats", "backends")
    runs = {m: {n: [r._asdict() for r in own] for n, own in by.items()} for m, by in results.items()}
    common.publish(
        args.output,
        {
            "benchmark": "io_fio",
            "fio": found.strip(),
            "hardware": hardware,
            "versions": common.versions(),
            "settings": {name: getattr(args, name) for name in names},
            "table": table,
            "runs": runs,
        },
    )
    if args.plot:
        plot(table, args)


if __name__ == "__main__":
    main()
