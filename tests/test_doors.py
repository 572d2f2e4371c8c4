"""Ways in to a unit's memory that are not a forward and the backward of its output: each gives torch's
result, at the least budget that is accepted and with parameters on the device.

A *door* is a program over a model and an optimizer that returns tensors; it is written once and run by
plain torch and by the engine. Each was once silently wrong, a crash or a hang.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.core.errors import BudgetError

from .offloaded import RESIDENT, config_for, wrap_adamw

WIDTH, LAYERS = 64, 5
Tensors = list[torch.Tensor]


class Block(nn.Module):
    """x (batch, width) → what `out` makes of the result and an auxiliary loss."""

    def __init__(self, out: Callable[[torch.Tensor, torch.Tensor], Any], form: str | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.out, self.form = out, form

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> Any:
        if self.form is None:
            y = x + self.mlp(x)
        else:
            y = x + checkpoint(self.mlp, x, use_reentrant=self.form == "reentrant")
        return self.out(y, self.router(y).square().mean())


class Net(nn.Module):
    """x (batch, width) → (batch, width); `take` gets x from what a block returns."""

    def __init__(self, out: Any = lambda y, aux: y, take: Any = lambda r: r, form: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(out, form) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.take(block(x))
        return self.head(x)


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 + step))


class Api:
    """What a program needs beyond torch: `gathered` and whole gradients."""

    offloaded = False

    def gathered(self, params: Any, *, write: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        return param.grad


class Offloaded(Api):
    offloaded = True

    def gathered(self, params: Any, *, write: bool = False) -> AbstractContextManager[None]:
        return infinity.gathered(params, write=write)

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        return infinity.gradient(param)


Program = Callable[[Any, Any, Api], Tensors]
DOORS: dict[str, tuple[Callable[[], nn.Module], Program]] = {}


def door(make: Callable[[], nn.Module] = Net) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        DOORS[program.__name__] = (make, program)
        return program

    return add


def finish(model: Any, optimizer: Any, api: Api) -> Tensors:
    """A plain step, and what came of everything before."""
    optimizer.zero_grad()
    loss = model(batch(9)).square().mean()
    loss.backward()
    optimizer.step()
    params = []
    for p in model.parameters():
        with api.gathered(p):
            params.append(p.detach().clone())
    return [loss.detach(), *params]


# -- a backward that begins at no output that hooks saw ------------------------------------------


def _box(aux: Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        box: list[torch.Tensor] = []
        model = Net(lambda y, a: aux(box, y, a))
        model.box = box  # type: ignore[assignment]
        return model

    return make


def _append(box: list[torch.Tensor], y: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
    box.append(aux)
    return y


@door(_box(_append))
def side_channel_losses_of_all_blocks(model: Any, optimizer: Any, api: Api) -> Tensors:
    found = []
    for step in range(3):
        model.box.clear()
        loss = model(batch(step)).square().mean()
        (loss + sum(model.box)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *finish(model, optimizer, api)]


@door(_box(_append))
def side_channels_one_after_the_other(model: Any, optimizer: Any, api: Api) -> Tensors:
    model(batch())
    for aux in model.box:
        aux.backward(retain_graph=True)
    optimizer.step()
    return finish(model, optimizer, api)


def _recomputed() -> nn.Module:
    box: list[torch.Tensor] = []
    model = Net(lambda y, a: _append(box, y, a), form="non-reentrant")
    model.box = box  # type: ignore[assignment]
    return model


@door(_recomputed)
def a_side_channel_behind_recomputation(model: Any, optimizer: Any, api: Api) -> Tensors:
    loss = model(batch().requires_grad_()).square().mean()
    model.box[1].backward(retain_graph=True)
    (loss + model.box[3]).backward()
    optimizer.step()
    return finish(model, optimizer, api)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("aux", "y")
    y: torch.Tensor
    aux: torch.Tensor


def _closure(y: torch.Tensor, aux: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    return lambda: (y, aux)


def _odd(out: Callable[[torch.Tensor, torch.Tensor], Any], take: Callable[[Any], Any]) -> Any:
    def make() -> nn.Module:
        box: list[torch.Tensor] = []

        def keep(result: Any) -> torch.Tensor:
            y, aux = take(result)
            box.append(aux)
            return y  # type: ignore[no-any-return]

        model = Net(out, keep)
        model.box = box  # type: ignore[assignment]
        return model

    return make, side_channel_losses_of_all_blocks


DOORS["outputs_in_a_slotted_dataclass"] = _odd(Slotted, lambda r: (r.y, r.aux))
DOORS["outputs_in_a_closure"] = _odd(_closure, lambda r: r())
DOORS["outputs_in_an_iterator"] = _odd(lambda y, aux: iter([y, aux]), tuple)


@door()
def a_gradient_penalty(model: Any, optimizer: Any, api: Api) -> Tensors:
    """Of the third order."""
    x = batch().requires_grad_()
    out = model(x).square().mean()
    (one,) = torch.autograd.grad(out, x, create_graph=True)
    (two,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
    (out + two.square().sum()).backward()
    optimizer.step()
    return [one.detach(), two.detach(), *finish(model, optimizer, api)]


class Force(Net):
    """A model that takes a gradient inside of its forward, as interatomic potentials do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@door(Force)
