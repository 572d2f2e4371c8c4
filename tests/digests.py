"""What every case of the parity tests comes to, as digests. A change of structure changes none of them.

    python -m tests.digests --output tests/digests.json     record them, from a checkout without changes

Bits depend on torch, on its kernels for this processor and on the number of its threads, so the record says
which; elsewhere the slow test computes both sides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from infinity.hardware import cpu_adam

from .reference import Run

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = Path(__file__).with_suffix(".json")
#: Of torch: what a worker of xdist has on two cores, and with more two workers would wait for each other.
THREADS: Final = 1
_ARITHMETIC: Final = ("amx", "avx", "f16c", "fma")  # what flags in /proc/cpuinfo begin with


def machine() -> dict[str, Any]:
    """What the bits of a run depend on, beside the code."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {name.strip(): value.strip() for name, _, value in reversed(lines)}  # of the first processor
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu.get("model name", "unknown"),
        # Machines name different processors alike; with AMX, or bf16 in AVX-512, oneDNN sums otherwise.
        "flags": sorted(f for f in cpu.get("flags", "").split() if f.startswith(_ARITHMETIC)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "isa": cpu_adam.isa(),
    }


def digests(run: Run) -> dict[str, str]:
    """A digest of each: losses; norms; parameters with their copies and buffers; moments."""
    return {
        "losses": _numbers(run.losses),
        "norms": _numbers(run.norms),
        "parameters": _tensors(run.params, run.copies, run.buffers),
        "moments": _tensors(run.exp_avg, run.exp_avg_sq),
    }


def _numbers(values: list[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()[:32]


def _tensors(*kinds: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for kind in kinds:
        for name, value in sorted(kind.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def recorded(name: str) -> dict[str, str] | None:
    """The digests of a case as they were recorded; None if the machine is another.

    Sets torch's threads to those of the record.
    """
    record = json.loads(RECORD.read_text())
    torch.set_num_threads(THREADS)
    return record["cases"][name] if record["machine"] == machine() else None


def compute() -> dict[str, dict[str, str]]:
    """Train every case, with its first placement."""
    from .test_parity import CASES, VARIANTS, offload

    torch.set_num_threads(THREADS)
    found = {}
    for name, (kind, training, _) in CASES.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            found[name] = digests(offload(kind, training, VARIANTS["host"], Path(folder)))
    return found


def commit() -> str:
    """The commit that is checked out; of a tree with changes there is none."""
    subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "infinity", "csrc"], cwd=ROOT, check=True)
    head = ["git", "rev-parse", "HEAD"]
    return subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    record = {"commit": commit(), "machine": machine(), "cases": compute()}
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
