"""Checkpoints and exports of several ranks: the same files, whoever writes them, and one end for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity

from .rank_checkpoints import contents, made, trained
from .ranks import all_well, run_ranks
from .test_ranks import settings_of

pytestmark = pytest.mark.integration

SCRIPT = "from tests.rank_checkpoints import main; main()"


def job(folder: Path, place: str, dtype: str = "bf16", *, stage: int = 3, **more: Any) -> Any:
    config = settings_of(folder, place, dtype, zero_stage=stage, chunk_elements=65536)
    config |= {"gradients": None} if stage < 2 else {}
    return config, {name: str(value) if isinstance(value, Path) else value for name, value in more.items()}


def alone(job: Any) -> dict[str, Any]:
    config, more = job
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(config, **more)
    finally:
        torch.set_num_threads(threads)


def ranks(world: int, *jobs: Any) -> list[dict[str, Any]]:
    """Do jobs on several ranks; return what all of them have found in each."""
    said = all_well(run_ranks(world, SCRIPT, json.dumps(jobs), seconds=120))
    found = [json.loads(text) for text in said]
    for other in found[1:]:
        assert other == found[0]
    first: list[dict[str, Any]] = found[0]
    return first


MOMENTS: dict[str, dict[str, Any]] = {
    "8bit, some": {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ["norm.*", "layers.0.0.*"]},
    "bf16, others": {"optimizer_state_dtype": "bf16", "optimizer_state_fp32": ["*.weight"]},
}


def test_a_run_goes_on_at_any_number_of_ranks_bit_for_bit(tmp_path: Path) -> None:
    """One rank → four, on NVMe → one, two and three, elsewhere; and the files are the same ones."""

    def one_of(*args: Any, **more: Any) -> Any:
        config, rest = job(*args, **more)
        return {**config, **MOMENTS["8bit, some"]}, rest

    one, four, two, three = (tmp_path / name for name in ("one", "four", "two", "three"))
    wanted = alone(one_of(tmp_path, "host", before=2, save=one))
    (found,) = ranks(4, one_of(tmp_path, "nvme", load=one, save=four))
    assert found == wanted
    assert alone(one_of(tmp_path, "state on nvme", load=four)) == wanted
    assert (
        ranks(
            2,
            one_of(tmp_path, "device", load=four, save=two, stage=2),
            one_of(tmp_path, "host", load=two),
            one_of(tmp_path, "state on nvme", load=four, save=tmp_path / "stage 1", stage=1),
            one_of(tmp_path, "device", load=tmp_path / "stage 1", save=tmp_path / "stage 0", stage=0),
            one_of(tmp_path, "nvme", load=tmp_path / "stage 0"),
        )
        == [wanted] * 5
    )
    first, second = ranks(
        3,
        one_of(tmp_path, "split", load=four, save=three),
        one_of(tmp_path, "state on nvme", load=two, stage=2),
    )
    assert first == second
    for other in (four, two, three, tmp_path / "stage 1", tmp_path / "stage 0"):
        assert contents(other / "step-2") == contents(one / "step-2")


def test_muon_goes_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    def one_of(place: str, **more: Any) -> Any:
        config, rest = job(tmp_path, place, "fp32", **more)
        return {**config, "optimizer": "muon", "units": ["Net"]}, rest

    one, two = tmp_path / "one", tmp_path / "two"
    wanted = alone(one_of("host", before=2, save=one))
    assert ranks(2, one_of("nvme", load=one, save=two)) == [wanted]
    assert alone(one_of("split", load=two)) == wanted


def test_a_base_that_is_left_out_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = alone(job(tmp_path, "host", before=2, save=one, frozen=True))
    (found,) = ranks(2, job(tmp_path, "nvme", load=one, save=two, frozen=True))
    assert found == wanted
    assert alone(job(tmp_path, "device", load=two, frozen=True)) == wanted
    sums = [
        json.loads((path / "step-2" / "index.json").read_text())["index"]["left_out"] for path in (one, two)
    ]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 10


def test_moments_become_those_of_the_run_that_loads_them(tmp_path: Path) -> None:
    def one_of(form: str, place: str, **more: Any) -> Any:
        config, rest = job(tmp_path, place, **more)
        return {**config, **MOMENTS[form]}, rest

    one, two, wanted = (tmp_path / name for name in ("one", "two", "wanted"))
    alone(one_of("8bit, some", "host", before=2, save=one))
    goes_on = alone(one_of("bf16, others", "host", load=one, save=wanted))
    assert ranks(2, one_of("bf16, others", "state on nvme", load=one, save=two)) == [goes_on]
    assert contents(two / "step-2") == contents(wanted / "step-2")


def test_what_one_rank_cannot_do_ends_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    config, _ = job(tmp_path, "nvme")
    alone(job(tmp_path, "host", before=2, save=root))
    script = "from tests.rank_checkpoints import faults; faults()"
    said = all_well(run_ranks(2, script, json.dumps(config), str(root)))
    first, second = (json.loads(text) for text in said)
    wanted = [
        "TransferError: ",
        "DirectoryError: is not one directory for all ranks",
        "StateDictError: state['x'] cannot be saved",
        f"StateDictError: the checkpoint {root}/step-2 does not have all of the model",
        "CorruptionError: ",
        "DirectoryError: is not one directory for all ranks",
        "ParameterError: ",
    ]
    for mine, other, words in zip(first["said"], second["said"], wanted, strict=True):
        assert mine.split(": ")[0] == other.split(": ")[0] == words.split(": ")[0], (mine, other)
        assert words.split(": ")[1] in mine, (mine, words)
        assert words.split(": ")[1] in other, (other, words)
    assert second["seed"] == first["seed"] + 1
    assert first["drawn"] != second["drawn"]


@pytest.mark.first
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_rank_that_ends_in_a_save_leaves_the_checkpoint_before(how: str, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    config, _ = job(tmp_path, "nvme")
    alone(job(tmp_path, "host", save=root))
    script = "from tests.rank_checkpoints import ends; ends()"
    results = run_ranks(2, script, json.dumps(config), str(root), "1", how)
    assert all(code != 0 for code, *_ in results)
    assert "RankError: rank 1 " in results[0][2]
    assert [p.parent.name for p in root.glob("*/index.json")] == ["step-0"]
    alone(job(tmp_path, "host", load=root, save=root))
    assert not list(root.rglob("*incomplete*"))


def test_an_export_is_the_one_of_one_rank(tmp_path: Path) -> None:
    root, out, same = (tmp_path / name for name in ("saved", "out", "same"))
    alone(job(tmp_path, "host", before=2, save=root))
    config, _ = job(tmp_path, "split")
    script = "from tests.rank_checkpoints import exports; exports()"
    all_well(run_ranks(2, script, json.dumps([config, str(out), str(root)])))
    config, _ = job(tmp_path, "host")
    model, adam = made(config)
    infinity.load(adam, root)
    infinity.export(model, same / "whole", "fp32")
    infinity.export(model, same / "cut", None, 100_000)
    infinity.export(model.layers[1], same / "part")
    infinity.close(adam)
    files = {str(p.relative_to(same)): p.read_bytes() for p in same.rglob("*") if p.is_file()}
    assert {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()} == files
    assert len(files) > 4


MEMORY = """
import json, os, sys
import torch
from torch import nn
import infinity
from tests.measured import Peak
torch.set_num_threads(1)
config = infinity.Config(**json.loads(sys.argv[1]))
found = {}

