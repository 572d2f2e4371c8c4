"""The optimizers that the engine runs, and the forms of their moments and masters: bits, state dicts,
checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import OptimizerTypeError, StateDictError
from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import log_codes
from infinity.optim.lion import Lion
from infinity.planning.parts import SQUARES

from .models import case
from .offloaded import ON_DEVICE, ON_HOST, config_for
from .whole import ALL_OPTIMIZERS, OPTIMIZERS, Make, train_whole

STEPS = 4
PLACES: dict[str, dict[str, Any]] = {
    "host": {**ON_HOST, "update": "sync"},
    "device": ON_DEVICE,
    "nvme": {"update_depth": 1, "read_ahead_memory": 0},
    "backward": {"update": "backward", "accumulation": 1},
    "split": {
        "parameters": {"device": 0.3, "host": 0.3, "nvme": 0.4},
        "optimizer_state": {"host": 0.5, "nvme": 0.5},
        "gradients": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "chunk_elements": 131072,
    },
}
State = dict[str, dict[str, torch.Tensor]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
#: Of parameters whose moments stay fp32.
PATTERNS = ("tokens.*", "*norm*", "*.bias")
#: In which form moments and masters are kept: settings, by name.
FORMS: dict[str, dict[str, Any]] = {
    **{form: {"optimizer_state_dtype": form} for form in DTYPES},
    "bf16, some fp32": {"optimizer_state_dtype": "bf16", "optimizer_state_fp32": PATTERNS},
    "8bit, some fp32": {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": PATTERNS},
    "8bit, others fp32": {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ("*.weight",)},
    "whole masters": {"dtype": "bf16"},
    "split masters": {"dtype": "bf16", "split_master": True},
    "split masters, 8bit": {"dtype": "bf16", "split_master": True, "optimizer_state_dtype": "8bit"},
}


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batches = case("gpt").batches
    return case("gpt").loss(model, batches[step % len(batches)])


def state_of(model: nn.Module) -> State:
    """Return the masters and the moments of a wrapped model, by name."""
    engine = engine_of(model)
    found: State = {}
    for name, param in model.named_parameters():
        sharded = engine.params[param]
        state = engine.states.read([sharded])[sharded]
        state.pop("step")
        value = state.pop("master", None)
        found[name] = {
            "value": engine.states.copies_of([sharded])[sharded] if value is None else value,
            **state,
        }
    return found


def wrapped(make: Make, folder: Path, **settings: Any) -> tuple[nn.Module, Any]:
    model = case("gpt").model
    folder.mkdir(exist_ok=True)
    return infinity.wrap(model, make(model.parameters()), config_for(folder, **settings))


def matching(patterns: Iterable[str]) -> set[str]:
    names = [name for name, _ in case("gpt").model.named_parameters()]
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def go_on(model: nn.Module, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Make, folder: Path, steps: int = STEPS, **settings: Any) -> State:
    model, optimizer = wrapped(make, folder, **settings)
    try:
        go_on(model, optimizer, 0, steps)
        return state_of(model)
    finally:
        infinity.close(optimizer)


def assert_equal(found: State, wanted: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    assert found.keys() == wanted.keys()
    for name, kinds in wanted.items():
        assert found[name].keys() == kinds.keys(), name
        for kind, value in kinds.items():
            assert torch.equal(found[name][kind], value), (name, kind)


def assert_near(found: State, plain: nn.Module) -> None:
    """Where a gradient is zero but for rounding, as that of a key's bias, Adam and Lion amplify it: so one
    element in a hundred may move by some steps of its own."""
    differing = 0
    for name, param in plain.named_parameters():
        value, wanted = found[name]["value"], param.detach()
        apart = (value - wanted).abs() > 1e-4 * wanted.abs() + 1e-5 * wanted.abs().max()
        differing += int(apart.sum())
        torch.testing.assert_close(value, wanted, rtol=1e-2, atol=1e-2)
    assert differing <= sum(p.numel() for p in plain.parameters()) / 100


@pytest.mark.parametrize(
    ("name", "form", "places"),
    [
        ("adamw", "8bit, some fp32", list(PLACES)),
        pytest.param("adagrad", "8bit", list(PLACES), marks=pytest.mark.integration),
        pytest.param("lion", "bf16", list(PLACES), marks=pytest.mark.integration),
        ("muon", "fp32", ["nvme", "split"]),
        ("nesterov", "fp32", ["device", "backward", "split"]),
        ("sgd", "fp32", ["nvme", "split"]),
    ],
)
def test_bits_are_those_of_whole_parameters_everywhere(
    name: str, form: str, places: list[str], tmp_path: Path
) -> None:
    make, settings = ALL_OPTIMIZERS[name], FORMS[form]
    fp32, dtype = matching(settings.get("optimizer_state_fp32", ())), settings["optimizer_state_dtype"]
    model = case("gpt").model
    wanted = train_whole(model, make, loss_of, steps=STEPS, dtype=DTYPES[dtype], fp32=fp32)
    for place in places:
        assert_equal(trained(make, tmp_path / place, **settings, **PLACES[place]), wanted)


def test_a_delayed_update_has_the_same_bits_on_every_tier(tmp_path: Path) -> None:
    settings = {"update": "delayed", "delay_warmup_steps": 1, **FORMS["8bit, some fp32"]}
    wanted = trained(OPTIMIZERS["adamw"], tmp_path / "host", **ON_HOST, **settings)
    for place, tiers in {"nvme": {}, "device": ON_DEVICE}.items():
        assert_equal(trained(OPTIMIZERS["adamw"], tmp_path / place, **tiers, **settings), wanted)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_state_dict_goes_on_in_torch_and_back(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = wrapped(make, tmp_path / "a")
    go_on(model, optimizer, 0, 2)
    values, saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    go_on(model, optimizer, 2, 3)
    plain = case("gpt").model
    plain.load_state_dict(values)
    theirs = make(plain.parameters())
    theirs.load_state_dict(copy.deepcopy({k: saved[k] for k in ("state", "param_groups")}))
    go_on(plain, theirs, 2, 3)
    assert_near(state_of(model), plain)
    infinity.close(optimizer)

    model, optimizer = wrapped(make, tmp_path / "b")  # torch's own state, also where it counts no steps
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    go_on(plain, theirs, 3, 4)
    go_on(model, optimizer, 3, 4)
    assert_near(state_of(model), plain)
    infinity.close(optimizer)


def as_kept(kind: str, value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a moment in fp32, as `dtype` keeps it."""
    if dtype != "8bit":
        return value.to(DTYPES[dtype]).float()
    codes = torch.zeros(value.numel(), dtype=torch.uint8)
    scales, squares = torch.zeros(-(-value.numel() // MOMENT_BLOCK)), kind in SQUARES
    log_codes.encode(value.reshape(-1), codes, scales, squares=squares)
    return log_codes.decode(codes, scales, squares=squares).view(value.shape)


@pytest.mark.first
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bf16", "fp32"),
        ("fp32", "8bit"),
        ("8bit", "bf16, some fp32"),
        ("8bit, some fp32", "8bit, others fp32"),
        ("8bit, some fp32", "bf16"),
        ("whole masters", "split masters"),
        ("split masters", "whole masters"),
    ],
)
def test_checkpoints_and_state_dicts_are_exchanged_between_forms(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.api.load._AT_ONCE", 512)  # so that one segment takes several
    monkeypatch.setattr("infinity.optim.pieces._SLICE", 512)
    make, here = OPTIMIZERS["adamw"], FORMS[second]
    model, optimizer = wrapped(make, tmp_path / "a", **FORMS[first])
    go_on(model, optimizer, 0, 2)
    infinity.save(optimizer, tmp_path / "saved")
    before, saved = state_of(model), optimizer.state_dict()
    infinity.close(optimizer)
    assert all(v.dtype is torch.float32 for one in saved["state"].values() for v in one.values())
    fp32, form = matching(here.get("optimizer_state_fp32", ())), here.get("optimizer_state_dtype", "fp32")
    wanted = {
        name: {
            k: v if k == "value" else as_kept(k, v, "fp32" if name in fp32 else form)
            for k, v in kinds.items()
        }
        for name, kinds in before.items()
    }
    model, optimizer = wrapped(make, tmp_path / "b", **here, chunk_elements=131072)
    infinity.load(optimizer, tmp_path / "saved")
    assert_equal(state_of(model), wanted)
    go_on(model, optimizer, 2, 3)
    optimizer.load_state_dict(saved)
    if "dtype" not in here:  # elsewhere the masters are in it
        model.load_state_dict({name: kinds["value"] for name, kinds in before.items()})
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


def test_a_checkpoint_of_another_optimizer_is_refused_and_lends_its_values(tmp_path: Path) -> None:
    model, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path / "a")
    go_on(model, optimizer, 0, 2)
    infinity.save(optimizer, tmp_path / "saved")
    values, saved = state_of(model), optimizer.state_dict()
    infinity.close(optimizer)
    model, optimizer = wrapped(OPTIMIZERS["lion"], tmp_path / "b")
    before = state_of(model)
    with pytest.raises(StateDictError, match="of another optimizer"):
        infinity.load(optimizer, tmp_path / "saved")
    with pytest.raises(StateDictError, match="another optimizer than Lion"):
        optimizer.load_state_dict(saved)
    assert_equal(state_of(model), before)
    infinity.load(optimizer, tmp_path / "saved", strict=False)
    for name, kinds in state_of(model).items():
        assert torch.equal(kinds["value"], values[name]["value"])
        assert not kinds["exp_avg"].any()
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert "eps" not in optimizer.param_groups[0]
    infinity.close(optimizer)


