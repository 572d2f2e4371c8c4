"""The native parts on 64-bit Arm: elsewhere cross-compiled, and run by QEMU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HERE = platform.machine() == "aarch64"
PREFIX = "" if HERE else "aarch64-linux-gnu-"
QEMU = [] if HERE else ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pthread"]
ADAM = [f"{PREFIX}g++", "-std=c++17", "-O3", "-ffp-contract=off", *WARNINGS, f"-I{ROOT}/csrc/cpu_adam"]
AIO = [f"{PREFIX}gcc", "-std=c11", "-O3", "-D_GNU_SOURCE", *WARNINGS, f"-I{ROOT}/csrc/aio"]

pytestmark = pytest.mark.slow  # the packages that it needs are large


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    needed = [f"{PREFIX}{tool}" for tool in ("g++", "gcc", "objdump")] + QEMU[:1]
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing:
        why = f"needs {', '.join(missing)}: apt install g++-aarch64-linux-gnu qemu-user"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_neon_gives_the_bits_of_the_scalar_kernels(tmp_path: Path) -> None:
    names = ("adam_scalar", "adam_avx2", "adam_avx512", "adam_neon", "dispatch", "pool")
    sources = [ROOT / "csrc" / "cpu_adam" / f"{name}.cpp" for name in names]
    sources.append(ROOT / "tests" / "native" / "test_adam.cpp")
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda k: run([*ADAM, "-c", sources[k], "-o", objects[k]]), range(len(sources))))
    program = tmp_path / "test_adam"
    run([*ADAM, *objects, "-o", program])
    assert run([*QEMU, program, "fork"]) == "ok\n"

    # [Note: one rounding per operation]: no fused multiply-add, no approximation.
    code = run([f"{PREFIX}objdump", "-d", "--no-show-raw-insn", *objects[: len(names)]])
    used = set(re.findall(r"^ +[0-9a-f]+:\t(\S+)", code, flags=re.MULTILINE))
    assert {"fmul", "fadd", "fdiv", "fsqrt"} <= used
    fused = {name for name in used if re.match(r"f(n?m(add|sub)|ml[as])|b?fml|frecp|frsqrt|bfcvt", name)}
    assert not fused
    assert re.search(r"\tfdiv\tv\d+\.4s", code)
    assert re.search(r"\tfsqrt\tv\d+\.4s", code)


def test_the_io_engine(tmp_path: Path) -> None:
    sources = [*sorted((ROOT / "csrc" / "aio").glob("*.c")), ROOT / "tests" / "native" / "test_aio.c"]
    program = tmp_path / "test_aio"
    run([*AIO, *sources, "-o", program, "-ldl"])
    assert run([*QEMU, program, tmp_path, *([] if HERE else ["emulated"])]) == ""
