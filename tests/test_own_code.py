"""Optimizers that run by their own code: the bits of plain torch, and which classes are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import infinity
from infinity.core.errors import OptimizerTypeError, StateDictError
from infinity.optim import own_code

from . import ranks
from .models import case
from .offloaded import ON_HOST, config_for
from .quick import quick
from .test_optimizers import (
    PLACES,
    STEPS,
    State,
    assert_equal,
    assert_near,
    go_on,
    in_torch_and_back,
    loss_of,
    state_of,
    trained,
    wrapped,
)
from .whole import ELEMENTWISE, OPTIMIZERS, OWN, Make

pytestmark = pytest.mark.filterwarnings("ignore:.*runs by its own code:RuntimeWarning")
CHOSEN = quick(OWN, ["centered", "nadam", "adafactor"], ["rmsprop", "asgd", "rprop"])


def plain_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the values and moments of a plain model, and the counters of each parameter."""
    return {
        name: {
            "value": param.detach().clone(),
            **{
                kind: value if isinstance(value, torch.Tensor) else torch.tensor(value)
                for kind, value in optimizer.state[param].items()
                if kind != "step"
            },
        }
        for name, param in model.named_parameters()
    }


def with_counters(found: State, optimizer: Any, model: nn.Module) -> State:
    """Add the counters that the state dict has to the state of a wrapped model."""
    saved = optimizer.state_dict()["state"]
    for index, (name, _) in enumerate(model.named_parameters()):
        found[name] |= {kind: v for kind, v in saved[index].items() if kind not in (*found[name], "step")}
    return found


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "AT_ONCE", 4096)  # so that a segment takes several
    monkeypatch.setattr(own_code, "AT_ONCE_ON_DEVICE", 8192)


@pytest.mark.parametrize("name", CHOSEN)
def test_bits_are_those_of_plain_torch_everywhere(name: str, tmp_path: Path) -> None:
    make = OWN[name]
    model = case("gpt").model
    plain = make(model.parameters())
    go_on(model, plain, 0, STEPS)
    wanted = plain_state(model, plain)
    for place, settings in PLACES.items():
        theirs, optimizer = wrapped(make, tmp_path / place, **settings)
        go_on(theirs, optimizer, 0, STEPS)
        found = with_counters(state_of(theirs), optimizer, theirs)
        if place == "device" and ranks.DEVICE != "cpu":
            assert_near(found, model)  # by operators of the device, whose roots are rounded otherwise
        else:
            assert_equal(found, wanted)
        infinity.close(optimizer)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_pieces_of_a_parameter_get_the_bits_of_the_whole(name: str) -> None:
    optimizer = OWN[name]([nn.Parameter(torch.zeros(2))])
    own_code.Code(optimizer).probe(optimizer)


def test_the_default_dtype_is_that_of_counters_alone(tmp_path: Path) -> None:
    model = case("gpt").model
    plain = OWN["nadam"](model.parameters())
    theirs = case("gpt").model
    torch.set_default_dtype(torch.float64)
    try:
        theirs, optimizer = infinity.wrap(theirs, OWN["nadam"](theirs.parameters()), config_for(tmp_path))
        go_on(model, plain, 0, 3)
        go_on(theirs, optimizer, 0, 3)
        found = with_counters(state_of(theirs), optimizer, theirs)
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = plain_state(model, plain)
    assert_equal(found, wanted)
    assert {kinds["mu_product"].dtype for kinds in (*found.values(), *wanted.values())} == {torch.float64}
    infinity.close(optimizer)


