"""`infinity bench step`: whole steps of one model, for every placement and update mode, beside their bounds.

Each case takes turns with plain torch in memory, the kernel and the drive, which its bound is made of
([Note: the bound of a step] in step_bound.py): a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import torch

from infinity.cli.console import finish, finite, status_line, table_of, wide_console
from infinity.cli.measure import scratch
from infinity.cli.model import GPT, GPTShape, activations_of, parameters_of, shape_from, units_of
from infinity.cli.options import device_option, json_option, words_option
from infinity.cli.outputs import check_outputs
from infinity.core.config import UPDATES
from infinity.core.errors import BudgetError, DirectoryError, InfinityError
from infinity.core.sizes import GiB, format_size, parse_dtype
from infinity.hardware import cpu_adam
from infinity.hardware.device import open_device
from infinity.hardware.probe import available_host_memory, gpus

from .io_load import check_directory, usable_bytes
from .step_bound import Rates, beside_bound, figures, probe_bytes, rates
from .step_run import PLACEMENTS, in_memory, offloaded, settings_of

BOUNDS: Final = (
    "bound, from this run's torch in memory (F forward, B backward), NVMe time N (bytes at the engine's "
    "mixed rate), what forward and backward themselves hide of it H, and the update's kernel A: "
    "sync F + B + max(N − H, A), overlap B + max(F, N − H, A), delayed max(F + B, N, A). "
    "efficiency = bound ÷ seconds."
)
#: Bytes per parameter in memory, of torch and of a delayed update with everything there; on NVMe.
_HELD: Final = (16, 28)
_ON_NVME: Final = 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured. `burst`: steps of a turn; None: 4, or 1 where every update is ``sync``."""

    shape: GPTShape
    directory: str
    tokens: int = 128
    batch: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    updates: tuple[str, ...] = UPDATES
    rounds: int = 3
    warmup: int = 1
    burst: int | None = None
    threads: int | None = None

    @property
    def steps(self) -> int:
        """Steps of a turn."""
        return self.burst or (1 if set(self.updates) == {"sync"} else 4)

    @property
    def on_nvme(self) -> bool:
        """Whether anything of it is."""
        return any("nvme" in PLACEMENTS[name] for name in self.placements)

    def build(self) -> GPT:
        """Return the model, with the values of seed 0."""
        torch.manual_seed(0)
        return GPT(self.shape)


def check_room(request: Request) -> None:
    """Raise unless torch's model and the largest case fit host memory, the device and the drive together.

    Raises:
        BudgetError: memory has not the room: the kernel would end this process.
        DirectoryError: the directory is unfit, or has not the room.
    """
    params = parameters_of(request.shape)
    itemsize = parse_dtype(request.dtype).itemsize
    activations = activations_of(request.shape, request.batch, request.tokens, itemsize, recompute=False).peak
    cuda = request.device.startswith("cuda")
    need, have = sum(_HELD) * params + 2 * GiB + activations, available_host_memory()
    rooms = [("host memory", need - (_HELD[0] * params + activations) * cuda, have)]
    if cuda:
        free = gpus()[torch.device(request.device).index or 0].free
        rooms.append(("the device", 2 * _HELD[0] * params + 2 * GiB + activations, free))
    for where, need, have in rooms:
        if need > have:
            raise BudgetError(
                f"the model does not fit {where} twice: in plain torch, and as the engine has it",
                expected=f"about {format_size(need)}",
                found=f"{format_size(have)} available",
                cure="a smaller --preset",
            )
    check_directory(request.directory)
    usable, reserve = usable_bytes(request.directory)
    need = _ON_NVME * params + probe_bytes(request.directory)
    if request.on_nvme and need > usable:
        raise DirectoryError(
            f"{request.directory} has not the room for this model",
            errno=errno.ENOSPC,
            path=request.directory,
            expected=f"{format_size(need)} free, and {format_size(reserve)} that stay free",
            found=f"{format_size(usable + reserve)} free",
            cure="a smaller --preset, another --directory, or --placement all-on-host",
        )


