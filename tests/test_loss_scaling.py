"""GradScaler, the loss scale and steps in fp16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import PrecisionError

from .small_models import tokens, values, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_grad_scaler_unscales(tmp_path: Path) -> None:
    """As around a plain model: a factor, and a step that overflows is skipped."""
    results = []
    for scaled in (True, False):
        model, optimizer = wrapped(tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            scaler.scale(model(tokens(number)) * factor).backward()
            if factor == 1.0 or scaled:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert bool(norm.isfinite()) == (factor == 1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert optimizer.steps == 2
        results.append(values(model))
        infinity.close(model)
    assert all(map(torch.equal, *results))


def test_fp16_without_scale_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="fp16")
    model(tokens(0)).backward()
    with pytest.raises(PrecisionError, match="scale"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.scale(model(tokens(0))).backward()
    optimizer.step()


def test_a_second_fp16_step_on_the_same_gradients(tmp_path: Path) -> None:
    """As with one whose gradients stay; an unscaled backward is found as before."""
    results = []
    for dtype in ("fp32", "fp16"):
        model, optimizer = wrapped(tmp_path, dtype=dtype, loss_scale=128.0)
        optimizer.scale(model(tokens(0))).backward()
        optimizer.step()
        optimizer.step()
        results.append([v.float() for v in values(model)])
        if dtype == "fp16":
            model(tokens(1)).backward()
            with pytest.raises(PrecisionError, match="not scaled"):
                optimizer.step()
        infinity.close(model)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_clip_grad_value_hides_no_overflow(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="fp16", loss_scale=2.0**24)
    optimizer.scale(model(tokens(0)) * 1e6).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    assert optimizer.skipped_steps == 1
