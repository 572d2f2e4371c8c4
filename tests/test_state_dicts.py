"""State dicts between torch and the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dist_state

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, StateDictError
from infinity.planning.footprint import Budget

from .offloaded import ON_DEVICE, ON_HOST, ON_NVME
from .ranks import all_well, run_ranks
from .small_net import Wrapped, build, same, train
from .whole import ALL_OPTIMIZERS


def test_a_state_dict_that_does_not_fit_is_refused(config: infinity.Config) -> None:
    engine_config = config.replace(host_memory="2MiB", chunk_elements=65536)
    model, optimizer = infinity.wrap(*build(), engine_config)
    train(model, optimizer, 1)
    engine_of(model).budget = Budget(device=0, host=0)
    with pytest.raises(BudgetError, match="host_memory"):
        optimizer.state_dict()
    assert len(model.state_dict()) > 0  # it fits the leases that nobody uses
    infinity.close(optimizer)


def named(model: Any, optimizer: Any) -> dict[str, Any]:
    """The state that `optimizer.state_dict()` gives, by names in place of numbers, as torch makes them."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names[params[i]]: values for i, values in optimizer.state_dict()["state"].items()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


PLACES = {"default": {}, "device": ON_DEVICE, "host": ON_HOST, "nvme": ON_NVME}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
)


def placed(folder: Path, place: str, **settings: Any) -> infinity.Config:
    settings = {"device": "cpu", "host_memory": "64MiB", **PLACES[place], **settings}
    return infinity.Config(**settings, nvme=folder if place == "nvme" else None)


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_torchs_distributed_state_dicts_are_no_step(place: str, tmp_path: Path) -> None:
    """torch begins a state that is false by a step, at a rate of 0 and with gradients of 0."""
    model, optimizer = infinity.wrap(*build(), placed(tmp_path, place))
    for steps in (0, 2):
        train(model, optimizer, steps)
        before, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        for options in OPTIONS:
            flat = "flatten_optimizer_state_dict" in options
            found = dist_state.get_optimizer_state_dict(
                model, optimizer, options=dist_state.StateDictOptions(**options)
            )
            assert optimizer.steps == steps
            assert equal(optimizer.state_dict(), before)
            assert same(model.state_dict(), weights)
            assert all(p.grad is None for p in model.parameters())
            for name, values in named(model, optimizer).items():
                for key, value in values.items():
                    entry = found[f"state.{name}.{key}"] if flat else found["state"][name][key]
                    assert torch.equal(entry, value), (name, key)
            unused = found["state.unused.weight.step"] if flat else found["state"]["unused.weight"]["step"]
            assert int(unused) == 0  # no step, but its name: a load reads what such a state dict names
    infinity.close(optimizer)


@pytest.mark.parametrize(
    ("place", "settings", "flat"),
    [
        ("device", {}, True),
        ("nvme", {}, False),
        ("host", {"dtype": "bf16"}, True),
        ("nvme", {"update": "delayed", "dtype": "bf16"}, True),
        ("host", {"update": "delayed"}, False),
    ],
)
def test_a_distributed_checkpoint_goes_on_with_the_same_bits(
    place: str, settings: dict[str, Any], flat: bool, tmp_path: Path
) -> None:
    """A new optimizer, which has made no step, takes all that the saved one had."""
    config = placed(tmp_path / "nvme", place, **settings)
    (tmp_path / "nvme").mkdir()
    options = dist_state.StateDictOptions(flatten_optimizer_state_dict=flat)

    def states() -> dict[str, Any]:
        found = dist_state.get_state_dict(model, optimizer, options=options)
        return dict(zip(("model", "optim"), found, strict=True))

    model, optimizer = infinity.wrap(*build(), config)
    train(model, optimizer, 3)
    state = states()
    # Without streams of its own: the simulated device has none for torch.
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "saved", per_thread_copy_ahead=0))
    wanted = train(model, optimizer, 2), model.state_dict(), optimizer.state_dict()["state"]
    infinity.close(optimizer)

    model, optimizer = infinity.wrap(*build(seed=3), config)
    optimizer.param_groups[0]["lr"] = 0.5
    state = states()
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    given = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
    if settings.get("update") == "delayed":  # torch's `set_state_dict` loads the optimizer first
        with pytest.raises(StateDictError, match=r"model.load_state_dict\(…\) first"):
            dist_state.set_state_dict(model, optimizer, **given, options=options)
        infinity.flush(optimizer)
        dist_state.set_model_state_dict(model, state["model"])
        dist_state.set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    else:
        dist_state.set_state_dict(model, optimizer, **given, options=options)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    found = train(model, optimizer, 2), model.state_dict(), optimizer.state_dict()["state"]
    assert found[0] == wanted[0]
    assert same(found[1], wanted[1])
    assert equal(found[2], wanted[2])
    infinity.close(optimizer)


