"""`infinity verify`: checks that on this machine every placement and update mode gives the same bits.

A small network takes a few steps in every case. The losses and gradient norms of its steps, and its
parameters and optimizer state at the end, must equal those of the same training with everything on the
host and ``update="sync"``, bit for bit. A delayed update gives other results by design: its cases are
compared with each other. An update behind the backward cannot clip, so neither does the training that it is
compared with.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from infinity.api.metrics import metrics
from infinity.api.this_machine import check_directory
from infinity.api.wrap import close, wrap
from infinity.core.config import UPDATES, Config
from infinity.core.errors import InfinityError
from infinity.core.sizes import NORM_BLOCK
from infinity.hardware import cpu_adam
from infinity.hardware.aio import available_backends
from infinity.hardware.device import open_device

from .console import Tell, finish, progress, table_of, wide_console

STEPS: Final = 5
BACKWARDS: Final = 2  # of a step
CLIP: Final = 1.6  # norms of this training lie on both sides
WIDTH: Final = 128

HOST, NVME, SPLIT = "all on host", "all on NVMe", "split"
_SHARES: Final = [(0.3, 0.3, 0.4), (0.2, 0.3, 0.5), (0.2, 0.4, 0.4)]
#: Where parameters, gradients and the optimizer's state are.
PLACEMENTS: Final[dict[str, Sequence[Any]]] = {
    HOST: ("host", "host", "host"),
    "all on device": ("device", "device", "device"),
    "state on host": ("device", "host", "host"),
    "state on NVMe": ("device", "host", "nvme"),
    "state and gradients on NVMe": ("device", "nvme", "nvme"),
    NVME: ("nvme", "nvme", "nvme"),
    "parameters on NVMe": ("nvme", "host", "host"),
    SPLIT: [dict(zip(("device", "host", "nvme"), shares, strict=True)) for shares in _SHARES],
}
#: Further settings, with everything on NVMe and with a split.
OTHERS: Final[dict[str, dict[str, Any]]] = {
    "fp16": {"dtype": "fp16", "loss_scale": 2.0**22},  # some steps overflow
    "bf16 moments": {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "8-bit moments": {"dtype": "bf16", "optimizer_state_dtype": "8bit"},
    "split master": {"dtype": "bf16", "split_master": True},
    "two directories": {"dtype": "bf16", "nvme": ["first", "second"]},
}
#: Cases that agree in these settings, and in whether their update is delayed, must agree in every bit.
_MAKES_BITS: Final = ("dtype", "max_grad_norm", "loss_scale", "optimizer_state_dtype", "split_master")


class Case(NamedTuple):
    """One way to train.

    Attributes:
        settings: of `infinity.Config`.
        isa: instruction set of the CPU's Adam; None: the one in use.
    """

    name: str
    settings: Mapping[str, Any]
    isa: str | None = None


def reference_of(case: Case) -> Case:
    """Return the case whose bits `case` must have."""
    update = "delayed" if case.settings["update"] == "delayed" else "sync"
    return case_of(HOST, update, **{n: v for n, v in case.settings.items() if n in _MAKES_BITS})


def case_of(place: str, update: str, word: str = "", **settings: Any) -> Case:
    """Return a case in one of the `PLACEMENTS`, with `word` in its name."""
    whole = dict(zip(("parameters", "gradients", "optimizer_state"), PLACEMENTS[place], strict=True))
    whole |= dict(update=update, nvme=["first"], chunk_elements=NORM_BLOCK, max_grad_norm=CLIP)
    whole |= dict(device_memory="16MiB", host_memory="96MiB")
    if update == "backward":
        whole |= dict(accumulation=BACKWARDS, max_grad_norm=None)
    return Case(f"{place}, {word or settings['dtype']}", {**whole, **settings})


def cases_of(isas: Sequence[str], backends: Sequence[str]) -> list[Case]:
    """Return the cases, for the instruction sets of the CPU's Adam and the I/O backends that there are."""
    dtypes, coded = ("fp32", "bf16"), OTHERS["8-bit moments"]
    cases = [case_of(p, update, dtype=d) for d in dtypes for p in PLACEMENTS for update in UPDATES]
    cases += [case_of(p, "sync", word, **more) for word, more in OTHERS.items() for p in (NVME, SPLIT)]
    for isa in isas:
        cases.append(case_of(NVME, "sync", f"fp32, {isa}", dtype="fp32")._replace(isa=isa))
        cases.append(case_of(NVME, "sync", f"8-bit moments, {isa}", **coded)._replace(isa=isa))
    return cases + [case_of(NVME, "overlap", b, dtype="fp32", aio_backend=b) for b in backends]


# ---- training ----


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with the same values each time, and its optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Embedding(256, WIDTH)]
        for _ in range(3):
            up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            parts.append(nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down))
        model = nn.Sequential(*parts, nn.Linear(WIDTH, 256))
    return model, torch.optim.AdamW(model.parameters(), weight_decay=0.1)


