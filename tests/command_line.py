"""Child processes, runs of the command line among them, and drives of their own."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infinity.core.sizes import MiB

from . import children
from .cgroup import unavailable

ROOT = Path(__file__).parents[1]


TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))


@pytest.fixture
def own_environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    for name in ("INFINITY_AIO", "INFINITY_ISA"):
        monkeypatch.delenv(name, raising=False)


def need_root() -> None:
    if os.geteuid() != 0:
        unavailable("needs root")


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[str]:
    """Mount at a place of its own; unmount whatever happens, also where this process is killed."""
    need_root()
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            ["mount", *arguments, place], capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            unavailable(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
        # It reads until this process closes the pipe, or ends.
        unmounts = ["sh", "-c", 'read nothing; umount -l "$0"', place]
        with subprocess.Popen(unmounts, stdin=subprocess.PIPE, start_new_session=True) as waiting:
            try:
                yield place
            finally:
                waiting.communicate(timeout=30)
                assert waiting.returncode == 0


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
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    text: bool = True,
    cold: bool = False,
) -> subprocess.CompletedProcess[Any]:
    """Run a command line of this interpreter; see `children.py` for `cold`."""
    return children.run(
        [sys.executable, *arguments],
        text=text,
        timeout=timeout,
        cold=cold,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


@contextlib.contextmanager
def started(*arguments: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    with children.Child([sys.executable, "-u", *arguments], text=True, cwd=ROOT, **pipes) as child:
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


def old_arena(directory: str, nbytes: int = MiB) -> str:
    """Make what a killed run of an older version left; return its path."""
    path = Path(directory, "infinity", "rank0.arena")
    path.parent.mkdir(0o700)
    path.write_bytes(bytes(nbytes) + (b"infinity arena 1\n%d\n" % nbytes).ljust(4096, b"\0"))
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


def words(nvme: str, *more: str, width: int = 64) -> list[str]:
    """The options of `infinity plan` for a tiny model with everything on NVMe."""
    size = ["--layers", "2", "--width", str(width), "--heads", "2", "--batch", "2", "--sequence", "32"]
    engine = ["--device", "cpu", "--dtype", "fp32", "--chunk-elements", "65536", "--nvme", nvme]
    places = [f"--{kind}=nvme" for kind in ("parameters", "optimizer-state", "gradients")]
    budgets = ["--host-memory", "64MiB", "--device-memory", "32MiB"]
    return [*size, *engine, *places, *budgets, *more]
