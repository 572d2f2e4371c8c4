"""What the engine is doing and when: counters of the last step, always; spans, while a trace is on.

A span is one piece of work of one kind. Times are nanoseconds of
CLOCK_MONOTONIC, which on Linux is the clock of `time.perf_counter_ns` and of the I/O engine's tickets.
For work on a separate device the time is a `Moment`, which becomes a number when the work has happened.

[Note: the user's thread] The thread that runs the model is in one place at a time: in the forward or
backward of a unit, in a wait of the engine (a *stall*), in `step()`, or in the user's own code. A stall
interrupts the piece of forward or backward in which it begins, so no two of these overlap, and
together they add up to the step. On CUDA the backward runs on a thread of autograd while the user's thread
waits: the two count as one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

#: What the user's thread waits for: the link, drives, the update, the gradients on their way.
CAUSES: Final = ("h2d", "nvme", "update", "reduce")
_WAITS: Final = {
    "h2d": "copies to the device",
    "nvme": "the drives",
    "update": "the update",
    "reduce": "gradients on their way",
}
#: A resource that is busy for this share of a step bounds it; below that, waits do.
_BOUND: Final = 0.75
#: A smaller share is not worth a word.
_LITTLE: Final = 0.01
#: A trace keeps this many spans, about 25 MB, and counts those beyond.
LIMIT: Final = 100_000

now = time.perf_counter_ns


class Moment(Protocol):
    """A point in the work of a device."""

    def ns(self) -> int:
        """Return when it happened; block until it has."""
        ...


Time = int | Moment
#: kind, detail, unit, chunk, directory (-1: none), begin, end, bytes
Span = tuple[str, str, int, int, int, Time, Time, int]
#: What `Recorder.waits` hands to `Recorder.waited`.
Wait = tuple[int, "Moment | None"]


class Recording:
    """The spans of one trace. Any thread may add: appending to a list is atomic."""

    def __init__(self, moment: Callable[[], Moment] | None = None, limit: int = LIMIT) -> None:
        self.began = now()
        self.ended = 0
        self.spans: list[Span] = []
        self.steps: list[tuple[int, int]] = []  # begin and end of each step()
        self.dropped = 0
        self.moment = moment
        self._limit = limit
        # The user's thread: who is computing, innermost last, and since when.
        self._inside: list[tuple[object, str, int]] = []
        self._since: int = self.began
        self._device_since: Moment | None = None

    def add(
        self,
        kind: str,
        begin: Time,
        end: Time,
        *,
        detail: str = "",
        unit: int = -1,
        chunk: int = -1,
        directory: int = -1,
        nbytes: int = 0,
    ) -> None:
        """Add a span."""
        if len(self.spans) < self._limit:
            self.spans.append((kind, detail, unit, chunk, directory, begin, end, nbytes))
        else:
            self.dropped += 1

    def enter(self, owner: object, phase: str, unit: int) -> None:
        """The user's thread computes for `owner` from here on (until `leave`)."""
        self._lap()
        self._inside.append((owner, phase, unit))

    def backward(self, owner: object, forward_end: int) -> None:
        """A backward begins, after the forward that ended at `forward_end` (0: not known). The time between
        them is the loss."""
        if forward_end > self.began and not self._inside:
            self._inside.append((owner, "loss", -1))
            self._since = max(self._since, forward_end)
            self._lap()
            self._inside.pop()
        self.enter(owner, "backward", -1)

    def leave(self, owner: object) -> None:
        """The user's thread no longer computes for `owner`, which need not be the last that entered, or may
        be gone."""
        found = [i for i, entry in enumerate(self._inside) if entry[0] is owner]
        if found:
            self._lap()
            del self._inside[found[-1]]

    def leave_all(self) -> None:
        """The user's thread has left everything."""
        if self._inside:
            self._lap()
            self._inside.clear()

    def stall(self, cause: str, begin: int, end: int, unit: int) -> None:
        """The user's thread waited from `begin` to `end`."""
        self.add("stall", begin, end, detail=cause, unit=unit)

    def _lap(self, until: int | None = None, moment: Moment | None = None) -> None:
        """Close the piece of forward or backward that is under way; the next begins here."""
        begin, device_begin = self._since, self._device_since
        self._since = end = now() if until is None else until
        if self.moment is not None and moment is None:
            moment = self.moment()
        self._device_since = moment
        if self._inside:
            _, phase, unit = self._inside[-1]
            if self.moment is None:
                self.add("compute", begin, end, detail=phase, unit=unit)
                return
            self.add("launch", begin, end, detail=phase, unit=unit)
            if device_begin is not None and moment is not None:
                self.add("compute", device_begin, moment, detail=phase, unit=unit)

    def pause(self, wait: Wait) -> None:
        """A stall began: what was computed until then is a piece."""
        self._lap(*wait)

    def resume(self, moment: Moment | None) -> None:
        """It ended."""
        self._since = now()
        self._device_since = moment


