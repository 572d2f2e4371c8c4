"""Models that train as `infinity plan` was told, so that what it says can be held to what happens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import infinity
from infinity.cli.case import Case
from infinity.cli.plan import plan_command
from infinity.cli.settings import RunSettings, read_run
from infinity.optim.muon import inner_matrices
from infinity.planning.planner import Plan

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "lion": infinity.optim.Lion,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "muon": infinity.optim.Muon,
}


def settings_of(arguments: Sequence[str]) -> RunSettings:
    """Return the run that the arguments of `infinity plan` describe."""
    return read_run(plan_command.make_context("plan", [*arguments]).params)


def groups_of(model: nn.Module, optimizer: str) -> list[dict[str, Any]]:
    """Return the param groups that a plan counts with: inner matrices with Muon, other matrices, vectors."""
    inner = {id(p) for p in inner_matrices(model)} if optimizer == "muon" else set()
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for param in model.parameters():
        kinds.setdefault((id(param) not in inner, param.ndim < 2), []).append(param)
    return [
        {"params": params, "lr": 1e-3} | ({"use_muon": not others} if optimizer == "muon" else {})
        for (others, _), params in sorted(kinds.items(), key=lambda item: item[0])
    ]


class Planned:
    """A model of transformers, its optimizer, and the plan that it was built by."""

    def __init__(self, case: Case, plan: Plan) -> None:
        from transformers import AutoModelForCausalLM

        run = case.run
        self.case, self.plan, self._train = case, plan, run.train
        torch.manual_seed(0)
        with infinity.init(case.config):
            model = AutoModelForCausalLM.from_config(case.workload.hf_config)
        if run.train.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        made = OPTIMIZERS[run.train.optimizer](groups_of(model, run.train.optimizer))
        self.model, self.optimizer = infinity.wrap(model, made, case.config)
        self.step_number = 0

    def step(self) -> float:
        """Make a step; return its loss."""
        total = 0.0
        for micro in range(self._train.accumulation):
            drawn = torch.Generator().manual_seed(self.step_number * 100 + micro)
            shape = (self._train.batch, self._train.sequence)
            ids = torch.randint(self.model.config.vocab_size, shape, generator=drawn)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / self._train.accumulation
            self.optimizer.scale(loss).backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1
        return total


@contextlib.contextmanager
def planned(*arguments: str, **more: Any) -> Iterator[Planned]:
    """Lend the model that the arguments of `infinity plan` describe. It fits."""
    case = Case(settings_of(arguments), **more)
    plan = case.plan()
    assert plan.fits
    made = Planned(case, plan)
    try:
        yield made
    finally:
        infinity.close(made.optimizer)
