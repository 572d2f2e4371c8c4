"""Runs a Python script inside a memory cgroup of its own (v1 or v2). Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

_ROOT = Path(__file__).parents[1]
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Result:
    """What came of a script. `peak` and `oom_kills` are the cgroup's: bytes, with page cache."""

    rc: int
    stdout: str
    stderr: str
    peak: int
    oom_kills: int


def unavailable(reason: str) -> NoReturn:
    """Skip the test, saying why; where `CI` is set, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"this machine cannot run the test: {reason}")
    pytest.skip(reason)


def run_limited(
    script: str,
    *args: str,
    limit: int,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run Python code with `args` in a fresh memory cgroup of `limit` bytes, without swap.

    The process enters the cgroup before it starts Python, so every page counts. It and its
    children are killed after `timeout` seconds (TimeoutError).
    """
    with _cgroup(limit) as group:
        # The shell moves itself, then becomes Python: no moment outside the cgroup.
        enter = f'echo $$ > "{group.path / "cgroup.procs"}" && exec "$@"'
        process = subprocess.Popen(
            ["/bin/sh", "-c", enter, "sh", sys.executable, "-c", script, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as expired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=30)
            raise TimeoutError(f"no end after {timeout} s; stderr: {stderr[-2000:]}") from expired
        return Result(process.returncode, stdout, stderr, group.peak(), group.oom_kills())


class _V1:
    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        (path / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):  # where swap is accounted: none of it
            (path / "memory.memsw.limit_in_bytes").write_text(str(limit))

    def peak(self) -> int:
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    def oom_kills(self) -> int:
        return _field(self.path / "memory.oom_control", "oom_kill")


class _V2:
    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        (path / "memory.max").write_text(str(limit))
        with contextlib.suppress(OSError):
            (path / "memory.swap.max").write_text("0")

    def peak(self) -> int:
        try:
            return int((self.path / "memory.peak").read_text())
        except OSError:  # before Linux 5.19
            return int((self.path / "memory.current").read_text())

    def oom_kills(self) -> int:
        return _field(self.path / "memory.events", "oom_kill")


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _parent() -> tuple[Path, type[_V1] | type[_V2]]:
    """Where this process's memory cgroup is, and which version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = _MOUNT / "memory"
        if "memory" in controllers.split(",") and v1.is_dir():
            own = v1 / path.lstrip("/")
            return (own if own.is_dir() else v1), _V1
    # v2: a cgroup with processes cannot have limited children, so go to the top.
    if "memory" in (_MOUNT / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # it may be on already, or be the host's to decide
            (_MOUNT / "cgroup.subtree_control").write_text("+memory")
        return _MOUNT, _V2
    raise OSError("no memory controller")


@contextlib.contextmanager
def _cgroup(limit: int) -> Iterator[_V1 | _V2]:
    path = None
    try:
        parent, version = _parent()
        path = parent / f"infinity-test-{uuid.uuid4().hex[:12]}"
        path.mkdir()
        group = version(path, limit)
    except OSError as error:
        if path is not None and path.is_dir():
            path.rmdir()
        unavailable(f"no memory cgroup can be made: {error}")
    try:
        yield group
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Kill what is left in the cgroup, then remove it; it empties a moment after its last process."""
    deadline = time.monotonic() + 30
    while True:
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
