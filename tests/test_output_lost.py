"""Runs whose output dies: a reader that ends, a log on a full file system, descriptors that are closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.storage.checkpoints import find

from .command_line import ROOT, mounted, started, wait_for_line, words

pytestmark = pytest.mark.usefixtures("own_environment")

STEPS = 12


def trained(text: str, nvme: str, tmp_path: Path) -> tuple[list[str], Path, str]:
    """The words of a run, its log and its directory of checkpoints."""
    log, root = tmp_path / "log.jsonl", str(tmp_path / "out")
    more = ["--steps", str(STEPS), "--output", root, "--json-log", str(log)]
    return ["-m", "infinity", "train", *words(text, nvme, *more)], log, root


def assert_trained(log: Path, root: str, lost: set[str]) -> None:
    """All steps are saved, and in the log, which says what was lost."""
    assert find(root).step == STEPS
    steps = [json.loads(line) for line in log.open()]
    assert [s["step"] for s in steps] == [*range(1, STEPS + 1)]
    assert {name for s in steps for name in s.get("output_lost", {})} == lost


def test_a_reader_that_ends_costs_nothing_that_was_trained(text: str, nvme: str, tmp_path: Path) -> None:
    """`infinity train | head -4`."""
    command, log, root = trained(text, nvme, tmp_path)
    with started(*command) as child:
        wait_for_line(child, "step 1/")
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(100) == 1
        assert child.stderr is not None
        err = child.stderr.read()
    assert_trained(log, root, {"stdout"})
    assert "stdout cannot be written any more (Broken pipe): the run goes on without it" in err
    assert f"What was trained is in {root}/step-{STEPS}" in err
    assert "Traceback" not in err


@pytest.mark.integration
def test_both_outputs_may_end(text: str, nvme: str, tmp_path: Path) -> None:
    command, log, root = trained(text, nvme, tmp_path)
    with started(*command, stderr=subprocess.STDOUT) as child:
        wait_for_line(child, "step 1/")
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(100) == 1
    assert_trained(log, root, {"stdout", "stderr"})


@pytest.mark.first
@pytest.mark.root
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_output_without_room_costs_nothing_that_was_trained(
    name: str, text: str, nvme: str, tmp_path: Path
) -> None:
    """As JSON with its words on stderr, or the other way round."""
    command, log, root = trained(text, nvme, tmp_path)
    as_json = ["--json"] if name == "stderr" else []
    with mounted("-t", "tmpfs", "-o", "size=4k", "none") as place:
        with open(f"{place}/log", "wb") as full:
            full.write(bytes(3600))
            full.flush()
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, name: full}
            with started(*command, *as_json, **streams) as child:
                out, err = child.communicate(timeout=100)
        assert os.path.getsize(f"{place}/log") == 4096
    assert child.returncode == 1
    assert_trained(log, root, {name})
    if as_json:
        result = json.loads(out)
        assert [e["what"] for e in result["incomplete"]] == ["stderr of this run is not complete"]
        assert result["incomplete"][0]["found"] == "No space left on device"
    else:
        assert "stdout cannot be written any more (No space left on device)" in err
        assert f"What was trained is in {root}/step-{STEPS}" in err


def test_the_result_of_a_run_that_cannot_be_written(text: str, nvme: str, tmp_path: Path) -> None:
    command, _, root = trained(text, nvme, tmp_path)
    with open("/dev/full", "wb") as full, started(*command, "--json", stdout=full) as child:
        _, err = child.communicate(timeout=100)
    assert child.returncode == 1, err
    assert find(root).step == STEPS
    assert "Traceback" not in err


def test_closed_descriptors_belong_to_nobody(text: str, nvme: str, tmp_path: Path) -> None:
    """Else an arena has the number of stderr, where libraries write."""
    command, log, root = trained(text, nvme, tmp_path)
    code = (
        "import os, sys\n"
        "from infinity.__main__ import main\n"
        "from infinity.storage import arena\n"
        "made = arena.Arena.__init__\n"
        "def look(self, *args, **more):\n"
        "    made(self, *args, **more)\n"
        "    seen = ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in '012')\n"
        "    open(os.environ['SEEN'], 'a').write(seen)\n"
        "arena.Arena.__init__ = look\n"
        "main()\n"
    )
    seen = tmp_path / "seen"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, *command[2:]],
        timeout=100,
        cwd=ROOT,
        check=False,
        env={**os.environ, "SEEN": str(seen)},
    )
    assert done.returncode == 0
    assert_trained(log, root, set())
    assert seen.read_text() == "/dev/null /dev/null /dev/null"


@pytest.mark.first
@pytest.mark.parametrize("save_every", [2, 1000])
def test_an_error_after_some_steps_says_what_is_lost(
    save_every: int, text: str, nvme: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "out")
    more = ["--steps", "5000", "--save-every", str(save_every), "--output", root]
    with started("-m", "infinity", "train", *words(text, nvme, *more)) as child:
        wait_for_line(child, "step 5/")
        os.truncate(text, 1)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 2, err
    assert "steps are lost. " in err or (save_every == 2 and "The newest whole" in err)
    if save_every == 2:
        assert f"The newest whole checkpoint is {find(root).path}" in err
        assert f"`infinity train --resume --output {root}` goes on from it." in err
    else:
        assert "There is no checkpoint." in err


def test_a_reader_of_a_plan_that_ends(text: str, nvme: str) -> None:
    """What a shell reports for it; exit code 1 says that a run does not fit."""
    command = [sys.executable, "-m", "infinity", "plan", *words(text, nvme)]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100, check=False, cwd=ROOT
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
