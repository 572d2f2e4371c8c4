"""`infinity doctor`: this machine's facts, odd directories and drives, and what to change."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infinity.cli import doctor, medium
from infinity.cli.doctor import Finding, directory, doctor_command, examine
from infinity.cli.main import run
from infinity.core.errors import BuildError
from infinity.hardware import cpu_adam, probe
from infinity.hardware.tuned import drive_key

from .command_line import ROOT, mounted, old_arena, python

pytestmark = pytest.mark.usefixtures("own_environment")


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def of(path: object, *, clean: bool = False) -> dict[str, Finding]:
    """Return what doctor finds of a directory."""
    return by_name(directory(str(path), clean=clean))


# ---- the command ----


def test_every_finding_has_a_status_and_what_is_wrong_a_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["doctor", str(tmp_path), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == (1 if result["status"] == "error" else 0)
    names = {finding["name"] for finding in result["findings"]}
    assert names >= {"python", "torch", "distribution", "import", "native I/O", "native Adam"}
    assert names >= {"cgroup", "memlock", "aio-max-nr", "huge pages", "cores", "NUMA", "backend libaio"}
    assert names >= {f"{tmp_path}{part}" for part in ("", ": free", ": O_DIRECT", ": backend", ": tuned")}
    assert "host memory" in names
    assert any(name.startswith("GPU") for name in names)
    for finding in result["findings"]:
        assert set(finding) == {"name", "status", "found", "cure"}
        assert finding["status"] in ("ok", "warning", "error")
        assert finding["found"]
        assert finding["status"] == "ok" or finding["cure"]
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_finding_and_a_warning_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("oh")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.processors))
    findings = examine(())
    assert (findings[0].status, findings[1].name) == ("error", "cores")
    assert "ZeroDivisionError: oh" in findings[0].found
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([Finding("a", "warning", "b", "c")]),))
    for given, code in (([], 0), ([str(tmp_path / "missing")], 1)):
        done = CliRunner().invoke(doctor_command, given, catch_exceptions=False, standalone_mode=False)
        assert done.return_value == code
    said = " ".join(done.stdout.split())  # lines end at 80 columns
    assert f"error {tmp_path}/missing: No such file" in said
    assert f"to change: mkdir -p {tmp_path}/missing" in said


@pytest.mark.integration
def test_doctor_works_without_torch(tmp_path: Path) -> None:
    folder = tmp_path / "blocker" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    env = {"PYTHONPATH": f"{folder.parent}:{ROOT}"}
    done = python("-m", "infinity", "doctor", str(tmp_path), "--json", env=env)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    for name in ("torch", "native Adam", "GPU"):
        assert found[name]["status"] == "error"
        assert "torch" in found[name]["found"]
        assert found[name]["cure"].startswith("pip install ")
    for name in ("native I/O", "cores", "cgroup", f"{tmp_path}: backend", f"{tmp_path}: free"):
        assert found[name]["status"] != "error", found[name]
    assert not [each for each in found.values() if "broke" in each["found"]]


# ---- the package and its native parts ----


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str, real: Any = importlib.metadata.version) -> str:
        if name == "cffi":
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.9" if name == "infinity-offload" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    missing = by_name(doctor.versions())["cffi"]
    assert (missing.status, missing.cure) == ("error", "pip install cffi")
    assert by_name(doctor.package())["distribution"].status == "warning"


def test_a_native_part_that_is_missing_or_forced_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_containers.py has what is refused."""
    monkeypatch.setattr(cpu_adam, "isa", lambda: "scalar")
    monkeypatch.setattr(cpu_adam, "available_isas", lambda: ("scalar", "avx2"))
    monkeypatch.setenv("INFINITY_ISA", "scalar")
    found = by_name(doctor.native())
    adam = found["native Adam"]
    assert (adam.status, adam.cure) == ("warning", "unset INFINITY_ISA")
    assert "INFINITY_ISA=scalar" in adam.found

    def missing(name: str) -> Any:
        raise BuildError("no native part", found=f"no {name}", cure="pip install .")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert [(f.name, f.status, f.cure) for f in doctor.native()] == [
        ("native I/O", "error", "pip install ."),
        ("native Adam", "error", "pip install ."),
    ]


