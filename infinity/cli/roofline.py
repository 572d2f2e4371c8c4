"""Where the time of a step went, and what bounds it: pure functions over a trace.

The roofline of a step is its largest resource: the time that compute, drives, link or the CPU's Adam
need for their share of it. A resource's bandwidth is its bytes by the time in which it was busy; for
drives that `infinity tune` has measured, what that found, where it is more. The efficiency is the
largest need by the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from infinity.core.errors import DataError
from infinity.core.sizes import format_size
from infinity.core.spans import CAUSES

Interval = tuple[int, int]  # ns since the trace began

#: part of a chunk → the setting that places it
SETTING: Final = {"copy": "parameters", "state": "optimizer_state", "gradient": "gradients"}
#: From this efficiency on a step is bound by its largest resource; below it, by waiting.
_BOUND: Final = 0.75
#: Below this part of the other's time, reads or writes matter little.
_LITTLE: Final = 0.5
#: More than any byte, second or count of a trace comes to.
_MOST: Final = 1e18
#: What each wrong value of a file that is not quite a trace makes of the arithmetic here.
_DAMAGE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
#: A resource that bounds a step → what the sentence calls it, and what would relieve it; drives: `_place`.
_RELIEF: Final = {
    "compute": ("compute", "a faster device or less work per step would help, no placement will"),
    "CPU update": ("the CPU's Adam", "more cores (`threads`) or faster memory would help"),
    "checksums": ("checksums", "more cores or faster memory would help"),
    "link h2d": (
        "the link to the device",
        'a larger share of `parameters` on "device", or more tokens per step, would help',
    ),
    "link d2h": ("the link from the device", "more tokens per step would help"),
}
#: Where the user's thread waits, a name in ``where`` → what the sentence calls it, and what gives it back.
_WAITING: Final = {
    "stall: h2d": ("of stalls for copies to the device", "more `device_memory` would copy further ahead"),
    "stall: nvme": (
        "of stalls for the drives",
        "more `device_memory` and `host_memory` would read further ahead",
    ),
    "stall: update": (
        "of stalls for the update",
        "more `host_memory` would begin the update earlier",
    ),
    "stall: reduce": (
        "of stalls for gradients on their way",
        '`gradients="host"` where they are on NVMe, or fewer and larger units, would help',
    ),
    "step()": ("in `step()` itself", "fewer and larger chunks (`chunk_elements`) and units would help"),
    "outside": ("outside of the model", "look at what loads data, logs, or runs between the steps"),
}


class Span(NamedTuple):
    """One complete event of a trace."""

    kind: str
    begin: int
    end: int
    nbytes: int
    args: Mapping[str, Any]


class Resource(NamedTuple):
    """What one resource did in the steps of a trace. Seconds are those of all steps."""

    name: str
    nbytes: int
    busy: float  # seconds in which it worked
    need: float  # seconds at its bandwidth
    tuned: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes per second while it works; 0 for compute."""
        return self.nbytes / self.need if self.need else 0.0


# -- intervals ------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times in order, without overlaps."""
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return what is in both; `a` and `b` are unions."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return what is in `a` and not in `b`; both are unions."""
    if not a:
        return []
    edges = [a[0][0], *(edge for interval in b for edge in interval), a[-1][1]]
    gaps = [(x, y) for x, y in zip(edges[::2], edges[1::2], strict=True) if x < y]
    return common(a, gaps)


def seconds(intervals: Iterable[Interval]) -> float:
    """Return their length; they do not overlap."""
    return sum(end - begin for begin, end in intervals) * 1e-9


# -- the file -------------------------------------------------------------------------------


def spans_of(content: Mapping[str, Any]) -> list[Span]:
    """Return the complete events of a trace, in ns."""
    spans = []
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            args = event.get("args", {})
            start, length, nbytes = event["ts"], event["dur"], args.get("bytes", 0)
            if not all(0 <= value <= _MOST for value in (start, length, nbytes)):
                raise ValueError(f"the event {event}")
            begin = round(start * 1000)
            spans.append(Span(event["cat"], begin, begin + round(length * 1000), nbytes, args))
    return spans


def window_of(content: Mapping[str, Any], spans: Sequence[Span]) -> tuple[Interval, int]:
    """Return the time of the whole steps in a trace, and their number. A step lasts from the end of a
    `step()` to the end of the next; where there is one only, from the beginning of the trace.

    Raises:
        DataError: there is no whole step.
    """
    limit = content["otherData"].get("limit_reached_ns")
    ends = sorted(s.end for s in spans if s.kind == "step" and (limit is None or s.end <= limit))
    if not ends or ends[-1] <= (ends[0] if len(ends) > 1 else 0):
        raise DataError(
            "the trace has no whole step",
            expected="at least one `optimizer.step()` inside it",
            found="none" if limit is None else "none before it was full",
            cure="trace two steps or more",
        )
    return ((0, ends[0]), 1) if len(ends) == 1 else ((ends[0], ends[-1]), len(ends) - 1)


