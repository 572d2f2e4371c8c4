"""What each rank runs in test_ranks.py: a training with several ranks, and the same in plain torch.

    python -m tests.rank_training JSON      (under torchrun's environment)

The reference has one copy of the model for each rank, in one process: it adds up their gradients as
[Note: one order of sums] says, and updates with the kernel's reference in plain torch. Losses, values and
moments are compared bit for bit; norms to 1e-12, because they are summed in another order.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from typing import Any

import torch
from torch import nn

import infinity
from infinity.hardware import adam_reference

from .models import Case, case
from .reference import all_parameters, cast, two_groups

LR = 1e-3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def batches(made: Case, step: int, turn: int, accumulate: int, rank: int, world: int) -> Any:
    """The batch of one rank in one of a step's backwards."""
    return made.batches[((step * accumulate + turn) * world + rank) % len(made.batches)]


def train(settings: dict[str, Any], rank: int, world: int) -> tuple[dict[str, Any], list[float]]:
    """Train with the engine; return what is known of each parameter, and the norms."""
    made = case(settings["model"], **settings.get("sizes", {}))
    if rank:
        with torch.no_grad():
            for param in made.model.parameters():  # the first rank's values count
                param.add_(1)
    freeze(made.model, settings)
    torch.manual_seed(5)
    groups = two_groups if settings.get("groups") else all_parameters
    adam = torch.optim.AdamW(groups(made.model), lr=LR)
    config = infinity.Config(**settings["config"], max_grad_norm=settings.get("clip"))
    model, optimizer = infinity.wrap(made.model, adam, config)
    accumulate, losses, norms = settings.get("accumulate", 1), [], []
    for step in range(settings["steps"]):
        for turn in range(accumulate):
            loss = made.loss(model, batches(made, step, turn, accumulate, rank, world)) / accumulate
            optimizer.scale(loss).backward()
            losses.append(loss.item())
        if settings.get("clip_by_torch"):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings["clip_by_torch"])))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not settings.get("zeros"))
        if settings.get("evaluates"):
            model.eval()
            with torch.no_grad():
                made.loss(model, batches(made, step + rank, 0, accumulate, rank, world))
            model.train()
        norms += [] if settings.get("clip_by_torch") else [optimizer.grad_norm or 0.0]
    found: dict[str, Any] = {"losses": losses}
    states = optimizer.state_dict()["state"]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    names = {p: n for n, p in model.named_parameters()}
    found["moments"] = {
        names[p]: (s["exp_avg"], s["exp_avg_sq"]) for i, p in enumerate(params) if (s := states.get(i))
    }
    found["values"] = {n: v.clone() for n, v in model.state_dict().items()}
    infinity.close(optimizer)
    return found, norms


def freeze(model: nn.Module, settings: dict[str, Any]) -> None:
    """Freeze the parameters whose names begin so."""
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(tuple(settings.get("frozen", ["-"]))))


