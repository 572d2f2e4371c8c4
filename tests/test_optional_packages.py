"""Packages beside ours that are broken: each is named, with what to do about it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from infinity.core.errors import DataError
from infinity.core.optional import optional

from .command_line import python, words

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


@pytest.mark.first
@pytest.mark.parametrize("name", ["torchvision", "transformers"])
def test_doctor_imports_what_it_calls_ok(name: str, tmp_path: Path) -> None:
    package(tmp_path, name, BROKEN)
    code = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from infinity.cli.doctor import versions\n"
        "print(json.dumps({f.name: f for f in versions()}))\n"
    )
    done = python("-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    _, status, found, cure = json.loads(done.stdout.splitlines()[-1])[name]
    assert status == "error"
    assert "operator torchvision::nms does not exist" in found
    assert f"pip install --force-reinstall {name}" in cure


def test_a_model_is_not_read_with_a_broken_transformers(tmp_path: Path) -> None:
    package(tmp_path, "transformers", BROKEN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from infinity.cli.main import run\n"
        "sys.exit(run(['plan', '--init-from', sys.argv[1] + '/model']))\n"
    )
    done = python("-c", code, str(tmp_path))
    assert done.returncode == 2
    assert "transformers is installed, but cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


def test_inference_blames_a_broken_library_and_no_model(tmp_path: Path) -> None:
    """transformers imports only now what a name of it needs; a model of it is as good as it was."""
    package(tmp_path, "transformers", "def __getattr__(name):\n    import their_kernels\n")
    package(tmp_path, "their_kernels", "raise ImportError('libkernels.so: cannot open shared object file')\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'
    )
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import infinity\n"
        "from infinity.core.errors import DataError\n"
        "try:\n"
        "    infinity.inference(sys.argv[1] + '/model', infinity.Config(device='cpu'))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    done = python("-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "transformers is installed, but cannot be imported" in done.stdout
    assert "libkernels.so" in done.stdout
    assert "the model in" not in done.stdout


def test_what_needs_no_transformers_goes_on_without_it(nvme: str, tmp_path: Path) -> None:
    """And what needs it names the extra."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "from infinity.cli.main import run\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )

    def without(*arguments: str) -> subprocess.CompletedProcess[str]:
        return python("-c", code, *arguments)

    fine = (
        ["plan", *words(nvme)],
        ["doctor", nvme],
    )
    for arguments in fine:
        done = without(*arguments)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
    done = without("plan", "--init-from", str(model))
    assert done.returncode == 2, done.stderr
    assert "transformers is not installed" in done.stderr
    assert "pip install 'infinity-offload[hf]'" in done.stderr
