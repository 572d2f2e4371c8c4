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


def test_a_grad_scaler_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(tokens(0))).backward()
    with pytest.raises(PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


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
