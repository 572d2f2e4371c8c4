"""Values of models that are built for their size: random numbers that repeat.

torch draws random numbers on one core, for models of billions of parameters longer than they are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Numbers that are drawn: of these all values are made.
PERIOD = 1 << 20


class Repeated(TorchFunctionMode):
    """Inside of it `normal_` and `uniform_` draw `PERIOD` numbers once, and repeat them."""

    def __init__(self) -> None:
        super().__init__()
        self._normal = torch.randn(PERIOD)
        self._uniform = torch.rand(PERIOD)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.normal_:
            return self._normally(*args, **(kwargs or {}))
        if func is torch.Tensor.uniform_:
            return self._uniformly(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _normally(self, target: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
        return _repeat(target, self._normal * std + mean)

    def _uniformly(self, target: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> Any:
        return _repeat(target, self._uniform * (high - low) + low)


def _repeat(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    flat = target.view(-1)
    whole = flat.numel() // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).copy_(values)
    flat[whole:].copy_(values[: flat.numel() - whole])
    return target
