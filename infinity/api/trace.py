"""`trace`: records the engine's work with its times, in a file for Perfetto.

The file is in Chrome's trace format (JSON; load it at ui.perfetto.dev). Each kind of work is a track.
If several pieces of a kind run at once, they are in several lanes of the track.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import os
import stat
import warnings
from collections.abc import Iterator
from typing import Any, Final, TextIO

from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.paths import local_path
from infinity.core.spans import LIMIT, Recording, Span, Time
from infinity.version import __version__

from .engine import Engine, engine_of

#: kind → its track; in the order in which they are shown.
TRACKS: Final = {
    **dict.fromkeys(("step", "launch", "compute", "stall"), "user's thread"),
    **dict.fromkeys(("device compute", "device stall"), "device"),
    "unshard": "unshard",
    "h2d": "h2d",
    "d2h": "d2h",
    "reduce": "reduce",
    "update": "update",
    "crc": "crc of what was read",
    "read": "read",
    "write": "write",
}
_NAMES: Final = tuple(dict.fromkeys(TRACKS.values()))
#: What the detail of a span is called; elsewhere it is a chunk's part.
_DETAIL: Final = {
    **dict.fromkeys(("compute", "device compute", "launch"), "phase"),
    **dict.fromkeys(("stall", "device stall"), "cause"),
}
_LANES: Final = 1000  # room for lanes between two tracks' numbers
_BEGINNING: Final = '{"displayTimeUnit": "ms",\n"otherData": '


@contextlib.contextmanager
def trace(thing: object, path: str | os.PathLike[str], *, limit: int = LIMIT) -> Iterator[None]:
    """Record what the engine does inside the block, and write it to `path` at the end of the block.

    The block may contain any number of steps. Only complete steps count: from the end of one `step()` to the
    end of the next. `trace` also writes the file if the block raises.

    Args:
        thing: a wrapped model, its optimizer, or one of its parameters.
        path: the file; JSON in Chrome's trace format. `trace` replaces an earlier trace, and never any other
            file. It follows a symbolic link.
        limit: the largest number of spans that the trace keeps (250 bytes of memory each). The trace counts
            the spans that it drops: the file and a warning name the number.

    Raises:
        WrapError: `thing` belongs to no wrapped model.
        ConfigError: a trace of this engine is on already, or `limit` is not positive.
        DirectoryError: the file is not writable, exists and is not a trace, or is a dangling link. `trace`
            raises this at the beginning (before it records), or at the end (it leaves no partial file, and an
            earlier trace stays as it was). If the block raised, a warning says so instead.
    """
    engine = engine_of(thing)
    engine.phases.check()
    if engine.recorder.log is not None:
        raise ConfigError(
            "a trace of this model is being recorded already",
            expected="one trace at a time",
            found="a `with infinity.trace(...)` inside another",
            cure="end the first one before the next begins",
        )
    if limit < 1:
        raise ConfigError(
            "the trace has no room for a span",
            expected="limit of 1 or more",
            found=limit,
            cure="leave limit out",
        )
    path = local_path(os.fspath(path), "the trace", "trace.json")
    if os.path.isdir(path):
        raise _unwritable(path, IsADirectoryError(errno.EISDIR, path))
    _check_replaceable(path)
    target = os.path.realpath(path)  # a link stays one
    temporary = f"{target}.{os.getpid()}.part"
    whole = False
    with contextlib.ExitStack() as stack:
        try:
            file = open(temporary, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise _unwritable(path, error) from error
        stack.callback(_forget, file, temporary)
        log = Recording(engine.device.start_clock(), limit)
        try:
            with engine.recorder.recording(log):
                yield
            whole = True
        finally:
            try:
                _write(file, log, engine)
                file.close()
                os.replace(temporary, target)
            except OSError as error:
                if whole:
                    raise _unwritable(path, error) from error
                # What the block raised says more, and an interrupt stays one.
                warnings.warn(str(_unwritable(path, error)), RuntimeWarning, stacklevel=3)
    if log.dropped:
        warnings.warn(
            f"the trace {path!r} is full: {log.dropped} spans after the first {limit} are not in it. "
            "Trace fewer steps.",
            RuntimeWarning,
            stacklevel=3,
        )


def _check_replaceable(path: str) -> None:
    """Raise `DirectoryError` if something is there that is no trace: nothing of the user's is replaced."""
    try:
        found = "what is no file" if not stat.S_ISREG(os.stat(path).st_mode) else None
        if found is None:
            with open(path, "rb") as file:
                head = file.read(len(_BEGINNING.encode()))
            found = "a file that is no trace" if head not in (b"", _BEGINNING.encode()) else None
    except FileNotFoundError:
        if not os.path.islink(path):
            return
        found = f"a link to {os.path.realpath(path)!r}, which does not exist"
    except OSError as error:
        raise _unwritable(path, error) from error
    if found is not None:
        raise DirectoryError(
            f"the trace {path!r} cannot be written",
            errno=errno.EEXIST,
            path=path,
            expected="a new file, or a trace of before",
            found=found,
            cure="name another file"
            + (", or remove it" if os.path.islink(path) or os.path.isfile(path) else ""),
        )


