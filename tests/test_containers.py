"""Containers refuse system calls and set limits: training goes on, with the same bits, and says why
it is slower.

One process imports everything once; a fork of it for each case takes on the restrictions (seccomp
for good, limits, another user), trains, and asks the ring and `doctor` what they make of it.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_NUMBERS = {
    "x86_64": {
        "io_setup": 206,
        "io_submit": 209,
        "io_getevents": 208,
        "statx": 332,
        "memfd_create": 319,
        "fallocate": 285,
        "sched_getaffinity": 204,
    },
    "aarch64": {
        "io_setup": 0,
        "io_submit": 2,
        "io_getevents": 4,
        "statx": 291,
        "memfd_create": 279,
        "fallocate": 47,
        "sched_getaffinity": 123,
    },
}
_SAME = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
_MACHINE = os.uname().machine
CALLS = {**_NUMBERS.get(_MACHINE, {}), **_SAME}
URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of the BPF machine
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forbid(calls: tuple[str, ...], error: int) -> None:
    """Have the kernel answer these system calls of this process with `error`, from now on."""
    code = [struct.pack("=HBBI", _LOAD, 0, 0, 0)]  # the number of the call
    for k, call in enumerate(calls):
        code.append(struct.pack("=HBBI", _JUMP_IF_EQUAL, len(calls) - k, 0, CALLS[call]))
    code.append(struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW))
    code.append(struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | error))
    program = ctypes.create_string_buffer(b"".join(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 4]
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, None, None, None) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), None, None) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))


def _nobody(folder: str) -> None:
    os.chown(folder, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


#: Name → what is taken away from a process that works in `folder`.
RESTRICTIONS: dict[str, Callable[[str], None]] = {
    "nothing": lambda folder: None,
    "docker": lambda folder: forbid(URING, errno.EPERM),  # its profile since 2023
    "no io_setup": lambda folder: forbid(("io_setup",), errno.EPERM),
    "no io_setup, ENOSYS": lambda folder: forbid(("io_setup",), errno.ENOSYS),
    "no io_submit": lambda folder: forbid(("io_submit",), errno.EPERM),
    "neither": lambda folder: forbid(("io_setup", *URING), errno.EPERM),
    "neither, ENOSYS": lambda folder: forbid(("io_setup", *URING), errno.ENOSYS),
    "neither submits": lambda folder: forbid(("io_submit", "io_uring_enter"), errno.EACCES),
    "contexts used up": lambda folder: forbid(("io_setup",), errno.EAGAIN),
    "uring without tables": lambda folder: forbid(("io_setup", "io_uring_register"), errno.EPERM),
    # Old container runtimes answer EPERM to calls that are younger than they are.
    "no statx": lambda folder: forbid(("statx",), errno.EPERM),
    "no memfd_create": lambda folder: forbid(("memfd_create",), errno.EPERM),
    "no fallocate": lambda folder: forbid(("fallocate",), errno.EOPNOTSUPP),
    "no sched_getaffinity": lambda folder: forbid(("sched_getaffinity",), errno.EPERM),
    "no locked memory": lambda folder: _limit(resource.RLIMIT_MEMLOCK, 0),
    "few descriptors": lambda folder: _limit(resource.RLIMIT_NOFILE, 64),
    "another user": _nobody,
    "another user, neither, no locked memory": lambda folder: (
        _limit(resource.RLIMIT_MEMLOCK, 0),
        _nobody(folder),
        forbid(("io_setup", *URING), errno.EPERM),
    )[0],
}
#: The backend that `auto` takes, and words of its reason. Missing: as with "nothing".
EXPECTED = {
    "docker": ("libaio", "first choice"),
    "no io_setup": ("uring", "libaio: refused (seccomp"),
    "no io_setup, ENOSYS": ("uring", "libaio: the kernel does not have it, or seccomp refuses it"),
    "no io_submit": ("uring", "libaio: a trial write failed: refused (seccomp"),
    "neither": ("threads", "uring: refused (seccomp"),
    "neither, ENOSYS": ("threads", "uring: the kernel does not have it, or seccomp refuses it"),
    "neither submits": ("threads", "uring: a trial write failed: refused (seccomp"),
    "contexts used up": ("uring", "fs.aio-nr has reached fs.aio-max-nr"),
    "uring without tables": ("uring", "libaio: refused (seccomp"),
    "another user, neither, no locked memory": ("threads", "uring: refused (seccomp"),
}
SLOWER = [name for name, (backend, _) in EXPECTED.items() if backend != "libaio"]


def _train(name: str, folder: str) -> dict[str, Any]:
    """What a restricted process finds."""
    import warnings

    from click.testing import CliRunner

    from infinity.cli.doctor import doctor_command
    from infinity.hardware.aio import Ring

    from .fault_runs import training_run

    RESTRICTIONS[name](folder)
    warnings.simplefilter("ignore")  # of what is slower; here the answers count
    with Ring("probe", path=folder) as ring:
        found = {"backend": ring.backend, "reason": ring.reason}
    found["digest"] = training_run([folder], backend="auto", deadline=60.0)
    if name in SLOWER:
        result = CliRunner().invoke(doctor_command, [folder, "--json"])
        found["doctor"] = json.loads(result.output[result.output.index("{") :])
    return found


def _main(folder: Path) -> None:
    """Fork a process for each case that is named on a line of stdin; answer in lines."""
    import importlib

    for module in ("torch._dynamo", "tests.fault_runs", "infinity.cli.doctor", "click.testing"):
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a fork server must be made before any thread")
    for k, line in enumerate(sys.stdin):
        name = line.rstrip("\n")
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(100, exit=True)
            own = folder / str(k)
            own.mkdir()
            try:
                answer = _train(name, str(own))
            except BaseException as error:
                answer = {"error": "".join(traceback.format_exception(error))}
            os.write(write_end, json.dumps(answer).encode())
            os._exit(0)
        os.close(write_end)
        with open(read_end) as answers:
            text = answers.read()
        os.waitpid(pid, 0)
        print(text or json.dumps({"error": "it died"}), flush=True)  # noqa: T201


class Container:
    """Answers for each restriction what training came to."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="infinity-containers-", dir=Path(__file__).parent))
        self.folder.chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        for name in ("INFINITY_AIO", "INFINITY_DELAY_SEED"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.test_containers import _main, Path; _main(Path({str(self.folder)!r}))",
            ],
            cwd=_ROOT,
            env={**environment, "XDG_CONFIG_HOME": str(self.folder / "config")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, name: str) -> dict[str, Any]:
        """Return the answers of one case."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=60)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    found = Container()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def free(container: Container) -> dict[str, Any]:
    return container.train("nothing")


@pytest.mark.first
@pytest.mark.skipif(_MACHINE not in _NUMBERS, reason=f"the numbers of {_MACHINE}'s system calls")
@pytest.mark.parametrize("name", [n for n in RESTRICTIONS if n != "nothing"])
def test_a_restricted_process_trains_with_the_same_bits_and_says_why_it_is_slower(
    container: Container, free: dict[str, Any], name: str
) -> None:
    if "another user" in name and os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("not root")
        pytest.skip("not root")
    answer = container.train(name)
    assert answer["digest"] == free["digest"]
    backend, reason = EXPECTED.get(name, (free["backend"], free["reason"]))
    if free["backend"] == "libaio":  # else there is no libaio, or the tests' drive is no drive
        assert answer["backend"] == backend, answer["reason"]
        assert reason in answer["reason"]
        if name in SLOWER:
            line = next(f for f in answer["doctor"]["findings"] if f["name"].endswith(": backend"))
            assert reason in line["found"]
            assert line["status"] == ("warning" if backend == "threads" else "ok")
            assert line["cure"] or backend != "threads"
