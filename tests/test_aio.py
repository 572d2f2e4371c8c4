"""The I/O engine from Python: every backend, every kind of error, forks, signals, probing."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import signal
import struct
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.core.errors import (
    BackendError,
    ClosedError,
    ConfigError,
    DeadlineError,
    DirectoryError,
    TransferError,
)
from infinity.hardware.aio import BACKENDS, DirectFile, Ring, available_backends

from .command_line import python

BLOCK = 4096
WORKING = [name for name, verdict in available_backends().items() if verdict == "ok"]


class Memory:
    """Anonymous pages with an address."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def __getitem__(self, at: slice) -> bytes:
        return self.map[at]

    def __setitem__(self, at: slice, value: bytes) -> None:
        self.map[at] = value


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFINITY_AIO", "INFINITY_DELAY_SEED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory() -> Iterator[str]:
    """A directory on a real file system where there is one (/tmp and /dev/shm may be tmpfs)."""
    with tempfile.TemporaryDirectory(prefix=".test-aio-", dir=Path(__file__).parent) as path:
        yield path


@pytest.fixture(params=WORKING)
def ring(request: pytest.FixtureRequest, directory: str) -> Iterator[Ring]:
    with Ring("test", path=directory, backend=request.param, block_bytes=16 * BLOCK, queue_depth=8) as opened:
        yield opened


@pytest.fixture
def file(directory: str) -> Iterator[DirectFile]:
    with DirectFile.open(f"{directory}/file", os.O_RDWR | os.O_CREAT) as opened:
        yield opened


