"""Descriptors and forks: a number is closed once, and a fork keeps no lock of its parent's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity.storage.arena import Arena
from infinity.storage.checkpoints import Save
from infinity.storage.folder import Claim, Folder

MIB = 1 << 20


def fork(check: Callable[[], bool]) -> int:
    """Fork; return the child's number. It exits with 0 if `check` returns true."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            os._exit(0 if check() else 3)
        finally:
            os._exit(1)
    return child


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_fork_closes_no_number_that_was_closed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(str(tmp_path), MIB)
    numbers = [arena.fd, arena.file.plain_fd]
    real = os.close
    ends: list[int] = []

    def closes(fd: int) -> None:
        real(fd)
        if fd in numbers:
            numbers.remove(fd)
            pipe = os.pipe()  # takes the number
            ends.append(end_of(fork(lambda: all(map(is_open, pipe)))))
            for end in pipe:
                real(end)

    monkeypatch.setattr(os, "close", closes)
    arena.close()
    assert ends
    assert not any(ends)


@pytest.mark.parametrize("kind", ["save", "export", "run"])
def test_a_fork_keeps_no_lock_of_its_parent(tmp_path: Path, kind: str) -> None:
    make = {
        "save": lambda: Save(str(tmp_path / "saves"), 1),
        "export": lambda: Folder(str(tmp_path / "export")),
        "run": lambda: Claim(str(tmp_path / "run")),
    }[kind]
    reading, writing = os.pipe()

    def waits() -> bool:
        os.close(writing)
        return os.read(reading, 1) == b""

    with make():  # type: ignore[attr-defined]
        child = fork(waits)
    try:
        with make():  # type: ignore[attr-defined]
            pass
    finally:
        os.close(writing)
        os.close(reading)
        assert end_of(child) == 0