def _forget(file: TextIO, temporary: str) -> None:
    with contextlib.suppress(OSError):  # it is closed, or its error was told
        file.close()
    with contextlib.suppress(FileNotFoundError):  # it has its name, as a rule
        os.unlink(temporary)


def _unwritable(path: str, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"the trace {path!r} cannot be written",
        errno=error.errno,
        path=path,
        expected="a file in a directory that exists and has room",
        found=os.strerror(error.errno or 0),
        cure="name another file",
    )


def _write(file: TextIO, log: Recording, engine: Engine) -> None:
    units = [unit.layout.name for unit in engine.units]
    unit_of = {chunk.id: unit.index for unit in engine.units for chunk in unit.layout.chunks}
    file.write(_BEGINNING)
    file.write(json.dumps(_about(log, engine)))
    file.write(',\n"traceEvents": [\n')
    file.write(json.dumps({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "infinity"}}))
    tids = set()
    for event in _events(log, units, unit_of):  # one at a time: they are larger than what they tell
        tids.add(event["tid"])
        file.write(",\n" + json.dumps(event))
    for tid in sorted(tids):
        name = _NAMES[tid // _LANES - 1] + (f" {tid % _LANES + 1}" if tid % _LANES else "")
        for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
            file.write(",\n" + json.dumps({"name": key, "ph": "M", "pid": 1, "tid": tid, "args": value}))
    file.write("\n]}\n")


def _about(log: Recording, engine: Engine) -> dict[str, Any]:
    """Return what a reader needs beside the spans. Bytes; times in ns."""
    config = engine.config
    return {
        "infinity": __version__,
        "device": str(engine.device.torch_device),
        "update": config.update,
        "units": [unit.layout.name for unit in engine.units],
        "parameters": sum(p.spec.numel for p in engine.params.values()),
        "placements": {
            name: {tier.value: share for tier, share in shares.items()}
            for name, shares in config.placements.items()
        },
        # As transfers number them, which need no arena where nothing of ours is on NVMe.
        "nvme": [s.path for s in engine.store.stats()] or [*config.directories],
        "spans": len(log.spans),
        "dropped_spans": log.dropped,
        "duration_ns": log.ended - log.began,
    }


def _events(log: Recording, units: list[str], unit_of: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the events of Chrome's format, by time of beginning. Times are µs since the trace began."""
    spans = list(log.spans)
    rows = [(_ns(span[5]) - log.began, _ns(span[6]) - log.began, i) for i, span in enumerate(spans)]
    rows += [(begin - log.began, end - log.began, ~i) for i, (begin, end) in enumerate(log.steps)]
    # Of two that begin together the longer is around the other.
    rows.sort(key=lambda row: (row[0], -row[1]))
    lanes: dict[str, list[tuple[int, int]]] = {}
    for begin, end, index in rows:
        if end <= 0:
            continue  # over before the trace began
        if index >= 0:
            kind, name, args = _reported(spans[index], units, unit_of)
        else:
            kind, name, args = "step", "step()", {"step": ~index + 1}
        track = TRACKS[kind]
        lane = 0 if track in _NAMES[:2] else _lane(lanes.setdefault(track, []), begin, end)
        begin = max(0, begin)
        where = {"pid": 1, "tid": (1 + _NAMES.index(track)) * _LANES + lane}
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        yield {"name": name, "cat": kind, "ph": "X", **times, **where, "args": args}
        if kind == "step":
            mark = {"name": f"end of step {args['step']}", "cat": "mark", "ph": "i", "s": "g"}
            yield {**mark, "ts": end / 1000, **where}


def _ns(time: Time) -> int:
    return time if isinstance(time, int) else time.ns()


def _reported(span: Span, units: list[str], unit_of: dict[int, int]) -> tuple[str, str, dict[str, Any]]:
    """Return the kind, the name and the arguments of a span's event."""
    kind, detail, unit, chunk, directory, begin, _, nbytes = span
    if kind == "compute" and not isinstance(begin, int):
        kind = "device compute"
    unit = unit_of.get(chunk, unit)
    args: dict[str, Any] = {"unit": units[unit]} if unit >= 0 else {}
    if detail:
        args[_DETAIL.get(kind, "part")] = detail
    if chunk >= 0:
        args["chunk"] = chunk
    if directory >= 0:
        args["directory"] = directory
    if nbytes:
        args["bytes"] = nbytes
    return kind, " ".join(filter(None, (kind, detail, args.get("unit")))), args


def _lane(ends: list[tuple[int, int]], begin: int, end: int) -> int:
    """Return a lane whose last span is over at `begin`; `ends` is a heap of (end, lane)."""
    if ends and ends[0][0] <= begin:
        lane = ends[0][1]
        heapq.heapreplace(ends, (end, lane))
        return lane
    heapq.heappush(ends, (end, len(ends)))
    return len(ends) - 1
