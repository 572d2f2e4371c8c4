"""What killed runs leave, and `infinity clean`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import infinity
from infinity.cli.main import run
from infinity.core.config import Config
from infinity.core.sizes import MiB
from infinity.storage.arena import Arena
from infinity.storage.leftovers import arenas

from .command_line import killed, python, small_drive, started

pytestmark = pytest.mark.usefixtures("own_environment")


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
        assert not os.path.exists(os.path.join(drive, "infinity"))


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
    assert run(["clean", ""]) == 2  # an unset variable is not the current directory
    assert "'.' is this one" in capsys.readouterr().err


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


def test_what_a_run_left_that_was_killed_as_it_began_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "infinity"
    folder.mkdir(0o700)
    (folder / "rank0.arena").touch()  # made, and nothing more
    assert [found.state for found in arenas(str(tmp_path))] == ["dead"]
    Arena(str(tmp_path), MiB).close()
