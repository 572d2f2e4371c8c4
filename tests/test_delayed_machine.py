"""Delayed updates against a plain model of θ_t and θ_{t−1}, whatever the user does in whatever order.

Two placements and the plain model go through the same actions; every value that can be seen is compared
bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import engine_of

from .offloaded import ON_NVME, config_for
from .reference import adamw_reference

WIDTH = 8
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {**ON_NVME, "device_memory": "900KiB", "update_depth": 1, "read_ahead_memory": 0},
    {
        "parameters": {"device": 0.6, "host": 0.4},
        "optimizer_state": {"device": 0.2, "host": 0.3, "nvme": 0.5},
        "gradients": {"host": 0.5, "nvme": 0.5},
    },
)
#: Which layers a forward uses, and how it recomputes them.
ROUTES = ("0123", "02", "3131", "r0r3", "n1n0n3", "r1")


class Net(nn.Module):
    """A root with a parameter of its own, layers that may stay unused or be used twice, a tied weight, a
    frozen one, and one layer of two chunks. `x` (batch, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 8200)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, route: str, fail: str = "") -> torch.Tensor:
        x, kind = x * self.scale, ""
        for letter in route:
            if not letter.isdigit():
                kind = letter
                continue
            layer = self.layers[int(letter)]
            x = checkpoint(layer, x, use_reentrant=kind == "r") if kind else layer(x)
            x = x.tanh()
        if fail == "backward" and x.requires_grad:
            x.register_hook(_raise)
        if fail == "forward":
            raise ValueError("mine")
        if fail == "interrupt":
            raise KeyboardInterrupt
        return self.norm(x) * self.wide(x).mean(-1, keepdim=True)


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("mine")


def loss_of(net: nn.Module, seed: int, route: str, fail: str = "") -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return net(x, route, fail).square().sum()  # type: ignore[no-any-return]


class Saved(NamedTuple):
    """What the plain model was; and what each engine gave for it."""

    values: list[torch.Tensor]
    front: list[torch.Tensor]
    moments: list[tuple[torch.Tensor, torch.Tensor]]
    updates: list[int]
    dicts: list[tuple[dict[str, Any], dict[str, Any]]]


