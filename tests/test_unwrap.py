"""The way back to a plain model: `unwrap`, and what works after `close`."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.api import closing
from infinity.core.errors import BudgetError, ClosedError, ParameterError, WrapError

from .offloaded import config_for, hooks_on_saved_tensors, wrap_adamw
from .small_models import CutModel, HeadModel, built, tokens, train, trained, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("dtype", "update", "parameters"),
    [("bf16", "delayed", "device"), ("fp32", "sync", "host"), ("bf16", "overlap", "nvme")],
)
def test_unwrap_gives_a_plain_model_back(dtype: str, update: str, parameters: str, tmp_path: Path) -> None:
    """The same objects, with the masters' values; and it may be wrapped again, and goes on as if it had
    never been unwrapped."""
    settings = {"parameters": parameters, "dtype": dtype, "update": update, "delay_warmup_steps": 1}
    make = CutModel
    model, optimizer = wrapped(tmp_path, make, **settings)
    params, threads = list(model.parameters()), threading.active_count()
    train(model, optimizer)
    model(tokens(5)).backward()
    state = optimizer.state_dict()
    masters = (
        [state["state"][i].get("master") for i in range(len(params))] if dtype == "bf16" else values(model)
    )
    assert infinity.unwrap(model) is model
    assert threading.active_count() < threads
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    for p, wanted in zip(params, masters, strict=True):
        assert (type(p), p.is_leaf, p.requires_grad, p.grad) == (nn.Parameter, True, True, None)
        assert p.dtype is torch.float32
        assert torch.equal(p, wanted)
    for thing in (optimizer.step, lambda: optimizer.state_dict()):
        with pytest.raises(ClosedError, match="wrap the model again"):
            thing()
    with pytest.raises(WrapError):
        infinity.metrics(optimizer)
    plain = copy.deepcopy(model)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-2))

    model, optimizer = wrap_adamw(model, config_for(tmp_path, **settings), lr=1e-2, eps=1e-2)
    optimizer.load_state_dict(state)
    losses = train(model, optimizer)
    found = values(model)
    infinity.unwrap(model)
    model, optimizer = wrapped(tmp_path, make, **settings)
    train(model, optimizer)  # with delayed updates the state dict has the older values, too
    assert_close([*losses, *found], [*train(model, optimizer), *values(model)])
    infinity.close(model)


def test_the_model_or_its_optimizer_is_what_every_call_takes(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, CutModel)
    train(model, optimizer)
    plain = CutModel()
    for number, thing in enumerate((model, optimizer)):
        saved = infinity.save(thing, tmp_path / f"saved {number}")
        infinity.load(thing, saved)
        infinity.export(thing, tmp_path / f"exported {number}")
        infinity.copy_to(thing, plain)
        infinity.flush(thing)
        assert_close(list(plain.parameters()), values(model))
        with infinity.trace(thing, tmp_path / "trace.json"):
            train(model, optimizer)
        assert infinity.metrics(thing)["steps"] == optimizer.steps
    assert infinity.unwrap(optimizer) is model
    infinity.close(optimizer)
    infinity.close(model)


def test_unwrap_inside_gathered_is_refused_and_a_graph_from_before_fails(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path)
    with infinity.gathered(model.head), pytest.raises(ParameterError, match="leave `with"):
        infinity.unwrap(model)
    loss = model(tokens(0))
    infinity.unwrap(model)
    with pytest.raises(ClosedError, match=r"use it as a plain model"):
        loss.backward()
    model(tokens(0)).backward()  # the cure


def test_after_close_the_cures_work(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    train(model, optimizer)
    saved, found = model.state_dict(), values(model)
    infinity.close(model)
    with pytest.raises(ClosedError, match="build the model again, load a saved state"):
        model(tokens(0))
    with pytest.raises(WrapError, match=r"infinity.unwrap\(model\)"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    with pytest.raises(ClosedError, match="build the model again and load"):
        infinity.unwrap(model)
    model, optimizer = built(HeadModel)
    model.load_state_dict(saved)
    model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path))
    assert_close(values(model), found)
    train(model, optimizer)
    infinity.close(model)


def test_what_is_on_the_device_is_still_there_after_close(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, parameters="device", update="delayed", delay_warmup_steps=0)
    train(model, optimizer)
    found = values(model)
    infinity.close(model)
    infinity.unwrap(model)
    assert_close([p.detach() for p in model.parameters()], found)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    train(model, optimizer)
    infinity.close(model)


def test_unwrap_where_there_is_no_room_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("infinity.api.unwrap.available_host_memory", lambda: 1000)
        with pytest.raises(BudgetError, match="do not fit the free host memory") as caught:
            infinity.unwrap(model)
    assert "infinity.export(model, path)" in str(caught.value.cure)
    assert_close([*train(model, optimizer), *values(model)], [*train(*built(HeadModel)), *trained()])
    infinity.close(model)


class Interrupted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("how", "activations"), [("close", "device"), ("unwrap", "host"), ("dropped", "device")]
)
def test_a_forward_that_was_interrupted_leaves_no_hooks_behind(
    how: str, activations: str, tmp_path: Path
) -> None:
    """The hooks on saved tensors of an engine that is gone are no other model's."""
    net = nn.Sequential(nn.Linear(8, 8), Interrupted(8, 8))
    config = config_for(tmp_path, activations=activations, activation_memory="1MiB")
    model, adam = wrap_adamw(net, config)
    x = torch.ones(2, 8)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            model(x)
    assert hooks_on_saved_tensors()
    if how == "close":
        infinity.close(adam)
    elif how == "unwrap":
        infinity.unwrap(model)
    del model, adam, net
    if how == "dropped":
        gc.collect()
        closing.wait_for_dropped()
    else:
        assert not hooks_on_saved_tensors()
    with torch.autocast("cpu", torch.bfloat16):
        nn.Linear(8, 8)(x).sum().backward()
    assert not hooks_on_saved_tensors()
