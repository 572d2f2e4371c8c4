"""The engine's counterpart of reference.py: the same loop through `wrap`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.api.engine import engine_of

from . import inner
from .models import Case
from .reference import Groups, Run, all_parameters, batches_of

ON_NVME = {"parameters": "nvme", "optimizer_state": "nvme", "gradients": "nvme"}
ON_HOST = {"parameters": "host", "optimizer_state": "host", "gradients": "host"}
ON_DEVICE = {"parameters": "device", "optimizer_state": "device", "gradients": "device"}
#: Parameters on the device, the rest on the host.
RESIDENT = {"parameters": "device", "optimizer_state": "host", "gradients": "host"}


def config_for(folder: Path, **settings: Any) -> infinity.Config:
    """A configuration for small models on a CPU, with everything on NVMe unless told otherwise."""
    defaults: dict[str, Any] = {
        "nvme": folder,
        "device": "cpu",
        "dtype": "fp32",
        "device_memory": "8MiB",
        "host_memory": "64MiB",
        "chunk_elements": 65536,
        **ON_NVME,
    }
    return inner.config(**{**defaults, **settings})


def wrap_adamw(model: Any, config: infinity.Config, **options: Any) -> tuple[Any, Any]:
    """Wrap `model` with an AdamW of its parameters; `options` are the optimizer's."""
    return infinity.wrap(model, torch.optim.AdamW(model.parameters(), **options), config)


def train_offloaded(
    case: Case,
    config: infinity.Config,
    *,
    steps: int = 30,
    begin: int = 0,
    accumulate: int = 1,
    groups: Groups = all_parameters,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    wrapped: Any = None,
    before_step: Any = None,
    after_step: Any = None,
    **options: Any,
) -> Run:
    """Train with the engine, from step `begin` on. Clipping is the configuration's `max_grad_norm`."""
    model, run = case.model, Run()
    model, adam = infinity.wrap(model, optimizer(groups(model), **{"lr": 1e-3, **options}), config)
    try:
        if wrapped is not None:
            wrapped(adam)
        for step in range(begin, steps):
            total = 0.0
            for batch in batches_of(case, step, accumulate):
                loss = case.loss(model, batch) / accumulate
                adam.scale(loss).backward()
                total += loss.item()
            if step == 0:
                run.first_gradients = {n: infinity.gradient(p) for n, p in model.named_parameters()}
            if before_step is not None:
                before_step(adam, step)
            run.scales.append(adam.loss_scale)
            adam.step()
            adam.zero_grad()
            run.losses.append(total)
            run.norms.append(infinity.metrics(adam)["grad_norm"])
            if after_step is not None:
                after_step(adam, step)
        engine = engine_of(model)
        run.buffers = {n: b.cpu().clone() for n, b in model.named_buffers()}
        for name, param in model.named_parameters():
            sharded = engine.params[param]
            run.copies[name] = engine.states.copies_of([sharded])[sharded]
            state = engine.states.read([sharded])[sharded]
            run.params[name] = state.get("master", run.copies[name])
            if sharded.step:
                run.exp_avg[name] = state["exp_avg"]
                run.exp_avg_sq[name] = state["exp_avg_sq"]
    finally:
        infinity.close(adam)
    return run


def assert_same(found: Run, wanted: Run) -> None:
    """Bit for bit."""
    assert found.losses == wanted.losses
    assert found.norms == wanted.norms
    assert found.scales == wanted.scales
    for kind in ("params", "copies", "exp_avg", "exp_avg_sq", "buffers"):
        a, b = getattr(found, kind), getattr(wanted, kind)
        assert a.keys() == b.keys(), kind
        for name, value in b.items():
            assert torch.equal(a[name], value), (kind, name)


def hooks_on_saved_tensors() -> bool:
    """Whether hooks are pushed: what autograd saves has them then, and takes no others."""
    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        squared = x * x
    try:
        squared.grad_fn._raw_saved_self.register_hooks(  # type: ignore[union-attr]
            lambda tensor: tensor, lambda tensor: tensor
        )
    except RuntimeError:
        return True
    return False
