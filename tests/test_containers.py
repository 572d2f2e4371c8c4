"""Containers refuse system calls and set limits: training goes on, with the same bits, and says why
it is slower.

A process for each case takes on the restrictions (seccomp for good, limits, another user), trains, and asks
the ring and `doctor` what they make of it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import resource
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .command_line import need_root
from .ranks import all_well, run_ranks

_NAMES = ["io_setup", "io_submit", "io_getevents", "statx", "memfd_create", "fallocate", "sched_getaffinity"]
_NUMBERS = {
    "x86_64": dict(zip(_NAMES, (206, 209, 208, 332, 319, 285, 204), strict=True)),
    "aarch64": dict(zip(_NAMES, (0, 2, 4, 291, 279, 47, 123), strict=True)),
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
    "no io_submit": lambda folder: forbid(("io_submit",), errno.EPERM),
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
    "no io_submit": ("uring", "libaio: a trial write failed: refused (seccomp"),
    "neither, ENOSYS": ("threads", "uring: the kernel does not have it, or seccomp refuses it"),
    "neither submits": ("threads", "uring: a trial write failed: refused (seccomp"),
    "contexts used up": ("uring", "fs.aio-nr has reached fs.aio-max-nr"),
    "uring without tables": ("uring", "libaio: refused (seccomp"),
    "another user, neither, no locked memory": ("threads", "uring: refused (seccomp"),
}
SLOWER = [name for name, (backend, _) in EXPECTED.items() if backend != "libaio"]


IMPORTS = (
    "torch._dynamo",
    "click.testing",
    "infinity.cli.doctor",
    "tests.fault_runs",
    "tests.test_containers",
)


def answer(name: str, folder: str) -> None:
    """Take on a restriction, and print what training comes to."""
    from click.testing import CliRunner

    from infinity.cli.doctor import doctor_command
    from infinity.hardware.aio import Ring

    from .fault_runs import training_run

    RESTRICTIONS[name](folder)
    warnings.simplefilter("ignore")  # of what is slower; here the answers count
    with Ring("probe", path=folder) as ring:
        found: dict[str, Any] = {"backend": ring.backend, "reason": ring.reason}
    found["digest"] = training_run([folder], backend="auto", deadline=60.0)
    if name in SLOWER:
        result = CliRunner().invoke(doctor_command, [folder, "--json"])
        found["doctor"] = json.loads(result.output[result.output.index("{") :])
    print(json.dumps(found))  # noqa: T201


@functools.cache
def trained(name: str) -> dict[str, Any]:
    """Return the answers of one case."""
    with tempfile.TemporaryDirectory(prefix="infinity-containers-", dir=Path(__file__).parent) as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "drive").mkdir()
        script = "import sys\nfrom tests.test_containers import answer\nanswer(*sys.argv[1:])\n"
        environment = {"INFINITY_AIO": "", "INFINITY_DELAY_SEED": "", "XDG_CONFIG_HOME": f"{folder}/config"}
        results = run_ranks(
            1, script, name, f"{folder}/drive", seconds=250, environment=environment, imports=IMPORTS
        )
    found: dict[str, Any] = json.loads(all_well(results)[0].splitlines()[-1])
    return found


@pytest.mark.first
@pytest.mark.skipif(_MACHINE not in _NUMBERS, reason=f"the numbers of {_MACHINE}'s system calls")
@pytest.mark.parametrize("name", [n for n in RESTRICTIONS if n != "nothing"])
def test_a_restricted_process_trains_with_the_same_bits_and_says_why_it_is_slower(name: str) -> None:
    if "another user" in name:
        need_root()
    free, found = trained("nothing"), trained(name)
    assert found["digest"] == free["digest"]
    backend, reason = EXPECTED.get(name, (free["backend"], free["reason"]))
    if free["backend"] == "libaio":  # else there is no libaio, or the tests' drive is no drive
        assert found["backend"] == backend, found["reason"]
        assert reason in found["reason"]
        if name in SLOWER:
            line = next(f for f in found["doctor"]["findings"] if f["name"].endswith(": backend"))
            assert reason in line["found"]
            assert line["status"] == ("warning" if backend == "threads" else "ok")
            assert line["cure"] or backend != "threads"
