"""`infinity bench`: fio as the measure, the CPU's Adam, the link to the device."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infinity.cli.bench import io_fio
from infinity.cli.bench.group import bench_command
from infinity.cli.bench.io_load import PATTERNS, Job, Load, Settings
from infinity.core.errors import InfinityError
from infinity.core.sizes import KiB, MiB
from infinity.hardware import cpu_adam

SMALL = ["--size", "48MiB", "--block", "64KiB", "--depth", "4", "--seconds", "0.05", "--repeats", "2"]


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


# ---- fio ----


def fake_fio(folder: Path, body: str) -> None:
    script = folder / "fio"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"if '--version' in sys.argv: print('fio-9'); sys.exit()\n{body}\n"
    )
    script.chmod(0o700)


@pytest.fixture
def _fresh_fio() -> Iterator[None]:
    io_fio.find_fio.cache_clear()
    yield
    io_fio.find_fio.cache_clear()


REPORT = """
way = {"io_bytes": 0, "runtime": 0, "clat_ns": {}}
engine = next(a.split("=")[1] for a in sys.argv if a.startswith("--ioengine"))
huge = 2 if "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "") else 1
busy = {"io_bytes": huge * (10**9 if engine == "libaio" else 2 * 10**9), "runtime": 500,
        "clat_ns": {"percentile": {"50.000000": 1e6, "99.900000": 3e6}}}
job = {"read": busy, "write": way, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 500, "error": 0}
print("note: a line of its own"); print(json.dumps({"jobs": [job]}))
"""


@pytest.mark.usefixtures("_fresh_fio")
def test_the_best_engine_of_fio_is_the_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fio(tmp_path, REPORT)
    monkeypatch.setenv("PATH", str(tmp_path))
    place = tmp_path / "d"
    place.mkdir()
    found = bench("io", str(place), *SMALL, "--pattern", "read")
    fio = found["cases"][0]["fio"]
    assert found["fio"] == "fio-9"
    assert fio["engine"] == "io_uring"
    assert fio["huge_pages"]
    assert fio["bytes_per_second"] == 8e9
    assert fio["cpu_seconds_per_gb"] == pytest.approx(0.05)
    assert fio["latency_seconds"] == {"p50": 1e-3, "p99.9": 3e-3}
    ratios = [rate / 8e9 for rate in found["cases"][0]["repeats"]]
    assert fio["percent"] == pytest.approx(100 * sum(ratios) / 2)


@pytest.mark.usefixtures("_fresh_fio")
@pytest.mark.parametrize(
    "body", ["sys.exit(1)", "print('{}')", "print('{\"jobs\": ['); sys.exit('no engine')"]
)
def test_a_fio_that_fails_is_a_warning(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fio(tmp_path, body)
    monkeypatch.setenv("PATH", str(tmp_path))
    place = tmp_path / "d"
    place.mkdir()
    found = bench("io", str(place), *SMALL, "--pattern", "read")
    assert found["cases"][0]["fio"] is None
    assert sum("could not run" in text for text in found["warnings"]) == 4


@pytest.mark.usefixtures("_fresh_fio")
def test_without_fio_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bench("io", str(tmp_path), *SMALL, "--pattern", "read")
    assert found["fio"] is None
    assert any("apt install fio" in text for text in found["warnings"])


def test_the_installed_fio_takes_our_arguments(tmp_path: Path) -> None:
    settings = Settings("auto", 64 * KiB, 4)
    with Load(str(tmp_path), 32 * MiB, grain=64 * KiB, window=MiB) as mine:
        if io_fio.find_fio() is None:
            with pytest.raises(io_fio.FioFailed, match="not installed"):
                io_fio.run_fio(mine, settings, Job("read"), 0.1)
            return
        for pattern in PATTERNS:
            result = io_fio.run_fio(mine, settings, Job(pattern), 0.1)
            assert result.bytes_per_second > 0
            assert set(result.latency_seconds) == {"p50", "p99", "p99.9"}
        assert io_fio.run_fio(mine, settings, Job("read"), 0.1, huge=True).bytes_per_second > 0
    with pytest.raises(io_fio.FioFailed):  # the file is gone
        io_fio.run_fio(mine, settings, Job("read"), 0.1)
    assert list(tmp_path.iterdir()) == []


# ---- adam and link ----


def test_adam_is_measured_for_each_instruction_set() -> None:
    before = cpu_adam.isa(), cpu_adam.threads()
    found = bench("adam", "--params", "300000", "--repeats", "2", "--threads", "1", "--threads", "2")
    assert [(row["threads"], row["isa"]) for row in found["rows"]] == [
        (threads, isa) for threads in (1, 2) for isa in cpu_adam.available_isas()
    ]
    for row in found["rows"]:
        assert row["parameters_per_second"] > 0
        assert row["gb_per_s"] == pytest.approx(row["parameters_per_second"] * 28e-9)
        assert row["of_ceiling"] == pytest.approx(row["gb_per_s"] / row["ceiling_gb_per_s"])
    assert (cpu_adam.isa(), cpu_adam.threads()) == before
    coded = bench("adam", "--params", "70000", "--repeats", "1", "--moments", "8bit")
    assert all(row["of_ceiling"] is None and row["parameters_per_second"] > 0 for row in coded["rows"])
    assert "sse9" in str(refused("adam", "--isa", "sse9"))
    assert "--params" in str(refused("adam", "--params", str(1 << 50)).cure)
    done = CliRunner().invoke(
        bench_command, ["adam", "--params", "70000", "--repeats", "1"], catch_exceptions=False
    )
    assert "of ceiling" in done.stdout


def test_the_link_or_what_stands_in_its_place() -> None:
    found = bench("link", "--device", "cpu", "--size", "4MiB", "--repeats", "3")
    assert found["device"] == "cpu"
    assert {row["direction"] for row in found["rows"]} == {"copy"}
    assert all(row["bytes_per_second"] > 0 for row in found["rows"])
    assert "pinned" in found["warnings"][0]
    assert "h2d" in found["warnings"][0]
    assert "--size" in str(refused("link", "--size", "1KiB"))
    assert "cuda:99" in str(refused("link", "--device", "cuda:99"))
    done = CliRunner().invoke(
        bench_command, ["link", "--device", "cpu", "--size", "1MiB"], catch_exceptions=False
    )
    assert "not measured" in done.stdout


@pytest.mark.gpu
def test_every_kind_of_memory_crosses_the_link() -> None:
    found = bench("link", "--size", "64MiB", "--repeats", "5")
    assert found["warnings"] == []
    kinds = ("pageable", "pinned", "registered")
    assert [(row["kind"], row["direction"]) for row in found["rows"]] == [
        (kind, direction) for kind in kinds for direction in ("h2d", "d2h", "both")
    ]
    rates = {(row["kind"], row["direction"]): row["bytes_per_second"] for row in found["rows"]}
    for direction in ("h2d", "d2h"):
        assert rates["registered", direction] > rates["pageable", direction]
