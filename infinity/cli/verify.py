"""`infinity verify`: that on this machine every placement and update mode gives the same bits.

A small GPT is trained some steps in every case, and its losses, norms, loss scales, masters, moments and
copies are compared with those of ``update="sync"`` with everything on the host, bit for bit. A delayed
update gives other results by design: its cases are compared with each other. Behind the backward nothing can
be clipped: its cases, and the one that they are compared with, train without. What the reference itself
is worth is compared with torch's own AdamW, within tolerances (`against_torch`).

The training has what makes bits differ where something waits too little: norms that clip in some steps
and not in others, one to three backwards per step, two param groups, a learning rate that is edited while
the update before may be under way, and with fp16 losses that overflow.

Placements × exact update modes are all there in fp32 and bf16; what else could change a bit (fp16,
splits, several directories, one request at a time, instruction sets, I/O backends) is there once or twice.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from infinity.api.engine import engine_of
from infinity.api.metrics import metrics
from infinity.api.this_machine import check_directory
from infinity.api.wrap import close, wrap
from infinity.core.config import UPDATES, Config
from infinity.core.errors import InfinityError
from infinity.core.sizes import NORM_BLOCK, parse_dtype
from infinity.hardware import cpu_adam
from infinity.hardware.aio import available_backends
from infinity.hardware.device import open_device

from .console import finish, status_line, wide_console
from .measure import scratch
from .model import GPT

VOCAB: Final = 256
SEQUENCE: Final = 32
STEPS: Final = 8
CLIP: Final = 4.0  # norms of this training lie on both sides
DTYPES: Final = ("fp32", "bf16", "fp16")

# ---- cases ----

HOST: Final = "all on host"
NVME: Final = "all on NVMe"
_SPLIT: Final = [(0.3, 0.3, 0.4), (0.2, 0.3, 0.5), (0.2, 0.4, 0.4)]
#: Where parameters, gradients and the optimizer's state are.
PLACEMENTS: Final[dict[str, Sequence[Any]]] = {
    HOST: ("host", "host", "host"),
    "all on device": ("device", "device", "device"),
    "state on host": ("device", "host", "host"),
    "state on NVMe": ("device", "host", "nvme"),
    "state and gradients on NVMe": ("device", "nvme", "nvme"),
    NVME: ("nvme", "nvme", "nvme"),
    "parameters on NVMe": ("nvme", "host", "host"),
    "split": [dict(zip(("device", "host", "nvme"), shares, strict=True)) for shares in _SPLIT],
}
#: An update behind the backward needs to know which backward is a step's last, and nothing that is known only
#: when that one is over may change the step. The reference of such a case is named `_LOOP`.
_BEHIND: Final = {"accumulation": 2, "max_grad_norm": None}
_LOOP: Final = "as behind the backward"
#: Rounded stochastically, with the same random numbers everywhere. The reference has them, too.
_ROUNDED: Final = {"bf16": "bf16 moments", "8bit": "8-bit moments"}
_SPLIT_MASTER: Final = "split master"  # its compute parameters are rounded in another way
#: Steps before updates are delayed: some of a case come before, some after.
_WARMUP: Final = 3
#: What words in the name of a case stand for, beside the setting of that name.
_MORE: Final[dict[str, dict[str, Any]]] = {
    "fp16": {"loss_scale": 2.0**19},  # overflows, and not with what it falls to
    "backward": _BEHIND,
    _LOOP: _BEHIND,
    **{name: {"optimizer_state_dtype": form} for form, name in _ROUNDED.items()},
    _SPLIT_MASTER: {"split_master": True},
    "two directories": {"nvme": ["first", "second"]},
    # One request and one thread at a time.
    "tight": dict(queue_depth=1, threads=1),
}


class Case(NamedTuple):
    """One way to train. `settings` are of `Config`; `isa` of the CPU's Adam, None: as it is."""

    name: str
    settings: Mapping[str, Any]
    isa: str | None = None


def _case(place: str, update: str, dtype: str, *more: str, isa: str | None = None, **settings: Any) -> Case:
    whole = dict(zip(("parameters", "gradients", "optimizer_state"), PLACEMENTS[place], strict=True))
    whole |= dict(update=update, dtype=dtype, nvme=["first"], chunk_elements=NORM_BLOCK, max_grad_norm=CLIP)
    whole |= dict(device_memory="16MiB", host_memory="96MiB", **settings)
    for word in (update, dtype, *more):
        whole |= _MORE.get(word, {})
    return Case(", ".join((place, update, dtype, *more)), whole, isa)