def test_state_that_is_no_state_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path)
    go_on(model, optimizer, 0, 1)
    before, wrong = state_of(model), optimizer.state_dict()
    bad: dict[str, Any]
    for bad in ({"exp_avg": [1.0]}, {"step": -1.0}, {"exp_avg_sq": torch.zeros(3)}):
        states = {**wrong["state"], 0: {**wrong["state"][0], **bad}}
        with pytest.raises(StateDictError):
            optimizer.load_state_dict({**wrong, "state": states})
    with pytest.raises(StateDictError, match="betas"):  # it lacks an option
        optimizer.load_state_dict(OPTIMIZERS["sgd"](case("gpt").model.parameters()).state_dict())
    with pytest.raises(StateDictError):  # of another model
        optimizer.load_state_dict({**wrong, "param_groups": [{**wrong["param_groups"][0], "params": [0]}]})
    assert_equal(state_of(model), before)
    infinity.close(optimizer)


@pytest.mark.parametrize(("update", "saves"), [("sync", True), ("backward", False)])
def test_a_momentum_that_begins_later_is_torchs(update: str, saves: bool, tmp_path: Path) -> None:
    """The first update with one is not dampened. A checkpoint knows whether there was one."""

    def make(params: Any) -> torch.optim.SGD:
        first, *others = params
        groups = [{"params": [first], "momentum": 0.9}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.3, dampening=0.5)

    def train(model: nn.Module, optimizer: Any, save: bool) -> None:
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.9, 0.0, 0.8)):
            optimizer.param_groups[1]["momentum"] = momentum
            go_on(model, optimizer, step, step + 1)
            if save and step in (1, 2, 4):
                infinity.load(optimizer, infinity.save(optimizer, tmp_path / f"saved{step}"))

    plain = case("gpt").model
    train(plain, make(plain.parameters()), save=False)
    model, optimizer = wrapped(make, tmp_path, **ON_HOST, update=update, accumulation=1)
    train(model, optimizer, saves)
    assert_near(state_of(model), plain)
    infinity.close(optimizer)


