"""What users do with `p.grad` besides a step: keep it, put it back, look at it, make it zero."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.autograd.phases import Phases
from infinity.core.errors import GradientError
from infinity.grads.gradient_chunks import GradientIO
from infinity.grads.sharded_grad import ShardedGrad
from infinity.params.updates import Updates

from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, config_for, wrap_adamw
from .quick import covering

WIDTH = 24
PLACES = {"nvme": ON_NVME, "host": ON_HOST, "device": ON_DEVICE}
places = pytest.mark.parametrize("place", list(PLACES))
updates = pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, unused: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Two tasks on common layers; `side` makes an input that no layer uses, where there is one."""

    def __init__(self, side: bool = False) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH) if side else None
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.tasks = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int = 0) -> torch.Tensor:
        y = None if self.side is None else self.side(x)
        for layer in self.layers:
            x = layer(x, y)
        return self.tasks[task](x).square().mean()


def build(side: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net(side)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


@contextmanager
def wrapped(
    folder: Path, place: str = "host", *, side: bool = False, **settings: Any
) -> Iterator[tuple[Any, Any]]:
    folder.mkdir(exist_ok=True)
    mode = {"delay_warmup_steps": 0} if settings.get("update") == "delayed" else {}
    config = config_for(folder, **{**PLACES[place], **mode, **settings})
    model, optimizer = infinity.wrap(*build(side), config)
    try:
        yield model, optimizer
    finally:
        infinity.close(optimizer)


def backward(model: Any, optimizer: Any, seed: int = 0, task: int = 0) -> None:
    loss = model(batch(seed), task)
    (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {n: infinity.gradient(p) for n, p in model.named_parameters()}


def close_to(model: Any, reference: Any) -> None:
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-6, msg=name)


# -- None and zero --------------------------------------------------------------------------------


@places
def test_an_input_that_a_call_does_not_use_has_no_gradient(place: str, tmp_path: Path) -> None:
    reference, plain = build(side=True)
    with wrapped(tmp_path, place, side=True) as (model, optimizer):
        for step in range(3):
            for m, o in ((model, optimizer), (reference, plain)):
                backward(m, o, step)
                assert m.side.weight.grad is None
                assert m.side.bias.grad is None
                o.step()
                o.zero_grad()
        close_to(model, reference)  # what has no gradient does not decay either
        state = optimizer.state_dict()["state"]
        assert state.keys() == plain.state_dict()["state"].keys()


def test_all_inputs_without_a_gradient_still_end_a_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that gives none of its inputs one: its unit is let go when its backward is over."""
    ended = []

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x + weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return None, grad.sum(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Constant.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]

    backward_ends = Phases.end_scope_backward

    def record(self: Phases, forward: Any) -> None:
        ended.append(forward.scope.name)
        backward_ends(self, forward)

    monkeypatch.setattr(Phases, "end_scope_backward", record)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer(), nn.Linear(WIDTH, WIDTH))
    model, optimizer = wrap_adamw(model, config_for(tmp_path, **ON_HOST))
    model(batch()).sum().backward()
    assert model[0].weight.grad is None
    assert "1" in ended
    assert not any(u.in_use for u in engine_of(model).units)
    optimizer.step()
    infinity.close(optimizer)


@covering
@places
@updates
@pytest.mark.parametrize("who", ["optimizer", "model", "parameters"])
def test_zeros_take_no_bytes(
    place: str, update: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place, update=update, delay_warmup_steps=9) as (model, optimizer):
        engine = engine_of(model)
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o)
            o.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", None)  # nothing is made
            patch.setattr(GradientIO, "__enter__", None)  # nothing is read or written
            if who == "optimizer":
                optimizer.zero_grad(set_to_none=False)
            elif who == "model":
                model.zero_grad(set_to_none=False)
            else:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.zero_()
            engine.gradients.wait()
        plain.zero_grad(set_to_none=False)
        grads = gradients(model)
        for name, param in reference.named_parameters():
            found = grads[name]
            assert (found is None) == (param.grad is None), name
            assert found is None or not found.any(), name
        for m, o in ((model, optimizer), (reference, plain)):
            o.step()  # momentum and decay go on
            backward(m, o, 1, task=1)  # onto the zeros
            o.step()
            backward(m, o, 2, task=0)  # onto what is not zero
            o.step()
        infinity.flush(model)
        close_to(model, reference)


@places
def test_one_zero_beside_gradients_that_stay(place: str, tmp_path: Path) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place) as (model, optimizer):
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o)
            m.layers[1].linear.bias.grad.zero_()
            backward(m, o, 1)
            m.layers[2].linear.weight.grad.zero_()
        for name, param in reference.named_parameters():
            found = infinity.gradient(model.get_parameter(name))
            assert (found is None) == (param.grad is None), name
            if found is not None:
                torch.testing.assert_close(found, param.grad, rtol=1e-6, atol=1e-7)
        for o in (optimizer, plain):
            o.step()
        close_to(model, reference)


def waits_of(model: Any, optimizer: Any, forget: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often backwards wait for a delayed update that cannot end before them."""
    waited = []
    wait_unit = Updates.wait_unit
    engine = engine_of(model)
    for step in range(4):
        loss = model(batch(step))
        with monkeypatch.context() as patch:

            def count(self: Updates, unit: int) -> None:
                waited.append(unit)
                wait_unit(self, unit)

            patch.setattr(Updates, "wait_unit", count)
            # As if the update before were under way until this backward is over.
            patch.setattr(Updates, "has_chunk", lambda self, chunk: True)
            loss.backward()
            engine.gradients.send_all()
        optimizer.step()
        forget(model, optimizer)
    return len(waited)


@covering
@places
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_a_backward_does_not_wait_for_a_delayed_update(
    place: str, set_to_none: bool, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(model: Any, optimizer: Any) -> None:
        (model if whose == "model" else optimizer).zero_grad(set_to_none=set_to_none)

    with wrapped(tmp_path, place, update="delayed") as (model, optimizer):
        assert waits_of(model, optimizer, forget, monkeypatch) == 0


def test_a_backward_onto_gradients_that_a_delayed_update_reads_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wrapped(tmp_path, update="delayed") as (model, optimizer):
        assert waits_of(model, optimizer, lambda model, optimizer: None, monkeypatch) > 0


# -- kept and put back ----------------------------------------------------------------------------


@places
@updates
def test_a_gradient_put_back_before_another_came_is_the_gradient(
    place: str, update: str, tmp_path: Path
) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place, update=update, delay_warmup_steps=9) as (model, optimizer):
        for m, o in ((model, optimizer), (reference, plain)):
            for step in range(3):
                backward(m, o, step)
                kept = {p: p.grad for p in m.parameters()}
                for p in m.parameters():
                    p.grad = None
                for _ in range(2):  # twice is once
                    for p, g in kept.items():
                        p.grad = g
                backward(m, o, step + 5, task=1)  # added to it
                o.step()
                backward(m, o, step + 7)  # and to what lasts across the step
        infinity.flush(model)
        close_to(model, reference)


@covering
@places
@updates
@pytest.mark.parametrize("how", ["none", "zero_grad", "step"])
def test_a_gradient_that_is_gone_is_refused_and_the_cure_works(
    place: str, update: str, how: str, tmp_path: Path
) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place, update=update, delay_warmup_steps=9) as (model, optimizer):
        weight, theirs = model.layers[1].linear.weight, reference.layers[1].linear.weight
        backward(model, optimizer)
        backward(reference, plain)
        kept, values, wanted = weight.grad, infinity.gradient(weight), theirs.grad
        weight.grad = theirs.grad = None
        if how == "zero_grad":
            optimizer.zero_grad()
            plain.zero_grad()
        elif how == "step":
            optimizer.step()
            plain.step()
        backward(model, optimizer, 1, task=1)
        backward(reference, plain, 1, task=1)
        assert "gradient" in str(kept.shape) or kept.shape == weight.shape
        for use in (
            lambda: kept.norm(),
            lambda: kept.mul_(2),
            lambda: kept.zero_(),
            lambda: kept.add_(torch.ones(WIDTH, WIDTH)),
            lambda: torch._foreach_norm([kept]),
        ):
            with pytest.raises(GradientError, match="put them back"):
                use()
        weight.grad = kept
        for use in (
            lambda: infinity.gradient(weight),
            lambda: optimizer.step(),
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: backward(model, optimizer, 2),
        ):
            with pytest.raises(GradientError, match="put them back"):
                use()
        weight.grad = values.to(weight.device, weight.dtype)  # the cure
        theirs.grad = wanted
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o, 3)  # added to it
            o.step()
        infinity.flush(model)
        close_to(model, reference)


