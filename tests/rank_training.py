"""What each rank runs in test_ranks.py: a training with several ranks, and the same in plain torch.

    python -m tests.rank_training JSON      (under torchrun's environment)

The reference has one copy of the model for each rank, in one process: it adds up their gradients as
[Note: one order of sums] says, and updates with the kernel's reference in plain torch. Losses, what the model
answers between steps, values and state are compared bit for bit; norms to 1e-12, because they are summed in
another order.

Settings are `model`, `sizes`, `adapters`, `frozen`, `groups`, `optimizer` (of `whole.ALL_OPTIMIZERS`),
`clip`, `config`, and either `steps` and `accumulate`, or a `program`: what each step does,
as `one_step` and `between` have it, and then

    edits: factors of the parameters that are edited, and `source`: the rank whose edits are kept, in a
        `gathered` block; without it each rank edits all that it has.
    loads: factors of the parameters whose values are loaded, in a model's state dict that has these alone.
    masters: factors of the parameters whose masters are loaded, in an optimizer's state dict that has no
        others.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import infinity
from infinity.api.engine import engine_of

from . import inner
from .masters import DTYPES, Masters
from .models import VOCABULARY, Case, case
from .reference import all_parameters, cast, two_groups
from .whole import ALL_OPTIMIZERS

LR = 1e-3
Step = dict[str, Any]


def program(settings: dict[str, Any]) -> list[Step]:
    """Return what each step does."""
    turns = settings.get("accumulate", 1)
    given: list[Step] | None = settings.get("program")
    return [{"turns": turns} for _ in range(settings["steps"])] if given is None else given


def batch(made: Case, number: int, step: Step, turn: int, rank: int, world: int) -> Any:
    """The batch of one rank in one of a step's forwards."""
    return made.batches[((number * step["turns"] + turn) * world + rank) % len(made.batches)]


def one_step(
    made: Case,
    model: nn.Module,
    step: Step,
    number: int,
    rank: int,
    world: int,
    backward: Callable[[torch.Tensor, bool], None],
) -> Iterator[float]:
    """Do a step's forwards and backwards as one rank; yield the losses. `backward` gets a loss, and whether
    it is the step's last.

    A step has `turns` forwards, and

        shape: "apart", a backward behind each; "sum", one of the sum of all losses; "together", first all
            forwards, then all backwards, the last one first.
        depths: how many blocks each rank uses in each forward.
        zeros: the ranks whose loss is multiplied by 0, in each forward.
    """
    turns, shape = step["turns"], step.get("shape", "apart")
    losses = []
    for turn in range(turns):
        if "depths" in step:
            model.depth = step["depths"][turn][rank]  # type: ignore[assignment]
        loss = made.loss(model, batch(made, number, step, turn, rank, world)) / turns
        if rank in step.get("zeros", [[]] * turns)[turn]:
            loss = loss * 0
        yield loss.item()
        if shape == "apart":
            backward(loss, turn == turns - 1)
        else:
            losses.append(loss)
    if shape == "sum":
        backward(sum(losses[1:], losses[0]), True)
    for left in range(len(losses) if shape == "together" else 0, 0, -1):
        backward(losses.pop(), left == 1)
    if "depths" in step:
        model.depth = None  # type: ignore[assignment]


def between(
    made: Case, model: Any, step: Step, what: str, dtype: torch.dtype, rank: int, *, synced: bool
) -> Iterator[float]:
    """Use the model behind a step; yield what can be compared.

    what: "evaluate", all ranks, with as many blocks as in the step's first forward; "evaluate alone", the
        first rank; "generate", in a loop that feeds tokens back; "module", a part of the model, by itself.
    synced: whether `generate` of transformers does the same on all ranks until the last one's text has ended.
    """
    if what == "evaluate alone" and rank:
        return
    model.eval()
    device = next(iter(made.batches[0].values())).device
    with torch.no_grad():
        if what.startswith("evaluate"):
            model.depth = step["depths"][0][rank] if "depths" in step else None
            yield made.loss(model, made.batches[rank]).item()
            model.depth = None
        elif what == "generate" and hasattr(model, "generate"):
            tokens = torch.arange(rank + 1, rank + 4, device=device)[None]
            made_of = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "synced_gpus": synced}
            yield from model.generate(input_ids=tokens, **made_of)[0].tolist()
        elif what == "generate":
            tokens = torch.arange(rank, rank + 3, device=device)[None] % VOCABULARY
            for _ in range(3):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
            yield from tokens[0].tolist()
        elif what == "module":
            part, width = model.head, model.head.in_features
            x = torch.linspace(-1, 1, 2 * width, dtype=dtype).view(2, width).to(device)
            yield part(x).double().sum().item()
    model.train()


