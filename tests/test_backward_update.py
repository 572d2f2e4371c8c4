"""The update behind the backward has the bits of ``update="sync"``, or there is an error."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    ClosedError,
    ConfigError,
    DirectoryError,
    GradientError,
    ParameterChangedError,
    ParameterError,
)
from infinity.optim import update

from .models import case
from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, RESIDENT, assert_same, config_for, train_offloaded
from .reference import two_groups

STATE_ON_NVME = {"parameters": "host", "optimizer_state": "nvme", "gradients": "host"}
PLACES = {"nvme": ON_NVME, "host": ON_HOST, "device": ON_DEVICE, "resident": RESIDENT, "state": STATE_ON_NVME}
WIDTH = 16


def behind(folder: Path, accumulation: int = 1, **settings: Any) -> infinity.Config:
    folder.mkdir(exist_ok=True)
    return config_for(folder, update="backward", accumulation=accumulation, **settings)


def sync(folder: Path, **settings: Any) -> infinity.Config:
    folder.mkdir(exist_ok=True)
    return config_for(folder, update="sync", **settings)


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "dtype", "place", "accumulate"),
    [
        ("gpt", "bf16", "nvme", 1),
        ("moe", "bf16", "host", 3),
        ("cnn", "fp32", "device", 3),
        ("lstm", "bf16", "resident", 1),
        ("gpt", "fp32", "state", 3),
    ],
)
def test_it_has_the_bits_of_sync(name: str, dtype: str, place: str, accumulate: int, tmp_path: Path) -> None:
    settings = {"dtype": dtype, "device_memory": "64MiB", **PLACES[place]}
    runs = [
        train_offloaded(case(name), config, steps=3, accumulate=accumulate, groups=two_groups)
        for config in (
            behind(tmp_path / "backward", accumulate, **settings),
            sync(tmp_path / "sync", **settings),
        )
    ]
    assert_same(*runs)


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
}


class HandsOn(nn.Module):
    """x (batch, WIDTH) → the same, and a bias that later units add and hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.bias * 2
        return x + self.linear(x) + bias, bias


