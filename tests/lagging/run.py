"""Trains a small model on the lagging device and on the CPU, and compares every bit.

python -m tests.lagging.run [--schedule late|eager|random] [--seed N] [--without NAME] CASE …
Prints what nothing orders and what differs, and ends with 1 then. `--without` takes a point of mutations.md
out of the engine: the run is then expected to find that, and ends with the first finding.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity

from .. import inner
from .cuda import lagging_cuda, make_known
from .programs import PROGRAMS, Loop
from .world import Finding

#: Where parameters, optimizer state and gradients are, and what else is set.
CASES: dict[str, dict[str, Any]] = {
    f"{parameters}-{state}-{gradients}": {
        "parameters": parameters,
        "optimizer_state": state,
        "gradients": gradients,
    }
    for parameters in ("device", "host", "nvme")
    for state in ("device", "host", "nvme")
    for gradients in ("device", "host", "nvme")
}
CASES |= {
    "overlap-fp32": {"update": "overlap", "dtype": "fp32", "parameters": "host"},
    "device-fp32": {
        "dtype": "fp32",
        "parameters": "device",
        "optimizer_state": "device",
        "gradients": "device",
    },
    "delayed-device": {"update": "delayed", "delay_warmup_steps": 1, "parameters": "device"},
    "delayed-host": {"update": "delayed", "delay_warmup_steps": 1, "parameters": "host"},
    "delayed-nvme": {
        "update": "delayed",
        "delay_warmup_steps": 1,
        "parameters": "nvme",
        "optimizer_state": "nvme",
        "gradients": "nvme",
    },
    "activations": {"activations": "host", "parameters": "host", "optimizer_state": "host"},
    "fp16": {"dtype": "fp16", "parameters": "host", "optimizer_state": "nvme"},
    "second-device": {"index": 1, "parameters": "host", "optimizer_state": "device"},
    "reentrant": {"recompute": "reentrant", "parameters": "host", "optimizer_state": "host"},
    "recomputed": {"recompute": "non-reentrant", "parameters": "nvme", "optimizer_state": "nvme"},
}
#: What else users do, with all on the host, on the device or on NVMe; and as few units there as may be.
_TIGHT = {"device_memory": "176KiB", "prefetch_memory": "64KiB"}
for _program in PROGRAMS.keys() - {"accumulate"}:
    for _tier in ("device", "host", "nvme"):
        CASES[f"{_program}-{_tier}"] = {
            "program": _program,
            "parameters": _tier,
            "optimizer_state": "host" if _tier == "device" else _tier,
            **({} if _tier == "device" else _TIGHT),
        }
    CASES[f"{_program}-delayed"] = {
        "program": _program,
        "parameters": "host",
        "update": "delayed",
        "delay_warmup_steps": 1,
    }
for _program in ("streams", "looks", "behind_steps"):
    CASES[f"{_program}-delayed-device"] = {"program": _program, **CASES["delayed-device"]}
CASES["behind_steps-delayed-tight"] = {**CASES["behind_steps-delayed"], **_TIGHT}
for _tier in ("device", "host"):
    CASES[f"chunks-{_tier}"] = {**CASES[f"{_tier}-host-host"], "units": ["Net"], "chunk_elements": 1 << 16}
CASES["chunks-split"] = {**CASES["chunks-host"], "gradients": {"device": 0.5, "host": 0.5}}
for _placement in ("device-host-host", "device-device-device", "host-device-device", "nvme-nvme-nvme"):
    CASES[f"halves-{_placement}"] = {**CASES[_placement], "dtype": "bf16", "split_master": True}
CASES["looks-gradients"] = {**CASES["host-device-device"], "program": "looks"}
_BEHIND = {"program": "behind_steps", "max_grad_norm": None}
CASES["behind_steps-gradients"] = {**CASES["host-nvme-device"], **_BEHIND}
#: Two backwards a step, as `accumulate` makes them.
_IN_BACKWARD = {"update": "backward", "accumulation": 2, "max_grad_norm": None}
for _placement in (
    "device-device-device",
    "device-host-host",
    "host-host-device",
    "host-nvme-nvme",
    "nvme-nvme-nvme",
):
    CASES[f"backward-{_placement}"] = {**CASES[_placement], **_IN_BACKWARD}
CASES["backward-reentrant"] = {**CASES["reentrant"], **_IN_BACKWARD}
CASES["backward-activations"] = {**CASES["activations"], **_IN_BACKWARD}
for _placement in ("device-device-host", "device-host-host", "host-nvme-nvme"):
    CASES[f"muon-{_placement}"] = {**CASES[_placement], "optimizer": "muon"}
for _placement in ("device-host-host", "host-nvme-nvme"):
    forms = {"optimizer_state_dtype": "8bit", "optimizer_state_fp32": ["*.bias"]}
    CASES[f"fp32_moments-{_placement}"] = {**CASES[_placement], **forms}
#: Each chunk has the lease of the one before it.
CASES["muon-tight"] = {
    **CASES["device-device-nvme"],
    **{"optimizer": "muon", "update_depth": 1, "read_ahead_memory": 0},
}
for _program in ("interleaved", "left_open", "beside"):
    CASES[f"{_program}-activations"] = {"program": _program, **CASES["activations"]}


class Block(nn.Module):
    """A residual block. x: (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Four blocks, recomputed or not."""

    def __init__(self, width: int = 64, *, recompute: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 8)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(self.recompute == "reentrant")
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def _muon(model: Net) -> torch.optim.Optimizer:
    inner, others = infinity.optim.muon_groups(model, head=model.head)
    return infinity.optim.Muon([{**inner, "lr": 0.02}, {**others, "lr": 1e-2}])


OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "muon": _muon,
}


def built(
    case: dict[str, Any], nvme: str, width: int = 64
) -> tuple[Net, torch.optim.Optimizer, infinity.Config]:
    """Return what `wrap` is given in a case."""
    settings = {"dtype": "bf16", "max_grad_norm": 0.5, "update": "overlap", "device_memory": "64MiB", **case}
    settings = {"units": ["Block", "head"], "host_memory": "256MiB", "threads": 1, **settings}
    kind, make = settings.pop("recompute", None), OPTIMIZERS[settings.pop("optimizer", "adamw")]
    for name in ("program", "index"):
        settings.pop(name, None)
    config = inner.config(device="cpu", nvme=nvme, **settings)
    torch.manual_seed(0)
    model = Net(width, recompute=kind or ("non-reentrant" if config.activations == "host" else ""))
    return model, make(model), config


def train(case: dict[str, Any], nvme: str, device: str) -> list[torch.Tensor]:
    """Return losses and final values; both on the CPU."""
    program = case.get("program", "accumulate")
    model, optimizer = infinity.wrap(*built(case, nvme))
    loop = Loop(model, optimizer, device)
    PROGRAMS[program](loop)
    made = [loss.detach().cpu() for loss in loop.losses]
    if program != "left_open":
        made += [value.detach().cpu().clone() for value in model.state_dict().values()]
    infinity.close(model)
    return made


class _First(collections.Counter[str]):
    """Ends the process with the first finding: what comes after it takes time, and may hang."""

    def __setitem__(self, what: str, times: int) -> None:
        os.write(1, what.encode())
        os._exit(2)


def main() -> int:
    """See above."""
    from .mutations import mutate  # which names cases of this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="late", choices=("late", "eager", "random"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without")
    parser.add_argument("cases", nargs="+", choices=sorted(CASES))
    given = parser.parse_args()
    make_known()
    torch.set_num_threads(1)
    failed = False
    for name in given.cases:
        with tempfile.TemporaryDirectory() as nvme:
            case = CASES[name]
            wanted = train(case, nvme, "cpu")
            if given.without:
                mutate(given.without)
                os.environ["INFINITY_DELAY_SEED"] = "1"  # host streams and I/O are late, too
            try:
                index = case.get("index", 0)
                with lagging_cuda(given.schedule, given.seed, index) as world:
                    if given.without:
                        world.findings = _First()
                    got = train(case, nvme, f"lagging:{index}")
                differ = sum(not torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
                found = f"{differ} of {len(wanted)} tensors differ" if differ else ""
            except Finding as error:
                found = str(error)
            failed = failed or bool(found)
            counts = {key: n for key, n in sorted(world.counts.items()) if "wait" in key}
            sys.stdout.write(f"{name}: {found or 'same'}  {json.dumps(counts)}\n")
            sys.stdout.flush()
    if given.without:
        os._exit(int(failed))  # whatever has been left of the engine
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
