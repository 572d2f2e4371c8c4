"""What `infinity train` says of its saves, and what a run that goes on does in another way on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest

from infinity.cli.main import run
from infinity.cli.output import changes
from infinity.cli.settings import RunSettings, TrainSettings
from infinity.storage.checkpoints import find

from .command_line import TEXT, small_drive, started, wait_for_line, words
from .test_train_checkpoints import _fill

pytestmark = pytest.mark.usefixtures("own_environment")


def test_a_run_that_is_given_more_steps_has_the_rate_of_the_new_schedule(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its first step on; and --lr and --data may be others. All that changes is said."""
    root, log, other = str(tmp_path / "out"), tmp_path / "log.jsonl", tmp_path / "other.py"
    assert run(["train", *words(text, nvme, "--steps", "4", "--warmup", "1", "--output", root)]) == 0
    other.write_text(TEXT.replace("return", "yield"))
    capsys.readouterr()
    changed = ["--steps", "6", "--lr", "0.01", "--data", str(other)]
    assert run(["train", "--resume", "--output", root, *changed, "--json-log", str(log)]) == 0
    said = capsys.readouterr().out
    schedule = TrainSettings(steps=6, warmup=1, lr=0.01)
    rates = [json.loads(line)["lr"] for line in log.open()]
    assert rates == [0.01 * schedule.lr_factor(step) for step in (4, 5)]
    assert "changed: --steps 4 → 6\n" in said
    assert "changed: --lr 0.001 → 0.01\n" in said
    assert f"changed: --data {text} → {other}\n" in said
    assert f"changed: the learning rate of step 5, 0.0001 → {rates[0]:.6g}\n" in said
    assert "changed: the text, " in said
    assert "--output" not in "".join(re.findall("changed: .*", said))


def test_a_stable_rate_goes_on_and_decays_where_it_would_have(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the stable part with more steps, too, without a change of the rate."""
    schedule = ["--schedule", "wsd", "--warmup", "1", "--decay-fraction", "0.5"]
    root, log = str(tmp_path / "out"), tmp_path / "log.jsonl"
    more = [*schedule, "--steps", "6", "--save-every", "1", "--keep-last", "9", "--json-log", str(log)]

    def rates() -> list[float]:
        return [json.loads(line)["lr"] for line in log.open()]

    assert run(["train", *words(text, nvme, *more, "--output", root)]) == 0
    whole = rates()
    assert whole == pytest.approx([1e-3, 1e-3, 1e-3, 7e-4, 4e-4, 1e-4])
    shutil.rmtree(f"{root}/step-6")  # in the decay
    assert run(["train", "--resume", "--output", root]) == 0
    assert rates() == whole
    for step in (3, 4, 5, 6):
        shutil.rmtree(f"{root}/step-{step}")
    assert run(["train", "--resume", "--output", root, "--decay-fraction", "0.2"]) == 2
    assert "a run that goes on cannot change its decay_fraction" in capsys.readouterr().err
    assert run(["train", "--resume", "--output", root, "--steps", "10"]) == 0
    assert rates()[:5] == [1e-3] * 5
    assert rates()[5:] == pytest.approx([1e-3 * (1 - 0.9 * s / 5) for s in (1, 2, 3, 4, 5)])
    assert "the learning rate of step" not in capsys.readouterr().out


def test_a_checkpoint_without_its_index_is_named_when_it_is_left_out(
    text: str, nvme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "out")
    more = ["--steps", "2", "--save-every", "1", "--output", root]
    assert run(["train", *words(text, nvme, *more)]) == 0
    os.unlink(f"{root}/step-2/index.json")
    capsys.readouterr()
    assert run(["train", "--resume", "--output", root]) == 0
    said = capsys.readouterr().out
    assert f"left out: {root}/step-2, which has no index\n" in said
    assert f"goes on from {root}/step-1, after 1 steps\n" in said


@pytest.mark.root
def test_why_a_save_failed_is_said_at_once_and_once(text: str, nvme: str, tmp_path: Path) -> None:
    with small_drive(tmp_path, 8 << 20) as drive:
        command = words(text, nvme, "--steps", "5000", "--save-every", "2", "--output", f"{drive}/out")
        with started("-m", "infinity", "train", *command) as child:
            wait_for_line(child, "saved ")
            _fill(drive, 64 * 1024)
            wait_for_line(child, "no checkpoint of step")
            assert child.stderr is not None
            assert "error: no room for a checkpoint" in child.stderr.readline(), "before the run ends"
            wait_for_line(child, "no checkpoint of step")
            os.unlink(f"{drive}/theirs")
            wait_for_line(child, "saved ")
            child.terminate()
            _, err = child.communicate(timeout=60)
        assert find(f"{drive}/out").step > 2
    assert "no room for a checkpoint" not in err
    assert "Traceback" not in err


def test_a_process_that_may_not_open_what_a_save_takes_is_refused_before_it_trains(
    text: str, nvme: str, tmp_path: Path
) -> None:
    """The cure works."""

    def lower(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))

    common = ["-m", "infinity", "train", *words(text, nvme, "--steps", "2")]
    with started(*common, preexec_fn=lambda: lower(18)) as child:
        out, err = child.communicate(timeout=100)
    assert child.returncode == 2, err
    assert "step 1/" not in out
    cure = re.search(r"ulimit -n (\d+); or --no-save", err)
    assert cure is not None, err
    with started(*common, preexec_fn=lambda: lower(int(cure[1]))) as child:
        out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err


def test_a_save_that_lacks_descriptors_ends_nothing(
    text: str, nvme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others of this process have opened them meanwhile."""
    from infinity.cli.training import Training

    save, soft = Training.save, resource.getrlimit(resource.RLIMIT_NOFILE)

    def without(self: Training) -> None:
        if len(self.losses) > 4:
            return save(self)
        most = max(map(int, os.listdir("/proc/self/fd"))) + 32
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, soft[1]))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(2 * len(self.losses)):  # so many are left for the save
                os.close(taken.pop())
            save(self)
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, soft)

    monkeypatch.setattr(Training, "save", without)
    root = str(tmp_path / "out")
    more = ["--steps", "6", "--save-every", "1", "--output", root]
    assert run(["train", *words(text, nvme, *more)]) == 1
    said = capsys.readouterr()
    assert "no checkpoint of step 1: the run goes on" in said.out
    assert "ulimit -n" in said.err
    assert find(root).step == 6


