"""Parameters of a user's own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.core.errors import WrapError

from .offloaded import config_for

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Parameter):
    """A parameter with a method and an attribute of its own."""

    factor = 3

    def scaled(self) -> torch.Tensor:
        return self * self.factor


class Counted(Scaled):
    """One that looks at every operator."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.seen += func is torch.Tensor.mul or func is torch.Tensor.__mul__
        return super().__torch_function__(func, types, args, kwargs or {})


class Last(nn.Parameter):
    """One that nobody may derive from."""

    def __init_subclass__(cls) -> None:
        raise TypeError("this is the last")


class OfClass(nn.Module):
    """A head whose parent uses the weight, one of the classes above."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 16)
        self.head.weight = kind(self.head.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        weight: Any = self.head.weight
        return nn.functional.linear(x, weight.scaled(), self.head.bias)


@pytest.mark.parametrize("parameters", ["nvme", "device"])
@pytest.mark.parametrize("kind", [Scaled, Counted])
def test_parameters_of_a_users_class_stay_that(kind: type[Scaled], parameters: str, tmp_path: Path) -> None:
    found = []
    for offloaded in (False, True):
        model: Any = OfClass(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model.head.weight.tag = "mine"
        if offloaded:
            model, optimizer = infinity.wrap(model, optimizer, config_for(tmp_path, parameters=parameters))
        seen = Counted.seen
        for step in range(3):
            assert isinstance(model.head.weight, kind)
            assert (model.head.weight.tag, model.head.weight.factor) == ("mine", 3)
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            assert isinstance(model.head.weight, kind)
            optimizer.zero_grad()
        found.append(({n: v.clone() for n, v in model.state_dict().items()}, Counted.seen - seen))
    assert found[0][1] == found[1][1]
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], value, rtol=1e-5, atol=1e-6)
    assert type(infinity.unwrap(model).head.weight) is kind


def test_parameters_of_a_class_that_cannot_be_derived_from_are_refused(tmp_path: Path) -> None:
    model = OfClass(Last)
    with pytest.raises(WrapError, match="this is the last"):
        infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))
    assert type(model.head.weight) is Last
    model.head.weight = nn.Parameter(model.head.weight.detach())
    infinity.close(infinity.wrap(model, torch.optim.AdamW(model.parameters()), config_for(tmp_path))[0])
