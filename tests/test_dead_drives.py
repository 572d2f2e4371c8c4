"""Ctrl-C while a drive answers no more: to reads and writes, to opening, syncing and removing files.

`benchmarks/interrupts.py` measures how long the end takes; here it comes at all.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .cgroup import unavailable
from .command_line import started
from .faults import FaultFS, build, missing_means

pytestmark = [pytest.mark.integration, pytest.mark.processes, pytest.mark.root, pytest.mark.serial]

#: Seconds for an end. A drive has 120, and a thread that it keeps in the system more.
LIMIT = 60


@pytest.fixture(scope="module")
def faultfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (missing := missing_means()) is not None:
        unavailable(missing)
    return build(tmp_path_factory.mktemp("faultfs"))


def read_until(child: subprocess.Popen[str], stream: str, text: str, seconds: float) -> str:
    """Read what a child says there until it says `text`."""
    pipe, said, until = getattr(child, stream).fileno(), "", time.monotonic() + seconds
    while text not in said:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        more = os.read(pipe, 1 << 16).decode() if ready else ""
        assert more, f"no {text!r} within {seconds} s: {said}"
        said += more
    return said


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


def ended_by_an_interrupt(program: str, faultfs: Path, folder: Path, *arguments: str) -> str:
    """Run a program whose drive answers no more once it is "ready", and interrupt it "now"; return what it
    says until it is "over"."""
    with FaultFS(faultfs, folder / "fs") as fs:
        command = ("-c", program, str(fs.path), *arguments)
        with started(*command, stdin=subprocess.PIPE, preexec_fn=interruptible) as child:
            try:
                read_until(child, "stdout", "ready", 150)
                fs.stop()
                assert child.stdin is not None
                print(file=child.stdin, flush=True)
                read_until(child, "stdout", "now", LIMIT)
                time.sleep(0.3)  # until it waits
                child.send_signal(signal.SIGINT)
                said = read_until(child, "stderr", "over", LIMIT)
            finally:
                fs.unmount()  # before it is killed
            assert child.wait(LIMIT) == -signal.SIGINT
    assert "KeyboardInterrupt" in said
    return said


_LOOP = """
import sys, time
from pathlib import Path
from infinity.core.at_exit import at_end
at_end(lambda: print("over", file=sys.stderr, flush=True), last=True)
import infinity
from tests.fault_runs import Training
run = Training(Path(sys.argv[1]), update="sync").wrap()
run.steps(1)
print("ready", flush=True)
sys.stdin.readline()
try:
    print("now", flush=True)
    if sys.argv[2] == "save":
        infinity.save(run.adam, sys.argv[1] + "/checkpoints")
    elif sys.argv[2] == "export":
        infinity.export(run.model, sys.argv[1] + "/exported")
    else:
        time.sleep(300)
finally:
    if sys.argv[3] == "closes":
        infinity.close(run.adam)
"""


@pytest.mark.first
@pytest.mark.parametrize(("place", "closes"), [("save", "closes"), ("export", ""), ("sleep", "")])
def test_a_script_ends(place: str, closes: str, faultfs: Path, tmp_path: Path) -> None:
    said = ended_by_an_interrupt(_LOOP, faultfs, tmp_path, place, closes)
    assert "Exception ignored" not in said
