"""Saving and loading: masters keep their low bits, copies follow masters, counts go along.

The same result on every placement, in every update mode, in either order of loading.
"""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import ParameterChangedError, ParameterError, StateDictError
from infinity.params.given import Given

from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, config_for, wrap_adamw

WIDTH = 40
PLACES: dict[str, dict[str, Any]] = {
    "nvme": ON_NVME,
    "host": ON_HOST,
    "device": ON_DEVICE,
    "resident": {"parameters": "device", "optimizer_state": "nvme", "gradients": "host"},
    "between": {"parameters": "host", "optimizer_state": "nvme", "gradients": "device"},
}
places = pytest.mark.parametrize("place", ["nvme", "host", "device", "resident"])


class Net(nn.Module):
    """Three layers and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.float().square().mean()


@contextmanager
def wrapped(folder: Path, place: str, seed: int = 0, **settings: Any) -> Iterator[tuple[Any, Any]]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model: Any = Net()
    config = config_for(folder, **{"dtype": "bf16", **PLACES[place], **settings})
    model, wrapper = wrap_adamw(model, config, lr=1e-2)
    try:
        yield model, wrapper
    finally:
        infinity.close(wrapper)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        scale = optimizer.scale if hasattr(optimizer, "scale") else (lambda x: x)
        scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dicts by way of a file."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [values["master"] for values in optimizer.state_dict()["state"].values()]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_dict(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and same(a.values(), b.values())


@pytest.mark.parametrize(
    ("place", "update", "dtype", "order"),
    [
        ("nvme", "overlap", "bf16", "model first"),
        ("nvme", "delayed", "fp16", "optimizer alone"),
        ("host", "delayed", "bf16", "optimizer first"),
        ("device", "overlap", "fp16", "optimizer alone"),
        ("resident", "delayed", "fp16", "model first"),
        ("between", "overlap", "fp16", "optimizer first"),
    ],
)
def test_training_goes_on_with_the_same_bits(
    place: str, update: str, dtype: str, order: str, tmp_path: Path
) -> None:
    mode = {"update": update, "dtype": dtype, **({"delay_warmup_steps": 2} if update == "delayed" else {})}
    with wrapped(tmp_path / "a", place, **mode) as (model, optimizer):
        train(model, optimizer, range(4))
        infinity.flush(model)
        weights, states = saved(model, optimizer)
        losses = train(model, optimizer, range(4, 7))
        wanted, wanted_masters = model.state_dict(), masters(optimizer)
    with wrapped(tmp_path / "b", place, seed=1, **mode) as (model, optimizer):
        train(model, optimizer, range(9, 10))  # something else is on the device, and on its way
        if order == "model first":
            model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        if order == "optimizer first":
            model.load_state_dict(weights)
        assert same_dict(model.state_dict(), weights)
        assert same(masters(optimizer), [v["master"] for v in states["state"].values()])
        assert train(model, optimizer, range(4, 7)) == losses
        assert same_dict(model.state_dict(), wanted)
        assert same(masters(optimizer), wanted_masters)


@places
def test_values_that_do_not_round_to_the_master_replace_it(place: str, tmp_path: Path) -> None:
    """One rule for each element, whoever holds the copy; and the optimizer's state dict shows it at once."""
    with wrapped(tmp_path, place) as (model, optimizer):
        train(model, optimizer, range(2))
        before = dict(zip(dict(model.named_parameters()), masters(optimizer), strict=True))
        weights = {n: v.clone() for n, v in model.state_dict().items()}
        weights["layers.1.weight"][3] += 1
        model.load_state_dict(weights)
        after = dict(zip(dict(model.named_parameters()), masters(optimizer), strict=True))
        wanted = before["layers.1.weight"].clone()
        wanted[3] = weights["layers.1.weight"][3].float()
        assert torch.equal(after.pop("layers.1.weight"), wanted)
        before.pop("layers.1.weight")
        assert same_dict(after, before)
        assert same_dict(model.state_dict(), weights)


@pytest.mark.parametrize(
    ("place", "what"),
    [("nvme", "model"), ("host", "optimizer"), ("device", "model"), ("device", "optimizer")],
)
def test_a_graph_from_before_a_load_fails_as_in_torch(place: str, what: str, tmp_path: Path) -> None:
    with wrapped(tmp_path / "a", "host", seed=1) as (model, optimizer):
        weights, states = saved(model, optimizer)
    with wrapped(tmp_path / "b", place) as (model, optimizer):
        loss = model(torch.ones(4, WIDTH))
        if what == "model":
            model.load_state_dict(weights)
        else:
            optimizer.load_state_dict(states)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_masters_are_not_loaded_into_parameters_that_are_gathered(tmp_path: Path) -> None:
    with wrapped(tmp_path, "nvme") as (model, optimizer):
        train(model, optimizer, range(1))
        _, states = saved(model, optimizer)
        before = masters(optimizer)
        lr = states["param_groups"][0]["lr"] = 0.5
        with infinity.gathered(model.layers[0]), pytest.raises(ParameterError, match="gathered"):
            optimizer.load_state_dict(states)
        assert same(masters(optimizer), before)
        assert optimizer.param_groups[0]["lr"] != lr


