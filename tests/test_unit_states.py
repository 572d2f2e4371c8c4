"""The states of a unit: legal transitions, and the class that a parameter has in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.params.param import PendingParameter, ReleasedParameter
from infinity.params.unit import ParamUnit, UnitState

from .offloaded import ON_HOST, config_for

WIDTH = 16
LEGAL = {
    (UnitState.SHARDED, UnitState.FILLED),
    (UnitState.FILLED, UnitState.LOADING),
    (UnitState.LOADING, UnitState.LOADED),
    (UnitState.LOADED, UnitState.GATHERED),
    (UnitState.GATHERED, UnitState.UNSHARDED),
    (UnitState.UNSHARDED, UnitState.GATHERED),
    (UnitState.LOADING, UnitState.FILLED),
    (UnitState.LOADED, UnitState.FILLED),
    (UnitState.GATHERED, UnitState.FILLED),
    (UnitState.FILLED, UnitState.SHARDED),
}
#: Of what is placed on the device: it is there from `wrap` on.
LEGAL_THERE = {
    (UnitState.SHARDED, UnitState.UNSHARDED),
    (UnitState.UNSHARDED, UnitState.LOADING),
    (UnitState.LOADING, UnitState.UNSHARDED),
}
PLACES: dict[str, dict[str, Any]] = {
    "host": ON_HOST,
    "device": {**ON_HOST, "parameters": "device"},
    "nvme": {},
}


def class_of(param: nn.Parameter) -> str:
    kinds = {"released": ReleasedParameter, "pending": PendingParameter}
    return next((name for name, kind in kinds.items() if isinstance(param, kind)), "plain")


def check_classes(unit: ParamUnit) -> None:
    wanted = "plain" if unit.state is UnitState.UNSHARDED else "pending" if unit.on_device else "released"
    assert {class_of(p.param) for p in unit.params} == {wanted}, unit.state


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ParamUnit, UnitState, UnitState]]:
    """Every change of a unit's state, as it happens."""
    found: list[tuple[ParamUnit, UnitState, UnitState]] = []

    def change(self: Any, name: str, value: Any) -> None:
        if name == "_state" and self.__dict__.get("_state", value) is not value:
            found.append((self, self.state, value))
        object.__setattr__(self, name, value)

    monkeypatch.setattr(ParamUnit, "__setattr__", change)
    return found


def made(folder: Path, place: str, **settings: Any) -> tuple[Any, Any, Engine]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))
    config = config_for(folder, units=["Linear"], **{**PLACES[place], **settings})
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    return model, optimizer, engine_of(model)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_every_change_is_legal_and_a_parameters_class_follows_from_it(
    place: str, update: str, tmp_path: Path, changes: list[tuple[ParamUnit, UnitState, UnitState]]
) -> None:
    model, optimizer, engine = made(
        tmp_path, place, update=update, device_memory="64KiB" if place == "device" else "24KiB"
    )
    x = torch.randn(2, WIDTH)
    for turn in range(4):
        model(x).square().mean().backward()
        for unit in engine.units:
            check_classes(unit)
        optimizer.step()
        for unit in engine.units:
            check_classes(unit)
        optimizer.zero_grad()
        if turn == 1:
            model.eval()
            model(x)
            model.train()
        if turn == 2:
            with infinity.gathered(model[1], write=True):
                model[1][0].weight.data.mul_(1.01)
        model.state_dict()
    legal = LEGAL_THERE if place == "device" else LEGAL
    assert {(before, after) for _, before, after in changes} <= legal
    assert legal - {(before, after) for _, before, after in changes} <= {
        (UnitState.LOADING, UnitState.FILLED),
        (UnitState.LOADED, UnitState.FILLED),
        (UnitState.SHARDED, UnitState.UNSHARDED),  # before anybody looks, in `wrap`
    }
    infinity.close(model)


@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_a_persistent_unit_stays_until_the_step_that_makes_it_stale(update: str, tmp_path: Path) -> None:
    """Persistent is not "placed on the device": the copy is in host memory, and comes once per step."""
    results, loads = [], []
    for persistent in (False, True):
        folder = tmp_path / str(persistent)
        folder.mkdir()
        model, optimizer, engine = made(folder, "host", update=update)
        for unit in engine.units:
            unit.persistent = persistent
        before = engine.residency.cache.loads
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, WIDTH)).square().mean().backward()
                kept = {u.state is UnitState.UNSHARDED for u in engine.units}
                assert kept == {persistent}
            optimizer.step()
            optimizer.zero_grad()
        infinity.flush(model)
        loads.append(engine.residency.cache.loads - before)
        results.append([v.clone() for v in model.state_dict().values()])
        infinity.close(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert loads[1] <= 4 * 5  # five units, once before each step and once ahead of the next


def test_what_a_state_dict_answers_for_asks_and_is_plain_again_afterwards(tmp_path: Path) -> None:
    """With delayed updates: the storage has values from before the last step, the state dict the newest."""
    model, optimizer, _ = made(tmp_path, "device", update="delayed", delay_warmup_steps=0)
    seen: list[str] = []
    weight = model[0][0].weight
    model[1][0].register_state_dict_pre_hook(lambda *_: seen.append(class_of(weight)))
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model[0][0].register_state_dict_pre_hook(lambda *_: seen.append(repr(weight)[:9]))
    state = model.state_dict()
    assert seen == ["Parameter", "plain"]
    assert class_of(weight) == "plain"
    assert not torch.equal(state["0.0.weight"], weight)
    infinity.flush(model)
    assert torch.equal(state["0.0.weight"], weight)
    infinity.close(model)
