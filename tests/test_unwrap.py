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
from infinity.core.errors import ClosedError, ParameterError, WrapError
from infinity.core.sizes import MiB

from .cgroup import run_limited
from .offloaded import config_for, hooks_on_saved_tensors, wrap_adamw
from .quick import covering
from .small_models import CutModel, HeadModel, built, tokens, train, trained, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@covering
@pytest.mark.parametrize("parameters", ["device", "host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
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


def test_unwrap_lets_the_old_optimizer_step_again(tmp_path: Path) -> None:
    model, old = built(HeadModel)
    infinity.unwrap(infinity.wrap(model, old, config_for(tmp_path))[0])
    assert old.state_dict()["state"] == {}
    assert_close(
        [*train(model, old), *(p.detach() for p in model.parameters())],
        [*train(*built(HeadModel)), *trained()],
    )


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


@pytest.mark.parametrize("update", ["overlap", "delayed"])
def test_what_is_on_the_device_is_still_there_after_close(update: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, parameters="device", update=update, delay_warmup_steps=0)
    train(model, optimizer)
    found = values(model)
    infinity.close(model)
    infinity.unwrap(model)
    assert_close([p.detach() for p in model.parameters()], found)
    model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    train(model, optimizer)
    infinity.close(model)


_TOO_LARGE = """
import sys, safetensors, torch, infinity
from torch import nn
config = infinity.Config(nvme=sys.argv[1], device="cpu", dtype="fp32", device_memory="64MiB",
                         host_memory="120MiB", parameters="nvme", optimizer_state="nvme", gradients="nvme")
with infinity.init(config):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
model, optimizer = infinity.wrap(model, torch.optim.AdamW(model.parameters()), config)
try:
    infinity.unwrap(model)
except infinity.InfinityError as error:
    print(type(error).__name__, error)
with infinity.gathered(model[3].weight):
    first = model[3].weight.detach().clone()
infinity.export(model, sys.argv[1] + "/exported")  # the cure
with safetensors.safe_open(sys.argv[1] + "/exported/model.safetensors", "pt") as file:
    assert torch.equal(file.get_tensor("3.weight"), first)
model(torch.randn(2, 2048)).sum().backward()
optimizer.step()
infinity.close(model)
print("done")
"""


@pytest.mark.nightly
def test_unwrap_where_there_is_no_room_changes_nothing(tmp_path: Path) -> None:
    result = run_limited(_TOO_LARGE, str(tmp_path), limit=440 * MiB, timeout=120)
    assert result.rc == 0, result.stderr
    assert "BudgetError the parameters do not fit the free host memory" in result.stdout
    assert "infinity.export(model, path)" in result.stdout
    assert "done" in result.stdout


class Interrupted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise KeyboardInterrupt


@pytest.mark.first
@pytest.mark.parametrize("how", ["close", "unwrap", "closed elsewhere", "dropped"])
@pytest.mark.parametrize("activations", ["device", "host"])
def test_a_forward_that_was_interrupted_leaves_no_hooks_behind(
    how: str, activations: str, tmp_path: Path
) -> None:
    """The hooks on saved tensors of an engine that is gone are no other model's, be it under autocast beside
    a wrapped one."""
    for name in ("other", "one"):
        (tmp_path / name).mkdir()
    other, _ = wrapped(tmp_path / "other", CutModel)
    net = nn.Sequential(nn.Linear(8, 8), Interrupted(8, 8))
    settings = {"activations": activations, "activation_memory": "1MiB"} if activations == "host" else {}
    config = config_for(tmp_path / "one", **settings)
    model, adam = infinity.wrap(net, torch.optim.AdamW(net.parameters()), config)
    x = torch.ones(2, 8)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            model(x)
    assert hooks_on_saved_tensors()
    if how == "close":
        infinity.close(adam)
    elif how == "unwrap":
        infinity.unwrap(model)
    elif how == "closed elsewhere":
        closes = threading.Thread(target=infinity.close, args=[adam])
        closes.start()
        closes.join(60)
        assert not closes.is_alive()
    del model, adam, net
    if how == "dropped":
        gc.collect()
        closing.wait_for_dropped()
    if how in ("close", "unwrap"):
        assert not hooks_on_saved_tensors()
    plain = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain(x).sum().backward()
    assert not hooks_on_saved_tensors()
    infinity.close(other)
