"""`infinity bench io`: what drives can do for the engine, measured as the engine uses them.

Reads, writes and both at once (the update: equal parts of each, with and without CPU Adam beside),
through the engine's own rings, beside fio where it is installed. See [Note: a bench leaves nothing
behind] and [Note: what a bench verifies] in io_load.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from infinity.api.this_machine import check_directory
from infinity.cli.console import check_plot, finish, sizes, status_line
from infinity.cli.options import directories_argument, json_option, numbers_option, words_option
from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH
from infinity.core.errors import ConfigError
from infinity.core.sizes import ALIGNMENT, GiB, MiB, ceil_to, format_size, parse_size
from infinity.hardware import cpu_adam
from infinity.hardware.aio import BACKENDS, available_backends
from infinity.hardware.medium import MEMORY, medium_of
from infinity.hardware.probe import available_host_memory, describe_directory
from infinity.version import __version__

from .adam import AdamWork, rate
from .io_case import Case, cache_warning, measure_case, read_twice, sustained
from .io_fio import find_fio
from .io_load import ORDERS, PATTERNS, Job, Load, Settings, check_space, usable_bytes
from .io_show import plot, show

_LEAST: Final = 16 * MiB
_SIZES: Final = {"quick": 256 * MiB, "default": GiB, "full": 4 * GiB}
#: What the modes say where nothing else is said.
_MODES: Final[dict[str, dict[str, Any]]] = {
    "quick": {"seconds": 0.25, "repeats": 3, "fio": False},
    "default": {"seconds": 0.5, "repeats": 3, "fio": True},
    "full": {"seconds": 1.0, "repeats": 7, "fio": True},
}
_SWEEP: Final = {"block": (256 * 1024, MiB, 4 * MiB), "depth": (8, 32, 128), "threads": (4, 16)}
_SUSTAINED: Final = (
    "Write this long, past a drive's write cache, and show bandwidth over time. Wears the drive."
)
_ADAM: Final = 4 * MiB  # parameters that Adam updates beside the I/O: larger than caches


@dataclass(frozen=True)
class Request:
    """What is to be measured. Empty tuples: what the mode says. `seconds` are of one pass, `repeats` of one
    case; `fio`: compare with it."""

    directories: tuple[str, ...]
    mode: str = "default"
    size: int | None = None
    blocks: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    adam: bool = True
    sustained: float | None = None
    seconds: float = 0.5
    repeats: int = 3
    fio: bool = True


def settings_of(request: Request) -> list[Settings]:
    """Return the settings to be measured.

    Raises:
        ConfigError: no ring takes such a block or depth.
    """
    full = request.mode == "full"
    backends = request.backends
    if not backends and full:
        found = [available_backends(directory) for directory in request.directories]
        backends = tuple(name for name in BACKENDS if all(each[name] == "ok" for each in found))
    blocks = request.blocks or (_SWEEP["block"] if full else (BLOCK_BYTES,))
    depths = request.depths or (_SWEEP["depth"] if full else (QUEUE_DEPTH,))
    settings: list[Settings] = []
    for backend, block, depth in itertools.product(backends or ("auto",), blocks, depths):
        if block % ALIGNMENT or not 0 < block <= GiB or not 0 < depth <= 4096:
            raise ConfigError(
                "a ring cannot be opened with these sizes",
                expected="blocks of a multiple of 4096 bytes up to 1 GiB, a depth from 1 to 4096",
                found=f"block {block}, depth {depth}",
                cure="--block 1MiB --depth 32",
            )
        swept = request.threads or (_SWEEP["threads"] if full and backend == "threads" else (4,))
        for threads in swept if backend in ("threads", "auto") else swept[:1]:
            settings.append(Settings(backend, block, depth, threads))
    return settings


def cases_of(request: Request, settings: Sequence[Settings]) -> list[Case]:
    """Return the cases in the order in which they are measured: reads before anything is rewritten."""
    every = tuple(range(len(request.directories)))
    if request.sustained is not None:
        return [Case(Job((request.patterns or ("write",))[0]), settings[0], every)]
    groups: list[tuple[int, ...]] = [(index,) for index in every]
    if request.mode == "full":
        groups += [every[:count] for count in range(2, len(every))]
    if len(every) > 1:
        groups.append(every)
    orders = request.orders or (ORDERS if request.mode != "quick" else ORDERS[:1])
    cases = []
    for group, each in itertools.product(groups, settings):
        for pattern, order in itertools.product(request.patterns or PATTERNS, orders):
            job = Job(pattern, order == "scattered")
            if pattern == "mixed" and job.scattered and not request.orders and request.mode != "full":
                continue  # the update has sequential chunks
            cases.append(Case(job, each, group))
            if pattern == "mixed" and request.adam and not job.scattered:
                cases.append(Case(job, each, group, adam=True))
    return cases


def choose_size(request: Request, cases: Sequence[Case]) -> int:
    """Return the bytes of each directory's file.

    Raises:
        ConfigError: too small for anything.
        DirectoryError: the disk is full.
    """
    if request.size is not None:
        if request.size < _LEAST:
            raise ConfigError(
                "the bench's file is too small to measure anything",
                expected=f"at least {format_size(_LEAST)}",
                found=format_size(request.size),
                cure="--size 1GiB",
            )
        return request.size // MiB * MiB
    devices = [os.stat(directory).st_dev for directory in request.directories]
    rooms = {d: devices.count(device) for d, device in zip(request.directories, devices, strict=True)}
    for directory, sharing in rooms.items():
        cure = "free space there, or name a directory on another disk"
        check_space(directory, _LEAST * sharing, "the smallest file: its disk is full", cure)
    usable = min(usable_bytes(directory)[0] // sharing for directory, sharing in rooms.items())
    if request.sustained is not None:
        return max(_LEAST, min(usable // 2, 64 * GiB) // MiB * MiB)
    wanted = max(_SIZES[request.mode], *(ceil_to(2 * case.window, MiB) for case in cases), 0)
    return max(_LEAST, min(wanted, usable) // MiB * MiB)


def keep_what_fits(cases: Sequence[Case], nbytes: int) -> tuple[list[Case], list[str]]:
    """Return the cases that fit the file and host memory, and what to say about the others.

    Raises:
        ConfigError: none fits.
    """
    memory = available_host_memory() // 2
    kept, said = [], []
    for case in cases:
        while (why := case.misfit(nbytes)) is not None and case.job.chunk > case.settings.block_bytes:
            case = case._replace(
                job=case.job._replace(chunk=case.job.chunk // 2)
            )  # small drive, small tickets
        if why is None and case.window * len(case.directories) > memory:
            why = f"buffers of {format_size(case.window)} do not fit host memory"
        if why is None:
            kept.append(case)
        else:
            said.append(f"{sizes(case.settings)} is left out with a file of {format_size(nbytes)}: {why}")
    if not kept:
        least = min((ceil_to(2 * case.window, MiB) for case in cases), default=_LEAST)
        raise ConfigError(
            "nothing can be measured with these sizes",
            expected="a file of at least twice what is under way at once",
            found=said[0] if said else "no case",
            cure=f"--size {least // MiB}MiB (that much room on the drive), a smaller --block or --depth",
        )
    return kept, list(dict.fromkeys(said))


def facts_of(directory: str) -> dict[str, Any]:
    """Return what a directory stands on, as JSON has it."""
    facts = describe_directory(directory)
    drive = facts.drive
    return {
        "path": facts.path,
        "filesystem": facts.mount.filesystem if facts.mount else None,
        "drive": None if drive is None else " ".join(filter(None, (drive.name, drive.model))),
        "direct": facts.direct,
        "alignment": facts.alignment,
        "free_bytes": facts.free,
    }


def measure(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure; return everything as JSON has it. Rates in bytes per second, times in seconds."""
    for directory in request.directories:
        check_directory(directory)
    cases = cases_of(request, settings_of(request))
    nbytes = choose_size(request, cases)
    cases, warnings = keep_what_fits(cases, nbytes)
    places = [facts_of(directory) for directory in request.directories]
    for place in places:
        if not place["direct"] or medium_of(place["path"]).kind == MEMORY:
            warnings.append(f"{place['path']}: {place['filesystem']} answers from memory, not from a drive")
    fio = find_fio() if request.fio else None
    if request.fio and fio is None and request.sustained is None:
        warnings.append("fio is not installed: there is nothing to compare with (Debian: apt install fio)")
    result: dict[str, Any] = {
        **{"benchmark": "io", "infinity": __version__, "mode": request.mode, "directories": places},
        **{"file_bytes": nbytes, "seconds_per_pass": request.seconds, "fio": fio},
        **dict.fromkeys(("fill_bytes_per_second", "adam_alone_parameters_per_second", "sustained")),
        **{"cache": [], "cases": [], "warnings": warnings},
    }
    grain = min(case.settings.block_bytes for case in cases)
    window = max(case.window for case in cases)
    with contextlib.ExitStack() as stack:
        paths = request.directories
        loads = [stack.enter_context(Load(path, nbytes, grain=grain, window=window)) for path in paths]
        if request.sustained is None:
            _measure_cases(request, cases, loads, result, tell)
        else:
            job, settings, *_ = cases[0]
            pairs = [(load, stack.enter_context(load.ring(settings))) for load in loads]
            tell(f"{job.pattern}s for {request.sustained:g} s on files of {format_size(nbytes)}")
            result["sustained"] = sustained(pairs, settings, job, request.sustained)
            for load, ring in pairs:
                load.verify(ring, settings, job, 256 * MiB)
        result["verified_bytes"] = sum(load.verified for load in loads)
    return {**result, "warnings": list(dict.fromkeys(warnings))}