# -- counts ---------------------------------------------------------------------------------------


def test_the_loss_scale_and_its_window_go_along(tmp_path: Path) -> None:
    settings = {"dtype": "fp16", "loss_scale": 1024.0, "loss_scale_window": 3}
    with wrapped(tmp_path / "a", "host", **settings) as (model, optimizer):
        train(model, optimizer, range(5))
        weights, states = saved(model, optimizer)
        assert optimizer.loss_scale == 2048.0
        optimizer._gradients.scale = 2.0**24
        train(model, optimizer, range(1))
        assert optimizer.skipped_steps == 1
        _, skipped = saved(model, optimizer)
    with wrapped(tmp_path / "b", "host", **settings) as (model, optimizer):
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert (optimizer.loss_scale, optimizer.steps, optimizer.skipped_steps) == (2048.0, 5, 0)
        train(model, optimizer, range(5, 6))
        assert optimizer.loss_scale == 4096.0  # the third without an overflow
        optimizer.load_state_dict(skipped)
        assert (optimizer.loss_scale, optimizer.skipped_steps) == (2.0**23, 1)
        assert infinity.metrics(optimizer)["skipped_steps"] == 1.0


@pytest.mark.parametrize("warm", [False, True])
def test_the_warm_up_of_delayed_updates_is_not_done_twice(warm: bool, tmp_path: Path) -> None:
    settings = {"update": "delayed", "delay_warmup_steps": 2}
    with wrapped(tmp_path / "a", "host", **settings) as (model, optimizer):
        train(model, optimizer, range(2 if warm else 1))
        _, states = saved(model, optimizer)
    with wrapped(tmp_path / "b", "host", **settings) as (_, optimizer):
        optimizer.load_state_dict(states)
        assert optimizer.delaying is warm


def test_torch_takes_masters_and_gives_none_back(tmp_path: Path) -> None:
    with wrapped(tmp_path, "host") as (model, optimizer):
        train(model, optimizer, range(2))
        weights, states = saved(model, optimizer)
        plain: Any = Net()
        adam = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        plain.load_state_dict(weights)
        adam.load_state_dict(states)
        train(plain, adam, range(2, 5))
        theirs = adam.state_dict()
        assert "infinity" not in theirs
        for values in theirs["state"].values():
            del values["master"]
        optimizer.load_state_dict(theirs)
        assert optimizer.steps == 2  # what it does not say stays
        again = optimizer.state_dict()["state"]
        for index, values in theirs["state"].items():
            assert all(torch.equal(again[index][key], values[key]) for key in values)


def test_counts_that_make_no_sense_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    with wrapped(tmp_path, "host", dtype="fp16", loss_scale=1024.0) as (model, optimizer):
        train(model, optimizer, range(1))
        before, (_, states) = masters(optimizer), saved(model, optimizer)
        train(model, optimizer, range(1, 2))
        now = masters(optimizer)
        assert not same(now, before)
        wrong: Any
        counts = ({"loss_scale": 3.0}, {"loss_scale": 0.0}, {"steps": -1}, {"steps": "many"})
        for wrong in (*counts, ["steps"], 7):
            with pytest.raises(StateDictError, match="cannot be used"):
                optimizer.load_state_dict({**states, "infinity": wrong})
            assert same(masters(optimizer), now)
            assert optimizer.loss_scale == 1024.0


# -- what a state dict gives out ----------------------------------------------------------------------


