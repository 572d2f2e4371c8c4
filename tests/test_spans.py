"""The recorder: stalls are counted always, spans only while a trace is on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from infinity.core import spans
from infinity.core.spans import CAUSES, Recorder, Recording


class Clock:
    """Time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1000
        monkeypatch.setattr(spans, "now", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def brief(log: Recording) -> list[tuple[Any, ...]]:
    """Kind, detail, unit, begin and end of each span."""
    return [(kind, detail, unit, begin, end) for kind, detail, unit, _, _, begin, end, _ in log.spans]


def test_forward_is_cut_by_a_stall_and_by_what_it_contains(clock: Clock) -> None:
    recorder = Recorder()
    log = recorder.log = Recording()
    outer, inner = object(), object()
    clock.ns = 1010
    log.enter(outer, "forward", -1)
    clock.ns = 1020
    log.enter(inner, "forward", 3)
    clock.ns = 1030
    wait = recorder.waits()
    clock.ns = 1050
    recorder.waited(wait, ("update", 1037), ("nvme", 1001), ("h2d", 0), unit=3)
    clock.ns = 1060
    log.leave(inner)
    clock.ns = 1070
    log.leave(outer)
    log.leave(outer)  # twice does nothing
    clock.ns = 1080
    assert brief(log) == [
        ("compute", "forward", -1, 1010, 1020),
        ("compute", "forward", 3, 1020, 1030),
        ("stall", "update", 3, 1030, 1037),
        ("stall", "h2d", 3, 1037, 1050),
        ("compute", "forward", 3, 1050, 1060),
        ("compute", "forward", -1, 1060, 1070),
    ]
    assert recorder.stalls == {"h2d": 13, "nvme": 0, "update": 7, "reduce": 0}


def test_what_lies_between_forward_and_backward_is_the_loss(clock: Clock) -> None:
    log, me = Recording(), object()
    clock.ns = 1010
    log.enter(me, "forward", -1)
    clock.ns = left = 1020
    log.leave(me)
    clock.ns = 1030
    log.backward(me, left)
    clock.ns = 1040
    log.leave_all()
    log.leave_all()
    assert brief(log) == [
        ("compute", "forward", -1, 1010, 1020),
        ("compute", "loss", -1, 1020, 1030),
        ("compute", "backward", -1, 1030, 1040),
    ]


def test_figures_are_those_of_the_last_step_with_or_without_a_trace(clock: Clock) -> None:
    recorder = Recorder()
    assert set(recorder.figures.values()) == {0.0}
    assert recorder.bound() == "no whole step has been measured yet"
    clock.ns = 2000
    recorder.step(1900, 500, 100)
    wait = recorder.waits()
    clock.ns = 2100
    recorder.waited(wait, ("nvme", 0))
    clock.ns = 3000
    recorder.step(2900, 2500, 1100)
    assert recorder.figures == {
        **{f"stall/{cause}(%)": 10.0 if cause == "nvme" else 0.0 for cause in CAUSES},
        "io/read(GB/s)": 2.0,
        "io/write(GB/s)": 1.0,
        "efficiency(%)": 90.0,  # compute
    }
    assert recorder.bound() == "bound by compute 90% of the step"
    clock.ns = 4000
    recorder.updating += 950
    recorder.step(3900, 2500, 1100, 700)
    assert recorder.figures.pop("efficiency(%)") == 95.0
    assert set(recorder.figures.values()) == {0.0}
    clock.ns = 5000
    recorder.step(4900, 2500, 1100, 700 + 970)
    assert recorder.figures["efficiency(%)"] == 97.0
    assert recorder.bound() == "bound by NVMe reads and writes 97% of the step, compute 90%"
    wait = recorder.waits()
    clock.ns = 5600
    recorder.waited(wait, ("update", 0))
    clock.ns = 6000
    recorder.updating += 300
    recorder.step(5900, 3500, 1100, 1670 + 500)
    assert recorder.bound() == (
        "bound by waiting: NVMe reads 50% of the step, compute 40%, the optimizer's update 30%; "
        "your thread waited 60%, most of it for the update"
    )


def test_a_full_recording_counts_what_it_drops(clock: Clock) -> None:
    log = Recording(limit=2)
    for begin in (1, 2, 3, 4):
        clock.ns = 1000 + begin
        log.add("read", begin, begin + 1)
    assert [begin for *_, begin, _, _ in log.spans] == [1, 2]
    assert log.dropped == 2


def test_a_device_of_its_own_has_its_own_times(clock: Clock) -> None:
    class Moment:
        def __init__(self, ns: int) -> None:
            self._ns = ns

        def ns(self) -> int:
            return self._ns

    made: list[Moment] = []

    def moment() -> Moment:
        made.append(Moment(clock.ns + 500))  # the device is behind
        return made[-1]

    recorder = Recorder()
    log = recorder.log = Recording(moment)
    me = object()
    log.enter(me, "forward", 1)
    clock.ns = 1010
    wait = recorder.waits()
    clock.ns = 1015
    recorder.waited(wait, ("h2d", 0), unit=1)
    clock.ns = 1020
    log.leave(me)
    found = [(k, u, b, e) for k, _, u, b, e in brief(log)]
    times = [(k, u, *(t if isinstance(t, int) else t.ns() for t in (b, e))) for k, u, b, e in found]
    assert times == [
        ("launch", 1, 1000, 1010),
        ("compute", 1, 1500, 1510),
        ("stall", 1, 1010, 1015),
        ("device stall", 1, 1510, 1515),
        ("launch", 1, 1015, 1020),
        ("compute", 1, 1515, 1520),
    ]


def test_any_thread_may_add() -> None:
    log = Recording()

    def add() -> None:
        for begin in range(2000):
            log.add("read", begin, begin + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.spans) == 8000
