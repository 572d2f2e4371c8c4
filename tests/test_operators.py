"""What an operator meets: killed runs, signals, files in the way, odd places and plain terminals."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.api.engine import engine_of
from infinity.cli.dialect import in_options
from infinity.cli.main import run
from infinity.cli.workload import BuiltIn
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import KiB, MiB
from infinity.hardware import medium, probe
from infinity.hardware.aio import open_ring
from infinity.hardware.tuned import TunedSettings, bandwidths, drive_key, remember, settings_file, tuned
from infinity.storage.arena import Arena
from infinity.storage.leftovers import MARK_NBYTES, arenas, dead_nbytes, mark

from .cgroup import unavailable

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))
#: Prints as soon as it holds an arena, and then waits to be killed.
HOLDER = (
    "import sys, time\n"
    "from infinity.storage.arena import Arena\n"
    "arena = Arena(sys.argv[1], int(sys.argv[2]))\n"
    "print('ready', flush=True)\n"
    "time.sleep(120)\n"
)


@pytest.fixture(autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in ("INFINITY_AIO", "INFINITY_ISA"):
        monkeypatch.delenv(name, raising=False)


def need_root() -> None:
    if os.geteuid() != 0:
        unavailable("needs root")


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[str]:
    """Mount at a place of its own; unmount whatever happens."""
    need_root()
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            ["mount", *arguments, place], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            unavailable(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", place], check=True, timeout=30)


@contextlib.contextmanager
def small_drive(folder: Path, nbytes: int) -> Iterator[str]:
    """An ext4 of `nbytes` on a loop device."""
    image = folder / "drive.img"
    with open(image, "wb") as file:
        file.truncate(nbytes)
    command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    with mounted("-o", "loop", str(image)) as place:
        yield place


def python(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 200, text: bool = True
) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=text,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


@contextlib.contextmanager
def started(*arguments: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    if "preexec_fn" not in more:  # whoever runs these tests may have been told to ignore it (nohup)
        pipes["preexec_fn"] = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen([sys.executable, "-u", *arguments], text=True, cwd=ROOT, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_for_line(child: subprocess.Popen[str], text: str, seconds: float = 150) -> None:
    assert child.stdout is not None
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select.select([child.stdout], [], [], 1.0)
        if ready:
            line = child.stdout.readline()
            if text in line:
                return
            if not line:
                break
    child.kill()
    pytest.fail(f"no {text!r}: {child.communicate(timeout=30)}")


def killed(directory: str, nbytes: int = MiB) -> str:
    """Leave the arena of a run that `kill -9` ended; return its path."""
    with started("-c", HOLDER, directory, str(nbytes)) as child:
        wait_for_line(child, "ready")
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    (path,) = Path(directory, "infinity").glob("rank0.arena")
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.py"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture
def nvme(tmp_path: Path) -> str:
    folder = tmp_path / "nvme"
    folder.mkdir()
    return str(folder)


def words(text: str, nvme: str, *more: str, width: int = 64) -> list[str]:
    """The options of a run of a tiny model with everything on NVMe."""
    size = ["--layers", "2", "--width", str(width), "--heads", "2", "--batch", "2", "--sequence", "32"]
    engine = ["--device", "cpu", "--dtype", "fp32", "--chunk-elements", "65536", "--nvme", nvme]
    places = [f"--{kind}=nvme" for kind in ("parameters", "optimizer-state", "gradients")]
    budgets = ["--host-memory", "64MiB", "--device-memory", "32MiB", "--sample-tokens", "0"]
    return [*size, "--data", text, *engine, *places, *budgets, *more]


def findings(capsys: pytest.CaptureFixture[str], *directories: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    run(["doctor", "--json", *directories])
    return {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}


# ---- kill -9 ----


@pytest.mark.root
def test_a_killed_run_and_the_same_command_again(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_drive(tmp_path, 48 * MiB) as drive:
        command = words(text, drive, width=256)
        with started("-m", "infinity", "train", *command, "--steps", "100000") as child:
            wait_for_line(child, "step 2/")
            child.send_signal(signal.SIGKILL)
            child.wait(30)
        arena = os.path.join(drive, "infinity", "rank0.arena")
        left = os.stat(arena).st_blocks * 512
        system = os.statvfs(drive)
        assert system.f_bavail * system.f_frsize < left  # it would not fit beside what is there
        assert dead_nbytes(drive) == left

        assert run(["plan", *command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["fits"]
        found = findings(capsys, drive)[f"{drive}: leftover"]
        assert found["status"] == "warning"
        assert arena in found["found"]
        assert f"{left / MiB:.2f} MiB" in found["found"]
        assert found["cure"] == f"infinity clean {drive}"

        assert run(["train", *command, "--steps", "2", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        rows = {row["what"]: row for row in result["planned_and_measured"]}
        assert 0 <= rows["nvme"]["measured"] - rows["nvme"]["planned"] <= 64 * KiB
        assert not os.path.exists(arena)


@pytest.mark.root
def test_wrap_takes_the_space_of_a_killed_run_of_another_rank(tmp_path: Path) -> None:
    with small_drive(tmp_path, 16 * MiB) as drive:
        path = killed(drive, 12 * MiB)
        os.rename(path, path.replace("rank0", "rank5"))
        places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), "nvme")
        config = Config(nvme=drive, device="cpu", dtype="fp32", **places)  # type: ignore[arg-type]
        with infinity.init(config):  # 4 bytes for each parameter, before the arena
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
        infinity.close(model)
        assert os.listdir(os.path.join(drive, "infinity")) == []


def test_clean_removes_what_is_dead_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "a drive")
    os.mkdir(directory)
    dead = killed(directory)
    folder = Path(directory, "infinity")
    live = Arena(directory, MiB, rank=1)
    precious = Path(directory, "precious")
    precious.write_text("precious")
    (folder / "notes").write_text("mine")
    (folder / "rank2.arena").write_text("thesis")
    (folder / "rank3.arena").symlink_to(precious)
    os.link(precious, folder / "rank4.arena")
    (folder / "rank6.arena").mkdir()
    (folder / "rank7.arena.bak").write_bytes(Path(dead).read_bytes())
    before = {path.name for path in folder.iterdir()}
    states = {os.path.basename(found.path): found.state for found in arenas(directory)}
    foreign = {f"rank{number}.arena": "foreign" for number in (2, 3, 4, 6)}
    assert states == {"rank0.arena": "dead", "rank1.arena": "live", **foreign}

    assert run(["clean", directory, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["arenas"]
    assert [row["path"] for row in rows if row["removed"]] == [dead]
    assert {path.name for path in folder.iterdir()} == before - {"rank0.arena"}
    assert precious.read_text() == "precious"
    assert (folder / "rank2.arena").read_text() == "thesis"
    assert run(["clean", directory]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    live.close()
    assert run(["clean", str(tmp_path / "missing")]) == 2
    assert run(["clean", str(precious)]) == 2
    assert "name the directory" in capsys.readouterr().err


def test_clean_never_removes_a_live_arena(tmp_path: Path) -> None:
    runs = (
        "import os, random, sys, time\n"
        "from infinity.storage.arena import Arena\n"
        "for _ in range(300):\n"
        "    arena = Arena(sys.argv[1], 65536)\n"
        "    for _ in range(3):\n"
        "        assert os.stat(arena.path).st_ino == os.fstat(arena.fd).st_ino\n"
        "        time.sleep(random.random() / 1000)\n"
        "    if random.random() < 0.3:\n"
        "        arena._close_descriptors()  # as a kill would\n"
        "    else:\n"
        "        arena.close()\n"
    )
    cleans = (
        "import sys\n"
        "from infinity.storage.leftovers import arenas\n"
        "while True:\n"
        "    arenas(sys.argv[1], remove=True)\n"
    )
    with started("-c", cleans, str(tmp_path)) as one, started("-c", cleans, str(tmp_path)) as other:
        done = python("-c", runs, str(tmp_path))
        assert done.returncode == 0, done.stderr
        for cleaner in (one, other):
            assert cleaner.poll() is None, cleaner.communicate(timeout=30)


# ---- what is not ours ----


def foreign_files(place: Path) -> dict[str, bytes]:
    """Contents that no run made, by name."""
    return {
        "text": b"my thesis",
        "pages": os.urandom(2 * MARK_NBYTES),
        "zeros": bytes(MARK_NBYTES),
        "mark alone": mark(MiB),
        "another size": bytes(MARK_NBYTES) + mark(2 * MARK_NBYTES),
    }


@pytest.mark.parametrize("kind", [*foreign_files(Path()), "hard link", "symbolic link", "dangling link"])
def test_a_file_that_is_not_ours_is_refused_as_it_is(kind: str, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "infinity" / "rank0.arena"
    path.parent.mkdir(0o700)
    content = foreign_files(tmp_path).get(kind, b"precious")
    if kind == "hard link":
        content = bytes(MARK_NBYTES) + mark(MARK_NBYTES)  # even if it is an arena
        victim.write_bytes(content)
        os.link(victim, path)
    elif kind == "symbolic link":
        victim.write_bytes(content)
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim)
    else:
        path.write_bytes(content)
    with pytest.raises(DirectoryError, match="something else where the arena belongs") as raised:
        Arena(str(tmp_path), MiB)
    assert raised.value.cure == f"move {path} away, or name another directory"
    if kind == "dangling link":
        assert not victim.exists()
    else:
        assert path.read_bytes() == content
    path.rename(tmp_path / "away")  # the cure
    Arena(str(tmp_path), MiB).close()


def test_a_run_refuses_what_is_not_ours_and_the_cure_works(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(nvme, "infinity", "rank0.arena")
    path.parent.mkdir(0o700)
    path.write_bytes(b"weights" * 100_000)
    assert "no run can begin" in findings(capsys, nvme)[f"{nvme}: leftover"]["found"]
    assert run(["train", *words(text, nvme, "--steps", "1")]) == 2
    shown = capsys.readouterr().err
    assert f"to change: move {path} away" in shown
    assert path.read_bytes() == b"weights" * 100_000
    path.rename(tmp_path / "away")
    assert run(["train", *words(text, nvme, "--steps", "1")]) == 0


@pytest.mark.parametrize("kind", ["hard link", "folder is a file", "folder is a link"])
def test_what_is_in_the_way_is_found_before_anything_is_built(
    kind: str,
    text: str,
    nvme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(nvme, "infinity")
    path = folder if kind.startswith("folder") else folder / "rank0.arena"
    if kind == "hard link":
        folder.mkdir(0o700)
        path.write_bytes(bytes(MARK_NBYTES) + mark(MARK_NBYTES))
        os.link(path, tmp_path / "second")
    elif kind == "folder is a file":
        path.write_bytes(b"")
    else:
        path.symlink_to(tmp_path)
    command = words(text, nvme, "--steps", "1")

    def build(*_: object) -> None:
        raise AssertionError("the model was built")

    with monkeypatch.context() as patch:
        patch.setattr(BuiltIn, "build", build)
        for verb in ("plan", "train"):
            assert run([verb, *command]) == 2
            assert f"to change: move {path} away" in capsys.readouterr().err
        elsewhere = ["--parameters", "host", "--optimizer-state", "host", "--gradients", "host"]
        assert run(["plan", *command, *elsewhere, "--host-memory", "1GiB"]) == 0  # it has no arena
    path.rename(tmp_path / "away")
    assert run(["plan", *command]) == 0
    assert not folder.exists() or os.listdir(folder) == []  # a plan makes nothing
    assert run(["train", *command]) == 0


def test_what_a_run_left_that_was_killed_as_it_began_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "infinity"
    folder.mkdir(0o700)
    (folder / "rank0.arena").touch()  # made, and nothing more
    assert [found.state for found in arenas(str(tmp_path))] == ["dead"]
    Arena(str(tmp_path), MiB).close()


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_like_an_interrupt(number: int, text: str, nvme: str) -> None:
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000")) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(number)
        child.send_signal(signal.SIGTERM)  # a second one does not disturb the closing
        out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert "interrupted after" in out
    assert err.endswith(f"ended by {signal.Signals(number).name}\n")
    assert "Traceback" not in err
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


def test_a_signal_at_any_moment_leaves_nothing(text: str, nvme: str) -> None:
    for seconds in (0.3, 1.5, 3.0, 5.0):
        with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000")) as child:
            time.sleep(seconds)
            child.send_signal(signal.SIGTERM)
            _, err = child.communicate(timeout=60)
        # Before Python has come to us it ends as any process does.
        assert child.returncode in (143, -signal.SIGTERM), err
        assert "Traceback" not in err
        assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


def test_a_run_under_nohup_outlives_its_terminal(text: str, nvme: str) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    command = words(text, nvme, "--steps", "8")
    with started("-m", "infinity", "train", *command, preexec_fn=ignore) as child:
        wait_for_line(child, "step 1/")
        child.send_signal(signal.SIGHUP)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "The loss" in out


def test_a_terminal_that_hangs_up_ends_a_run(text: str, nvme: str) -> None:
    main, terminal = pty.openpty()

    def lead() -> None:
        os.setsid()
        ctypes.CDLL(None).ioctl(0, 0x540E, 0)  # TIOCSCTTY: the terminal controls this session

    command = words(text, nvme, "--steps", "100000")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started("-m", "infinity", "train", *command, preexec_fn=lead, **streams) as child:
        os.close(terminal)
        seen, until = b"", time.monotonic() + 150
        while b"tokens/s" not in seen and time.monotonic() < until:
            if select.select([main], [], [], 1.0)[0]:
                seen += os.read(main, 65536)
        assert b"tokens/s" in seen, seen
        os.close(main)
        assert child.wait(60) == 128 + signal.SIGHUP
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


# ---- doctor ----


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import torch` fails."""
    folder = tmp_path / "blocker" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    return {"PYTHONPATH": f"{folder.parent}:{ROOT}"}