def test_hooks_from_before_wrap_run(tmp_path: Path) -> None:
    model = case("gpt").model
    plain, calls = torch.optim.AdamW(model.parameters(), lr=1e-2), list[str]()

    def halve(optimizer: Any, *_: Any) -> None:
        calls.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            group["lr"] /= 2

    def slower(state: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**group, "lr": group["lr"] / 5} for group in state["param_groups"]]

    handles = [
        plain.register_step_post_hook(halve),
        plain.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1}),
        plain.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": slower(state)}),
        plain.register_load_state_dict_post_hook(lambda _: calls.append("loaded")),
    ]
    model, optimizer = infinity.wrap(model, plain, config_for(tmp_path))
    go_on(model, optimizer, 0, 2)
    assert [group["lr"] for group in optimizer.param_groups] == [2.5e-3]
    saved = optimizer.state_dict()
    assert saved.pop("mine") == 1
    optimizer.load_state_dict(saved)
    assert calls == ["OffloadOptimizer"] * 2 + ["loaded"]
    for handle in handles:
        handle.remove()
    go_on(model, optimizer, 2, 3)
    assert optimizer.param_groups[0]["lr"] == 5e-4
    infinity.close(optimizer)


def lion_of(module: str, **attributes: Any) -> Make:
    """Return a Lion as another library has it: by its place, and what it keeps beside the groups."""
    kind = type("Lion", (Lion,), {"__module__": module, **attributes})
    return lambda params: kind(params, lr=1e-3, weight_decay=0.1)  # type: ignore[no-any-return]


