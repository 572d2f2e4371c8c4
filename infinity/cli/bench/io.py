"""`infinity bench io`: what drives can do for the engine, measured as the engine uses them.

Reads, writes and both at once (the update: equal parts of each, with and without CPU Adam beside),
through the engine's own rings, beside fio where it is installed. See [Note: a bench leaves nothing
behind] and [Note: what a bench verifies] in io_load.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click

from infinity.cli.console import check_plot, status_line
from infinity.cli.options import absolute, chosen, directories_argument, json_option, listed
from infinity.core.config import BLOCK_BYTES, QUEUE_DEPTH
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import GiB, MiB, ceil_to, format_size, parse_size
from infinity.hardware import cpu_adam
from infinity.hardware.aio import BACKENDS, available_backends
from infinity.hardware.medium import MEMORY, medium_of
from infinity.hardware.probe import DirectoryFacts, available_host_memory, describe_directory
from infinity.version import __version__

from .adam import AdamWork, rate
from .io_case import Case, Effort, check_settings, check_sizes, measure_case, run_pass
from .io_fio import find_fio
from .io_load import PATTERNS, Job, Load, Settings, check_directory, usable_bytes
from .io_show import plot, show
from .io_sustained import cache_warning, read_twice, sustained

_LEAST: Final = 16 * MiB
_SIZES: Final = {"quick": 256 * MiB, "default": GiB, "full": 4 * GiB}
_EFFORTS: Final = {
    "quick": Effort(seconds=0.25, repeats=3, fio=False),
    "default": Effort(seconds=0.5, repeats=3),
    "full": Effort(seconds=1.0, repeats=7),
}
_SWEEP: Final = {"block": (256 * 1024, MiB, 4 * MiB), "depth": (8, 32, 128), "threads": (4, 16)}
_ADAM: Final = 4 * MiB  # parameters that Adam updates beside the I/O: larger than caches


@dataclass(frozen=True)
class Request:
    """What is to be measured. Empty tuples: what the mode says."""

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


def settings_of(request: Request) -> list[Settings]:
    """Return the settings to be measured."""
    full = request.mode == "full"
    backends = request.backends
    if not backends and full:
        found = [available_backends(directory) for directory in request.directories]
        backends = tuple(name for name in BACKENDS if all(each[name] == "ok" for each in found))
    blocks = request.blocks or (_SWEEP["block"] if full else (BLOCK_BYTES,))
    depths = request.depths or (_SWEEP["depth"] if full else (QUEUE_DEPTH,))
    settings: list[Settings] = []
    for backend, block, depth in itertools.product(backends or ("auto",), blocks, depths):
        swept = request.threads or (_SWEEP["threads"] if full and backend == "threads" else (4,))
        for threads in swept if backend in ("threads", "auto") else swept[:1]:
            settings.append(Settings(backend, block, depth, threads))
            check_settings(settings[-1])
    return settings


def cases_of(request: Request, settings: Sequence[Settings]) -> list[Case]:
    """Return the cases in the order in which they are measured: reads before anything is rewritten."""
    every = tuple(range(len(request.directories)))
    groups: list[tuple[int, ...]] = [(index,) for index in every]
    if request.mode == "full":
        groups += [every[:count] for count in range(2, len(every))]
    if len(every) > 1:
        groups.append(every)
    every_order = ("sequential", "scattered") if request.mode != "quick" else ("sequential",)
    orders = request.orders or every_order
    cases = []
    for group in groups:
        for each in settings:
            for pattern, order in itertools.product(request.patterns or PATTERNS, orders):
                job = Job(pattern, order == "scattered")
                if pattern == "mixed" and job.scattered and not request.orders and request.mode != "full":
                    continue  # the update has sequential chunks
                cases.append(Case(job, each, group))
                if pattern == "mixed" and request.adam and not job.scattered:
                    cases.append(Case(job, each, group, adam=True))
    return cases


def _jobs(case: Case) -> tuple[Job, ...]:
    return case.job, case.job._replace(single=True), case.job.checking


def _window(case: Case) -> int:
    return max(job.window(case.settings) for job in _jobs(case))


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
    rooms = []
    for directory, device in zip(request.directories, devices, strict=True):
        usable, reserve = usable_bytes(directory)
        rooms.append(usable // devices.count(device))
        if rooms[-1] < _LEAST:
            raise DirectoryError(
                f"the disk of {directory} is full",
                errno=errno.ENOSPC,
                path=directory,
                expected=f"{format_size(_LEAST * devices.count(device) + reserve)} free, of which "
                f"{format_size(reserve)} stay free",
                found=f"{format_size(os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize)} free",
                cure="free space there, or name a directory on another disk",
            )
    usable = min(rooms)
    if request.sustained is not None:
        return max(_LEAST, min(usable // 2, 64 * GiB) // MiB * MiB)
    wanted = max(_SIZES[request.mode], ceil_to(2 * max(map(_window, cases), default=0), MiB))
    return max(_LEAST, min(wanted, usable) // MiB * MiB)


def keep_what_fits(cases: Sequence[Case], nbytes: int) -> tuple[list[Case], list[str]]:
    """Return the cases that fit the file and host memory, and what to say about the others.

    Raises:
        ConfigError: none fits.
    """
    memory = available_host_memory() // 2
    kept, said = [], []
    for case in cases:
        why = check_sizes(nbytes, case.settings, _jobs(case))
        while why is not None and case.job.chunk > case.settings.block_bytes:  # a small drive, small tickets
            case = case._replace(job=case.job._replace(chunk=case.job.chunk // 2))
            why = check_sizes(nbytes, case.settings, _jobs(case))
        if why is None and _window(case) * len(case.directories) > memory:
            why = f"buffers of {format_size(_window(case))} do not fit host memory"
        if why is None:
            kept.append(case)
        else:
            shape = f"{format_size(case.settings.block_bytes)} × {case.settings.queue_depth}"
            said.append(f"{shape} is left out with a file of {format_size(nbytes)}: {why}")
    if not kept:
        raise ConfigError(
            "nothing can be measured with these sizes",
            expected="a file of at least twice what is under way at once",
            found=said[0] if said else "no case",
            cure="a larger --size (or a drive with more room), a smaller --block or --depth",
        )
    return kept, list(dict.fromkeys(said))


def facts_as_dict(facts: DirectoryFacts) -> dict[str, Any]:
    """Return what a directory stands on, as JSON has it."""
    drive = facts.drive
    return {
        "path": facts.path,
        "filesystem": facts.mount.filesystem if facts.mount else None,
        "drive": None if drive is None else " ".join(filter(None, (drive.name, drive.model))),
        "direct": facts.direct,
        "alignment": facts.alignment,
        "free_bytes": facts.free,
    }


def measure(request: Request, effort: Effort, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure; return everything as JSON has it. Rates in bytes per second, times in seconds."""
    for directory in request.directories:
        check_directory(directory)
    settings = settings_of(request)
    cases = cases_of(request, settings) if request.sustained is None else []
    if request.sustained is not None:
        pattern = (request.patterns or ("write",))[0]
        cases = [Case(Job(pattern), settings[0], tuple(range(len(request.directories))))]
    nbytes = choose_size(request, cases)
    cases, warnings = keep_what_fits(cases, nbytes)
    facts = [facts_as_dict(describe_directory(directory)) for directory in request.directories]
    for place in facts:
        if not place["direct"] or medium_of(place["path"]).kind == MEMORY:
            warnings.append(f"{place['path']}: {place['filesystem']} answers from memory, not from a drive")
    result: dict[str, Any] = {
        "benchmark": "io",
        "infinity": __version__,
        "mode": request.mode,
        "directories": facts,
        "file_bytes": nbytes,
        "seconds_per_pass": effort.seconds,
        "fio": None,
        "fill_bytes_per_second": None,
        "cache": [],
        "cases": [],
        "adam_alone_parameters_per_second": None,
        "sustained": None,
    }
    grain = min(case.settings.block_bytes for case in cases)
    window = max(map(_window, cases))
    found = find_fio()
    if effort.fio and found is not None:
        result["fio"] = found[1]
    elif effort.fio and request.sustained is None:
        warnings.append("fio is not installed: there is nothing to compare with (Debian: apt install fio)")
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(Load(directory, nbytes, grain=grain, window=window))
            for directory in request.directories
        ]
        if request.sustained is not None:
            case = cases[0]
            pairs = [(load, stack.enter_context(load.ring(case.settings))) for load in loads]
            tell(f"{case.job.pattern}s for {request.sustained:g} s on files of {format_size(nbytes)}")
            result["sustained"] = sustained(pairs, case.settings, case.job, request.sustained)
            for load, ring in pairs:
                load.verify(ring, case.settings, case.job, 256 * MiB)
        else:
            compare_scattered = bool(request.orders) or request.mode == "full"
            _measure_cases(cases, loads, effort, result, warnings, tell, compare_scattered)
        result["verified_bytes"] = sum(load.verified for load in loads)
    result["warnings"] = list(dict.fromkeys(warnings))
    return result