# -- the analysis ---------------------------------------------------------------------------


def analyse(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trace says of a step (means over its whole steps), as values that JSON has.

    Seconds, bytes and bytes per second. ``where`` adds up to ``step_seconds``.

    Raises:
        DataError: the trace has no whole step, or is damaged.
    """
    try:
        result = _analysis(content)
        json.dumps(result, allow_nan=False)
    except DataError:  # no whole step
        raise
    except _DAMAGE as error:
        raise DataError(
            "the trace is damaged",
            expected="the file as `infinity train --trace` or `infinity.trace` wrote it",
            found=f"{type(error).__name__}: {error}"[:200],
            cure="record it again: infinity train --trace t.json",
        ) from error
    return result


def _analysis(content: Mapping[str, Any]) -> dict[str, Any]:
    about, every = content["otherData"], spans_of(content)
    (first, last), steps = window_of(content, every)
    # A span that lies in the window in part counts in part, with its share of the bytes.
    spans = []
    for span in every:
        begin, end = max(span.begin, first), min(span.end, last)
        if begin < end:
            share = (end - begin) / (span.end - span.begin)
            spans.append(span._replace(begin=begin, end=end, nbytes=round(span.nbytes * share)))
    step = (last - first) * 1e-9 / steps
    where = _where(spans, (first, last))
    resources = _resources(spans, about)
    bound = _bound(resources)
    cost = {name: float(about["cost"][name]) for name in ("ns_per_span", "spans_per_step", "ns_per_step")}
    efficiency = min(1.0, bound.need / steps / step) if bound is not None else 0.0
    result = {
        "steps": steps,
        "step_seconds": step,
        "where": {name: value / steps for name, value in where.items()},
        "phases": _phases(spans, steps),
        "resources": [
            {
                "name": r.name,
                "bytes": round(r.nbytes / steps),
                "bandwidth": r.bandwidth,
                "bandwidth_from": "tune" if r.tuned else "trace",
                "seconds": r.need / steps,
                "busy_seconds": r.busy / steps,
                "share": r.need / steps / step,
            }
            for r in resources
        ],
        "efficiency": efficiency,
        "bound_by": bound.name if bound is not None else None,
        "units": _units(spans, steps),
        "cost": {**cost, "share": cost["ns_per_step"] * 1e-9 / step},
        "dropped_spans": int(about["dropped_spans"]),
    }
    result["sentence"] = _sentence(result, resources, bound, spans, about)
    return result


def _where(spans: Sequence[Span], window: Interval) -> dict[str, float]:
    """Return seconds of the user's thread: a partition of the window."""
    device = any(s.kind == "device compute" for s in spans)
    kind = "device compute" if device else "compute"
    taken = union((s.begin, s.end) for s in spans if s.kind == kind)
    where = {"compute": seconds(taken)}
    for cause in CAUSES:
        found = union(
            (s.begin, s.end)
            for s in spans
            if s.kind in ("stall", "device stall") and s.args["cause"] == cause
        )
        where[f"stall: {cause}"] = seconds(without(found, taken))
        taken = union([*taken, *found])
    own = union((s.begin, s.end) for s in spans if s.kind == "step")
    where["step()"] = seconds(without(own, taken))
    where["outside"] = seconds(without([window], union([*taken, *own])))
    return where


def _phases(spans: Sequence[Span], steps: int) -> dict[str, float]:
    phases: dict[str, float] = {}
    device = any(s.kind == "device compute" for s in spans)
    for span in spans:
        if span.kind == ("device compute" if device else "compute"):
            phase = span.args["phase"]
            phases[phase] = phases.get(phase, 0.0) + (span.end - span.begin) * 1e-9 / steps
    return phases


def _units(spans: Sequence[Span], steps: int) -> dict[str, dict[str, float]]:
    """Return seconds per step by unit and kind. Reads and writes that overlap count each."""
    units: dict[str, dict[str, float]] = {}
    for span in spans:
        if "unit" in span.args:
            kinds = units.setdefault(span.args["unit"], {})
            kinds[span.kind] = kinds.get(span.kind, 0.0) + (span.end - span.begin) * 1e-9 / steps
    return units


def _resources(spans: Sequence[Span], about: Mapping[str, Any]) -> list[Resource]:
    """Return the resources that had work."""

    def resource(name: str, *kinds: str, counted: Sequence[str] | None = None) -> Resource:
        busy = seconds(union((s.begin, s.end) for s in spans if s.kind in kinds))
        nbytes = sum(s.nbytes for s in spans if s.kind in (kinds if counted is None else counted))
        return Resource(name, nbytes, busy, busy)

    device = any(s.kind == "device compute" for s in spans)
    work = "CPU update" if any(s.kind == "update" for s in spans) else "checksums"
    found = [
        resource("compute", "device compute" if device else "compute"),
        _drives("NVMe reads", spans, ("read",), about),
        _drives("NVMe writes", spans, ("write",), about),
        _drives("NVMe reads and writes", spans, ("read", "write"), about),
        resource("link h2d", "h2d"),
        resource("link d2h", "d2h"),
        resource(work, "update", "crc", counted=["update"]),
    ]
    return [r for r in found if r.need]


def _drives(name: str, spans: Sequence[Span], kinds: Sequence[str], about: Mapping[str, Any]) -> Resource:
    """Return what the drives did; that of several which needs longest decides."""
    tuned = about.get("tuned_bytes_per_second")
    mine = [s for s in spans if s.kind in kinds]
    need, measured = 0.0, False
    for directory in {s.args["directory"] for s in mine}:
        here = [s for s in mine if s.args["directory"] == directory]
        alone = seconds(union((s.begin, s.end) for s in here))
        known = sum(s.nbytes for s in here) / tuned[directory] if tuned else math.inf
        if min(alone, known) > need:
            need, measured = min(alone, known), known < alone
    busy = seconds(union((s.begin, s.end) for s in mine))
    return Resource(name, sum(s.nbytes for s in mine), busy, need, measured)


def _bound(resources: Sequence[Resource]) -> Resource | None:
    """Return the resource that needs longest. Of the drives' work the reads alone, or the writes alone,
    where the others matter little."""
    by_name = {r.name: r for r in resources}
    bound = max(resources, key=lambda r: r.need, default=None)
    if bound is None or not bound.name.startswith("NVMe"):
        return bound
    both = by_name["NVMe reads and writes"]
    mine, other = sorted(
        (by_name.get(name, Resource(name, 0, 0.0, 0.0)) for name in ("NVMe writes", "NVMe reads")),
        key=lambda r: -r.need,
    )
    return mine if other.need < _LITTLE * mine.need and both.need * _BOUND < mine.need else both


# -- in words -------------------------------------------------------------------------------


def _sentence(
    result: Mapping[str, Any],
    resources: Sequence[Resource],
    bound: Resource | None,
    spans: Sequence[Span],
    about: Mapping[str, Any],
) -> str:
    """Return what a person decides by: what bounds the step, how nearly, and what to change."""
    if bound is None:
        return "nothing was recorded"
    step, steps = result["step_seconds"], result["steps"]
    rate = (
        f"{_time(bound.need / steps)} of {_time(step)}"
        if bound.name == "compute"
        else f"{bound.nbytes / steps / step / 1e9:.2f} of {bound.bandwidth / 1e9:.2f} GB/s"
    )
    name, advice = _RELIEF.get(bound.name, (bound.name, ""))
    if result["efficiency"] >= _BOUND:
        if _is_drive(bound):
            others = max((r.need for r in resources if not _is_drive(r)), default=0.0)
            advice = _place(bound.need, others, spans, about)
        elif bound.name == "CPU update" and about["device"] != "cpu":
            advice += ', or `optimizer_state={"device": …}`'
        return f"bound by {name}: {rate}; {advice}"
    idle = {where: time for where, time in result["where"].items() if where != "compute"}
    most = max(idle, key=lambda where: idle[where])
    lost, cure = _WAITING[most]
    if most == "stall: update" and about["update"] == "sync":
        cure = '`update="overlap"` would hide the update behind the next forward'
    return f"bound by waiting: {name}, the busiest, at {rate}; {_time(idle[most])} {lost}; {cure}"


def _is_drive(resource: Resource) -> bool:
    return resource.name.startswith("NVMe")


def _time(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def _place(need: float, others: float, spans: Sequence[Span], about: Mapping[str, Any]) -> str:
    """Return which share of what moves most should stay on the host, so that the drives need no longer
    than what needs longest after them."""
    traffic: dict[str, int] = {}
    for span in spans:
        if span.kind in ("read", "write"):
            name = SETTING[span.args["part"]]
            traffic[name] = traffic.get(name, 0) + span.nbytes
    setting = max(traffic, key=lambda name: traffic[name])
    shares = about["placements"][setting]
    less = min(1.0, (need - others) / need * sum(traffic.values()) / max(traffic[setting], 1))
    moved = math.ceil(round(less * shares["nvme"] * 10, 6)) / 10  # tenths, so that one can type it
    moved = min(moved, shares["nvme"])
    purpose = setting.replace("_", " ")  # and, with delayed updates, "parameters being updated"
    here = sum(nbytes for name, nbytes in about["bytes"]["nvme"].items() if name.startswith(purpose))
    room = about["host_memory"] - sum(about["bytes"]["host"].values())
    wanted = here * moved / shares["nvme"]
    new = {**shares, "host": shares.get("host", 0.0) + moved, "nvme": shares["nvme"] - moved}
    placement = ", ".join(f'"{tier}": {share:.3g}' for tier, share in sorted(new.items()) if share > 1e-9)
    text = f"more drives or `{setting}={{{placement}}}` would help"
    return text if wanted <= room else f"{text} (that takes {format_size(wanted - room)} more `host_memory`)"