def measured(name, call):
    with Peak(interval=0.002) as peak:
        call()
        found[name] = peak.nbytes

def step():
    model(torch.randn(2, 1024)).square().mean().backward()
    adam.step()
    adam.zero_grad()

with Peak(interval=0.002) as all_of_it:
    with infinity.init(config):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(20)))
    model, adam = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    step()
    measured("save", lambda: infinity.save(adam, sys.argv[2] + "saved"))
    step()
    measured("load", lambda: infinity.load(adam, sys.argv[2] + "saved"))
    measured("export", lambda: infinity.export(model, sys.argv[2] + "out", "fp32"))
    step()
found["run"] = all_of_it.nbytes
infinity.close(adam)
print(json.dumps(found))
"""


def test_no_rank_ever_has_the_whole_model(tmp_path: Path) -> None:
    """Not as it is built and wrapped, trained, saved, loaded and exported, but the budgets alone."""
    mib = 1 << 20
    device, host = 12 * mib, 40 * mib
    config, _ = job(tmp_path, "nvme")
    config |= {"device_memory": 2 * device, "host_memory": 2 * host}
    results = run_ranks(2, MEMORY, json.dumps(config), f"{tmp_path}/")
    found = [json.loads(said) for said in all_well(results)]
    for of in found:
        assert all(of[name] <= 8 * mib for name in ("save", "load", "export")), found
        assert of["run"] <= host + device + 96 * mib, found
    taken = [of["run"] for of in found]
    assert max(taken) - min(taken) <= 16 * mib, found  # ranks that begin without values take no more


PEFT = """
import os, sys
from pathlib import Path
import torch, infinity
from tests.test_export_peft import on_tied_names, trained
torch.set_num_threads(1)
torch.manual_seed(3)
folder = Path(sys.argv[1])
model, adam = trained(on_tied_names("embedding saved"), folder / os.environ["RANK"], dtype="fp32")
infinity.export(model, folder / "alone")
infinity.export(model, folder / "merged", merge_adapters=True)
infinity.close(adam)
"""


@pytest.mark.integration
def test_adapters_of_several_ranks_are_exported_alone_and_merged(tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        all_well(run_ranks(world, PEFT, str(folder), seconds=120))
        merged = ("merged/model.safetensors", "merged/config.json")
        files = [folder / name for name in ("alone/adapter_model.safetensors", *merged)]
        found.append([path.read_bytes() for path in files])
    assert found[0] == found[1]
