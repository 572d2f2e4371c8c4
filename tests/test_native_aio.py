"""The C I/O engine by its own test program: warnings are errors, under sanitizers, and at -DNDEBUG."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("gcc") or shutil.which("cc") or ""
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
BUILDS = {
    "plain": ["-O2", "-DNDEBUG", "-Wpedantic"],
    "address and undefined": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
WRAPPED = [
    "calloc",
    "mmap",
    "madvise",
    "dlopen",
    "dlsym",
    "syscall",
    "pthread_create",
    "epoll_create1",
    "eventfd",
    "epoll_ctl",
    "statx",
]
PROGRAMS = {"test_aio": [], "test_aio_faults": [f"-Wl,--wrap={name}" for name in WRAPPED]}

pytestmark = pytest.mark.skipif(
    not COMPILER and not os.environ.get("CI"), reason="needs a C compiler in the path"
)


@pytest.fixture
def scratch() -> Iterator[str]:
    """A directory on a file system with O_DIRECT, where there is one."""
    with tempfile.TemporaryDirectory(prefix=".test-native-aio-", dir=ROOT / "tests") as path:
        yield path


def _run(command: list[str], cwd: str, timeout: float = 60) -> str:
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _build_and_run(scratch: str, programs: list[str], flags: list[str]) -> None:
    """Compile the engine once, link it with each test program, run these."""
    sources = [str(path) for path in sorted((ROOT / "csrc/aio").glob("*.c"))]
    sources += [str(ROOT / f"tests/native/{program}.c") for program in programs]
    compile_one = [COMPILER, *FLAGS, *flags, f"-I{ROOT}/csrc/aio", f"-I{ROOT}/tests/native"]
    _run([*compile_one, "-c", *sources], scratch, timeout=120)
    objects = [Path(source).stem + ".o" for source in sources]
    for program in programs:
        own = [name for name in objects if not name.startswith("test_") or name == f"{program}.o"]
        _run([*compile_one, *own, *PROGRAMS[program], "-o", program, "-ldl"], scratch, timeout=120)
        assert _run([f"./{program}", scratch], scratch) == ""


@pytest.mark.integration
@pytest.mark.first
@pytest.mark.parametrize("build", BUILDS)
def test_native(scratch: str, build: str) -> None:
    # The thread sanitizer has wrappers of its own for the calls that the second one wraps.
    programs = ["test_aio"] if build == "thread" else list(PROGRAMS)
    _build_and_run(scratch, programs, BUILDS[build])


@pytest.mark.integration
def test_branches_are_covered(scratch: str) -> None:
    """Nearly every branch of the engine is an answer to an error; at least 95 % of them are taken."""
    if shutil.which("gcov") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs gcov, which comes with gcc")
    flags = ["-O0", "--coverage", "-fprofile-update=atomic", "-Wl,-u,__gcov_dump"]
    _build_and_run(scratch, list(PROGRAMS), flags)
    taken = total = 0
    for source in sorted((ROOT / "csrc/aio").glob("*.c")):
        report = json.loads(_run(["gcov", "-b", "--json-format", "--stdout", f"{source.stem}.gcda"], scratch))
        for file in report["files"]:
            if not file["file"].endswith(".c"):
                continue
            lines = [line["count"] > 0 for line in file["lines"]]
            branches = [b["count"] > 0 for line in file["lines"] for b in line["branches"]]
            assert sum(lines) >= 0.98 * len(lines), f"{source.name}: {sum(lines)} of {len(lines)} lines"
            taken, total = taken + sum(branches), total + len(branches)
    assert total > 500
    assert taken >= 0.95 * total, f"{taken} of {total} branches"
