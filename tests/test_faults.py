"""What fails on real machines: drives, file systems, and whoever presses Ctrl-C or kills the run."""

from __future__ import annotations

import collections
import contextlib
import errno
import gc
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.api.closing import wait_for_dropped
from infinity.core.errors import (
    CorruptionError,
    DeadlineError,
    DirectoryError,
    StorageError,
    TransferError,
)

from .command_line import mounted, started
from .fault_runs import Training
from .faults import FaultFS, build, missing_means

_ROOT = Path(__file__).parents[1]
#: In a shell: `INFINITY_FAULT_SEED=7 pytest tests/test_faults.py` draws another sample.
SEED = int(os.environ.get("INFINITY_FAULT_SEED", "0"))


def need_means() -> None:
    """Skip the test, saying why, if this machine cannot inject faults; fail it in CI."""
    missing = missing_means()
    if missing is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"this machine cannot run the test: {missing}")
    pytest.skip(missing)


@pytest.fixture(scope="session")
def faultfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_means()
    return build(tmp_path_factory.mktemp("faultfs"))


# ------------------------------------------------------------------------------- every operation


def run_campaign(count: int, *options: str, timeout: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run injections in a process of their own, which has no threads; return how each ended."""
    folder = tempfile.mkdtemp(prefix="infinity-faults-")
    out = Path(folder) / "outcomes.json"
    command = [sys.executable, "-m", "tests.faults", "--out", str(out)]
    command += ["--count", str(count), "--seed", str(SEED), *options]
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        try:
            said, _ = process.communicate(timeout=timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its mounts end with their processes
        assert process.returncode == 0, said[-20000:]
        return [(i, o) for i, o in json.loads(out.read_text())["runs"]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_campaign(runs: list[tuple[dict[str, Any], dict[str, Any]]], at_least: int) -> None:
    """What must hold over all runs, besides that each ended well."""
    assert len(runs) >= at_least
    fired = [(i, o) for i, o in runs if o["fired"]]
    assert len(fired) >= 0.85 * len(runs)
    assert {i["backend"] for i, _ in fired} == {"libaio", "syscall", "uring", "threads"}
    training = sum(i["run"] != "store" for i, _ in runs)
    assert 0.05 * len(runs) <= training <= 0.2 * len(runs)
    endings = collections.Counter(o["error"] or o["how"] for _, o in fired)
    assert {"ok", "TransferError", "DeadlineError", "CorruptionError", "ShortTransferError"} <= set(endings)
    # Of a write that was never made, or made elsewhere, nobody hears but by the CRCs.
    lied = [o for i, o in fired if i["kind"] in ("lost", "torn", "elsewhere") and i["op"] == "write"]
    found = sum(o["error"] == "CorruptionError" for o in lied)
    assert found >= 0.6 * len(lied), endings
    late = [o["seconds"] - i["deadline"] for i, o in fired if i["kind"] == "stall"]
    assert statistics.median(late) < 2.0
    assert all(o["errno"] for _, o in fired if o["error"] in ("TransferError", "DeadlineError"))


@pytest.mark.integration
@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_fault_at_any_operation_ends_with_the_same_bits_or_a_typed_error(
    pytestconfig: pytest.Config,
) -> None:
    need_means()
    if pytestconfig.getoption("--device") != "cpu":
        runs = run_campaign(100, "--lagging", timeout=500)
        assert sum(o["fired"] for _, o in runs) >= 8  # every tenth is a training run
    else:
        check_campaign(run_campaign(100, timeout=500), 100)


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_fault_at_every_operation_ends_with_the_same_bits_or_a_typed_error() -> None:
    need_means()
    check_campaign(run_campaign(0, timeout=3500), 2000)


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    folder = Path(tempfile.mkdtemp(prefix="infinity-test-"))
    try:
        with Training(folder) as run:
            return list(run.steps(4))
    finally:
        shutil.rmtree(folder)


def line_of(process: subprocess.Popen[str], seconds: float = 240) -> str:
    """Return its next line."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], seconds)[0], f"no line within {seconds} s"
    return process.stdout.readline()


# ------------------------------------------------------------------------------- directories


@pytest.mark.root
@pytest.mark.parametrize(
    ("option", "message", "number"),
    [("size=256k", "has not enough free space", errno.ENOSPC), ("ro", "read-only", errno.EROFS)],
)
def test_a_drive_that_cannot_be_used_is_refused_before_anything_is_touched(
    option: str, message: str, number: int
) -> None:
    with mounted("-t", "tmpfs", "-o", option, "none") as place:
        run = Training(Path(place))
        with pytest.raises(DirectoryError, match=message) as caught:
            run.wrap()
        assert caught.value.errno == number
        assert os.listdir(place) == []
        run.untouched()


@pytest.mark.root
def test_a_file_system_that_fills_up_during_the_run(faultfs: Path, tmp_path: Path) -> None:
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        fs.arm("fallocate", "error", 1, value=errno.EOPNOTSUPP)
        run = Training(fs.path)
        with pytest.warns(UserWarning, match="cannot reserve space"):
            run.wrap()
        try:
            run.steps(1)
            fs.arm("write", "error", 1, value=errno.ENOSPC, for_good=True)
            with pytest.raises(TransferError, match="No space left on device") as caught:
                run.steps(1)
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.path is not None
            assert caught.value.path.startswith(str(fs.path))
            with pytest.raises(StorageError):
                run.steps(1)
        finally:
            with contextlib.suppress(TransferError):  # of the update, where a load told of it first
                infinity.close(run.adam)
        assert os.listdir(fs.path) == []


@pytest.mark.root
@pytest.mark.parametrize("where", ["steps", "close"])
def test_a_mount_that_is_gone(faultfs: Path, tmp_path: Path, where: str) -> None:
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        run = Training(fs.path).wrap()
        try:
            run.steps(1)
            fs.unmount()
            if where == "steps":
                with pytest.raises(TransferError):
                    run.steps(1)
        finally:
            with contextlib.suppress(TransferError):  # of the update
                infinity.close(run.adam)


@pytest.mark.root
def test_a_file_system_that_cannot_map_files(faultfs: Path, tmp_path: Path) -> None:
    """`init` says what works there."""
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        config = infinity.Config(device="cpu", dtype="fp32", nvme=fs.path, parameters="nvme")
        with pytest.raises(StorageError, match="cannot be mapped") as caught, infinity.init(config):
            nn.Linear(1000, 100)
        assert "build it without `init`" in str(caught.value.cure)


@pytest.mark.on_cpu
def test_a_directory_that_is_removed_under_a_run(tmp_path: Path, undisturbed: list[float]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    with Training(drive) as run:
        run.steps(2)
        shutil.rmtree(drive)  # the files are open: the bytes are still there
        assert run.steps(2) == undisturbed
    with pytest.raises(DirectoryError, match="missing"):
        Training(drive).wrap()


@pytest.mark.root
def test_a_drive_that_lies_is_found_out(faultfs: Path, tmp_path: Path) -> None:
    with FaultFS(faultfs, tmp_path / "fs") as fs, Training(fs.path) as run:
        run.steps(1)
        fs.arm("write", "lost", 3)
        with pytest.raises(CorruptionError, match="is not what was written") as caught:
            run.steps(2)
        assert caught.value.path is not None


@pytest.mark.root
@pytest.mark.parametrize("update", ["sync", "overlap"])
def test_a_write_that_fails_behind_the_last_step_is_told(faultfs: Path, tmp_path: Path, update: str) -> None:
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        run = Training(fs.path, update=update).wrap()
        told: list[TransferError] = []

        def tell(call: Any) -> None:
            try:
                call()
            except TransferError as error:
                told.append(error)

        def step() -> None:
            run.steps(1)
            with infinity.gathered(run.model):  # every kernel of the update has run
                time.sleep(0.2)

        fs.disarm()
        step()
        fs.arm("write", "error", fs.seen("write"), value=errno.ENOSPC)  # the last of as many
        tell(step)
        assert fs.get("fired") == 1
        tell(lambda: infinity.close(run.adam))
        # Once; or twice, where the store tells a call and the update that failed with it tells `close`.
        assert [error.errno for error in told] in ([errno.ENOSPC], [errno.ENOSPC] * 2)


@pytest.mark.root
@pytest.mark.parametrize("ends", ["close", "drop"])
def test_an_update_that_is_lost_at_the_end_is_told(
    faultfs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        run = Training(fs.path, io_deadline=0.5, read_ahead_memory="64KiB", parameters="device").wrap()
        run.steps(1)
        loss = run.case.loss(run.model, run.case.batches[0])
        loss.backward()
        infinity.flush(run.adam)
        fs.arm("read", "stall", 1, for_good=True)
        run.adam.step()
        try:
            if ends == "close":
                with pytest.raises(StorageError, match=r"never updated: .*\w"):
                    infinity.close(run.adam)
            else:
                del run, loss
                gc.collect()
                wait_for_dropped()
                assert "dropped without infinity.close()" in caplog.text
        finally:
            fs.unmount()


# ------------------------------------------------------------------------------- processes

_CHILD = """
import sys
from pathlib import Path
from tests.fault_runs import Training
with Training(Path(sys.argv[1])) as run:
    while True:
        print(run.steps(1)[-1], flush=True)
        sys.stdin.readline()
"""


@pytest.mark.on_cpu
def test_two_runs_in_a_directory_and_a_kill(tmp_path: Path, undisturbed: list[float]) -> None:
    with (
        started("-c", _CHILD, str(tmp_path), stdin=subprocess.PIPE) as first,
        Training(tmp_path) as second,
    ):
        losses = [float(line_of(first))]
        second.steps(2)
        print(file=first.stdin, flush=True)  # the first goes on, unharmed
        losses.append(float(line_of(first)))
        assert losses == undisturbed[:2]
        print(file=first.stdin, flush=True)
        time.sleep(0.02)  # somewhere in a step
        first.kill()
        first.wait(timeout=30)
        assert second.steps(2) == undisturbed
    assert os.listdir(tmp_path) == []


_STALLED = """
import sys
from infinity.core.at_exit import at_end
sys.stderr = open(sys.argv[3], "w", buffering=1)
at_end(lambda: print("over", file=sys.stderr, flush=True), last=True)
from pathlib import Path
from tests.fault_runs import Training
run = Training(Path(sys.argv[1]), aio_backend=sys.argv[2], update=sys.argv[4], delay_warmup_steps=0).wrap()
run.steps(2)
print("ready", flush=True)
sys.stdin.readline()
try:
    run.steps(1000)
finally:
    if sys.argv[5] == "closes":
        run.__exit__()
"""


@pytest.mark.first
@pytest.mark.processes
@pytest.mark.root
@pytest.mark.serial
@pytest.mark.parametrize(
    ("backend", "update", "closes", "op"),
    [
        ("threads", "overlap", "", "write"),
        ("libaio", "overlap", "closes", "read"),
        ("threads", "delayed", "closes", "read"),
    ],
)
def test_an_interrupt_while_a_stalled_transfer_is_waited_for(
    faultfs: Path, tmp_path: Path, backend: str, update: str, closes: str, op: str
) -> None:
    """Within two seconds, though the drive has its 120; also where a ``finally`` closes the engine."""
    told = tmp_path / "stderr"
    with (
        FaultFS(faultfs, tmp_path / "fs") as fs,
        started(
            *("-c", _STALLED, str(fs.path), backend, str(told), update, closes), stdin=subprocess.PIPE
        ) as process,
    ):
        try:
            assert line_of(process) == "ready\n"
            fs.arm(op, "stall", 1, for_good=True)
            print(file=process.stdin, flush=True)
            until = time.monotonic() + 30
            while not fs.get("fired"):
                assert time.monotonic() < until
                time.sleep(0.01)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            while "over" not in told.read_text() and time.monotonic() < began + 10:
                time.sleep(0.01)
            took, text = time.monotonic() - began, told.read_text()
            assert "KeyboardInterrupt" in text
            assert "over" in text, text
            assert "Exception ignored" not in text
            assert took < 2.0, text
        finally:
            fs.unmount()  # before it is killed


@pytest.mark.root
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_stops_answering(faultfs: Path, tmp_path: Path, op: str) -> None:
    """Every call ends with an error, and soon."""
    with FaultFS(faultfs, tmp_path / "fs") as fs:
        run = Training(fs.path, io_deadline=0.5).wrap()
        try:
            run.steps(1)
            fs.arm(op, "stall", 1, for_good=True)
            began = time.monotonic()
            with pytest.raises((DeadlineError, TransferError)):
                run.steps(1)
            assert time.monotonic() - began < 5
            began = time.monotonic()
            with pytest.raises((DeadlineError, TransferError)):
                run.steps(1)
            assert time.monotonic() - began < 1, "known by now"
            began = time.monotonic()
            with pytest.raises(StorageError):
                infinity.close(run.adam)
            assert time.monotonic() - began < 5
        finally:
            fs.unmount()
