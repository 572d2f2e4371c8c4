"""Load and gather: what is loaded ahead, and what goes for it, depend on the schedule and on bytes alone."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.core.spans import Recorder
from infinity.params.cache import Cache
from infinity.params.load import _Worker
from infinity.params.unit import IDLE_STATES, ParamUnit, UnitState
from infinity.params.uses import Use, UseKind, Uses

from .offloaded import config_for

WIDTH = 64
BLOCK = WIDTH * WIDTH + WIDTH


class Layers(nn.Module):
    """Calls its layers in a given order."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def made(folder: Path, count: int, room: str) -> tuple[Any, Any, Engine]:
    torch.manual_seed(0)
    model: Any = Layers(count)
    config = config_for(folder, units=["Linear"], device_memory=room)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    return model, optimizer, engine_of(model)


def evictions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, delays: bool
) -> list[tuple[str, int]]:
    """Return which units were loaded and which went, in which order, by random programs; `delays`: reads and
    copies take any time."""
    folder.mkdir()
    found: list[tuple[str, int]] = []
    with monkeypatch.context() as patch:
        load, drop = Cache.load, Cache._drop

        def noted_load(self: Cache, unit: ParamUnit, **options: Any) -> None:
            found.append(("load", unit.index))
            load(self, unit, **options)

        def noted_drop(self: Cache, unit: ParamUnit) -> bool:
            found.append(("drop", unit.index))
            return drop(self, unit)

        patch.setattr(Cache, "load", noted_load)
        patch.setattr(Cache, "_drop", noted_drop)
        if delays:
            pause = random.Random(seed)
            copy = _Worker._copy_oldest

            def slow(self: Any) -> None:
                time.sleep(pause.random() * 0.01)
                copy(self)

            patch.setattr(_Worker, "_copy_oldest", slow)
        model, optimizer, _ = made(folder, 8, "130KiB")
        try:
            draw = random.Random(seed)
            orders = [draw.sample(range(8), draw.randint(3, 8)) for _ in range(3)]
            for _ in range(8):
                model(torch.ones(2, WIDTH), draw.choice(orders)).sum().backward()
                optimizer.step()
                infinity.flush(model)  # what a load waits for is not what is decided
                optimizer.zero_grad()
        finally:
            infinity.close(optimizer)
    return found


