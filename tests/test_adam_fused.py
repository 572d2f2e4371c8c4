"""Adam in one launch (adam_fused.py), as far as Triton's interpreter shows it on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infinity.hardware import adam_reference, cpu_adam
from infinity.hardware.cpu_adam import Segment

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
@pytest.mark.ecosystem
def test_the_kernel_gives_the_bits_of_the_cpu() -> None:
    heads = Path(sys.prefix) / "heads"  # torch must not see triton anywhere else
    if not heads.is_dir() and not os.environ.get("CI"):
        pytest.skip("needs triton: `make test-all` installs it")
    environment = {**os.environ, "PYTHONPATH": str(heads), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.fused_bits", "60"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (0, "60 updates: same\n"), done.stderr[-4000:]


def test_without_triton_it_is_plain_torch() -> None:
    assert adam_reference._fused() is None
    scalars = cpu_adam._derive(Segment(0, 1, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1.0, decoupled=True))
    assert adam_reference._fused_for(torch.device("cpu"), torch.float32, scalars) is None