def of_accelerate(params: Any) -> torch.optim.Optimizer:
    kind = type("AcceleratedOptimizer", (torch.optim.AdamW,), {"__module__": "accelerate.optimizer"})
    return kind(params)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lion_of("lion_pytorch.lion_pytorch", decoupled_wd=False),
        lion_of("bitsandbytes.optim.lion", args=SimpleNamespace(optim_bits=32)),
        lion_of("timm.optim.lion"),
    ],
)
def test_a_lion_of_another_library_is_one(make: Make, tmp_path: Path) -> None:
    wanted = train_whole(case("gpt").model, OPTIMIZERS["lion"], loss_of, steps=2)
    assert_equal(trained(make, tmp_path, steps=2), wanted)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lion_of("lion_pytorch.lion_pytorch", decoupled_wd=True), "decoupled_weight_decay"),
        (lion_of("bitsandbytes.optim.lion", args=SimpleNamespace(optim_bits=8)), "optim_bits"),
        (lion_of("somebody.lion"), "cannot be offloaded"),
        (of_accelerate, "wrap` first"),
        (lambda p: torch.optim.LBFGS(p), "torch.optim"),
        (lambda p: torch.optim.Adafactor(p), "Adafactor"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1), "initial_accumulator_value"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable"),
    ],
)
def test_what_is_not_supported_is_refused(make: Make, found: str, tmp_path: Path) -> None:
    with pytest.raises(OptimizerTypeError, match=found):
        wrapped(make, tmp_path)


def test_a_momentum_that_there_is_no_room_for_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, optimizer = wrapped(OPTIMIZERS["momentum"], tmp_path / "a")
    go_on(model, optimizer, 0, 1)
    path, saved = infinity.save(optimizer, tmp_path / "saved"), optimizer.state_dict()
    infinity.close(optimizer)
    model, optimizer = wrapped(OPTIMIZERS["sgd"], tmp_path / "b")
    for load in (lambda: infinity.load(optimizer, path), lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(StateDictError, match="has a momentum"):
            load()
    assert optimizer.param_groups[0]["momentum"] == 0.0
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptimizerTypeError, match="momentum"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0
    optimizer.step()
    infinity.close(optimizer)
