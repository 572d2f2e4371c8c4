"""`infinity doctor`, and the facts of a machine that it shows."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infinity.cli import doctor
from infinity.cli.doctor import Finding, doctor_command, examine, worst
from infinity.cli.main import run as run_cli
from infinity.cli.tune import remember
from infinity.core.errors import BuildError
from infinity.hardware import cpu_adam, probe
from infinity.hardware.tuned import TunedSettings


@pytest.fixture(autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in ("INFINITY_AIO", "INFINITY_ISA"):
        monkeypatch.delenv(name, raising=False)


def status_of(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


# ---- the command ----


def test_every_finding_has_a_status_and_what_is_wrong_a_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_cli(["doctor", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == (1 if result["status"] == "error" else 0)
    names = [finding["name"] for finding in result["findings"]]
    for name in ("python", "torch", "distribution", "import", "native I/O", "native Adam", "cgroup"):
        assert name in names
    for name in ("memlock", "aio-max-nr", "huge pages", "cores", "NUMA", "backend libaio", "host memory"):
        assert name in names
    assert any(name.startswith("GPU") for name in names)
    for part in ("", ": free", ": O_DIRECT", ": backend", ": tuned"):
        assert f"{tmp_path}{part}" in names
    for finding in result["findings"]:
        assert set(finding) == {"name", "status", "found", "cure"}
        assert finding["status"] in ("ok", "warning", "error")
        assert finding["found"]
        assert finding["status"] == "ok" or finding["cure"]
    assert list(tmp_path.iterdir()) == []


def test_a_person_sees_lines_and_cures(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = CliRunner().invoke(doctor_command, [missing], catch_exceptions=False, standalone_mode=False)
    assert done.return_value == 1
    said = " ".join(done.stdout.split())  # lines end at 80 columns
    assert f"error {missing}: No such file" in said
    assert f"to change: mkdir -p {missing}" in said


def test_warnings_alone_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([Finding("a", "warning", "b", "c")]),))
    done = CliRunner().invoke(doctor_command, [], catch_exceptions=False, standalone_mode=False)
    assert done.return_value == 0
    assert worst([]) == "ok"


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("oh")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.processors))
    findings = examine(())
    assert findings[0].status == "error"
    assert "ZeroDivisionError: oh" in findings[0].found
    assert findings[1].name == "cores"


# ---- the package ----


@pytest.mark.parametrize(("installed", "status"), [(None, "warning"), ("9.9", "warning"), ("same", "ok")])
def test_the_distribution_is_compared(
    installed: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "infinity-offload" and installed:
            return doctor.__version__ if installed == "same" else installed
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert status_of(list(doctor.package()), "distribution").status == status


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "cffi":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = status_of(list(doctor.versions()), "cffi")
    assert (found.status, found.cure) == ("error", "pip install cffi")


# ---- the native parts ----


def test_a_native_part_that_is_missing_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise BuildError("no native part", found=f"no {name}", cure="pip install .")

    monkeypatch.setattr(importlib, "import_module", missing)
    findings = list(doctor.native())
    assert [(f.name, f.status, f.cure) for f in findings] == [
        ("native I/O", "error", "pip install ."),
        ("native Adam", "error", "pip install ."),
    ]


def test_each_backend_that_is_refused_has_a_reason_and_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {
        "libaio": "libaio.so.1 is not installed",
        "syscall": "no contexts left: fs.aio-nr has reached fs.aio-max-nr",
        "uring": "refused (seccomp, or kernel.io_uring_disabled)",
        "threads": "ok",
    }
    monkeypatch.setattr("infinity.hardware.aio.available_backends", lambda path=None: verdicts)
    findings = list(doctor.native())
    cures = {name: status_of(findings, f"backend {name}") for name in verdicts}
    assert cures["threads"].status == "ok"
    assert all(cures[name].status == "warning" for name in ("libaio", "syscall", "uring"))
    assert "libaio1" in str(cures["libaio"].cure)
    assert "fs.aio-max-nr" in str(cures["syscall"].cure)
    assert "io_uring_setup" in str(cures["uring"].cure)


def test_an_instruction_set_that_is_forced_low_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_adam, "isa", lambda: "scalar")
    monkeypatch.setattr(cpu_adam, "available_isas", lambda: ("scalar", "avx2"))
    monkeypatch.setenv("INFINITY_ISA", "scalar")
    found = status_of(list(doctor.native()), "native Adam")
    assert (found.status, found.cure) == ("warning", "unset INFINITY_ISA")
    assert "INFINITY_ISA=scalar" in found.found


# ---- limits ----


def test_low_limits_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memlock_limit", lambda: 8 << 20)
    monkeypatch.setattr(doctor, "aio_contexts", lambda: (65000, 65536))
    monkeypatch.setattr(probe, "available_host_memory", lambda: 1 << 30)
    monkeypatch.setattr(probe, "cgroup_memory_limit", lambda: 2 << 30)
    findings = list(doctor.memory())
    assert {f.name for f in findings if f.status == "warning"} >= {"memlock", "aio-max-nr", "host memory"}
    assert "2.00 GiB" in status_of(findings, "cgroup").found
    monkeypatch.setattr(doctor, "aio_contexts", lambda: None)
    assert status_of(list(doctor.memory()), "aio-max-nr").status == "warning"


def test_two_nodes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getaffinity(0)
    near, far = probe.NumaNode(0, frozenset(mine), 1 << 30), probe.NumaNode(1, frozenset({9999}), 1 << 30)
    monkeypatch.setattr(probe, "numa_nodes", lambda: (near, far))
    assert status_of(list(doctor.processors()), "NUMA").status == "ok"
    split = probe.NumaNode(1, frozenset(list(mine)[:1]), 1 << 30)
    monkeypatch.setattr(probe, "numa_nodes", lambda: (near, split))
    assert status_of(list(doctor.processors()), "NUMA").status == "warning"


def test_a_directory_far_from_the_gpu_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = doctor.describe_directory(str(tmp_path))
    drive = probe.BlockDevice("nvme0n1", "259:0", "Fast", "S1", False, 1)
    mount = probe.Mount("/", "ext4", "/dev/nvme0n1")
    monkeypatch.setattr(doctor, "describe_directory", lambda path: facts._replace(drive=drive, mount=mount))
    gpu = doctor.Gpu(0, "GPU", 1 << 30, 1 << 30, "0000:01:00.0", 0)
    for node, status in ((0, "warning"), (1, "ok")):
        monkeypatch.setattr(doctor, "gpus", lambda node=node: (gpu._replace(numa_node=node),))
        found = status_of(list(doctor.directory(str(tmp_path))), f"{tmp_path}: NUMA")
        assert found.status == status


def test_a_directory_says_what_was_tuned(tmp_path: Path) -> None:
    remember(str(tmp_path), TunedSettings(1 << 20, 16, "libaio", 4), {})
    found = status_of(list(doctor.directory(str(tmp_path))), f"{tmp_path}: tuned")
    assert "libaio, 1.00 MiB × 16" in found.found


def test_memory_is_no_drive() -> None:
    findings = list(doctor.directory("/dev/shm"))
    assert status_of(findings, "/dev/shm: tier").status == "warning"
    assert status_of(findings, "/dev/shm: backend").status == "warning"
    assert "synchronous on tmpfs" in status_of(findings, "/dev/shm: backend").found


def test_a_directory_without_direct_io_or_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = doctor.describe_directory(str(tmp_path))._replace(direct=False, alignment=0, free=1 << 20)
    monkeypatch.setattr(doctor, "describe_directory", lambda path: facts)
    findings = list(doctor.directory(str(tmp_path)))
    assert status_of(findings, f"{tmp_path}: O_DIRECT").status == "warning"
    assert status_of(findings, f"{tmp_path}: free").status == "warning"


# ---- what the machine says ----


def test_the_facts_of_a_directory(tmp_path: Path) -> None:
    facts = doctor.describe_directory(str(tmp_path))
    assert facts.path == str(tmp_path)
    assert facts.writable
    assert 0 < facts.free <= facts.total
    assert facts.mount is not None
    assert str(tmp_path).startswith(facts.mount.point)
    assert list(tmp_path.iterdir()) == []
    shm = doctor.describe_directory("/dev/shm")  # a mount of its own, or a folder of /dev
    point = "/dev/shm" if os.path.ismount("/dev/shm") else "/dev"
    assert shm.mount is not None
    assert (shm.mount.point, shm.drive) == (point, None)
    assert shm.mount.filesystem in ("tmpfs", "devtmpfs")
    assert not doctor.describe_directory("/proc").writable
    with pytest.raises(FileNotFoundError):
        doctor.describe_directory("/missing")
    with pytest.raises(NotADirectoryError):
        doctor.describe_directory(__file__)


def test_a_mount_point_with_a_space_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "30 22 259:1 / /mnt/my\\040drive rw,noatime shared:5 - xfs /dev/nvme0n1p1 rw,attr2\n"
        "31 30 0:99 / /mnt/my\\040drive rw - btrfs /dev/sdb rw\n"
    )
    real = probe.text_of
    monkeypatch.setattr(
        probe, "text_of", lambda file: lines if file == Path("/proc/self/mountinfo") else real(file)
    )
    found = probe.mount_of("/mnt/my drive/run")
    assert found == probe.Mount("/mnt/my drive", "btrfs", "/dev/sdb")
    root = probe.mount_of("/mnt/my drives")
    assert root is not None
    assert root.point == "/"


def test_a_drive_is_told_by_its_serial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "sys" / "node0" / "nvme0n1"
    part = disk / "nvme0n1p1"
    for folder in (disk / "device", disk / "queue", part):
        folder.mkdir(parents=True)
    (tmp_path / "sys" / "node0" / "numa_node").write_text("1\n")
    (disk / "device" / "model").write_text("Fast SSD   \n")
    (disk / "device" / "serial").write_text("S123\n")
    (disk / "queue" / "rotational").write_text("0\n")
    (part / "partition").write_text("1\n")
    number = os.stat(tmp_path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    block = tmp_path / "block"
    block.mkdir()
    (block / name).symlink_to(part)
    monkeypatch.setattr(probe, "_SYS_BLOCK", str(block))
    assert probe.drive_of(str(tmp_path)) == probe.BlockDevice("nvme0n1", name, "Fast SSD", "S123", False, 1)
    from infinity.hardware.tuned import drive_key

    assert drive_key(str(tmp_path)).startswith("Fast SSD|S123|")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("", set()), ("7", {7}), ("0,2-3\n", {0, 2, 3})]
)
def test_lists_of_cores(text: str, cpus: set[int]) -> None:
    assert probe.parse_cpus(text) == cpus


def test_the_locked_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: infinite)
    assert doctor.memlock_limit() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert doctor.memlock_limit() in (65536, None)  # None: with CAP_IPC_LOCK
    monkeypatch.setattr(probe.Path, "read_text", lambda self: "CapEff:\t0000000000000000\n")
    assert doctor.memlock_limit() == 65536
    monkeypatch.setattr(probe.Path, "read_text", lambda self: "CapEff:\t0000000000004000\n")
    assert doctor.memlock_limit() is None


def test_a_cgroup_limit_is_the_tightest_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "a" / "memory.max").write_text(f"{1 << 30}\n")
    places = [(folder, "memory.max", "memory.current") for folder in (inner, tmp_path / "a", tmp_path)]
    monkeypatch.setattr(probe, "_cgroups", lambda: places)
    assert probe.cgroup_memory_limit() == 1 << 30
    (tmp_path / "a" / "memory.max").write_text("max\n")
    assert probe.cgroup_memory_limit() is None


@pytest.mark.gpu
def test_gpus_are_known_and_memory_can_be_pinned() -> None:
    found = doctor.gpus()
    assert found
    assert all(gpu.total >= gpu.free > 0 and gpu.name for gpu in found)
    findings = list(doctor.devices())
    assert status_of(findings, "GPU 0").status == "ok"
    assert status_of(findings, "pinning").status == "ok"