def a_gradient_inside_a_forward(model: Any, optimizer: Any, api: Api) -> Tensors:
    with torch.no_grad():
        still = model(batch(3))
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [still.detach(), *finish(model, optimizer, api)]


@door()
def a_double_backward_of_one_graph(model: Any, optimizer: Any, api: Api) -> Tensors:
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return finish(model, optimizer, api)


# -- a graph that is made inside `gathered` ------------------------------------------------------


@door()
def a_graph_made_inside_gathered(model: Any, optimizer: Any, api: Api) -> Tensors:
    with api.gathered(model.blocks[0]):
        penalty = sum(p.square().sum() for p in model.blocks[0].parameters())
        product = (model.blocks[0].up.weight @ model.blocks[0].down.weight).square().mean()
    loss = model(batch()).square().mean()
    (loss + 1e-2 * penalty + product).backward()
    optimizer.step()
    return finish(model, optimizer, api)


@door()
def a_loss_over_all_weights(model: Any, optimizer: Any, api: Api) -> Tensors:
    total = torch.zeros(())
    for p in model.parameters():
        with api.gathered(p):
            total = total + p.square().sum()
    (model(batch()).square().mean() + 1e-2 * total).backward()
    optimizer.step()
    return finish(model, optimizer, api)


@door()
def hooks_of_the_users_around_and_inside(model: Any, optimizer: Any, api: Api) -> Tensors:
    seen = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append(t.shape)
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(batch()).square().mean()
    assert seen
    handle = model.blocks[2].up.register_forward_pre_hook(lambda m, a: None)
    up = model.blocks[2].mlp
    model.blocks[2].mlp = lambda x: _inside(up, x, pack)
    other = model(batch(1)).square().mean()
    model(batch(4))  # takes everybody's room
    other.backward()
    loss.backward()
    del model.blocks[2].mlp
    handle.remove()
    optimizer.step()
    return finish(model, optimizer, api)


def _inside(call: Any, x: torch.Tensor, pack: Any) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return call(x)  # type: ignore[no-any-return]


# -- an alias that outlives its unit -------------------------------------------------------------


@door()
def detached_parameters_of_all_units(model: Any, optimizer: Any, api: Api) -> Tensors:
    kept = {}
    for name, p in model.named_parameters():
        with api.gathered(p):
            kept[name] = p.detach().cpu()
    model(batch())
    first = [t.clone() for t in kept.values()]
    model(batch(1)).square().mean().backward()
    optimizer.step()
    after = [t.clone() for t in kept.values()]  # torch's alias shows the new values
    return [*first, *after, *finish(model, optimizer, api), *kept.values()]


@door()
def data_numpy_and_views(model: Any, optimizer: Any, api: Api) -> Tensors:
    with api.gathered(model):
        data = model.blocks[0].up.weight.data
        array = model.blocks[1].up.weight.detach().numpy()
        view = model.blocks[2].up.weight.t()[3:5]
        storage = model.blocks[3].up.bias.untyped_storage()
    found = []
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [data.clone(), torch.from_numpy(array).clone(), view.detach().clone()]
    del storage
    return [*found, *finish(model, optimizer, api)]


# -- edits ---------------------------------------------------------------------------------------


@door()
def edits_that_torch_does_not_count(model: Any, optimizer: Any, api: Api) -> Tensors:
    found = []
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        block = model.blocks[step]
        with api.gathered(block, write=True):
            block.up.weight.data.mul_(0.5)
            block.down.weight.data = block.down.weight.data + 0.125
            block.router.weight.detach().numpy()[:] *= 2
            block.up.bias.data.copy_(torch.ones(2 * WIDTH))
        found.append(model(batch(8)).detach())
        found += [v.clone() for v in model.state_dict().values()]
    return [*found, *finish(model, optimizer, api)]


@door()
def data_of_other_parameters(model: Any, optimizer: Any, api: Api) -> Tensors:
    """`p.data = q.data`: exchanged in a unit and across units, turned, and by blocks that are nested."""
    found = []
    first, second, third, *_ = (block.up.weight for block in model.blocks)
    down = [block.down.weight for block in model.blocks]
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with api.gathered(model, write=True):
                first.data, second.data, third.data = second.data, third.data, first.data
                model.head.weight.data = model.head.weight.data.t()
                third.data = second.data  # as they are at the end of the block
                second.data = second.data.clone()
        elif step == 1:
            with api.gathered(first, write=True), api.gathered([second, *down], write=True):
                first.data, second.data = second.data, first.data
                down[0].data = down[1].data.flip(0)
        found += [v.clone() for v in model.state_dict().values()]
    return [*found, *finish(model, optimizer, api)]


