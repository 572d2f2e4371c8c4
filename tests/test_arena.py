"""The arena: what it refuses, that nothing of it is left behind; and the layout inside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.core.errors import ConfigError, DirectoryError
from infinity.core.sizes import Tier
from infinity.planning.parts import Part
from infinity.storage import arena as arena_module
from infinity.storage.arena import Arena
from infinity.storage.folder import Folder
from infinity.storage.layout import Layout

from .command_line import mounted, small_drive, started, wait_for_line
from .small_store import need_backend

MIB = 1 << 20


def in_child(work: Callable[[], None], timeout: int = 20) -> None:
    """Run `work` in a forked child; fail if it raises, or has not ended in time."""
    child = os.fork()
    if child == 0:
        signal.alarm(timeout)
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def without_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse O_TMPFILE, as NFS and FUSE do."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def check_arena(place: str) -> None:
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


def test_the_file_is_ours_alone_without_a_name_preallocated_and_zero(tmp_path: Path) -> None:
    check_arena(str(tmp_path))


@pytest.mark.usefixtures("without_tmpfile")
def test_without_o_tmpfile_the_file_loses_its_name_at_once(tmp_path: Path) -> None:
    check_arena(str(tmp_path))


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


def test_arenas_of_one_directory_know_nothing_of_each_other(tmp_path: Path) -> None:
    """Ranks, models of one process, and other runs may share a directory."""
    arenas = [Arena(str(tmp_path), MIB) for _ in range(3)]
    for number, arena in enumerate(arenas):
        os.pwrite(arena.file.plain_fd, bytes([number]) * 4096, 0)
    for number, arena in enumerate(arenas):
        assert os.pread(arena.file.plain_fd, 4096, 0) == bytes([number]) * 4096
        arena.close()


def test_a_directory_that_is_removed_meanwhile_takes_nothing_along(tmp_path: Path) -> None:
    place = tmp_path / "drive"
    place.mkdir()
    arena = Arena(str(place), MIB)
    place.rmdir()
    os.pwrite(arena.file.plain_fd, b"mine", 0)
    assert os.pread(arena.file.plain_fd, 4, 0) == b"mine"
    arena.close()


@pytest.mark.parametrize(
    ("make", "message", "number"),
    [
        (lambda p: None, "is missing", errno.ENOENT),
        (lambda p: p.write_text("x"), "is not a directory", errno.ENOTDIR),
    ],
)
def test_missing_or_no_directory(
    tmp_path: Path, make: Callable[[Path], object], message: str, number: int
) -> None:
    place = tmp_path / "drive"
    make(place)
    with pytest.raises(DirectoryError, match=message) as raised:
        Arena(str(place), MIB)
    assert (raised.value.errno, raised.value.path) == (number, str(place))
    assert str(place) in str(raised.value)
    assert "to change: " in str(raised.value)
    assert isinstance(raised.value, OSError)


def test_below_a_file_cannot_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DirectoryError, match="a file in the place of a directory above it") as raised:
        Arena(str(tmp_path / "file" / "drive"), MIB)
    assert raised.value.errno == errno.ENOTDIR


def test_too_large_is_refused_with_both_figures_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> int:
        raise AssertionError("a file was made")

    monkeypatch.setattr(arena_module, "nameless_file", never)
    with pytest.raises(DirectoryError, match="not enough free space") as raised:
        Arena(str(tmp_path), 1 << 60)
    assert str(1 << 60) in str(raised.value.expected)
    assert "bytes) free" in str(raised.value.found)
    assert raised.value.errno == errno.ENOSPC


def test_space_that_vanishes_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(arena_module, "_fallocate", lambda fd, nbytes: errno.ENOSPC)
    with pytest.raises(DirectoryError, match="not enough free space"):
        Arena(str(tmp_path), MIB)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.root
def test_a_small_full_file_system(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=1m", "none") as place:
        with pytest.raises(DirectoryError, match="not enough free space"):
            Arena(place, 2 * MIB)
        first = Arena(place, 600 * 1024)
        with pytest.raises(DirectoryError, match="not enough free space"):
            Arena(place, 600 * 1024)
        first.close()
        Arena(place, 900 * 1024).close()


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
    with files_of(64 * 1024):
        with pytest.raises(DirectoryError, match="cannot hold a file of this size") as caught:
            Arena(str(tmp_path), MIB)
        with (
            pytest.raises(DirectoryError, match="cannot write") as of_folder,
            Folder(str(tmp_path / "export")) as export,
        ):
            export.write("config.json", "x" * MIB)
    for error in (caught.value, of_folder.value):
        assert error.errno == errno.EFBIG
        assert "ulimit -f unlimited" in str(error.cure)
    assert list(tmp_path.iterdir()) == []
    Arena(str(tmp_path), MIB).close()  # the cure
    with Folder(str(tmp_path / "export")) as export:
        export.write("config.json", "x" * MIB)
        export.commit()


@contextlib.contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """Have the system refuse files of more than `nbytes`: `ulimit -f`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.root
def test_read_only_file_system() -> None:
    with mounted("-t", "tmpfs", "-o", "size=4m", "none") as place:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=20)
        with pytest.raises(DirectoryError, match="is read-only") as raised:
            Arena(place, MIB)
        assert raised.value.errno == errno.EROFS