def reference_of(case: Case) -> Case:
    """Return what `case` must equal: everything on the host, in its dtype, ``sync`` (or ``delayed``)."""
    update = "delayed" if case.settings["update"] == "delayed" else "sync"
    more = [_LOOP] if "accumulation" in case.settings else []
    more += [_ROUNDED[form]] if (form := case.settings.get("optimizer_state_dtype")) else []
    more += [_SPLIT_MASTER] if case.settings.get("split_master") else []
    return _case(HOST, update, case.settings["dtype"], *more)


def cases_of(isas: Sequence[str], backends: Sequence[str], isa: str) -> list[Case]:
    """Return the cases, references first within their dtype and kind of update.

    Args:
        isas: the instruction sets that this machine has; `isa` is the one in use.
        backends: the I/O backends that work in the directory.
    """
    cases, default = [], UPDATES[0]
    for update in sorted(UPDATES, key=lambda update: update != "sync"):
        for dtype in ("fp32", "bf16"):
            if update == "backward":
                cases.append(_case(HOST, "sync", dtype, _LOOP))
            cases += [_case(place, update, dtype) for place in PLACEMENTS]
    cases.append(_case(HOST, "sync", "fp16"))
    cases += [_case(place, default, "fp16") for place in (NVME, "state on NVMe", "split")]
    places = HOST, "all on device", NVME, "split"
    cases += [_case(place, "sync", "bf16", form) for form in _ROUNDED.values() for place in places]
    cases += [_case(place, "sync", "bf16", _SPLIT_MASTER) for place in (*places, "state on NVMe")]
    for more in ("tight", "two directories"):
        cases += [_case(NVME, default, dtype, more) for dtype in ("fp32", "bf16")]
    turns = itertools.cycle(DTYPES)
    others = [each for each in isas if each != isa]
    cases += [_case(place, default, next(turns), each, isa=each) for each in others for place in (HOST, NVME)]
    cases += [
        _case(HOST, default, "bf16", form, each, isa=each) for form in _ROUNDED.values() for each in others
    ]
    return cases + [_case(NVME, default, next(turns), each, aio_backend=each) for each in backends]


# ---- training ----


class Trace(NamedTuple):
    """What a training came to: loss, gradient norm and loss scale of each step, and at the end tensors by
    (kind, parameter)."""

    steps: Sequence[tuple[float, ...]]
    tensors: Mapping[tuple[str, str], torch.Tensor]


def _model_and_optimizer(**options: Any) -> tuple[GPT, Any]:
    """Return the model with the same values each time, and AdamW: matrices decay; vectors do not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(layers=2, width=128, heads=4, vocab=VOCAB)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, **options)


def _steps(
    forward: Callable[..., Any], optimizer: Any, device: str, steps: int, backwards: int | None = None
) -> Iterator[float]:
    """Make the backwards of each step (None: one, two and three in turn), and yield its loss when the
    optimizer is to step."""
    scale = getattr(optimizer, "scale", lambda loss: loss)  # torch's own has none
    for step in range(steps):
        for number, group in enumerate(optimizer.param_groups):  # as a scheduler does; vectors learn faster
            group["lr"] = (1e-3 + 1e-3 * number) / (1 + 0.25 * step)
        total = 0.0
        for micro in range(backwards or 1 + step % 3):
            random = torch.Generator().manual_seed(100 + 3 * step + micro)
            tokens = torch.randint(VOCAB, (2, SEQUENCE + 1), generator=random).to(device)
            loss = forward(tokens[:, :-1], tokens[:, 1:])
            scale(loss).backward()
            total += loss.item()
        yield total
        optimizer.zero_grad()


def train(case: Case, device: str, directory: str, steps: int = STEPS) -> Trace:
    """Train by the engine, on NVMe in `directory`.

    Raises:
        InfinityError: the engine cannot run the case, or failed in it.
    """
    nvme = [os.path.join(directory, name) for name in case.settings["nvme"]]
    config, isa, figures = Config(**{**case.settings, "nvme": nvme, "device": device}), cpu_adam.isa(), []
    with ExitStack() as stack:
        stack.callback(cpu_adam.set_isa, isa)
        cpu_adam.set_isa(case.isa or isa)
        model, optimizer = wrap(*_model_and_optimizer(), config)
        stack.callback(close, optimizer)
        optimizer.delayed_from = _WARMUP
        for loss in _steps(model, optimizer, device, steps, config.accumulation):
            scale = optimizer.loss_scale
            optimizer.step()
            figures.append((loss, metrics(optimizer)["grad_norm"], scale))
        return Trace(figures, tensors_of(model))


def tensors_of(model: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Return copies, masters and moments of a wrapped model, by kind and parameter."""
    engine, found = engine_of(model), dict[tuple[str, str], torch.Tensor]()
    for name, param in model.named_parameters():
        sharded = engine.params[param]
        found["copy", name] = engine.states.copies_of([sharded])[sharded]
        state = engine.states.read([sharded])[sharded]
        found |= {(kind, name): state[kind] for kind in ("master", *engine.states.moments) if kind in state}
    return found


