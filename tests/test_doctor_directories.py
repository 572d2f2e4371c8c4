"""What `infinity doctor` says of odd directories and drives."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.cli import medium
from infinity.cli.doctor import directory
from infinity.cli.main import run
from infinity.cli.tune import remember
from infinity.core.config import Config
from infinity.core.sizes import KiB, MiB
from infinity.hardware import probe
from infinity.hardware.tuned import TunedSettings

from .command_line import ROOT, findings, mounted, old_arena, python, small_drive

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import torch` fails."""
    folder = tmp_path / "blocker" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    return {"PYTHONPATH": f"{folder.parent}:{ROOT}"}


def test_doctor_works_without_torch(tmp_path: Path, without_torch: dict[str, str]) -> None:
    done = python("-m", "infinity", "doctor", str(tmp_path), "--json", env=without_torch)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    for name in ("torch", "native Adam", "GPU"):
        assert found[name]["status"] == "error"
        assert "torch" in found[name]["found"]
        assert found[name]["cure"].startswith("pip install ")
    for name in ("native I/O", "cores", "threads", "cgroup", f"{tmp_path}: backend", f"{tmp_path}: free"):
        assert found[name]["status"] != "error", found[name]
    assert not [each for each in found.values() if "broke" in each["found"]]
    done = python("-m", "infinity", "doctor", str(tmp_path), env=without_torch)
    assert "cannot be imported" in done.stdout


def leftovers(place: str, *, clean: bool = False) -> dict[str, str]:
    """Return what doctor finds of arenas of older versions, by the name of the file."""
    names = f"{place}: leftover", f"{place}: in use"
    said = [found.found for found in directory(place, clean=clean) if found.name in names]
    return {os.path.basename(text.split(",")[0].split(" ")[0]): text for text in said}


def test_doctor_clean_removes_what_killed_runs_left_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        assert findings(capsys, place)[f"{place}: leftover"]["cure"] == f"infinity doctor --clean {place}"
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
    run(["doctor", place, "--clean"])
    assert os.listdir(place) == []  # the directory of arenas went with the last
    assert run(["doctor", "--clean"]) == 2  # an unset variable is not the current directory
    assert "infinity doctor --clean DIR" in capsys.readouterr().err


def test_doctor_of_a_path_that_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing, dangling = tmp_path / "file", tmp_path / "not there", tmp_path / "link"
    file.write_text("x")
    dangling.symlink_to(tmp_path / "nowhere")
    found = findings(capsys, str(file), str(missing), str(dangling), str(file / "below"))
    assert (found[str(file)]["status"], found[str(file)]["found"]) == ("error", "Not a directory")
    assert found[str(file)]["cure"] == f"name a directory, such as {tmp_path}"
    assert found[str(dangling)]["cure"] == found[str(file / "below")]["cure"] == "name another directory"
    subprocess.run(found[str(missing)]["cure"], shell=True, check=True, timeout=20)
    assert findings(capsys, str(missing))[str(missing)]["status"] == "ok"


@pytest.mark.root
def test_doctor_of_a_read_only_file_system(capsys: pytest.CaptureFixture[str]) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8m", "none") as place:
        dead = old_arena(place)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=20)
        found = findings(capsys, place)
        assert found[f"{place}: access"]["status"] == "error"
        assert found[f"{place}: access"]["found"] == "the file system is read-only"
        assert dead in found[f"{place}: leftover"]["found"]
        assert "Read-only file system" in leftovers(place, clean=True)["rank0.arena"]
        assert os.path.exists(dead)
        cure = found[f"{place}: access"]["cure"].split(", or")[0]
        subprocess.run(cure, shell=True, check=True, timeout=20)
        assert f"{place}: access" not in findings(capsys, place)
        assert "removed" in leftovers(place, clean=True)["rank0.arena"]
        assert not os.path.exists(dead)


@pytest.mark.root
def test_doctor_names_memory_under_an_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lower").mkdir()
    with mounted("-t", "tmpfs", "-o", "size=8m", "none") as memory:
        for name in ("up, per", "work"):
            os.mkdir(os.path.join(memory, name))
        upper = os.path.join(memory, "up, per").replace(",", "\\,")
        options = f"lowerdir={tmp_path / 'lower'},upperdir={upper},workdir={memory}/work"
        with mounted("-t", "overlay", "-o", options, "overlay") as place:
            found = findings(capsys, place)
            assert found[place]["found"] == "overlay, over tmpfs"
            assert found[f"{place}: tier"]["found"] == "it is memory, not a drive"
    with small_drive(tmp_path, 8 * MiB) as drive:
        for name in ("upper", "work"):
            os.mkdir(os.path.join(drive, name))
        options = f"lowerdir={tmp_path / 'lower'},upperdir={drive}/upper,workdir={drive}/work"
        with mounted("-t", "overlay", "-o", options, "overlay") as place:
            found = findings(capsys, place)
            assert found[place]["found"].startswith("overlay, over ext4 on loop")
            assert f"{place}: loop device" in found


@pytest.mark.root
def test_doctor_names_loop_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_drive(tmp_path, 8 * MiB) as drive:
        found = findings(capsys, drive)
        assert f"a loop device over {tmp_path / 'drive.img'}" in found[drive]["found"]
        assert found[f"{drive}: loop device"]["status"] == "warning"
        mount = probe.mount_of(str(tmp_path))
        assert mount is not None
        assert f"over {mount.filesystem}" in found[drive]["found"]  # what holds the file


def block_device(folder: Path, place: str, files: Mapping[str, str], slaves: tuple[str, ...] = ()) -> None:
    """Make what /sys has of a block device."""
    device = folder / "devices" / place
    for name, content in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(f"{content}\n")
    for name in slaves:
        (device / "slaves" / name).mkdir(parents=True)
    (folder / "class").mkdir(exist_ok=True)
    (folder / "class" / device.name).symlink_to(device)