def edit(params: Mapping[str, torch.Tensor], edits: Mapping[str, float], rank: int) -> None:
    """Change every third element of some parameters, on each rank to something else."""
    with torch.no_grad():
        for name, factor in edits.items():
            params[name].view(-1)[::3].mul_(factor).add_(0.01 * rank)


def optimizer_of(settings: dict[str, Any], groups: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer of the settings over `groups`."""
    name = settings.get("optimizer")
    return torch.optim.AdamW(groups, lr=LR) if name is None else ALL_OPTIMIZERS[name](groups)


def load_values(model: Any, factors: Mapping[str, float]) -> None:
    """Load a multiple of the values of some parameters."""
    values = model.state_dict()
    model.load_state_dict({name: values[name] * factor for name, factor in factors.items()}, strict=False)


def load_masters(optimizer: Any, names: Mapping[Any, str], factors: Mapping[str, float]) -> None:
    """Load the state as it is, but of masters a multiple of some."""
    saved = optimizer.state_dict()
    ordered = [names[p] for g in optimizer.param_groups for p in g["params"]]
    for index, state in saved["state"].items():
        master = state.pop("master", None)
        if master is not None and ordered[index] in factors:
            state["master"] = master * factors[ordered[index]]
    optimizer.load_state_dict(saved)


def train(settings: dict[str, Any], rank: int, world: int) -> tuple[dict[str, Any], list[float]]:
    """Train with the engine; return what is known of each parameter, and the norms."""
    made = built(settings)
    if rank:
        with torch.no_grad():
            for param in made.model.parameters():  # the first rank's values count
                param.add_(1)
    torch.manual_seed(5)
    groups = two_groups if settings.get("groups") else all_parameters
    adam = optimizer_of(settings, groups(made.model))
    config = inner.config(**settings["config"], max_grad_norm=settings.get("clip"))
    model, optimizer = infinity.wrap(made.model, adam, config)
    params, engine = dict(model.named_parameters()), engine_of(optimizer)
    dtype = DTYPES[settings["config"]["dtype"]]
    made = at(made, model)
    names = {p: n for n, p in params.items()}
    found: dict[str, Any] = {"losses": [], "units": {n: engine.params[p].unit for n, p in params.items()}}
    norms: list[float] = []
    for number, step in enumerate(program(settings)):

        def backward(loss: torch.Tensor, last: bool, step: Step = step) -> None:
            with model.no_sync() if step.get("no_sync") and not last else contextlib.nullcontext():
                optimizer.scale(loss).backward()

        found["losses"] += one_step(made, model, step, number, rank, world, backward)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not settings.get("zeros"))
        norms.append(optimizer.grad_norm or 0.0)
        for what in step.get("between", []):
            found["losses"] += between(made, model, step, what, dtype, rank, synced=True)
        if (source := step.get("source")) is not None:
            with infinity.gathered([params[n] for n in step["edits"]], write=True, source=source):
                edit(params, step["edits"], rank)
        elif "edits" in step:
            edit(params, step["edits"], 0)
        if "loads" in step:
            load_values(model, step["loads"])
        if "masters" in step:
            load_masters(optimizer, names, step["masters"])
    states = optimizer.state_dict()["state"]
    ordered = [p for g in optimizer.param_groups for p in g["params"]]
    found["state"] = {names[p]: state for i, p in enumerate(ordered) if (state := states.get(i))}
    found["values"] = {n: v.cpu().clone() for n, v in model.state_dict().items()}
    infinity.close(optimizer)
    return found, norms


def at(made: Case, model: nn.Module) -> Case:
    """Return a case with its batches where the parameters of `model` are."""
    device = next(model.parameters()).device
    return dataclasses.replace(
        made, batches=[{name: value.to(device) for name, value in batch.items()} for batch in made.batches]
    )


def built(settings: dict[str, Any]) -> Case:
    """Return the model, with adapters of PEFT and parameters frozen as the settings say."""
    made = case(settings["model"], **settings.get("sizes", {}))
    if "adapters" in settings:
        from .test_ecosystem import adapted

        made = dataclasses.replace(made, model=adapted(settings["adapters"]))
    for name, param in made.model.named_parameters():
        if name.startswith(tuple(settings.get("frozen", ()))):
            param.requires_grad_(False)
    return made


class Sums:
    """The gradients of one step, as all ranks have them: see [Note: one order of sums].

    `came`: of one backward, for each rank, what has arrived of each parameter; several for one where
    reentrant checkpointing ends a unit's backward several times.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], units: Mapping[str, int], world: int) -> None:
        self.grads: dict[str, torch.Tensor] = {}
        self._params, self._units, self._world = params, units, world
        self._waiting: dict[int, list[dict[str, torch.Tensor]]] = {}  # of each unit, by rank
        self._wide: set[int] = set()

    def add(self, came: list[dict[str, list[torch.Tensor]]], *, reduced: bool) -> None:
        for end in range(max((len(g) for of in came for g in of.values()), default=0)):
            for rank, of in enumerate(came):
                some = {name: g[end].float() for name, g in of.items() if len(g) > end}
                for unit in {self._units[n] for n in some}:
                    sums = self._waiting.setdefault(unit, [{} for _ in range(self._world)])[rank]
                    if sums:
                        self._wide.add(unit)
                    for name, grad in some.items():
                        if self._units[name] == unit:
                            sums[name] = sums.get(name, torch.zeros(())) + grad
            if reduced:
                self.reduce()

    def reduce(self) -> None:
        """Add up what waits."""
        for unit, waiting in self._waiting.items():
            for name in {n: None for sums in waiting for n in sums}:
                total = torch.zeros(self._params[name].shape)
                for sums in waiting:
                    total = total + sums.get(name, torch.zeros(()))
                mean = total / self._world
                if name in self.grads:
                    self.grads[name] = self.grads[name].float() + mean
                else:
                    self.grads[name] = mean if unit in self._wide else mean.to(self._params[name].dtype)
        self._waiting.clear()
        self._wide.clear()


def reference(
    settings: dict[str, Any], world: int, norms: list[float], units: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The same in plain torch; what each rank finds. `norms`: those by which gradients are clipped; `units`:
    the unit of each parameter."""
    made, given = built(settings), settings["config"]
    dtype = DTYPES[given["dtype"]]
    groups = (two_groups if settings.get("groups") else all_parameters)(made.model)
    masters = Masters(
        *(made.model, optimizer_of(settings, groups), dtype),
        split=bool(given.get("split_master")),
        form=given.get("optimizer_state_dtype", "fp32"),
        exact=given.get("optimizer_state_fp32", ()),
    )
    models = [copy.deepcopy(made.model) for _ in range(world)]
    came: dict[str, list[torch.Tensor]] = {}  # of one rank, in one backward
    for model in models:
        model.register_forward_pre_hook(lambda _, a, k: (cast(a, dtype), cast(k, dtype)), with_kwargs=True)
        for name, param in model.named_parameters():

            def take(param: torch.Tensor, name: str = name) -> None:
                came.setdefault(name, []).append(param.grad)  # type: ignore[arg-type]
                param.grad = None

            if param.requires_grad:
                param.register_post_accumulate_grad_hook(take)
    random = []
    for rank in range(world):
        torch.manual_seed(5 + rank)
        random.append(torch.get_rng_state())
    losses: list[list[float]] = [[] for _ in models]
    scale = 65536.0 if dtype is torch.float16 else 1.0
    declared = given.get("accumulation")
    at_once = given.get("zero_stage", 3) >= 2
    zeros: dict[str, torch.Tensor] = {}  # left by zero_grad(set_to_none=False)

    def show(name: str) -> None:
        for model in models:
            model.get_parameter(name).data.copy_(masters.copy(name))

    for number, step in enumerate(program(settings)):
        backwards: list[list[dict[str, list[torch.Tensor]]]] = [[] for _ in models]
        for rank, model in enumerate(models):

            def backward(
                loss: torch.Tensor, last: bool, mine: list[Any] = backwards[rank], scale: float = scale
            ) -> None:
                came.clear()
                (loss * scale).backward()
                mine.append(dict(came))

            torch.set_rng_state(random[rank])
            losses[rank] += one_step(made, model, step, number, rank, world, backward)
            random[rank] = torch.get_rng_state()
        sums = Sums(dict(models[0].named_parameters()), units, world)
        for count, of_ranks in enumerate(zip(*backwards, strict=True), 1):
            apart = step.get("no_sync") and count < len(backwards[0])
            last = declared is not None and count % declared == 0 and not apart
            sums.add(list(of_ranks), reduced=at_once or last)
        sums.reduce()
        grads = {n: g for n, g in zeros.items() if n not in sums.grads} | sums.grads
        zeros = {n: torch.zeros_like(g) for n, g in grads.items()} if settings.get("zeros") else {}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values())) / scale
        said = norms[number]
        assert math.isclose(norm, said, rel_tol=1e-9) or not math.isfinite(norm), (number, norm, said)
        if math.isfinite(norm):
            limit = settings.get("clip")
            clip = 1.0 if limit is None else min(1.0, limit / (said + 1e-6))
            for name, grad in grads.items():
                masters.update(name, grad, 1.0 / scale * clip)
                show(name)
        else:
            scale /= 2
        for what in step.get("between", []):
            for rank, model in enumerate(models):
                losses[rank] += between(made, model, step, what, dtype, rank, synced=False)
        source = step.get("source") or 0
        edited = dict(copy.deepcopy(models[source]).named_parameters())
        edit(edited, step.get("edits", {}), source)
        changed = {name: edited[name].detach() for name in step.get("edits", {})}
        loads = step.get("loads", {})
        for values in (changed, loads):
            for name, value in values.items():
                before = models[source].get_parameter(name).detach()
                after = before * value if isinstance(value, float) else value
                masters.take(name, after, loaded=values is loads)
                show(name)
        for name, factor in step.get("masters", {}).items():
            param = models[0].get_parameter(name)
            if param.requires_grad and param.dtype is not torch.float32:
                masters.values[name].mul_(factor)
                show(name)
    state = {}
    for name, param in models[0].named_parameters():
        updated = name in masters.moments
        if updated or (param.requires_grad and param.dtype is not torch.float32):
            moments = {
                kind: torch.zeros(param.shape) if moment is None else moment.view(param.shape)
                for kind, moment in masters.wide(name).items()
            }
            state[name] = {"step": torch.tensor(float(masters.steps[name])), **moments}
        if param.requires_grad and param.dtype is not torch.float32:
            state[name]["master"] = masters.values[name]
    return [
        {"losses": mine, "state": state, "values": dict(model.state_dict())}
        for mine, model in zip(losses, models, strict=True)
    ]


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Every bit."""
    assert found["losses"] == wanted["losses"], (found["losses"], wanted["losses"])
    assert found["values"].keys() == wanted["values"].keys()
    for name, value in wanted["values"].items():
        assert torch.equal(found["values"][name], value), f"values of {name}"
    assert found["state"].keys() == wanted["state"].keys()
    for name, state in wanted["state"].items():
        assert found["state"][name].keys() == state.keys()
        for kind, value in state.items():
            assert torch.equal(found["state"][name][kind], value), f"{kind} of {name}"


def check(settings: dict[str, Any], rank: int, world: int) -> None:
    """Train, and compare what this rank has found."""
    # Some CPUs have a kernel of their own for an LSTM in fp16 without gradients, with bits that no other
    # device has.
    lagging = sys.modules.get("tests.lagging.cuda")
    apart = settings["model"] == "lstm" and lagging is not None and lagging._world is not None
    enabled = torch.backends.mkldnn.is_available() and not apart
    with torch.backends.mkldnn.flags(enabled=enabled):
        found, norms = train(settings, rank, world)
        compare(found, reference(settings, world, norms, found["units"])[rank])


def main() -> None:
    """`check` what is given."""
    torch.set_num_threads(1)
    check(json.loads(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    sys.stdout.write("same\n")


if __name__ == "__main__":
    main()
