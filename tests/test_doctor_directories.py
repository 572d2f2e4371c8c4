"""What `infinity doctor` says of odd directories and drives."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
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
from infinity.core.sizes import KiB
from infinity.hardware import probe
from infinity.hardware.tuned import TunedSettings

from .command_line import ROOT, findings, mounted, old_arena, python

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
    for name in ("native I/O", "cores", "cgroup", f"{tmp_path}: backend", f"{tmp_path}: free"):
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


@pytest.mark.parametrize("filesystem", ["nfs4", "cifs", "ceph", "fuse.sshfs", "9p"])
def test_network_file_systems_are_named(
    filesystem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = probe.Mount("/", filesystem, "server:/share")
    monkeypatch.setattr(medium, "mount_of", lambda path: mount)
    found = findings(capsys, str(tmp_path))
    assert found[str(tmp_path)]["found"].startswith(filesystem)
    assert "behind a network" in found[f"{tmp_path}: tier"]["found"]


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
