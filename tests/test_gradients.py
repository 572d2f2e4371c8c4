"""What users do with `p.grad` besides a step: read it, add to it, keep it, put it back, make it zero."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of
from infinity.core.errors import BudgetError, GradientError
from infinity.grads.gradient_chunks import GradientIO

from .offloaded import ON_DEVICE, ON_HOST, ON_NVME, config_for, wrap_adamw
from .ranks import all_well, run_ranks
from .test_ranks import HEAD, LOOP, of_stage

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 24
PLACES = {"nvme": ON_NVME, "host": ON_HOST, "device": ON_DEVICE}
places = pytest.mark.parametrize("place", list(PLACES))
#: Each place with an update mode of its own.
modes = pytest.mark.parametrize(
    ("place", "update"), [("nvme", "delayed"), ("host", "overlap"), ("device", "sync")]
)


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


@pytest.mark.parametrize(
    ("place", "update", "who"),
    [("nvme", "delayed", "optimizer"), ("host", "overlap", "model"), ("device", "sync", "parameters")],
)
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
            patch.setattr(GradientIO, "wait", None)  # nothing is read or written
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


# -- kept and put back ----------------------------------------------------------------------------


@modes
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


@pytest.mark.parametrize(
    ("place", "update", "how"),
    [("nvme", "delayed", "step"), ("host", "overlap", "zero_grad"), ("device", "sync", "none")],
)
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


@places
def test_a_gradient_on_another_parameter_is_refused_and_the_cure_works(place: str, tmp_path: Path) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place) as (model, optimizer):
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o)
        one, other = model.layers[0].linear.weight, model.layers[1].linear.weight
        other.grad = one.grad
        for use in (
            optimizer.step,
            lambda: backward(model, optimizer, 1),
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: infinity.gradient(other),
        ):
            with pytest.raises(GradientError, match=r"layers\.0.*assigned to 'layers\.1"):
                use()
        other.grad = infinity.gradient(one).to(other.device, other.dtype)  # the cure
        reference.layers[1].linear.weight.grad = reference.layers[0].linear.weight.grad.clone()
        for m, o in ((model, optimizer), (reference, plain)):
            o.step()
            backward(m, o, 1)
            m.layers[0].linear.weight.grad = None  # its parameter is skipped
            m.layers[1].linear.bias.grad = torch.full((WIDTH,), 0.5)  # the user's own
            o.step()
        close_to(model, reference)


# -- fp16: unscaled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_norms_are_of_unscaled_gradients(dtype: str, tmp_path: Path) -> None:
    with wrapped(tmp_path, dtype=dtype, loss_scale=1024.0) as (model, optimizer):
        for number, order in enumerate((2.0, 1.0, 3.0, 0.0, math.inf)):
            optimizer.zero_grad()
            backward(model, optimizer, number)
            before = gradients(model)
            norms = {n: torch.linalg.vector_norm(g, order) for n, g in before.items() if g is not None}
            for name, norm in norms.items():
                found = model.get_parameter(name).grad.norm(order)
                assert float(found) == pytest.approx(float(norm), rel=1e-6)
            wanted = float(torch.linalg.vector_norm(torch.stack([*norms.values()]), order))  # torch's
            total = nn.utils.clip_grad_norm_(
                model.parameters(),
                wanted / 3,
                norm_type=order,
                foreach=None if number % 2 else False,
                error_if_nonfinite=True,
            )
            assert float(total) == pytest.approx(wanted, rel=1e-5)
            after = gradients(model)
            for name, g in before.items():
                assert g is None or torch.allclose(after[name], g / 3, rtol=1e-4, atol=0), name
            clipped = float(torch.cat([g.flatten() / 3 for g in before.values() if g is not None]).norm())
            assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(clipped, rel=1e-4)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(clipped, rel=1e-4)


def test_a_norm_that_is_not_a_number_clips_as_torch_does(tmp_path: Path) -> None:
    """One NaN makes the coefficient NaN, and with it every gradient: nothing of it goes unnoticed."""
    reference, plain = build()
    with wrapped(tmp_path, "nvme") as (model, optimizer):
        for m, o in ((model, optimizer), (reference, plain)):
            backward(m, o)
            m.layers[2].linear.bias.grad = torch.full((WIDTH,), torch.nan)
        assert optimizer.clip_grad_norm_(0.1).isnan()
        assert nn.utils.clip_grad_norm_(reference.parameters(), 0.1).isnan()
        optimizer.step()
        plain.step()
        for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


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


# -- what others may do while a gradient is on its way -------------------------------------------


def test_what_autograd_adds_may_change_afterwards(tmp_path: Path) -> None:
    """A hook returns the same memory each time."""
    reference, plain = build()
    with wrapped(tmp_path, "nvme") as (model, optimizer):
        for net, adam in ((model, optimizer), (reference, plain)):
            buffer = torch.empty(WIDTH, WIDTH)
            for layer in net.layers:
                layer.linear.weight.register_hook(lambda grad, into=buffer: into.copy_(grad).mul_(2))
            for seed in range(3):
                backward(net, adam, seed)
            adam.step()
        close_to(model, reference)


# -- read -------------------------------------------------------------------------------------------


def _saved(grad: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    file.seek(0)
    return torch.load(file)["grad"]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "isnan": torch.isnan,
    "abs": torch.abs,
    "sum": lambda g: g.sum(),
    "pow": lambda g: g.pow(2),
    "clone": lambda g: g.clone(),
    "a truth": lambda g: bool(g.isnan().any()),
    "numbers": lambda g: g.tolist(),
    "numpy": lambda g: torch.tensor(g.float().numpy().copy()),
    "comparison": lambda g: (g > 0) | (g == 0),
    "norms": lambda g: [(g + 0).norm(2), g.float().norm(1), g.float().norm(3)],
    "cast": lambda g: (g.float() + 0, g.double(), g.to(torch.bfloat16) + 0),
    "arithmetic": lambda g: (g + 1, g * g, 2 * g, g - g, g / 3, torch.ones_like(g).mul_(g)),
    "an average of others": lambda g: torch.zeros(g.shape, dtype=g.dtype).mul_(0.9).add_(g, alpha=0.1),
    "a copy elsewhere": lambda g: torch.empty(g.shape, dtype=g.dtype).copy_(g),
    "flat": lambda g: torch.cat([g.view(-1), g.flatten(), g.reshape(-1)]),
    "pieces": lambda g: [part.clone() for part in g.view(-1).chunk(3)],
    "an element": lambda g: (g.view(-1)[3].item(), f"{g.view(-1)[3]:.3f}", g.view(-1)[2:5].tolist()),
    "a turn": lambda g: g.t().contiguous() + 0,
    "data": lambda g: g.data.abs() + g.detach().abs(),
    "deepcopy": copy.deepcopy,
    "file": _saved,
}


def assert_same(found: Any, wanted: Any, name: str) -> None:
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b, name)
    elif isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor, name
        assert found.dtype == wanted.dtype, name
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=name)
    else:
        assert found == wanted, name


@pytest.mark.parametrize(("place", "dtype"), [("nvme", "bf16"), ("host", "fp32"), ("device", "fp16")])
def test_reads_are_those_of_torch(place: str, dtype: str, tmp_path: Path) -> None:
    reference, plain = build()
    with wrapped(tmp_path, place, dtype=dtype, loss_scale=64.0) as (model, optimizer):
        for seed in range(2):
            backward(model, optimizer, seed)
            backward(reference, plain, seed)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            whole = infinity.gradient(param)
            if other.grad is None:
                assert param.grad is whole is None
                continue
            if dtype == "fp32":
                torch.testing.assert_close(whole, other.grad, rtol=1e-6, atol=1e-7)
            wanted = whole.to(param.dtype)  # type: ignore[union-attr]
            for name, read in READS.items():
                if wanted.numel() >= WIDTH and (wanted.dim() == 2 or name != "a turn"):
                    assert_same(read(param.grad), read(wanted), name)  # type: ignore[arg-type]
            assert torch.equal(infinity.gradient(param), whole)  # type: ignore[arg-type]


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs_": lambda g: g.abs_(),
    "add_": lambda g: g.add_(torch.ones(g.shape)),
    "sub_": lambda g: g.sub_(g),
    "data, added to": lambda g: g.data.add_(torch.ones(g.shape)),
    "clamp_min_": lambda g: g.clamp_min_(0.0),
    "copy_": lambda g: g.copy_(torch.zeros(g.shape)),
    "an element": lambda g: g.__setitem__((0, 0), 1.0),
    "masked_fill_": lambda g: g.masked_fill_(torch.ones(g.shape, dtype=torch.bool), 0.0),
    "a row": lambda g: g[0].zero_(),
    "a flat view": lambda g: g.view(-1).mul_(2),
    "data": lambda g: g.data.normal_(),
    "other data": lambda g: setattr(g, "data", torch.zeros(g.shape)),
    "an output": lambda g: torch.abs(torch.ones(g.shape), out=g),
    "many at once": lambda g: torch._foreach_abs_([g]),
    "many views": lambda g: torch._foreach_mul_([g.view(-1)], 2.0),
    "numpy": lambda g: g.numpy().__setitem__(0, 0.0),
    "dlpack": lambda g: torch.from_dlpack(g).zero_(),
}


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A model and its optimizer, after a backward."""
    with wrapped(tmp_path, "nvme") as (model, optimizer):
        backward(model, optimizer)
        yield model, optimizer