def test_doctor_and_clean_work_without_torch(tmp_path: Path, without_torch: dict[str, str]) -> None:
    dead = killed(str(tmp_path))
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
    assert dead in found[f"{tmp_path}: leftover"]["found"]
    assert not [each for each in found.values() if "broke" in each["found"]]
    done = python("-m", "infinity", "doctor", str(tmp_path), env=without_torch)
    assert "cannot be imported" in done.stdout
    done = python("-m", "infinity", "clean", str(tmp_path), env=without_torch)
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(dead)


def test_doctor_of_a_path_that_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing, dangling = tmp_path / "file", tmp_path / "not there", tmp_path / "link"
    file.write_text("x")
    dangling.symlink_to(tmp_path / "nowhere")
    found = findings(capsys, str(file), str(missing), str(dangling), str(file / "below"))
    assert (found[str(file)]["status"], found[str(file)]["found"]) == ("error", "Not a directory")
    assert found[str(file)]["cure"] == f"name a directory, such as {tmp_path}"
    assert found[str(dangling)]["cure"] == found[str(file / "below")]["cure"] == "name another directory"
    cure = found[str(missing)]["cure"]
    subprocess.run(cure[cure.index("mkdir") : cure.index(")")], shell=True, check=True, timeout=20)
    assert findings(capsys, str(missing))[str(missing)]["status"] == "ok"


