"""`infinity bench`: real measurements of a few megabytes, and every way to get them wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infinity.cli.bench.group import bench_command
from infinity.cli.bench.io_load import Job, Load, Settings, run_pass
from infinity.cli.main import run as run_cli
from infinity.core.errors import (
    ConfigError,
    CorruptionError,
    DirectoryError,
    InfinityError,
)
from infinity.core.sizes import KiB, MiB

from .command_line import mounted, started

SMALL = ["--size", "48MiB", "--block", "64KiB", "--depth", "4", "--seconds", "0.05", "--repeats", "2"]
SETTINGS = Settings("auto", 64 * KiB, 4)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINITY_AIO", raising=False)


def bench(*arguments: str) -> Any:
    """Run `infinity bench …` in this process; return the JSON of its stdout."""
    done = CliRunner().invoke(bench_command, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(*arguments: str) -> InfinityError:
    """Run `infinity bench …`; return the error that it raises."""
    with pytest.raises(InfinityError) as caught:
        CliRunner().invoke(bench_command, list(arguments), catch_exceptions=False)
    assert caught.value.cure
    return caught.value


@contextlib.contextmanager
def load(directory: Path, nbytes: int = 32 * MiB) -> Iterator[Load]:
    with Load(str(directory), nbytes, grain=64 * KiB, window=32 * MiB) as opened:
        yield opened


# ---- the command ----


def test_every_pattern_is_measured_and_checked_and_nothing_is_left(tmp_path: Path) -> None:
    found = bench("io", str(tmp_path), *SMALL)
    assert found["benchmark"] == "io"
    assert found["file_bytes"] == 48 * MiB
    assert [case["pattern"] for case in found["cases"]] == ["read", "write", "mixed"]
    for case in found["cases"]:
        assert len(case["repeats"]) == 2
        assert 0 < min(case["repeats"]) <= case["bytes_per_second"] <= max(case["repeats"])
        latency = case["latency_seconds"]
        assert 0 < latency["p50"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
        positive = case["cpu_seconds_per_gb"], case["submit"]["max_seconds"], case["verified_bytes"]
        assert min(*positive, latency["blocks"]) > 0
        assert case["directories"] == [str(tmp_path)]
    assert found["verified_bytes"] >= sum(case["verified_bytes"] for case in found["cases"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_person_sees_a_table_and_on_a_terminal_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["io", str(tmp_path), *SMALL, "--quick", "--pattern", "read"]
    for terminal, color, bar in (("dumb", "", False), ("xterm", "1", True), ("dumb", "1", False)):
        monkeypatch.setenv("TERM", terminal)
        monkeypatch.setenv("FORCE_COLOR", color)  # rich takes what is captured for a terminal
        done = CliRunner().invoke(bench_command, arguments, catch_exceptions=False)
        assert done.exit_code == 0
        assert "GB/s" in done.stdout
        assert ("read, auto 64.00 KiB × 4" in done.stderr) is bar


# ---- plots ----


@pytest.mark.integration
def test_plots_are_drawn_and_replaced(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "d").mkdir()
    machine = str(Path(__file__).parents[1] / "docs" / "machine.yaml")
    plan = ["plan", "--preset", "llama-3.1-8b", "--machine", machine, "--dtype", "bf16"]
    bench = ["bench", "io", str(tmp_path / "d"), *SMALL, "--quick", "--need", "1.5"]
    for command, name in ((bench, "a.png"), (bench, "b.pdf"), (plan, "a.png"), (plan, "b.pdf")):
        file = tmp_path / name
        assert run_cli([*command, "--plot", str(file)]) in (0, 1)  # 1: the run does not fit
        assert b"atplotlib" in file.read_bytes()


@pytest.mark.parametrize(
    ("name", "found"),
    [("plot.txt", "plot.txt"), ("missing/plot.png", "missing"), ("old.png", "a file that is no plot")],
)
def test_a_plot_that_cannot_be_written_is_refused_first(
    name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.png").write_text("of the user")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if matplotlib were here
    error = refused("io", str(tmp_path), "--plot", str(tmp_path / name))
    assert found in str(error.found)
    assert (tmp_path / "old.png").read_text() == "of the user"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = refused("io", str(tmp_path), "--plot", str(tmp_path / "plot.png"))
    assert "infinity-offload[plot]" in str(error.cure)


@pytest.mark.serial  # in a directory that others know too
def test_memory_is_not_taken_for_a_drive() -> None:
    found = bench("io", "/dev/shm", *SMALL, "--quick", "--pattern", "read")
    assert any("answers from memory" in text for text in found["warnings"])


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (["/missing"], DirectoryError, "mkdir -p /missing"),
        ([__file__], DirectoryError, "Not a directory"),
        (["/proc"], DirectoryError, "on a drive"),
        (["{}", "--size", "100TiB"], DirectoryError, "stay free"),
        (["{}", "--size", "1KiB"], ConfigError, "too small"),
        (["{}", "--size", "16MiB", "--block", "4MiB"], ConfigError, "--size 512MiB"),
        (["{}", "--size", "lots"], ConfigError, "lots"),
        (["{}", "--block", "5000"], ConfigError, "4096"),
        (["{}", "--depth", "0"], ConfigError, "depth"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], kind: type, says: str, tmp_path: Path) -> None:
    error = refused("io", *[part.format(tmp_path) for part in arguments])
    assert isinstance(error, kind)
    assert says in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_small_disk_is_used_but_never_filled() -> None:
    with mounted("-t", "tmpfs", "-o", "size=60m", "none") as place:
        found = bench("io", place, "--quick", *SMALL[2:])
        assert 16 * MiB <= found["file_bytes"] <= 54 * MiB
        Path(place, "full").write_bytes(bytes(50 * MiB))
        assert "stay free" in str(refused("io", place, "--size", "16MiB", *SMALL[2:]))
        assert "is full" in str(refused("io", place, *SMALL[2:]))
        assert os.listdir(place) == ["full"]
    with mounted("-t", "tmpfs", "-o", "ro", "none") as place:
        assert "Read-only" in str(refused("io", place))


def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    command = ["-m", "infinity", "bench", "io", str(tmp_path), *SMALL, "--seconds", "30"]
    with started(*command) as child:
        descriptors, until = Path(f"/proc/{child.pid}/fd"), time.monotonic() + 60
        while not any(os.path.realpath(each).startswith(str(tmp_path)) for each in descriptors.iterdir()):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = child.communicate(timeout=30)
        assert time.monotonic() - start < 10
    assert child.returncode == 130
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# ---- the load: what is written is what is read ----


@pytest.mark.parametrize("kind", ["flipped", "lost"])
def test_wrong_bytes_are_found(kind: str, tmp_path: Path) -> None:
    job, at = Job("write", chunk=MiB), 5 * MiB + 70000
    with load(tmp_path) as mine, mine.ring(SETTINGS) as ring:
        run_pass([(mine, ring)], SETTINGS, job, 60, limit=mine.nbytes)
        old = os.pread(mine.file.plain_fd, 1, at)
        run_pass([(mine, ring)], SETTINGS, job, 60, limit=mine.nbytes)
        new = os.pread(mine.file.plain_fd, 1, at)
        assert old != new  # every byte changes from pass to pass, or a lost write would not show
        os.pwrite(mine.file.plain_fd, old if kind == "lost" else bytes([new[0] ^ 1]), at)
        os.fsync(mine.file.plain_fd)
        with pytest.raises(CorruptionError) as caught:
            mine.verify(ring, SETTINGS, job, 1 << 40)
        assert caught.value.offset == at // (64 * KiB) * 64 * KiB
        # A pass compares what its buffers hold at its end: here the whole file.
        whole = Settings("auto", MiB, 16), Job("read", single=True), 60
        with pytest.raises(CorruptionError):
            run_pass([(mine, ring)], *whole, limit=mine.nbytes)