# ---- limits, nodes ----


def test_low_limits_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of locked memory, of a cgroup (the tightest above counts) and of aio contexts."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    folders = (tmp_path / "a" / "b", tmp_path / "a", tmp_path)
    monkeypatch.setattr(probe, "_cgroups", lambda: [(f, "memory.max", "memory.current") for f in folders])
    monkeypatch.setattr(probe, "available_host_memory", lambda: 1 << 30)
    for capabilities, locked in (("0000000000004000", None), ("0000000000000000", 65536)):  # CAP_IPC_LOCK
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
            patch.setattr(probe.Path, "read_text", lambda self, c=capabilities: f"CapEff:\t{c}\n")
            assert doctor.memlock_limit() == locked
    for text, contexts in ((f"{2 << 30}\n", (65000, 65536)), ("max\n", None)):
        (tmp_path / "a" / "memory.max").write_text(text)
        monkeypatch.setattr(doctor, "aio_contexts", lambda contexts=contexts: contexts)
        monkeypatch.setattr(doctor, "memlock_limit", lambda: 8 << 20)
        found = by_name(doctor.memory())
        assert {found[name].status for name in ("memlock", "aio-max-nr", "host memory")} == {"warning"}
        assert ("2.00 GiB" in found["cgroup"].found) == (contexts is not None)


@pytest.mark.gpu
def test_gpus_are_known_and_memory_can_be_pinned() -> None:
    found = doctor.gpus()
    assert found
    assert all(gpu.total >= gpu.free > 0 and gpu.name for gpu in found)
    findings = by_name(doctor.devices())
    assert (findings["GPU 0"].status, findings["pinning"].status) == ("ok", "ok")


# ---- directories ----


def leftovers(place: str, *, clean: bool = False) -> dict[str, str]:
    """Return what doctor finds of arenas of older versions, by the name of the file."""
    names = f"{place}: leftover", f"{place}: in use"
    said = [found.found for found in directory(place, clean=clean) if found.name in names]
    return {os.path.basename(text.split(",")[0].split(" ")[0]): text for text in said}


