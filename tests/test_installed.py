"""The package as pip installs it: alone, or beside another one that imports as `infinity`; and its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from infinity.core.installed import OURS

PACKAGE = Path(infinity.__file__).parent


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the package, as pip leaves it."""
    shutil.copytree(PACKAGE, tmp_path / "infinity", ignore=shutil.ignore_patterns("__pycache__"))
    _describe(tmp_path, "infinity_offload")
    return tmp_path


def _describe(site: Path, name: str) -> None:
    (info := site / f"{name}-1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("infinity\n")


def _run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without the environment that the tests run in, where the package is installed, too.
    packages = [str(site), *(p for p in sys.path if p.endswith("site-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(packages)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(
        command, env=environment, cwd=site, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_package_has_what_it_says() -> None:
    here = {name for name in os.listdir(PACKAGE) if name[0] not in "._" or name.startswith("__")}
    assert here - {"__pycache__"} | {"_aio.pyi", "_cpu_adam.pyi"} == OURS


def test_alone_it_imports_and_two_distributions_in_one_directory_are_an_error(site: Path) -> None:
    (site / "infinity" / "notes").mkdir()  # the user's, of no distribution
    done = _run(site, "-c", "import infinity; print(infinity.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    (site / "infinity" / "model").mkdir()
    (site / "infinity" / "model" / "cpu_master.py").touch()
    _describe(site, "megatrain")
    ours = (site / "infinity" / "__init__.py").read_text()
    for last in (ours, "from . import model\n"):  # whose files pip has written last
        (site / "infinity" / "__init__.py").write_text(last)
        done = _run(site, "-m", "infinity", "--version")
        assert done.returncode != 0
        assert "two distributions are installed as `infinity`" in done.stderr
        assert "infinity-offload, megatrain, which also brought model" in done.stderr
    # What the error tells to do: pip removes the files of both, and installs this package.
    (site / "infinity" / "__init__.py").write_text(ours)
    shutil.rmtree(site / "infinity" / "model")
    shutil.rmtree(site / "megatrain-1.0.dist-info")
    assert _run(site, "-m", "infinity", "--version").returncode == 0


def test_another_package_of_this_name_elsewhere_is_an_error(site: Path, tmp_path: Path) -> None:
    """As an editable installation leaves it: whose `infinity` a program gets, the order of the path says."""
    (tmp_path / "megatrain" / "infinity").mkdir(parents=True)
    (tmp_path / "megatrain" / "infinity" / "__init__.py").touch()
    script = "import sys; sys.path.append(sys.argv[1]); import infinity"
    done = _run(site, "-c", script, str(tmp_path / "megatrain"))
    assert "BuildError: two packages on the path are named `infinity`" in done.stderr
    assert str(tmp_path / "megatrain" / "infinity") in done.stderr
