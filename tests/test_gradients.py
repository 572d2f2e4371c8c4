"""Gradients, beside torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import infinity
from infinity.grads.sharded_grad import ShardedGrad

from .small_net import WIDTH, Wrapped, build, tokens, train


def test_a_graph_from_before_the_step_fails_as_in_torch(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    loss = model(tokens())
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_backwards_of_one_graph_accumulate(wrapped: Wrapped) -> None:
    model, _ = wrapped
    loss = model(tokens())
    loss.backward(retain_graph=True)
    once = infinity.gradient(model.blocks[2].up.weight)
    loss.backward()
    twice = infinity.gradient(model.blocks[2].up.weight)
    assert once is not None
    assert twice is not None
    assert torch.equal(twice, once * 2)


def test_gradients_equal_torchs(wrapped: Wrapped) -> None:
    model, _ = wrapped
    reference, _ = build()
    model(tokens()).backward()
    reference(tokens()).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
            assert infinity.gradient(a) is None
            continue
        assert isinstance(a.grad, ShardedGrad)
        assert a.grad.shape == b.grad.shape
        whole = infinity.gradient(a)
        assert whole is not None
        assert torch.equal(whole, b.grad), name


def test_torchs_clip_grad_norm_works_on_sharded_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for step in range(3):
        for m in (model, reference):
            m(tokens(step)).backward()
        a = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        b = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        assert a.item() == pytest.approx(b.item(), rel=1e-5)
        for o in (optimizer, torch_optimizer):
            o.step()
            o.zero_grad()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_norm_that_is_not_a_number_clips_as_torch_does(wrapped: Wrapped) -> None:
    """One NaN makes the coefficient NaN, and with it every gradient: nothing of it goes unnoticed."""
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m in (model, reference):
        m(tokens()).backward()
        m.blocks[2].up.bias.grad = torch.full((4 * WIDTH,), torch.nan)
    assert optimizer.clip_grad_norm_(0.1).isnan()
    assert nn.utils.clip_grad_norm_(reference.parameters(), 0.1).isnan()
    for o in (optimizer, torch_optimizer):
        o.step()
    for (name, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_zero_grad_without_none_means_zero_gradients(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        train(m, o, 1)
        m(tokens(5)).backward()
        o.zero_grad(set_to_none=False)
        o.step()  # momentum and decay go on
        o.step()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_dropping_one_gradient_skips_one_parameter(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    reference, torch_optimizer = build()
    for m, o in ((model, optimizer), (reference, torch_optimizer)):
        m(tokens()).backward()
        m.blocks[0].up.weight.grad = None
        o.step()
        m(tokens(1)).backward()
        m.blocks[1].up.bias.grad = torch.full((4 * WIDTH,), 0.5)  # a gradient of the user's own
        o.step()
    for (_, a), (_, b) in zip(model.state_dict().items(), reference.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_autograd_grad_leaves_p_grad_alone(wrapped: Wrapped) -> None:
    model, _ = wrapped
    reference, _ = build()
    with infinity.gathered(model):
        (a,) = torch.autograd.grad(model(tokens()), [model.blocks[0].up.weight])
    (b,) = torch.autograd.grad(reference(tokens()), [reference.blocks[0].up.weight])
    assert torch.equal(a, b)
    assert model.blocks[0].up.weight.grad is None
