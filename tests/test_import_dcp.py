"""Checkpoints that FSDP2 has written go on here; others are refused by name. fsdp_states.py writes them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict

import infinity
from infinity.cli.main import run
from infinity.core.errors import DataError, DirectoryError
from infinity.integrations.dcp import import_dcp
from infinity.storage.checkpoints import find

from .deepspeed_states import STEPS, losses_after, wrapped
from .fsdp_states import ARCHIVE, KINDS, record
from .offloaded import ON_HOST, config_for
from .recorded import check_damage, saved_in, unpack


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(ARCHIVE, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return Path(shutil.copytree(recorded / "nested", tmp_path / "saved"))


def check_that_it_goes_on(saved: Path, losses: list[float], folder: Path) -> None:
    """Load into a model of other values, and compare the losses of further steps."""
    folder.mkdir()
    path, foreign = import_dcp(str(saved), str(folder / "out"))
    described = find(path).content["parameters"]
    assert described["embed.weight"]["tied"] == ["head.weight"]
    assert {n for n, p in described.items() if not p["trainable"]} == {"first.weight", "first.bias", "shift"}
    model, adam = wrapped(folder, frozen=True)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
    further = "scheduler" in foreign.state
    state = infinity.load(adam, path, state={"scheduler": scheduler} if further else None)
    if further:
        assert state["epoch"] == 2
        assert torch.equal(state["order"], torch.arange(3))
    assert torch.equal(model.get_buffer("shift"), torch.arange(3) / 10)
    assert infinity.metrics(adam)["steps"] == STEPS
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]

    def set_rates(step: int) -> None:
        for group in adam.param_groups if not further else ():
            group["lr"] = 0.01 * 0.1 ** (step // 2)

    here = losses_after(model, adam, set_rates, scheduler if further else None)
    assert here == pytest.approx(losses[STEPS:], rel=1e-5)
    infinity.close(adam)


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on(kind: str, recorded: Path, tmp_path: Path) -> None:
    losses = json.loads((recorded / "losses.json").read_text())
    check_that_it_goes_on(recorded / kind, losses, tmp_path / "run")


@pytest.mark.integration
@pytest.mark.processes
def test_what_this_torch_saves_goes_on(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    record(tmp_path / "saved")
    losses = json.loads((tmp_path / "saved" / "losses.json").read_text())
    for kind in KINDS:
        check_that_it_goes_on(tmp_path / "saved" / kind, losses, tmp_path / kind)


def test_lists_of_what_the_program_saved_are_lists(tmp_path: Path) -> None:
    """DCP takes a list apart if there is a dict or a tensor in it: rates of groups, schedulers in schedulers,
    cursors of data."""
    rates = torch.optim.lr_scheduler

    def made(wrapped: bool) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        groups = [{"params": [*layer.parameters()]} for layer in model]
        adam = torch.optim.AdamW(groups, lr=1e-2 if wrapped else torch.tensor(1e-2))
        if wrapped:
            model, adam = infinity.wrap(model, adam, config_for(tmp_path, **ON_HOST))
        parts = [rates.LinearLR(adam, 0.1, total_iters=2), rates.CosineAnnealingLR(adam, 10)]
        return model, adam, rates.SequentialLR(adam, parts, [2])

    def step(model: Any, adam: Any, scheduler: Any) -> list[float]:
        model(torch.ones(4, 8)).pow(2).mean().backward()
        adam.step()
        scheduler.step()
        adam.zero_grad()
        return [float(group["lr"]) for group in adam.param_groups]

    plain = made(False)
    for _ in range(3):
        step(*plain)
    of_model, of_adam = get_state_dict(*plain[:2])
    tree = {"by number": {"0": [1, {"a": [torch.ones(2), {"b": 3}]}]}, "whole": {0: "x"}}
    dcp.save(
        {"model": of_model, "optimizer": of_adam, "scheduler": plain[2].state_dict(), "tree": tree},
        checkpoint_id=tmp_path / "saved",
    )
    wanted = step(*plain)
    path, foreign = import_dcp(str(tmp_path / "saved"), str(tmp_path / "out"))
    found = foreign.state["tree"]["by number"]["0"]
    assert torch.equal(found[1]["a"].pop(0), torch.ones(2))
    assert found == [1, {"a": [{"b": 3}]}]
    model, adam, scheduler = made(True)
    infinity.load(adam, path, state={"scheduler": scheduler})
    assert step(model, adam, scheduler) == pytest.approx(wanted, rel=1e-6)
    infinity.close(model)


def test_what_accelerate_leaves_beside_it_comes_along(recorded: Path, tmp_path: Path) -> None:
    """The directory of the optimizer beside that of the model, and the scheduler."""
    shutil.copytree(recorded / "accelerate", tmp_path / "saved")
    path, _ = import_dcp(str(tmp_path / "saved" / "pytorch_model_fsdp_0"), str(tmp_path / "alone"))
    assert saved_in(path, "exp_avg")["embed.weight"].abs().sum() > 0
    torch.save({"last_epoch": 3, "_step_count": 4}, tmp_path / "saved" / "scheduler.bin")
    _, foreign = import_dcp(str(tmp_path / "saved"), str(tmp_path / "out"))
    assert foreign.state["scheduler"] == {"last_epoch": 3, "_step_count": 4}
    with pytest.raises(DirectoryError, match="cannot look into"):
        import_dcp(str(tmp_path / "nothing"), str(tmp_path / "more"))


def test_the_command(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import-dcp", str(recorded / "flat"), str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steps"], result["parameters"], result["frozen"]) == (STEPS, 9, 3)
    assert result["state"] == ["scheduler", "epoch", "order"]


# -- what is refused -----------------------------------------------------------------------------


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a checkpoint."""
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def renamed(metadata: Any, old: str, new: str) -> None:
    """Give entries other names."""
    entries = metadata.state_dict_metadata
    for name in [name for name in entries if old in name]:
        entries[name.replace(old, new)] = entries.pop(name)
    for index in [index for index in metadata.storage_data if old in index.fqn]:
        other = type(index)(index.fqn.replace(old, new), index.offset, index.index)
        metadata.storage_data[other] = metadata.storage_data.pop(index)


