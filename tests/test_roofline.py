"""The analysis of traces, by hand-made traces of known answer."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.cli.main import run
from infinity.cli.roofline import analyse, common, seconds, spans_of, union, without
from infinity.cli.trace import read_trace, show
from infinity.core.errors import DataError

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: (min(p), max(p))))


def points(found: Any) -> set[int]:
    return {t for begin, end in found for t in range(begin, end)}


@given(intervals, intervals)
def test_intervals_are_sets_of_points(a: Any, b: Any) -> None:
    for one in (union(a), common(union(a), union(b)), without(union(a), union(b))):
        assert all(begin < end for begin, end in one)
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(one))
    assert points(union(a)) == points(a)
    assert points(common(union(a), union(b))) == points(a) & points(b)
    assert points(without(union(a), union(b))) == points(a) - points(b)
    assert seconds(union(a)) == pytest.approx(len(points(a)) * 1e-9)


ABOUT: dict[str, Any] = {
    "format": 1,
    "device": "cpu",
    "update": "overlap",
    "placements": {
        "parameters": {"device": 1.0},
        "optimizer_state": {"nvme": 1.0},
        "gradients": {"host": 1.0},
    },
    "tuned_bytes_per_second": None,
    "bytes": {"device": {}, "host": {"gradients": 2 << 30}, "nvme": {"optimizer state": 4 << 30}},
    "host_memory": 8 << 30,
    "cost": {"ns_per_span": 500.0, "spans_per_step": 100.0, "ns_per_step": 50_000.0},
    "dropped_spans": 0,
    "limit_reached_ns": None,
}
_ARGS = {
    "compute": {"phase": "forward"},
    "stall": {"cause": "update"},
    "read": {"part": "state", "directory": 0},
}
_ARGS["write"] = _ARGS["read"]


def made(*spans: Any, steps: int = 2, about: Any = None) -> dict[str, Any]:
    """A trace with spans (kind, begin, end, bytes, args) in seconds of its second step, which lasts
    from 1 s to 2 s; the third is like it, and so on."""
    events = []
    for step in range(steps + 1):
        events.append(event("step", step + 0.99, step + 1.0, 0, {"step": step + 1}))
        if step:
            for kind, begin, end, *rest in spans:
                nbytes, args = [*rest, *([0, {}][len(rest) :])]
                events.append(event(kind, step + begin, step + end, nbytes, args))
    return {"otherData": {**ABOUT, **(about or {})}, "traceEvents": events}


def event(kind: str, begin: float, end: float, nbytes: int, args: Any) -> dict[str, Any]:
    args = {**_ARGS.get(kind, {}), **args, **({"bytes": nbytes} if nbytes else {})}
    return {"ph": "X", "cat": kind, "name": kind, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}


def resource(result: Any, name: str) -> Any:
    return next(r for r in result["resources"] if r["name"] == name)


def test_bound_by_reads() -> None:
    result = analyse(
        made(
            ("read", 0.0, 0.5, 600_000_000),
            ("read", 0.3, 0.95, 450_000_000),
            ("write", 0.0, 0.1, 100_000_000),
            ("update", 0.2, 0.5, 3_000_000_000),
            ("compute", 0.4, 0.8),
            ("stall", 0.0, 0.4),
        )
    )
    assert result["steps"] == 2
    assert result["step_seconds"] == pytest.approx(1.0)
    assert result["where"] == {
        "compute": pytest.approx(0.4),
        "stall: h2d": 0.0,
        "stall: nvme": 0.0,
        "stall: update": pytest.approx(0.4),
        "stall: reduce": 0.0,
        "step()": pytest.approx(0.01),
        "outside": pytest.approx(0.19),
    }
    reads = resource(result, "NVMe reads")
    assert reads["bytes"] == 1_050_000_000
    assert reads["bandwidth"] == pytest.approx(1.05e9 / 0.95)
    assert reads["bandwidth_from"] == "trace"
    assert resource(result, "CPU update")["bandwidth"] == pytest.approx(10e9)
    assert result["efficiency"] == pytest.approx(0.95)
    assert result["bound_by"] == "NVMe reads"
    # Compute needs 0.4 s: 0.55/0.95 of the state kept on the host would bring the reads down to that.
    assert result["sentence"] == (
        "bound by NVMe reads: 1.05 of 1.11 GB/s; "
        'more drives or `optimizer_state={"host": 0.6, "nvme": 0.4}` would help'
    )
    assert result["cost"]["share"] == pytest.approx(5e-5)


def test_the_placement_it_names_fits_or_it_says_what_is_missing() -> None:
    spans = (("read", 0.0, 0.9, 10**9), ("compute", 0.0, 0.45))
    about = {"host_memory": 3 << 30}
    sentence = analyse(made(*spans, about=about))["sentence"]
    assert sentence.endswith(
        'more drives or `optimizer_state={"host": 0.5, "nvme": 0.5}` would help '
        "(that takes 1.00 GiB more `host_memory`)"
    )
    split = {**ABOUT["placements"], "optimizer_state": {"host": 0.2, "nvme": 0.8}}
    sentence = analyse(made(*spans, about={"placements": split}))["sentence"]
    assert '`optimizer_state={"host": 0.6, "nvme": 0.4}` would help' in sentence


def test_reads_and_writes_that_share_a_drive_bound_together() -> None:
    result = analyse(
        made(
            *(("read", k / 10, k / 10 + 0.05, 10**8) for k in range(10)),
            *(("write", k / 10 + 0.05, k / 10 + 0.1, 10**8) for k in range(10)),
            ("compute", 0.0, 0.5),
        )
    )
    assert result["bound_by"] == "NVMe reads and writes"
    assert result["efficiency"] == pytest.approx(1.0)
    assert result["sentence"].startswith("bound by NVMe reads and writes: 2.00 of 2.00 GB/s; ")


def test_of_several_drives_the_slowest_decides_and_what_tune_measured_counts() -> None:
    spans = (
        ("read", 0.0, 0.4, 10**9, {"directory": 0}),
        ("read", 0.1, 0.9, 10**9, {"directory": 1}),
    )
    result = analyse(made(*spans))
    assert resource(result, "NVMe reads")["seconds"] == pytest.approx(0.8)
    tuned = {"tuned_bytes_per_second": [2e9, 2e9]}  # the second could do that in 0.5 s
    result = analyse(made(*spans, about=tuned))
    assert resource(result, "NVMe reads")["seconds"] == pytest.approx(0.5)
    assert resource(result, "NVMe reads")["bandwidth_from"] == "tune"
    assert result["efficiency"] == pytest.approx(0.5)
    assert result["sentence"].startswith("bound by waiting: NVMe reads, the busiest, at 2.00 of 4.00 GB/s")
    slow = analyse(made(*spans, about={"tuned_bytes_per_second": [1e9, 1e9]}))
    assert resource(slow, "NVMe reads")["seconds"] == pytest.approx(0.8), "it did better than that"


@pytest.mark.parametrize(
    ("spans", "about"),
    [
        ((("read", 0.0, 0.9, 10**9), ("update", 0.1, 0.8, 10**9)), {"host_memory": 3 << 30}),
        ((("read", 0.0, 0.4, 10**9), ("stall", 0.0, 0.9)), {}),
        ((("compute", 0.0, 0.96), ("read", 0.1, 0.5, 10**9), ("update", 0.2, 0.5, 10**9)), {}),
        ((("compute", 0.0, 0.5), ("stall", 0.5, 0.9, 0, {"cause": "reduce"})), {}),
        ((("h2d", 0.0, 0.95, 9 * 10**9), ("compute", 0.2, 0.9)), {"device": "cuda"}),
        ((), {}),
    ],
)
def test_no_line_of_the_sentence_is_longer_than_a_terminal(
    spans: Any, about: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = made(*spans, about=about)
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert run(["trace", str(tmp_path / "t.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Efficiency")) + 1
    end = next(i for i, line in enumerate(lines) if line.startswith("Recording"))
    assert max(map(len, lines[first:end])) <= 80
    sentence = analyse(content)["sentence"]
    assert " ".join(lines[first:end]) == f"{sentence[0].upper()}{sentence[1:]}."


def test_bound_by_compute() -> None:
    result = analyse(made(("compute", 0.0, 0.96), ("read", 0.1, 0.5, 10**9), ("update", 0.2, 0.5, 10**9)))
    assert result["bound_by"] == "compute"
    assert result["sentence"] == (
        "bound by compute: 0.96 s of 1.00 s; "
        "a faster device or less work per step would help, no placement will"
    )


def test_bound_by_the_update_and_by_the_link() -> None:
    result = analyse(made(("update", 0.0, 0.9, 18 * 10**9), ("crc", 0.85, 0.95, 7), ("compute", 0.0, 0.3)))
    assert result["bound_by"] == "CPU update"
    assert result["sentence"].startswith("bound by the CPU's Adam: 18.00 of 18.95 GB/s; more cores")
    assert "`threads`" in result["sentence"]
    result = analyse(made(("h2d", 0.0, 0.9, 9 * 10**9), ("d2h", 0.0, 0.2, 10**9)))
    assert result["bound_by"] == "link h2d"
    assert result["sentence"].startswith("bound by the link to the device: 9.00 of 10.00 GB/s; ")


@pytest.mark.parametrize(
    ("cause", "update", "cure"),
    [
        ("update", "sync", '`update="overlap"`'),
        ("update", "overlap", "host_memory"),
        ("nvme", "overlap", "host_memory"),
        ("h2d", "overlap", "device_memory"),
        ("reduce", "overlap", "gradients"),
    ],
)
def test_bound_by_waiting(cause: str, update: str, cure: str) -> None:
    spans = (("compute", 0.0, 0.5), ("stall", 0.5, 0.9, 0, {"cause": cause}), ("update", 0.5, 0.8, 10**9))
    result = analyse(made(*spans, about={"update": update}))
    assert result["sentence"].startswith(
        "bound by waiting: compute, the busiest, at 0.50 s of 1.00 s; 0.40 s"
    )
    assert cure in result["sentence"]


def test_time_that_the_engine_does_not_have() -> None:
    sentence = analyse(made(("compute", 0.0, 0.5), ("stall", 0.5, 0.6)))["sentence"]
    assert "; 0.39 s outside of the model; look at what loads data" in sentence
    sentence = analyse(made(("compute", 0.0, 0.5), ("step", 0.5, 0.98, 0, {"step": 9})))["sentence"]
    assert "in `step()` itself" in sentence


def test_on_a_device_of_its_own_the_devices_times_count() -> None:
    result = analyse(
        made(
            ("launch", 0.0, 0.1, 0, {"phase": "forward"}),
            ("device compute", 0.05, 0.85, 0, {"phase": "forward"}),
            ("stall", 0.1, 0.9, 0, {"cause": "reduce"}),  # the host waits while the device computes
        )
    )
    assert result["where"]["compute"] == pytest.approx(0.8)
    assert result["where"]["stall: reduce"] == pytest.approx(0.05)
    assert sum(result["where"].values()) == pytest.approx(1.0)


def test_spans_at_the_edges_count_in_part() -> None:
    content = made()
    content["traceEvents"].append(event("read", 0.5, 1.5, 1000, {}))
    result = analyse(content)
    assert resource(result, "NVMe reads")["bytes"] == 250, "half of them in the first of two steps"


def test_only_whole_steps_count() -> None:
    assert analyse(made(("compute", 0.0, 0.5), steps=0))["steps"] == 1, "one mark: from the beginning"
    result = analyse(made(("compute", 0.0, 0.5), steps=5, about={"limit_reached_ns": 3_500_000_000}))
    assert result["steps"] == 2, "what came after the trace was full does not"
    with pytest.raises(DataError, match="no whole step"):
        analyse(made(about={"limit_reached_ns": 1}))


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for content in ("not json", "[]", "{}", '{"otherData": {"format": 99}}'):
        path.write_text(content)
        with pytest.raises(DataError, match="no trace of infinity"):
            read_trace(str(path))
    with pytest.raises(DataError, match="no trace of infinity"):
        read_trace(str(tmp_path / "missing"))
    path.write_text(json.dumps(made()))
    assert len(spans_of(read_trace(str(path)))) == 3


def _tiers(content: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the path of everything in a JSON value."""
    inner = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from _tiers(value, (*path, key))