def test_edits_are_refused(trained: tuple[Any, Any]) -> None:
    weight = trained[0].layers[0].linear.weight
    before = infinity.gradient(weight)
    for name, edit in EDITS.items():
        with pytest.raises((GradientError, ValueError), match=r"infinity\.gradient|read-only"):
            edit(weight.grad)
        assert torch.equal(infinity.gradient(weight), before), name
    weight.grad.data = weight.grad.clone()  # as `Module.to` does it
    weight.grad.data = weight.grad
    assert torch.equal(infinity.gradient(weight), before)


def test_a_view_shows_what_the_gradient_is_now(trained: tuple[Any, Any]) -> None:
    model, optimizer = trained
    weight = model.layers[0].linear.weight
    row, before = weight.grad[2], infinity.gradient(weight)
    weight.grad.mul_(0.5)
    assert torch.equal(row.clone(), before[2] * 0.5)
    backward(model, optimizer, 1)
    assert torch.equal(row.clone(), infinity.gradient(weight)[2])  # type: ignore[index]
    optimizer.zero_grad()
    with pytest.raises(GradientError, match="is gone"):
        row.clone()


def test_where_the_budget_leaves_no_room(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 1))
    reference = copy.deepcopy(model)
    x = torch.randn(4, 96)
    config = config_for(tmp_path)
    with pytest.raises(BudgetError) as refused:
        wrap_adamw(model, config.replace(host_memory=4096))
    least = int(re.search(r"\((\d+) bytes\)", str(refused.value.expected))[1])  # type: ignore[index]
    model, optimizer = wrap_adamw(model, config.replace(host_memory=least))
    try:
        model(x).sum().backward()
        reference(x).sum().backward()
        weight, wanted = model[0].weight, reference[0].weight.grad
        with pytest.raises(GradientError, match=r"infinity\.gathered") as raised:
            weight.grad.isnan()
        assert re.search(r"\d+ bytes", str(raised.value))
        with infinity.gathered(model):  # the cure
            torch.testing.assert_close(weight.grad.clone(), wanted, rtol=1e-6, atol=1e-7)
            assert torch.cat([p.grad.view(-1) for p in model.parameters()]).isfinite().all()
    finally:
        infinity.close(optimizer)


