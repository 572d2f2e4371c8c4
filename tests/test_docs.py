"""README.md, the pages of docs/, and the source distribution: the Python of pages runs, and pages name every
error and every name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.core import errors

from .ranks import all_well, run_ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)

#: What a page takes for granted: of each, and of those with models of transformers.
USERS_OWN = """
import torch
from torch import nn

class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, batch):
        return self.layers(batch).square().mean()

gpt_config = 64

def batch(step):
    return torch.randn(8, gpt_config, generator=torch.Generator().manual_seed(step))
"""
MORE = {
    "inference.md": """
from tests.test_ecosystem import llama, tokenizer
for part in (llama(), tokenizer()):
    part.save_pretrained("Meta-Llama-3.1-70B")
""",
    "libraries.md": """
import peft
from tests import test_ecosystem
from tests.test_ecosystem import llama as build
def adapt(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
tied = peft.get_peft_model(
    test_ecosystem.huggingface("llama", tied=True),
    peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
)
examples = test_ecosystem.examples()
""",
}
#: Pages whose Python runs elsewhere: with two ranks in test_rank_libraries.py, with signals in test_run.py.
ELSEWHERE = ("ranks.md", "runs.md")


def program(page: Path) -> str:
    """Return the Python of a page, each line at the number that it has there."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for fence in FENCE.finditer(text):
        if fence[2] == "python":
            first = text[: fence.start(3)].count("\n")
            code = [line.removeprefix(fence[1]) for line in fence[3].splitlines()]
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def with_python() -> list[Any]:
    """Return the pages whose Python runs here."""
    pages = [p for p in PAGES if p.name not in ELSEWHERE and program(p).strip()]
    marks = {
        "libraries.md": [pytest.mark.integration, _without("lightning")],
        "inference.md": [pytest.mark.integration, _without("transformers")],
        **{name: [pytest.mark.integration] for name in ("loops.md", "placement.md", "saving.md")},
    }
    return [pytest.param(p, id=p.name, marks=marks.get(p.name, [])) for p in pages]


def _without(package: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test on a machine that lacks the package; in CI the test fails there."""
    lacking = importlib.util.find_spec(package) is None and not os.environ.get("CI")
    return pytest.mark.skipif(lacking, reason=f"needs {package}")


@pytest.mark.processes
@pytest.mark.parametrize("page", with_python())
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """All blocks of a page in one process, one after the other."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "prepared.py").write_text(USERS_OWN + MORE.get(page.name, ""), encoding="utf-8")
    code = program(page).replace("/mnt/nvme/run1", str(tmp_path / "nvme"))
    script = tmp_path / f"{page.stem}.py"
    script.write_text("from prepared import *" + code, encoding="utf-8")
    run = (
        "import os, runpy, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "for name in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split():\n"
        "    del os.environ[name]  # a user's program is no rank\n"
        "os.chdir(os.path.dirname(sys.argv[1]))\n"
        "sys.path.insert(0, os.getcwd())\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    all_well(run_ranks(1, run, str(script), seconds=240, environment={"CUDA_VISIBLE_DEVICES": ""}))


def test_every_error_is_explained() -> None:
    table = (ROOT / "docs/limits.md").read_text(encoding="utf-8").split("\n## Errors\n")[1]
    rows = re.findall(r"^\| `(\w+)`", table, flags=re.M)
    assert sorted([*rows, "InfinityError"]) == errors.__all__


def test_the_api_page_has_every_name() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = re.findall(r"^\.\. auto\w+:: infinity\.(\w+)(?:\(.*\))?$", text, flags=re.M)
    assert {*named, "__version__"} == set(infinity.__all__)


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
