"""What `verify` trains and compares: a small GPT, by the engine in one case or by plain torch.

The training has what makes bits differ where something waits too little: norms that clip in some steps
and not in others, one to three backwards per step, two param groups, a learning rate that is edited
before each step, and with fp16 losses that overflow.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from infinity.api.engine import engine_of
from infinity.api.metrics import metrics
from infinity.api.wrap import close, wrap
from infinity.core.config import Config
from infinity.core.sizes import NORM_BLOCK, parse_dtype
from infinity.hardware import cpu_adam

from .model import GPT
from .shape import GPTShape

SHAPE: Final = GPTShape(layers=2, width=128, heads=4, vocab=256, context=32)
STEPS: Final = 8
MOST: Final = 3  # backwards of a step
CLIP: Final = 4.0  # norms of this training lie on both sides
#: What a delayed update needs to be seen: some steps before it, some after.
_WARMUP: Final[dict[str, Any]] = {"delay_warmup_steps": 3}
#: fp16 overflows with this scale and not with what it falls to.
_FP16: Final[dict[str, Any]] = {"loss_scale": 2.0**19, "loss_scale_window": 2}
_SETTINGS: Final[dict[str, Any]] = {
    "device_memory": "16MiB",
    "host_memory": "96MiB",
    "chunk_elements": NORM_BLOCK,
    "max_grad_norm": CLIP,
}
#: What an update behind the backward needs: it is known which backward is a step's last, and nothing that
#: is known only when that one is over changes the step.
BEHIND: Final[dict[str, Any]] = {"accumulation": 2, "max_grad_norm": None}


@dataclass(frozen=True)
class Case:
    """One way to train. `settings` are of `Config`; `isa` of the CPU's Adam, None: as it is."""

    name: str
    settings: Mapping[str, Any]
    isa: str | None = None
    directories: int = 1

    @property
    def update(self) -> str:
        """The update mode."""
        return str(self.settings["update"])

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return str(self.settings["dtype"])

    @property
    def accumulation(self) -> int | None:
        """How many backwards each step has; None: they change, and the norm is clipped."""
        return self.settings.get("accumulation")


@dataclass
class Trace:
    """What a training came to: a number for each step, and at the end tensors by (kind, parameter)."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)


class Difference(NamedTuple):
    """Where two trainings part: `step` from 1; `parameter` None: a figure of the whole step."""

    step: int
    what: str
    parameter: str | None
    elements: int
    found: float
    wanted: float
    again: bool = True  #: whether it was there when the case was repeated

    def __str__(self) -> str:
        where = f"{self.what} of {self.parameter}" if self.parameter is not None else f"the {self.what}"
        count = f", {self.elements} elements" if self.elements > 1 else ""
        timing = "" if self.again else "; not when it was repeated: it depends on timing"
        return f"{where} after step {self.step}{count}: {self.found!r} instead of {self.wanted!r}{timing}"


def batches(
    step: int, device: torch.device, count: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens and targets of each backward of step `step` (from 0). `count`: how many there are."""
    for micro in range(count or 1 + step % MOST):
        random = torch.Generator().manual_seed(100 + MOST * step + micro)
        tokens = torch.randint(SHAPE.vocab, (2, SHAPE.context + 1), generator=random).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def build() -> GPT:
    """Return the model, with the same values each time, and leave torch's generator as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(SHAPE)


def groups_of(params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Matrices decay; vectors do not, and learn faster."""
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1, "lr": 1e-3},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


