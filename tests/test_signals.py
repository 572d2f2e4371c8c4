"""Signals that end a run, and terminals that hang up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import re
import select
import signal
import time
from pathlib import Path

import pytest

from infinity.storage.checkpoints import find

from .command_line import started, wait_for_line, words
from .ranks import run_ranks

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_like_an_interrupt(number: int, text: str, nvme: str) -> None:
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000", "--no-save")) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(number)
        child.send_signal(signal.SIGTERM)  # a second one does not disturb the closing
        out, err = child.communicate(timeout=60)
    # Of two that come at once, Python calls the handlers in an order of its own.
    ended = signal.Signals(child.returncode - 128)
    assert ended in (number, signal.SIGTERM), err
    assert "interrupted after" in out
    assert err.endswith(f"ended by {ended.name}\n")
    assert "Traceback" not in err
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


@pytest.mark.first
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_which_signal_ended_a_run_is_said(number: int, text: str, nvme: str) -> None:
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000", "--no-save")) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(number)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert err.endswith(f"ended by {signal.Signals(number).name}\n")


_IN_A_FINALIZER = """
import os, signal, time
from infinity.cli.ending import close_on_signals, end_on_signals
from infinity.core.signals import Ended

class Gone:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100): pass

end_on_signals()
close_on_signals()
try:
    gone = Gone()
    del gone
    print("goes on", flush=True)
    time.sleep(30)
except Ended as error:
    print(error)
"""


def test_a_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    """Python raises nothing out of one."""
    with started("-c", _IN_A_FINALIZER) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "goes on\nSIGTERM\n", "")


def test_an_interrupt_says_how_the_run_goes_on(text: str, nvme: str, tmp_path: Path) -> None:
    root = str(tmp_path / "out")
    more = ["--steps", "100000", "--save-every", "2", "--output", root]
    with started("-m", "infinity", "train", *words(text, nvme, *more)) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    newest = find(root)
    assert f"The newest whole checkpoint is {newest.path}, after {newest.step} steps; " in err
    assert f"`infinity train --resume --output {root}` goes on from it.\ninterrupted\n" in err
    assert "interrupted after" in out


@pytest.mark.integration
def test_a_signal_at_any_moment_leaves_nothing(text: str, nvme: str) -> None:
    command = words(text, nvme, "--steps", "100000", "--no-save")
    for seconds in (0.3, 1.5, 3.0, 5.0):
        with started("-m", "infinity", "train", *command) as child:
            time.sleep(seconds)
            child.send_signal(signal.SIGTERM)
            out, err = child.communicate(timeout=60)
        # Before Python has come to us it ends as any process does.
        assert child.returncode in (75, 143, -signal.SIGTERM), err
        assert (child.returncode == 143) == ("step 1/" in out), "steps are lost"
        assert "Traceback" not in err
        assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


#: Sends a signal to itself as the module `sys.argv[1]` is imported, or as that class is made.
_AT_THE_START = """
import os, sys
from infinity.__main__ import main

class Sends:
    def find_spec(self, name, *_):
        if name == moment:
            os.kill(os.getpid(), number)

moment, number = sys.argv.pop(1), int(sys.argv.pop(1))
if moment == "torch.optim.AdamW":
    import torch
    torch.optim.AdamW.__init__ = lambda *_, **__: os.kill(os.getpid(), number)
sys.meta_path.insert(0, Sends())
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["infinity.cli.main", "infinity.cli.training", "torch.optim.AdamW"])
def test_a_signal_before_the_first_step_has_the_run_begin_again(
    moment: str, number: signal.Signals, text: str, nvme: str, tmp_path: Path
) -> None:
    """Nothing is lost then, and what restarts a run on its exit code does so."""
    root = tmp_path / "out"
    command = ["train", *words(text, nvme, "--steps", "2", "--output", str(root))]
    with started("-c", _AT_THE_START, moment, str(int(number)), *command) as child:
        out, err = child.communicate(timeout=100)
    assert child.returncode == 75, (out, err)
    assert err.endswith(
        f"ended by {number.name} before the first step; nothing is lost, and the same command begins or "
        "resumes the run\n"
    )
    assert "Traceback" not in err
    assert not root.exists()
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