def test_a_gradient_with_a_graph_is_read_without_one(trained: tuple[Any, Any]) -> None:
    """In torch what is computed from it has a graph; without one a penalty would have no gradient."""
    model, _ = trained
    model.zero_grad()
    weight = model.layers[0].linear.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph
        model(batch()).backward(create_graph=True)
    for use in (lambda: weight.grad.pow(2).sum(), lambda: weight.grad.norm(), lambda: weight.grad[0] * 2):
        with pytest.raises(GradientError, match="create_graph"):
            use()
    with torch.no_grad():  # the cure
        assert torch.equal(weight.grad.pow(2), infinity.gradient(weight).pow(2))  # type: ignore[union-attr]
    model.zero_grad()
    model(batch()).backward()
    assert weight.grad.pow(2).sum() > 0


def test_a_read_in_a_hook_of_a_backward(tmp_path: Path) -> None:
    """Also `p.grad + t`, with which autograd accumulates."""
    reference, plain = build()
    seen: list[list[torch.Tensor]] = []
    with wrapped(tmp_path, "nvme") as (model, optimizer):
        for net, adam in ((model, optimizer), (reference, plain)):
            seen.append([])

            def look(p: Any, into: list[torch.Tensor] = seen[-1]) -> None:
                into.extend([p.grad.abs(), p.grad + torch.ones_like(p.grad)])

            for p in net.layers.parameters():
                p.register_post_accumulate_grad_hook(look)
            for seed in range(4):
                backward(net, adam, seed)
                if seed % 2:
                    adam.step()
                    adam.zero_grad()
        torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)
        close_to(model, reference)


@pytest.mark.first
@pytest.mark.parametrize("stage", [1, 3])
def test_reads_of_ranks(stage: int, tmp_path: Path) -> None:
    """All ranks read the mean; inside of a backward there is none yet."""
    script = (
        HEAD
        + """
import copy
plain = copy.deepcopy(model)
"""
        + LOOP
        + """
plain.load_state_dict(model.state_dict())
loss().backward()
for r in range(world):
    (plain(torch.full((2, 8), r + 1.0)).square().mean() / world).backward()
for p, q in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(p.grad.clone(), q.grad, rtol=1e-4, atol=1e-6)
    largest = [g.view(-1)[1:].abs().max() for g in (p.grad, q.grad)]
    torch.testing.assert_close(*largest, rtol=1e-4, atol=1e-6)
assert not any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None)
(loss() * torch.nan if rank == 1 else loss()).backward()
assert any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None)
adam.zero_grad()
told = []
def look(p):
    try:
        p.grad.abs()
    except infinity.InfinityError as error:
        told.append(str(error))
handle = model.last.weight.register_post_accumulate_grad_hook(look)
loss().backward()
assert len(told) == 1 and "when the backward has returned" in told[0], told
handle.remove()
adam.step()
adam.zero_grad()
step()
infinity.close(model)
"""
    )
    all_well(run_ranks(2, script, json.dumps(of_stage(tmp_path, stage)), seconds=200))
