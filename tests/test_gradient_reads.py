"""What only reads `p.grad` is given the whole gradient, as torch has it; what would edit it elsewhere is
refused."""

from __future__ import annotations

import copy
import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import BudgetError, GradientError

from .offloaded import config_for
from .quick import quick
from .ranks import all_well, run_ranks
from .small_net import Wrapped, build, tokens, wrapped  # noqa: F401
from .small_net import config as config
from .test_ranks import HEAD, LOOP, of_stage

pytestmark = pytest.mark.usefixtures("one_thread")


def _saved(grad: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"grad": grad}, file)
    file.seek(0)
    return torch.load(file)["grad"]


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "abs": torch.abs,
    "max": lambda g: g.max(),
    "sum": lambda g: g.sum(),
    "pow": lambda g: g.pow(2),
    "clone": lambda g: g.clone(),
    "sign": torch.sign,
    "a number": lambda g: g.abs().max().item(),
    "a truth": lambda g: bool(g.isnan().any()),
    "numbers": lambda g: g.tolist(),
    "numpy": lambda g: torch.tensor(g.float().numpy().copy()),
    "numpy's own": lambda g: torch.tensor(np.asarray(np.isnan(np.asarray(g.float())))),
    "comparison": lambda g: (g > 0) | (g == 0),
    "norms": lambda g: [(g + 0).norm(2), g.float().norm(1), g.float().norm(3)],
    "norm of rows": lambda g: torch.linalg.vector_norm(g.view(g.shape[0], -1), dim=1),
    "cast": lambda g: (g.float() + 0, g.double(), g.to(torch.bfloat16) + 0),
    "moments": lambda g: (g.float().mean(), g.float().std(), g.float().var()),
    "arithmetic": lambda g: (g + 1, g * g, 2 * g, g - g, g / 3, torch.ones_like(g).mul_(g)),
    "an average of others": lambda g: torch.zeros(g.shape, dtype=g.dtype).mul_(0.9).add_(g, alpha=0.1),
    "a copy elsewhere": lambda g: torch.empty(g.shape, dtype=g.dtype).copy_(g),
    "flat": lambda g: torch.cat([g.view(-1), g.flatten(), g.reshape(-1)]),
    "pieces": lambda g: [part.clone() for part in g.view(-1).chunk(3)],
    "an element": lambda g: (g.view(-1)[3].item(), f"{g.view(-1)[3]:.3f}", g.view(-1)[2:5].tolist()),
    "a turn": lambda g: g.t().contiguous() + 0,
    "two": lambda g: torch.where(torch.isnan(g), torch.zeros_like(g), g),
    "many at once": lambda g: torch._foreach_abs([g, g]),
    "where the largest are": lambda g: g.view(-1).abs().topk(3).indices,
    "histogram": lambda g: torch.histc(g.float(), 5),
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


@pytest.mark.covering
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_reads_are_those_of_torch(place: str, dtype: str, tmp_path: Path) -> None:
    places = dict.fromkeys(("parameters", "optimizer_state", "gradients"), place)
    model, optimizer = infinity.wrap(*build(), config_for(tmp_path, dtype=dtype, loss_scale=64.0, **places))
    reference, _ = build()
    try:
        for backward in range(2):
            optimizer.scale(model(tokens(backward))).backward()
            reference(tokens(backward)).backward()
        for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
            if plain.grad is None:
                assert param.grad is None
                continue
            whole = infinity.gradient(param)
            if dtype == "fp32":
                torch.testing.assert_close(whole, plain.grad, rtol=1e-6, atol=1e-8)
            wanted = whole.to(param.dtype)  # type: ignore[union-attr]
            for name, read in READS.items():
                if wanted.dim() == 2 or name not in ("a turn",):
                    assert_same(read(param.grad), read(wanted), name)  # type: ignore[arg-type]
            assert torch.equal(infinity.gradient(param), whole)  # type: ignore[arg-type]
    finally:
        infinity.close(optimizer)


def test_a_loop_that_looks_for_nan(wrapped: Wrapped) -> None:  # noqa: F811
    model, optimizer = wrapped

    def broken() -> bool:
        return any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None)

    for seed in range(3):
        model(tokens(seed)).backward()
        assert not broken()
        if seed == 1:
            model.blocks[1].down.bias.grad.add_(torch.full_like(model.blocks[1].down.bias.grad, torch.nan))
            assert broken()
            optimizer.zero_grad()
            assert not broken()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert all(v.isfinite().all() for v in model.state_dict().values())


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "abs_": lambda g: g.abs_(),
    "copy_": lambda g: g.copy_(torch.zeros(g.shape)),
    "an element": lambda g: g.__setitem__((0, 0), 1.0),
    "a mask": lambda g: g.__setitem__(torch.ones(g.shape, dtype=torch.bool), 0.0),
    "masked_fill_": lambda g: g.masked_fill_(torch.ones(g.shape, dtype=torch.bool), 0.0),
    "a row": lambda g: g[0].zero_(),
    "a flat view": lambda g: g.view(-1).mul_(2),
    "a view of a view": lambda g: g.view(-1)[3:].chunk(2)[1].add_(1),
    "data": lambda g: g.data.normal_(),
    "other data": lambda g: setattr(g, "data", torch.zeros(g.shape)),
    "other data of a view": lambda g: setattr(g.view(-1), "data", torch.zeros(g.numel())),
    "vector_to_parameters": lambda g: nn.utils.vector_to_parameters(torch.zeros(g.numel()), [g]),
    "an output": lambda g: torch.abs(torch.ones(g.shape), out=g),
    "many at once": lambda g: torch._foreach_abs_([g]),
    "many views": lambda g: torch._foreach_mul_([g.view(-1)], 2.0),
    "numpy": lambda g: g.numpy().__setitem__(0, 0.0),
    "numpy of a view": lambda g: np.asarray(g.view(-1)).__setitem__(0, 0.0),
    "dlpack": lambda g: torch.from_dlpack(g).zero_(),
}