@covering
@places
@pytest.mark.parametrize("then", ["step", "backward", "clip", "read"])
def test_a_gradient_on_another_parameter_is_refused_and_the_cure_works(
    place: str, then: str, tmp_path: Path
) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place) as (model, optimizer):
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o)
        one, other = model.layers[0].linear.weight, model.layers[1].linear.weight
        other.grad = one.grad
        uses = {
            "step": optimizer.step,
            "backward": lambda: backward(model, optimizer, 1),
            "clip": lambda: optimizer.clip_grad_norm_(1.0),
            "read": lambda: infinity.gradient(other),
        }
        with pytest.raises(GradientError, match=r"layers\.0.*assigned to 'layers\.1"):
            uses[then]()
        other.grad = infinity.gradient(one).to(other.device, other.dtype)  # the cure
        reference.layers[1].linear.weight.grad = reference.layers[0].linear.weight.grad.clone()
        for o in (optimizer, plain):
            o.step()
        close_to(model, reference)


def test_projecting_conflicting_gradients(tmp_path: Path) -> None:
    """PCGrad, as one writes it with `infinity.gradient`, in each compute dtype."""

    def surgery(model: Any, optimizer: Any, read: Any, seed: int) -> None:
        both = []
        for task in range(2):
            model.zero_grad()
            backward(model, optimizer, seed, task)
            both.append({p: read(p) for p in model.parameters() if p.grad is not None})
        model.zero_grad()
        for p, g in both[0].items():
            h = both[1].get(p)
            if h is not None and float((g * h).sum()) < 0:
                g = g - (g * h).sum() / h.square().sum() * h
            p.grad = g.to(p.device, p.dtype)

    for dtype in ("fp32", "fp16", "bf16"):
        reference, plain = build()
        with wrapped(tmp_path / dtype, dtype=dtype, loss_scale=1024.0) as (model, optimizer):
            for step in range(3):
                surgery(model, optimizer, infinity.gradient, step)
                surgery(reference, plain, lambda p: p.grad.clone(), step)
                total = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
                assert float(total) == pytest.approx(float(wanted), rel=2e-2)
                optimizer.step()
                plain.step()
            # On average: Adam turns the sign of a gradient that is nearly nothing into a whole step.
            loose = {"fp32": 1e-6, "fp16": 1e-4, "bf16": 1e-3}[dtype]
            for n, value in model.state_dict().items():
                assert float((value.float() - reference.state_dict()[n]).abs().mean()) < loose, n


