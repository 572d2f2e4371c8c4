"""`infinity bench step`: whole steps of one model, for every placement and update mode, beside their bounds.

Right after each case come the steps of plain torch in memory, the kernel and the drive, which its bound is
made of ([Note: the bound of a step] in step_run.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import click
import torch

from infinity.api.this_machine import check_directory
from infinity.cli.console import finish, gigabytes, status_line, table_of, wide_console
from infinity.cli.measure import scratch
from infinity.cli.model import GPT
from infinity.cli.options import device_option, json_option, words_option
from infinity.cli.settings import OPTIONS, ModelSettings, setting_options
from infinity.cli.shape import KEYS, activations_of, config_from
from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH, UPDATES, Config, StateDtype, Update
from infinity.core.errors import InfinityError
from infinity.core.sizes import GiB, MiB, format_size, parse_dtype
from infinity.hardware import cpu_adam
from infinity.hardware.device import open_device
from infinity.hardware.probe import available_host_memory, gpus
from infinity.hardware.tuned import tuned
from infinity.planning.footprint import READ_AHEAD
from infinity.planning.parts import ADAM, moments_of

from .adam import MOMENTS, AdamWork, as_before, check_memory, rate
from .io_load import Job, Load, Settings, check_space, run_pass, usable_bytes
from .step_run import PLACEMENTS, Measured, Stepper, bound, figures, in_memory, offloaded, settings_of

BOUNDS: Final = (
    "bound, from this run's torch in memory (F forward, B backward), NVMe time N (bytes at the engine's "
    "mixed rate), what forward and backward themselves hide of it H, and the update's kernel A: "
    "sync F + B + max(N − H, A), overlap B + max(F, N − H, A), delayed max(F + B, N, A), "
    "backward F + max(B, N − C, A), C: copies that the forward reads. "
    "efficiency = bound ÷ seconds."
)
#: Bytes per parameter in memory, of torch and of a delayed update with everything there; on NVMe.
_HELD: Final = (16, 28)
_ON_NVME: Final = 20
#: Bytes of the drive's probe at most and at least, seconds of one pass, parameters of the kernel's.
_PROBE: Final = (GiB, 128 * MiB)
_SECONDS: Final = 0.75
_ADAM: Final = 16 * MiB  # larger than caches
_MIXED: Final = Job("mixed")
_SHAPE: Final = ("layers", "width", "heads", "vocab")


# ---- what bounds are made of ----


class Rates:
    """What measures the kernel and, with a `load`, the drive."""

    def __init__(self, load: Load | None, settings: Settings, form: Mapping[str, Any]) -> None:
        self._load, self._settings, self._form = load, settings, form

    @functools.cached_property
    def _work(self) -> AdamWork:
        return AdamWork(_ADAM, **self._form)

    def drive(self, job: Job = _MIXED) -> float | None:
        """Return the bytes per second of a pass, read and written together; None: there is no drive."""
        if self._load is None:
            return None
        with self._load.ring(self._settings) as ring:
            return run_pass([(self._load, ring)], self._settings, job, _SECONDS).rate

    def measure(self, *, nvme: bool) -> dict[str, Any]:
        """Measure the kernel, and with `nvme` the drive; return both as JSON has them."""
        return {
            "adam_parameters_per_second": statistics.median(rate(self._work.update, self._work.numel, 3)),
            "nvme_mixed_bytes_per_second": self.drive() if nvme else None,
            "ring": self._settings._asdict(),
        }


def beside(
    row: Mapping[str, Any],
    torch_row: Mapping[str, Any],
    rates: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    dtype: str,
    params: int,
) -> dict[str, Any]:
    """Return the bound of a step whose `figures` are `row`, and how near it came.

    Args:
        torch_row: the same figures of plain torch in memory.
        rates: what `Rates.measure` returned.
        settings: of `infinity.Config`, as the run was given them.
    """
    of_state = ("optimizer_state_dtype", "split_master")
    config = Config(**{k: v for k, v in settings.items() if k in of_state})
    state = (2 if config.split_master else 4) * params + sum(
        moment.nbytes(params) for moment in moments_of(ADAM, config)
    )
    ahead = min(READ_AHEAD, state)
    copies = params * parse_dtype(dtype).itemsize
    on_nvme = {name for name, value in settings.items() if value == "nvme"}
    in_torch = settings["optimizer_state"] == "device"
    found = Measured(
        forward=torch_row["forward"],
        backward=torch_row["backward"],
        adam=torch_row["step"] if in_torch else params / rates["adam_parameters_per_second"],
        moved=row["read_bytes"] + row["written_bytes"],
        nvme_rate=rates["nvme_mixed_bytes_per_second"],
        read_ahead=ahead if "optimizer_state" in on_nvme else 0,
        copies=copies if "parameters" in on_nvme else 0,
        gradients=copies if "gradients" in on_nvme else 0,
    )
    least = bound(settings["update"], found)
    return {
        "bound": least,
        "efficiency": least / row["seconds"],
        "bound_of": {**dataclasses.asdict(found), "nvme_seconds": found.nvme},
    }


@contextlib.contextmanager
def rates(directory: str | None, **form: Any) -> Iterator[Rates]:
    """Lend what measures the rates; the drive's file is gone afterwards. The ring is opened as the
    store opens its own: as tuned, or with the defaults.

    Args:
        directory: on the drive to be measured; None: no drive.
        form: of the state in the kernel, as `AdamWork` takes it.

    Raises:
        DirectoryError: the directory is unfit, or has not the room.
    """
    found = None if directory is None else tuned(directory)
    settings = Settings("auto", BLOCK_BYTES, QUEUE_DEPTH) if found is None else Settings(**found._asdict())
    if directory is None:
        yield Rates(None, settings, form)
        return
    window = max(job.window(settings) for job in (_MIXED, _MIXED.checking))
    nbytes = max(2 * window, probe_bytes(directory)) // MiB * MiB
    with Load(directory, nbytes, grain=settings.block_bytes, window=window) as load:
        load.fill(settings)
        yield Rates(load, settings, form)


def probe_bytes(directory: str) -> int:
    """Return the bytes of the drive's probe."""
    return max(_PROBE[1], min(_PROBE[0], usable_bytes(directory)[0] // 4))


# ---- runs ----


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured: `steps` in one go, after `warmup` others."""

    layers: int
    width: int
    heads: int
    directory: str
    vocab: int = 256
    tokens: int = 128
    batch: int = 1
    dtype: str = "fp32"
    moments: StateDtype = "fp32"
    split_master: bool = False
    device: str = "cpu"
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    updates: tuple[Update, ...] = UPDATES
    steps: int = 8
    warmup: int = 2
    threads: int | None = None

    @property
    def on_nvme(self) -> bool:
        """Whether anything of it is."""
        return any("nvme" in PLACEMENTS[name] for name in self.placements)

    def build(self) -> GPT:
        """Return the model, with the values of seed 0."""
        torch.manual_seed(0)
        return GPT(self.layers, self.width, self.heads, self.vocab)

    @property
    def largest_unit(self) -> int:
        """The parameters of the largest unit: a block, or the embedding."""
        return max(12 * self.width + 2, self.vocab) * self.width

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return (self.layers * (12 * self.width + 2) + 2 * self.vocab + 1) * self.width


def check_room(request: Request) -> None:
    """Raise unless torch's model and the largest case fit host memory, the device and the drive together.

    Raises:
        BudgetError: memory has not the room: the kernel would end this process.
        DirectoryError: the directory is unfit, or has not the room.
    """
    params = request.parameters
    itemsize = parse_dtype(request.dtype).itemsize
    sizes = {name: getattr(request, name) for name in ("layers", "width", "heads", "vocab")}
    alike = config_from("30m", **sizes, kv_heads=request.heads, inner=4 * request.width)
    activations = activations_of(alike, request.batch, request.tokens, itemsize, recompute=False).peak
    plain, ours = _HELD[0] * params + activations, _HELD[1] * params + 2 * GiB
    cuda = request.device.startswith("cuda")
    rooms = [("host memory", ours if cuda else plain + ours, available_host_memory())]
    if cuda:
        free = gpus()[torch.device(request.device).index or 0].free
        rooms.append(("the device", plain + _HELD[0] * params + 2 * GiB, free))
    for where, need, have in rooms:
        check_memory(
            "the model, in plain torch and as the engine has it,", need, have, "a smaller --preset", where
        )
    check_directory(request.directory)
    if request.on_nvme:
        need = _ON_NVME * params + probe_bytes(request.directory)
        cure = "a smaller --preset, another --directory, or --placement all-on-host"
        check_space(request.directory, need, "this model", cure)


@as_before()
def measure(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every case; return everything as JSON has it. Seconds and bytes.

    A case that fails is part of the result, with its error; the others go on.

    Raises:
        BudgetError, DirectoryError: it does not fit; nothing was started.
    """
    check_room(request)
    if request.threads is not None:
        cpu_adam.set_threads(request.threads)
        torch.set_num_threads(request.threads)
    groups: dict[str, Any] = {}
    drive = request.on_nvme
    form = {"moments": request.moments, "split_master": request.split_master}
    with scratch(request.directory) as folder, rates(folder if drive else None, **form) as measured:
        plain = in_memory(request.build, device=request.device, dtype=parse_dtype(request.dtype))
        for placement in request.placements:
            group = groups[placement] = {"placement": PLACEMENTS[placement]._asdict()}
            group |= {"table": {}, "errors": {}, "samples": {}}
            for update in request.updates:
                tell(f"{placement}, {update}")
                place = os.path.join(folder, f"{placement}-{update}")
                try:
                    row, samples = _case(request, placement, update, place, plain, measured)
                except (InfinityError, torch.OutOfMemoryError) as error:
                    group["errors"][update] = {"error": str(error)}
                else:
                    group["table"][update], group["samples"][update] = row, samples
    sizes = (*_SHAPE, "parameters")
    told = ("tokens", "batch", "dtype", "moments", "split_master", "device", "steps", "threads")
    return {
        "benchmark": "step",
        "model": {name: getattr(request, name) for name in sizes},
        **{name: getattr(request, name) for name in told},
        "warmup_steps": request.warmup,
        "placements": groups,
    }


def _case(
    request: Request, placement: str, update: str, place: str, plain: Stepper, measured: Rates
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures and the samples of one case, whose files are in `place`."""
    settings, params = settings_of(placement, update, request.largest_unit), request.parameters
    settings |= {"optimizer_state_dtype": request.moments, "split_master": request.split_master}
    random = torch.Generator().manual_seed(1)
    data = torch.randint(0, request.vocab, (request.batch, request.tokens), generator=random)
    data = data.to(request.device)
    os.mkdir(place)
    common = {"nvme": place, "device": request.device, "dtype": request.dtype, "threads": request.threads}
    ours = offloaded(request.build, **common, **settings)

    def turns(who: Stepper, **how: bool) -> list[dict[str, Any]]:
        counts = [request.warmup, request.steps] if request.warmup else [request.steps]
        return [who.turn(lambda model: model(data, data.roll(-1, 1)), n, **how) for n in counts][-1:]

    try:
        samples = {"infinity": turns(ours), "torch": turns(plain, apart=True)}
        found = measured.measure(nvme="nvme" in PLACEMENTS[placement])
    finally:
        ours.close()
    row, torch_row = (figures(each, params) for each in samples.values())
    row |= {"memory": ours.memory(), "rates": found}
    row |= beside(row, torch_row, found, settings=settings, dtype=request.dtype, params=params)
    return row, samples


def show(result: Mapping[str, Any]) -> None:
    """Print a table for a person: a line for each placement and update mode."""
    title = (
        f"{result['model']['parameters']:,} parameters, {result['batch']} × {result['tokens']} tokens, "
        f"{result['dtype']}, {result['moments']} moments, "
        f"{'a split master, ' if result['split_master'] else ''}{result['device']}; "
        f"medians of {result['steps']} steps"
    )
    names = ("s/step", "read", "written", "B/param", "drive", "bound", "efficiency", "memory")
    table = table_of("placement", "update", *names, title=title, left=2)
    failed = []
    for placement, group in result["placements"].items():
        for name, row in group["table"].items():
            drive = row["rates"]["nvme_mixed_bytes_per_second"]
            table.add_row(
                *(placement, name, f"{row['seconds']:.3f}"),
                *(format_size(round(row[way])) for way in ("read_bytes", "written_bytes")),
                *(f"{row['bytes_per_parameter']:.1f}", "–" if drive is None else f"{gigabytes(drive)} GB/s"),
                *(f"{row['bound']:.3f}", f"{row['efficiency']:.0%}", format_size(row["memory"])),
            )
        for name, error in group["errors"].items():
            table.add_row(placement, name, "failed", style="red")
            failed.append(f"{placement}: {name} failed: {error['error']}")
        table.add_section()
    console = wide_console()
    console.print(table)
    console.print(BOUNDS)
    for text in failed:
        console.print(text, style="red", markup=False)


@click.command("step")
@setting_options([o for o in OPTIONS if o.section == "model" and o.name in ("preset", *_SHAPE)])
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="In a sequence.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences.")
@click.option("--dtype", type=click.Choice(("fp32", "bf16")), default="fp32", show_default=True)
@click.option("--moments", type=click.Choice(MOMENTS), default="fp32", show_default=True, help="Their form.")
@click.option("--split-master", is_flag=True, help="With --dtype bf16: of 2 bytes for 4, beside the copy.")
@device_option
@click.option("--directory", default=".", metavar="DIR", help="On the drive to be measured. Default: here.")
@words_option(
    *("--placement", "placements", tuple(PLACEMENTS)),
    f"{', '.join(PLACEMENTS)}; may be given again. Default: all.",
)
@words_option("--update", "updates", UPDATES, f"{', '.join(UPDATES)}; may be given again. Default: all.")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="In one go.")
@click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True, help="Steps before.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch and of the CPU's Adam.")
@json_option
def step_command(device: str | None, directory: str, as_json: bool, **given: Any) -> int:
    """Measure whole steps for all placements and update modes, each beside its bound.

    Some minutes with the default size. Needs an otherwise idle machine; what it writes to DIR is gone
    afterwards. Exit code 1 when a case failed.
    """
    preset = given.pop("preset") or ModelSettings.preset
    config = config_from(preset, **{name: given.pop(name) for name in _SHAPE})
    opened = open_device(device)
    opened.close()
    request = Request(
        **{name: config[KEYS[name]] for name in _SHAPE},
        directory=os.path.abspath(directory),
        device=str(opened.torch_device),
        **{name: value for name, value in given.items() if value not in (None, ())},
    )
    if request.split_master:
        if not given["updates"]:  # of all, those that there are
            request = dataclasses.replace(request, updates=tuple(u for u in UPDATES if u != "delayed"))
        for update in request.updates:
            Config(split_master=True, dtype=request.dtype, update=update, accumulation=1)  # or it raises
    with status_line(quiet=as_json) as tell:
        result = measure(request, tell)
    errors = [group["errors"] for group in result["placements"].values()]
    return finish(result, show, as_json=as_json, failed=any(errors))
