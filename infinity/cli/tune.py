"""`infinity tune`: the smallest settings that are as good as the best, for each drive.

What is measured is what a step needs: reads (of copies) and the mixed traffic of the update, in equal
time; the score is the harmonic mean of their bandwidths. First a backend is chosen at one size, then
blocks and depths by rounds that each halve the field, all candidates of a round in turn so that a slow
moment meets all. Then the best meets itself (what differs there is noise) and, in pairs, each smaller
candidate, the smallest first; the first that is as good within the noise is taken. Small settings
hold fewer bytes in flight, so what is urgent waits less.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from infinity.api.this_machine import check_directory
from infinity.cli.bench import io
from infinity.cli.bench.io_load import Job, Load, Settings, run_pass
from infinity.cli.console import Tell, finish, gigabytes, progress, sizes, wide_console
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import KiB, MiB, format_size
from infinity.hardware.aio import BACKENDS, available_backends
from infinity.hardware.tuned import VERSION, TunedSettings, drive_key, entries, parse, settings_file
from infinity.planning.cures import as_settings

_BLOCKS: Final = (256 * KiB, 512 * KiB, MiB, 2 * MiB, 4 * MiB)
_DEPTHS: Final = (4, 8, 16, 32, 64)
_THREADS: Final = (2, 4, 8)
_SIZE: Final = 1024 * MiB  # of the file; a quarter for a short run
_JOBS: Final = (Job("read"), Job("mixed"))
_START: Final = (MiB, 32)
#: Least and most that two equal settings are taken to differ by.
_NOISE: Final = (0.01, 0.10)
_WORTH: Final = 0.85  # of the best score in the search: less is not tried again


def smallness(settings: Settings) -> tuple[int, int, int, int]:
    """Return what is compared to say which settings are smaller: bytes in flight, then requests, then
    threads, then the backend's place in the engine's own order."""
    threads = settings.threads if settings.backend == "threads" else 0
    flight = settings.block_bytes * settings.queue_depth
    return flight, settings.queue_depth, threads, BACKENDS.index(settings.backend)


class Tuner:
    """Measures candidates on one directory."""

    def __init__(self, load: Load, seconds: float) -> None:
        self._load = load
        self._start = time.monotonic()
        self._budget = seconds
        self.scores: dict[Settings, list[float]] = {}

    @property
    def spent(self) -> float:
        """The part of the time that is gone."""
        return (time.monotonic() - self._start) / self._budget

    def fits(self, settings: Settings) -> bool:
        """Whether the file and the buffers are large enough for these settings."""
        most = max(job.window(settings) for job in _JOBS)
        return most <= self._load.mapping.nbytes and 2 * most <= self._load.nbytes

    def score(self, settings: Settings, seconds: float) -> float:
        """Measure once; return the score in bytes per second."""
        with self._load.ring(settings) as ring:
            rates = [
                run_pass([(self._load, ring)], settings, job, seconds / len(_JOBS)).rate for job in _JOBS
            ]
            self._load.verify(ring, settings, _JOBS[0], 8 * MiB)
        score = len(rates) / sum(1 / rate for rate in rates)
        self.scores.setdefault(settings, []).append(score)
        return score

    def middle(self, settings: Settings) -> float:
        """The median of the scores so far."""
        return statistics.median(self.scores[settings])

    def race(self, field: Sequence[Settings], seconds: float) -> list[Settings]:
        """Measure all of `field` once in a random order; return them, the best first."""
        for settings in random.sample(field, len(field)):
            self.score(settings, seconds)
        return sorted(field, key=self.middle, reverse=True)

    def pairs(self, one: Settings, other: Settings, count: int, seconds: float) -> list[float]:
        """Return score(one) / score(other) of `count` pairs, in alternating order."""
        ratios = []
        for number in range(count):
            turns = [one, other][:: -1 if number % 2 else 1]
            scores = [self.score(settings, seconds) for settings in turns]
            ratios.append(scores[number % 2] / scores[1 - number % 2])
        return ratios


def rivals(tuner: Tuner, best: Settings, worth: float) -> list[Settings]:
    """Return what is smaller than `best` and scored at least `worth` of it, the smallest first: of those
    with as many bytes in flight only the one that scored best."""
    smaller = [s for s in tuner.scores if smallness(s) < smallness(best)]
    by_flight: dict[int, Settings] = {}
    for settings in sorted(smaller, key=tuner.middle):
        by_flight[smallness(settings)[0]] = settings
    kept = [s for s in by_flight.values() if tuner.middle(s) >= worth * tuner.middle(best)]
    return sorted(kept, key=smallness)


def find(
    tuner: Tuner, backends: Sequence[str], tell: Tell, seconds: float
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings, and how they were found (rates in bytes per second).

    Args:
        seconds: of one measurement in the search.
    """
    tell("which backend", tuner.spent, 1)
    tries = [
        Settings(b, *_START, threads=t) for b in backends for t in (_THREADS if b == "threads" else (4,))
    ]
    tries = [settings for settings in tries if tuner.fits(settings)]
    for _ in range(2):
        tries = tuner.race(tries, seconds)
    kept = [settings for settings in tries if tuner.middle(settings) >= _WORTH * tuner.middle(tries[0])][:2]
    field = [s._replace(block_bytes=b, queue_depth=d) for s in kept for b in _BLOCKS for d in _DEPTHS]
    field = [settings for settings in field if tuner.fits(settings)]
    while len(field) > 3 and tuner.spent < 0.45:
        tell(f"{len(field)} candidates", tuner.spent, 1)
        ranked = tuner.race(field, seconds)
        field = [s for s in ranked if tuner.middle(s) >= _WORTH * tuner.middle(ranked[0])]
        field = field[: max(3, (len(ranked) + 1) // 2)]
        seconds *= 1.5
    measured = [settings for settings in tuner.scores if len(tuner.scores[settings]) > 1]
    best = max(measured or tuner.scores, key=tuner.middle)

    tell("how much the best differs from itself", tuner.spent, 1)
    own = tuner.pairs(best, best, 5, seconds)
    noise = min(max(statistics.median(abs(ratio - 1) for ratio in own), _NOISE[0]), _NOISE[1])
    chosen, ratio = best, 1.0
    for settings in rivals(tuner, best, 1 - 2 * noise):
        if tuner.spent > 1:
            break
        tell(f"{settings.backend} {sizes(settings)} against the best", tuner.spent, 1)
        ratios = tuner.pairs(settings, best, 1, seconds)
        if ratios[0] < 1 - 3 * noise:
            continue
        ratios += tuner.pairs(settings, best, 4, seconds)
        if statistics.median(ratios) >= 1 - noise:
            chosen, ratio = settings, statistics.median(ratios)
            break
    return chosen, {
        "score_bytes_per_second": tuner.middle(chosen),
        "best": best._asdict(),
        "best_bytes_per_second": tuner.middle(best),
        "of_best": ratio,
        "noise": noise,
        "candidates": len(tuner.scores),
    }


def tune(directory: str, seconds: float, tell: Tell) -> tuple[Settings, dict[str, Any]]:
    """Find the settings for one directory in about `seconds`."""
    check_directory(directory)
    backends = [name for name, verdict in available_backends(directory).items() if verdict == "ok"]
    if "libaio" in backends and "syscall" in backends:
        backends.remove("syscall")  # the same calls
    window = max(job.window(Settings("auto", *_START)) for job in _JOBS)
    wanted = [job.window(Settings("auto", b, d)) for job in _JOBS for b in _BLOCKS for d in _DEPTHS]
    nbytes = min(io.choose_size(io.Request((directory,)), ()), _SIZE if seconds >= 20 else _SIZE // 4)
    if nbytes < 2 * window:
        raise ConfigError(
            f"{directory} has not the room to tune for",
            expected=f"{format_size(2 * window)} for the time that it takes, and a reserve",
            found=f"{format_size(nbytes)} usable",
            cure="free space there, or give runs --block-bytes and --queue-depth",
        )
    window = max([window, *(each for each in wanted if each <= nbytes // 2)])
    with Load(directory, nbytes, grain=min(_BLOCKS), window=window) as load:
        tell(f"writes {format_size(nbytes)} to {directory}")
        load.fill(Settings(backends[0], *_START))
        return find(Tuner(load, seconds), backends, tell, min(0.3, seconds / 150))


def remember(path: str, settings: TunedSettings, measured: Mapping[str, Any]) -> Path:
    """Keep `settings` for the drive below `path`, with the figures behind them; return the file.

    Raises:
        DirectoryError: the file cannot be written.
    """
    file = settings_file()
    temporary = None
    try:
        devices = {key: entry for key, entry in entries().items() if parse(entry) is not None}
        devices[drive_key(path)] = {
            **settings._asdict(),
            "measured": dict(measured),
            "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=".tuned-", dir=file.parent)
        with open(fd, "w", encoding="utf-8") as out:
            json.dump({"version": VERSION, "drives": devices}, out, indent=1)
            out.write("\n")
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise DirectoryError(
            "cannot write the settings file",
            errno=error.errno,
            path=str(file),
            expected="a file that this user may write",
            found=os.strerror(error.errno or 0),
            cure="set XDG_CONFIG_HOME to a writable directory, or use --no-store and the Config that is "
            "printed",
        ) from error
    return file


def as_config(found: Sequence[tuple[str, Settings]]) -> str:
    """Return the `Config` of a run on these directories. It has one set of sizes for all of them: the largest
    that one of them needs."""
    backends = {settings.backend for _, settings in found}
    settings = {
        "nvme": [directory for directory, _ in found],
        "block_bytes": max(settings.block_bytes for _, settings in found),
        "queue_depth": max(settings.queue_depth for _, settings in found),
        "aio_backend": backends.pop() if len(backends) == 1 else "auto",
    }
    return f"infinity.Config({as_settings(settings)})"


def tune_command(directories: tuple[str, ...], seconds: float, store: bool, as_json: bool) -> int:
    """Tune as the parameters of the command say; return the exit code."""
    for directory in directories:
        check_directory(directory)
    found, rows, kept, lost = [], [], None, None
    with progress() as tell:
        for directory in directories:
            settings, measured = tune(directory, seconds / len(directories), tell)
            found.append((directory, settings))
            rows.append({"path": directory, **settings._asdict(), "measured": measured})
            if store:
                try:
                    kept = remember(directory, TunedSettings(**settings._asdict()), measured)
                except DirectoryError as error:
                    lost = error
    stored = None if kept is None or lost else str(kept)
    result = {"tuned": rows, "config": as_config(found), "stored": stored}
    code = finish(result, show, as_json=as_json, failed=bool(lost))
    if lost is not None:
        click.echo(f"error: {lost}", err=True)
    return code


def show(result: Mapping[str, Any]) -> None:
    """Print the result for a person."""
    console = wide_console()
    for row in result["tuned"]:
        measured = row["measured"]
        settings = Settings(*(row[name] for name in Settings._fields))
        threads = f" with {settings.threads} threads" if settings.backend == "threads" else ""
        console.print(
            f"{row['path']}: {settings.backend}{threads}, {sizes(settings)}: "
            f"{gigabytes(measured['score_bytes_per_second'])} GB/s, "
            f"{measured['of_best']:.0%} of the best rate in the search of {measured['candidates']} "
            f"(equal settings differ by {measured['noise']:.1%} here)",
            markup=False,
        )
    if result["stored"] is not None:
        console.print(f"kept in {result['stored']}; aio_backend: auto uses it", markup=False)
    console.print(result["config"], markup=False, soft_wrap=True)
