"""docs/ranks.md, as it stands; and libraries on two ranks, beside DistributedDataParallel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from infinity.storage.checkpoints import find

from .ranks import all_well, run_ranks
from .test_ecosystem import need
from .test_ranks import MOE, of_stage

pytestmark = pytest.mark.integration

PAGE = (Path(__file__).parents[1] / "docs/ranks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"## (.+?)\n(?:(?!\n## )[\s\S])*?```python\n([\s\S]*?)```", PAGE)
#: What takes seconds to import.
IMPORTS = (
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "tests.test_ecosystem",
)
SNIPPETS = {title.split(",")[0].split(" ")[0]: code for title, code in BLOCKS}


BLOCK = """
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()
"""
STEPS = """
for _ in range(4):
    model(torch.randn(2, 16)).square().mean().backward()  # each rank draws its own batch
    optimizer.step()
    optimizer.zero_grad()
infinity.save(optimizer, "checkpoints")
infinity.close(optimizer)
"""


def ran(name: str, folder: Path, before: str = "", after: str = "") -> dict[str, torch.Tensor]:
    """Run a snippet on two ranks, between other code; return the parameters that it has saved."""
    (folder / "arenas").mkdir()
    script = f"import os\nos.chdir({str(folder)!r})\nimport torch\ntorch.set_num_threads(1)\n"
    all_well(run_ranks(2, script + before + SNIPPETS[name] + after, seconds=120))
    found = find(str(folder / "checkpoints"))
    return load_file(Path(found.path, found.content["files"]["parameters"]))


def test_every_snippet_runs() -> None:
    assert sorted(SNIPPETS) == ["A", "Experts"]
    assert PAGE.count("```python") == len(BLOCKS) == len(SNIPPETS)


def test_data_that_ends_unevenly(tmp_path: Path) -> None:
    found = ran("A", tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(52, 16, generator=torch.Generator().manual_seed(0))
    batches = data.split(16)
    assert len(batches[-1]) == 4
    for rows in batches:
        model(rows).square().mean().backward()
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(found, dict(model.state_dict()))


def test_experts(tmp_path: Path) -> None:
    found = ran("Experts", tmp_path, MOE + BLOCK, STEPS)
    assert len(found) == 14
    assert all(v.isfinite().all() for v in found.values())


@pytest.mark.integration
def test_an_offloaded_trainer_on_two_ranks(tmp_path: Path) -> None:
    said = {}
    for by in ("torch", "engine"):
        script = "from tests.rank_libraries import offloads\noffloads()"
        first, second = all_well(run_ranks(2, script, str(tmp_path), by, seconds=120, imports=IMPORTS))
        lines = [[json.loads(line) for line in out.splitlines() if line[0] == "["] for out in (first, second)]
        said[by] = lines[0]
        assert lines[0] == lines[1]
    assert len(said["torch"]) == 3
    wanted = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert said["engine"][:2] == said["torch"][:2]
    assert len(said["torch"][2][0]) >= 9
    for of_engine, of_torch in zip(said["engine"][2], said["torch"][2], strict=True):
        assert of_engine == pytest.approx(of_torch, rel=1e-5)
    state = torch.load(tmp_path / "engine.pt", weights_only=True)
    torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-6)
    final = load_file(tmp_path / "engine" / "out" / "final" / "model.safetensors")
    torch.testing.assert_close(final, state, rtol=0, atol=0)


@pytest.mark.integration
def test_an_offloaded_trainer_generates_texts_of_any_length(tmp_path: Path) -> None:
    script = "from tests.rank_libraries import generates\ngenerates()"
    all_well(run_ranks(2, script, str(tmp_path), seconds=60, imports=IMPORTS))


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_to_one_rank_saves_on_all(ranks: int, tmp_path: Path) -> None:
    """The run goes on, on as many ranks or on fewer."""
    script = "from tests.rank_libraries import stopped\nstopped()"
    results = run_ranks(2, script, str(tmp_path), seconds=60, imports=IMPORTS)
    assert [code for code, *_ in results] == [75, 75]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["checkpoint-3"]
    said = all_well(run_ranks(ranks, script, str(tmp_path), "resume", seconds=60, imports=IMPORTS))
    assert len({out.splitlines()[-1] for out in said}) == 1
    assert len(json.loads(said[0].splitlines()[-1])) == 2


@pytest.mark.integration
def test_a_trainer_that_knows_of_no_ranks_is_refused(tmp_path: Path) -> None:
    """As on CPUs without `use_cpu`: each rank would train with all data."""
    script = "from tests.rank_libraries import unaware\nunaware()"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    results = run_ranks(2, script, str(tmp_path), seconds=60, environment=environment, imports=IMPORTS)
    assert all("use_cpu=True" in said for said in all_well(results))


def trains_as_torch_does(folder: Path, stage: int, **settings: Any) -> None:
    """Three steps with `generate` behind each, on two ranks, the texts of which end at different lengths."""
    program = [{"turns": turns, "between": ["generate"]} for turns in (2, 1, 2)]
    config = of_stage(folder, stage) | {"dtype": "bf16"}
    given = {"model": "llama", "program": program, "config": config, **settings}
    script = "from tests.rank_training import main; main()"
    results = run_ranks(2, script, json.dumps(given), seconds=120, imports=IMPORTS[2:])
    assert all_well(results) == ["same\n"] * 2


def test_generate_between_steps(tmp_path: Path) -> None:
    trains_as_torch_does(tmp_path, 3)


@pytest.mark.integration
@pytest.mark.parametrize(("adapters", "stage"), [("dora", 3), ("saved", 1)])
def test_adapters_train_as_in_plain_torch(adapters: str, stage: int, tmp_path: Path) -> None:
    need("peft")
    trains_as_torch_does(tmp_path, stage, adapters=adapters)
