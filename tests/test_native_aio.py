"""The C I/O engine by its own test program: warnings are errors, under sanitizers, and at -DNDEBUG."""

from __future__ import annotations

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

pytestmark = pytest.mark.skipif(
    not COMPILER and not os.environ.get("CI"), reason="needs a C compiler in the path"
)


@pytest.fixture
def scratch() -> Iterator[str]:
    """A directory on a file system with O_DIRECT, where there is one."""
    with tempfile.TemporaryDirectory(prefix=".test-native-aio-", dir=ROOT / "tests") as path:
        yield path


def _build(scratch: str, flags: list[str]) -> str:
    program = f"{scratch}/test_aio"
    sources = [*sorted((ROOT / "csrc/aio").glob("*.c")), ROOT / "tests/native/test_aio.c"]
    includes = [f"-I{ROOT}/csrc/aio", f"-I{ROOT}/tests/native"]
    subprocess.run(
        [COMPILER, *FLAGS, *flags, *includes, *map(str, sources), "-o", program, "-ldl"],
        check=True,
        timeout=120,
    )
    return program


@pytest.mark.parametrize("build", BUILDS)
def test_native(scratch: str, build: str) -> None:
    program = _build(scratch, BUILDS[build])
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1"}
    result = subprocess.run(
        [program, scratch], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
