"""Traces of real runs: what is in the file is what happened, and recording changes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ConfigError, DirectoryError, WrapError
from infinity.core.spans import CAUSES

from .command_line import mounted
from .models import case
from .offloaded import ON_HOST, assert_same, config_for, train_offloaded, wrap_adamw
from .reference import two_groups

MIXED = {"parameters": "nvme", "optimizer_state": {"host": 0.5, "nvme": 0.5}, "gradients": "host"}
STEPS = 3


class Span(NamedTuple):
    """One complete event of a trace; times in ns."""

    kind: str
    begin: int
    end: int
    nbytes: int
    args: dict[str, Any]


def trace_in(path: Path) -> tuple[dict[str, Any], list[Span]]:
    """Return the content of a trace's file, and its spans."""
    content = json.loads(path.read_text(encoding="utf-8"))
    spans = []
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            begin, args = round(event["ts"] * 1000), event["args"]
            end = begin + round(event["dur"] * 1000)
            spans.append(Span(event["cat"], begin, end, args.get("bytes", 0), args))
    return content, spans


SETTINGS: dict[str, dict[str, Any]] = {
    "mixed": MIXED,
    "sync, host": {"update": "sync", **ON_HOST},
    "delayed": {"update": "delayed", "delay_warmup_steps": 1},
    "recompute": {"recompute": "non-reentrant"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trace_says_what_ran(name: str, tmp_path: Path) -> None:
    settings = dict(SETTINGS[name])
    this = case("gpt", layers=2, width=96, recompute=settings.pop("recompute", None))
    config = config_for(tmp_path, max_grad_norm=1.0, **settings)
    model, optimizer = wrap_adamw(this.model, config, lr=1e-3)
    engine = engine_of(model)

    def step(index: int) -> None:
        this.loss(model, this.batches[index]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def moved() -> tuple[int, ...]:
        """Bytes read and written, reads and writes, when nothing is under way any more."""
        engine.states.quiesce()
        until = time.monotonic() + 30
        # Copies loaded ahead: between two chunks of a unit no transfer is under way.
        while engine.store._order.pending() or any(not u.load_is_over() for u in engine.units):
            assert time.monotonic() < until
            time.sleep(0.001)
        return tuple(map(sum, zip(*(s[2:] for s in engine.store.stats()), strict=True))) or (0,) * 4

    step(0)
    before = moved()
    with infinity.trace(optimizer, tmp_path / "t.json"):
        for index in range(STEPS):
            step(index + 1)
        metrics = infinity.metrics(optimizer)
        after = moved()
    units = [u.layout.name for u in engine.units]
    chunks = sum(len(u.layout.trainable_chunks) for u in engine.units)
    infinity.close(optimizer)
    content, spans = trace_in(tmp_path / "t.json")

    def of(*kinds: str) -> list[Span]:
        return [s for s in spans if s.kind in kinds]

    # Bytes and transfers are those of the store.
    bytes_read, bytes_written, reads, writes = (b - a for a, b in zip(before, after, strict=True))
    assert (sum(s.nbytes for s in of("read")), len(of("read"))) == (bytes_read, reads)
    assert (sum(s.nbytes for s in of("write")), len(of("write"))) == (bytes_written, writes)
    assert len(of("crc")) == reads

    # Every unit and every chunk appears.
    for kind in ("compute", "reduce", "update", "h2d"):
        assert {s.args["unit"] for s in of(kind) if "unit" in s.args} == set(units), kind
    assert len(of("update")) == STEPS * chunks
    assert len(of("step")) == STEPS
    assert {s.args["phase"] for s in of("compute")} >= {"forward", "loss", "backward"}
    assert {s.args["unit"] for s in of("unshard")} == set(units)
    laps = sorted((s.begin, s.end) for s in of("compute", "stall"))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(laps)), "the thread is at two places at once"

    # Metrics have the stalls and rates of the last step.
    first, last = sorted(s.end for s in of("step"))[-2:]
    for cause in CAUSES:
        inside = [s for s in of("stall") if s.args["cause"] == cause and first <= s.begin < last]
        found = sum(s.end - s.begin for s in inside) / (last - first) * 100
        assert metrics[f"stall/{cause}(%)"] == pytest.approx(found, rel=1e-3, abs=1e-3), cause
    on_nvme = bytes_read > 0
    assert (metrics["io/read(GB/s)"] > 0) == (metrics["io/write(GB/s)"] > 0) == on_nvme
    sentence = metrics["bound"]
    assert sentence.startswith("bound by ")
    assert f"{metrics['efficiency(%)']:.0f}% of the step" in sentence
    assert ("NVMe" in sentence) == on_nvme

    about = content["otherData"]
    assert (about["dropped_spans"], about["units"]) == (0, units)
    assert {e["ph"] for e in content["traceEvents"]} == {"M", "X", "i"}
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.first
@pytest.mark.parametrize(
    "settings", [MIXED, {"parameters": "device", "update": "delayed", "delay_warmup_steps": 1}], ids=str
)
def test_a_trace_changes_no_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def train(folder: Path, before_step: Any = None) -> Any:
        config = config_for(folder, max_grad_norm=0.5, **settings)
        return train_offloaded(
            case("gpt"), config, steps=4, accumulate=2, groups=two_groups, before_step=before_step
        )

    wanted = train(folders[0])
    with contextlib.ExitStack() as stack:  # it ends after the engine is closed, too

        def begin(optimizer: Any, step: int) -> None:
            if step == 1:
                stack.enter_context(infinity.trace(optimizer, tmp_path / "t.json"))

        found = train(folders[1], begin)
    assert_same(found, wanted)
    assert len([s for s in trace_in(tmp_path / "t.json")[1] if s.kind == "step"]) == 3


def test_a_full_trace_says_so_and_still_answers(tmp_path: Path) -> None:
    this, path = case("gpt"), tmp_path / "t.json"
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path))

    def train() -> None:
        with infinity.trace(model, path, limit=20):
            this.loss(model, this.batches[0]).backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="spans after the first"):
        train()
    about = trace_in(path)[0]["otherData"]
    assert about["spans"] == 20
    assert about["dropped_spans"] > 0
    infinity.close(optimizer)