def test_a_sum_of_gradients_makes_no_new_one(tmp_path: Path) -> None:
    """`p.grad + t` outside of a backward is a tensor of its own; it changed the gradient without a word."""
    with wrapped(tmp_path) as (model, optimizer):
        backward(model, optimizer)
        weight = model.layers[0].linear.weight
        before = infinity.gradient(weight)
        assert torch.equal(weight.grad + torch.ones_like(before), before + 1)
        assert torch.equal(infinity.gradient(weight), before)


def test_gradients_that_are_summed_with_create_graph(tmp_path: Path) -> None:
    """autograd then makes a new tensor; the one before it shows nothing any more."""
    reference, _ = build()
    with wrapped(tmp_path, "device") as (model, _):
        weight = model.layers[0].linear.weight
        for m in (model, reference):
            m(batch()).backward()
        first = weight.grad
        for m in (model, reference):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of create_graph once per process
                m(batch(1)).backward(create_graph=True)
        assert isinstance(weight.grad, ShardedGrad)
        torch.testing.assert_close(
            infinity.gradient(weight), reference.layers[0].linear.weight.grad.detach(), rtol=1e-5, atol=1e-7
        )
        with pytest.raises(GradientError):
            first.norm()
        model.zero_grad()
        reference.zero_grad()