def _measure_cases(
    request: Request, cases: list[Case], loads: list[Load], found: dict[str, Any], tell: Callable[[str], None]
) -> None:
    first, job, work = cases[0].settings, cases[0].job, None
    found["fill_bytes_per_second"] = []
    for load in loads:
        tell(f"writes {format_size(load.nbytes)} to {load.directory}")
        found["fill_bytes_per_second"].append(load.fill(first, job.chunk))
        with load.ring(first) as ring:
            twice = read_twice(load, ring, first, job)
        found["warnings"] += cache_warning(twice, load.directory)
        found["cache"].append({"path": load.directory, **(twice or {})})
    if any(case.adam for case in cases):
        work = AdamWork(_ADAM)
        found["adam_alone_parameters_per_second"] = max(rate(work.update, work.numel, 5))
        found["adam_threads"] = cpu_adam.threads()
    for number, case in enumerate(cases, 1):
        what = f"{case.job.pattern}{' beside Adam' if case.adam else ''}, {case.job.order}"
        tell(f"[{number}/{len(cases)}] {what}, {case.settings.backend} {sizes(case.settings)}")
        # Scattered, fio costs time and says little; --order scattered asks for it.
        fio = request.fio and (not case.job.scattered or bool(request.orders) or request.mode == "full")
        measured, said = measure_case(case, loads, request.seconds, request.repeats, fio=fio, work=work)
        found["cases"].append(measured)
        found["warnings"] += said