def test_doctor_clean_removes_what_killed_runs_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "drive")
    os.mkdir(place)
    left = Path(old_arena(place))
    content, folder = left.read_bytes(), left.parent
    (folder / "rank1.arena").write_bytes(content)
    (folder / "rank2.arena").touch()  # its run was killed as it began
    precious = tmp_path / "precious"
    precious.write_bytes(content)
    foreign = {
        "rank3.arena": b"thesis",
        "rank4.arena": bytes(4096),
        "rank5.arena": content[4096:],  # another size than its mark says
        "rank7.arena.bak": content,
        "notes": b"mine",
    }
    for name, text in foreign.items():
        (folder / name).write_bytes(text)
    (folder / "rank8.arena").symlink_to(precious)
    os.link(precious, folder / "rank9.arena")
    (folder / "rank10.arena").mkdir()
    os.mkfifo(folder / "rank11.arena")
    before = {path.name for path in folder.iterdir()}
    with open(folder / "rank1.arena", "rb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        found = leftovers(place)
        assert found.keys() == {"rank0.arena", "rank1.arena", "rank2.arena"}
        assert "has left it" in found["rank0.arena"]
        assert "1.00 MiB" in found["rank0.arena"]
        assert "a run of an older version has it" in found["rank1.arena"]
        assert of(place)[f"{place}: leftover"].cure == f"infinity doctor --clean {place}"
        assert {path.name for path in folder.iterdir()} == before
        found = leftovers(place, clean=True)
        assert "removed" in found["rank0.arena"]
        assert "a run of an older version has it" in found["rank1.arena"]
        assert {path.name for path in folder.iterdir()} == before - {"rank0.arena", "rank2.arena"}
    assert leftovers(place, clean=True).keys() == {"rank1.arena"}
    assert {name: (folder / name).read_bytes() for name in foreign} == foreign
    assert precious.read_bytes() == content
    shutil.rmtree(folder)
    old_arena(place)
    monkeypatch.setattr(doctor, "CHECKS", ())
    run(["doctor", place, "--clean"])
    assert os.listdir(place) == []  # the directory of arenas went with the last
    assert run(["doctor", "--clean"]) == 2  # an unset variable is not the current directory
    assert "infinity doctor --clean DIR" in capsys.readouterr().err


def test_doctor_of_a_path_that_is_no_directory(tmp_path: Path) -> None:
    file, missing, dangling = tmp_path / "file", tmp_path / "not there", tmp_path / "link"
    file.write_text("x")
    dangling.symlink_to(tmp_path / "nowhere")
    found = of(file)[str(file)]
    assert (found.status, found.found) == ("error", "Not a directory")
    assert found.cure == f"name a directory, such as {tmp_path}"
    for path in (dangling, file / "below"):
        assert of(path)[str(path)].cure == "name another directory"
    subprocess.run(of(missing)[str(missing)].cure or "", shell=True, check=True, timeout=20)
    assert of(missing)[str(missing)].status == "ok"


@pytest.mark.root
def test_doctor_of_a_read_only_file_system() -> None:
    with mounted("-t", "tmpfs", "-o", "size=8m", "none") as place:
        dead = old_arena(place)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=20)
        found = of(place)
        access = found[f"{place}: access"]
        assert (access.status, access.found) == ("error", "the file system is read-only")
        assert dead in found[f"{place}: leftover"].found
        assert "Read-only file system" in leftovers(place, clean=True)["rank0.arena"]
        assert os.path.exists(dead)
        subprocess.run(str(access.cure).split(", or")[0], shell=True, check=True, timeout=20)
        assert f"{place}: access" not in of(place)
        assert "removed" in leftovers(place, clean=True)["rank0.arena"]
        assert not os.path.exists(dead)


def test_memory_and_drives_without_direct_io_or_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of("/dev/shm")
    assert found["/dev/shm: tier"].status == found["/dev/shm: backend"].status == "warning"
    assert "synchronous on tmpfs" in found["/dev/shm: backend"].found
    facts = doctor.describe_directory(str(tmp_path))
    assert (facts.path, facts.writable) == (str(tmp_path), True)
    assert 0 < facts.free <= facts.total
    with pytest.raises(NotADirectoryError):
        doctor.describe_directory(__file__)
    full = facts._replace(direct=False, alignment=0, free=1 << 20)
    monkeypatch.setattr(doctor, "describe_directory", lambda path: full)
    found = of(tmp_path)
    assert found[f"{tmp_path}: O_DIRECT"].status == found[f"{tmp_path}: free"].status == "warning"


def test_network_file_systems_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for filesystem in ("nfs4", "cifs", "ceph", "fuse.sshfs", "9p"):
        mount = probe.Mount("/", filesystem, "server:/share")
        monkeypatch.setattr(medium, "mount_of", lambda path, mount=mount: mount)
        said = of(tmp_path)
        assert said[str(tmp_path)].found.startswith(filesystem)
        assert "behind a network" in said[f"{tmp_path}: tier"].found


def test_serial_numbers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "sys" / "node0" / "nvme0n1"
    part = disk / "nvme0n1p1"
    for folder in (disk / "device", disk / "queue", part):
        folder.mkdir(parents=True)
    texts = {"device/model": "Fast SSD   ", "device/serial": "S123", "queue/rotational": "0"}
    for name, text in {**texts, "nvme0n1p1/partition": "1", "../numa_node": "1"}.items():
        (disk / name).write_text(f"{text}\n")
    number = os.stat(tmp_path).st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / name).symlink_to(part)
    monkeypatch.setattr(probe, "_SYS_BLOCK", str(tmp_path / "block"))
    assert probe.drive_of(str(tmp_path)) == probe.BlockDevice("nvme0n1", name, "Fast SSD", "S123", False, 1)
    assert drive_key(str(tmp_path)).startswith("Fast SSD|S123|")
