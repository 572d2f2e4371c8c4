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
#: The instruction set of the update, by processor: one without SVE, and others by the bytes of a vector.
CPUS = {"cortex-a72": "neon"} | {
    f"max,sve-default-vector-length={nbytes}": isa
    for nbytes, isa in ((16, "neon"), (32, "sve256"), (64, "sve512"))
}
AIO = [f"{PREFIX}gcc", "-std=c11", "-O3", "-D_GNU_SOURCE", *WARNINGS, f"-I{ROOT}/csrc/aio"]

pytestmark = pytest.mark.nightly  # the packages that it needs are large


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


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adam")
    names = ("scalar", "avx2", "avx512", "neon", "sve256", "sve512")
    sources = [ROOT / "csrc" / "cpu_adam" / f"adam_{name}.cpp" for name in names]
    sources += [ROOT / "csrc" / "cpu_adam" / f"{name}.cpp" for name in ("dispatch", "pool")]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        bits = source.stem.partition("sve")[2]
        flags = ["-march=armv8.2-a+sve", f"-msve-vector-bits={bits}"] if bits else []
        run([*ADAM, *flags, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


@pytest.fixture(scope="module")
def program(objects: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adam") / "test_adam"
    run([*ADAM, ROOT / "tests" / "native" / "test_adam.cpp", *objects, "-o", path])
    return path


@pytest.mark.parametrize("cpu", ["this one"] if HERE else CPUS)
def test_vectors_give_the_bits_of_the_scalar_kernels(program: Path, cpu: str) -> None:
    command = [program, "fork"] if HERE else [*QEMU, "-cpu", cpu, program, "fork", CPUS[cpu]]
    assert run(command) == "ok\n"


def test_every_operation_rounds_once(objects: list[Path]) -> None:
    # [Note: one rounding per operation]: no fused multiply-add, no approximation.
    code = run([f"{PREFIX}objdump", "-d", "--no-show-raw-insn", *objects])
    used = set(re.findall(r"^ +[0-9a-f]+:\t(\S+)", code, flags=re.MULTILINE))
    assert {"fmul", "fadd", "fdiv", "fsqrt"} <= used
    fused = {name for name in used if re.match(r"fn?m(add|sub|ad|sb|l[as])|b?fml|frecp|frsqrt|bfcvt", name)}
    assert not fused
    for vector in (r"v\d+\.4s", r"z\d+\.s"):
        assert re.search(rf"\tfdivr?\t{vector}", code)
        assert re.search(rf"\tfsqrt\t{vector}", code)


def test_the_io_engine(tmp_path: Path) -> None:
    sources = [*sorted((ROOT / "csrc" / "aio").glob("*.c")), ROOT / "tests" / "native" / "test_aio.c"]
    program = tmp_path / "test_aio"
    run([*AIO, *sources, "-o", program, "-ldl"])
    assert run([*QEMU, program, tmp_path, *([] if HERE else ["emulated"])]) == ""
