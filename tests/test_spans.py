"""The recorder: stalls are counted always, spans only while a trace is on."""

from __future__ import annotations

import pytest

from infinity.core import spans
from infinity.core.spans import CAUSES, Recorder


class Clock:
    """Time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1000
        monkeypatch.setattr(spans, "now", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


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