def test_no_permission() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)

        def attempt() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)
            try:
                Arena(place, MIB)
            except DirectoryError as error:
                if "does not let this user write" not in str(error):
                    raise
            else:
                raise AssertionError("was allowed")

        in_child(attempt)
        os.chmod(place, 0o755)


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


def test_a_child_closes_its_descriptors(tmp_path: Path) -> None:
    """Else a child that outlives the parent, such as a data loader's worker, would keep the space."""
    arena = Arena(str(tmp_path), MIB)
    numbers = arena.fd, arena.file.plain_fd

    def check() -> None:
        for fd in numbers:
            try:
                os.fstat(fd)
            except OSError:
                continue
            raise AssertionError("a descriptor is still open")
        arena.close()

    in_child(check)
    assert os.pread(arena.file.plain_fd, 1, 0) == b"\0"
    arena.close()


def test_a_file_system_without_direct_io_works_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def no_direct(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    with pytest.warns(UserWarning, match="no direct I/O") as caught:
        arena = Arena(str(tmp_path), MIB)
    assert len(caught) == 1
    assert not arena.direct
    assert os.pwrite(arena.fd, b"x", 1) == 1
    arena.close()


@pytest.mark.root
def test_ramfs_has_no_direct_io() -> None:
    with mounted("-t", "ramfs", "-o", "mode=755", "none") as place:
        with pytest.warns(UserWarning, match="no direct I/O"):
            arena = Arena(place, MIB)
        assert not arena.direct
        arena.close()


def test_alignment_that_the_format_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "dio_offset_align", lambda fd: 65536)
    with pytest.raises(DirectoryError, match="alignment"):
        Arena(str(tmp_path), MIB)
    monkeypatch.setattr(arena_module, "dio_offset_align", lambda fd: 0)
    with pytest.warns(UserWarning, match="no direct I/O"):
        arena = Arena(str(tmp_path), MIB)
    assert not arena.direct
    assert os.pwrite(arena.fd, b"x", 1) == 1
    arena.close()


def test_a_file_system_without_fallocate_works_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_fallocate", lambda fd, nbytes: errno.EOPNOTSUPP)
    with pytest.warns(UserWarning, match="cannot reserve space"):
        arena = Arena(str(tmp_path), MIB)
    assert os.fstat(arena.fd).st_size == MIB
    arena.close()


# ---------------------------------------------------------------------------------- layout

PAGE = 4096


def part(sections: list[int], *tiers: Tier) -> Part:
    return Part(tuple(s * PAGE for s in sections), tiers)


slots = st.lists(st.sampled_from([Tier.HOST, Tier.NVME, Tier.NVME, Tier.DEVICE]), min_size=1, max_size=2)


def parts(least: int, most: int) -> st.SearchStrategy[Part]:
    sections = st.lists(st.integers(1, 5), min_size=least, max_size=most)
    return st.builds(lambda sizes, tiers: part(sizes, *tiers), sections, slots)