class Stalled:
    """Memory that the kernel cannot touch before `release`: a transfer to it hangs (userfaultfd).

    A buffered read hangs in its copy, a direct one in the submission, as with a dead drive.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.syscall(323 if os.uname().machine == "x86_64" else 282, os.O_CLOEXEC)
        if self.fd < 0:
            why = f"userfaultfd needs root: {os.strerror(ctypes.get_errno())}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
        self.memory = Memory(BLOCK)
        fcntl.ioctl(self.fd, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
        self._call(0xC020AA00, "QQQQ", 1)

    def _call(self, number: int, kind: str, mode: int) -> None:
        fcntl.ioctl(self.fd, number, bytearray(struct.pack(kind, self.memory.address, BLOCK, mode, 0)))

    def release(self) -> None:
        """Let the transfer go on, onto a page of zeros."""
        if self.fd >= 0:
            self._call(0xC020AA04, "QQQq", 0)
            os.close(self.fd)
            self.fd = -1


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    memory = Stalled()
    yield memory
    memory.release()  # or the process could not end


# ---------------------------------------------------------------------------- errors


def test_what_the_system_says_arrives(ring: Ring, directory: str) -> None:
    memory = Memory(BLOCK)
    with DirectFile.open("/dev/full", os.O_RDWR) as full:
        with pytest.raises(TransferError, match="No space left") as caught:
            ring.write(full, 0, memory.address, BLOCK).wait()
        assert caught.value.errno == 28
        assert "free space" in (caught.value.cure or "")
    Path(directory, "locked").write_bytes(bytes(BLOCK))
    with DirectFile.open(f"{directory}/locked", os.O_RDONLY) as locked:
        with pytest.raises(TransferError, match="Bad file descriptor"):
            ring.write(locked, 0, memory.address, BLOCK).wait()
        ring.read(locked, 0, memory.address, BLOCK).wait()
        with pytest.raises(TransferError, match="Bad address"):
            ring.read(locked, 0, 4096, BLOCK).wait()  # nothing is mapped there
    assert ring.stats().failed_tickets == 3


def test_wrong_arguments(ring: Ring, file: DirectFile) -> None:
    memory = Memory(BLOCK)
    for offset, address, nbytes in (
        (-1, memory.address, 1),
        (0, memory.address, -1),
        (0, 0, 1),
        (1 << 62, 1, 1 << 62),
    ):
        with pytest.raises(ValueError):
            ring.read(file, offset, address, nbytes)
    with pytest.raises(ConfigError, match="block_bytes"):
        Ring("x", backend="threads", block_bytes=1000)
    with pytest.raises(ConfigError):
        Ring("x", backend="threads", queue_depth=-1)
    file.close()
    with pytest.raises(ClosedError, match="closed"):
        ring.read(file, 0, memory.address, BLOCK)
    with pytest.raises(DirectoryError):
        DirectFile.open("/nonexistent/file")


@pytest.mark.root
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("backend", WORKING)
def test_a_stalled_read_misses_its_deadline(
    directory: str, stalled: Stalled, backend: str, direct: bool
) -> None:
    memory = Memory(64 * BLOCK)
    other = DirectFile.open(f"{directory}/other", os.O_RDWR | os.O_CREAT)
    opened = DirectFile.open(f"{directory}/f", os.O_RDWR | os.O_CREAT)
    os.truncate(opened.path, 1 << 20)
    file = opened if direct else DirectFile(opened.path, opened.plain_fd)
    ring = Ring("stalled", path=directory, backend=backend, queue_depth=2, deadline=0.3)
    ticket = ring.read(file, 0, stalled.memory.address, BLOCK)
    with pytest.raises(DeadlineError, match="not complete"):
        ticket.wait(0.05)
    assert not ticket.done
    stuck = backend == "uring" or (direct and backend != "threads")  # in the submission itself
    if not stuck:
        ring.write(other, 0, memory.address, 64 * BLOCK).wait()  # others go on meanwhile
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="quarantined") as caught:
        ticket.wait()
    assert time.monotonic() - began < 2
    assert caught.value.path == file.path
    assert ticket.done
    assert ticket.quarantined
    assert ring.stats().failed
    with pytest.raises(TransferError, match="accepts no more transfers"):
        ring.write(file, 0, memory.address, BLOCK)
    with pytest.raises(DeadlineError, match="closed with 1 transfers past their deadline"):
        ring.close()
    ring.close()
    stalled.release()
    assert ticket.quarantined
    opened.close()
    other.close()


# ---------------------------------------------------------------------------- fork


def test_a_fork_while_in_flight(ring: Ring, file: DirectFile) -> None:
    memory = Memory(8 << 20)
    memory[:] = random.Random(5).randbytes(8 << 20)
    tickets = [ring.write(file, k << 18, memory.address + (k << 18), 1 << 18) for k in range(32)]
    descriptors = {file.fd, file.plain_fd}
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused = 0
            for call in (
                lambda: ring.write(file, 0, memory.address, BLOCK),
                tickets[0].wait,
                lambda: tickets[0].done,
                ring.stats,
                file.check,
            ):
                try:
                    call()
                except ClosedError:
                    refused += 1
            ring.close()
            still_open = descriptors & {int(n) for n in os.listdir("/proc/self/fd")}
            # A ring of the child's own works.
            with Ring("child", backend="threads") as own, open(__file__, "rb") as source:
                own.read(DirectFile(__file__, source.fileno()), 0, memory.address, 512).wait()
            status = 0 if refused == 5 and not still_open else 2
        finally:
            os._exit(status)
    until = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0
    for ticket in tickets:
        ticket.wait()
    with open(file.path, "rb") as plain:
        assert plain.read() == memory[:]


# ---------------------------------------------------------------------------- which backend


def test_auto_says_what_it_took_and_why(directory: str) -> None:
    with Ring("x", path=directory) as ring:
        assert ring.backend in BACKENDS
        assert ring.reason
    assert set(available_backends(directory)) == set(BACKENDS)
    with Ring("x", path="/dev/shm") as ring:
        assert ring.backend == "threads"
        assert "tmpfs" in ring.reason or "O_DIRECT" in ring.reason
    with pytest.raises(DirectoryError):
        Ring("x", path=f"{directory}/missing")
    with pytest.raises(DirectoryError):
        available_backends(__file__)


def test_the_environment_forces_one(monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    monkeypatch.setenv("INFINITY_AIO", "threads")
    with Ring("x", path=directory, backend="libaio") as ring:
        assert ring.backend == "threads"
        assert "INFINITY_AIO" in ring.reason
    monkeypatch.setenv("INFINITY_AIO", "libaoi")
    with pytest.raises(BackendError, match="did you mean 'libaio'"):
        Ring("x", path=directory)
    monkeypatch.delenv("INFINITY_AIO")
    with pytest.raises(BackendError, match="unknown"):
        Ring("x", path=directory, backend="nvme")


def _forbid(*calls: int, error: int = 1) -> None:
    """Make the calls of these numbers fail with EPERM (or `error`) in this process, by seccomp (x86-64)."""
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # the number of the call
    for k, call in enumerate(calls):
        code.append(struct.pack("HBBI", 0x15, len(calls) - k, 0, call))
    code += [struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000), struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)]
    program = ctypes.create_string_buffer(b"".join(code))
    fprog = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, ctypes.create_string_buffer(fprog), 0, 0)):
        if libc.prctl(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)):
            raise OSError(ctypes.get_errno(), "prctl")


_X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are x86-64's")


@pytest.mark.integration
@_X86
@pytest.mark.parametrize(
    ("calls", "expected"),
    [((206,), "uring"), ((425,), "libaio"), ((206, 425), "threads"), ((209, 426), "threads")],
    ids=["io_setup", "io_uring_setup", "both", "io_submit and io_uring_enter"],
)
def test_what_seccomp_refuses(directory: str, calls: tuple[int, ...], expected: str) -> None:
    script = f"""
        from tests.test_aio import *
        from tests.test_aio import _forbid
        import logging
        logging.basicConfig()
        _forbid(*{calls})
        with Ring("x", path={directory!r}) as ring:
            file, memory = DirectFile.open({directory + "/f"!r}, os.O_RDWR | os.O_CREAT), Memory(BLOCK)
            ring.write(file, 0, memory.address, BLOCK).wait()
            print(ring.backend, "|", ring.reason)
        """
    result = python("-c", textwrap.dedent(script))
    assert result.returncode == 0, result.stderr
    backend, reason = result.stdout.strip().split(" | ")
    assert backend == expected
    if expected != "libaio":
        assert "seccomp" in reason
        assert "seccomp" in result.stderr  # told once, as a warning


@_X86
def test_what_the_kernel_has_no_room_for(directory: str) -> None:
    script = f"""
        from tests.test_aio import *
        from tests.test_aio import _forbid
        _forbid(206, error=11)  # io_setup: EAGAIN, as when fs.aio-max-nr is reached
        print(Ring("x", path={directory!r}).reason)
        try:
            Ring("x", path={directory!r}, backend="libaio")
        except BackendError as error:
            print(error)
        """
    result = python("-c", textwrap.dedent(script))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("aio-max-nr") == 3  # libaio, syscall; the error
    assert "does not work here" in result.stdout


# ---------------------------------------------------------------------------- hints


def test_hints_change_nothing_but_speed(ring: Ring, file: DirectFile) -> None:
    memory = Memory(32 * BLOCK)
    memory[:] = random.Random(6).randbytes(32 * BLOCK)
    took = ring.register_buffer(memory.address, 32 * BLOCK), ring.register_file(file)
    if ring.backend != "uring":
        assert took == (False, False)
    ring.write(file, 0, memory.address, 32 * BLOCK).wait()
    content = memory[:]
    memory[:] = bytes(32 * BLOCK)
    ring.read(file, 0, memory.address, 32 * BLOCK).wait()
    assert memory[:] == content
    # Another file under the same number: the registration must not outlive the first.
    path, fd = file.path, file.fd
    file.close()
    with DirectFile.open(path + "2", os.O_RDWR | os.O_CREAT) as other:
        assert other.fd == fd
        ring.write(other, 0, memory.address, BLOCK).wait()
        assert other.size == BLOCK
    assert os.stat(path).st_size == 32 * BLOCK