# -- fp16: unscaled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.0, math.inf])
@pytest.mark.parametrize("foreach", [None, False])
def test_norms_of_fp16_gradients_are_unscaled(order: float, foreach: bool | None, tmp_path: Path) -> None:
    with wrapped(tmp_path, dtype="fp16", loss_scale=1024.0) as (model, optimizer):
        backward(model, optimizer)
        before = gradients(model)
        flat = torch.cat([g.flatten() for g in before.values() if g is not None])
        norms = [torch.linalg.vector_norm(g, order) for g in before.values() if g is not None]
        for name, param in model.named_parameters():
            if param.grad is not None:
                wanted = torch.linalg.vector_norm(before[name], order)
                assert float(param.grad.norm(order)) == pytest.approx(float(wanted), rel=1e-6)
        wanted = float(torch.linalg.vector_norm(torch.stack(norms), order))  # torch's
        limit = wanted / 3
        total = nn.utils.clip_grad_norm_(
            model.parameters(), limit, norm_type=order, foreach=foreach, error_if_nonfinite=True
        )
        assert float(total) == pytest.approx(wanted, rel=1e-5)
        after = gradients(model)
        for name, g in before.items():
            assert g is None or torch.allclose(after[name], g / 3, rtol=1e-4, atol=0), name
        clipped = float(torch.linalg.vector_norm(flat / 3))
        assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(clipped, rel=1e-4)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(clipped, rel=1e-4)


def test_clipping_fp16_gradients_trains_as_fp32(tmp_path: Path) -> None:
    """With Adam's epsilon large, the size of the gradients shows in the weights."""
    torch.manual_seed(0)
    reference = Net()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1.0)
    torch.manual_seed(0)
    model: Any = Net()
    config = config_for(tmp_path, dtype="fp16", loss_scale=1024.0, **ON_HOST)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    model, optimizer = wrap_adamw(model, config, lr=1e-2, eps=1.0, weight_decay=0.0)
    plain.param_groups[0]["weight_decay"] = 0.0
    for step in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            o.zero_grad()
            backward(m, o, step)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            o.step()
    state = optimizer.state_dict()["state"]
    for i, (name, param) in enumerate(reference.named_parameters()):
        if i in plain.state_dict()["state"]:
            torch.testing.assert_close(
                state[i]["master"] - start[name], param.detach() - start[name], rtol=0.1, atol=2e-6
            )
    infinity.close(optimizer)


def test_an_overflow_is_told_by_clip_grad_norm(tmp_path: Path) -> None:
    with wrapped(tmp_path, dtype="fp16", loss_scale=2.0**24) as (model, optimizer):
        backward(model, optimizer)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        assert optimizer.skipped_steps == 1