def train_torch(dtype: str, device: str, **options: Any) -> Trace:
    """Train by torch's own AdamW with these `options`, in fp32 or with fp32 masters of `dtype`; gradients of
    several backwards sum in fp32."""
    model, optimizer = _model_and_optimizer(**options)
    model.to(device)

    def copies() -> dict[str, torch.Tensor]:
        return {name: param.to(parse_dtype(dtype)) for name, param in model.named_parameters()}

    figures = []
    for loss in _steps(lambda *batch: functional_call(model, copies(), batch), optimizer, device, STEPS):
        figures.append((loss, float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))))
        optimizer.step()
    return Trace(figures, {("copy", name): value.detach().cpu() for name, value in copies().items()})


# ---- comparing ----


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


def compare(found: Trace, wanted: Trace) -> Difference | None:
    """Return where two trainings of equally many steps part, or None: every bit is the same.

    The first step counts; in the last one the first parameter, in the order of the model, before figures.
    """
    tensors, last = _compare_tensors(found, wanted), len(wanted.steps)
    for step, (ours, theirs) in enumerate(zip(found.steps, wanted.steps, strict=True), 1):
        if tensors is not None and step == last:
            break
        for what, one, other in zip(("loss", "gradient norm", "loss scale"), ours, theirs, strict=True):
            if one != other and not (math.isnan(one) and math.isnan(other)):
                return Difference(step, what, None, 1, one, other)
    return tensors


def _compare_tensors(found: Trace, wanted: Trace) -> Difference | None:
    for (kind, name), value in wanted.tensors.items():
        # Bits, not values: NaN is the same as itself, 0 is not −0.
        integer = {2: torch.int16, 4: torch.int32}[value.dtype.itemsize]
        ours, theirs = (t.contiguous().reshape(-1) for t in (found.tensors[kind, name], value))
        at = ours.view(integer).ne(theirs.view(integer)).nonzero().flatten().tolist()
        if at:
            one, other = float(ours[at[0]]), float(theirs[at[0]])
            return Difference(len(wanted.steps), kind, name, len(at), one, other)
    return None


def locate(case: Case, reference: Case, device: str, directory: str, seen: Difference) -> Difference:
    """Return the first step after which a parameter differs, by training ever longer: state is looked at
    only when a training has ended, since looking waits for everything and so may hide what is wrong."""
    for steps in range(1, STEPS + 1):
        found = compare(*(train(each, device, directory, steps) for each in (case, reference)))
        if found is not None:
            return found
    return seen._replace(again=False)


def against_torch(ours: Trace, dtype: str, device: str) -> dict[str, Any]:
    """Compare a training by the engine with torch's AdamW. fp32: losses within 1e-5, and no more than twice
    as many elements differ as between torch's own two; else losses alone count, within 2 %, since one
    rounding of a copy that falls the other way moves everything after it a little.

    Return the largest relative difference of a loss; how many elements of parameters are `differing`, by more
    than 1e-5 of their value and 1e-5 of their parameter's largest; and how many do between torch's `own` two
    implementations: where a gradient is all rounding, Adam amplifies it, in torch too.
    """
    wanted, another = train_torch(dtype, device, foreach=True), train_torch(dtype, device, fused=True)
    losses = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(ours.steps, wanted.steps, strict=True))
    differing, own = (
        sum(
            int(((each.tensors[key] - value).abs() > 1e-5 * (value.abs() + value.abs().max())).sum())
            for key, value in wanted.tensors.items()
        )
        for each in (ours, another)
    )
    same = losses <= 1e-5 and differing <= 2 * max(own, 8) if dtype == "fp32" else losses <= 2e-2
    return {"same": same, "losses": losses, "differing": differing, "own": own}


# ---- the command ----