def test_a_model_is_moved_to_where_it_is(wrapped: Wrapped) -> None:  # noqa: F811
    model, _ = wrapped
    model(tokens()).backward()
    up = model.blocks[0].up.weight
    before = infinity.gradient(up)
    up.grad.data = up.grad.clone()  # as `Module.to` does it
    up.grad.data = up.grad
    assert torch.equal(infinity.gradient(up), before)


@pytest.mark.parametrize("alpha", [1, -0.5])
def test_a_gradient_is_added_to_itself_and_to_another(alpha: float, wrapped: Wrapped) -> None:  # noqa: F811
    model, _ = wrapped
    model(tokens()).backward()
    up, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    before, there = infinity.gradient(up), infinity.gradient(other)
    up.grad.add_(up.grad, alpha=alpha)
    other.grad.add_(up.grad, alpha=alpha)
    assert before is not None
    assert there is not None
    doubled = before + alpha * before
    torch.testing.assert_close(infinity.gradient(up), doubled)
    torch.testing.assert_close(infinity.gradient(other), there + alpha * doubled)


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_refused(edit: str, wrapped: Wrapped) -> None:  # noqa: F811
    model, _ = wrapped
    model(tokens()).backward()
    weight = model.blocks[0].up.weight
    before = infinity.gradient(weight)
    with pytest.raises((GradientError, ValueError), match=r"infinity\.gradient|read-only"):
        EDITS[edit](weight.grad)
    assert torch.equal(infinity.gradient(weight), before)  # type: ignore[arg-type]


def test_a_view_shows_what_the_gradient_is_now(wrapped: Wrapped) -> None:  # noqa: F811
    model, optimizer = wrapped
    model(tokens()).backward()
    weight = model.blocks[0].up.weight
    row, before = weight.grad[2], infinity.gradient(weight)
    weight.grad.mul_(0.5)
    assert torch.equal(row.clone(), before[2] * 0.5)
    model(tokens(1)).backward()
    assert torch.equal(row.clone(), infinity.gradient(weight)[2])  # type: ignore[index]
    optimizer.zero_grad()
    with pytest.raises(GradientError, match="is gone"):
        row.clone()


def test_where_the_budget_leaves_no_room(config: infinity.Config) -> None:
    with pytest.raises(BudgetError) as refused:
        infinity.wrap(*build(), config.replace(host_memory=4096))
    least = int(re.search(r"\((\d+) bytes\)", str(refused.value.expected))[1])  # type: ignore[index]
    model, optimizer = infinity.wrap(*build(), config.replace(host_memory=least))
    reference, _ = build()
    try:
        model(tokens()).backward()
        reference(tokens()).backward()
        weight, wanted = model.blocks[0].up.weight, reference.blocks[0].up.weight.grad
        with pytest.raises(GradientError, match=r"infinity\.gathered") as raised:
            weight.grad.isnan()
        assert re.search(r"\d+ bytes", str(raised.value))
        with infinity.gathered(weight):  # the cure
            assert torch.equal(weight.grad.clone(), wanted)  # type: ignore[arg-type]
        with infinity.gathered(model):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert not any(g.isnan().any() for g in grads)
            assert torch.cat([g.view(-1) for g in grads]).isfinite().all()
        assert torch.equal(infinity.gradient(weight), wanted)  # type: ignore[arg-type]
    finally:
        infinity.close(optimizer)


def test_a_gradient_with_a_graph_is_read_without_one(wrapped: Wrapped) -> None:  # noqa: F811
    """In torch what is computed from it has a graph; without one a penalty would have no gradient."""
    model, _ = wrapped
    weight = model.blocks[0].up.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of create_graph
        model(tokens()).backward(create_graph=True)
    for use in (lambda: weight.grad.pow(2).sum(), lambda: weight.grad.norm(), lambda: weight.grad[0] * 2):
        with pytest.raises(GradientError, match="create_graph"):
            use()
    with torch.no_grad():  # the cure
        assert torch.equal(weight.grad.pow(2), infinity.gradient(weight).pow(2))  # type: ignore[union-attr]
    model.zero_grad()
    model(tokens()).backward()
    assert weight.grad.pow(2).sum() > 0


def test_a_read_in_a_hook_of_a_backward(wrapped: Wrapped) -> None:  # noqa: F811
    model, optimizer = wrapped
    reference, plain = build()
    seen: list[list[torch.Tensor]] = []
    for net, adam in ((model, optimizer), (reference, plain)):
        seen.append([])
        for block in net.blocks:
            for p in block.parameters():
                p.register_post_accumulate_grad_hook(lambda p, into=seen[-1]: into.append(p.grad.abs()))
        for seed in range(4):
            net(tokens(seed)).backward()
            if seed % 2:
                adam.step()
                adam.zero_grad()
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.first
@pytest.mark.parametrize("stage", quick(range(4), [1, 3]))
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
if rank == 1:
    model.last.weight.grad.add_(torch.full((8, 32), torch.nan))
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


def test_nothing_of_a_read_stays(wrapped: Wrapped) -> None:  # noqa: F811
    """A read replaces nothing: the gradient is in shards behind it, and steps as one that nobody has read."""
    model, optimizer = wrapped
    reference, plain = build()
    for seed in range(3):
        for net, adam in ((model, optimizer), (reference, plain)):
            net(tokens(seed)).backward()
            largest = max(p.grad.abs().max() for p in net.parameters() if p.grad is not None)
            nn.utils.clip_grad_value_(net.parameters(), float(largest) / 2)
            adam.step()
            adam.zero_grad()
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