def test_ranks_that_are_ended_before_the_first_step_begin_again(text: str, nvme: str, tmp_path: Path) -> None:
    """SLURM signals all of them, and takes the largest exit code for that of the step."""
    given = words(text, nvme, "--steps", "2", "--threads", "1", "--output", str(tmp_path / "out"))
    moment = ["torch.optim.AdamW", str(int(signal.SIGTERM))]
    results = run_ranks(2, _AT_THE_START, *moment, "train", *given, seconds=100)
    assert [code for code, *_ in results] == [75, 75], results
    assert "".join(err for *_, err in results).count("before the first step") == 1


def test_a_run_under_nohup_outlives_its_terminal(text: str, nvme: str) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    command = words(text, nvme, "--steps", "8")
    with started("-m", "infinity", "train", *command, preexec_fn=ignore) as child:
        wait_for_line(child, "step 1/")
        child.send_signal(signal.SIGHUP)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert "The loss" in out


def _lead() -> None:
    os.setsid()
    ctypes.CDLL(None).ioctl(0, 0x540E, 0)  # TIOCSCTTY: the terminal controls this session


def _wait_for_a_step(main: int) -> None:
    seen, until = b"", time.monotonic() + 150
    while b"tokens/s" not in seen and time.monotonic() < until:
        if select.select([main], [], [], 1.0)[0]:
            seen += os.read(main, 65536)
    assert b"tokens/s" in seen, seen


@pytest.mark.first
@pytest.mark.parametrize("kept", [True, False])
def test_a_terminal_that_hangs_up_ends_a_run(kept: bool, text: str, nvme: str) -> None:
    """After the step under way is saved, if there is something to be kept."""
    main, terminal = pty.openpty()
    command = words(text, nvme, "--steps", "100000", *([] if kept else ["--no-save"]))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started("-m", "infinity", "train", *command, preexec_fn=_lead, **streams) as child:
        os.close(terminal)
        _wait_for_a_step(main)
        os.close(main)
        with contextlib.suppress(ProcessLookupError):  # as a shell passes it on
            child.send_signal(signal.SIGHUP)
        assert child.wait(60) == (75 if kept else 128 + signal.SIGHUP)
    left = [path for path in Path(nvme).rglob("*") if not path.is_dir()]
    if kept:
        (root,) = Path(nvme, "runs").iterdir()
        assert find(os.fspath(root)).step > 0
    assert all(kept and path.parent.parent == root for path in left)


def test_a_run_that_nobody_tells_of_its_lost_terminal(text: str, nvme: str) -> None:
    """In the background of a shell that has gone, say: it has another session, and only its words fail."""
    main, terminal = pty.openpty()
    command = words(text, nvme, "--steps", "60")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started("-m", "infinity", "train", *command, preexec_fn=os.setsid, **streams) as child:
        os.close(terminal)
        _wait_for_a_step(main)
        os.close(main)
        assert child.wait(100) == 0
    (root,) = Path(nvme, "runs").iterdir()
    assert find(os.fspath(root)).step == 60


@pytest.mark.integration
def test_a_hang_up_that_ends_the_reader_first(text: str, nvme: str) -> None:
    """Of `infinity train | tee log`, say."""
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000")) as child:
        wait_for_line(child, "step 1/")
        assert child.stdout is not None
        child.send_signal(signal.SIGHUP)
        child.stdout.close()
        assert child.wait(60) == 75


@pytest.mark.integration
def test_sigusr1_ends_nothing_from_the_first_to_the_last(text: str, nvme: str) -> None:
    """It asks for a checkpoint, and comes when somebody's clock says so."""
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "2"), "--no-save") as child:
        asked, until = 0, time.monotonic() + 100
        while child.poll() is None and time.monotonic() < until:
            caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
            if asked or (caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1):  # Python has begun
                child.send_signal(signal.SIGUSR1)
                asked += 1
            time.sleep(0.02)
        _, err = child.communicate(timeout=60)
    assert asked > 10
    assert child.returncode == 0, err
