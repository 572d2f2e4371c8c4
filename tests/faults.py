"""Fails one operation of a run, thousands of times over, and says how each run ended.

    python -m tests.faults --count 200 --seed 1 --out results.json

A few servers, forked before there is any thread, have everything imported and a mount of faultfs
each. For each injection a server arms the fault, forks a child that does the run of
tests/fault_runs.py, and reads its report from a pipe. A child that does not report in time has
hung: the server notes where, aborts the mount, and only then kills it (a thread in the kernel that
waits for a mount cannot be killed). Faults in return codes come from strace, which attaches to the
child before it begins.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import mmap
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .fault_cases import BACKENDS, SLOW, Injection, Outcome, all_injections, problem, sample, thorough
from .fault_runs import RUNS
from .lagging.lane import lagging_lane

_ROOT = Path(__file__).parents[1]
OPS = {"read": 1, "write": 2, "fsync": 3, "fallocate": 4, "create": 5, "mkdir": 6, "truncate": 7}
KINDS = {"error": 1, "short": 2, "stall": 3, "flip": 4, "torn": 5, "lost": 6, "elsewhere": 7}
_FIELDS = ("ready", "op", "kind", "value", "nth", "times", "fired", "capacity", "used")
_FOR_GOOD = 1 << 40
#: Seconds after which a run that has not reported has hung.
HUNG = 40.0
_MNT_FORCE, _MNT_DETACH, _PR_SET_PDEATHSIG = 1, 2, 1

_libc = ctypes.CDLL(None, use_errno=True)


def missing_means() -> str | None:
    """Return what this machine lacks for the injections, or None."""
    if os.geteuid() != 0:
        return "not root"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    for tool in ("gcc", "pkg-config", "strace"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if subprocess.run(["pkg-config", "--exists", "fuse3"], timeout=30, check=False).returncode:
        return "libfuse3-dev is not installed"
    return None


def build(folder: Path) -> Path:
    """Compile faultfs into `folder`."""
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.split()
    binary = folder / "faultfs"
    source = str(Path(__file__).with_name("faultfs.c"))
    command = ["gcc", "-O2", "-g", "-Wall", "-Wextra", "-Werror", source, "-o", str(binary), *flags]
    subprocess.run(command, timeout=120, check=True)
    return binary


# ------------------------------------------------------------------------------- the mount


class FaultFS:
    """A mount of tests/faultfs.c, at `path`; a context manager that always unmounts."""

    def __init__(self, binary: Path, folder: Path, *, sync: bool = False, capacity: int = 1 << 28) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "mount"
        self._binary = binary
        self._capacity = capacity
        self._sync = sync
        self._control = folder / "control"
        self._control.write_bytes(bytes(4096))
        with open(self._control, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 4096)
        self._process: subprocess.Popen[bytes] | None = None
        self.path.mkdir(exist_ok=True)

    def __enter__(self) -> FaultFS:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()

    @property
    def mounted(self) -> bool:
        """Whether it is."""
        return self._process is not None

    def get(self, name: str) -> int:
        """Return a field of the control page."""
        return int(struct.unpack_from("=Q", self._page, 8 * _FIELDS.index(name))[0])

    def _set(self, name: str, value: int) -> None:
        struct.pack_into("=Q", self._page, 8 * _FIELDS.index(name), value)

    def seen(self, op: str) -> int:
        """Return how many of these operations there were since `arm` or `disarm`."""
        return int(struct.unpack_from("=Q", self._page, 8 * (len(_FIELDS) + OPS[op]))[0])

    def arm(self, op: str, kind: str, nth: int, *, value: int = 0, for_good: bool = False) -> None:
        """Let the `nth` operation from now on fail, and all after it if `for_good`."""
        self.disarm()
        self._set("op", OPS[op])
        self._set("kind", KINDS[kind])
        self._set("value", value)
        self._set("times", _FOR_GOOD if for_good else 1)
        self._set("nth", nth)

    def disarm(self) -> None:
        """Let nothing fail, and count anew."""
        for name in ("nth", "fired"):
            self._set(name, 0)
        for number in OPS.values():
            struct.pack_into("=Q", self._page, 8 * (len(_FIELDS) + number), 0)

    def mount(self) -> None:
        """Start the file system, empty, unless it is there."""
        if self._process is not None:
            return
        self._page[:] = bytes(len(self._page))
        self._set("capacity", self._capacity)
        command = [str(self._binary), str(self._control), str(self.path)]
        self._process = subprocess.Popen(command + ["sync"] * self._sync)
        until = time.monotonic() + 20
        while not self.get("ready"):
            if self._process.poll() is not None or time.monotonic() > until:
                self.unmount()
                raise RuntimeError("faultfs did not start")
            time.sleep(0.001)

    def stop(self) -> None:
        """Have it answer nothing any more, whatever is asked; `unmount` ends that."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def unmount(self) -> None:
        """End every request that waits (ECONNABORTED), the mount and its process."""
        if self._process is None:
            return
        # MNT_FORCE aborts the connection, as /sys/fs/fuse/connections/N/abort does.
        _libc.umount2(os.fsencode(self.path), _MNT_FORCE | _MNT_DETACH)
        self._process.kill()
        self._process.wait(timeout=20)
        self._process = None