class Recorder:
    """Collects the reports of an engine's parts; one per engine, which passes it to their constructors.

    Attributes:
        log: what a trace records; None: no trace is on. Take it into a local before use: another
            thread may end the trace.
        stalls: ns of the user's thread by cause, since the engine was made.
        updating: ns in which chunks were updated, since the engine was made.
        figures: of the last step, under the names of `infinity.metrics`.
    """

    def __init__(self) -> None:
        self.log: Recording | None = None
        self.stalls = dict.fromkeys(CAUSES, 0)
        self.updating = 0
        self.figures: dict[str, float] = {
            **{f"stall/{cause}(%)": 0.0 for cause in CAUSES},
            "io/read(GB/s)": 0.0,
            "io/write(GB/s)": 0.0,
            "efficiency(%)": 0.0,
        }
        # Of the last step: the share in which each resource was busy, and each cause was waited for.
        self._shares: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._last: tuple[int, int, int, dict[str, int], int, int] | None = None

    @contextlib.contextmanager
    def recording(self, log: Recording) -> Iterator[None]:
        """A block whose work `log` keeps."""
        self.log = log
        try:
            yield
        finally:
            self.log, log.ended = None, now()

    def waits(self) -> Wait:
        """The user's thread is about to wait; pass the result to `waited`."""
        log = self.log
        begin = now()
        if log is None or log.moment is None:
            return begin, None
        return begin, log.moment()

    def waited(self, wait: Wait, *causes: tuple[str, int], unit: int = -1) -> None:
        """It has waited: for each cause in turn, until the time that goes with it (at most; 0: the
        cause was none), for the last one until now."""
        end = now()
        begin = wait[0]
        log = self.log
        if log is not None:
            log.pause(wait)
        for index, (cause, until) in enumerate(causes):
            until = end if index == len(causes) - 1 else min(max(begin, until), end)
            if until > begin:
                self.stalls[cause] += until - begin
                if log is not None:
                    log.stall(cause, begin, until, unit)
            begin = until
        if log is not None:
            after = None
            if log.moment is not None:
                after = log.moment()
                if wait[1] is not None:
                    log.add("device stall", wait[1], after, detail=causes[-1][0], unit=unit)
            log.resume(after)

    def step(self, begin: int, nbytes_read: int, nbytes_written: int, drives: int = 0) -> None:
        """A `step()` that began at `begin` ends. Bytes are those moved since the engine was made, and
        `drives` the ns in which the busiest drive was at work."""
        end = now()
        log = self.log
        if log is not None:
            log.steps.append((begin, end))
        if self._last is not None:
            then, read, written, stalls, working, updating = self._last
            took = max(1, end - then)
            read, written = nbytes_read - read, nbytes_written - written
            waits = {cause: (self.stalls[cause] - stalls[cause]) / took for cause in CAUSES}
            # What is neither a stall nor `step()` is the user's: forward and backward, mostly.
            inside = min(end - begin, took) / took if begin > then else 0.0
            way = "reads" if read > 2 * written else "writes" if written > 2 * read else "reads and writes"
            busy = {
                "compute": max(0.0, 1 - max(sum(waits.values()), inside)),
                f"NVMe {way}": min(1.0, (drives - working) / took),
                "the optimizer's update": min(1.0, (self.updating - updating) / took),
            }
            self._shares = busy, waits
            self.figures = {
                **{f"stall/{cause}(%)": 100 * share for cause, share in waits.items()},
                "io/read(GB/s)": read / took,
                "io/write(GB/s)": written / took,
                "efficiency(%)": 100 * max(busy.values()),
            }
        self._last = end, nbytes_read, nbytes_written, dict(self.stalls), drives, self.updating

    def bound(self) -> str:
        """Return the sentence of `infinity.metrics` that says what bounded the last step."""
        busy, waits = self._shares
        if not busy:
            return "no whole step has been measured yet"
        (first, most), *others = sorted(busy.items(), key=lambda each: -each[1])
        more = "".join(f", {name} {share:.0%}" for name, share in others if share >= _LITTLE)
        said = f"{first} {most:.0%} of the step{more}"
        if most >= _BOUND:
            return f"bound by {said}"
        cause, waited = max(waits, key=lambda each: waits[each]), sum(waits.values())
        then = (
            f"; your thread waited {waited:.0%}, most of it for {_WAITS[cause]}" if waited >= _LITTLE else ""
        )
        return f"bound by waiting: {said}{then}"