def measure(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every case; return everything as JSON has it. Seconds and bytes.

    A case that fails is part of the result, with its error; the others go on.

    Raises:
        BudgetError, DirectoryError: it does not fit; nothing was started.
    """
    check_room(request)
    before = cpu_adam.threads(), torch.get_num_threads()
    if request.threads is not None:
        cpu_adam.set_threads(request.threads)
        torch.set_num_threads(request.threads)
    placements: dict[str, Any] = {}
    try:
        with scratch(request.directory) as folder, rates(folder if request.on_nvme else None) as measured:
            cases = _Cases(request, folder, measured, tell)
            for placement in request.placements:
                placements[placement] = cases.run(placement)
    finally:
        cpu_adam.set_threads(before[0])
        torch.set_num_threads(before[1])
    shape = {name: getattr(request.shape, name) for name in ("layers", "width", "heads", "vocab", "context")}
    return {
        "benchmark": "step",
        "model": {**shape, "parameters": parameters_of(request.shape)},
        **{name: getattr(request, name) for name in ("tokens", "batch", "dtype", "device", "rounds")},
        "warmup_rounds": request.warmup,
        "burst": request.steps,
        "threads": request.threads,
        "placements": placements,
    }


class _Cases:
    """Measures one case after the other, each in turns with plain torch and the rates."""

    def __init__(self, request: Request, folder: str, rates: Rates, tell: Callable[[str], None]) -> None:
        self._request, self._folder, self._rates, self._tell = request, folder, rates, tell
        random = torch.Generator().manual_seed(1)
        size = request.batch, request.tokens
        data = torch.randint(0, request.shape.vocab, size, generator=random).to(request.device)
        targets = data.roll(-1, 1)
        self._loss_of: Callable[[GPT], Any] = lambda model: model(data, targets).loss
        self._torch = in_memory(request.build, device=request.device, dtype=parse_dtype(request.dtype))
        self._params = parameters_of(request.shape)

    def run(self, placement: str) -> dict[str, Any]:
        """Return the figures of a placement, for each update mode."""
        found: dict[str, Any] = {"placement": PLACEMENTS[placement]._asdict()}
        found |= {"table": {}, "errors": {}, "samples": {}}
        for update in self._request.updates:
            try:
                found["table"][update], found["samples"][update] = self._case(placement, update)
            except (InfinityError, torch.OutOfMemoryError) as error:
                found["errors"][update] = {"error": str(error)}
        return found

    def _case(self, placement: str, update: str) -> tuple[dict[str, Any], dict[str, Any]]:
        request = self._request
        sizes = [sum(torch.Size(s).numel() for _, s in params) for _, params in units_of(request.shape)]
        settings = settings_of(placement, update, max(sizes))
        place = os.path.join(self._folder, f"{placement}-{update}")
        os.mkdir(place)
        common = {"nvme": place, "device": request.device, "dtype": request.dtype}
        ours = offloaded(request.build, **common, threads=request.threads, **settings)
        samples: dict[str, list[Any]] = {"infinity": [], "torch": []}
        self._rates.forget()
        try:
            for turn in range(request.warmup + request.rounds):
                self._tell(f"{placement}, {update}: round {turn + 1} of {request.warmup + request.rounds}")
                taken = {
                    "infinity": ours.turn(self._loss_of, request.steps),
                    "torch": self._torch.turn(self._loss_of, request.steps, apart=True),
                }
                self._rates.measure(nvme="nvme" in PLACEMENTS[placement])
                if turn >= request.warmup:
                    for name, each in taken.items():
                        samples[name].append(each)
        finally:
            ours.close()
        row, beside = (figures(turns, self._params) for turns in samples.values())
        row |= {"memory": ours.memory(), "rates": self._rates.as_dict()}
        row |= beside_bound(
            *(row, beside, self._rates),
            placement=placement,
            update=update,
            dtype=request.dtype,
            params=self._params,
            settings=settings,
        )
        return row, samples


def show(result: Mapping[str, Any]) -> None:
    """Print a table for a person: a line for each placement and update mode."""
    title = (
        f"{result['model']['parameters']:,} parameters, {result['batch']} × {result['tokens']} tokens, "
        f"{result['dtype']}, {result['device']}; "
        f"medians of {result['rounds']} rounds of {result['burst']} steps"
    )
    names = ("placement", "update", "s/step", "read", "written", "B/param", "bound", "efficiency", "memory")
    table = table_of(*names, title=title, left=2)
    for placement, group in result["placements"].items():
        first = placement
        for name, row in group["table"].items():
            table.add_row(
                *(first, name, f"{row['seconds']:.3f}"),
                *(format_size(round(row[way])) for way in ("read_bytes", "written_bytes")),
                *(f"{row['bytes_per_parameter']:.1f}", f"{row['bound']:.3f}", f"{row['efficiency']:.0%}"),
                format_size(row["memory"]),
            )
            first = ""
        for name in group["errors"]:
            table.add_row(first, name, "failed", style="red")
            first = ""
        table.add_section()
    console = wide_console()
    console.print(table)
    console.print(BOUNDS, markup=False)
    for placement, group in result["placements"].items():
        for name, row in group["table"].items():
            if (rate := row["rates"]["nvme_mixed_bytes_per_second"]) is not None:
                said = f"{placement}, {name}: the drive's mixed rate was {rate / 1e9:.2f} GB/s"
                console.print(said, markup=False)
        for name, error in group["errors"].items():
            console.print(f"{placement}: {name} failed: {error['error']}", style="red", markup=False)


@click.command("step")
@click.option("--preset", default="30m", show_default=True, help="Size of the built-in GPT, as in `train`.")
@click.option("--layers", type=int, help="Blocks, instead of the preset's.")
@click.option("--width", type=int, help="Width of the stream.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--vocab", type=int, help="Size of the vocabulary.")
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="In a sequence.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences.")
@click.option("--dtype", type=click.Choice(("fp32", "bf16")), default="fp32", show_default=True)
@device_option
@click.option("--directory", default=".", metavar="DIR", help="On the drive to be measured. Default: here.")
@words_option(
    "--placement",
    "placements",
    tuple(PLACEMENTS),
    f"{', '.join(PLACEMENTS)}; may be given again. Default: all.",
)
@words_option("--update", "updates", UPDATES, f"{', '.join(UPDATES)}; may be given again. Default: all.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Rounds before.")
@click.option("--burst", type=click.IntRange(min=1), help="Steps of a turn. Default: 4; for sync alone 1.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch and of the CPU's Adam.")
@click.option("--output", metavar="FILE", help="A JSON file with every sample.")
@json_option
def step_command(
    *,
    preset: str,
    device: str | None,
    directory: str,
    placements: tuple[str, ...],
    updates: tuple[str, ...],
    output: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Measure whole steps for all placements and update modes, each beside its bound.

    Some minutes with the default size. Needs an otherwise idle machine; what it writes to DIR is gone
    afterwards. Exit code 1 when a case failed.
    """
    dimensions = {name: given.pop(name) for name in ("layers", "width", "heads", "vocab")}
    shape = shape_from(preset, **dimensions)
    if given["tokens"] > shape.context:
        shape = shape_from(preset, **dimensions, context=given["tokens"])
    opened = open_device(device)
    opened.close()
    request = Request(
        shape=shape,
        directory=os.path.abspath(directory),
        device=str(opened.torch_device),
        placements=placements or tuple(PLACEMENTS),
        updates=updates or UPDATES,
        **given,
    )
    check_outputs([("--output", output, lambda head: head.startswith(b'{\n "benchmark": "step"'))])
    with status_line(quiet=as_json) as tell:
        result = finite(measure(request, tell))
    if output is not None:
        Path(output).expanduser().write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = any(group["errors"] for group in result["placements"].values())
    return finish(result, show, as_json=as_json, failed=failed)