class Net(nn.Module):
    """x (batch, WIDTH) → a loss. `form`: how its blocks are used."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        if form == "handed on":  # as the bias of positions, which each block of T5 hands to the next
            self.first = HandsOn()
        if form == "frozen":
            self.blocks[1].requires_grad_(False)
            self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        form = self.form
        if form in ALIASES:  # autograd does not know that this reads another unit's weight
            x = torch.tanh(x @ ALIASES[form](self.head.weight))
        if form == "handed on":
            x, bias = self.first(x)
            x = x + self.blocks[1](x) + bias
        for block in itertools.chain(self.blocks, self.blocks if form.startswith("twice") else ()):
            if form.endswith("entrant"):
                x = checkpoint(block, x.requires_grad_(), use_reentrant="non" not in form)
            else:
                x = block(x)
        if form == "elsewhere":  # of a unit whose own forward comes last
            x = F.linear(x, self.head.weight) + self.blocks[0][0].bias
        return self.head(x).square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


def built(config: infinity.Config, form: str = "plain") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net(form)
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [*model.state_dict().values(), *(t for s in state.values() for t in s.values())]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def one(model: Any, optimizer: Any, step: int) -> None:
    model(batch(2 * step)).backward()
    model(batch(2 * step + 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def forwards_first(model: Any, optimizer: Any, step: int) -> None:
    losses = [model(batch(2 * step)), model(batch(2 * step + 1))]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def one_graph(model: Any, optimizer: Any, step: int) -> None:
    """One graph of two forwards, twice."""
    loss = model(batch(step)) + model(batch(step + 1))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated(model: Any, optimizer: Any, step: int) -> None:
    model(batch(step))  # its backward never comes
    with torch.no_grad():
        model.eval()(batch(step))
    one(model.train(), optimizer, step)


def too_few(model: Any, optimizer: Any, step: int) -> None:
    """The last of an epoch, say."""
    model(batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    one(model, optimizer, step)


def given(model: Any, optimizer: Any, step: int) -> None:
    model(batch(step)).backward()
    model.unused.weight.grad = torch.full((WIDTH, WIDTH), 0.5)
    model.head.weight.grad.mul_(2.0)
    model(batch(step + 1)).backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    optimizer.zero_grad()


def edited(model: Any, optimizer: Any, step: int) -> None:
    with infinity.gathered(model.head.weight, write=True), torch.no_grad():
        model.head.weight.mul_(0.5)
    one(model, optimizer, step)


def grads_of_inputs(model: Any, optimizer: Any, step: int) -> None:
    """A look that brings parameters no gradient counts as a backward."""
    x = batch(step).requires_grad_()
    torch.autograd.grad(model(x), x)
    model(batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def closure(model: Any, optimizer: Any, step: int) -> None:
    def make() -> torch.Tensor:
        optimizer.zero_grad()
        model(batch(step)).backward()
        loss = model(batch(step + 1))
        loss.backward()
        return loss

    optimizer.step(make)


@pytest.mark.first
@pytest.mark.parametrize(
    ("loop", "form", "place"),
    [
        (one, "twice-reentrant", "nvme"),
        (one, "frozen", "device"),
        (forwards_first, "reentrant", "host"),
        (one_graph, "twice", "nvme"),
        (evaluated, "elsewhere", "resident"),
        (too_few, "plain", "state"),
        (given, "frozen", "host"),
        (edited, "elsewhere", "nvme"),
        (grads_of_inputs, "twice-nonreentrant", "device"),
        (closure, "reentrant", "state"),
        # The unit that is read waits for the end of that backward; an alias of before is right inside of it.
        (one, "handed on", "nvme"),
        (one, "data", "host"),
        (one, "detach", "nvme"),
        (one, "numpy", "resident"),
    ],
)
def test_any_loop_has_the_bits_of_sync(
    loop: Callable[[Any, Any, int], None], form: str, place: str, tmp_path: Path
) -> None:
    found = []
    for config in (
        behind(tmp_path / "backward", 2, **PLACES[place]),
        sync(tmp_path / "sync", **PLACES[place]),
    ):
        model, optimizer = built(config, form)
        for step in range(3):
            loop(model, optimizer, step)
        found.append(values(model, optimizer))
        infinity.close(optimizer)
    assert equal(*found)


def test_units_are_updated_while_the_backward_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last to the first: while the first block waits for its backward, the others are updated."""
    model, optimizer = built(behind(tmp_path, **ON_HOST, units=["Sequential", "head", "unused"]))
    units = engine_of(model).units
    order: list[str] = []
    changed, inner = threading.Condition(), update._compute

    def compute(tiers: Any, work: Any, *rest: Any, **mode: Any) -> None:
        inner(tiers, work, *rest, **mode)
        with changed:
            order.append(units[work.chunk.unit].layout.name)
            changed.notify()

    def waits(grad: torch.Tensor) -> None:
        with changed:
            assert changed.wait_for(lambda: len(order) >= 3, 60)

    monkeypatch.setattr(update, "_compute", compute)
    x = batch(0)
    for index, block in enumerate(model.blocks):
        x = block(x)
        if index == 0:
            x.register_hook(waits)
    model.head(x).square().mean().backward()
    assert order[:3] == ["head", "blocks.3", "blocks.2"]
    optimizer.step()
    assert order == ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    infinity.close(optimizer)


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda weight: weight.sum(),
    "data": lambda weight: weight.data.sum(),
    "detach": lambda weight: weight.detach().sum(),
    "clone": lambda weight: weight.clone(),
    "plus": lambda weight: weight + 0,
}


