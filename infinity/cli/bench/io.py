"""`infinity bench io`: what drives can do for the engine, measured as the engine uses them.

Reads, writes and both at once (the update: equal parts of each), through the engine's own rings. See
[Note: a bench leaves nothing behind] and [Note: what a bench verifies] in io_load.py.

Order of one case: a pass that warms up and is not counted; the passes that count; a pass of single blocks for
latencies; then a sample of what was written is read back and compared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import click
import numpy as np

from infinity.api.this_machine import check_directory
from infinity.cli.console import (
    Tell,
    finish,
    gigabytes,
    progress,
    show_warnings,
    sizes,
    table_of,
    wide_console,
)
from infinity.cli.medium import MEMORY, describe_directory
from infinity.cli.options import directories_argument, json_option, several
from infinity.cli.plot import draw_io, plot_option
from infinity.core.config import BLOCK_BYTES, MOST_BLOCK_BYTES, MOST_QUEUE_DEPTH, QUEUE_DEPTH
from infinity.core.errors import ConfigError
from infinity.core.sizes import ALIGNMENT, GiB, MiB, ceil_to, format_size, parse_size
from infinity.hardware.aio import BACKENDS
from infinity.hardware.probe import available_host_memory
from infinity.version import __version__

from .io_load import PATTERNS, Job, Load, Settings, check_space, run_pass, usable_bytes

_LEAST: Final = 16 * MiB
_SAMPLE: Final = 64 * MiB  # read back after a case that wrote
#: What `--quick` says where nothing else is said.
_QUICK: Final[dict[str, Any]] = {"usual_size": 256 * MiB, "seconds": 0.25}


@dataclass(frozen=True)
class Request:
    """What is to be measured. Empty tuples: what the engine uses. `size` None: `usual_size`, as far as there
    is room, and more where buffers need it. `seconds` are of one pass, `repeats` of one case."""

    directories: tuple[str, ...]
    size: int | None = None
    usual_size: int = GiB
    blocks: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    seconds: float = 0.5
    repeats: int = 3


class Case(NamedTuple):
    """What one line measures: a pattern at one setting. `directories` are indices of the loads."""

    job: Job
    settings: Settings
    directories: tuple[int, ...] = (0,)

    @property
    def window(self) -> int:
        """Return bytes of the buffers that its passes need."""
        jobs = self.job, self.job._replace(single=True), self.job.checking
        return max(job.window(self.settings) for job in jobs)

    def misfit(self, nbytes: int) -> str | None:
        """Return why it cannot run on files of `nbytes`, or None: two transfers under way must never have
        the same place, or no one could say what the file holds."""
        return None if nbytes >= 2 * self.window else f"it takes {format_size(2 * self.window)}"


# ---- what is measured ----


def settings_of(request: Request) -> list[Settings]:
    """Return the settings to be measured.

    Raises:
        ConfigError: no ring takes such a block or depth.
    """
    settings: list[Settings] = []
    for backend, block, depth in itertools.product(
        request.backends or ("auto",), request.blocks or (BLOCK_BYTES,), request.depths or (QUEUE_DEPTH,)
    ):
        if block % ALIGNMENT or not 0 < block <= MOST_BLOCK_BYTES or not 0 < depth <= MOST_QUEUE_DEPTH:
            raise ConfigError(
                "a ring cannot be opened with these sizes",
                expected=f"blocks of a multiple of {ALIGNMENT} bytes up to {format_size(MOST_BLOCK_BYTES)}, "
                f"a depth from 1 to {MOST_QUEUE_DEPTH}",
                found=f"block {block}, depth {depth}",
                cure="--block 1MiB --depth 32",
            )
        threads = request.threads or (4,)
        for count in threads if backend in ("threads", "auto") else threads[:1]:
            settings.append(Settings(backend, block, depth, count))
    return settings


def cases_of(request: Request, settings: Sequence[Settings]) -> list[Case]:
    """Return the cases in the order in which they are measured: reads before anything is rewritten."""
    every = tuple(range(len(request.directories)))
    groups: list[tuple[int, ...]] = [(index,) for index in every]
    if len(every) > 1:
        groups.append(every)
    cases = []
    for group, each, pattern in itertools.product(groups, settings, request.patterns or PATTERNS):
        cases.append(Case(Job(pattern), each, group))
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
    wanted = max(request.usual_size, *(ceil_to(2 * case.window, MiB) for case in cases), 0)
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
        "filesystem": facts.filesystem,
        "kind": facts.kind,
        "drive": None if drive is None else " ".join(filter(None, (drive.name, drive.model))),
        "direct": facts.direct,
        "alignment": facts.alignment,
        "free_bytes": facts.free,
    }


# ---- measuring ----


def measure(request: Request, tell: Tell) -> dict[str, Any]:
    """Measure; return everything as JSON has it. Rates in bytes per second, times in seconds."""
    for directory in request.directories:
        check_directory(directory)
    cases = cases_of(request, settings_of(request))
    nbytes = choose_size(request, cases)
    cases, warnings = keep_what_fits(cases, nbytes)
    places = [facts_of(directory) for directory in request.directories]
    for place in places:
        if not place["direct"] or place["kind"] == MEMORY:
            warnings.append(f"{place['path']}: {place['filesystem']} answers from memory, not from a drive")
    result: dict[str, Any] = {
        **{"benchmark": "io", "infinity": __version__, "directories": places},
        **{"file_bytes": nbytes, "seconds_per_pass": request.seconds},
        **{"fill_bytes_per_second": [], "cases": []},
    }
    first, job = cases[0].settings, cases[0].job
    grain = min(case.settings.block_bytes for case in cases)
    window = max(case.window for case in cases)
    with contextlib.ExitStack() as stack:
        paths = request.directories
        loads = [stack.enter_context(Load(path, nbytes, grain=grain, window=window)) for path in paths]
        for load in loads:
            tell(f"writes {format_size(nbytes)} to {load.directory}")
            result["fill_bytes_per_second"].append(load.fill(first, job.chunk))
        for number, case in enumerate(cases):
            tell(f"{case.job.pattern}, {case.settings.backend} {sizes(case.settings)}", number, len(cases))
            result["cases"].append(measure_case(case, loads, request))
        result["verified_bytes"] = sum(load.verified for load in loads)
    return {**result, "warnings": list(dict.fromkeys(warnings))}


def measure_case(case: Case, loads: Sequence[Load], request: Request) -> dict[str, Any]:
    """Return the figures of a case as JSON has them."""
    chosen = [loads[index] for index in case.directories]
    job, settings, seconds = case.job, case.settings, request.seconds
    verified = sum(load.verified for load in chosen)
    with contextlib.ExitStack() as stack:
        pairs = [(load, stack.enter_context(load.ring(settings))) for load in chosen]
        rings = [ring for _, ring in pairs]
        run_pass(pairs, settings, job, min(0.2, seconds))
        tallies = [run_pass(pairs, settings, job, seconds) for _ in range(request.repeats)]
        histogram = np.sum([ring.stats().submit_histogram for ring in rings], axis=0).tolist()
        latencies = run_pass(pairs, settings, job._replace(single=True), min(0.4, seconds)).latencies
        most = max(ring.stats().submit_max_seconds for ring in rings)
        for load, ring in pairs:
            load.verify(ring, settings, job, _SAMPLE // len(pairs))
        backends = sorted({ring.backend for ring in rings})
        reasons = sorted({ring.reason for ring in rings})
    rates = [tally.rate for tally in tallies]
    middle, moved = statistics.median(rates), sum(t.read + t.written for t in tallies)
    p50, p99, p999 = np.percentile(latencies, [50, 99, 99.9]).tolist()
    return {
        "pattern": job.pattern,
        "directories": [load.directory for load in chosen],
        **settings._asdict(),
        "backend": "+".join(backends),
        "backend_reason": "; ".join(reasons),
        "bytes_per_second": middle,
        "spread": (max(rates) - min(rates)) / middle if middle else 0.0,
        "repeats": rates,
        "bytes_moved": moved,
        "latency_seconds": {
            **{"p50": p50, "p99": p99, "p99.9": p999},
            **{"max": max(latencies), "blocks": len(latencies)},
        },
        "cpu_seconds_per_gb": sum(t.cpu_seconds for t in tallies) / (moved / 1e9),
        "submit": {"less_than_2_to_the_i_microseconds": histogram, "max_seconds": most},
        "verified_bytes": sum(load.verified for load in chosen) - verified,
    }


# ---- the command ----


def _size(text: str) -> int:
    return parse_size(text, "block")


_BACKENDS: Final = click.Choice(("auto", *BACKENDS))
_PATTERNS: Final = click.Choice(PATTERNS)


@click.command("io")
@directories_argument()
@click.option("--quick", is_flag=True, help="About five seconds.")
@click.option("--size", help="Of the file in each directory. Default: 1GiB (quick: 256MiB).")
@click.option("--block", "blocks", callback=several(_size), help="Sizes such as 256KiB,1MiB.")
@click.option("--depth", "depths", callback=several(int), help="Queue depths, such as 8,32.")
@click.option("--threads", callback=several(int), help="Of the backend threads, such as 2,4.")
@click.option("--backend", "backends", callback=several(_BACKENDS), help=", ".join(BACKENDS))
@click.option("--pattern", "patterns", callback=several(_PATTERNS), help=", ".join(PATTERNS))
@click.option("--seconds", type=click.FloatRange(0.01, 3600), help="Of one pass.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Passes of one case.")
@plot_option
@click.option("--need", type=click.FloatRange(0), help="GB/s that a run needs, as a line in the plot.")
@json_option
def io_command(
    quick: bool, size: str | None, plot: str | None, need: float | None, as_json: bool, **given: Any
) -> None:
    """Measure drives as the engine uses them, in a file of its own that is gone afterwards.

    Takes about half a minute. Never fills a disk. Every figure is the median of several passes; "spread" is
    the distance of the extremes over it. Data that is read back is compared.
    """
    told = {name: value for name, value in given.items() if value is not None}
    if size is not None:
        told["size"] = parse_size(size, "--size")
    request = Request(**{**(_QUICK if quick else {}), **told})
    with progress() as tell:
        result = measure(request, tell)
    if plot is not None:
        draw_io(plot, result, need)
    finish(result, show, as_json=as_json)


def show(result: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    console, cases = wide_console(), result["cases"]
    for place in result["directories"]:
        parts = (place["path"], place["filesystem"], place["drive"], "" if place["direct"] else "no O_DIRECT")
        console.print(", ".join(part for part in parts if part), markup=False)
    several = len({tuple(case["directories"]) for case in cases}) > 1
    hows = [_how(case, name=several) for case in cases]
    same = len(set(hows)) == 1
    names = ["what", *([] if same else ["how"]), "GB/s", "spread", "ms: p50, p99, p99.9", "CPU s/GB"]
    table = table_of(*names, title=hows[0] if same else None, left=1 if same else 2)
    for case, how in zip(cases, hows, strict=True):
        row = [case["pattern"], *([] if same else [how])]
        row += [gigabytes(case["bytes_per_second"]), f"{case['spread']:.0%}"]
        row.append("  ".join(f"{case['latency_seconds'][p] * 1e3:.2f}" for p in ("p50", "p99", "p99.9")))
        row.append(f"{case['cpu_seconds_per_gb']:.3f}")
        table.add_row(*row)
    console.print(table)
    # A submission that blocks holds up everything behind it.
    columns = zip(*(case["submit"]["less_than_2_to_the_i_microseconds"] for case in cases), strict=True)
    seen = list(itertools.accumulate(sum(column) for column in columns))
    if seen[-1]:
        power = next(power for power, count in enumerate(seen) if count >= 0.99 * seen[-1])
        longest = max(case["submit"]["max_seconds"] for case in cases)
        text = f"99 % of {seen[-1]:,} submissions took less than {1 << power:,} µs"
        console.print(f"{text}, the longest {longest * 1e3:.2f} ms.")
    if result["verified_bytes"]:
        console.print(f"{format_size(result['verified_bytes'])} were read back and are what was written.")
    show_warnings(console, result["warnings"])


def _how(case: Mapping[str, Any], *, name: bool) -> str:
    """Return at which settings a case was measured; `name`: and in which directory."""
    threads = f" ({case['threads']} threads)" if case["backend"] == "threads" else ""
    where = f", {len(case['directories'])} directories" if len(case["directories"]) > 1 else ""
    if name and not where:
        where = f", {case['directories'][0]}"
    return f"{case['backend']} {format_size(case['block_bytes'])} × {case['queue_depth']}{threads}{where}"
