"""Who holds a unit's memory: it stays as long as that lasts, is counted, and plain training holds none."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import (
    ClosedError,
    ParameterChangedError,
    ParameterError,
    PrecisionError,
    WrapError,
)
from infinity.params.unit import UnitState

from .models import case
from .offloaded import RESIDENT, config_for
from .test_doors import Net, batch, least


def wrapped(folder: Path, model: nn.Module | None = None, **settings: Any) -> tuple[Any, Any]:
    model = model or Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
    return infinity.wrap(model, optimizer, config_for(folder, **settings))


@pytest.mark.first
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("gpt", "sync"), ("moe", "delayed"), ("cnn", "overlap"), ("lstm", "delayed")],
)
def test_plain_training_holds_nothing(kind: str, mode: str, tmp_path: Path) -> None:
    example = case(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model, optimizer = wrapped(
            tmp_path, example.model, update=mode, delay_warmup_steps=1, device_memory="900KiB"
        )
        for step in range(4):
            example.loss(model, example.batches[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                example.loss(model.eval(), example.batches[step])
            model.train()
            metrics = infinity.metrics(optimizer)
            assert metrics["memory/held_units"] == metrics["memory/held(GiB)"] == 0
        engine = engine_of(model)
        assert (
            engine.residency.cache.peak <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
        )
        infinity.close(model)


def test_a_held_unit_is_counted_warned_of_once_and_goes_when_it_is_let_go(tmp_path: Path) -> None:
    make = Net
    budget = least(make, config_for(tmp_path), "device_memory")
    model, optimizer = wrapped(tmp_path, make(), device_memory=budget)
    with infinity.gathered(model.blocks[0]):
        alias = model.blocks[0].up.weight.detach()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len([w for w in record if "stay on the device" in str(w.message)]) == 1
    nbytes = engine_of(model).units[0].layout.gathered_nbytes
    metrics = infinity.metrics(optimizer)
    assert metrics["memory/held_units"] == 1
    assert metrics["memory/held(GiB)"] == nbytes / 2**30
    with infinity.gathered(model.blocks[0]):
        assert torch.equal(alias, model.blocks[0].up.weight)
    del alias
    gc.collect()
    assert infinity.metrics(optimizer)["memory/held_units"] == 0
    model(batch())
    model(batch())
    engine = engine_of(model)
    assert (
        engine.residency.cache.allocated <= engine.footprint.working_nbytes + engine.footprint.prefetch_nbytes
    )
    infinity.close(model)


def test_a_graph_from_before_a_step_and_an_edited_activation_fail_as_in_torch(tmp_path: Path) -> None:
    class Editing(Net):
        edits = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks[0](x)
            z = y.tanh()
            z.exp().sum()
            w = self.blocks[1](z)
            if self.edits:
                z.mul_(2)
            return w  # type: ignore[no-any-return]

    model, optimizer = wrapped(tmp_path, Editing())
    loss = model(batch()).square().mean()
    model(batch(1)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    model.edits = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch()).sum().backward()
    infinity.close(model)


def test_a_backward_after_close_says_so(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path, device_memory=least(Net, config_for(tmp_path), "device_memory"))
    loss = model(batch()).square().mean()
    infinity.close(model)
    with pytest.raises(ClosedError, match="closed"):
        loss.backward()


@pytest.mark.parametrize("where", ["around a submodule", "inside forward", "around forward"])
def test_autocast_is_refused_wherever_a_unit_begins(where: str, tmp_path: Path) -> None:
    class Casting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model, _ = wrapped(tmp_path, Casting() if where == "inside forward" else Net())
    if where == "around forward":  # as accelerate does
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    call = model
    if where == "around a submodule":
        call = torch.autocast("cpu", dtype=torch.bfloat16)(lambda x: model.blocks[0](x))
    with pytest.raises(PrecisionError, match="autocast"):
        call(batch())
    infinity.close(model)


def test_an_edit_that_torch_counts_is_kept_by_a_block_of_another_parameter(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, Net(), **RESIDENT)
    with torch.no_grad():
        model.head.bias.fill_(3)
    with infinity.gathered(model.head.weight, write=True):
        pass
    model(batch()).square().mean().backward()
    optimizer.step()
    assert float((model.head.bias.detach() - 3).abs().max()) < 0.1
    infinity.close(model)


def test_a_step_inside_of_a_block_goes_on_from_its_edits(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, Net(), **RESIDENT)
    with infinity.gathered(model.head, write=True):
        model.head.bias.data = torch.full_like(model.head.bias, 3)
        model.head.weight.data.fill_(2)
        model(batch()).square().mean().backward()
        optimizer.step()
    for parameter, value in ((model.head.bias, 3), (model.head.weight, 2)):
        assert 0 < float((parameter.detach() - value).abs().max()) < 0.1
    infinity.close(model)


def test_an_edit_through_a_detached_alias_is_found_between_uses(tmp_path: Path) -> None:
    """Torch counts it."""
    model, optimizer = wrapped(tmp_path)
    with infinity.gathered(model.head):
        alias = model.head.bias.detach()
    model(batch()).square().mean().backward()
    alias.add_(1)
    with pytest.raises(ParameterChangedError, match="between its uses"):
        optimizer.step()
    optimizer.step()
    model(batch())
    infinity.close(model)


def test_gradients_from_before_wrap_are_refused(tmp_path: Path) -> None:
    model = Net()
    adam = torch.optim.AdamW(model.parameters())
    model(batch()).mean().backward()
    with pytest.raises(WrapError, match=r"optimizer.zero_grad\(\)"):
        infinity.wrap(model, adam, config_for(tmp_path))
    adam.step()
    adam.zero_grad()
    infinity.close(infinity.wrap(model, adam, config_for(tmp_path))[1])


@pytest.mark.parametrize(("parameters", "frozen"), [("nvme", True), ("host", False), ("device", False)])
def test_a_graph_from_before_wrap_fails_as_after_an_edit(
    parameters: str, frozen: bool, tmp_path: Path
) -> None:
    model = Net()
    model.blocks.requires_grad_(not frozen)
    adam = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    loss = model(batch().requires_grad_()).square().mean()
    infinity.wrap(model, adam, config_for(tmp_path, parameters=parameters))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(batch()).square().mean().backward()
    assert infinity.gradient(model.head.weight) is not None
    infinity.close(model)


def test_data_of_another_shape_is_refused_and_the_rest_is_kept(tmp_path: Path) -> None:
    """And data that is given outside of a block is."""
    model, _ = wrapped(tmp_path)
    block = model.blocks[0]

    def edit(write: bool) -> None:
        with infinity.gathered(block, write=write):
            if write:
                block.up.bias.data.fill_(3)
            block.up.weight.data = torch.zeros(2, 2) if write else torch.zeros(128, 64)

    for write, what in ((True, "do not fit"), (False, "edited")):
        with pytest.raises(ParameterChangedError, match=what):
            edit(write)
        with infinity.gathered(block):
            assert torch.equal(block.up.bias, torch.full_like(block.up.bias, 3))
            assert block.up.weight.shape == (128, 64)
            assert block.up.weight.abs().sum() > 0
    model(batch())
    infinity.close(model)


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room")


def test_a_prefetch_that_finds_no_memory_is_no_error(tmp_path: Path) -> None:
    """And one that is needed makes room and tries again; what counts bytes stays right."""
    model, optimizer = wrapped(tmp_path, update="sync")
    engine = engine_of(model)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.residency.reshard_all()
    for unit in engine.units[2:]:
        unit._memory.fill = _out_of_memory  # type: ignore[method-assign]
    engine.residency.prefetch()
    filled = [u for u in engine.units if u.state is not UnitState.SHARDED]
    assert engine.residency.cache.allocated == sum(u.layout.gathered_nbytes for u in filled)
    assert not any(u.state is not UnitState.SHARDED for u in engine.units[2:])
    with pytest.raises(torch.OutOfMemoryError):
        model(batch())
    assert not any(u.state is not UnitState.SHARDED for u in engine.units[2:])
    for unit in engine.units[2:]:
        del unit._memory.fill
    wanted = model(batch())
    assert torch.equal(model(batch()), wanted)
    infinity.close(model)


@pytest.mark.parametrize(("how", "place"), [("step", "device"), ("edit", "host"), ("step", "nvme")])
def test_hooks_that_keep_copies_see_no_newer_values(how: str, place: str, tmp_path: Path) -> None:
    """In torch the backward takes their copies. Where there are none, it is torch's error."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model, optimizer = wrapped(tmp_path, copy.deepcopy(plain), parameters=place)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-2)
    modified = pytest.raises(RuntimeError, match="modified by an inplace operation")
    for net, steps in ((plain, adam), (model, optimizer)):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            loss = net(torch.ones(2, 8)).square().mean()
            loss.backward(retain_graph=True)
            if how == "step":
                steps.step()
            else:
                editing = contextlib.nullcontext() if net is plain else infinity.gathered(net, write=True)
                with editing, torch.no_grad():
                    net[2].weight.mul_(2)
            steps.zero_grad()
            with modified if net is model and place != "device" else contextlib.nullcontext():
                loss.backward()
    if place == "device":
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(infinity.gradient(p), q.grad)
    infinity.close(model)


def test_mutation_of_saved_tensors_is_not_allowed(tmp_path: Path) -> None:
    model, _ = wrapped(tmp_path)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        with pytest.raises(ParameterError, match="allow_mutation_on_saved_tensors"):
            model(batch())
    model(batch())
    infinity.close(model)
