"""What `save` and `load` take, refuse and name. test_contracts.py has runs that resume bit for bit."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import DirectoryError, StateDictError

from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, config_for


class Odd(list[Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]


def small(folder: Path, **settings: Any) -> tuple[nn.Module, Any]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))
    return infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(folder, **settings))


def step(model: nn.Module, adam: Any) -> float:
    loss = model(torch.randn(8, 64)).float().square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    return float(loss.detach())


def test_generators_schedulers_and_values_go_on(tmp_path: Path) -> None:
    model, adam = small(tmp_path / "a")
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(adam, [2, 3]),
        torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (step + 1)),
    ]
    values = {"name": "ü", "flags": (True, [2.5]), "array": np.arange(6).reshape(2, 3), "none": None}
    for _ in range(3):
        step(model, adam)
        for scheduler in schedulers:
            scheduler.step()
    state = {"schedulers": schedulers[0], "second": schedulers[1], "values": values}
    infinity.save(adam, tmp_path / "saved", state=state)
    drawn = [torch.rand(3), random.random(), np.random.rand()]
    losses = [step(model, adam) for _ in range(2)]
    infinity.close(adam)

    model, adam = small(tmp_path / "b", **ON_HOST)
    again: dict[str, Any] = {
        "schedulers": torch.optim.lr_scheduler.MultiStepLR(adam, [7]),
        "second": torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (step + 1)),
        "values": None,
    }
    given = infinity.load(adam, tmp_path / "saved", state=again)
    assert torch.equal(torch.rand(3), drawn[0])
    assert [random.random(), np.random.rand()] == drawn[1:]
    found = again["values"]
    assert found.keys() == values.keys() == given["values"].keys()
    for name, value in values.items():
        assert np.array_equal(found[name], value) if name == "array" else found[name] == value, name
    assert again["schedulers"].milestones == schedulers[0].milestones
    assert again["schedulers"].last_epoch == again["second"].last_epoch == 3

    assert [step(model, adam) for _ in range(2)] == losses
    infinity.close(adam)


@pytest.mark.first
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_masters_and_moments_go_into_another_dtype(dtype: str, tmp_path: Path) -> None:
    model, adam = small(tmp_path / "a", dtype="bf16")
    for _ in range(2):
        step(model, adam)
    state = adam.state_dict()["state"]
    infinity.save(adam, tmp_path / "saved")
    infinity.close(adam)
    model, adam = small(tmp_path / "b", dtype=dtype, parameters="device", optimizer_state="host")
    infinity.load(adam, tmp_path / "saved")
    found = adam.state_dict()["state"]
    values = dict(enumerate(model.state_dict(keep_vars=False)[n] for n, _ in model.named_parameters()))
    for index, one in state.items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[index][name], one[name])
        if "master" in one:  # BatchNorm's parameters stay fp32
            assert torch.equal(found[index].get("master", values[index]), one["master"])
            assert torch.equal(values[index], one["master"].to(values[index].dtype))
    infinity.close(adam)


def test_what_does_not_fit_is_listed_before_anything_is_changed(tmp_path: Path) -> None:
    model, adam = small(tmp_path / "a")
    step(model, adam)
    infinity.save(adam, tmp_path / "saved", state={"here": 1})
    infinity.close(adam)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64), nn.Linear(64, 3))
    (tmp_path / "b").mkdir()
    other, adam = infinity.wrap(other, torch.optim.AdamW(other.parameters()), config_for(tmp_path / "b"))
    before = {n: v.clone() for n, v in other.state_dict().items()}
    with pytest.raises(StateDictError, match=r"it lacks 3\.weight, 3\.bias, state\['there'\]"):
        infinity.load(adam, tmp_path / "saved", state={"there": 0})
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name
    infinity.load(adam, tmp_path / "saved", strict=False)
    assert not torch.equal(other.state_dict()["0.weight"], before["0.weight"])
    assert torch.equal(other.state_dict()["3.weight"], before["3.weight"])
    infinity.close(adam)
    wrong = nn.Sequential(nn.Linear(64, 255), nn.BatchNorm1d(255), nn.Linear(255, 64))
    wrong, adam = infinity.wrap(wrong, torch.optim.AdamW(wrong.parameters()), config_for(tmp_path / "b"))
    for strict in (True, False):
        with pytest.raises(StateDictError, match=r"0\.weight \[256, 64\], of the model \[255, 64\]"):
            infinity.load(adam, tmp_path / "saved", strict=strict)
    infinity.close(adam)


def test_param_groups_must_be_those_that_were_saved(tmp_path: Path) -> None:
    def wrapped(*orders: int) -> Any:
        folder = tmp_path / "".join(map(str, orders))
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        layers = [{"params": list(model[i].parameters()), "lr": 0.1 * i} for i in orders]
        return infinity.wrap(model, torch.optim.AdamW(layers), config_for(folder))[1]

    adam = wrapped(0, 1)
    infinity.save(adam, tmp_path / "saved")
    infinity.close(adam)
    adam = wrapped(1, 0)
    with pytest.raises(StateDictError, match=r"'1\.\w+' in group 0[^$]*it in group 1"):
        infinity.load(adam, tmp_path / "saved")
    infinity.load(adam, tmp_path / "saved", strict=False)
    assert [g["lr"] for g in adam.param_groups] == [0.1, 0.0]
    infinity.close(adam)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    _, adam = small(tmp_path / "a")
    loop, no = list[Any](), "cannot be saved"
    loop.append(loop)
    for value, place in [
        (object(), r"state\['x'\]"),
        ({"deep": [1, print]}, r"state\['x'\]\['deep'\]\[1\]"),
        (loop, "nested"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (np.arange(3, dtype=">i4"), "numpy array of >i4"),
        (torch.Size([1]), "Size"),
        *((value, no) for value in ({Odd()}, {(1, Odd()): 2}, collections.Counter([Odd()]), 1j, nn.Linear)),
        *((value, no) for value in (10**5000, -(10**5000), np.longdouble(1), np.ma.array([1], mask=[True]))),
    ]:
        with pytest.raises(StateDictError, match=place):
            infinity.save(adam, tmp_path / "saved", state={"x": value})
    unnamed: Any
    for unnamed in ([("a", 1)], [], torch.optim.lr_scheduler.MultiStepLR(adam, [2])):
        with pytest.raises(StateDictError, match="does not map names to values"):
            infinity.save(adam, tmp_path / "saved", state=unnamed)
        with pytest.raises(StateDictError, match="does not map names to values"):
            infinity.load(adam, tmp_path / "saved", state=unnamed)
    assert not (tmp_path / "saved").exists()
    infinity.close(adam)


def test_keep_last_and_the_newest(tmp_path: Path) -> None:
    model, adam = small(tmp_path / "a")
    root = tmp_path / "saved"
    names = []
    for _ in range(4):
        step(model, adam)
        names.append(Path(infinity.save(adam, root, keep_last=2)).name)
    assert names == [f"step-{n}" for n in (1, 2, 3, 4)]
    assert sorted(p.name for p in root.iterdir()) == ["step-3", "step-4"]
    infinity.load(adam, root / "step-3")
    assert adam.steps == 3
    step(model, adam)
    assert Path(infinity.save(adam, root)).name == "step-4"  # replaced, and the newest
    assert len(list((root / "step-4").iterdir())) == len(list((root / "step-3").iterdir()))
    step(model, adam)
    infinity.load(adam, root)
    assert adam.steps == 4
    before = sorted(p.name for p in (root / "step-4").iterdir())
    with pytest.raises(DirectoryError, match=f"cannot contain other checkpoints[^$]*its parent, {root},"):
        infinity.save(adam, root / "step-4")
    assert sorted(p.name for p in (root / "step-4").iterdir()) == before

    infinity.close(adam)


def test_a_parameter_that_was_frozen_meanwhile_begins_with_its_first_step(tmp_path: Path) -> None:
    """Its moments were not saved then: with the count of its steps alone, it would learn too little."""

    def made(*, frozen: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(not frozen)
        adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return infinity.wrap(model, adam, config_for(tmp_path, **ON_NVME))

    def step(model: nn.Module, adam: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 8)).square().sum().backward()
        adam.step()
        adam.zero_grad()

    saved: Path | None = None
    for frozen in (False, True, False):
        model, adam = made(frozen=frozen)
        if saved is not None:
            infinity.load(adam, saved, strict=False)
        step(model, adam)
        saved = Path(infinity.save(adam, tmp_path / "saved"))
        states = adam.state_dict()["state"].values()
        infinity.close(adam)
    assert [float(s["step"]) for s in states] == [1, 1, 3, 3]


@pytest.mark.parametrize("place", [ON_DEVICE, ON_NVME], ids=["device", "nvme"])
def test_a_checkpoint_without_the_frozen_parameters(place: dict[str, Any], tmp_path: Path) -> None:
    """It is small; and it goes on over the same base alone."""

    def made(*, base: int = 0, dtype: str | None = "bf16", open_base: bool = False) -> Any:
        torch.manual_seed(base)
        frozen = nn.Linear(256, 256).requires_grad_(open_base)
        torch.manual_seed(1)
        model = nn.Sequential(frozen, nn.Linear(256, 4))
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return infinity.wrap(model, adam, config_for(tmp_path, **place, dtype=dtype))

    def step(model: nn.Module, adam: torch.optim.Optimizer) -> None:
        given = torch.ones(2, 256, dtype=next(model.parameters()).dtype)
        model(given).square().sum().backward()
        adam.step()
        adam.zero_grad()

    root = tmp_path / "saved"
    model, adam = made()
    step(model, adam)
    saved = Path(infinity.save(adam, root, frozen=False))
    assert sum(path.stat().st_size for path in saved.iterdir()) < 64 << 10
    step(model, adam)
    wanted = [*model.state_dict().values()]
    infinity.close(adam)

    model, adam = made()
    step(model, adam)
    infinity.load(adam, root)
    step(model, adam)
    assert all(map(torch.equal, model.state_dict().values(), wanted))
    infinity.close(adam)

    model, adam = made(base=5)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(StateDictError, match=r"over other frozen parameters[^$]*0\.weight, 0\.bias"):
        infinity.load(adam, root)
    assert all(map(torch.equal, model.state_dict().values(), before))
    step(model, adam)  # nothing was changed: it goes on
    with pytest.raises(StateDictError, match="has no frozen parameters"):
        infinity.export(saved, tmp_path / "out")
    with pytest.raises(StateDictError, match="has no frozen parameters"):
        infinity.inference(
            nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 4)), config_for(tmp_path), weights=saved
        )
    infinity.close(adam)

    for given in ({"dtype": "fp32"}, {"open_base": True}):  # what cannot be compared, and what trains now
        model, adam = made(**given)
        infinity.load(adam, root, strict=not given.get("open_base", False))
        step(model, adam)
        infinity.close(adam)
