"""Plain torch loops that the engine's results are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.hardware.adam_reference import reference_segments

from .device_bits import adam_segment
from .models import Case

Groups = Callable[[nn.Module], Iterable[Any]]


@dataclass
class Run:
    """What a run came to. Tensors are by parameter name, fp32 (a bf16 run's masters)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    exp_avg: dict[str, torch.Tensor] = field(default_factory=dict)
    exp_avg_sq: dict[str, torch.Tensor] = field(default_factory=dict)
    first_gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def all_parameters(model: nn.Module) -> Iterable[nn.Parameter]:
    return model.parameters()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not and learn faster."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


def batches_of(case: Case, step: int, accumulate: int) -> list[dict[str, torch.Tensor]]:
    """The batches of step `step` (from 0), taken in turn."""
    return [case.batches[(step * accumulate + i) % len(case.batches)] for i in range(accumulate)]


def train_torch(
    case: Case,
    *,
    steps: int = 30,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    groups: Groups = all_parameters,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    before_step: Callable[[torch.optim.Optimizer, int], None] | None = None,
    **options: Any,
) -> Run:
    """torch's own loop in fp32. `options` go to the optimizer; its default is lr=1e-3."""
    model, run = case.model, Run()
    adam = optimizer(groups(model), **{"lr": 1e-3, **options})
    for step in range(steps):
        total = 0.0
        for batch in batches_of(case, step, accumulate):
            loss = case.loss(model, batch) / accumulate
            loss.backward()
            total += loss.item()
        if step == 0:
            run.first_gradients = {
                n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()
            }
        if max_grad_norm is not None:
            run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
        if before_step is not None:
            before_step(adam, step)
        adam.step()
        adam.zero_grad()
        run.losses.append(total)
    named = dict(model.named_parameters())
    run.params = {n: p.detach().clone() for n, p in named.items()}
    run.buffers = {n: b.clone() for n, b in model.named_buffers()}
    return run


def train_master(
    case: Case,
    *,
    dtype: torch.dtype,
    steps: int = 30,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
) -> Run:
    """fp32 masters, forward and backward in bf16 or fp16, gradients summed in fp32. Return losses, norms,
    loss scales and the first gradients."""
    model, run = case.model, Run()
    keep = {
        p for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for p in m.parameters()
    }
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    named = dict(model.named_parameters())
    for param in named.values():
        param.data = param.data.to(torch.float32 if param in keep else dtype)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: (cast(args, dtype), cast(kwargs, dtype)), with_kwargs=True
    )
    adam = torch.optim.AdamW(masters.values(), lr=1e-3, foreach=False)
    scale = 65536.0 if dtype is torch.float16 else 1.0
    for step in range(steps):
        total, sums = 0.0, dict.fromkeys(named, None)  # type: tuple[float, dict[str, Any]]
        for batch in batches_of(case, step, accumulate):
            loss = case.loss(model, batch) / accumulate
            (loss * scale).backward()
            total += loss.item()
            for n, p in named.items():
                if p.grad is not None:
                    sums[n] = p.grad.float() if sums[n] is None else sums[n] + p.grad.float()
                    p.grad = None
        gradients = {n: g / scale for n, g in sums.items() if g is not None}
        if step == 0:
            run.first_gradients = {n: gradients.get(n) for n in named}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        run.losses.append(total)
        run.norms.append(norm)
        run.scales.append(scale)
        if not math.isfinite(norm) and dtype is torch.float16:
            scale /= 2
            continue
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
        for n, master in masters.items():
            master.grad = gradients[n] * factor if n in gradients else None
        adam.step()
        for n, p in named.items():
            p.data.copy_(masters[n])  # rounds to nearest even
    return run


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating tensor in it in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        changed = {k: cast(v, dtype) for k, v in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, (list, tuple)):
        return type(value)(cast(v, dtype) for v in value)
    return value


def beyond(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], rtol: float = 1e-5) -> int:
    """Return how many elements differ by more than `rtol` of the wanted value."""
    return sum(
        int(((found[n].float() - w.float()).abs() > rtol * w.float().abs()).sum()) for n, w in wanted.items()
    )


def adamw_reference(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Update one tensor in plain torch, with the bits of the CPU's kernel. `options`: of `adam_segment`."""
    segment = adam_segment(0, master.numel(), **options)
    reference_segments(master, (exp_avg, exp_avg_sq), grad, out, (segment,))