@door()
def a_forward_with_data_given_in_a_block(model: Any, optimizer: Any, api: Api) -> Tensors:
    """Evaluation, and training, with other weights: in the block as far as it is edited, and after it."""
    found = []
    with api.gathered(model):
        average = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with api.gathered(model, write=True):
            kept = [p.data for p in model.parameters()]
            for p, mean in zip(model.parameters(), average, strict=True):
                mean.lerp_(p.data, 0.5)
                p.data = mean
            with torch.no_grad():
                found.append(model(batch(7)))
            model(batch(8)).square().mean().backward()
            gradients = [api.gradient(p) for p in model.parameters()]
            found += [g.clone() for g in gradients if g is not None]
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data = value
            model.head.bias.data = model.head.bias.data + step
        del kept
        found.append(model(batch(9)))
    return [*found, *finish(model, optimizer, api)]


# -- parameters by name, and those of other units -----------------------------------------------


@door(lambda: Net(form="non-reentrant"))
def a_backward_that_names_parameters(model: Any, optimizer: Any, api: Api) -> Tensors:
    named = [model.blocks[1].up.weight, model.blocks[3].down.bias]
    loss = model(batch()).square().mean()
    grads = torch.autograd.grad(
        loss,
        [*named, model.blocks[0].router.weight],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    loss.backward(inputs=named)
    found = [api.gradient(p) for p in model.parameters()]
    assert [g is not None for g in found] == [any(p is q for q in named) for p in model.parameters()]
    optimizer.step()
    return [*grads, *(g.clone() for g in found if g is not None), *finish(model, optimizer, api)]


class Borrowing(Net):
    """Each block's mlp uses the weight of the block before it, with its own bias, in one operator."""

    def __init__(self) -> None:
        super().__init__(form="non-reentrant")
        for i, block in enumerate(self.blocks):
            other = self.blocks[i - 1].up
            block.mlp = lambda x, b=block, o=other: b.down(torch.tanh(F.linear(x, o.weight, b.up.bias)))


@door(Borrowing)
def one_operator_over_two_units(model: Any, optimizer: Any, api: Api) -> Tensors:
    for step in range(2):
        model(batch(step).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer, api)


# -- running them --------------------------------------------------------------------------------


def least(make: Callable[[], nn.Module], config: infinity.Config, setting: str) -> int:
    """The least value of a budget that is accepted, as the refusal says it."""
    model = make()
    try:
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config.replace(**{setting: 4096}))
    except BudgetError as error:
        return int(re.search(r"\((\d+) bytes\)", str(error.expected))[1])  # type: ignore[index]
    raise AssertionError("4 KiB were accepted")


def check(name: str, folder: Path, budget: str, **settings: Any) -> None:
    """Have torch and the engine run a door, and compare what they come to."""
    make, program = DOORS[name]
    options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
    model = make()
    wanted = program(model, torch.optim.AdamW(model.parameters(), **options), Api())
    wanted = [t.detach().clone() for t in wanted]
    config = config_for(folder, **{"device_memory": "64MiB", **settings})
    if budget == "least":
        config = config.replace(device_memory=least(make, config, "device_memory"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*something outside of the engine refers.*", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*the model uses more units at once.*", RuntimeWarning)
        model, optimizer = wrap_adamw(make(), config, **options)
        try:
            found = [t.detach().clone() for t in program(model, optimizer, Offloaded())]
        finally:
            infinity.close(model)
    assert_close(found, wanted)


def assert_close(found: Tensors, wanted: Tensors) -> None:
    assert len(found) == len(wanted)
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        scale = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-6 * max(scale, 1e-3), msg=lambda m, i=index: f"{i}: {m}"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


MODES = itertools.product(["nvme", "host"], ["overlap", "delayed", "sync"])
EACH = [(name, *mode) for name, mode in zip(DOORS, itertools.cycle(MODES))]


@pytest.mark.parametrize(("name", "place", "mode"), EACH)
def test_door(name: str, place: str, mode: str, tmp_path: Path) -> None:
    places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), place)
    check(name, tmp_path, "least", update=mode, **places)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "place", "mode"), EACH)
def test_door_with_parameters_on_the_device(name: str, place: str, mode: str, tmp_path: Path) -> None:
    check(name, tmp_path, "large", update=mode, **{**RESIDENT, "optimizer_state": place})