@click.command("io")
@directories_argument()
@click.option("--quick", "mode", flag_value="quick", help="About five seconds: no fio, no scattered.")
@click.option("--full", "mode", flag_value="full", help="Every backend, block, depth: minutes.")
@click.option("--size", help="Of the file in each directory. Default: 1GiB (quick 256MiB, full 4GiB).")
@numbers_option("--block", "blocks", "Block sizes, such as 256KiB,1MiB. Default: the engine's.", size=True)
@numbers_option("--depth", "depths", "Queue depths, such as 8,32. Default: the engine's.")
@numbers_option("--threads", "threads", "Numbers of threads of the backend threads.")
@words_option("--backend", "backends", ("auto", *BACKENDS), "auto, libaio, syscall, uring, threads.")
@words_option("--pattern", "patterns", PATTERNS, "read, write, mixed. Default: all.")
@words_option("--order", "orders", ORDERS, "sequential, scattered. Default: both.")
@click.option("--seconds", type=click.FloatRange(0.01, 3600), help="Of one pass.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Passes of one case.")
@click.option("--fio/--no-fio", default=None, help="Compare with fio where it is installed.")
@click.option("--adam/--no-adam", default=True, help="Also the mixed case with CPU Adam running beside.")
@click.option("--sustained", type=click.FloatRange(0.5, 86400), metavar="SECONDS", help=_SUSTAINED)
@json_option
@click.option("--plot", "plot_file", help="Draw the result into this file (.png, .svg, .pdf).")
def io_command(
    mode: str | None, size: str | None, as_json: bool, plot_file: str | None, **given: Any
) -> None:
    """Measure drives as the engine uses them, in a file of its own that is gone afterwards.

    Takes about a minute where fio is installed, half of that without it. Never fills a disk. Every
    figure is the median of several passes; "spread" is the distance of the extremes over it. fio runs
    once, as long as these passes together. Data that is read back is compared.
    """
    check_plot(plot_file)
    mode = mode or "default"
    told = {name: value for name, value in given.items() if value is not None}
    nbytes = None if size is None else parse_size(size, "--size")
    request = Request(mode=mode, size=nbytes, **{**_MODES[mode], **told})
    with status_line(quiet=as_json) as tell:
        result = measure(request, tell)
    if plot_file is not None:
        plot(result, plot_file)
    finish(result, show, as_json=as_json)