@contextlib.contextmanager
def block_drive(fs: FaultFS, folder: Path, nbytes: int) -> Iterator[str]:
    """An ext4 on a loop device whose bytes are in a file of `fs`: when that answers no more, whoever asks it
    waits in the kernel, where no signal is heard."""
    image, place = fs.path / "image", folder / "drive"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(nbytes)
    command = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True, timeout=60)
    try:
        yield str(place)
    finally:
        fs.unmount()  # what hangs fails, and nothing waits any more
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


# ------------------------------------------------------------------------------- one server


class Server:
    """Runs injections, one after the other, in children of this process, which has no threads."""

    def __init__(self, binary: Path, folder: Path) -> None:
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("a fork server must be made before any thread")
        self.mounts = {sync: FaultFS(binary, folder / f"sync{sync:d}", sync=sync) for sync in (False, True)}
        self._folder = folder

    def close(self) -> None:
        """Unmount."""
        for fs in self.mounts.values():
            fs.unmount()

    def run(self, injection: Injection) -> Outcome:
        """Run one injection; always comes back."""
        fs = self.mounts[injection.sync]
        fs.mount()
        directories = [str(fs.path / f"drive{k}") for k in range(injection.directories)]
        for directory in directories:
            os.makedirs(directory, exist_ok=True)
        fs.disarm()
        if injection.means == "fuse":
            fs.arm(
                injection.op,
                injection.kind,
                injection.nth,
                value=injection.value,
                for_good=injection.repeat == "good",
            )
        fired = 0
        log = self._folder / "strace"
        with _tracer(injection, log) as attach:
            outcome, gone = self._child(injection, fs, directories, attach)
        fired = fs.get("fired") if injection.means == "fuse" else _injected(log)
        if not gone or injection.kind == "stall":
            fs.unmount()
        left = fs.mounted and any(os.listdir(d) for d in directories)
        if left:
            fs.unmount()  # a fresh one for the next
        return Outcome(**{**outcome, "fired": fired, "left": left})

    def _child(
        self,
        injection: Injection,
        fs: FaultFS,
        directories: list[str],
        attach: Callable[[int], None] | None,
    ) -> tuple[dict[str, Any], bool]:
        """Return the report, and whether the child ended by itself."""
        read_end, write_end = os.pipe()
        go_read, go_write = os.pipe()
        trace = self._folder / "trace"
        pid = os.fork()
        if pid == 0:
            _be_child(injection, directories, write_end, go_read, trace)
        os.close(write_end)
        os.close(go_read)
        try:
            if attach is not None:
                attach(pid)
            os.write(go_write, b"g")
            report = _read_line(read_end, HUNG)
            if report is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # says where it hangs
                time.sleep(0.5)
            gone = _reap(pid, 0.5 if report is not None else 0.0)
            if not gone:
                fs.unmount()  # first abort, then kill
                if not _reap(pid, 5.0 if report is not None else 0.0):
                    os.kill(pid, signal.SIGKILL)
                    if not _reap(pid, 20.0):
                        raise RuntimeError(f"a child of {injection.name} cannot be killed")
            if report is None:
                return {"how": "hang", "trace": trace.read_text(errors="replace")}, gone
            return json.loads(report), gone
        finally:
            os.close(read_end)
            os.close(go_write)


