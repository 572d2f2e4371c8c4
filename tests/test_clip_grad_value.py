"""`clip_grad_value_`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import infinity

from .quick import covering
from .small_models import HeadModel, Losses, built, tokens, values, wrapped
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


@covering
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("gradients", ["device", "host", "nvme"])
@pytest.mark.parametrize("update", ["sync", "overlap", "delayed"])
def test_clip_grad_value(update: str, gradients: str, foreach: bool | None, tmp_path: Path) -> None:
    def run(model: Any, optimizer: Any, gradient: Any) -> Losses:
        found = []
        for step in range(3):
            model(tokens(step)).backward()
            model(tokens(step + 10)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters(), 0.002, foreach=foreach)
            found += [gradient(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    model, optimizer = built(HeadModel)
    wanted = [*run(model, optimizer, lambda p: p.grad.clone()), *(p.detach() for p in model.parameters())]
    model, optimizer = wrapped(tmp_path, gradients=gradients, update=update)
    assert_close([*run(model, optimizer, infinity.gradient), *values(model)], wanted)
    infinity.close(model)


def test_clip_grad_value_hides_no_overflow(tmp_path: Path) -> None:
    model, optimizer = wrapped(tmp_path, dtype="fp16", loss_scale=2.0**24)
    optimizer.scale(model(tokens(0)) * 1e6).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    infinity.close(model)