class Plain:
    """θ_t = Adam(θ_{t−1}, ∇L_t(θ_{t−2})), in the open."""

    def __init__(self, net: nn.Module, warmup: int) -> None:
        self.net = net
        self.params = list(net.parameters())
        self.newest = [p.detach().clone() for p in self.params]
        self.front = [p.detach().clone() for p in self.params]
        self.moments = [(torch.zeros(p.numel()), torch.zeros(p.numel())) for p in self.params]
        self.updates = [0] * len(self.params)
        self.grads: list[torch.Tensor | None] = [None] * len(self.params)
        self.steps = 0
        self.warmup = warmup

    def showing(self, values: list[torch.Tensor], *, training: bool) -> nn.Module:
        net = copy.deepcopy(self.net).train(training)
        for param, value in zip(net.parameters(), values, strict=True):
            param.data = value.clone()
        return net

    def backward(self, net: nn.Module, loss: torch.Tensor) -> None:
        for param, grad in zip(net.parameters(), self.grads, strict=True):
            param.grad = grad
        with contextlib.suppress(ValueError):
            loss.backward()
        self.grads = [p.grad for p in net.parameters()]

    def step(self, lr: float) -> None:
        before = [n.clone() for n in self.newest]
        for i, grad in enumerate(self.grads):
            if grad is not None:
                self.updates[i] += 1
                options = {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
                values = self.newest[i].view(-1)
                adamw_reference(values, *self.moments[i], grad.reshape(-1), step=self.updates[i], **options)
        self.front = before if self.steps >= self.warmup else [n.clone() for n in self.newest]
        self.steps += 1

    def flush(self) -> None:
        self.front = [n.clone() for n in self.newest]


class Graph(NamedTuple):
    net: nn.Module
    wanted: torch.Tensor
    losses: list[torch.Tensor]


seeds, routes = st.integers(0, 5), st.sampled_from(ROUTES)


class Delayed(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.pairs: list[tuple[Any, Any]] = []
        self.graph: Graph | None = None
        self.saved: Saved | None = None
        self.patch = pytest.MonkeyPatch()

    @initialize(warmup=st.integers(0, 2), delays=st.booleans())
    def wrap(self, warmup: int, delays: bool) -> None:
        torch.manual_seed(0)
        net = Net()
        if delays:
            self.patch.setenv("INFINITY_DELAY_SEED", "0")
        for number, placement in enumerate(PLACEMENTS):
            folder = self.folder / str(number)
            folder.mkdir()
            config = config_for(folder, **placement, update="delayed", delay_warmup_steps=warmup)
            mine = copy.deepcopy(net)
            params = [p for p in mine.parameters() if p.requires_grad]
            self.pairs.append(infinity.wrap(mine, torch.optim.AdamW(params, lr=1.0), config))
        self.plain = Plain(net, warmup)

    def teardown(self) -> None:
        self.graph = None
        for model, adam in self.pairs:
            infinity.close(adam)
            for param, wanted in zip(model.parameters(), self.plain.newest, strict=True):
                if engine_of(model).units[engine_of(model).params[param].unit].on_device:
                    assert torch.equal(param, wanted)
        self.patch.undo()
        shutil.rmtree(self.folder)

    # -- training ---------------------------------------------------------------------------

    @precondition(lambda self: self.graph is None)
    @rule(seed=seeds, route=routes, training=st.sampled_from([True, True, False]), fail=st.booleans())
    def forward(self, seed: int, route: str, training: bool, fail: bool) -> None:
        """A forward with a graph, of which the backward may fail halfway."""
        net = self.plain.showing(self.plain.front if training else self.plain.newest, training=training)
        how = "backward" if fail and seed == 0 else ""
        wanted, losses = loss_of(net, seed, route, how), []
        for model, _ in self.pairs:
            loss = loss_of(model.train(training), seed, route, how)
            assert torch.equal(loss, wanted)
            losses.append(loss)
        self.graph = Graph(net, wanted, losses)

    @precondition(lambda self: self.graph is not None)
    @rule()
    def backward(self) -> None:
        assert self.graph is not None
        graph, self.graph = self.graph, None
        for loss in graph.losses:
            with contextlib.suppress(ValueError):
                loss.backward()
        self.plain.backward(graph.net, graph.wanted)

    @rule(tenths=st.integers(0, 9))
    def step(self, tenths: int) -> None:
        self.graph = None
        lr = 1e-3 * (1 + tenths)
        for _, adam in self.pairs:
            adam.param_groups[0]["lr"] = lr
            adam.step()
            adam.param_groups[0]["lr"] = 17.0
        self.plain.step(lr)

    @rule(seed=seeds, route=routes)
    def whole_step(self, seed: int, route: str) -> None:
        """What users mostly do."""
        self.zero_grad("none")
        self.graph = None
        self.forward(seed, route, True, False)
        self.backward()
        self.step(seed)

    @rule(how=st.sampled_from(["none", "zero", "model", "one"]))
    def zero_grad(self, how: str) -> None:
        for model, adam in self.pairs:
            if how == "model":
                model.zero_grad()
            elif how == "one":
                model.wide.bias.grad = None
            else:
                adam.zero_grad(set_to_none=how == "none")
        names = [n for n, _ in self.plain.net.named_parameters()]
        for i, grad in enumerate(self.plain.grads):
            if how in ("none", "model") or (how == "one" and names[i] == "wide.bias"):
                self.plain.grads[i] = None
            elif how == "zero" and grad is not None:
                self.plain.grads[i] = torch.zeros_like(grad)

    @precondition(lambda self: self.graph is None)
    @rule(on=st.booleans())
    def freeze(self, on: bool) -> None:
        for net in (self.plain.net, *(m for m, _ in self.pairs)):
            net.layers[1].weight.requires_grad_(not on)  # type: ignore[union-attr,index,operator]

    # -- what changes nothing ---------------------------------------------------------------

    @rule(seed=seeds, route=routes)
    def evaluate(self, seed: int, route: str) -> None:
        wanted = loss_of(self.plain.showing(self.plain.newest, training=False), seed, route)
        for model, _ in self.pairs:
            with torch.no_grad():
                assert torch.equal(loss_of(model.eval(), seed, route), wanted)

    @rule(seed=seeds, route=routes)
    def forward_without_a_graph(self, seed: int, route: str) -> None:
        wanted = loss_of(self.plain.showing(self.plain.front, training=True), seed, route)
        for model, _ in self.pairs:
            with torch.no_grad():
                assert torch.equal(loss_of(model.train(), seed, route), wanted)

    @rule(seed=seeds, training=st.booleans())
    def call_a_part(self, seed: int, training: bool) -> None:
        plain = self.plain
        wanted: Any = plain.showing(plain.front if training else plain.newest, training=training)
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        for model, _ in self.pairs:
            model.layers[0].train(training)
            with torch.no_grad():
                assert torch.equal(model.layers[0](x), wanted.layers[0](x))

    @rule(training=st.booleans(), fail=st.sampled_from(["forward", "interrupt"]))
    def forward_that_fails(self, training: bool, fail: str) -> None:
        for model, _ in self.pairs:
            with pytest.raises(BaseException) as caught:
                loss_of(model.train(training), 0, "01", fail)
            assert isinstance(caught.value, (ValueError, KeyboardInterrupt))

    @rule()
    def look_at_the_state_dict(self) -> None:
        for model, _ in self.pairs:
            for found, wanted in zip(_values_of(model), self.plain.newest, strict=True):
                assert torch.equal(found, wanted)

    @rule(inside=st.booleans(), fail=st.booleans())
    def look_inside_gathered(self, inside: bool, fail: bool) -> None:
        for model, _ in self.pairs:
            with contextlib.suppress(ValueError), infinity.gathered(model):
                if inside:
                    with infinity.gathered(model.layers[2]):
                        pass
                for param, wanted in zip(model.parameters(), self.plain.newest, strict=True):
                    assert torch.equal(param, wanted)
                if fail:
                    raise ValueError

    @rule()
    def look_at_the_optimizer(self) -> None:
        for model, adam in self.pairs:
            states = adam.state_dict()["state"]
            numbers = iter(range(len(states) + 99))
            for param, plain, (first, second), updates in zip(
                model.parameters(), self.plain.params, self.plain.moments, self.plain.updates, strict=True
            ):
                if param is model.norm.bias:
                    continue
                state = states.get(next(numbers))
                if state is None:  # else it has the two versions of what shares a chunk with others
                    assert not updates
                    continue
                assert int(state["step"]) == updates
                assert torch.equal(state["exp_avg"], first.view(plain.shape))
                assert torch.equal(state["exp_avg_sq"], second.view(plain.shape))

    @rule()
    def look_at_gradients(self) -> None:
        for model, _ in self.pairs:
            for param, wanted in zip(model.parameters(), self.plain.grads, strict=True):
                found = infinity.gradient(param)
                assert (found is None) == (wanted is None)
                assert found is None or wanted is None or torch.equal(found, wanted)

    @rule()
    def let_the_update_finish(self) -> None:
        for model, _ in self.pairs:
            engine_of(model).updater.wait()

    # -- what changes the model -------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.graph = None
        for _, adam in self.pairs:
            infinity.flush(adam)
        self.plain.flush()

    @rule(
        name=st.sampled_from(["scale", "layers.3.weight", "wide.weight", "norm.bias"]), nested=st.booleans()
    )
    def edit(self, name: str, nested: bool) -> None:
        self.graph = None
        for model, _ in self.pairs:
            param = model.get_parameter(name)
            outer = infinity.gathered(model) if nested else contextlib.nullcontext()
            with outer, infinity.gathered(param, write=True), torch.no_grad():
                param.add_(0.125)
        index = next(i for i, p in enumerate(self.plain.params) if p is self.plain.net.get_parameter(name))
        self.plain.newest[index].add_(0.125)
        self.plain.flush()

    @rule()
    def save(self) -> None:
        plain, dicts = self.plain, []
        for model, adam in self.pairs:
            weights = {n: v.clone() for n, v in model.state_dict().items()}
            dicts.append((weights, adam.state_dict()))
        moments = [(a.clone(), b.clone()) for a, b in plain.moments]
        values = [[v.clone() for v in of] for of in (plain.newest, plain.front)]
        self.saved = Saved(*values, moments, list(plain.updates), dicts)

    @precondition(lambda self: self.saved is not None)
    @rule(model_too=st.booleans(), optimizer_too=st.booleans())
    def load(self, model_too: bool, optimizer_too: bool) -> None:
        saved, plain = self.saved, self.plain
        assert saved is not None
        self.graph = None
        for (model, adam), (weights, states) in zip(self.pairs, saved.dicts, strict=True):
            if model_too:
                model.load_state_dict(weights)
            if optimizer_too:
                adam.load_state_dict(states)
        if model_too:
            plain.newest = [v.clone() for v in saved.values]
        if optimizer_too:
            plain.moments = [(a.clone(), b.clone()) for a, b in saved.moments]
            plain.updates = list(saved.updates)
        if model_too or optimizer_too:
            plain.flush()
        trained = [i for i, p in enumerate(plain.params) if p is not plain.net.norm.bias]
        for number, values in saved.dicts[0][1]["state"].items() if optimizer_too else ():
            if "front" in values:  # and with it the newest values
                i = trained[number]
                plain.newest[i], plain.front[i] = saved.values[i].clone(), saved.front[i].clone()

    @invariant()
    def nothing_is_held(self) -> None:
        for model, _ in self.pairs:
            assert not any(u.keepers for u in engine_of(model).units)


def _values_of(model: nn.Module) -> Iterator[torch.Tensor]:
    values = model.state_dict()
    for name, _ in model.named_parameters():
        yield values[name]


@pytest.mark.first
@pytest.mark.parametrize("number", range(3))
def test_whatever_the_user_does_in_whatever_order(number: int) -> None:
    run_state_machine_as_test(
        hypothesis.seed(number)(Delayed),
        settings=settings(
            max_examples=6,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