@pytest.mark.parametrize(
    ("name", "kind", "rotational", "drives"),
    [
        ("sda", "drive", True, ("sda",)),
        ("sdb", "network", False, ("sdb",)),
        ("nvme0n1", "drive", False, ("nvme0n1",)),
        ("nvme1n1", "network", False, ("nvme1n1",)),
        ("nbd0", "network", False, ("nbd0",)),
        ("vda", "drive", None, ("vda",)),
        ("dm-0", "drive", True, ("nvme0n1", "sda")),
        ("zram0", "memory", False, ("zram0",)),
    ],
)
def test_disks_are_named_for_what_they_are(
    name: str,
    kind: str,
    rotational: bool | None,
    drives: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    turning, still = {"queue/rotational": "1"}, {"queue/rotational": "0"}
    block_device(tmp_path, "pci/ata1/sda", turning)
    block_device(tmp_path, "pci/ata1/sda/sda1", {"partition": "1"})
    block_device(tmp_path, "platform/host3/session1/target3/sdb", still)
    block_device(tmp_path, "pci/nvme/nvme0/nvme0n1", {**still, "device/transport": "pcie"})
    block_device(tmp_path, "virtual/nvme-subsys1/nvme1n1", {**still, "device/nvme1/transport": "tcp"})
    for plain in ("nbd0", "zram0"):
        block_device(tmp_path, f"virtual/{plain}", still)
    block_device(tmp_path, "virtio/vda", turning)
    block_device(tmp_path, "virtual/dm-0", still, ("sda1", "nvme0n1"))
    monkeypatch.setattr(medium, "_SYS", tmp_path / "class")
    drive = probe.BlockDevice(name, "259:0", None, None, None, None)
    monkeypatch.setattr(medium, "drive_of", lambda path: drive)
    monkeypatch.setattr(medium, "mount_of", lambda path: probe.Mount("/", "xfs", f"/dev/{name}", ("rw",)))
    found = medium.medium_of(str(tmp_path))
    assert (found.kind, found.rotational, found.drives) == (kind, rotational, drives)
    said = findings(capsys, str(tmp_path))
    assert (f"{tmp_path}: rotational" in said) is bool(rotational)
    tier = {"network": "behind a network", "memory": "it is memory"}.get(kind)
    assert tier is None or tier in said[f"{tmp_path}: tier"]["found"]


@pytest.mark.parametrize("filesystem", ["nfs4", "cifs", "ceph", "fuse.sshfs", "9p"])
def test_network_file_systems_are_named(
    filesystem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = probe.Mount("/", filesystem, "server:/share", ("rw",))
    monkeypatch.setattr(medium, "mount_of", lambda path: mount)
    found = findings(capsys, str(tmp_path))
    assert found[str(tmp_path)]["found"].startswith(filesystem)
    assert "behind a network" in found[f"{tmp_path}: tier"]["found"]


SMARTCTL = {"nvme_smart_health_information_log": {"percentage_used": 91}}


REFUSED = {"smartctl": {"messages": [{"string": "Permission denied", "severity": "error"}]}}


@pytest.mark.parametrize(
    ("program", "said", "device", "used", "text"),
    [
        ("smartctl", json.dumps(SMARTCTL), "nvme0n1", 0.91, "91%"),
        ("smartctl", json.dumps({"endurance_used": {"current_percent": 7}}), "sda", 0.07, "7%"),
        ("nvme", json.dumps({"percent_used": 3}), "nvme0n1", 0.03, "3%"),
        ("smartctl", json.dumps(REFUSED), "sda", None, "unknown (smartctl: Permission denied)"),
        ("smartctl", "{}", "sda", None, "unknown (smartctl does not say)"),
        ("smartctl", "no JSON", "sda", None, "unknown (smartctl: no answer)"),
        ("smartctl", "[" * 100_000, "sda", None, "unknown (smartctl: no answer)"),
        ("other", "", "sda", None, "unknown (smartctl is not installed)"),
    ],
)
def test_wear_is_read_where_somebody_knows(
    program: str,
    said: str,
    device: str,
    used: float | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "said").write_text(said)
    script = tmp_path / program
    script.write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path}/said\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(medium, "_SYS", tmp_path / "none")
    assert medium.wear_of(device).used == used
    monkeypatch.setattr(
        "infinity.cli.doctor.medium_of",
        lambda path: medium.Medium("drive", ("xfs",), False, False, (device,)),
    )
    found = findings(capsys, str(tmp_path))[f"{tmp_path}: wear"]
    assert text in found["found"]
    assert found["status"] == ("warning" if used and used > 0.8 else "ok")


def test_auto_takes_what_doctor_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path)

    def of_a_run() -> str:
        places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
        config = Config(nvme=place, device="cpu", dtype="fp32", **places)  # type: ignore[arg-type]
        model = torch.nn.Linear(8, 8)
        model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
        (ring,) = engine_of(optimizer).store._rings
        text = f"auto takes {ring.backend}, {ring.block_bytes // KiB} KiB × {ring.queue_depth}"
        infinity.close(model)
        return text.replace("1024 KiB", "1.00 MiB").replace("512 KiB", "512.00 KiB")

    seen = set()
    for settings in (None, TunedSettings(512 * KiB, 8, "threads", 2), TunedSettings(512 * KiB, 8, "gone", 2)):
        if settings is not None:
            remember(place, settings, {"score_bytes_per_second": 1e9})
        said = findings(capsys, place)[f"{place}: backend"]["found"]
        assert said.startswith(of_a_run())
        seen.add(said)
    assert len(seen) == 2  # a backend that is not there is as if nothing was found
