"""Packages beside ours that are broken: each is named, with what to do about it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from infinity.core.errors import DataError
from infinity.core.optional import optional

from .command_line import python, words

pytestmark = pytest.mark.integration

BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_a_package_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "their_models", "def __getattr__(name):\n    import torchvizion\n")
    package(tmp_path, "torchvizion", BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="their_models is installed, but cannot be imported") as caught:
        optional("their_models", "hf", "AutoModel")
    assert "operator torchvision::nms does not exist" in str(caught.value.found)
    assert (caught.value.cure or "").startswith("pip install --force-reinstall their_models")
    with pytest.raises(DataError, match="nothing_such is not installed"):
        optional("nothing_such", "hf")
    with pytest.raises(DataError, match="nothing_such is not installed") as caught:
        optional("nothing_such.of_it", None, "Thing")
    assert caught.value.cure == "pip install nothing_such"


def ran(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program for which `folder` comes first on the path."""
    return python(
        "-c", f"import sys\nsys.path.insert(0, sys.argv.pop(1))\n{code}", str(folder), *arguments, cold=True
    )


def model_in(folder: Path) -> str:
    (folder / "model").mkdir()
    told = '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'
    (folder / "model" / "config.json").write_text(told)
    return str(folder / "model")


def test_a_broken_transformers_is_blamed(tmp_path: Path) -> None:
    """`doctor` imports what it calls ok, and no model is read."""
    package(tmp_path, "transformers", BROKEN)
    code = (
        "import json\n"
        "from infinity.cli.doctor import versions\n"
        "from infinity.cli.main import run\n"
        "print(json.dumps({f.name: f for f in versions()}))\n"
        "sys.exit(run(['plan', '--init-from', sys.argv[1]]))\n"
    )
    done = ran(code, tmp_path, model_in(tmp_path))
    assert done.returncode == 2, done.stderr
    _, status, found, cure = json.loads(done.stdout.splitlines()[0])["transformers"]
    assert status == "error"
    assert "operator torchvision::nms does not exist" in found
    assert "pip install --force-reinstall transformers" in cure
    assert "transformers is installed, but cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_needs_no_transformers_goes_on_without_it(nvme: str, tmp_path: Path) -> None:
    """And what needs it names the extra."""
    without = (
        "sys.modules['transformers'] = None\nfrom infinity.cli.main import run\nsys.exit(run(sys.argv[1:]))\n"
    )
    done = ran(without, tmp_path, "plan", *words(nvme))
    assert done.returncode == 0, done.stderr
    done = ran(without, tmp_path, "plan", "--init-from", model_in(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "transformers is not installed" in done.stderr
    assert "pip install 'infinity-offload[hf]'" in done.stderr