def _without_places(metadata: Any) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "model.first.weight"][1:]:
        del metadata.storage_data[index]


def _overlapping(metadata: Any) -> None:
    about = metadata.state_dict_metadata["model.first.weight"]
    about.chunks[1] = about.chunks[0]


def _compressed(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ("zstd",)


def _again(old: str, new: str) -> Callable[[Any], None]:
    """What gives entries that begin with `old` a second time, as `new`."""

    def change(metadata: Any) -> None:
        for name in [n for n in metadata.state_dict_metadata if n.startswith(old)]:
            metadata.state_dict_metadata[new + name[len(old) :]] = metadata.state_dict_metadata[name]
        for index in [i for i in metadata.storage_data if i.fqn.startswith(old)]:
            other = type(index)(new + index.fqn[len(old) :], index.offset, index.index)
            metadata.storage_data[other] = metadata.storage_data[index]

    return change


#: What is done to a checkpoint, and what the error says.
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no optimizer": (lambda f: edit(f, lambda m: renamed(m, "exp_avg", "momentum")), "one optimizer"),
    "two optimizers": (lambda f: edit(f, _again("optim.", "second_optim.")), "does not have one optimizer"),
    "another moment": (lambda f: edit(f, lambda m: renamed(m, ".exp_avg_sq", ".mu")), "mu of "),
    "no steps": (lambda f: edit(f, lambda m: renamed(m, "scale.step", "scale.stop")), "stop of 'scale'"),
    "no betas": (lambda f: edit(f, lambda m: renamed(m, "0.betas", "0.momentum")), "a param group with"),
    "no model": (lambda f: edit(f, lambda m: renamed(m, "model.embed", "model.umbed")), "not have one model"),
    "a missing chunk": (lambda f: edit(f, _without_places), "where all of 'model.first.weight' is"),
    "a chunk twice": (lambda f: edit(f, _overlapping), "where all of 'model.first.weight' is"),
    "compressed": (lambda f: edit(f, _compressed), "not compressed"),
    "a missing file": (lambda f: (f / "__1_0.distcp").unlink(), "'__1_0.distcp'"),
    "other metadata": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        "is not the metadata",
    ),
    "no metadata": (lambda f: (f / ".metadata").unlink(), "is of a save that did not end"),
    "a name of another module": (
        lambda f: (f / ".metadata").write_bytes(b"cos\nsystem\n."),
        "os.system is not",
    ),
    "attributes of a class": (
        lambda f: (f / ".metadata").write_bytes(
            b"ctorch.distributed.checkpoint.metadata\nMetadata\n(dX\x01\x00\x00\x00aK\x01sb."
        ),
        "a class or a function is given attributes",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_it_is_refused(what: str, copied: Path, tmp_path: Path) -> None:
    change, said = REFUSALS[what]
    change(copied)
    with pytest.raises(DataError) as raised:
        import_dcp(str(copied), str(tmp_path / "out"))
    assert said in str(raised.value)
    assert raised.value.cure
    assert not list((tmp_path / "out").glob("*"))


def test_two_models_are_told_apart_by_their_names(copied: Path, tmp_path: Path) -> None:
    """Averaged weights, say: the model is what is called so, and the other one is not read."""
    edit(copied, _again("model.", "ema."))
    path, foreign = import_dcp(str(copied), str(tmp_path / "out"))
    assert "embed.weight" in find(path).content["parameters"]
    assert len(foreign.parameters) == 9


@pytest.mark.integration
def test_damage_is_found(copied: Path, tmp_path: Path) -> None:
    """Damaged values are errors; so is damaged metadata, or nothing of it mattered, or names are others."""
    path, _ = import_dcp(str(copied), str(tmp_path / "right"))
    right = {stem: saved_in(path, stem) for stem in ("parameters", "exp_avg", "exp_avg_sq")}
    for file in (".metadata", "__0_0.distcp", "__2_0.distcp"):
        errors = check_damage(
            *(copied / file, lambda out: str(import_dcp(str(copied), out)[0]), tmp_path / "out", right),
            strict=False,
        )
        assert errors
