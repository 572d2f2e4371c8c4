"""The unit of systemd and the batch script of SLURM in examples/, as they stand."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.storage.checkpoints import find

from .command_line import ROOT, words

pytestmark = pytest.mark.usefixtures("own_environment")

SCRIPT, BATCH, UNIT = (
    (ROOT / "examples" / f"train.{kind}").read_text(encoding="utf-8") for kind in ("sh", "sbatch", "service")
)
#: `srun` starts its step; SLURM then signals what it has started. `scontrol` is only noted.
STUBS = {
    "infinity": f'echo $$ > pids\nexec {sys.executable} -u -m infinity "$@"\n',
    "srun": '"$@"\n',
    "scontrol": 'echo "$@" >> requeued\n',
}


def program(path: Path, text: str) -> Path:
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts run, with the programs that they start."""
    folder = tmp_path / "place"
    (folder / "bin").mkdir(parents=True)
    for name, text in STUBS.items():
        program(folder / "bin" / name, text)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    return folder


def ended(place: Path, *command: str, to: str) -> tuple[int, str]:
    """Start a script; when the run has made three steps, send SIGTERM to the script, to the run, or to both.
    Return the exit code and what was said."""
    with open(place / "said", "w+") as said:
        child = subprocess.Popen(command, cwd=place, stdout=said, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 100
            while "step 3/" not in (text := (place / "said").read_text()):
                assert child.poll() is None, text
                assert time.monotonic() < until, text
                time.sleep(0.02)
            if to in ("script", "both"):
                child.send_signal(signal.SIGTERM)
            if to in ("run", "both"):
                os.kill(int((place / "pids").read_text()), signal.SIGTERM)
            code = child.wait(60)
        finally:
            child.kill()
            child.wait(30)
    return code, (place / "said").read_text()


def gone_on(place: Path, *command: str) -> str:
    """Start a script; return what it has said at its end."""
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.parametrize("to", ["run", "both"])
def test_a_job_saves_before_its_time_is_over_and_comes_again(
    to: str, place: Path, text: str, nvme: str
) -> None:
    """SLURM signals the steps, and of a job that it ends the script, too. That one outlives it."""
    command = [str(program(place / "train.sbatch", BATCH)), *words(text, nvme, "--steps", "60")]
    code, said = ended(place, *command, to=to)
    assert code == 75, said
    assert (place / "requeued").read_text() == "requeue 42\n"
    saved = find(str(place / "runs" / "42"))
    assert 3 <= saved.step < 60
    assert f"goes on from {saved.path}, after {saved.step} steps" in gone_on(place, *command)
    assert find(str(place / "runs" / "42")).step == 60
    assert (place / "requeued").read_text() == "requeue 42\n", "a job that is done is not requeued"


@pytest.mark.processes
def test_a_job_that_fails_is_not_requeued(place: Path, text: str, nvme: str) -> None:
    command = [str(program(place / "train.sbatch", BATCH)), *words(text, nvme, "--layers", "-1")]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert not (place / "requeued").exists()


@pytest.mark.later
@pytest.mark.processes
def test_a_log_of_a_run_that_left_no_checkpoint_is_in_nobodys_way(place: Path, text: str, nvme: str) -> None:
    options = words(text, nvme, "--steps", "1", "--json-log", "log.jsonl")
    died = [str(place / "bin" / "infinity"), "train", *options, "--no-save"]
    begun = [str(program(place / "train.sh", SCRIPT)), "run", *options]
    for command in (died, begun, begun):  # the last one finds the run at its end
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    assert "the run is at its end" in done.stderr
    assert find(str(place / "run")).step == 1


@pytest.mark.later
@pytest.mark.processes
def test_a_service_goes_on(place: Path, text: str, nvme: str) -> None:
    """The signal for the process that systemd has started is one for the run."""
    command = [str(program(place / "train.sh", SCRIPT)), "run", *words(text, nvme, "--steps", "60")]
    code, said = ended(place, *command, to="script")
    assert code == 75, said
    assert "goes on from " in gone_on(place, *command)
    assert find(str(place / "run")).step == 60


@pytest.mark.parametrize("text", [SCRIPT, BATCH], ids=["train.sh", "train.sbatch"])
def test_bash_takes_the_scripts(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and not os.environ.get("CI"), reason="needs systemd-analyze"
)
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program(tmp_path / "train.sh", SCRIPT)
    unit = tmp_path / "train.service"
    unit.write_text(UNIT.replace("/srv/train", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
