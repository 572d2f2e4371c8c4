"""What README.md and the source distribution promise."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_loop_is_the_one_that_is_type_checked() -> None:
    """`make types` runs mypy --strict over tests/readme_loop.py."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    diff = text.split("```diff\n")[1].split("```")[0]
    loop = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("-"))
    assert (ROOT / "tests/readme_loop.py").read_text(encoding="utf-8").split("# README.md\n")[1] == loop
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "strict = true" in config
    assert "tests/readme_loop.py" in config


@pytest.mark.integration
def test_the_source_distribution_has_tests_and_documents_that_work(tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    tree = tmp_path / "tree"
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    for name in files:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tree,
        check=True,
        capture_output=True,
        timeout=120,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    missing = [name for name in files if not (root / name).is_file() and not name.startswith(".")]
    assert missing == []
    rules = [sys.executable, str(ROOT / ".ci/rules.py"), str(root)]
    done = subprocess.run(rules, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