def test_what_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    this = case("gpt")
    with pytest.raises(WrapError), infinity.trace(this.model, tmp_path / "t.json"):
        pass
    model, optimizer = wrap_adamw(this.model, config_for(tmp_path))
    with pytest.raises(DirectoryError), infinity.trace(model, tmp_path / "missing" / "t.json"):
        pass
    with (
        pytest.raises(ConfigError, match="has no room for a span"),
        infinity.trace(model, tmp_path / "t", limit=0),
    ):
        pass
    entered = False
    with pytest.raises(DirectoryError, match="Is a directory"), infinity.trace(model, tmp_path):
        entered = True
    assert not entered, "it is said before the steps, not after them"
    with infinity.trace(model, tmp_path / "t.json"):
        with pytest.raises(ConfigError, match="already"), infinity.trace(model, tmp_path / "u.json"):
            pass

    def fail() -> None:
        with infinity.trace(model, tmp_path / "v.json"):
            this.loss(model, this.batches[0]).backward()
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    assert trace_in(tmp_path / "v.json")[1], "the file of a block that raised is there"
    assert engine_of(model).recorder.log is None
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["t.json", "v.json"]
    infinity.close(optimizer)


def test_a_trace_replaces_a_trace_and_nothing_else(tmp_path: Path) -> None:
    """Through a link the file that it leads to, by way of a file beside that one."""
    mine, far, link = tmp_path / "notes.json", tmp_path / "far", tmp_path / "link.json"
    mine.write_text('{"notes": 1}')
    os.mkfifo(tmp_path / "fifo")
    far.mkdir()
    link.symlink_to(far / "t.json")
    model, _ = wrap_adamw(case("gpt").model, infinity.Config(device="cpu", dtype="fp32"))
    try:
        for there, what in ((mine, "no trace"), (tmp_path / "fifo", "no file"), (link, "does not exist")):
            with pytest.raises(DirectoryError, match=what), infinity.trace(model, there):
                raise AssertionError("it was recorded")
        assert mine.read_text() == '{"notes": 1}'
        (far / "t.json").touch()
        for _ in range(2):
            before = (far / "t.json").read_bytes()
            with infinity.trace(model, link):
                assert len(os.listdir(far)) == 2
            assert (far / "t.json").read_bytes() != before
        assert link.is_symlink()
        assert os.listdir(far) == ["t.json"]
    finally:
        infinity.close(model)


@pytest.mark.root
def test_a_disk_without_room_for_a_trace() -> None:
    """An error at its end that is typed, or what the block raised; nothing stays of the file."""
    made = case("gpt")
    model, optimizer = wrap_adamw(made.model, infinity.Config(device="cpu", dtype="fp32"))

    def record(place: str, *, interrupted: bool) -> None:
        with infinity.trace(model, f"{place}/t.json"):
            for batch in made.batches[:3]:
                made.loss(model, batch).backward()
                optimizer.step()
            if interrupted:
                raise KeyboardInterrupt

    with mounted("-t", "tmpfs", "-o", "size=8k", "none") as small:
        with pytest.raises(DirectoryError, match="No space left"):
            record(small, interrupted=False)
        with pytest.warns(RuntimeWarning, match="No space left"), pytest.raises(KeyboardInterrupt):
            record(small, interrupted=True)
        assert os.listdir(small) == []
    infinity.close(model)