def train(case: Case, device: str, directory: str) -> dict[str, torch.Tensor]:
    """Train by the engine, on NVMe in `directory`; return the losses and norms of all steps, and at the end
    parameters and optimizer state.

    Raises:
        InfinityError: the engine cannot run the case, or failed in it.
    """
    nvme = [os.path.join(directory, name) for name in case.settings["nvme"]]
    config, isa = Config(**{**case.settings, "nvme": nvme, "device": device}), cpu_adam.isa()
    with ExitStack() as stack:
        stack.callback(cpu_adam.set_isa, isa)
        cpu_adam.set_isa(case.isa or isa)
        model, optimizer = wrap(*_model_and_optimizer(), config)
        stack.callback(close, optimizer)
        optimizer.delayed_from = 1  # a case has few steps
        random = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + 0.25 * step)  # as a scheduler does
            for _ in range(BACKWARDS):
                tokens, targets = torch.randint(256, (2, 64), generator=random).to(device)
                loss = F.cross_entropy(model(tokens).float(), targets)
                optimizer.scale(loss).backward()
                losses.append(loss.item())
            optimizer.step()
            norms.append(metrics(optimizer)["grad_norm"])
            optimizer.zero_grad()
        figures = {"losses": losses, "gradient norms": norms}
        found = {name: torch.tensor(values, dtype=torch.float64) for name, values in figures.items()}
        return found | tensors_of(model, optimizer)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and the optimizer state of a wrapped model, by name."""
    names = {param: name for name, param in model.named_parameters()}
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    found = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{kind} of {order[number]}": value for kind, value in state.items()}
    return found


# ---- comparing ----


def difference(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str | None:
    """Return in words what differs first between two trainings; None: every bit is the same."""
    for name, value in wanted.items():
        # Bits, not values: NaN is the same as itself, 0 is not −0.
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize]
        ours, theirs = (tensor.flatten().view(integer) for tensor in (found[name], value))
        if at := ours.ne(theirs).nonzero().flatten().tolist():
            one, other = (tensor.flatten()[at[0]].item() for tensor in (found[name], value))
            first = f"number {at[0]}: {one!r} instead of {other!r}"
            return f"{name}: {len(at)} of {len(ours)} elements differ, {first}"
    return None


def verify(device: str, directory: str, tell: Tell) -> dict[str, Any]:
    """Verify; return everything as JSON has it.

    Raises:
        DirectoryError: no file can be made in `directory`.
    """
    check_directory(directory)
    start, isas, rows = time.perf_counter(), cpu_adam.available_isas(), []
    references: dict[str, dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory(prefix="infinity-", dir=directory, ignore_cleanup_errors=True) as place:
        for name in ("first", "second"):
            os.mkdir(os.path.join(place, name))

        backends = [name for name, says in available_backends(place).items() if says == "ok"]
        cases = cases_of(isas, backends)
        for number, case in enumerate(cases):
            tell(f"{case.name}, {case.settings['update']}", number, len(cases))
            wanted = reference_of(case)
            key = json.dumps(wanted.settings)
            try:
                if key not in references:
                    references[key] = train(wanted, device, place)
                problem = difference(train(case, device, place), references[key])
                verdict = "same" if problem is None else "differs"
            except InfinityError as error:
                problem, verdict = str(error), "failed"
            rows.append({**case._asdict(), "verdict": verdict, "problem": problem})
    return {
        **{"device": device, "directory": directory, "isas": list(isas), "backends": backends},
        "same": all(row["verdict"] == "same" for row in rows),
        "seconds": time.perf_counter() - start,
        "cases": rows,
    }


def show(result: Mapping[str, Any]) -> None:
    """Print a table for a person: a row for each placement, a column for each update mode."""
    console, verdicts, wrong = wide_console(), dict[str, dict[str, str]](), []
    for row in result["cases"]:
        update, verdict = row["settings"]["update"], row["verdict"]
        verdicts.setdefault(row["name"], {})[update] = verdict
        if verdict != "same":
            wrong.append(f"{row['name']}, {update} {verdict}: {row['problem']}")
    table = table_of(f"on {result['device']}", *UPDATES)
    for name, cells in verdicts.items():
        table.add_row(name, *(cells.get(update, "") for update in UPDATES))
    console.print(table)
    for text in wrong:
        console.print(text, style="bold red", markup=False)
    count = len(result["cases"])
    console.print(f"{count - len(wrong)} of {count} cases are the same, in {result['seconds']:.0f} s")
    if any(row["verdict"] == "differs" for row in result["cases"]):
        console.print("Report cases that differ each time, with the output of --json. If a case differs only")
        console.print("sometimes, suspect memory, processor or drive (infinity doctor, dmesg).")


def verify_command(directory: str, device: str | None, as_json: bool) -> int:
    """Verify as the parameters of the command say; return the exit code."""
    # cuBLAS reads it once, before its first product; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    opened = open_device(device)
    opened.close()
    name = str(opened.torch_device)
    # A CPU computes the same gradients each time by itself, within one process.
    torch.use_deterministic_algorithms(name.startswith("cuda"))
    with progress() as tell:
        result = verify(name, os.path.abspath(directory), tell)
    return finish(result, show, as_json=as_json, failed=not result["same"])
