"""The arena: what it refuses, and that nothing of it is left behind."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from infinity.core.errors import DirectoryError
from infinity.storage import arena as arena_module
from infinity.storage.arena import Arena
from infinity.storage.folder import Folder

from .command_line import mounted, python, small_drive, started, wait_for_line
from .small_store import need_backend

MIB = 1 << 20


@pytest.mark.parametrize("tmpfile", [True, False])
def test_the_file_is_ours_alone_without_a_name_preallocated_and_zero(
    tmp_path: Path, tmpfile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and FUSE refuse O_TMPFILE; the file loses its name at once there."""
    real, place = os.open, str(tmp_path)

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    if not tmpfile:
        monkeypatch.setattr(os, "open", refuse)
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(place, 3 * MIB + 1)
    found = os.fstat(arena.fd)
    assert arena.nbytes == found.st_size == 3 * MIB + 4096
    assert found.st_blocks * 512 >= arena.nbytes
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(arena.fd)
    assert os.pread(arena.file.plain_fd, arena.nbytes, 0) == bytes(arena.nbytes)
    page = mmap.mmap(-1, 4096)
    page.write(b"mine")
    os.pwrite(arena.fd, page, 4096)
    assert os.pread(arena.file.plain_fd, 4, 4096) == b"mine"
    assert os.listdir(place) == []
    arena.close()
    assert arena.fd == -1
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.root
def test_an_overlay_and_memory_hold_arenas(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    with mounted("-t", "tmpfs", "-o", "size=8m", "none") as memory:
        for name in ("upper", "work"):
            os.mkdir(os.path.join(memory, name))
        options = f"lowerdir={tmp_path / 'lower'},upperdir={memory}/upper,workdir={memory}/work"
        with mounted("-t", "overlay", "-o", options, "overlay") as place:
            Arena(place, MIB).close()
            assert os.listdir(place) == []
        Arena(memory, MIB).close()


@pytest.mark.parametrize(
    ("name", "message", "number"),
    [
        ("missing", "is missing", errno.ENOENT),
        ("file", "is not a directory", errno.ENOTDIR),
        ("file/drive", "a file in the place of a directory above it", errno.ENOTDIR),
    ],
)
def test_what_is_no_directory_is_named(tmp_path: Path, name: str, message: str, number: int) -> None:
    (tmp_path / "file").write_text("x")
    place = str(tmp_path / name)
    with pytest.raises(DirectoryError, match=message) as raised:
        Arena(place, MIB)
    assert (raised.value.errno, raised.value.path) == (number, place)
    assert place in str(raised.value)
    assert "to change: " in str(raised.value)
    assert isinstance(raised.value, OSError)


@pytest.mark.parametrize("opens", [0, 1])
def test_a_limit_on_descriptors_is_named(tmp_path: Path, opens: int) -> None:
    """Whether it is reached by the arena or by the second descriptor of it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + opens, before[1]))
    try:
        with pytest.raises(DirectoryError, match="ulimit -n") as raised:
            Arena(str(tmp_path), MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised.value.errno == errno.EMFILE
    Arena(str(tmp_path), MIB).close()  # the cure


def test_a_limit_on_the_size_of_files_says_how_to_raise_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))  # ulimit -f
    try:
        with pytest.raises(DirectoryError, match="cannot hold a file of this size") as caught:
            Arena(str(tmp_path), MIB)
        with (
            pytest.raises(DirectoryError, match="cannot write") as of_folder,
            Folder(str(tmp_path / "export")) as export,
        ):
            export.write("config.json", "x" * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for error in (caught.value, of_folder.value):
        assert error.errno == errno.EFBIG
        assert "ulimit -f unlimited" in str(error.cure)
    assert list(tmp_path.iterdir()) == []


def test_no_permission() -> None:
    script = """
import os, sys
from infinity.storage.arena import Arena
if os.geteuid() == 0:
    os.setuid(65534)
try:
    Arena(sys.argv[1], 1 << 20)
except OSError as error:
    print(type(error).__name__, error)
"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        done = python("-c", script, place)
        os.chmod(place, 0o755)
    assert done.returncode == 0
    assert done.stdout.startswith("DirectoryError")
    assert "does not let this user write" in done.stdout


_HOLDER = """
import os, sys, time
from infinity.storage.arena import Arena
arena = Arena(sys.argv[1], 8 << 20)
if sys.argv[2]:  # the kernel has the file registered with the ring, too
    from infinity.hardware.aio import USUAL, open_ring
    ring = open_ring("held", sys.argv[1], USUAL._replace(backend=sys.argv[2]))
    ring.register_file(arena.file)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.root
@pytest.mark.parametrize("backend", ["", "uring"])
def test_a_run_that_is_killed_leaves_nothing(tmp_path: Path, backend: str) -> None:
    if backend:
        need_backend(backend, tmp_path)
    with small_drive(tmp_path, 16 * MIB) as drive:
        with started("-c", _HOLDER, drive, backend) as process:
            wait_for_line(process, "ready")
            with pytest.raises(DirectoryError, match="not enough free space"):
                Arena(drive, 8 * MIB)
            process.kill()
            process.wait(30)
        assert os.listdir(drive) == ["lost+found"]
        until = time.monotonic() + 20  # io_uring lets go of the files of a killed process a moment later
        while (system := os.statvfs(drive)).f_bavail * system.f_frsize < 8 * MIB and time.monotonic() < until:
            time.sleep(0.02)
        Arena(drive, 8 * MIB).close()


@pytest.mark.root
def test_ramfs_has_no_direct_io() -> None:
    with mounted("-t", "ramfs", "-o", "mode=755", "none") as place:
        with (
            pytest.warns(UserWarning, match="no direct I/O") as caught,
            pytest.warns(UserWarning, match="cannot reserve space"),
        ):
            arena = Arena(place, MIB)
        assert len(caught) == 1
        assert not arena.direct
        assert os.pwrite(arena.fd, b"x", 1) == 1
        arena.close()


def test_alignment_that_the_format_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "dio_offset_align", lambda fd: 65536)
    with pytest.raises(DirectoryError, match="alignment"):
        Arena(str(tmp_path), MIB)