def reference(settings: dict[str, Any], world: int, norms: list[float]) -> list[dict[str, Any]]:
    """The same in plain torch; what each rank finds. `norms`: those by which gradients are clipped."""
    made = case(settings["model"], **settings.get("sizes", {}))
    freeze(made.model, settings)
    dtype = DTYPES[settings["config"]["dtype"]]
    keep = {
        p
        for m in made.model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        for p in m.parameters()
    }
    masters = {n: p.detach().float().clone() for n, p in made.model.named_parameters()}
    for param in made.model.parameters():
        param.data = param.data.to(torch.float32 if param in keep else dtype)
    models = [copy.deepcopy(made.model) for _ in range(world)]
    for model in models:
        model.register_forward_pre_hook(lambda _, a, k: (cast(a, dtype), cast(k, dtype)), with_kwargs=True)
        model.register_forward_hook(lambda _, a, out: cast(out, torch.float32))
    groups = (two_groups if settings.get("groups") else all_parameters)(made.model)
    adam = torch.optim.AdamW(groups, lr=LR)
    names = {p: n for n, p in made.model.named_parameters()}
    scalars = {names[p]: g for g in adam.param_groups for p in g["params"] if p.requires_grad}
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    steps = dict.fromkeys(masters, 0)
    random = []
    for rank in range(world):
        torch.manual_seed(5 + rank)
        random.append(torch.get_rng_state())
    losses: list[list[float]] = [[] for _ in models]
    accumulate = settings.get("accumulate", 1)
    scale = 65536.0 if dtype is torch.float16 else 1.0
    for step in range(settings["steps"]):
        grads: dict[str, torch.Tensor] = {}
        declared = settings["config"].get("accumulation") or accumulate
        waits = settings["config"].get("zero_stage", 3) < 2 and accumulate > 1 and declared >= accumulate
        waiting: list[dict[str, torch.Tensor]] = [{} for _ in models]  # of each rank, in stages 0 and 1
        for turn in range(accumulate):
            for rank, model in enumerate(models):
                torch.set_rng_state(random[rank])
                loss = made.loss(model, batches(made, step, turn, accumulate, rank, world)) / accumulate
                (loss * scale).backward()
                losses[rank].append(loss.item())
                random[rank] = torch.get_rng_state()
            for name in masters:
                mine = [m.get_parameter(name) for m in models]
                if all(p.grad is None for p in mine):
                    continue
                if waits:
                    for param, sums in zip(mine, waiting, strict=True):
                        if param.grad is not None:
                            sums[name] = sums.get(name, torch.zeros(())) + param.grad.float()
                        param.grad = None
                    continue
                total = torch.zeros(mine[0].shape)
                for param in mine:
                    total = total + (param.grad.float() if param.grad is not None else 0)
                    param.grad = None
                mean = total / world
                if name in grads:
                    grads[name] = grads[name].float() + mean
                else:
                    grads[name] = mean.to(mine[0].dtype)
        for name in {n: None for sums in waiting for n in sums}:
            total = torch.zeros(masters[name].shape)
            for sums in waiting:
                total = total + sums.get(name, torch.zeros(()))
            grads[name] = total / world
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values())) / scale
        assert math.isclose(norm, norms[step], rel_tol=1e-9) or not math.isfinite(norm), (norm, norms[step])
        if not math.isfinite(norm):
            scale /= 2
            continue
        limit = settings.get("clip")
        clip = 1.0 if limit is None else min(1.0, limit / (norms[step] + 1e-6))
        for name, grad in grads.items():
            group, steps[name] = scalars[name], steps[name] + 1
            first, second = moments.setdefault(name, (torch.zeros(grad.shape), torch.zeros(grad.shape)))
            adam_reference.adamw_reference(
                masters[name].view(-1), first.view(-1), second.view(-1), grad.reshape(-1), None,
                lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                weight_decay=group["weight_decay"], step=steps[name], grad_scale=1.0 / scale * clip,
            )  # fmt: skip
            for model in models:
                model.get_parameter(name).data.copy_(masters[name])
    return [
        {"losses": mine, "moments": moments, "values": dict(model.state_dict())}
        for mine, model in zip(losses, models, strict=True)
    ]


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Every bit."""
    assert found["losses"] == wanted["losses"], (found["losses"], wanted["losses"])
    assert found["values"].keys() == wanted["values"].keys()
    for name, value in wanted["values"].items():
        assert torch.equal(found["values"][name], value), f"values of {name}"
    assert found["moments"].keys() == wanted["moments"].keys()
    for name, pair in wanted["moments"].items():
        for kind, mine, other in zip(("exp_avg", "exp_avg_sq"), found["moments"][name], pair, strict=True):
            assert torch.equal(mine, other), f"{kind} of {name}"


def main() -> None:
    """Train, and compare what this rank has found."""
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found, norms = train(settings, rank, world)
    compare(found, reference(settings, world, norms)[rank])
    sys.stdout.write("same\n")


if __name__ == "__main__":
    main()
