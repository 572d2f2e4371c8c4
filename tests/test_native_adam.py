"""The native core of the CPU Adam under AddressSanitizer, UBSan and ThreadSanitizer."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "csrc" / "cpu_adam"
#: By the name of the file: the flags without which it has no kernel.
SOURCES: dict[str, list[str]] = {
    "adam_scalar": [],
    "adam_avx2": ["-mavx2", "-mf16c"],
    "adam_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
    "adam_neon": [],
    "adam_sve256": ["-march=armv8.2-a+sve", "-msve-vector-bits=256"],
    "adam_sve512": ["-march=armv8.2-a+sve", "-msve-vector-bits=512"],
    "dispatch": [],
    "pool": [],
    "test_adam": [],
}
#: By machine: what is compiled with its flags. Threads meet in the pool and in what all vectors share, so the
#: widest vectors, which take longest to compile, are left out there.
WITH_FLAGS = {
    "address,undefined": {"x86_64": ("avx2", "avx512"), "aarch64": ("sve256", "sve512")},
    "thread": {"x86_64": ("avx2",)},
}
#: AddressSanitizer meets these faults as well; their checks would double the time that compiling takes.
LESS = {"address,undefined": ["-fno-sanitize=null,object-size,vptr"], "thread": []}
COMMON = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread", f"-I{CORE}"]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def build(folder: Path, sanitizer: str) -> Path:
    """Compile the core and its test with a sanitizer; return the program."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = [*COMMON, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *LESS[sanitizer]]
    vectors = WITH_FLAGS[sanitizer].get(platform.machine().lower(), ())

    def compile_one(name: str) -> str:
        source = (ROOT / "tests" / "native" if name == "test_adam" else CORE) / f"{name}.cpp"
        target = folder / f"{name}.o"
        isa = SOURCES[name] if name.endswith(vectors) else []
        done = run([*compiler, *flags, *isa, "-c", str(source), "-o", str(target)])
        assert done.returncode == 0, done.stderr
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    program = folder / "test_adam"
    done = run([*compiler, *flags, *objects, "-o", str(program)])
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.integration  # compiling takes half a minute
@pytest.mark.parametrize("sanitizer", WITH_FLAGS)
def test_the_native_core_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    program = build(tmp_path, sanitizer)
    # ThreadSanitizer cannot start threads in a forked child.
    command = [str(program)] + ([] if sanitizer == "thread" else ["fork"])
    done = run(command)
    if "unexpected memory mapping" in done.stderr:  # its shadow wants less address randomization
        done = run(["setarch", "-R", *command])
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "ok\n"
