"""Signals that end a run, and terminals that hang up."""

from __future__ import annotations

import ctypes
import os
import pty
import select
import signal
import time
from pathlib import Path

import pytest

from .command_line import started, wait_for_line, words

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_like_an_interrupt(number: int, text: str, nvme: str) -> None:
    with started("-m", "infinity", "train", *words(text, nvme, "--steps", "100000", "--no-save")) as child:
        wait_for_line(child, "step 3/")
        child.send_signal(number)
        child.send_signal(signal.SIGTERM)  # a second one does not disturb the closing
        out, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number, err
    assert "interrupted after" in out
    assert err.endswith(f"ended by {signal.Signals(number).name}\n")
    assert "Traceback" not in err
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


def test_a_signal_at_any_moment_leaves_nothing(text: str, nvme: str) -> None:
    command = words(text, nvme, "--steps", "100000", "--no-save")
    for seconds in (0.3, 1.5, 3.0, 5.0):
        with started("-m", "infinity", "train", *command) as child:
            time.sleep(seconds)
            child.send_signal(signal.SIGTERM)
            _, err = child.communicate(timeout=60)
        # Before Python has come to us it ends as any process does.
        assert child.returncode in (143, -signal.SIGTERM), err
        assert "Traceback" not in err
        assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []


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


def test_a_terminal_that_hangs_up_ends_a_run(text: str, nvme: str) -> None:
    main, terminal = pty.openpty()

    def lead() -> None:
        os.setsid()
        ctypes.CDLL(None).ioctl(0, 0x540E, 0)  # TIOCSCTTY: the terminal controls this session

    command = words(text, nvme, "--steps", "100000")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started("-m", "infinity", "train", *command, preexec_fn=lead, **streams) as child:
        os.close(terminal)
        seen, until = b"", time.monotonic() + 150
        while b"tokens/s" not in seen and time.monotonic() < until:
            if select.select([main], [], [], 1.0)[0]:
                seen += os.read(main, 65536)
        assert b"tokens/s" in seen, seen
        os.close(main)
        assert child.wait(60) == 128 + signal.SIGHUP
    assert [path for path in Path(nvme).rglob("*") if not path.is_dir()] == []