def test_the_state_is_true_and_has_no_entries(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    assert optimizer.state
    assert list(optimizer.state.items()) == []
    assert optimizer.state.get(model.head.weight) is None
    optimizer.state = optimizer.state  # as a context that puts it back does
    assert [*optimizer.state[model.head.weight]] == ["step", "exp_avg", "exp_avg_sq"]
    with pytest.raises(StateDictError, match="is on its tiers"):
        optimizer.state[model.head.weight]["exp_avg"].zero_()
    with pytest.raises(StateDictError, match="is on its tiers"):
        optimizer.state[model.head.weight]["exp_avg"] = torch.zeros(())


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "muon"])
def test_every_rule_names_what_a_flat_state_dict_has(name: str) -> None:
    options = dist_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def made() -> Wrapped:
        model = build()[0]
        return infinity.wrap(model, ALL_OPTIMIZERS[name](model.parameters()), infinity.Config(device="cpu"))

    model, optimizer = made()
    train(model, optimizer, 1)
    state = dist_state.get_optimizer_state_dict(model, optimizer)["state"]
    for key, param in model.named_parameters():
        assert {*optimizer.state[param]} == state[key].keys()
    given = dist_state.get_optimizer_state_dict(model, optimizer, options=options)
    other, back = made()
    dist_state.set_optimizer_state_dict(other, back, given, options=options)
    assert equal(back.state_dict()["state"], optimizer.state_dict()["state"])
    infinity.close(optimizer)
    infinity.close(back)


ON_RANKS = """
import json, sys
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dist_state
import infinity
from infinity.core.errors import DivergenceError
from tests.small_net import build, train
from tests.test_state_dicts import OPTIONS, equal, named

config = infinity.Config(**json.loads(sys.argv[1]))
model, optimizer = infinity.wrap(*build(), config)
train(model, optimizer, 2)
weights = model.state_dict()
states = dist_state.get_optimizer_state_dict(model, optimizer)
before, of_names = optimizer.state_dict()["state"], named(model, optimizer)
for given in OPTIONS:
    chosen = dist_state.StateDictOptions(**given)
    found = dist_state.get_optimizer_state_dict(model, optimizer, options=chosen)
    if dist.get_rank() and chosen.cpu_offload:
        assert found == {}, found.keys()  # what torch leaves on the first rank alone
    elif not chosen.flatten_optimizer_state_dict:
        assert all(equal(found["state"][name], values) for name, values in of_names.items())
assert optimizer.steps == 2 and equal(optimizer.state_dict()["state"], before)
wanted = train(model, optimizer, 1)
infinity.close(optimizer)

first = dist.get_rank() == 0
options = dist_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
model, optimizer = infinity.wrap(*build(seed=3), config)
fresh, fresh_states = model.state_dict(), optimizer.state_dict()
given = {"model_state_dict": weights if first else {}, "optim_state_dict": states if first else {}}
try:
    dist_state.set_state_dict(model, optimizer, **given, options=options)
except DivergenceError as error:
    assert error.found == "rank 0: one; rank 1: none", error
    assert "call set_model_state_dict, and then set_optimizer_state_dict" in error.cure
else:
    raise AssertionError("loaded")
assert equal(model.state_dict(), fresh) and equal(optimizer.state_dict(), fresh_states)

dist_state.set_model_state_dict(model, given["model_state_dict"], options=options)  # the cure
dist_state.set_optimizer_state_dict(model, optimizer, given["optim_state_dict"], options=options)
assert equal(model.state_dict(), weights) and equal(optimizer.state_dict()["state"], before)
assert train(model, optimizer, 1) == wanted

given = {"model_state_dict": weights, "optim_state_dict": states}  # on all ranks, as `expected` says
dist_state.set_state_dict(model, optimizer, **given, options=options)
assert train(model, optimizer, 1) == wanted
infinity.close(optimizer)
"""


@pytest.mark.integration
def test_torchs_distributed_state_dicts_on_ranks(tmp_path: Path) -> None:
    """A model that only some ranks would load is refused on all."""
    settings = {"device": "cpu", "nvme": str(tmp_path), "host_memory": "64MiB", **ON_NVME, "zero_stage": 3}
    all_well(run_ranks(2, ON_RANKS, json.dumps(settings), seconds=120, imports=[dist_state.__name__]))
