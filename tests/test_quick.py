"""What `make test` takes of a test's parameters, and `make test-cpus` of the CPUs."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from infinity.hardware import cpu_adam

from .command_line import ROOT
from .quick import cover


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 3, 2), (33, 2), (5, 2, 1, 3)])
def test_each_value_of_each_parameter_occurs_evenly(sizes: tuple[int, ...]) -> None:
    settings = [dict(zip("abcd", each, strict=False)) for each in itertools.product(*map(range, sizes))]
    chosen = cover(settings)
    assert len(chosen) == len(set(chosen)) == max(sizes)
    for name, size in zip("abcd", sizes, strict=False):
        times = Counter(settings[i][name] for i in chosen)
        assert len(times) == size
        assert max(times.values()) - min(times.values()) <= 1


@pytest.mark.parametrize("sizes", [(1,), (5,), (5, 2), (3, 3, 2), (6, 3, 2), (5, 2, 1, 3)])
def test_any_two_values_of_two_parameters_meet(sizes: tuple[int, ...]) -> None:
    settings = [dict(zip("abcd", each, strict=False)) for each in itertools.product(*map(range, sizes))]
    chosen = cover(settings, 2)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        a, b = "abcd"[first], "abcd"[second]
        assert len({(settings[i][a], settings[i][b]) for i in chosen}) == sizes[first] * sizes[second]
    assert len(chosen) == len(set(chosen)) < max(2, len(settings)) or len(sizes) < 3


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the CPUs are those of x86-64")
def test_kernels_that_this_cpu_lacks_are_named_and_not_run(tmp_path: Path) -> None:
    """With torch's kernels for AVX-512 on a CPU without it, the tests would die, or take others."""
    make = tmp_path / "make"
    make.write_text(
        '#!/bin/sh\necho "$@ with $ATEN_CPU_CAPABILITY and $INFINITY_ISA"\ntest "$INFINITY_ISA" != scalar\n'
    )
    make.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    environment.pop("GITHUB_ACTIONS", None)
    done = subprocess.run(
        [ROOT / ".ci" / "cpus", "default", "avx2", "avx512", "avx1024"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    isas = cpu_adam.available_isas()
    ran = [isa for isa in ("avx2", "avx512") if isa in isas]
    lacks = f"not run: this CPU has {' '.join(isas)}"
    assert done.stdout.splitlines() == [
        *("test with default and scalar", *(f"test with {isa} and {isa}" for isa in ran)),
        "default: failed",
        *(f"{isa}: passed" if isa in ran else f"{isa}: {lacks}" for isa in ("avx2", "avx512")),
        f"avx1024: {lacks}",
    ], done.stderr
    assert done.returncode == 1