@pytest.fixture
def stepped(tmp_path: Path) -> Any:
    """A model and its optimizer whose last backward is over; what `sync` makes of it; where to save."""
    model, optimizer = built(sync(tmp_path / "sync"))
    model(batch(0)).backward()
    optimizer.step()
    wanted = values(model, optimizer)
    infinity.close(optimizer)
    model, optimizer = built(behind(tmp_path / "backward"))
    infinity.save(optimizer, tmp_path / "saved")
    model(batch(0)).backward()
    yield model, optimizer, wanted, tmp_path / "saved"
    infinity.close(optimizer)


USES: dict[str, Callable[[Any, Any], object]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zero_grad, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "forward": lambda model, optimizer: model(batch(1)),
    "evaluation": lambda model, optimizer: model.eval()(batch(1)),
    "gathered": lambda model, optimizer: infinity.gathered(model.head.weight).__enter__(),
    "state dict": lambda model, optimizer: model.state_dict(),
    "state dict of the optimizer": lambda model, optimizer: optimizer.state_dict(),
    "load": lambda model, optimizer: optimizer.load_state_dict(
        {"state": {}, "param_groups": [{**g, "params": [*range(12)]} for g in optimizer.param_groups]}
    ),
    "flush": lambda model, optimizer: infinity.flush(optimizer),
    "unwrap": lambda model, optimizer: infinity.unwrap(model),
    "scaled gradient": lambda model, optimizer: model.head.weight.grad.mul_(0.5),
    "zero gradient": lambda model, optimizer: model.head.weight.grad.zero_(),
    "clipped": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clipped by us": lambda model, optimizer: optimizer.clip_grad_norm_(1e-3),
    "clipped values": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
}


def test_what_would_change_or_see_a_half_of_it_is_refused(stepped: Any) -> None:
    """And nothing is lost: `step()` makes the step."""
    model, optimizer, wanted, _ = stepped
    for use in USES.values():
        with pytest.raises((GradientError, ParameterError), match=r"step\(\)|released"):
            use(model, optimizer)
        model.train()
    optimizer.step()
    assert optimizer.steps == 1
    assert equal(values(model, optimizer), wanted)


def test_gradients_may_be_looked_at(stepped: Any) -> None:
    """Also by clipping to infinity, as trainers do."""
    model, optimizer, wanted, _ = stepped
    seen = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: infinity.gradient(p) for n, p in model.named_parameters() if p.grad is not None}
    assert seen
    for name, norm in seen.items():
        assert whole[name].norm().item() == pytest.approx(norm, rel=1e-5)
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    optimizer.step()
    assert equal(values(model, optimizer), wanted)


def test_param_groups_are_those_of_when_the_backward_began(stepped: Any) -> None:
    model, optimizer, wanted, _ = stepped
    group = optimizer.param_groups[0]
    group["lr"] = 1.0  # before `step`, or in a hook of that backward
    for _ in range(2):
        with pytest.raises(GradientError, match=r"(?s)lr as the update had it: 0\.01.*found: 1\.0"):
            optimizer.step()
    group["lr"] = 1e-2
    taken = group["params"].pop()
    with pytest.raises(GradientError, match="in a group"):
        optimizer.step()
    group["params"].append(taken)
    optimizer.step()
    assert equal(values(model, optimizer), wanted)


#: What a hook may not do either, nor this.
INSIDE = {name: use for name, use in USES.items() if "grad" not in name and "clipped" not in name} | {
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": USES["zero_grad"],
    "layer": lambda model, optimizer: model.blocks[2](batch(1)),
    "edit": lambda model, optimizer: infinity.gathered(model.head.weight, write=True).__enter__(),
    "save": lambda model, optimizer: infinity.save(optimizer, Path("nowhere")),
    "clipped by us": USES["clipped by us"],
}


