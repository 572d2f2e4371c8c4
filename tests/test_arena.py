"""The arena: what it refuses, who may hold it, what is left behind; and the layout inside it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from infinity.storage.leftovers import MARK_NBYTES, mark

from .command_line import mounted, need_root, python, started, wait_for_line

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


def test_the_file_is_ours_alone_preallocated_and_zero(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), 3 * MIB + 1, rank=2)
    found = os.stat(arena.path)
    assert arena.path == str(tmp_path / "infinity" / "rank2.arena")
    assert arena.nbytes == 3 * MIB + 4096
    assert found.st_size == arena.nbytes + MARK_NBYTES
    assert found.st_blocks * 512 >= arena.nbytes
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "infinity").st_mode) == 0o700
    assert not os.get_inheritable(arena.fd)
    assert Path(arena.path).read_bytes() == bytes(arena.nbytes) + mark(arena.nbytes)
    arena.close()
    assert not os.path.exists(arena.path)
    arena.close()


def test_ranks_share_a_directory(tmp_path: Path) -> None:
    arenas = [Arena(str(tmp_path), MIB, rank=r) for r in range(3)]
    assert len({a.path for a in arenas}) == 3
    for arena in arenas:
        arena.close()


def test_runs_that_end_remove_the_directory_and_others_that_begin_make_it_again(tmp_path: Path) -> None:
    """Two processes take and give back arenas side by side: each finds that the directory went."""
    code = (
        "import sys; from infinity.storage.arena import Arena\n"
        "for _ in range(400): Arena(sys.argv[1], 4096, rank=int(sys.argv[2])).close()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    runs = [subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True) for rank in "01"]
    try:
        for run in runs:
            _, said = run.communicate(timeout=120)
            assert run.returncode == 0, said
    finally:
        for run in runs:
            run.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_somebody_else_made_stays(tmp_path: Path) -> None:
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity").chmod(0o755)
    Arena(str(tmp_path), MIB).close()
    assert list((tmp_path / "infinity").iterdir()) == []
    (tmp_path / "infinity").chmod(0o700)
    (tmp_path / "infinity" / "note").touch()
    Arena(str(tmp_path), MIB).close()
    assert [each.name for each in (tmp_path / "infinity").iterdir()] == ["note"]


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
    assert raised.value.errno == number
    assert str(place) in str(raised.value)
    assert "to change: " in str(raised.value)
    assert isinstance(raised.value, OSError)


def test_below_a_file_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DirectoryError, match="a file in the place of a directory above it"):
        Arena(str(tmp_path / "file" / "drive"), MIB)


def test_too_large_is_refused_with_both_figures_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="not enough free space") as raised:
        Arena(str(tmp_path), 1 << 60)
    assert str((1 << 60) + MARK_NBYTES) in str(raised.value.expected)
    assert "bytes) free" in str(raised.value.found)
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_space_that_vanishes_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_fallocate", lambda fd, nbytes: errno.ENOSPC)
    with pytest.raises(DirectoryError, match="not enough free space"):
        Arena(str(tmp_path), MIB)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_small_full_file_system(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=1m", "none") as place:
        with pytest.raises(DirectoryError, match="not enough free space"):
            Arena(place, 2 * MIB)
        first = Arena(place, 600 * 1024)
        with pytest.raises(DirectoryError, match="not enough free space"):
            Arena(place, 600 * 1024, rank=1)
        assert os.listdir(os.path.join(place, "infinity")) == ["rank0.arena"]
        first.close()
        Arena(place, 900 * 1024, rank=1).close()


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
        for prepared in (False, True):
            if prepared:
                os.mkdir(os.path.join(place, "infinity"))
            subprocess.run(["mount", "-o", "remount,ro", place], check=True, timeout=20)
            with pytest.raises(DirectoryError, match="is read-only") as raised:
                Arena(place, MIB)
            assert raised.value.errno == errno.EROFS
            subprocess.run(["mount", "-o", "remount,rw", place], check=True, timeout=20)


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


@pytest.mark.root
def test_a_subdirectory_of_someone_else() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as place:
        os.mkdir(os.path.join(place, "infinity"))
        os.chown(os.path.join(place, "infinity"), 65534, 65534)
        with pytest.raises(DirectoryError, match="another user's directory"):
            Arena(place, MIB)


def test_a_symbolic_link_in_place_of_the_arena_or_its_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "infinity").mkdir(0o700)
    (tmp_path / "infinity" / "rank0.arena").symlink_to(victim)
    with pytest.raises(DirectoryError, match="a symbolic link"):
        Arena(str(tmp_path), MIB)
    assert victim.read_text() == "precious"

    other = tmp_path / "other"
    (other / "elsewhere").mkdir(parents=True)
    (other / "infinity").symlink_to(other / "elsewhere")
    with pytest.raises(DirectoryError, match="a symbolic link"):
        Arena(str(other), MIB)
    assert list((other / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_something_else_in_place_of_the_arena(tmp_path: Path, make: Callable[[str], None]) -> None:
    (tmp_path / "infinity").mkdir(0o755)
    make(str(tmp_path / "infinity" / "rank0.arena"))
    with pytest.raises(DirectoryError, match="something else"):
        Arena(str(tmp_path), MIB)
    assert stat.S_IMODE(os.stat(tmp_path / "infinity").st_mode) == 0o755  # whoever made it knows why


def test_a_file_in_place_of_the_subdirectory(tmp_path: Path) -> None:
    (tmp_path / "infinity").write_text("x")
    with pytest.raises(DirectoryError, match="something else"):
        Arena(str(tmp_path), MIB)


def test_a_second_run_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), MIB)
    os.pwrite(arena.fd, *_aligned_page(b"mine"))
    with pytest.raises(DirectoryError, match="in use by another run"):
        Arena(str(tmp_path), MIB)
    code = (
        "import sys\n"
        "from infinity.core.errors import DirectoryError\n"
        "from infinity.storage.arena import Arena\n"
        "try:\n    Arena(sys.argv[1], 4096)\n"
        "except DirectoryError as error:\n    print(error)\n"
    )
    other = python("-c", code, str(tmp_path), timeout=60)
    assert "in use by another run" in other.stdout, other
    assert Path(arena.path).read_bytes()[:4] == b"mine"
    arena.close()
    Arena(str(tmp_path), MIB).close()


def _aligned_page(text: bytes) -> tuple[object, int]:
    import mmap

    page = mmap.mmap(-1, 4096)
    page.write(text)
    return page, 0


def test_what_a_killed_run_left_is_emptied_and_reused(tmp_path: Path) -> None:
    code = (
        "import os, sys, mmap, time\n"
        "from infinity.storage.arena import Arena\n"
        "arena = Arena(sys.argv[1], 8 << 20)\n"
        "page = mmap.mmap(-1, 4096); page.write(b'stale')\n"
        "os.pwrite(arena.fd, page, 4096)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with started("-c", code, str(tmp_path)) as process:
        wait_for_line(process, "ready")
        with pytest.raises(DirectoryError, match="in use"):
            Arena(str(tmp_path), MIB)
    path = tmp_path / "infinity" / "rank0.arena"
    assert b"stale" in path.read_bytes()
    arena = Arena(str(tmp_path), MIB)
    assert path.read_bytes() == bytes(MIB) + mark(MIB)
    arena.close()


def test_the_space_of_a_stale_arena_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Arena(str(tmp_path), 2 * MIB)
    first._close_descriptors()  # as a kill would
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_blocks, f_frsize = 0, real.f_blocks, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(DirectoryError, match="not enough"):
        Arena(str(tmp_path), 3 * MIB)
    Arena(str(tmp_path), 2 * MIB).close()


def test_an_arena_that_was_unlinked_before_the_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "infinity" / "rank0.arena"
    real = arena_module.fcntl.flock
    removed: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if not removed:  # another run ends between our open and our lock
            removed.append(os.fstat(fd).st_ino)
            path.rename(tmp_path / "gone")
        real(fd, operation)

    monkeypatch.setattr(arena_module.fcntl, "flock", flock)
    arena = Arena(str(tmp_path), MIB)
    assert removed
    assert os.stat(path).st_ino == os.fstat(arena.fd).st_ino != removed[0]
    arena.close()


def test_a_child_closes_its_descriptors_and_unlinks_nothing(tmp_path: Path) -> None:
    arena = Arena(str(tmp_path), MIB)
    fd = arena.fd

    def check() -> None:
        try:
            os.fstat(fd)
        except OSError:
            arena.close()
        else:
            raise AssertionError("the descriptor is still open")

    in_child(check)
    assert os.path.exists(arena.path)
    # A child that outlives the parent's arena does not keep its lock.
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        arena.close()
        again = Arena(str(tmp_path), MIB)
        again.close()
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(child, 0)


def test_a_file_system_without_direct_io_works_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def no_direct(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
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
    monkeypatch.setattr(arena_module, "_direct_alignment", lambda fd: 65536)
    with pytest.raises(DirectoryError, match="alignment"):
        Arena(str(tmp_path), MIB)
    monkeypatch.setattr(arena_module, "_direct_alignment", lambda fd: 0)
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
    assert os.stat(arena.path).st_size == MIB + MARK_NBYTES
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
    start = time.monotonic()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        Arena(str(tmp_path), 64 * MIB).close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert time.monotonic() - start < 20


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DirectoryError, match="ulimit -f"):
            Arena(str(tmp_path), 8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