@pytest.mark.root
def test_doctor_of_a_read_only_file_system(capsys: pytest.CaptureFixture[str]) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8m", "none") as place:
        dead = killed(place)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=20)
        found = findings(capsys, place)
        assert found[f"{place}: access"]["status"] == "error"
        assert found[f"{place}: access"]["found"] == "the file system is read-only"
        assert dead in found[f"{place}: leftover"]["found"]
        assert run(["clean", place]) == 2
        assert "mount the file system read-write" in capsys.readouterr().err
        assert os.path.exists(dead)
        cure = found[f"{place}: access"]["cure"].split(", or")[0]
        subprocess.run(cure, shell=True, check=True, timeout=20)
        assert f"{place}: access" not in findings(capsys, place)
        assert run(["clean", place]) == 0
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
    drive = probe.Drive(name, "259:0", None, None, None, None)
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
        "infinity.cli.doctor_directory.medium_of",
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


# ---- tune ----


def test_a_damaged_file_of_settings_counts_as_absent(tmp_path: Path) -> None:
    place = str(tmp_path)
    good = {"block_bytes": MiB, "queue_depth": 16, "backend": "threads", "threads": 4}
    measured = {"score_bytes_per_second": 1e9}

    def entry(**changes: Any) -> bytes:
        whole = {**good, "measured": measured, **changes}
        return json.dumps({"version": 1, "drives": {drive_key(place): whole}}).encode()

    file = settings_file()
    file.parent.mkdir(parents=True)
    file.write_bytes(entry())
    assert tuned(place) == TunedSettings(**good)  # type: ignore[arg-type]
    assert bandwidths([place]) == [1e9]
    deep = b"[" * 100_000
    damaged: list[bytes] = [
        *(b"", b"{", b"null", b"[]", b"\xff\xfe\x00", os.urandom(4096), bytes(4096)),
        *(deep, b'{"a":' * 100_000, b'{"version": 1, "drives": ' + deep, b"1" * 100_000, b"-1e999"),
        b'{"version": 1, "drives": {}}'.replace(b"{}", b"[]"),
        entry()[:-20],
        entry(block_bytes=10**400),
        *(
            entry(**{name: value})
            for name in good
            for value in (None, True, [], {}, -1, 0, 2**80, 1e400, "", "x")
        ),
        *(entry(queue_depth=value) for value in (float("nan"), 16.0, 1 << 20, 5000)),
        *(entry(threads=value) for value in (4000, "4")),
        *(entry(block_bytes=value) for value in (4097, 1 << 31)),
    ]
    for content in damaged:
        file.write_bytes(content)
        found = tuned(place)
        if found is not None:  # a name of a backend may be any text: it is tried, and then as if absent
            assert found.backend in ("", "x")
        else:
            assert bandwidths([place]) is None
        with open_ring("test", place, "auto", None, None, 120.0, None) as ring:
            assert (ring.block_bytes, ring.queue_depth, ring.threads) == (MiB, 32, 4)
    for value in (0, -1, True, "fast", float("nan"), float("inf"), 10**400, 1e-300, None, [1]):
        file.write_bytes(entry(measured={"score_bytes_per_second": value}))
        assert bandwidths([place]) is None
    file.write_bytes(entry(measured=[]))
    assert bandwidths([place]) is None

    nested = entry(measured={"a": "DEEP"}).replace(b'"DEEP"', b"[" * 800 + b"]" * 800)
    for content in (*damaged, nested):  # and a new result replaces all of it
        file.write_bytes(content)
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]
        assert tuned(place) == TunedSettings(**good)  # type: ignore[arg-type]
    file.unlink()
    os.mkfifo(file)
    assert tuned(place) is None
    file.unlink()
    with open(file, "wb") as huge:
        huge.truncate(1 << 40)
    assert tuned(place) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert tuned(place) is None
    file.unlink()
    file.mkdir()
    assert tuned(place) is None
    with pytest.raises(DirectoryError, match="cannot be kept"):
        remember(place, TunedSettings(**good), measured)  # type: ignore[arg-type]