chunk_specs = st.fixed_dictionaries(
    {"copy": parts(1, 1)}, optional={"state": parts(2, 3), "gradient": parts(1, 1)}
)


@settings(max_examples=40, deadline=None)
@given(
    chunks=st.lists(chunk_specs, max_size=15),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
)
def test_extents_are_aligned_disjoint_complete_and_deterministic(
    chunks: list[dict[str, Part]], weights: list[float]
) -> None:
    layout = Layout(chunks, len(weights), weights=weights)
    again = Layout(chunks, len(weights), weights=weights)
    taken: list[list[tuple[int, int]]] = [[] for _ in weights]
    host = 0
    for number, chunk in enumerate(chunks):
        places = set()
        for name, spec in chunk.items():
            for slot, tier in enumerate(spec.tiers):
                host += spec.nbytes * (tier is Tier.HOST)
                if tier is not Tier.NVME:
                    continue
                extent = layout.extent(number, name, slot)
                assert extent == again.extent(number, name, slot)
                assert extent.nbytes == spec.nbytes
                places.add(extent.directory)
                at = extent.offset
                for index, size in enumerate(spec.sections):
                    piece = layout.extent(number, name, slot, range(index, index + 1))
                    assert piece == (extent.directory, at, size)
                    assert piece.offset % PAGE == 0
                    taken[extent.directory].append((at, at + size))
                    at += size
        assert len(places) <= 1  # a chunk lies in one directory
    assert layout.host_nbytes == host
    for directory, ranges in enumerate(taken):
        ranges.sort()
        position = 0
        for begin, end in ranges:  # neither overlap nor gap
            assert begin == position
            position = end
        assert position == layout.arena_nbytes[directory]


def test_neighbouring_copies_are_contiguous_and_regions_follow_each_other() -> None:
    chunk = {
        "state": part([4, 4, 4], Tier.NVME, Tier.NVME),
        "copy": part([2], Tier.NVME, Tier.NVME),
        "gradient": part([4], Tier.NVME),
    }
    frozen = {"copy": part([2], Tier.NVME)}
    layout = Layout([chunk, frozen, chunk], 1)
    copies = [layout.extent(c, "copy").offset // PAGE for c in range(3)]
    assert copies == [0, 2, 4]
    assert [layout.extent(c, "copy", 1).offset // PAGE for c in (0, 2)] == [6, 8]
    assert [layout.extent(c, "state").offset // PAGE for c in (0, 2)] == [10, 22]
    assert [layout.extent(c, "state", 1).offset // PAGE for c in (0, 2)] == [34, 46]
    assert [layout.extent(c, "gradient").offset // PAGE for c in (0, 2)] == [58, 62]
    assert layout.arena_nbytes == [66 * PAGE]


def test_every_stretch_of_chunks_keeps_the_directories_busy_by_weight() -> None:
    chunks = [{"state": part([3], Tier.NVME)} for _ in range(120)]
    layout = Layout(chunks, 3, weights=[1, 2, 3])
    for begin in range(0, 120, 12):
        counts = [list(layout.directory[begin : begin + 12]).count(d) for d in range(3)]
        assert counts == [2, 4, 6]


@pytest.mark.parametrize(
    ("chunks", "directories", "weights"),
    [
        ([{"copy": Part((4097,), (Tier.NVME,))}], 1, None),
        ([{"copy": Part((), (Tier.NVME,))}], 1, None),
        ([{"copy": Part((4096,), ())}], 1, None),
        ([{"copy": Part((4096,), (Tier.NVME,) * 3)}], 1, None),
        ([{"copy": Part((4096,), (Tier.NVME,))}], 0, None),
        ([], 2, [1.0]),
        ([], 2, [1.0, 0.0]),
        ([], 1, [float("nan")]),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(
    chunks: list[dict[str, Part]], directories: int, weights: list[float] | None
) -> None:
    with pytest.raises(ConfigError):
        Layout(chunks, directories, weights=weights)


def test_open_arenas_do_not_outlive_a_quick_succession(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Arena(str(tmp_path), 64 * MIB).close()
    assert len(os.listdir("/proc/self/fd")) == before
