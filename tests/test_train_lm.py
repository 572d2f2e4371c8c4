"""examples/train_lm.py and examples/generate.py as they stand, from text to text: what a user copies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.storage.checkpoints import find

from .command_line import ROOT, python
from .ranks import all_well, run_ranks

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.processes,
    pytest.mark.usefixtures("own_environment"),
]
SCRIPT, WRITES = (str(ROOT / "examples" / name) for name in ("train_lm.py", "generate.py"))
BATCH = (ROOT / "examples" / "train.sbatch").read_text(encoding="utf-8")
UNIT = (ROOT / "examples" / "train.service").read_text(encoding="utf-8")
ALONE = f"import runpy, torch\ntorch.set_num_threads(1)\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
IMPORTS = "transformers.models.llama.modeling_llama", "transformers.generation.utils"


def options(text: str, nvme: str, output: object, *more: str) -> list[str]:
    """Return the options of a run of a tiny model with everything on NVMe."""
    size = ["--preset", "1m", "--batch", "2", "--sequence", "32", "--sample", "4", "--text", text]
    settings = ["device=cpu", "dtype=fp32", "gradients=nvme", "host_memory=64MiB", "device_memory=16MiB"]
    return [*size, "--nvme", nvme, "--output", str(output), *more, "--set", *settings, "threads=1"]


def trained(*arguments: str) -> str:
    """Run the script to its end; return what it said."""
    return all_well(run_ranks(1, ALONE, *arguments, seconds=150, imports=IMPORTS))[0]


def test_from_text_to_text(text: str, nvme: str, tmp_path: Path) -> None:
    """The loss falls, bytes are within what was planned, a second run has nothing left to do, and the model
    writes."""
    given = options(text, nvme, tmp_path / "out", "--steps", "31", "--lr", "3e-3")
    said = trained(*given)
    losses = [float(loss) for loss in re.findall(r"^step \d+ of 31: loss ([\d.]+), ", said, re.M)]
    assert len(losses) == 4, said
    assert losses[-1] < losses[0] - 1
    assert float(re.findall(r"not trained on: ([\d.]+)", said)[0]) < losses[0] - 1
    assert " tokens/s, bound by " in said
    planned, measured = re.findall(r"^drive:  (\d+) MiB planned, (\d+) MiB measured$", said, re.M)[0]
    assert int(measured) == pytest.approx(int(planned), abs=1)
    assert find(str(tmp_path / "out" / "checkpoints")).step == 31
    again = trained(*given)
    assert f"goes on from {tmp_path}/out/checkpoints/step-31, after 31 steps" in again
    assert "\nstep " not in again
    done = python(
        WRITES, "--model", str(tmp_path / "out" / "model-31"), "--nvme", nvme, "--tokens", "5", "def "
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert re.search(r"^5 tokens in .*; the last one was bound by ", done.stdout, re.M), done.stdout


def test_two_ranks_train_on_the_batches_of_one(text: str, nvme: str, tmp_path: Path) -> None:
    one, two = (options(text, nvme, tmp_path / name, "--steps", "2") for name in ("one", "two"))
    alone = trained(*one)
    together, silent = all_well(run_ranks(2, ALONE, *two, seconds=150, imports=IMPORTS))
    assert silent == ""
    losses = [[float(x) for x in re.findall(r"not trained on: ([\d.]+)", said)] for said in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], abs=0.01)
    assert find(str(tmp_path / "two" / "checkpoints")).step == 2


# -- SLURM and systemd ----------------------------------------------------------------------------


#: `srun` starts its step; SLURM then signals what it has started. `scontrol` is only noted.
STUBS = {
    "python": f'echo $$ > pids\nexec {sys.executable} -u "$@"\n',
    "srun": '"$@"\n',
    "scontrol": 'echo "$@" >> requeued\n',
}


def program(path: Path, text: str) -> str:
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    path.chmod(0o755)
    return str(path)


def test_a_job_saves_before_its_time_is_over_and_comes_again(
    text: str, nvme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM signals the steps of a job, and the script outlives them."""
    place = tmp_path / "place"
    (place / "bin").mkdir(parents=True)
    for name, stub in STUBS.items():
        program(place / "bin" / name, stub)
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    (place / "examples").symlink_to(ROOT / "examples")
    size = options(text, nvme, "", "--steps", "40")
    del size[size.index("--output") : size.index("--output") + 2]
    command = [program(place / "train.sbatch", BATCH), *size]
    with open(place / "said", "w+") as said:
        child = subprocess.Popen(command, cwd=place, stdout=said, stderr=subprocess.STDOUT)
        try:
            for _ in range(1500):
                if "step 1 of 40" in (place / "said").read_text():
                    break
                assert child.poll() is None, (place / "said").read_text()
                time.sleep(0.1)
            os.kill(int((place / "pids").read_text()), signal.SIGTERM)
            child.send_signal(signal.SIGTERM)
            code = child.wait(60)
        finally:
            child.kill()
            child.wait(30)
    text_said = (place / "said").read_text()
    assert code == 75, text_said
    assert "SIGTERM: ended after" in text_said
    assert (place / "requeued").read_text() == "requeue 42\n"
    saved = find(str(place / "runs" / "42" / "checkpoints"))
    assert 1 <= saved.step < 40
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert f"goes on from {saved.path}, after {saved.step} steps" in done.stdout
    assert (place / "requeued").read_text() == "requeue 42\n", "a job that is done is not requeued"


@pytest.mark.skipif(
    not os.path.exists("/usr/bin/systemd-analyze") and not os.environ.get("CI"), reason="needs systemd"
)
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program(tmp_path / ".venv" / "bin" / "python", "")
    unit = tmp_path / "train.service"
    unit.write_text(UNIT.replace("/srv/train", str(tmp_path)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
