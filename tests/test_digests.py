"""The digests of all parity cases are those of the commit that recorded them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import digests

LIMIT = 1200


@pytest.mark.nightly
def test_what_is_computed_is_what_was(tmp_path: Path) -> None:
    """Where the record is another machine's, its commit is built and run here too."""
    record = json.loads(digests.RECORD.read_text())
    torch.set_num_threads(digests.THREADS)
    if record["machine"] != digests.machine():
        record = compute_at(record["commit"], tmp_path / "then")
    assert digests.compute() == record["cases"]


def compute_at(commit: str, folder: Path) -> dict[str, object]:
    git = shutil.which("git")
    assert git is not None, "needs git, and a clone with its history"
    subprocess.run([git, "worktree", "prune"], cwd=digests.ROOT, check=True, timeout=LIMIT)
    add = [git, "worktree", "add", "--detach", str(folder), commit]
    subprocess.run(add, cwd=digests.ROOT, check=True, timeout=LIMIT)
    try:
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=folder, check=True, timeout=LIMIT)
        output = folder / "found.json"
        run = [sys.executable, "-m", "tests.digests", "--output", str(output)]
        env = {**os.environ, "OMP_NUM_THREADS": str(digests.THREADS)}
        subprocess.run(run, cwd=folder, env=env, check=True, timeout=LIMIT)
        return json.loads(output.read_text())  # type: ignore[no-any-return]
    finally:
        remove = [git, "worktree", "remove", "--force", str(folder)]
        subprocess.run(remove, cwd=digests.ROOT, check=True, timeout=LIMIT)