@pytest.mark.parametrize("name", quick(ELEMENTWISE, ["rmsprop"], ["nadam", "asgd"]))
def test_a_delayed_update_has_the_same_bits_on_every_tier(name: str, tmp_path: Path) -> None:
    settings = {"update": "delayed", "delay_warmup_steps": 2}
    wanted = trained(OWN[name], tmp_path / "host", **ON_HOST, **settings)
    for place in ("nvme", "device")[: 2 if ranks.DEVICE == "cpu" else 1]:
        assert_equal(trained(OWN[name], tmp_path / place, **PLACES[place], **settings), wanted)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_state_dict_goes_on_in_torch_and_back(name: str, tmp_path: Path) -> None:
    make = OWN[name]
    model, optimizer, plain, theirs = in_torch_and_back(make, tmp_path)
    assert_equal(with_counters(state_of(model), optimizer, model), plain_state(plain, theirs))
    infinity.close(optimizer)

    model, optimizer = wrapped(make, tmp_path / "c", chunk_elements=65536)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    go_on(plain, theirs, 5, 6)
    go_on(model, optimizer, 5, 6)
    assert_equal(with_counters(state_of(model), optimizer, model), plain_state(plain, theirs))
    infinity.close(optimizer)


@pytest.mark.parametrize("name", CHOSEN)
def test_wrap_takes_over_state_that_there_is(name: str, tmp_path: Path) -> None:
    model = case("gpt").model
    plain = OWN[name](model.parameters())
    go_on(model, plain, 0, 2)
    other, theirs = copy.deepcopy((model, plain))
    model, optimizer = infinity.wrap(model, plain, config_for(tmp_path))
    go_on(model, optimizer, 2, 4)
    go_on(other, theirs, 2, 4)
    assert_equal(with_counters(state_of(model), optimizer, model), plain_state(other, theirs))
    infinity.close(optimizer)