def _reap(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= until:
            return False
        time.sleep(0.002)
    return True


def _read_line(fd: int, seconds: float) -> str | None:
    until, text = time.monotonic() + seconds, b""
    while not text.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return None
        more = os.read(fd, 1 << 16)
        if not more:
            return None
        text += more
    return text.decode()


def _be_child(injection: Injection, directories: list[str], report: int, go: int, trace: Path) -> None:
    """Do the run and report; never returns."""
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        fd = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(fd, 2)
        faulthandler.enable(fd)
        faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
        os.read(go, 1)
        line = json.dumps(_report(injection, directories)) + "\n"
        os.write(report, line.encode())
        code = 0
    finally:
        os._exit(code)


def _report(injection: Injection, directories: list[str]) -> dict[str, Any]:
    from infinity.core.errors import InfinityError

    from .fault_runs import Ended

    stray: list[str] = []
    threading.excepthook = lambda a: stray.append(repr(a.exc_value))
    sys.unraisablehook = lambda a: stray.append(f"{a.exc_value!r} in {a.object!r}")
    options: dict[str, Any] = {"backend": injection.backend, "deadline": injection.deadline}
    extra: dict[str, Any] = {}
    if injection.run == "store":
        options.update(slots=injection.slots, report=extra)
    begun = time.monotonic()
    result: dict[str, Any] = {}
    try:
        result = {"how": "ok", "digest": RUNS[injection.run](directories, **options)}
        result["seconds"] = time.monotonic() - begun
        result["message"] = json.dumps(extra)
    except Ended as end:
        error, closing = end.error, end.close_error
        result = {
            "how": "error",
            "error": type(error).__name__,
            "typed": isinstance(error, InfinityError),
            "errno": getattr(error, "errno", None),
            "path": getattr(error, "path", None),
            "message": str(error),
            "seconds": end.seconds,
            "close_error": type(closing).__name__ if closing is not None else "",
            "close_typed": closing is None or isinstance(closing, InfinityError),
            "close_seconds": end.close_seconds,
            "trace": "".join(traceback.format_exception(error)),
        }
        if closing is not None and closing is not error:
            result["trace"] += "".join(traceback.format_exception(closing))
    except BaseException as error:  # everything else is a finding
        text = "".join(traceback.format_exception(error))
        result = {"how": "error", "error": type(error).__name__, "typed": False, "trace": text}
        result["message"] = str(error)
    result["stray"] = "\n".join(stray)
    return result


# ------------------------------------------------------------------------------- strace


@contextlib.contextmanager
def _tracer(injection: Injection, log: Path) -> Iterator[Callable[[int], None] | None]:
    """Yield what attaches strace to a process, or None."""
    log.unlink(missing_ok=True)
    if injection.means != "strace":
        yield None
        return
    tracer: subprocess.Popen[bytes] | None = None

    def attach(pid: int) -> None:
        nonlocal tracer
        step = {"once": "", "other": "+2", "good": "+"}[injection.repeat]
        inject = f"inject={injection.op}:{injection.kind}:when={injection.nth}{step}"
        tracer = subprocess.Popen(
            [
                "strace",
                "-f",
                "-qq",
                "-p",
                str(pid),
                "-o",
                str(log),
                "-e",
                f"trace={injection.op}",
                "-e",
                inject,
            ],
            stdin=subprocess.DEVNULL,
        )
        until = time.monotonic() + 20
        while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
            if tracer.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"strace did not attach ({injection.name})")
            time.sleep(0.001)

    try:
        yield attach
    finally:
        if tracer is not None:
            try:
                tracer.wait(timeout=5)
            except subprocess.TimeoutExpired:
                tracer.kill()
                tracer.wait(timeout=20)


def _injected(log: Path) -> int:
    text = log.read_text(errors="replace") if log.exists() else ""
    return text.count("(INJECTED)") + text.count("(DELAYED)")


# ------------------------------------------------------------------------------- many of them