@pytest.mark.parametrize("place", ["host", "resident"])
def test_in_that_backward_nobody_uses_what_it_has_updated(place: str, tmp_path: Path) -> None:
    """A hook would see values of the step that is being made; or wait for what the backward is to bring."""
    model, optimizer = built(behind(tmp_path / "backward", **PLACES[place]))
    wanted_model, wanted_optimizer = built(sync(tmp_path / "sync", **PLACES[place]))
    refused = []

    def calls(_: torch.Tensor) -> None:
        for use, call in INSIDE.items():
            with torch.no_grad(), pytest.raises(GradientError, match="that backward"):
                call(model, optimizer)
            model.train()
            refused.append(use)
        if place == "resident":
            reads_are_refused("in that backward")

    def reads_are_refused(when: str) -> None:
        for read in READS.values():
            with torch.no_grad(), pytest.raises(GradientError, match=when):
                read(model.head.weight)

    model.blocks[0][0].weight.register_post_accumulate_grad_hook(calls)
    for one_model, one_optimizer in ((model, optimizer), (wanted_model, wanted_optimizer)):
        for step in range(2):
            one_model(batch(step)).backward()
            if one_model is model and place == "resident":
                reads_are_refused("behind that backward")
                assert model.head.weight.shape
            one_optimizer.step()
            one_optimizer.zero_grad()
    for read in READS.values() if place == "resident" else ():
        read(model.head.weight)
    assert refused == [*INSIDE] * 2
    assert equal(values(model, optimizer), values(wanted_model, wanted_optimizer))


def _one_backward_and_step(model: Any, optimizer: Any) -> None:
    model(batch(0)).backward()
    optimizer.step()