@pytest.mark.root
def test_tune_prints_what_it_may_not_keep() -> None:
    need_root()
    # Once as root, so that everything is imported: this Python may be where only root can read.
    as_nobody = (
        "import contextlib, io, os, sys\n"
        "from infinity.cli.main import run\n"
        "drive, ours, theirs = sys.argv[1:]\n"
        "tune = ['tune', drive, '--seconds', '1']\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    run([*tune, '--no-store'])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "os.environ['XDG_CONFIG_HOME'] = theirs\n"
        "print(run([*tune, '--json']), flush=True)\n"
        "print(run(tune), flush=True)\n"
        "os.environ['XDG_CONFIG_HOME'] = ours\n"  # the cure
        "print(run([*tune, '--json']), flush=True)\n"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        drive, ours, theirs = (os.path.join(home, name) for name in ("drive", "ours", "theirs"))
        for place, mode in ((drive, 0o777), (ours, 0o777), (theirs, 0o755)):
            os.mkdir(place)
            os.chmod(place, mode)
        done = python("-c", as_nobody, drive, ours, theirs)
        assert done.returncode == 0, done
        assert "Traceback" not in done.stderr
        refused, code, *person, kept, last = done.stdout.splitlines()
        result = json.loads(refused)
        assert result["stored"] is None
        assert "engine:" in result["yaml"]
        assert (code, last) == ("1", "0")
        shown = "\n".join(person)
        assert "of the best" in shown
        assert f'engine:\n  nvme:\n    - "{drive}"' in shown
        assert shown.endswith("\n1")
        assert done.stderr.count("Permission denied") == 2
        assert "to change: set XDG_CONFIG_HOME to a writable directory" in done.stderr
        assert os.listdir(theirs) == []
        assert json.loads(kept)["stored"] == os.path.join(ours, "infinity", "tuned.json")


# ---- terminals without UTF-8 ----


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_no_terminal_is_too_plain(env: dict[str, str], text: str, tmp_path: Path) -> None:
    drive = tmp_path / "größe-大"
    drive.mkdir()
    killed(str(drive))
    trace = "DRIVE/t.json"
    commands = [
        ["doctor", "DRIVE"],
        ["clean", "DRIVE"],
        ["tune", "DRIVE", "--seconds", "1"],
        ["plan", *words(text, "DRIVE")],
        ["train", *words(text, "DRIVE", "--steps", "2", "--sample-tokens", "3", "--trace", trace)],
        ["trace", trace],
        ["train", *words("DRIVE/nothing", "DRIVE")],
    ]
    code = (
        "import json, sys\n"
        "from infinity.cli.ending import print_anything\n"
        "from infinity.cli.main import run\n"
        "print_anything()\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    code = run([word.replace('DRIVE', sys.argv[2]) for word in command])\n"
        "    print('<', code, '>', flush=True)\n"
    )
    done = python("-c", code, json.dumps(commands), str(drive), env=env, text=False)
    shown, err = done.stdout.decode("latin-1"), done.stderr.decode("latin-1")
    assert done.returncode == 0, err
    for name in ("Traceback", "UnicodeEncodeError", "Logging error"):
        assert name not in err + shown
    assert [int(line[2:-2]) for line in shown.splitlines() if line.startswith("< ")] == [0] * 6 + [2]
    assert "MiB x " in shown
    assert "×".encode() not in done.stdout
    done = python("-m", "infinity", "doctor", str(drive), env=env, text=False)
    assert b"Traceback" not in done.stderr
    assert b"free: " in done.stdout


# ---- what a command is told ----


def test_no_name_is_no_data(text: str, nvme: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(text, nvme, "--steps", "1")
    for option, cure in (
        ("--data", "name one with --data, or leave --data out"),
        ("--json-log", "name a file with --json-log, or leave it out"),
        ("--trace", "name a file with --trace, or leave it out"),
        ("--nvme", "--nvme DIR"),
    ):
        assert run(["train", *command, option, ""]) == 2
        assert f"to change: {cure}" in capsys.readouterr().err
    assert os.listdir(nvme) == []


def test_cures_are_in_the_words_of_who_asked(
    text: str, nvme: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(optimizer_state="nvme")
    assert raised.value.cure == 'nvme="/path/on/a/drive", or optimizer_state="host"'
    small = ["--layers", "1", "--width", "64", "--heads", "2", "--device", "cpu", "--data", text]
    small += ["--steps", "1", "--batch", "1", "--sequence", "8", "--sample-tokens", "0"]
    command = ["train", *small, "--optimizer-state", "nvme"]
    assert run([*command, "--json"]) == 2
    shown = capsys.readouterr()
    cure = json.loads(shown.out)["error"]["cure"]
    assert "--nvme DIR" in cure
    assert "nvme=" not in cure
    assert f"to change: {cure}" in shown.err
    assert run([*command, "--nvme", nvme]) == 0
    assert run([*command, "--optimizer-state", "host"]) == 0
    capsys.readouterr()
    assert run([*command, "--nvme", nvme, "--activation-memory", "1MiB"]) == 2
    assert "to change: --activations host, or leave --activation-memory out" in capsys.readouterr().err
    assert run([*command, "--nvme", f"{nvme}/missing"]) == 2
    assert "nvme=" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('nvme="/path/on/a/drive", or parameters="host"', "--nvme DIR, or --parameters host"),
        ("name another first in nvme=", "name another first in --nvme DIR"),
        ("make /a/host_memory, or correct the setting nvme", "make /a/host_memory, or correct --nvme"),
        ('gradients={"host": 0.3, "nvme": 0.7}', "--gradients host:0.3,nvme:0.7"),
        ('units=["Block"]', "--unit Block"),
        ("raise host_memory, or lower chunk_elements", "raise --host-memory, or lower --chunk-elements"),
        ("place parameters elsewhere", "place parameters elsewhere"),
        ("nvme=None", "no --nvme"),
    ],
)
def test_settings_are_said_as_options(text: str, said: str) -> None:
    assert in_options(text) == said
