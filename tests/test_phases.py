"""The four seams of a training loop: when they are called, in which order, and the state in between."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.autograd.phases import TrainingState
from infinity.params.unit import ParamUnit

from .offloaded import ON_HOST, config_for, wrap_adamw

WIDTH = 16
LAYERS = 3


class Net(nn.Module):
    """Layers, each a unit. `recompute`: how, None: not at all; `seen`: called before each layer."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.recompute = recompute
        self.seen: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute is None:
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.recompute)  # type: ignore[no-untyped-call]
        return x

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen()
        return torch.tanh(layer(x))


class Log:
    """What the seams of an engine were called for."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        phases = engine.phases
        for name in ("begin_forward", "end_unit_backward", "end_backward", "step"):
            monkeypatch.setattr(phases, name, self._noting(name, getattr(phases, name)))

    def _noting(self, name: str, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            units = [a.index for a in args if isinstance(a, ParamUnit)]
            self.calls.append((name, *units) if units else name)
            return inner(*args, **kwargs)

        return call

    def take(self) -> list[Any]:
        """Return the calls so far, without those that tell of one unit again, and forget them."""
        calls, self.calls = self.calls, []
        return list(dict.fromkeys(calls)) if len(calls) < 50 else calls


def made(tmp_path: Path, net: Net, **settings: Any) -> tuple[Any, Any, Engine]:
    torch.manual_seed(0)
    model, optimizer = wrap_adamw(net, config_for(tmp_path, units=["Linear"], **ON_HOST, **settings))
    return model, optimizer, engine_of(model)


def backwards(engine: Engine) -> list[Any]:
    """The ends of the units' backwards, in the order of a backward."""
    named = [u.index for u in engine.units if u.layout.name.startswith("layers")]
    return [("end_unit_backward", index) for index in reversed(named)]


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_a_step_calls_each_seam_in_the_order_of_the_program(
    recompute: bool | None, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = made(tmp_path, Net(recompute), update=update)
    log = Log(engine, monkeypatch)
    for _ in range(3):
        model(torch.randn(2, WIDTH, requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert log.take() == ["begin_forward", *backwards(engine), "end_backward", "step"]
    infinity.close(model)


@pytest.mark.parametrize("recompute", [None, False, True])
def test_the_state_is_that_of_the_program(recompute: bool | None, tmp_path: Path) -> None:
    model, optimizer, engine = made(tmp_path, Net(recompute))
    phases, seen = engine.phases, []
    model.seen = lambda: seen.append(phases.state)
    assert phases.state is TrainingState.IDLE
    out = model(torch.randn(2, WIDTH, requires_grad=True))
    assert seen == [TrainingState.FORWARD] * LAYERS
    assert phases.state is TrainingState.IDLE
    seen.clear()
    out.register_hook(lambda grad: seen.append(phases.state))
    out.square().mean().backward()
    wanted = [TrainingState.BACKWARD]
    if recompute is not None:
        # The block's own code runs before its scope's forward begins.
        assert seen[1:] == [TrainingState.BACKWARD] * LAYERS
        seen = seen[:1]
    assert seen == wanted
    assert phases.state is TrainingState.IDLE
    infinity.close(optimizer)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_scope_recomputes(recompute: bool, tmp_path: Path) -> None:
    model, optimizer, engine = made(tmp_path, Net(recompute))
    seen: list[TrainingState] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(engine.phases.state), prepend=True)
    loss = model(torch.randn(2, WIDTH, requires_grad=True)).square().mean()
    assert seen == [TrainingState.FORWARD] * LAYERS
    seen.clear()
    loss.backward()
    assert seen == [TrainingState.RECOMPUTING] * LAYERS
    infinity.close(optimizer)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_raises_leaves_an_idle_engine_and_the_next_step_is_as_if_it_had_not_been(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = made(tmp_path, Net())
    log = Log(engine, monkeypatch)

    def fails(*_: Any) -> None:
        raise RuntimeError("of the user")

    if where == "forward":
        handle = model.layers[1].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="of the user"):
            model(torch.randn(2, WIDTH))
        handle.remove()
    else:
        out = model(torch.randn(2, WIDTH))
        out.register_hook(fails)
        with pytest.raises(RuntimeError, match="of the user"):
            out.sum().backward()
    assert engine.phases.state is TrainingState.IDLE
    log.take()
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    optimizer.step()
    assert log.take() == ["begin_forward", *backwards(engine), "end_backward", "step"]
    infinity.close(model)


def test_a_backward_inside_of_a_forward_ends_and_the_forward_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Inner(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            self.seen()
            return y + grad

    model, optimizer, engine = made(tmp_path, Inner())
    log, seen = Log(engine, monkeypatch), []
    model.seen = lambda: seen.append(engine.phases.state)
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    assert seen == [TrainingState.FORWARD] * (LAYERS + 1)
    calls = [c if isinstance(c, str) else c[0] for c in log.calls]
    assert [c for c in calls if c != "end_unit_backward"] == ["begin_forward", "end_backward", "end_backward"]
    optimizer.step()
    infinity.close(model)


def test_a_module_that_is_called_alone_begins_a_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = made(tmp_path, Net())
    log = Log(engine, monkeypatch)
    model.layers[0](torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    assert log.take() == ["begin_forward", backwards(engine)[-1], "end_backward"]
    infinity.close(optimizer)


class _Prompt(nn.Module):
    """Learned queries: a forward that returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 16))

    def forward(self) -> torch.Tensor:
        return self.w


class _WithPrompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = _Prompt()
        self.layer = nn.Linear(16, 16)
        self.also = nn.Identity()  # returns what a caller gave it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.also(x) + self.prompt()).tanh() * self.prompt()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_leaf_that_a_scope_returns_gets_no_hook_per_forward(tier: str) -> None:
    torch.manual_seed(0)
    net = _WithPrompt()
    plain = copy.deepcopy(net)
    config = infinity.Config(
        device="cpu",
        dtype="fp32",
        parameters=tier,
        optimizer_state="host",
        units=["_Prompt", "Linear"],
        device_memory="8MiB",
        host_memory="64MiB",
    )
    model, adam = infinity.wrap(net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False), config)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    x = torch.randn(4, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    hooks = []
    try:
        for _ in range(4):
            for network, data, optimizer in ((model, x, adam), (plain, y, theirs)):
                for _ in range(2):
                    network(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            hooks.append(sum(len(t._backward_hooks or ()) for t in (x, *model.parameters())))
        torch.testing.assert_close(x.grad, y.grad)
        assert hooks == [hooks[0]] * 4
        assert len(x._backward_hooks or ()) == 0
        state = model.state_dict()
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(state[name], wanted)
    finally:
        infinity.close(adam)
