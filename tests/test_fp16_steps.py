"""Steps in fp16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.core.errors import PrecisionError

from .small_models import tokens, values, wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


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