def edit(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Edit the learning rates, as a scheduler does."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = (1e-3 + 1e-3 * number) / (1 + 0.25 * step)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Have torch compute the same gradients each time. A CPU does by itself, within one process."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def train(case: Case, device: str, folders: Sequence[str], steps: int = STEPS) -> Trace:
    """Train by the engine.

    Raises:
        InfinityError: the engine cannot run the case, or failed in it.
    """
    trace, extra = Trace(), dict[str, Any]()
    if case.dtype == "fp16":
        extra |= _FP16
    if case.update == "delayed":
        extra |= _WARMUP
    config = Config(
        nvme=folders[: case.directories], device=device, **{**_SETTINGS, **extra, **case.settings}
    )
    with contextlib.ExitStack() as stack:
        stack.callback(cpu_adam.set_isa, cpu_adam.isa())
        if case.isa is not None:
            cpu_adam.set_isa(case.isa)
        model = build()
        optimizer = torch.optim.AdamW(groups_of(list(model.parameters())))
        wrapped_model, wrapped = wrap(model, optimizer, config)
        stack.callback(close, wrapped)
        engine = engine_of(wrapped_model)
        for step in range(steps):
            total = 0.0
            if case.accumulation:
                edit(wrapped, step)
            for tokens, targets in batches(step, engine.device.torch_device, case.accumulation):
                loss = model(tokens, targets).loss
                wrapped.scale(loss).backward()
                total += loss.item()
            if not case.accumulation:
                edit(wrapped, step)
            trace.scales.append(wrapped.loss_scale)
            wrapped.step()
            wrapped.zero_grad()
            trace.losses.append(total)
            trace.norms.append(metrics(wrapped)["grad_norm"])
        trace.tensors = tensors_of(model)
    return trace


def tensors_of(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Return copies, masters and moments of a wrapped model, by kind and parameter."""
    engine, found = engine_of(model), dict[tuple[str, str], torch.Tensor]()
    for name, param in model.named_parameters():
        sharded = engine.params[param]
        found["copy", name] = engine.states.copies_of([sharded])[sharded]
        state = engine.states.read([sharded])[sharded]
        kinds = [kind for kind in ("master", "exp_avg", "exp_avg_sq") if kind in state]
        found |= {(kind, name): state[kind] for kind in kinds}
    return found


def compare(found: Trace, wanted: Trace) -> Difference | None:
    """Return where two trainings of equally many steps part, or None: every bit is the same.

    Of what differs at the end the first parameter is named, in the order of the model.
    """
    for what, name in (("losses", "loss"), ("norms", "gradient norm"), ("scales", "loss scale")):
        pairs = zip(getattr(found, what), getattr(wanted, what), strict=True)
        for step, (one, other) in enumerate(pairs, 1):
            if one != other and not (math.isnan(one) and math.isnan(other)):
                return Difference(step, name, None, 1, one, other)
    return compare_tensors(found, wanted)


def compare_tensors(found: Trace, wanted: Trace) -> Difference | None:
    """Return the first parameter that differs at the end, or None."""
    for (kind, name), value in wanted.tensors.items():
        other = found.tensors[kind, name]
        wrong = _bits(value).ne(_bits(other))  # not values: NaN is the same as itself, 0 is not −0
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            ours, theirs = (float(t.reshape(-1)[at]) for t in (other, value))
            return Difference(len(wanted.losses), kind, name, int(wrong.sum()), ours, theirs)
    return None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.contiguous().view(integer).reshape(-1)


def locate(case: Case, reference: Case, device: str, folders: Sequence[str], seen: Difference) -> Difference:
    """Return the first step after which a parameter differs, by training ever longer: state is looked at
    only when a training has ended, since looking waits for everything and so may hide what is wrong."""
    for steps in range(1, STEPS + 1):
        found = compare_tensors(train(case, device, folders, steps), train(reference, device, folders, steps))
        if found is not None:
            return found
    return seen._replace(again=False)


# ---- plain torch ----


def train_torch(dtype: str, device: str, *, fused: bool = False) -> Trace:
    """Train by torch's own AdamW, in fp32 or with fp32 masters of `dtype`; gradients sum in fp32."""
    trace, where, compute = Trace(), torch.device(device), parse_dtype(dtype)
    model = build().to(where)
    named = dict(model.named_parameters())
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in named.items()}
    for param in named.values():
        param.data = param.data.to(compute)
    optimizer = torch.optim.AdamW(groups_of(list(masters.values())), foreach=not fused, fused=fused)
    for step in range(STEPS):
        total = 0.0
        for tokens, targets in batches(step, where):
            loss = model(tokens, targets).loss
            loss.backward()
            total += loss.item()
            for name, param in named.items():
                if param.grad is not None:
                    grad, before = param.grad.float(), masters[name].grad
                    masters[name].grad = grad if before is None else before + grad
                    param.grad = None
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), CLIP)))
        edit(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in named.items():
                param.copy_(masters[name])
        trace.losses.append(total)
    for name, master in masters.items():
        trace.tensors["master", name] = master.detach().cpu()
    return trace


class AgainstTorch(NamedTuple):
    """How far the engine is from torch's AdamW. Losses: the largest relative difference. `differing`
    counts elements that differ by more than 1e-5 of their value and 1e-5 of their parameter's largest; `own`
    is the same between two implementations of torch: where a gradient is all rounding, Adam amplifies it,
    in torch too."""

    same: bool
    losses: float
    differing: int
    own: int


def against_torch(ours: Trace, dtype: str, device: str) -> AgainstTorch:
    """Compare a training by the engine with torch's. fp32: losses within 1e-5, and no more than twice
    as many elements differ as between torch's own two; else losses alone count, within 2 %, since one
    rounding of a copy that falls the other way moves everything after it a little."""
    wanted = train_torch(dtype, device)
    losses = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, wanted.losses, strict=True))
    kind = "copy" if dtype == "fp32" else "master"
    masters = {name: value for (k, name), value in ours.tensors.items() if k == kind}
    differing = beyond(masters, wanted)
    if dtype != "fp32":
        return AgainstTorch(losses <= 2e-2, losses, differing, 0)
    own = beyond(_masters(train_torch(dtype, device, fused=True)), wanted)
    return AgainstTorch(losses <= 1e-5 and differing <= 2 * max(own, 8), losses, differing, own)


def _masters(trace: Trace) -> dict[str, torch.Tensor]:
    return {name: value for (kind, name), value in trace.tensors.items() if kind == "master"}


def beyond(found: Mapping[str, torch.Tensor], wanted: Trace) -> int:
    """Return how many elements differ by more than 1e-5 of the wanted value and of the largest there."""
    return sum(
        int(((found[name].float() - value).abs() > 1e-5 * (value.abs() + value.abs().max())).sum())
        for name, value in _masters(wanted).items()
    )