@pytest.mark.first
@pytest.mark.parametrize("seed", range(3))
def test_what_goes_and_what_comes_never_depends_on_time(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = evictions(tmp_path / "fast", monkeypatch, seed, delays=False)
    slow = evictions(tmp_path / "slow", monkeypatch, seed, delays=True)
    assert fast == slow
    assert {kind for kind, _ in fast} == {"load", "drop"}


def test_as_much_is_loaded_ahead_as_there_is_room_for(tmp_path: Path) -> None:
    model, optimizer, engine = made(tmp_path, 20, "8MiB")
    residency, ahead = engine.residency, []
    order = list(range(20))

    def look(*_: object) -> None:
        ahead.append(sum(u.state is not UnitState.SHARDED for u in residency.units))

    try:
        for _ in range(2):
            model(torch.randn(2, WIDTH), order).mean().backward()
        optimizer.zero_grad()
        infinity.flush(optimizer)
        residency.reshard_all()
        model.layers[0].register_forward_hook(look)
        residency.missed = 0
        with torch.no_grad():
            model(torch.randn(2, WIDTH), order)
        assert residency.missed <= 1  # the first
        assert ahead == [20]
    finally:
        infinity.close(optimizer)


def test_the_unit_whose_next_use_is_farthest_goes_first(tmp_path: Path) -> None:
    model, optimizer, engine = made(tmp_path, 6, "98KiB")
    cache, x = engine.residency.cache, torch.randn(2, WIDTH)
    units = [engine.params[layer.weight].unit for layer in model.layers]
    try:
        for _ in range(2):
            with torch.no_grad():
                model(x, list(range(6)))
        ranks = {index: rank for rank, index in reversed(list(enumerate(cache.schedule.upcoming())))}
        idle = []
        while (found := cache._ahead.take_farthest(())) is not None:
            idle.append(found[0])
        for index in idle:
            cache._ahead.put_back(index)
        assert idle == sorted(idle, key=lambda i: -ranks[i])
        assert cache.peak <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
        assert len(idle) < len(units)
    finally:
        infinity.close(optimizer)


@pytest.mark.parametrize(
    ("count", "room", "backward", "most"),
    [
        (8, 4, False, 5.5),  # all eight, where each took the place of one that was to come again
        (8, 6, False, 3),
        (8, 4, True, 8),  # four on the way there, four on the way back: nothing stands in its own way
    ],
)
def test_a_cycle_loads_little_more_than_has_no_room(
    count: int, room: int, backward: bool, most: float, tmp_path: Path
) -> None:
    model: Any = Layers(count)
    config = config_for(tmp_path, units=["Linear"], device_memory=1 << 20)
    if backward:
        model, owner = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    else:
        model = owner = infinity.inference(model, config)
    cache = engine_of(model).residency.cache
    cache._capacity = room * cache.units[0].layout.gathered_nbytes

    def cycle() -> None:
        with torch.set_grad_enabled(backward):
            y = model(torch.ones(2, WIDTH), list(range(count)))
        if backward:
            y.sum().backward()

    try:
        for _ in range(3):
            cycle()
        before, missed = cache.loads, engine_of(model).residency.missed
        for _ in range(8):
            cycle()
        assert (cache.loads - before) / 8 <= most
        assert engine_of(model).residency.missed == missed  # nothing is waited for that was not begun
        assert cache.allocated <= cache._capacity
    finally:
        infinity.close(owner)


class Stub:
    """A unit as the cache knows it: without memory, loads and parameters."""

    on_state: Any = None
    newest = is_late = on_device = False
    last_load = None

    def __init__(self, index: int, nbytes: int, *, persistent: bool, uses: Uses) -> None:
        self.index, self.persistent, self._uses = index, persistent, uses
        self.layout = SimpleNamespace(gathered_nbytes=nbytes, name=str(index))
        self.held = False
        self._state = UnitState.SHARDED

    @property
    def state(self) -> UnitState:
        return self._state

    @state.setter
    def state(self, state: UnitState) -> None:
        self._state = state
        if self.on_state is not None:
            self.on_state(self)

    @property
    def is_away(self) -> bool:
        return self.state in (UnitState.SHARDED, UnitState.FILLED)

    @property
    def waits_for_owner(self) -> bool:
        return self.state is UnitState.FILLED

    @property
    def nbytes(self) -> int:
        return 0 if self.state is UnitState.SHARDED else self.layout.gathered_nbytes

    @property
    def missing_nbytes(self) -> int:
        return int(self.layout.gathered_nbytes - self.nbytes)

    @property
    def in_use(self) -> bool:
        return any(self.index in use.units for use in self._uses)

    def load(self, loader: Any, slots: Any, *, urgent: bool) -> None:
        self.state = UnitState.LOADING

    def reshard(self) -> bool:
        self.state = self.state if self.held else UnitState.SHARDED  # as a unit chooses its classes again
        return not self.held

    def warn_held(self) -> None:
        pass

    def warn_room(self, needed: int, planned: int) -> None:
        pass


class Scanning:
    """The decisions of the cache by their definition, with a look at all units at each visit."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def allocated(self) -> int:
        return sum(u.nbytes for u in self.cache.units if not u.on_device)

    def load_now(self, unit: Any) -> None:
        need = unit.missing_nbytes
        if self.allocated() + need > self.cache._capacity:
            self.evict(need, self.first(), lambda _: True)
        self.cache.load(unit, urgent=True)

    def first(self) -> dict[int, int]:
        ranks: dict[int, int] = {}
        for rank, index in enumerate(self.cache.schedule.upcoming()):
            ranks.setdefault(index, rank)
        return ranks

    def prefetch(self, *, newest: bool) -> None:
        cache, before = self.cache, 0
        order = list(cache.schedule.upcoming())
        for index in dict.fromkeys(order):
            unit: Any = cache.units[index]
            nbytes = unit.layout.gathered_nbytes
            if not unit.is_away or unit.waits_for_owner:
                before += 0 if unit.in_use else nbytes
                continue
            need, rank = unit.missing_nbytes, order.index(index)
            sooner = {i for i in order[:rank] if not cache.units[i].persistent}

            def goes(use: float) -> bool:
                if use <= rank:  # noqa: B023
                    return False
                if before < need or use == math.inf:  # noqa: B023
                    return True
                return sooner.issubset(order[rank + 1 : int(use)])  # noqa: B023

            if self.allocated() + need > cache._capacity and not self.evict(need, self.first(), goes):
                return
            cache.load(unit)
            before += nbytes

    def evict(self, need: int, ranks: dict[int, int], goes: Callable[[float], bool]) -> bool:
        cache = self.cache
        room = cache._capacity - self.allocated()
        idle = [u for u in cache.units if not u.persistent and not u.in_use and u.state in IDLE_STATES]
        for other in sorted(idle, key=lambda u: -ranks.get(u.index, math.inf)):
            if room >= need or not goes(ranks.get(other.index, math.inf)):
                break
            if cache._drop(other):
                room += other.layout.gathered_nbytes
        return room >= need


def decisions(seed: int, *, scanning: bool) -> list[tuple[str, int]]:
    """Return what a cache loads and drops in a random program, of cycles that mostly repeat."""
    draw, found = random.Random(seed), []
    uses, count = Uses(), draw.randint(1, 12)
    fixed = draw.random() < 0.2
    units: list[Any] = [
        Stub(i, draw.choice([1, 1, 2, 5]), persistent=fixed and draw.random() < 0.3, uses=uses)
        for i in range(count)
    ]
    capacity = draw.randint(1, 1 + sum(u.layout.gathered_nbytes for u in units))
    nothing: Any = SimpleNamespace(trim=lambda: None, slots=lambda unit: {}, is_newer=lambda unit: False)
    cache = Cache(units, uses, nothing, capacity, nothing, nothing, nothing, Recorder())
    by: Any = Scanning(cache) if scanning else cache
    load, drop = cache.load, cache._drop

    def noted_load(unit: Any, **options: Any) -> None:
        found.append(("load", unit.index))
        load(unit, **options)

    def noted_drop(unit: Any) -> bool:
        found.append(("drop", unit.index))
        return drop(unit)

    cache.load, cache._drop = noted_load, noted_drop  # type: ignore[method-assign]
    orders = [[draw.randrange(count) for _ in range(draw.randint(1, 20))] for _ in range(2)]
    orders += [[*range(count)], [*range(count), *reversed(range(count))]]
    favourite = draw.choice(orders)
    for _ in range(draw.randint(3, 10)):
        order = list(favourite if draw.random() < 0.7 else draw.choice(orders))
        if draw.random() < 0.2:
            order[draw.randrange(len(order))] = draw.randrange(count)
        cache.schedule.expect(draw.random() < 0.8)
        lasting: list[tuple[int, Use]] = []
        for index in order:
            use, unit = Use(UseKind.FORWARD), units[index]
            uses.begin(use, [index])
            cache.schedule.note(index)
            if unit.is_away:
                by.load_now(unit)
            by.prefetch(newest=False)
            assert cache.allocated == by.allocated() if scanning else True
            unit.state = UnitState.UNSHARDED
            lasting.append((index, use))
            if draw.random() < 0.1:
                units[draw.randrange(count)].held ^= True
            while lasting and draw.random() < 0.8:
                gone, ended = lasting.pop(0)
                uses.end(ended)
                if not units[gone].in_use:
                    units[gone].state = UnitState.GATHERED
        for gone, ended in lasting:
            uses.end(ended)
            units[gone].state = UnitState.GATHERED
        if draw.random() < 0.9:
            cache.schedule.end_cycle()
        if draw.random() < 0.4:  # a step
            for unit in units:
                unit.state = UnitState.FILLED if unit.held else UnitState.SHARDED
    return found


def test_decisions_are_those_of_their_definition() -> None:
    for seed in range(150):
        assert decisions(seed, scanning=False) == decisions(seed, scanning=True), seed


def calls_of_a_visit(
    folder: Path, count: int, share: float, place: str, *, trains: bool
) -> tuple[float, int]:
    """Return the Python calls for one visit of a unit, of which `share` fits beside the one in use, on this
    thread and where the engine's state changes; and how often a forward changed that."""
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))
    room = round(share * sum(p.nbytes for p in model.parameters()))
    places = {**config_places(place), "device_memory": 1 << 24, "prefetch_memory": room}
    config = config_for(folder, units=["Linear"], **places)
    if trains:
        model, owner = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
    else:
        model = owner = infinity.inference(model, config)
    deferral, calls, sections = engine_of(model).residency.deferral, [0], [0]
    run = deferral.run

    def count_call(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    def noted(*args: Any, **options: Any) -> Any:
        sections[0] += 1
        return run(*args, **options)

    def cycle() -> int:
        with torch.set_grad_enabled(trains):
            before = sections[0]
            y = model(torch.ones(2, 8))
            made = sections[0] - before
        if trains:
            y.sum().backward()
            owner.zero_grad()
        return made

    try:
        for _ in range(3):
            cycle()
        deferral.run = noted  # type: ignore[method-assign]
        run(lambda: sys.setprofile(count_call))
        sys.setprofile(count_call)
        try:
            made = cycle()
        finally:
            sys.setprofile(None)
            run(lambda: sys.setprofile(None))
        return calls[0] / count, made
    finally:
        infinity.close(owner)


def config_places(place: str) -> dict[str, Any]:
    return {"parameters": place, "optimizer_state": "host", "gradients": "host"}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_cost_of_a_visit_does_not_depend_on_the_number_of_units(
    share: float, trains: bool, tmp_path: Path
) -> None:
    few, _ = calls_of_a_visit(tmp_path, 50, share, "host", trains=trains)
    many, _ = calls_of_a_visit(tmp_path, 200, share, "host", trains=trains)
    assert many < few * 1.05


@pytest.mark.parametrize("trains", [False, True])
def test_a_forward_in_which_nothing_moves_changes_no_state(trains: bool, tmp_path: Path) -> None:
    (_, few), (calls, many) = (calls_of_a_visit(tmp_path, n, 1, "device", trains=trains) for n in (5, 20))
    assert few == many  # what the whole model costs
    assert trains or calls < 100


def test_what_is_used_twice_in_a_row_over_the_end_of_a_cycle_stays(tmp_path: Path) -> None:
    model: Any = Layers(8)
    model = infinity.inference(model, config_for(tmp_path, units=["Linear"], device_memory=1 << 20))
    cache, order = engine_of(model).residency.cache, [*range(8), 0]
    cache._capacity = 4 * cache.units[0].layout.gathered_nbytes
    loads = []
    try:
        with torch.no_grad():
            for _ in range(10):
                before = cache.loads
                model(torch.ones(2, WIDTH), order)
                loads.append(cache.loads - before)
        assert sum(loads[2:]) / len(loads[2:]) <= 6  # of nine uses
    finally:
        infinity.close(model)
