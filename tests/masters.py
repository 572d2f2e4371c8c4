"""fp32 masters beside a model in the compute dtype, as the engine keeps them, in plain torch.

What an update, an edit and a load make of them is the same bit for bit. The plain worlds of the fuzzer
(fuzz/worlds.py), of several ranks (rank_training.py) and of interrupts (interrupts.py) stand on this.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from infinity.core.sizes import MOMENT_BLOCK
from infinity.hardware import adam_reference, cpu_adam, halves, log_codes, muon
from infinity.optim.rules import rule_of
from infinity.planning.parts import SQUARES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Masters:
    """The masters of all parameters of `model`, which gets the compute dtype here; its batch norms stay fp32.

    Args:
        model: in fp32.
        optimizer: torch's, with the options of each update.
        dtype: of compute.
        split: whether masters are kept in halves.
        form: that of moments: "fp32", "bf16" or "8bit".
        exact: patterns of the parameters whose moments are fp32 all the same.

    Attributes:
        values: the masters, by name, as all that follows.
        moments: as they are kept; in 8 bits the codes of all, then the scales of all.
        steps: how many updates each has had.
        split: the parameters whose masters are kept in halves.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
        *,
        split: bool = False,
        form: str = "fp32",
        exact: Collection[str] = (),
    ) -> None:
        norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        wide = {p for norm in norms for p in norm.parameters()}
        self.params = dict(model.named_parameters())
        self.optimizer, self.rule = optimizer, rule_of(optimizer)
        self.values = {name: p.detach().float().clone() for name, p in self.params.items()}
        self.moments: dict[str, list[torch.Tensor]] = {}
        self.steps = dict.fromkeys(self.params, 0)
        self.split: set[str] = set()
        self._forms = {n: "fp32" if any(fnmatchcase(n, e) for e in exact) else form for n in self.params}
        for name, param in self.params.items():
            if param not in wide and dtype is not torch.float32:
                if split and dtype is torch.bfloat16 and param.requires_grad:
                    self.split.add(name)
                param.data = self.copy(name).to(dtype)

    def copy(self, name: str) -> torch.Tensor:
        """Return what the compute parameter is rounded from."""
        return (
            self._halves(name)[0].view(self.values[name].shape) if name in self.split else self.values[name]
        )

    def _halves(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        master = self.values[name].view(-1)
        found = torch.empty(master.numel(), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
        halves.split(master, *found)
        return found

    def _group(self, name: str) -> Mapping[str, Any]:
        param = self.params[name]
        return next(g for g in self.optimizer.param_groups if any(p is param for p in g["params"]))

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the names of the moments."""
        return tuple(self.rule.of(self._group(name)).moments)

    def update(self, name: str, grad: torch.Tensor, factor: float) -> None:
        """Make one update with `grad` times `factor`."""
        group, master = self._group(name), self.values[name]
        self.steps[name] += 1
        key = cpu_adam.rounding_key(name, self.steps[name])
        moments = self.moments.get(name) or self._new_moments(name)
        self.moments[name] = moments
        if self.rule.of(group).whole:
            options = muon.Muon(*(group[of] for of in muon.Muon._fields))
            update = torch.empty(master.numel(), dtype=torch.bfloat16)
            flat = moments[0], grad.reshape(-1), update
            muon.add_to_momentum(*flat, options, grad_scale=factor, first=0, key=key)
            orthogonal = muon.orthogonalize(update.view(master.shape), options)
            scalars = {of: float(group[of]) for of in ("lr", "weight_decay")}
            muon.step_along(master, orthogonal, options, master.shape, **scalars)
            return
        segment = cpu_adam.Segment(
            *(0, master.numel(), 0, key, self.steps[name]),
            *(group["lr"], group["weight_decay"], factor),
            maximize=bool(group.get("maximize")),
            options=self.rule.options(group),
        )
        adam_reference.reference_segments(master.view(-1), moments, grad.reshape(-1), None, [segment])

    def _new_moments(self, name: str) -> list[torch.Tensor]:
        numel, count, form = self.values[name].numel(), len(self.kinds(name)), self._forms[name]
        kept = torch.uint8 if form == "8bit" else DTYPES[form]
        scales = [torch.zeros(-(-numel // MOMENT_BLOCK)) for _ in range(count if form == "8bit" else 0)]
        return [torch.zeros(numel, dtype=kept) for _ in range(count)] + scales

    def take(self, name: str, value: torch.Tensor, *, loaded: bool = False) -> None:
        """Have what somebody has put into a compute parameter. What is as it was keeps its master."""
        master = self.values[name]
        if name in self.split and not loaded:  # the lower halves stay
            flat, low = value.reshape(-1), self._halves(name)[1]
            low[(flat == 0) | ~flat.isfinite()] = 0
            halves.join(flat, low, master.view(-1))
            return
        kept = self.copy(name).to(value.dtype) == value
        master.copy_(torch.where(kept, master, value.float()))

    def wide(self, name: str) -> dict[str, torch.Tensor | None]:
        """Return moments in fp32, flat; None of what was never updated."""
        kinds, moments = self.kinds(name), self.moments.get(name)
        if not moments:
            return dict.fromkeys(kinds)
        if moments[0].dtype is torch.uint8:
            pairs = zip(kinds, moments, moments[len(kinds) :], strict=False)
            return {kind: log_codes.decode(*kept, squares=kind in SQUARES) for kind, *kept in pairs}
        return {kind: moment.float() for kind, moment in zip(kinds, moments, strict=True)}

    def saved(self) -> tuple[Any, Any, Any]:
        """Return a copy of masters, moments and steps."""
        return copy.deepcopy((self.values, self.moments, self.steps))

    def restore(self, saved: tuple[Any, Any, Any]) -> None:
        """Have what `saved` has returned."""
        self.values, self.moments, self.steps = copy.deepcopy(saved)