def campaign(
    folder: Path, *, count: int, seed: int, workers: int, only: str = "", timeout: float = 3400.0
) -> tuple[list[Injection], list[Outcome], dict[str, str]]:
    """Run a sample of all injections (0: the thorough one, -1: all); return them, how they ended,
    and the digests of the undisturbed runs.

    Args:
        only: run those whose name contains this.
    """
    # Before the forks: the runs, and what their first step would import.
    for module in ("torch._dynamo", f"{__package__}.fault_runs"):
        importlib.import_module(module)
    binary = build(folder)
    server = Server(binary, folder)
    digests: dict[str, str] = {}
    counts: dict[str, dict[str, int]] = {}
    try:
        for run in RUNS:
            for backend in BACKENDS:
                outcome = server.run(Injection(run, backend))
                if outcome.how != "ok" or outcome.digest != digests.setdefault(run, outcome.digest):
                    raise RuntimeError(f"an undisturbed run of {run} with {backend} went wrong: {outcome}")
                seen = {op: server.mounts[False].seen(op) for op in OPS}
                most = counts.setdefault(run, seen)
                for op, number in seen.items():  # of a training run they vary by what it reads ahead
                    most[op] = max(most[op], number)
    finally:
        server.close()
    injections = [i for i in all_injections(counts) if only in i.name]
    if count > 0:
        injections = sample(injections, count, random.Random(seed))
    elif count == 0:
        injections = thorough(injections, seed)
    outcomes = _spread(injections, binary, folder, workers, timeout)
    return injections, outcomes, digests


def _spread(
    injections: list[Injection], binary: Path, folder: Path, workers: int, timeout: float
) -> list[Outcome]:
    """Run injections in several servers, each taking the next from a pipe."""
    numbers = folder / "numbers"
    numbers.write_bytes(b"".join(struct.pack("=I", k) for k in range(len(injections))))
    with open(numbers, "rb", buffering=0) as queue:  # one open file: the servers share its position
        pids = []
        for worker in range(workers):
            pid = os.fork()
            if pid == 0:
                _be_server(injections, binary, folder / f"server{worker}", queue.fileno())
            pids.append(pid)
    until = time.monotonic() + timeout
    try:
        for pid in pids:
            if not _reap(pid, max(1.0, until - time.monotonic())):
                raise RuntimeError(f"the injections did not end within {timeout} s")
            pids = pids[1:]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    found: dict[int, Outcome] = {}
    for worker in range(workers):
        for line in (folder / f"server{worker}" / "outcomes").read_text().splitlines():
            number, outcome = json.loads(line)
            found[number] = Outcome(**outcome)
    if len(found) != len(injections):
        raise RuntimeError(f"{len(injections) - len(found)} injections have no outcome; a server died")
    return [found[k] for k in range(len(injections))]


def _be_server(injections: list[Injection], binary: Path, folder: Path, queue: int) -> None:
    """Run injections until there are no more; never returns."""
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        folder.mkdir()
        server = Server(binary, folder)
        try:
            with open(folder / "outcomes", "w") as file:
                while number := os.read(queue, 4):
                    (k,) = struct.unpack("=I", number)
                    outcome = server.run(injections[k])
                    if max(outcome.seconds, outcome.close_seconds) > SLOW:
                        outcome = server.run(injections[k])  # perhaps the machine stood still
                    file.write(json.dumps([k, asdict(outcome)]) + "\n")
                    file.flush()
        finally:
            server.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> int:
    """Run injections and print what went wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=0, help="so many; 0: a thorough sample; -1: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", default="", help="those whose name contains this")
    parser.add_argument("--out", type=Path, help="a JSON file for injections and outcomes")
    parser.add_argument("--lagging", action="store_true", help="training runs on a lagging device")
    options = parser.parse_args()
    if options.lagging:
        options.only = "training"
        for name in RUNS.keys() - {"store"}:
            RUNS[name] = lagging_lane()(RUNS[name])  # the decorator makes devices at each call
    with tempfile.TemporaryDirectory(prefix="infinity-faults-", ignore_cleanup_errors=True) as folder:
        injections, outcomes, digests = campaign(
            Path(folder),
            count=options.count,
            seed=options.seed,
            workers=options.workers,
            only=options.only,
        )
    problems = []
    for injection, outcome in zip(injections, outcomes, strict=True):
        found = problem(injection, outcome, digests[injection.run])
        if found is not None:
            problems.append(f"{injection.name}\n{found}")
    if options.out is not None:
        pairs = [[asdict(i), asdict(o)] for i, o in zip(injections, outcomes, strict=True)]
        options.out.write_text(json.dumps({"runs": pairs, "problems": problems}))
    sys.stdout.write("\n\n".join(problems) + f"\n{len(problems)} problems in {len(injections)} injections\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