def test_a_gradient_keeps_its_size_when_the_loss_scale_changes(tmp_path: Path) -> None:
    """Gradients last across a step; the next ones are added to them at another scale."""
    with wrapped(tmp_path, dtype="fp16", loss_scale=1024.0, loss_scale_window=1, update="sync") as (m, o):
        weight = m.layers[0].linear.weight
        backward(m, o)
        first = infinity.gradient(weight)
        norm = float(weight.grad.norm())
        o.step()
        assert o.loss_scale == 2048.0
        assert torch.equal(infinity.gradient(weight), first)
        assert float(weight.grad.norm()) == norm
        kept = weight.grad
        for p in m.parameters():
            p.grad = None
        backward(m, o, 1)
        second = infinity.gradient(weight)
        o.zero_grad()
        del kept
        # The same two, one onto the other.
        weight.grad = first.to(weight.dtype)
        backward(m, o, 1)
        found = infinity.gradient(weight)
        torch.testing.assert_close(found, first.half().float() + second, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_a_user_adds_is_unscaled(dtype: str, tmp_path: Path) -> None:
    with wrapped(tmp_path, dtype=dtype, loss_scale=1024.0) as (model, optimizer):
        backward(model, optimizer)
        weight = model.layers[0].linear.weight
        before = infinity.gradient(weight)
        weight.grad.add_(torch.full((WIDTH, WIDTH), 0.25, dtype=weight.dtype))
        torch.testing.assert_close(infinity.gradient(weight), before + 0.25, rtol=1e-6, atol=1e-7)
        backward(model, optimizer)
        torch.testing.assert_close(infinity.gradient(weight), 2 * before + 0.25, rtol=1e-5, atol=1e-6)


# -- what others may do while a gradient is on its way -------------------------------------------


@places
def test_a_tensor_that_was_added_may_change_afterwards(place: str, tmp_path: Path) -> None:
    with wrapped(tmp_path, place) as (model, optimizer):
        reference, plain = build()
        for net, adam in ((model, optimizer), (reference, plain)):
            backward(net, adam)
            noise = torch.empty(WIDTH, WIDTH)
            for layer in net.layers:
                layer.linear.weight.grad.add_(noise.fill_(0.1))
            noise.zero_()
            adam.step()
            adam.zero_grad()
        close_to(model, reference)


@places
def test_a_multiple_of_the_weights_is_added(place: str, tmp_path: Path) -> None:
    """As weight decay by hand does it."""
    with wrapped(tmp_path, place) as (model, optimizer):
        reference, plain = build()
        for net, adam in ((model, optimizer), (reference, plain)):
            for _ in range(2):
                backward(net, adam)
                with infinity.gathered(net) if net is model else contextlib.nullcontext():
                    for p in net.parameters():
                        if p.grad is not None:  # of the other task
                            p.grad.add_(p.detach(), alpha=0.1)
                adam.step()
                adam.zero_grad()
        close_to(model, reference)


@places
def test_a_hook_may_return_the_same_memory_each_time(place: str, tmp_path: Path) -> None:
    with wrapped(tmp_path, place) as (model, optimizer):
        reference, plain = build()
        for net, adam in ((model, optimizer), (reference, plain)):
            buffer = torch.empty(WIDTH, WIDTH)
            for layer in net.layers:
                layer.linear.weight.register_hook(lambda grad, buffer=buffer: buffer.copy_(grad).mul_(2))
            for seed in range(3):
                backward(net, adam, seed)
            adam.step()
            adam.zero_grad()
        close_to(model, reference)


def test_a_look_in_a_hook_leaves_the_gradient_what_it_is(tmp_path: Path) -> None:
    with wrapped(tmp_path) as (model, optimizer):
        reference, plain = build()
        told = []

        def look(param: Any) -> None:
            told.append(param.grad + torch.ones_like(param.grad))

        for net, adam in ((model, optimizer), (reference, plain)):
            net.tasks[0].weight.register_post_accumulate_grad_hook(look)
            for seed in range(2):
                backward(net, adam, seed)
            adam.step()
            adam.zero_grad()
        torch.testing.assert_close(told[:2], told[2:], rtol=1e-5, atol=1e-6)
        close_to(model, reference)


def test_a_parameter_that_left_its_group_keeps_its_gradient(tmp_path: Path) -> None:
    with wrapped(tmp_path) as (model, optimizer):
        reference, plain = build()
        for net, adam in ((model, optimizer), (reference, plain)):
            frozen = net.layers[0].linear.weight
            group = adam.param_groups[0]
            group["params"] = [p for p in group["params"] if p is not frozen]
            for seed in range(2):
                backward(net, adam, seed)
                adam.step()
                adam.zero_grad()
        close_to(model, reference)
        wanted = reference.layers[0].linear.weight.grad
        torch.testing.assert_close(infinity.gradient(model.layers[0].linear.weight), wanted)
