"""Why the GPU had nothing to do: gaps of its compute stream, and what the program waited for meanwhile."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

#: A piece of time, by our clock, and what it is.
Span = tuple[float, float, str]

#: What the engine's trace calls a wait, in words.
_CAUSES: Final = {
    "h2d": "the host waits for copies to the GPU",
    "nvme": "the host waits for drives",
    "update": "the host waits for the update",
    "reduce": "the host waits for gradients on their way",
}


class Waits:
    """What a peer waits for, as it says itself."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Note the time that the block takes as a wait."""
        begin = time.monotonic()
        yield
        self.spans.append((begin, time.monotonic(), f"the host waits for {cause}"))


def waits_of_engine(path: Path, step_end: float) -> list[Span]:
    """Return what the user's thread waited for, from a file of `infinity.trace`. `step_end`: when the last
    `step()` returned, by our clock: the file counts from the beginning of the trace."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    steps = [e for e in events if e.get("cat") == "step"]
    zero = step_end - max(e["ts"] + e["dur"] for e in steps) * 1e-6
    return [
        (zero + e["ts"] * 1e-6, zero + (e["ts"] + e["dur"]) * 1e-6, _CAUSES[e["args"]["cause"]])
        for e in events
        if e.get("cat") == "stall"
    ]


def causes(
    gaps: Sequence[tuple[float, float, int]], waits: Sequence[Span], phases: Sequence[Span]
) -> dict[str, float]:
    """Return seconds of gaps by cause. A gap that waits for another stream has that cause. In one that waits
    for the host, the time of a wait has the wait's cause, and the rest that of the phase in which it is."""
    found: defaultdict[str, float] = defaultdict(float)
    waits, at = sorted(waits), 0
    for begin, end, waits_for in sorted(gaps):
        if waits_for >= 0:
            found["the GPU waits for copies"] += end - begin
            continue
        while at < len(waits) and waits[at][1] <= begin:
            at += 1
        upto = begin
        for wait_begin, wait_end, cause in waits[at:]:
            if wait_begin >= end:
                break
            first, last = max(upto, wait_begin), min(end, wait_end)
            if last > first:
                found[cause] += last - first
                _python(found, upto, first, phases)
                upto = last
        _python(found, upto, end, phases)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _python(found: dict[str, float], begin: float, end: float, phases: Sequence[Span]) -> None:
    """Count a time in which the host computed, by phase."""
    for phase_begin, phase_end, name in phases:
        overlap = min(end, phase_end) - max(begin, phase_begin)
        if overlap > 0:
            found[f"Python and launches, {name}"] += overlap