def test_an_edit_in_that_backward_is_told(tmp_path: Path) -> None:
    """Of the parameter whose gradient has come, before its update has."""
    model, optimizer = built(behind(tmp_path / "backward", **RESIDENT, dtype="bf16"))
    infinity.save(optimizer, tmp_path / "saved")

    def edits(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.mul_(0.5)

    handle = model.blocks[0][0].weight.register_post_accumulate_grad_hook(edits)
    with pytest.raises(ParameterChangedError, match="in the last backward"):
        _one_backward_and_step(model, optimizer)
    handle.remove()
    _refuses_all_but_load(model, optimizer, tmp_path / "saved")  # and not in `step()`
    infinity.load(optimizer, tmp_path / "saved")
    model(batch(0)).backward()
    optimizer.step()


def _all_none(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


BEGINS_AGAIN: dict[str, Callable[[Any, Any], Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "parameters": _all_none,
}


@pytest.mark.parametrize(("how", "raises"), [("optimizer", True), ("parameters", False), ("load", False)])
def test_a_step_whose_gradients_are_dropped_begins_again(how: str, raises: bool, tmp_path: Path) -> None:
    """As with a bad batch, or one in whose backward a hook raised; a load drops them, too."""
    found = []
    for number, config in enumerate((behind(tmp_path / "backward", 2), sync(tmp_path / "sync"))):
        model, optimizer = built(config)
        for step in range(2):
            if number == 0:
                if how == "load":
                    infinity.save(optimizer, tmp_path / "saved")
                loss = model(batch(9))
                handle = model.blocks[0][0].weight.register_hook(lambda grad: _raise() if raises else None)
                with contextlib.suppress(Fails):
                    loss.backward()
                handle.remove()
                if how == "load":
                    infinity.load(optimizer, tmp_path / "saved")
                else:
                    BEGINS_AGAIN[how](model, optimizer)
            one(model, optimizer, step)
        found.append(values(model, optimizer))
    assert equal(*found)


def test_a_close_in_that_backward_or_before_the_step_ends_in_time(tmp_path: Path) -> None:
    model, optimizer = built(behind(tmp_path / "in"))
    model.blocks[1][0].weight.register_post_accumulate_grad_hook(lambda _: infinity.close(model))
    with pytest.raises(ClosedError):
        _one_backward_and_step(model, optimizer)
    with pytest.raises(ClosedError):
        optimizer.zero_grad()
    for raises in (False, True):
        model, optimizer = built(behind(tmp_path / str(raises), **STATE_ON_NVME))
        loss = model(batch(0))
        if raises:
            loss.register_hook(lambda grad: _raise())
        with pytest.raises(Fails) if raises else contextlib.nullcontext():
            loss.backward()
        infinity.close(optimizer)


CHANGES: dict[str, Callable[[Any], None]] = {
    "none": lambda model: setattr(model.head.weight, "grad", None),
    "other": lambda model: setattr(model.head.weight, "grad", torch.ones(WIDTH, WIDTH)),
    "more": lambda model: setattr(model.unused.weight, "grad", torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_is_another_one_leaves_only_a_load(change: str, stepped: Any) -> None:
    model, optimizer, wanted, saved = stepped
    CHANGES[change](model)
    with pytest.raises(GradientError, match="not the one that its update used"):
        optimizer.step()
    _refuses_all_but_load(model, optimizer, saved)
    model(batch(0)).backward()
    optimizer.step()
    assert equal(values(model, optimizer), wanted)


def test_an_edit_behind_the_backward_leaves_only_a_load(tmp_path: Path) -> None:
    model, optimizer = built(behind(tmp_path / "backward", **RESIDENT, dtype="bf16"))
    infinity.save(optimizer, tmp_path / "saved")
    alias = model.head.weight.detach()
    model(batch(0)).backward()
    with torch.no_grad(), pytest.raises(GradientError, match="behind that backward"):
        model.head.weight.mul_(0.5)
    alias.mul_(0.5)
    with pytest.raises(ParameterChangedError, match="between the last backward and"):
        optimizer.step()
    _refuses_all_but_load(model, optimizer, tmp_path / "saved")
    infinity.close(optimizer)


def _refuses_all_but_load(model: Any, optimizer: Any, saved: Path) -> None:
    for use in (
        lambda: model(batch(0)),
        optimizer.step,
        optimizer.state_dict,
        model.state_dict,
        lambda: infinity.save(optimizer, saved),
        lambda: infinity.flush(optimizer),
        lambda: infinity.unwrap(model),
    ):
        with pytest.raises(ParameterError, match=r"infinity\.load"):
            use()
    with pytest.raises(DirectoryError):
        infinity.load(optimizer, saved / "elsewhere")
    with pytest.raises(ParameterError, match=r"infinity\.load"):
        optimizer.step()
    infinity.load(optimizer, saved)


class Fails(Exception):
    pass


def _raise() -> None:
    raise Fails


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(10)  # Python's handler runs between two lines


@pytest.mark.first
@pytest.mark.parametrize(
    ("place", "end", "at_once"),
    [("nvme", _raise, False), ("resident", _interrupt, False), ("host", _interrupt, True)],
)
def test_an_exception_in_that_backward_leaves_only_a_load(
    place: str, end: Callable[[], None], at_once: bool, tmp_path: Path
) -> None:
    """`at_once`: the load comes first; else all else is refused before it."""
    wanted = []
    for config in (
        sync(tmp_path / "sync", **PLACES[place]),
        behind(tmp_path / "backward", **PLACES[place]),
    ):
        model, optimizer = built(config)
        infinity.save(optimizer, tmp_path / "saved")
        if config.update == "backward":
            x = model.blocks[0](batch(0))
            x.register_hook(lambda grad: end())
            for block in model.blocks[1:]:
                x = block(x)
            with pytest.raises((Fails, KeyboardInterrupt)):
                model.head(x).square().mean().backward()
            if not at_once:
                _refuses_all_but_load(model, optimizer, tmp_path / "saved")
            infinity.load(optimizer, tmp_path / "saved")
        for step in range(2):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted.append(values(model, optimizer))
        infinity.close(optimizer)
    assert equal(*wanted)


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({}, "accumulation=1"),
        ({"accumulation": 1, "dtype": "fp16"}, 'dtype="bf16"'),
        ({"accumulation": 1, "max_grad_norm": 1.0}, "max_grad_norm=None"),
    ],
)
def test_what_needs_the_norm_first_is_refused(settings: dict[str, Any], cure: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=cure):
        config_for(tmp_path, update="backward", **settings)