def _measure_cases(
    cases: Sequence[Case],
    loads: Sequence[Load],
    effort: Effort,
    result: dict[str, Any],
    warnings: list[str],
    tell: Callable[[str], None],
    compare_scattered: bool,
) -> None:
    first, chunk = cases[0].settings, cases[0].job.chunk
    rates = []
    for load in loads:
        tell(f"writes {format_size(load.nbytes)} to {load.directory}")
        with load.ring(first) as ring:
            filled = run_pass([(load, ring)], first, Job("write", chunk=chunk), 3600, limit=load.nbytes)
            rates.append(filled.rate)
            twice = read_twice(load, ring, first, cases[0].job)
        warnings += cache_warning(twice, load.directory)
        result["cache"].append({"path": load.directory, **(twice or {})})
    result["fill_bytes_per_second"] = rates
    work = None
    if any(case.adam for case in cases):
        work = AdamWork(_ADAM)
        result["adam_alone_parameters_per_second"] = max(rate(work.update, work.numel, 5))
        result["adam_threads"] = cpu_adam.threads()
    for number, case in enumerate(cases, 1):
        order = "scattered" if case.job.scattered else "sequential"
        beside = " beside Adam" if case.adam else ""
        shape = f"{format_size(case.settings.block_bytes)} × {case.settings.queue_depth}"
        tell(f"[{number}/{len(cases)}] {case.job.pattern}{beside}, {order}, {case.settings.backend} {shape}")
        # Scattered, fio costs time and says little; --order scattered asks for it.
        peer = effort.fio and (not case.job.scattered or compare_scattered)
        measured, said = measure_case(case, loads, replace(effort, fio=peer), work)
        result["cases"].append(measured)
        warnings += said


