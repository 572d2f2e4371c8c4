"""Lion (arXiv 2302.06675, algorithm 2), for programs that have no library with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from infinity.core.errors import ConfigError


class Lion(torch.optim.Optimizer):
    """Lion: steps of one size, in the direction of the sign of a momentum. It keeps one moment, ``exp_avg``.

    p ← p · (1 − lr · weight_decay) − lr · sign(β₁ · m + (1 − β₁) · g), then m ← β₂ · m + (1 − β₂) · g.
    The paper recommends a learning rate 3 to 10 times smaller than AdamW's, and a weight decay as many times
    larger. `infinity.wrap` offloads it; without `wrap` it runs as any optimizer of torch.

    Args:
        params: parameters, or dicts that define param groups.
        lr: the learning rate.
        betas: β₁ and β₂, in [0, 1).
        weight_decay: decoupled, as in AdamW.
        maximize: ascend.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(
                "these options of Lion are wrong",
                expected="lr ≥ 0, weight_decay ≥ 0, betas in [0, 1)",
                found=f"lr={lr}, betas={betas}, weight_decay={weight_decay}",
                cure="Lion(params, lr=1e-4, betas=(0.9, 0.99))",
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param)
                moment = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(moment.mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                moment.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss
