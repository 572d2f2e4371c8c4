"""What `wrap` does with the values that there are: parameters and moments go to their tiers, buffers to the
device. With several ranks those of the first count."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.hardware.device import Device
from infinity.hardware.ranks import Comm
from infinity.optim.rules import Rule
from infinity.optim.state_io import States, bump
from infinity.optim.whole import agree_on_values
from infinity.params.unit import ParamUnit
from infinity.storage.weights import Weights

from .init import release as release_scratch
from .ranks import seed


def give_memory(model: nn.Module) -> None:
    """Move the parameters on the meta device, on ranks other than the first, to the CPU; they stay the same
    objects. Nothing touches their memory before the values arrive, so they use none. No weak reference to
    them may exist."""
    for param in model.parameters():
        if param.is_meta:
            torch.utils.swap_tensors(param, nn.Parameter(_untouched(param.detach()), param.requires_grad))


def _untouched(like: torch.Tensor) -> torch.Tensor:
    """Return memory on the CPU. What is large is a mapping of its own, which goes with its last tensor:
    malloc would keep the holes, and so the whole model, for longer than the take-over."""
    if like.nbytes < mmap.PAGESIZE:
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype)
    return flat.as_strided(like.shape, torch.empty_like(like).stride())


def take_over(
    model: nn.Module,
    state: Any,
    rule: Rule | None,
    units: Sequence[ParamUnit],
    states: States,
    device: Device,
    comm: Comm,
    weights: Weights | None,
) -> None:
    """Take the values of `units` over, one after the other; what they were in is free then. `state`: of the
    optimizer, whose `rule` that is; `weights`: where values are, if not in the parameters."""
    if weights is not None:
        weights.check()
    if comm.world > 1:  # the values are the first rank's, but all take part
        saved = {p.name: state.get(p.param) or {} for unit in units for p in unit.params}
        there: dict[str, object] = {
            f"{name}: {key}": key == "step" and int(v[key]) for name, v in saved.items() for key in v
        }
        agree_on_values(comm, "wrap with optimizer state", there)
    for unit in units:
        old = [p.param for p in unit.params]
        moments: dict[int, Mapping[str, Any]] = {}
        for sharded in unit.params:
            saved = state.get(sharded.param)
            if saved and rule is not None and sharded.spec.trainable:
                sharded.step = rule.steps(saved)
                # The options of some groups may need less than there is room for.
                lacking = dict.fromkeys(states.kinds_of(sharded), torch.zeros(()).expand(sharded.spec.shape))
                moments[sharded.index] = {**lacking, **saved}
        data = [p.data for p in old]
        states.take_over(unit, moments, weights)
        bump(unit.params)  # what a graph from before has saved of them is gone
        for param in old:
            state.pop(param, None)
        for tensor in data:
            release_scratch(tensor)
        del data
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer.is_meta:
                    buffer = torch.empty_like(buffer, device="cpu")
                module._buffers[name] = here = buffer.to(device.torch_device)
                if comm.world > 1:
                    module._buffers[name] = here = here.contiguous()
                    comm.broadcast(here.view(-1))
    if comm.world > 1:
        seed(comm)