@pytest.mark.integration
def test_a_limit_on_the_size_of_files_is_named(text: str, nvme: str, tmp_path: Path) -> None:
    """Where the model is built, and where it is saved."""
    limit = (200_000, 200_000)
    host = [f"--{kind}=host" for kind in ("parameters", "optimizer-state", "gradients")]
    command = ["-m", "infinity", "train", *words(text, nvme, *host, "--steps", "100000")]
    said = "to change: raise the limit on the size of a file: ulimit -f"
    with started(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)) as child:
        out, err = child.communicate(timeout=100)
    assert child.returncode == 2, err
    assert said in err
    with started(*command) as child:
        wait_for_line(child, "step 3/")
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, limit)
        child.terminate()
        out, err = child.communicate(timeout=100)
    assert child.returncode == 1, err
    assert "steps are lost" in out
    assert said in err
    assert "; then train again" in err


def test_directories_that_vanish_during_a_run_are_told(text: str, nvme: str, tmp_path: Path) -> None:
    root = str(tmp_path / "out")
    more = ["--steps", "5000", "--save-every", "3", "--output", root]
    with started("-m", "infinity", "train", *words(text, nvme, *more)) as child:
        wait_for_line(child, "saved ")
        shutil.rmtree(root)
        shutil.rmtree(nvme)
        wait_for_line(child, f"{root} has vanished during the run")
        wait_for_line(child, f"{nvme} has vanished during the run")
        wait_for_line(child, "saved ")
        child.terminate()
        out, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    assert f"{root} has vanished" not in out, "once"
    assert find(root).step > 3


def test_a_setting_that_an_older_version_did_not_have_is_no_change() -> None:
    assert changes(RunSettings.default(), {"data": None, "train": {"steps": 5}}) == ["--steps 5 → 100"]
