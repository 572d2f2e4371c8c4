"""Autocast, GradScaler and the loss scale."""

from __future__ import annotations

import pytest
import torch

import infinity
from infinity.core.errors import PrecisionError

from .small_net import Wrapped, build, tokens


def test_autocast_and_grad_scaler_are_refused(wrapped: Wrapped) -> None:
    model, optimizer = wrapped
    with pytest.raises(PrecisionError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(tokens())).backward()
    with pytest.raises(PrecisionError, match="GradScaler"):
        scaler.step(optimizer)


def test_fp16_without_scale_is_refused(config: infinity.Config) -> None:
    model, optimizer = infinity.wrap(*build(), config.replace(dtype="fp16"))
    model(tokens()).backward()
    with pytest.raises(PrecisionError, match="scale"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.scale(model(tokens())).backward()
    optimizer.step()
    infinity.close(optimizer)