def _numbers(name: str, values: Sequence[str], *, size: bool = False) -> tuple[int, ...]:
    try:
        return tuple(parse_size(v, name) if size else int(v) for v in listed(values))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--{name} is not a number", expected="4, or 4,16", found=", ".join(values), cure=f"--{name} 4"
        ) from error


@click.command("io")
@directories_argument
@click.option("--quick", "mode", flag_value="quick", help="About five seconds: no fio, no scattered.")
@click.option("--full", "mode", flag_value="full", help="Every backend, block, depth: minutes.")
@click.option("--size", help="Of the file in each directory. Default: 1GiB (quick 256MiB, full 4GiB).")
@click.option("--block", multiple=True, help="Block sizes, such as 256KiB,1MiB. Default: the engine's.")
@click.option("--depth", multiple=True, help="Queue depths, such as 8,32. Default: the engine's.")
@click.option("--threads", multiple=True, help="Numbers of threads of the backend threads.")
@click.option("--backend", multiple=True, help="auto, libaio, syscall, uring, threads.")
@click.option("--pattern", multiple=True, help="read, write, mixed. Default: all.")
@click.option("--order", multiple=True, help="sequential, scattered. Default: both.")
@click.option("--seconds", type=click.FloatRange(0.01, 3600), help="Of one pass.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Passes of one case.")
@click.option("--fio/--no-fio", default=None, help="Compare with fio where it is installed.")
@click.option("--adam/--no-adam", default=True, help="Also the mixed case with CPU Adam running beside.")
@click.option(
    "--sustained",
    type=click.FloatRange(0.5, 86400),
    metavar="SECONDS",
    help="Write this long, past a drive's write cache, and show bandwidth over time. Wears the drive.",
)
@json_option
@click.option("--plot", "plot_file", help="Draw the result into this file (.png, .svg, .pdf).")
def io_command(
    directories: tuple[str, ...],
    mode: str | None,
    size: str | None,
    block: tuple[str, ...],
    depth: tuple[str, ...],
    threads: tuple[str, ...],
    backend: tuple[str, ...],
    pattern: tuple[str, ...],
    order: tuple[str, ...],
    seconds: float | None,
    repeats: int | None,
    fio: bool | None,
    adam: bool,
    sustained: float | None,
    as_json: bool,
    plot_file: str | None,
) -> None:
    """Measure drives as the engine uses them, in a file of its own that is gone afterwards.

    Takes about a minute where fio is installed, half of that without it. Never fills a disk. Every
    figure is the median of several passes; "spread" is the distance of the extremes over it. Data that
    is read back is compared.
    """
    check_plot(plot_file)
    mode = mode or "default"
    request = Request(
        directories=tuple(absolute(directories)),
        mode=mode,
        size=None if size is None else parse_size(size, "--size"),
        blocks=_numbers("block", block, size=True),
        depths=_numbers("depth", depth),
        threads=_numbers("threads", threads),
        backends=chosen("backend", backend, ("auto", *BACKENDS)),
        patterns=chosen("pattern", pattern, PATTERNS),
        orders=chosen("order", order, ("sequential", "scattered")),
        adam=adam and sustained is None,
        sustained=sustained,
    )
    effort = _EFFORTS[mode]
    effort = replace(
        effort,
        seconds=seconds or effort.seconds,
        repeats=repeats or effort.repeats,
        fio=effort.fio if fio is None else fio,
    )
    with status_line(quiet=as_json) as tell:
        result = measure(request, effort, tell)
    if plot_file is not None:
        plot(result, plot_file)
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