_ABSENT = object()
_ODD = (_ABSENT, None, "text", "[/x]", [], {}, [3], True, -1, 0, 1e300, 10**300, math.nan, math.inf)


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
    """Whatever one place of it is changed to: an analysis in strict JSON, or a typed error."""
    path = tmp_path / "t.json"
    about = {"tuned_bytes_per_second": [1e9]}
    kinds = [(kind, 0.1, 0.9, 10**8) for kind in ("compute", "stall", "read", "write", "update")]
    whole = made(*kinds, steps=1, about=about)
    whole["traceEvents"][1]["args"]["unit"] = "blocks.0"
    places = list(_tiers(whole))
    assert len(places) > 80
    refused = 0
    for place, odd in itertools.product(places, _ODD):
        content = json.loads(json.dumps(whole))
        inner = content
        for key in place[:-1]:
            inner = inner[key]
        if odd is _ABSENT:
            del inner[place[-1]]
        else:
            inner[place[-1]] = odd
        path.write_text(json.dumps(content))
        try:
            result = analyse(read_trace(str(path)))
            json.dumps(result, allow_nan=False)
            if odd == "[/x]":  # which is markup
                show(result)
        except DataError:
            refused += 1
    assert refused > len(places)
    for text, code in (("[" * 200_000, 2), (json.dumps(whole), 0)):
        path.write_text(text)
        assert run(["trace", str(path)]) == code