def check(case: Case, references: dict[str, Trace], device: str, directory: str) -> dict[str, Any]:
    """Train a case and compare it with its reference, which comes before it and is kept in `references`.
    Return what came of it, as JSON has it: ``problem`` None: the same bits; else in words."""
    start, wanted, problem, found = time.perf_counter(), reference_of(case), None, None
    try:
        trace = train(case, device, directory)
        if case == wanted:
            references[case.name] = trace
        if wanted.name not in references:
            problem = f"nothing to compare with: {wanted.name} failed"
        elif (found := compare(trace, references[wanted.name])) is not None:
            found = locate(case, wanted, device, directory, found)
            problem = f"differs from {wanted.name}: {found}"
    except InfinityError as error:
        problem = f"failed: {error}"
    return {
        "case": case.name,
        "settings": case.settings,
        "isa": case.isa,
        "same": problem is None,
        "seconds": time.perf_counter() - start,
        "problem": problem,
        "difference": None if found is None else found._asdict(),
    }


def verify(device: str, directory: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Verify; return everything as JSON has it. Times in seconds.

    Raises:
        DirectoryError: no file can be made in `directory`.
    """
    check_directory(directory)
    start, isas, verdicts, references = time.perf_counter(), cpu_adam.available_isas(), [], dict[str, Trace]()
    with scratch(directory) as place, sdpa_kernel(SDPBackend.MATH):
        for name in ("first", "second"):
            os.mkdir(os.path.join(place, name))
        backends = [name for name, says in available_backends(place).items() if says == "ok"]
        cases = cases_of(isas, backends, cpu_adam.isa())
        for number, case in enumerate(cases, 1):
            tell(f"[{number}/{len(cases)}] {case.name}")
            verdicts.append(check(case, references, device, place))
        tell("torch's AdamW")
        torches = {}
        for dtype in ("fp32", "bf16"):
            if trace := references.get(f"{HOST}, sync, {dtype}"):
                torches[dtype] = against_torch(trace, dtype, device)
    norms = [norm for name, trace in references.items() if _LOOP not in name for _, norm, _ in trace.steps]
    return {
        "device": device,
        "directory": directory,
        "isas": list(isas),
        "backends": backends,
        "updates": UPDATES,
        "same": all(each["same"] for each in (*verdicts, *torches.values())),
        "seconds": time.perf_counter() - start,
        "clipped_share": sum(norm > CLIP for norm in norms) / max(1, len(norms)),
        "torch": torches,
        "cases": verdicts,
    }


def show(result: dict[str, Any]) -> None:
    """Print the result for a person."""
    cases, console = result["cases"], wide_console()
    wrong = [case for case in cases if not case["same"]]
    lines = [(f"{case['case']}: {case['problem']}", "bold red") for case in wrong]
    for dtype, found in result["torch"].items():
        text = f"torch's AdamW, {dtype}: losses within {found['losses']:.1e}"
        if dtype == "fp32":  # else a rounding of a copy makes many elements differ
            text += f"; {found['differing']} elements of parameters beyond 1e-5, {found['own']} between "
            text += "torch's own two implementations"
        lines.append((text, "" if found["same"] else "bold red"))
    text = f"{len(cases) - len(wrong)} of {len(cases)} cases gave the same bits in {result['seconds']:.0f} s"
    text += f": {len(PLACEMENTS)} placements, update modes {', '.join(UPDATES)}, {', '.join(DTYPES)}, "
    text += f"instruction sets {', '.join(result['isas'])}, I/O backends {', '.join(result['backends'])}, "
    lines.append((f"{text}on {result['device']}", "bold red" if wrong else "green"))
    if any(case["difference"] for case in wrong) or not all(
        found["same"] for found in result["torch"].values()
    ):
        text = (
            "This machine does not give the results that it should. If it is the same each time, report it "
        )
        text += "with the output of --json; if not, suspect memory, processor or drive (doctor, dmesg)."
        lines.append((text, ""))
    elif wrong:
        text = "No case gave other bits. Those above did not run to their end, and say why; where there is "
        lines.append((f"{text}too little room, --nvme DIR names another directory.", ""))
    for line, style in lines:
        console.print(line, style=style, markup=False)


def verify_command(directory: str, device: str | None, as_json: bool) -> int:
    """Verify as the parameters of the command say; return the exit code."""
    # cuBLAS reads it once, before its first product; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    opened = open_device(device)
    opened.close()
    name = str(opened.torch_device)
    # A CPU computes the same gradients each time by itself, within one process.
    torch.use_deterministic_algorithms(name.startswith("cuda"))
    with status_line(quiet=as_json) as tell:
        result = verify(name, os.path.abspath(directory), tell)
    return finish(result, show, as_json=as_json, failed=not result["same"])
