"""What the engine's optimizers must come to: each rule on whole parameters, in plain torch.

`Whole` calls the reference of the kernels, which other tests compare with torch's optimizers. With moments in
bf16 or 8 bits (uint8) it has the bits of the stochastic rounding too, so that a run must equal it wherever
its state is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import adam_reference, cpu_adam, log_codes
from infinity.hardware.muon import Muon as Options
from infinity.optim.lion import Lion
from infinity.optim.muon import Muon
from infinity.optim.rules import rule_of
from infinity.planning.parts import SQUARES

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def muon(params: Iterable[Any], **options: Any) -> Muon:
    """Return Muon for all parameters of two dimensions, with `options`, and AdamW for the others."""
    some = [*params]
    groups = [
        {"params": [p for p in some if p.ndim == 2], "use_muon": True, "lr": 0.02, **options},
        {"params": [p for p in some if p.ndim != 2], "use_muon": False, "lr": 1e-3, "weight_decay": 0.1},
    ]
    return Muon([group for group in groups if group["params"]])


#: Optimizers of every rule, with the options that change what a rule does.
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.01),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}

#: All, and Muon, which not every reference has.
ALL_OPTIMIZERS: dict[str, Make] = {**OPTIMIZERS, "muon": muon}


class Whole:
    """Updates the parameters of a plain model in fp32, with moments in `dtype`, as `optimizer` says; those of
    the parameters `fp32` are fp32.

    Attributes:
        moments: of each parameter, by name.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
        fp32: Collection[str] = (),
    ) -> None:
        self._params, self._optimizer, self._rule = params, optimizer, rule_of(optimizer)
        self._steps = dict.fromkeys(params, 0)
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        dtypes = {name: torch.float32 if name in fp32 else dtype for name in params}
        self.moments = {
            name: {
                moment: torch.zeros(p.numel(), dtype=dtypes[name])
                for moment in self._rule.of(groups[p]).moments
            }
            for name, p in params.items()
        }
        #: Of moments in 8 bits (uint8).
        self.scales = {
            name: {kind: torch.zeros(-(-m.numel() // MOMENT_BLOCK)) for kind, m in moments.items()}
            for name, moments in self.moments.items()
            if dtypes[name] is torch.uint8
        }

    def step(self) -> None:
        """Update what has a gradient."""
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for name, param in self._params.items():
            if param.grad is None:
                continue
            self._steps[name] += 1
            step, group = self._steps[name], groups[param]
            if group.get("use_muon"):
                self._update_matrix(param, self.moments[name]["momentum_buffer"], group)
                continue
            segment = cpu_adam.Segment(
                *(0, param.numel(), 0, cpu_adam.rounding_key(name, step), step),
                *(float(group["lr"]), float(group["weight_decay"]), 1.0, bool(group.get("maximize"))),
                self._rule.options(group),
            )
            master, grad = param.data.view(-1), param.grad.reshape(-1)
            moments = [*self.moments[name].values(), *self.scales.get(name, {}).values()]
            adam_reference.reference_segments(master, moments, grad, None, [segment])

    def values(self, name: str, kind: str) -> torch.Tensor:
        """Return a moment in fp32, flat."""
        moment = self.moments[name][kind]
        if name not in self.scales:
            return moment.float()
        return log_codes.decode(moment, self.scales[name][kind], squares=kind in SQUARES)

    @staticmethod
    def _update_matrix(param: nn.Parameter, moment: torch.Tensor, group: Mapping[str, Any]) -> None:
        """Make the update that torch itself makes."""
        options = {name: group[name] for name in ("lr", "weight_decay", *Options._fields)}
        theirs = torch.optim.Muon([param], **options)
        theirs.state[param]["momentum_buffer"] = moment.view(param.shape)
        theirs.step()


def train_whole(
    model: nn.Module,
    make: Make,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    fp32: Collection[str] = (),
) -> dict[str, dict[str, torch.Tensor]]:
    """Train a plain model; return its values and moments (in fp32), by name."""
    named = dict(model.named_parameters())
    whole = Whole(named, make(model.parameters()), dtype, fp32)
    for step in range(steps):
        loss_of(model, step).backward()
        whole.step()
        model.zero_grad()
    return {
        name: {
            "value": param.detach().clone(),
            **{kind: whole.values(name, kind).view(param.shape) for kind in whole.moments[name]},
        }
        for name, param in named.items()
    }