class Odd(Net):
    """With parameters of no dimension, of no element, and with a dimension of one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.thin = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.thin) * self.scale + self.nothing.sum()


def check_storages(state: dict[str, torch.Tensor]) -> None:
    """One each, as torch's parameters have, in torch's strides and with a version counter."""
    for value in state.values():
        assert value.untyped_storage().nbytes() == value.nbytes
        assert value.stride() == torch.empty(value.shape).stride()
        assert not value.is_inference()
    assert len({v.untyped_storage()._cdata for v in state.values()}) == len(state)


@pytest.mark.parametrize(
    ("place", "dtype", "update"),
    [
        ("nvme", "bf16", "overlap"),
        ("nvme", "fp32", "delayed"),
        ("host", "fp32", "overlap"),
        ("device", "bf16", "delayed"),
        ("device", "fp32", "overlap"),
        ("resident", "bf16", "overlap"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*stay on the device:RuntimeWarning")
def test_each_tensor_has_a_storage_of_its_own(
    dtype: str, update: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Net", Odd)
    settings = {"dtype": dtype, "update": update, "delay_warmup_steps": 0}
    with wrapped(tmp_path, place, **settings) as (model, optimizer):
        train(model, optimizer, range(2))
        state = model.state_dict()
        check_storages(state)
        check_storages(part := model.layers[1].state_dict())
        with torch.inference_mode():
            check_storages(model.state_dict())
        assert torch.equal(part["weight"], state["layers.1.weight"])
        file = io.BytesIO()
        torch.save({"norm": part["bias"]}, file)
        assert len(file.getvalue()) < 3000
        with infinity.gathered(model):
            check_storages(inside := model.state_dict())
            assert same_dict(inside, state)
        model.load_state_dict(inside)
        model.load_state_dict(state)
        assert same_dict(model.state_dict(), inside)

        held = infinity.metrics(optimizer)["memory/held_units"]
        assert held or (update == "delayed" and place in ("device", "resident"))  # which copies those, too
        train(model, optimizer, range(2, 4))
        if update == "overlap":  # they show what they show in torch
            assert same_dict(model.state_dict(), inside)
        del inside, state, part
        train(model, optimizer, range(4, 5))
        infinity.flush(optimizer)  # an update that is under way may have hold of a unit itself
        assert infinity.metrics(optimizer)["memory/held_units"] == 0


def test_an_edit_through_a_state_dict_is_kept_on_the_device(tmp_path: Path) -> None:
    with wrapped(tmp_path, "resident", dtype="fp32") as (model, optimizer):
        train(model, optimizer, range(1))
        with torch.no_grad():
            model.state_dict()["layers.0.weight"].fill_(0.5)
            model.state_dict()["layers.1.weight"][0].mul_(3)
        model(torch.zeros(1, WIDTH)).backward()
        optimizer.step()
        assert (model.state_dict()["layers.0.weight"] - 0.5).abs().max() < 0.1
        plain: Any = Net()
        plain.load_state_dict(model.state_dict())
        found = [
            train(m, o, range(1))
            for m, o in ((model, optimizer), (plain, torch.optim.Adam([plain.unused.bias])))
        ]
        assert found[0] == pytest.approx(found[1])


def edit_one(model: Any) -> Any:
    model.state_dict()["layers.0.weight"].mul_(3)  # gone at once


def edit_some(model: Any) -> Any:
    state = model.state_dict()
    for value in state.values():
        value.add_(1)
    return state


def edit_a_view(model: Any) -> Any:
    row = model.layers[0].state_dict()["weight"].detach()[1:]
    model(torch.zeros(1, WIDTH))  # a look at what lives
    return row.zero_()


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, optimizer: model(torch.zeros(1, WIDTH)),
    "a layer's forward": lambda model, optimizer: model.layers[1](torch.zeros(1, WIDTH)),
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: model.layers[2].state_dict(),
    "the optimizer's": lambda model, optimizer: optimizer.state_dict(),
    "unwrap": lambda model, optimizer: infinity.unwrap(model),
}


@pytest.mark.on_cpu  # it is a warning elsewhere
@pytest.mark.parametrize(("look", "edit"), zip(LOOKS, 2 * [edit_one, edit_some, edit_a_view], strict=True))
def test_an_edit_of_a_copy_is_told(look: str, edit: Callable[[Any], Any], tmp_path: Path) -> None:
    with wrapped(tmp_path, "host", dtype="fp32") as (model, optimizer):
        before = {n: v.clone() for n, v in model.state_dict().items()}
        model(torch.ones(1, WIDTH)).backward()
        kept = edit(model)
        with pytest.raises(ParameterChangedError, match=r"'layers\.0\.weight'"):
            LOOKS[look](model, optimizer)
        assert same_dict(model.state_dict(), before)
        LOOKS[look](model, optimizer)  # is told once
        del kept


@places
def test_what_edits_copies_and_means_no_edit_is_left_alone(place: str, tmp_path: Path) -> None:
    """Loading what was edited, writing it in a block, clones; the values are torch's."""
    with wrapped(tmp_path, place, dtype="fp32", update="delayed", delay_warmup_steps=0) as (model, optimizer):
        train(model, optimizer, range(2))
        state = edit_some(model)
        model.load_state_dict(state)
        train(model, optimizer, range(2, 3))

        state = edit_some(model)
        wanted = {n: v.clone() for n, v in state.items()}
        with infinity.gathered(model, write=True), torch.no_grad():
            for name, param in model.named_parameters():
                param.data.copy_(state[name])
        model(torch.zeros(1, WIDTH))
        assert same_dict(model.state_dict(), wanted)
        for value in wanted.values():
            value.zero_()
        train(model, optimizer, range(3, 4))
        del state
        model(torch.zeros(1, WIDTH))
        assert not engine_of(model).edits.given._copies  # nothing is kept of what is gone


def test_on_a_device_of_its_own_an_edit_of_a_copy_is_a_warning(tmp_path: Path) -> None:
    """`.cpu()` would be a copy in torch and is none of what lies on the host."""
    with wrapped(tmp_path, "host") as (model, _):
        given, copy = Given(staged=True), torch.zeros(3)
        given.add(engine_of(model).params[model.unused.bias], copy)
        copy.cpu().add_(1)
        with pytest.warns(RuntimeWarning, match=r"'unused\.bias'"):
            given.check()
        given.check()


@pytest.mark.parametrize(
    ("place", "where"), [("nvme", ""), ("host", "layers"), ("device", "layers.1"), ("nvme", "layers.0")]
)
def test_hooks_of_users_edit_and_raise(where: str, place: str, tmp_path: Path) -> None:
    """An edit is in the state dict; an error in the middle leaves no copies, and present values."""
    with wrapped(tmp_path, place, dtype="fp32") as (model, optimizer):
        train(model, optimizer, range(1))
        made: list[weakref.ref[torch.Tensor]] = []

        def note(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
            made.extend(weakref.ref(value) for value in state.values())

        def fail(*_: Any) -> None:
            raise KeyError("mine")

        def merge(*_: Any) -> None:
            with infinity.gathered(model.layers[1].weight, write=True), torch.no_grad():
                model.layers[1].weight.fill_(1)

        noting = model.layers[0].register_state_dict_post_hook(note)
        failing = model.layers[1].register_state_dict_pre_hook(fail)
        with contextlib.suppress(KeyError):  # it would be kept, with the frames that hold the copies
            model.state_dict()
        gc.collect()
        assert made
        assert not any(ref() is not None for ref in made)
        noting.remove()
        failing.remove()
        train(model, optimizer, range(1, 2))
        with infinity.gathered(model):
            state = model.state_dict()
            assert all(torch.equal(p, state[name]) for name, p in model.named_parameters())
        model.get_submodule(where).register_state_dict_pre_hook(merge)
        assert model.state_dict()["layers.1.weight"].eq(1).all()


# -- a device of its own ----------------------------------------------------------------------------


@pytest.mark.lagging
@pytest.mark.parametrize(
    ("place", "dtype"), [("nvme", "bf16"), ("host", "fp32"), ("device", "bf16"), ("resident", "fp32")]
)
def test_a_load_leaves_nothing_of_a_lease_on_the_device(place: str, dtype: str, tmp_path: Path) -> None:
    """On a device of its own a visit has a lease for what is there; a load writes it in place."""
    with wrapped(tmp_path / "a", place, dtype=dtype, update="sync") as (model, optimizer):
        optimizer.step()
        weights, states = saved(model, optimizer)
    with wrapped(tmp_path / "b", place, dtype=dtype, update="sync") as (model, optimizer):
        assert engine_of(model).device.staged
        train(model, optimizer, range(1))
        optimizer.load_state_dict(states)
        model.load_state_dict(weights)
        assert same_dict(model.state_dict(), weights)
        optimizer.load_state_dict(states)
        assert same_dict(model.state_dict(), weights)


@pytest.mark.parametrize("place", ["nvme", "device"])
def test_a_load_that_would_replace_parameters_is_refused_and_the_cure_works(
    place: str, tmp_path: Path
) -> None:
    with wrapped(tmp_path, place, dtype="fp32") as (model, optimizer):
        before, other = {n: v.clone() for n, v in model.state_dict().items()}, Net()
        for target, source in ((model, other), (model.layers[0], other.layers[0])):
            with pytest.raises(ParameterChangedError, match="leave assign out"):
                target.load_state_dict(source.state_dict(), assign=True)
        assert same_dict(model.state_dict(), before)
        new = other.state_dict()
        other.load_state_dict(new, assign=True)  # leaves torch's mark in it
        wanted = {n: v.clone() for n, v in new.items()}
        model.load_state_dict(new)
        assert same_dict(model.state_dict(), wanted)
        train(model, optimizer, range(1))
