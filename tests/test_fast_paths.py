"""Fast paths of torch's own transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

from .small_models import WIDTH, Losses, budgeted, built
from .test_doors import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")


def padded(model: nn.Module, step: int) -> torch.Tensor:
    """The output of a transformer of torch's for (2, 3, WIDTH), the last place of which is padding."""
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    padding = torch.tensor([[False, False, False], [False, False, True]])
    if isinstance(model, nn.Transformer):
        return model(x, x, src_key_padding_mask=padding)  # type: ignore[no-any-return]
    return model(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


FAST: dict[str, tuple[Callable[[], nn.Module], list[str] | None]] = {
    "an encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 3), None),
    "a layer, cut": (encoder_layer, ["Linear", "LayerNorm"]),
    "encoder and decoder": (
        lambda: nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
        None,
    ),
}


@pytest.mark.first
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FAST)
def test_torch_finds_its_fast_paths(name: str, tmp_path: Path) -> None:
    """A forward of torch's own looks, before it calls them, at the weights of modules below it. A fast path
    of it has zeros where the input is padded."""
    make, units = FAST[name]

    def run(model: Any, optimizer: Any) -> Losses:
        found = []
        for step in range(2):
            loss = padded(model.train(), step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            for _ in range(2):
                with torch.no_grad():
                    found.append(padded(model.eval(), 7))
        return found

    wanted = run(*built(make))
    first = None
    for where, budget in (("nvme", "least"), ("host", "large"), ("device", "large")):
        rest = "host" if where == "device" else where
        places = {"parameters": where, "optimizer_state": rest, "gradients": rest}
        config = budgeted(make, tmp_path, budget, **places, units=units)
        model, optimizer = infinity.wrap(*built(make), config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # no more at once than planned
            found = run(model, optimizer)
        assert_close(found, wanted)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        infinity.close(model)