def test_groups_may_keep_less_than_others(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        params = [*model.parameters()]
        groups = [{"params": params[::2], "momentum": 0.9}, {"params": params[1::2], "centered": True}]
        return torch.optim.RMSprop(groups, lr=1e-3)

    model = case("gpt").model
    plain = make(model)
    go_on(model, plain, 0, 2)
    other, theirs = copy.deepcopy((model, plain))
    model, optimizer = infinity.wrap(model, plain, config_for(tmp_path))
    go_on(model, optimizer, 2, 3)
    go_on(other, theirs, 2, 3)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    go_on(model, optimizer, 3, 4)
    go_on(other, theirs, 3, 4)
    found = state_of(model)
    for name, kinds in plain_state(other, theirs).items():
        for kind, value in kinds.items():
            assert torch.equal(found[name][kind], value), (name, kind)
    infinity.close(optimizer)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    make = OWN[name]
    wanted = trained(make, tmp_path / "whole", **ON_HOST)
    model, optimizer = wrapped(make, tmp_path / "a")
    go_on(model, optimizer, 0, 3)
    infinity.save(optimizer, tmp_path / "saved")
    infinity.close(optimizer)
    model, optimizer = wrapped(make, tmp_path / "b", chunk_elements=131072, **ON_HOST)
    go_on(model, optimizer, 0, 1)  # what it counts makes way
    infinity.load(optimizer, tmp_path / "saved")
    go_on(model, optimizer, 3, STEPS)
    assert_equal(state_of(model), wanted)
    infinity.close(optimizer)


@pytest.mark.parametrize("name", quick(OWN, ["rprop", "nadam", "adafactor"], ["asgd"]))
def test_the_state_of_a_parameter_without_updates_is_what_torch_begins_with(
    name: str, tmp_path: Path
) -> None:
    _, optimizer = wrapped(OWN[name], tmp_path / "a", dtype="bf16")
    saved = optimizer.state_dict()
    infinity.close(optimizer)
    one, two = (nn.Parameter(saved["state"][0]["master"].clone()) for _ in range(2))
    ours, theirs = OWN[name]([one]), OWN[name]([two])
    groups = copy.deepcopy(saved["param_groups"])
    groups[0]["params"] = [0]
    ours.load_state_dict({"state": {0: copy.deepcopy(saved["state"][0])}, "param_groups": groups})
    for _ in range(2):
        one.grad, two.grad = torch.ones_like(one), torch.ones_like(two)
        ours.step()
        theirs.step()
    assert torch.equal(one, two)
    for kind, value in theirs.state[two].items():
        assert torch.equal(ours.state[one][kind], value), kind


@pytest.mark.parametrize("clip", [None, 0.1])
def test_clipped_gradients_and_a_scheduler_do_what_torch_does(clip: float | None, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Any, plain: bool) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(4):
            loss_of(model, step).backward()
            if plain and clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.param_groups[0]["momentum_decay"] *= 1.5
            optimizer.zero_grad()

    model = case("gpt").model
    plain = OWN["nadam"](model.parameters())
    run(model, plain, True)
    theirs, optimizer = wrapped(OWN["nadam"], tmp_path, max_grad_norm=clip)
    run(theirs, optimizer, False)
    found = with_counters(state_of(theirs), optimizer, theirs)
    if clip is None:
        assert_equal(found, plain_state(model, plain))
    else:  # torch rounds the norm in fp32
        assert_near(found, model)
    infinity.close(optimizer)


def test_hooks_are_called_once_for_a_step(tmp_path: Path) -> None:
    calls: list[str] = []
    model = case("gpt").model
    plain = OWN["rmsprop"](model.parameters())
    plain.register_step_post_hook(lambda *_: calls.append("of the optimizer before wrap"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    try:
        model, optimizer = infinity.wrap(model, plain, config_for(tmp_path))
        optimizer.register_step_post_hook(lambda *_: calls.append("own"))
        go_on(model, optimizer, 0, 2)
    finally:
        everywhere.remove()
    assert calls == ["global", "of the optimizer before wrap", "own"] * 2
    infinity.close(optimizer)


def test_wrap_warns_and_names_what_runs_fused(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"RMSprop runs by its own code .*AdamW.*Lion") as caught:
        _, optimizer = wrapped(OWN["rmsprop"], tmp_path / "a")
    assert [c.filename for c in caught if "own code" in str(c.message)]
    infinity.close(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = wrapped(OPTIMIZERS["adamw"], tmp_path / "b")
    infinity.close(optimizer)


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "8bit"])
def test_moments_in_other_dtypes_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(OptimizerTypeError, match=r"fp32.*AdamW"):
        wrapped(OWN["rmsprop"], tmp_path, optimizer_state_dtype=dtype)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_need_the_whole_optimizer_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptimizerTypeError, match=option):
        wrapped(lambda p: torch.optim.RMSprop(p, **{option: True}), tmp_path)


def test_options_without_room_are_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(OWN["rmsprop"], tmp_path)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["centered"] = True
    with pytest.raises(OptimizerTypeError, match="grad_avg"):
        optimizer.step()
    optimizer.param_groups[0]["centered"] = False
    optimizer.step()
    other = OWN["centered"](case("gpt").model.parameters())
    with pytest.raises(StateDictError, match="made no room"):
        optimizer.load_state_dict(other.state_dict())
    infinity.close(optimizer)


KINDS: dict[str, Make] = {**OPTIMIZERS, **OWN}
ALIKE = {"adamw", "adam"}, {"sgd", "momentum", "nesterov"}, {"rmsprop", "centered"}


@pytest.mark.parametrize("name", quick([*OWN, "adamw", "sgd"], ["rmsprop", "radam", "adamw"]))
def test_state_dicts_of_other_optimizers_are_refused(name: str, tmp_path: Path) -> None:
    _, optimizer = wrapped(KINDS[name], tmp_path)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    for other, make in KINDS.items():
        if other == name or any({name, other} <= alike for alike in ALIKE):
            continue
        model = case("gpt").model
        plain = make(model.parameters())
        go_on(model, plain, 0, 1)
        with pytest.raises(StateDictError):
            optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state_dict()["param_groups"] == before
    infinity.close(optimizer)


def test_a_state_dict_without_a_counter_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(OWN["nadam"], tmp_path)
    go_on(model, optimizer, 0, 1)
    saved = optimizer.state_dict()
    del saved["state"][0]["mu_product"]
    with pytest.raises(StateDictError, match="mu_product"):
        optimizer.load_state_dict(saved)
    infinity.close(optimizer)


# -- classes of others ------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """What the classes below have in common."""

    def __init__(self, params: Any, lr: float = 1e-2, **attributes: Any) -> None:
        super().__init__(params, {"lr": lr})
        vars(self).update(attributes)

    def each(self) -> Iterator[tuple[dict[str, Any], Any, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p, p.grad, self.state[p]


class SignMomentum(Own):
    """Elementwise; its state is replaced, it counts in Python, and it changes the gradient."""

    scale = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            state["t"] = state.get("t", 0) + 1
            grad.mul_(self.scale)
            state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + grad
            p.data = p.data - group["lr"] / state["t"] ** 0.5 * state["m"].sign()


class Stateless(Own):
    """Keeps nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, _ in self.each():
            p.sub_(grad.sign(), alpha=group["lr"])


class LAMB(Own):
    """arXiv 1904.00962, algorithm 2."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            if not state:
                state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            state["step"] += 1
            state["m"].mul_(0.9).add_(grad, alpha=0.1)
            state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            m, v = state["m"] / (1 - 0.9 ** state["step"]), state["v"] / (1 - 0.999 ** state["step"])
            ratio = m / (v.sqrt() + 1e-6) + 0.01 * p
            p.sub_(ratio, alpha=float(group["lr"] * p.norm() / ratio.norm()))


class LARS(Own):
    """arXiv 1708.03888, algorithm 1."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            local = 0.001 * p.norm() / (grad.norm() + 1e-4 * p.norm())
            state.setdefault("v", torch.zeros_like(p)).mul_(0.9).add_((grad + 1e-4 * p) * local * group["lr"])
            p.sub_(state["v"])


class Shampoo(Own):
    """arXiv 1802.09568, algorithm 2: a preconditioner for each dimension."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            way = grad
            for dim, size in enumerate(grad.shape):
                flat = way.transpose(0, dim).reshape(size, -1)
                whole = grad.transpose(0, dim).reshape(size, -1)
                kept = state.setdefault(f"precond_{dim}", torch.eye(size) * 1e-4).add_(whole @ whole.T)
                values, vectors = torch.linalg.eigh(kept)
                root = vectors * values.clamp(min=1e-8) ** (-1 / (2 * grad.ndim)) @ vectors.T
                way = (root @ flat).reshape(way.transpose(0, dim).shape).transpose(0, dim)
            p.sub_(way, alpha=group["lr"])


class Centralized(Own):
    """Subtracts the mean of each row of a gradient (arXiv 2004.01461)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, _ in self.each():
            p.sub_(grad - grad.mean(dim=-1, keepdim=True) if p.ndim > 1 else grad, alpha=group["lr"])


class GlobalNorm(Own):
    """Clips by the norm of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = sum(float(grad.square().sum()) for _, _, grad, _ in self.each()) ** 0.5
        for group, p, grad, _ in self.each():
            p.sub_(grad, alpha=group["lr"] * min(1.0, 1 / norm))


class CountsInGroup(Own):
    """Has its step in the param group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, _ in self.each():
            group["k"] = group.get("k", 1000) + 1
            p.sub_(grad, alpha=group["lr"] / group["k"])


class CountsInItself(Own):
    """Has its step in an attribute."""

    t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        for group, p, grad, _ in self.each():
            p.sub_(grad, alpha=group["lr"] / self.t)


class Draws(Own):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, _ in self.each():
            p.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class CountsValues(Own):
    """Has a number that depends on values, used later."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            p.sub_(grad, alpha=group["lr"])
            state["largest"] = max(float(grad.abs().max()), state.get("largest", 0.0))


class HalfState(Own):
    """Keeps a moment in bf16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            state.setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16)).add_(grad)
            p.sub_(state["m"], alpha=group["lr"])


class Late(Own):
    """Begins to keep something at its third step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p, grad, state in self.each():
            state["step"] = state.get("step", 0) + 1
            if state["step"] > 2:
                state.setdefault("slow", p.clone()).lerp_(p, 0.5)
            p.sub_(grad, alpha=group["lr"])


@pytest.mark.parametrize("kind", [SignMomentum, Stateless])
def test_an_elementwise_class_has_the_bits_of_plain_torch(kind: Any, tmp_path: Path) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return kind(params, scale=0.25)  # type: ignore[no-any-return]

    model = case("gpt").model
    plain = make(model.parameters())
    go_on(model, plain, 0, 4)
    wanted = plain_state(model, plain)
    with pytest.raises(OptimizerTypeError, match="elementwise=True"):
        wrapped(make, tmp_path / "refused")
    for place in ("host", "nvme", "split", "backward"):
        theirs = case("gpt").model
        (tmp_path / place).mkdir()
        config = config_for(tmp_path / place, **PLACES[place])
        drawn = torch.random.get_rng_state()
        theirs, optimizer = infinity.wrap(theirs, make(theirs.parameters()), config, elementwise=True)
        assert torch.equal(drawn, torch.random.get_rng_state())
        go_on(theirs, optimizer, 0, 2)
        infinity.save(optimizer, tmp_path / place / "saved")
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        go_on(theirs, optimizer, 2, 3)
        infinity.load(optimizer, tmp_path / place / "saved")
        go_on(theirs, optimizer, 2, 4)
        found = state_of(theirs)
        assert_equal(found, {n: {k: v for k, v in of.items() if k != "t"} for n, of in wanted.items()})
        if kind is SignMomentum:
            assert saved["state"][0]["t"] == 2
            assert isinstance(saved["state"][0]["t"], int)
        infinity.close(optimizer)


class SkipsNaN(torch.optim.SGD):
    """Leaves a parameter whose gradient is not finite as it is."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and bool(p.grad.isfinite().all()):
                    p.data.add_(p.grad, alpha=-group["lr"])


class Momentum(torch.optim.SGD):
    """Torch's own, by another name."""


def test_state_that_a_group_begins_after_wrap_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[1].parameters()}]
    config = infinity.Config(device="cpu", host_memory="64MiB")
    model, optimizer = infinity.wrap(model, Momentum(groups, lr=0.1), config, elementwise=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["momentum"] = 0.9
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(OptimizerTypeError, match="momentum_buffer"):
        optimizer.step()
    optimizer.param_groups[1]["momentum"] = 0
    optimizer.step()
    infinity.close(optimizer)


class OfAdafactor(torch.optim.Adafactor):
    """A class of its own is not the one whose arithmetic is known."""


REFUSED: dict[Callable[..., Any], str] = {
    SkipsNaN: "other 'values'|depends on other elements",
    LAMB: "other",
    LARS: "other",
    Shampoo: "neither an fp32 value",
    Centralized: "other",
    GlobalNorm: "depends on other elements|other 'values'",
    CountsInGroup: "in its param groups",
    CountsInItself: "other 'values'",
    Draws: "other",
    CountsValues: "depend on the values",
    HalfState: "neither an fp32 value",
    Late: "slow",
    torch.optim.LBFGS: "raises",
    torch.optim.SparseAdam: "raises",
    OfAdafactor: "neither|other|raises",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_the_probe_refuses_what_is_not_elementwise(kind: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = infinity.Config(device="cpu", host_memory="64MiB")
    with pytest.raises(OptimizerTypeError, match=REFUSED[kind]):
        infinity.wrap(model, kind(model.parameters()), config, elementwise=True)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
