"""`infinity bench link`: how fast bytes cross between host and device, by kind of host memory.

pageable    ordinary memory: the driver copies it through a small pinned buffer of its own
pinned      memory from the driver (torch's pin_memory)
registered  the engine's own: a mapping on huge pages, then cudaHostRegister

Without a CUDA device there is no link; then it says so, and measures what a copy in memory reaches.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click
import torch

from infinity.cli.console import finish, gigabytes, show_warnings, table_of, wide_console
from infinity.cli.options import json_option
from infinity.core.errors import ConfigError, InfinityError, StorageError
from infinity.core.sizes import GiB, MiB, format_size, parse_size
from infinity.hardware import cpu_adam
from infinity.hardware.device import CudaDevice, HostDevice, open_device
from infinity.hardware.probe import available_host_memory, gpus
from infinity.storage.memory import HostMapping

from .adam import as_before, rate, spread

KINDS: Final = ("pageable", "pinned", "registered")
DIRECTIONS: Final = ("h2d", "d2h", "both")


@contextlib.contextmanager
def host_buffers(kind: str, nbytes: int, device: CudaDevice) -> Iterator[list[torch.Tensor]]:
    """Lend two (nbytes,) uint8 tensors of this kind of host memory."""
    if kind != "registered":
        pin = kind == "pinned"
        yield [torch.ones(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        return
    mapping = HostMapping(2 * nbytes, populate=True)
    device.register(mapping.address, mapping.nbytes)
    try:
        yield [mapping.tensor(at, nbytes) for at in (0, nbytes)]
    finally:
        device.synchronize()
        device.unregister(mapping.address, mapping.nbytes)


def measure_cuda(
    device: CudaDevice, nbytes: int, repeats: int, kinds: Sequence[str] = KINDS
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows of figures for each kind and direction, and warnings."""
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    for kind in kinds:
        try:
            with torch.cuda.device(device.torch_device), host_buffers(kind, nbytes, device) as (up, down):
                rows += _measure_kind(device, kind, up, down, repeats)
        except (InfinityError, RuntimeError) as error:
            warnings.append(f"{kind} memory cannot be measured: {error}")
    return rows, warnings


def _measure_kind(
    device: CudaDevice, kind: str, up: torch.Tensor, down: torch.Tensor, repeats: int
) -> list[dict[str, Any]]:
    up.fill_(3)
    there = torch.zeros(up.numel(), dtype=torch.uint8, device=device.torch_device)
    back = torch.full_like(there, 5)
    torch.cuda.synchronize(device.torch_device)
    rows = []
    for direction in DIRECTIONS:

        def copy(direction: str = direction) -> None:
            if direction != "d2h":
                device.h2d(there, up)
            if direction != "h2d":
                device.d2h(down, back)
            device.synchronize()

        moved = up.numel() * (2 if direction == "both" else 1)
        rows.append(_row(kind, direction, rate(copy, moved, repeats)))
    if not bool((there == 3).all()) or not bool((down == 5).all()):
        raise StorageError(
            "other bytes arrived than were sent",
            expected="the same bytes",
            found=f"a difference after copies of {kind} memory",
            cure="do not trust this device: run its vendor's memory test",
        )
    return rows


@as_before()
def measure_host(nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Return rows of figures for copies in host memory, with one thread and with all."""
    mapping, rows = HostMapping(2 * nbytes, populate=True), []
    mapping.tensor(0, nbytes).fill_(1)
    copy = functools.partial(cpu_adam.copy_bytes, mapping.address + nbytes, mapping.address, nbytes)
    for count in sorted({1, cpu_adam.threads()}):
        cpu_adam.set_threads(count)
        kind = f"memory, {count} thread{'s' * (count > 1)}"
        rows.append(_row(kind, "copy", rate(copy, nbytes, repeats)))
    return rows


def _row(kind: str, direction: str, rates: list[float]) -> dict[str, Any]:
    middle = statistics.median(rates)
    return {"kind": kind, "direction": direction, "bytes_per_second": middle, "spread": spread(rates)}


@click.command("link")
@click.option("--device", help="cuda or cuda:N; cpu measures memory alone. Default: cuda where there is one.")
@click.option("--size", default="256MiB", show_default=True, help="Of one copy.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=9, show_default=True)
@json_option
def link_command(device: str | None, size: str, repeats: int, as_json: bool) -> None:
    """Measure copies between host and device: pageable, pinned, registered; each way and both at once."""
    nbytes = parse_size(size, "--size")
    most = min(4 * GiB, available_host_memory() // 8)
    if not MiB <= nbytes <= most:
        raise ConfigError(
            "--size cannot be used",
            expected=f"1MiB to {format_size(most)}",
            found=size,
            cure="--size 256MiB",
        )
    warnings: list[str] = []
    name, node = "cpu", None
    with contextlib.closing(open_device(device)) as opened:
        if isinstance(opened, HostDevice):
            rows = measure_host(nbytes, repeats)
            why = "asked for the CPU" if torch.cuda.is_available() else "torch sees no CUDA device here"
            warnings.append(
                f"the link is not measured ({why}): no figures for pageable, pinned and registered memory, "
                "for h2d, d2h and both at once. Copies in host memory stand in their place"
            )
        else:
            index = opened.torch_device.index or 0
            gpu = next(gpu for gpu in gpus() if gpu.number == index)
            name, node = f"{gpu.name} ({opened.torch_device})", gpu.numa_node
            rows, warnings = measure_cuda(opened, nbytes, repeats)
    result = {"benchmark": "link", "device": name, "numa_node": node, "bytes": nbytes, "rows": rows}
    finish({**result, "warnings": warnings}, show, as_json=as_json)


def show(result: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    node = "" if result["numa_node"] is None else f", NUMA node {result['numa_node']}"
    title = f"{result['device']}, copies of {format_size(result['bytes'])}{node}"
    table = table_of("host memory", "direction", "GB/s", "spread", title=title, left=2)
    for row in result["rows"]:
        rate = gigabytes(row["bytes_per_second"])
        table.add_row(row["kind"], row["direction"], rate, f"{row['spread']:.0%}")
    console = wide_console()
    console.print(table)
    show_warnings(console, result["warnings"])
