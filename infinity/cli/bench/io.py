"""`infinity bench io`: what drives can do for the engine, measured as the engine uses them.

Reads, writes and both at once (the update: equal parts of each, with and without CPU Adam beside),
through the engine's own rings, beside fio where it is installed. See [Note: a bench leaves nothing
behind] and [Note: what a bench verifies] in io_load.py.

Order of one case: fio, where it is compared; a pass that warms up and is not counted; the passes that count;
a pass of single blocks for latencies; then a sample of what was written is read back and compared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import click
import numpy as np
import torch

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
from infinity.cli.options import directories_argument, json_option, numbers_option, words_option
from infinity.cli.plot import draw_io, plot_option
from infinity.core.config import BLOCK_BYTES, MOST_BLOCK_BYTES, MOST_QUEUE_DEPTH, QUEUE_DEPTH
from infinity.core.errors import ConfigError
from infinity.core.sizes import ALIGNMENT, GiB, MiB, ceil_to, format_size, parse_size
from infinity.hardware import cpu_adam
from infinity.hardware.aio import BACKENDS, Ring
from infinity.hardware.probe import available_host_memory
from infinity.version import __version__

from .io_fio import best_of_fio, find_fio
from .io_load import PATTERNS, Job, Load, Settings, check_space, run_pass, usable_bytes

_LEAST: Final = 16 * MiB
_ADAM: Final = 4 * MiB  # parameters that Adam updates beside the I/O: larger than caches
_SAMPLE: Final = 64 * MiB  # read back after a case that wrote
#: What `--quick` says where nothing else is said.
_QUICK: Final[dict[str, Any]] = {"usual_size": 256 * MiB, "seconds": 0.25, "fio": False}
_FASTER: Final = 1.2  # a second read that is faster than a first one by more is a cache's
_REGION: Final = 32 * MiB
_REGIONS: Final = 9


@dataclass(frozen=True)
class Request:
    """What is to be measured. Empty tuples: what the engine uses. `size` None: `usual_size`, as far as there
    is room, and more where buffers need it. `seconds` are of one pass, `repeats` of one case; `fio`: compare
    with it."""

    directories: tuple[str, ...]
    size: int | None = None
    usual_size: int = GiB
    blocks: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    adam: bool = True
    seconds: float = 0.5
    repeats: int = 3
    fio: bool = True


class Case(NamedTuple):
    """What one line measures: a pattern at one setting. `directories` are indices of the loads."""

    job: Job
    settings: Settings
    directories: tuple[int, ...] = (0,)
    adam: bool = False

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
        if pattern == "mixed" and request.adam:
            cases.append(Case(Job(pattern), each, group, adam=True))
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


# ---- Adam beside the I/O ----


def adam_work() -> Callable[[], None]:
    """Return an update of `_ADAM` parameters by the CPU's Adam: bf16 gradients and compute parameters, fp32
    state, as in a step."""
    grad = torch.randn(_ADAM, generator=torch.Generator().manual_seed(0)).bfloat16()
    master, rule, steps = grad.float(), cpu_adam.Adam(0.9, 0.999, 1e-8), itertools.count(1)
    moments, copy = [master * 0.1, (master * 0.1).square()], torch.empty_like(grad)

    def update() -> None:
        step = next(steps)
        key = cpu_adam.rounding_key("", step)
        segment = cpu_adam.Segment(0, _ADAM, 0, key, step, 1e-3, 0.01, 1.0, False, rule)
        cpu_adam.update_segments(master, moments, grad, copy, (segment,))

    return update


@contextlib.contextmanager
def adam_beside(update: Callable[[], None]) -> Iterator[Callable[[], float]]:
    """Update on a thread for as long as a block lasts, as a step does beside its I/O; lend a function that
    returns the parameters updated per second so far."""
    stop, updates, seconds = threading.Event(), 0, 0.0

    def run() -> None:
        nonlocal updates, seconds
        start = time.perf_counter()
        while not stop.is_set():
            update()
            updates, seconds = updates + 1, time.perf_counter() - start

    with ThreadPoolExecutor(1, "infinity-bench-adam") as pool:
        running = pool.submit(run)
        try:
            yield lambda: updates * _ADAM / seconds if seconds else 0.0
        finally:
            stop.set()
    running.result()


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
    fio = find_fio() if request.fio else None
    if request.fio and fio is None:
        warnings.append("fio is not installed: there is nothing to compare with (Debian: apt install fio)")
    result: dict[str, Any] = {
        **{"benchmark": "io", "infinity": __version__, "directories": places},
        **{"file_bytes": nbytes, "seconds_per_pass": request.seconds, "fio": fio},
        **{"fill_bytes_per_second": [], "adam_alone_parameters_per_second": None},
        **{"cache": [], "cases": []},
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
            with load.ring(first) as ring:
                twice = read_twice(load, ring, first, job)
            warnings += cache_warning(twice, load.directory)
            result["cache"].append({"path": load.directory, **(twice or {})})
        work = adam_work() if any(case.adam for case in cases) else None
        if work is not None:
            alone = _ADAM / min(timeit.repeat(work, number=1, repeat=6))
            result["adam_alone_parameters_per_second"] = alone
            result["adam_threads"] = cpu_adam.threads()
        for number, case in enumerate(cases):
            what = f"{case.job.pattern}{' beside Adam' if case.adam else ''}"
            tell(f"{what}, {case.settings.backend} {sizes(case.settings)}", number, len(cases))
            measured, said = measure_case(case, loads, request, work)
            result["cases"].append(measured)
            warnings += said
        result["verified_bytes"] = sum(load.verified for load in loads)
    return {**result, "warnings": list(dict.fromkeys(warnings))}


def measure_case(
    case: Case, loads: Sequence[Load], request: Request, work: Callable[[], None] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a case as JSON has them, and warnings.

    Where there is one directory it is compared with fio, which runs as long as all passes together: "one
    file" is what fio is good at. `work`: the update of Adam that runs beside the I/O of cases with `adam`.
    """
    chosen = [loads[index] for index in case.directories]
    job, settings, seconds = case.job, case.settings, request.seconds
    fio, said = None, list[str]()
    if request.fio and find_fio() is not None and len(chosen) == 1 and not case.adam:
        fio, said = best_of_fio(chosen[0], settings, job, seconds * request.repeats)
    verified = sum(load.verified for load in chosen)
    with contextlib.ExitStack() as stack:
        pairs = [(load, stack.enter_context(load.ring(settings))) for load in chosen]
        rings = [ring for _, ring in pairs]
        adam = stack.enter_context(adam_beside(work)) if case.adam and work is not None else None
        run_pass(pairs, settings, job, min(0.2, seconds))
        tallies = [run_pass(pairs, settings, job, seconds) for _ in range(request.repeats)]
        histogram = np.sum([ring.stats().submit_histogram for ring in rings], axis=0).tolist()
        latencies = run_pass(pairs, settings, job._replace(single=True), min(0.4, seconds)).latencies
        updated = None if adam is None else adam()
        most = max(ring.stats().submit_max_seconds for ring in rings)
        for load, ring in pairs:
            load.verify(ring, settings, job, _SAMPLE // len(pairs))
        backends = sorted({ring.backend for ring in rings})
        reasons = sorted({ring.reason for ring in rings})
    rates = [tally.rate for tally in tallies]
    middle, moved = statistics.median(rates), sum(t.read + t.written for t in tallies)
    p50, p99, p999 = np.percentile(latencies, [50, 99, 99.9]).tolist()
    result = {
        **{"pattern": job.pattern, "adam_beside": case.adam},
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
        "adam_parameters_per_second": updated,
        "fio": None if fio is None else {**fio._asdict(), "percent": 100 * middle / fio.bytes_per_second},
    }
    return result, said


def read_twice(load: Load, ring: Ring, settings: Settings, job: Job) -> dict[str, Any] | None:
    """Read regions all over the file for the first time, and again at once.

    Returns:
        bytes per second of first and second readings (medians) and the median of their ratios, or
        None if the file is too small.
    """
    transfer = job.checking.transfer(settings)
    region = max(transfer, min(_REGION, load.mapping.nbytes) // transfer * transfer)
    count = min(_REGIONS, load.nbytes // region)
    if count < 3:
        return None
    rates = np.zeros((count, 2))
    for number, turn in np.ndindex(*rates.shape):
        offset = load.nbytes // count * number // transfer * transfer
        start = time.perf_counter()
        load.read(ring, range(offset, offset + region, transfer), transfer)
        rates[number, turn] = region / (time.perf_counter() - start)
    first, again = rates[1:].T  # the first region warms up
    found = {"first_bytes_per_second": first, "again_bytes_per_second": again, "ratio": again / first}
    return {name: float(np.median(values)) for name, values in found.items()}


def cache_warning(found: dict[str, Any] | None, directory: str) -> list[str]:
    """Return what to say about `read_twice`'s answer, if anything."""
    if found is None or found["ratio"] <= _FASTER:
        return []
    return [
        f"{directory}: what was read before comes back {found['ratio'] - 1:.0%} faster: a cache answers "
        "instead of the drive. Reads of a file larger than that cache (--size) will be slower than shown here"
    ]


# ---- the command ----


@click.command("io")
@directories_argument()
@click.option("--quick", is_flag=True, help="About five seconds, without fio.")
@click.option("--size", help="Of the file in each directory. Default: 1GiB (quick: 256MiB).")
@numbers_option("--block", "blocks", "Block sizes, such as 256KiB,1MiB. Default: the engine's.", size=True)
@numbers_option("--depth", "depths", "Queue depths, such as 8,32. Default: the engine's.")
@numbers_option("--threads", "threads", "Numbers of threads of the backend threads.")
@words_option("--backend", "backends", ("auto", *BACKENDS), "auto, libaio, syscall, uring, threads.")
@words_option("--pattern", "patterns", PATTERNS, "read, write, mixed. Default: all.")
@click.option("--seconds", type=click.FloatRange(0.01, 3600), help="Of one pass.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Passes of one case.")
@click.option("--fio/--no-fio", default=None, help="Compare with fio where it is installed.")
@click.option("--adam/--no-adam", default=True, help="Also the mixed case with CPU Adam running beside.")
@plot_option
@click.option("--need", type=click.FloatRange(0), help="GB/s that a run needs, as a line in the plot.")
@json_option
def io_command(
    quick: bool, size: str | None, plot: str | None, need: float | None, as_json: bool, **given: Any
) -> None:
    """Measure drives as the engine uses them, in a file of its own that is gone afterwards.

    Takes about a minute where fio is installed, half of that without it. Never fills a disk. Every
    figure is the median of several passes; "spread" is the distance of the extremes over it. Each of fio's
    engines runs as long as these passes together, and the fastest counts. Data that is read back is compared.
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
    peers = any(case["fio"] for case in cases)
    several = len({tuple(case["directories"]) for case in cases}) > 1
    hows = [_how(case, name=several) for case in cases]
    same = len(set(hows)) == 1
    names = ["what", *([] if same else ["how"]), "GB/s", "spread", "ms: p50, p99, p99.9", "CPU s/GB"]
    names += ["fio GB/s", "of fio", "fio CPU s/GB"] if peers else []
    table = table_of(*names, title=hows[0] if same else None, left=1 if same else 2)
    for case, how in zip(cases, hows, strict=True):
        row = [f"{case['pattern']}{' + Adam' if case['adam_beside'] else ''}", *([] if same else [how])]
        row += [gigabytes(case["bytes_per_second"]), f"{case['spread']:.0%}"]
        row.append("  ".join(f"{case['latency_seconds'][p] * 1e3:.2f}" for p in ("p50", "p99", "p99.9")))
        row.append(f"{case['cpu_seconds_per_gb']:.3f}")
        if (fio := case["fio"]) is not None:
            row.append(f"{gigabytes(fio['bytes_per_second'])} {fio['engine']}")
            row += [f"{fio['percent']:.0f} %", f"{fio['cpu_seconds_per_gb']:.3f}"]
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
    if rates := [rate / 1e6 for case in cases if (rate := case["adam_parameters_per_second"])]:
        between = " to ".join(f"{rate:,.0f}" for rate in sorted({min(rates), max(rates)}))
        alone = result["adam_alone_parameters_per_second"] / 1e6
        console.print(f"CPU Adam updated {between} Mparam/s beside the I/O, {alone:,.0f} alone.")
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
