"""Files in the way that no run made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.cli.main import run
from infinity.core.errors import DirectoryError
from infinity.core.sizes import MiB
from infinity.storage.arena import Arena
from infinity.storage.leftovers import MARK_NBYTES, mark

from .command_line import findings, words
from .planned import planned

pytestmark = pytest.mark.usefixtures("own_environment")


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
    with pytest.raises(DirectoryError, match="another file in the place of the arena") as raised:
        Arena(str(tmp_path), MiB)
    assert raised.value.cure == f"move {path} away, or name another directory"
    if kind == "dangling link":
        assert not victim.exists()
    else:
        assert path.read_bytes() == content
    path.rename(tmp_path / "away")  # the cure
    Arena(str(tmp_path), MiB).close()


def test_a_run_refuses_what_is_not_ours_and_the_cure_works(
    nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(nvme, "infinity", "rank0.arena")
    path.parent.mkdir(0o700)
    path.write_bytes(b"weights" * 100_000)
    assert "no run can begin" in findings(capsys, nvme)[f"{nvme}: leftover"]["found"]
    assert run(["plan", *words(nvme)]) == 2
    shown = capsys.readouterr().err
    assert f"to change: move {path} away" in shown
    assert path.read_bytes() == b"weights" * 100_000
    path.rename(tmp_path / "away")
    with planned(*words(nvme)) as made:
        made.step()


@pytest.mark.parametrize("kind", ["hard link", "folder is a file", "folder is a link"])
def test_what_is_in_the_way_is_found_before_anything_is_built(
    kind: str,
    nvme: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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
    command = words(nvme)
    assert run(["plan", *command]) == 2
    assert f"to change: move {path} away" in capsys.readouterr().err
    elsewhere = ["--parameters", "host", "--optimizer-state", "host", "--gradients", "host"]
    assert run(["plan", *command, *elsewhere, "--host-memory", "1GiB"]) == 0  # it has no arena
    path.rename(tmp_path / "away")
    assert run(["plan", *command]) == 0
    assert not folder.exists() or os.listdir(folder) == []  # a plan makes nothing
    with planned(*command) as made:
        made.step()
