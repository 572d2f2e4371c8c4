"""Checkpoints and exports of several ranks: the same files, whoever writes them, and one end for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity

from .quick import quick
from .rank_checkpoints import contents, made, trained
from .ranks import all_well, run_ranks
from .test_ranks import settings_of

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


MOMENTS = {form: {"optimizer_state_dtype": form} for form in ("fp32", "bf16", "8bit")}
MOMENTS["8bit, some"] = {**MOMENTS["8bit"], "optimizer_state_fp32": ["norm.*", "layers.0.0.*"]}
MOMENTS["bf16, others"] = {**MOMENTS["bf16"], "optimizer_state_fp32": ["*.weight"]}


@pytest.mark.parametrize(
    ("dtype", "moments"),
    quick(
        [
            ("bf16", "fp32"),
            ("fp32", "fp32"),
            ("bf16", "8bit"),
            ("bf16", "8bit, some"),
        ],
        [("bf16", "fp32"), ("bf16", "8bit, some")],
    ),
)
def test_a_run_goes_on_at_any_number_of_ranks_bit_for_bit(dtype: str, moments: str, tmp_path: Path) -> None:
    """One rank → four, on NVMe → one, two and three, elsewhere; and the files are the same ones."""

    def one_of(*args: Any, **more: Any) -> Any:
        config, rest = job(*args, **more)
        return {**config, **MOMENTS[moments]}, rest

    one, four, two, three = (tmp_path / name for name in ("one", "four", "two", "three"))
    wanted = alone(one_of(tmp_path, "host", dtype, before=2, save=one))
    (found,) = ranks(4, one_of(tmp_path, "nvme", dtype, load=one, save=four))
    assert found == wanted
    assert alone(one_of(tmp_path, "state on nvme", dtype, load=four)) == wanted
    assert (
        ranks(
            2,
            one_of(tmp_path, "device", dtype, load=four, save=two, stage=2),
            one_of(tmp_path, "host", dtype, load=two),
            one_of(tmp_path, "state on nvme", dtype, load=four, save=tmp_path / "stage 1", stage=1),
            one_of(tmp_path, "device", dtype, load=tmp_path / "stage 1", save=tmp_path / "stage 0", stage=0),
            one_of(tmp_path, "nvme", dtype, load=tmp_path / "stage 0"),
        )
        == [wanted] * 5
    )
    first, second = ranks(
        3,
        one_of(tmp_path, "split", dtype, load=four, save=three),
        one_of(tmp_path, "state on nvme", dtype, load=two, stage=2),
    )
    assert first == second
    for other in (four, two, three, tmp_path / "stage 1", tmp_path / "stage 0"):
        assert contents(other / "step-2") == contents(one / "step-2")


def test_a_base_that_is_left_out_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    wanted = alone(job(tmp_path, "host", before=2, save=one, frozen=True))
    (found,) = ranks(2, job(tmp_path, "nvme", load=one, save=two, frozen=True))
    assert found == wanted
    assert alone(job(tmp_path, "device", load=two, frozen=True)) == wanted
    (found,) = ranks(4, job(tmp_path, "state on nvme", load=two, stage=1, frozen=True))
    assert found == wanted
    sums = [
        json.loads((path / "step-2" / "index.json").read_text())["index"]["left_out"] for path in (one, two)
    ]
    assert sums[0] == sums[1]
    assert len(sums[0]) == 10


@pytest.mark.parametrize(
    ("saved", "loaded"),
    quick(
        [(a, b) for a in MOMENTS for b in MOMENTS if a != b and "," in a + b],
        [("8bit, some", "bf16, others")],
    ),
)
def test_moments_become_those_of_the_run_that_loads_them(saved: str, loaded: str, tmp_path: Path) -> None:
    def one_of(form: str, place: str, **more: Any) -> Any:
        config, rest = job(tmp_path, place, **more)
        return {**config, **MOMENTS[form]}, rest

    one, four, two, three, wanted = (tmp_path / name for name in ("one", "four", "two", "three", "wanted"))
    alone(one_of(saved, "host", before=2, save=one))
    ranks(4, one_of(saved, "nvme", load=one, save=four))
    goes_on = alone(one_of(loaded, "host", load=one, save=wanted))
    assert ranks(2, one_of(loaded, "state on nvme", load=four, save=two)) == [goes_on]
    ranks(3, one_of(loaded, "split", load=four, save=three))
    for other in (two, three):
        assert contents(other / "step-2") == contents(wanted / "step-2")


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


_REPLACED = """
import json, os, shutil, sys
from pathlib import Path
import infinity
from infinity.api import load
from tests.rank_checkpoints import made
config, root, newer = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
check = load.check_shared

def too_late(*given):
    if (root / "step-2").exists():
        (newer / "step-3").rename(root / "step-3")
        shutil.rmtree(root / "step-2")
    check(*given)

if os.environ["RANK"] == "1":
    load.check_shared = too_late
_, adam = made(config)
infinity.load(adam, root)
print(adam.steps)
infinity.close(adam)
"""


def test_a_checkpoint_that_goes_before_another_rank_has_found_it_is_no_error(tmp_path: Path) -> None:
    """A save of another job replaces it between the first rank's look and the second one's."""
    root, newer = tmp_path / "saved", tmp_path / "newer"
    config, _ = job(tmp_path, "host")
    alone(job(tmp_path, "host", before=2, save=root))
    alone(job(tmp_path, "host", before=3, save=newer))
    assert all_well(run_ranks(2, _REPLACED, json.dumps(config), str(root), str(newer))) == ["3\n"] * 2
    assert not (root / "step-2").exists()


@pytest.mark.first
@pytest.mark.parametrize(
    ("rank", "how"), quick([(1, "SIGKILL"), (0, "SIGKILL"), (1, "SIGINT")], [(1, "SIGKILL"), (1, "SIGINT")])
)
def test_a_rank_that_ends_in_a_save_leaves_the_checkpoint_before(rank: int, how: str, tmp_path: Path) -> None:
    root = tmp_path / "saved"
    config, _ = job(tmp_path, "nvme")
    alone(job(tmp_path, "host", save=root))
    script = "from tests.rank_checkpoints import ends; ends()"
    results = run_ranks(2, script, json.dumps(config), str(root), str(rank), how)
    assert all(code != 0 for code, *_ in results)
    assert f"RankError: rank {rank} " in results[1 - rank][2]
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


@pytest.mark.parametrize(
    ("world", "place"),
    quick([(2, "nvme"), (2, "host"), (3, "nvme"), (4, "host")], [(2, "nvme")]),
)
def test_no_rank_ever_has_the_whole_model(world: int, place: str, tmp_path: Path) -> None:
    """Not as it is built and wrapped, trained, saved, loaded and exported: its share, and the budgets."""
    mib = 1 << 20
    device, host, whole = 12 * mib, 40 * mib, 16 * 21 * mib
    share = whole // world if place == "host" else 0
    config, _ = job(tmp_path, place)
    config |= {"device_memory": world * device, "host_memory": world * (host + share)}
    results = run_ranks(world, MEMORY, json.dumps(config), f"{tmp_path}/")
    found = [json.loads(said) for said in all_well(results)]
    for of in found:
        assert all(of[name] <= 8 * mib for name in ("save", "load", "export")), found
        assert of["run"] <= share + host + device + 96 * mib, found
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
