"""What `bench step` measures: placements, contestants and their tasks, and whether there is room."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from infinity.core.config import UPDATES, Config
from infinity.core.errors import BudgetError, DirectoryError
from infinity.core.sizes import GiB, MiB, format_size, parse_dtype
from infinity.hardware.probe import available_host_memory, gpus

from .contest import Child
from .io_load import check_directory, usable_bytes
from .step_bound import probe_bytes
from .step_child import Model, Task


class Placement(NamedTuple):
    """Where infinity keeps things, and DeepSpeed's nearest: ``state`` (cpu, nvme), ``parameters``."""

    parameters: str
    gradients: str
    optimizer_state: str
    deepspeed: tuple[str, str]

    @property
    def on_nvme(self) -> bool:
        """Whether anything of it is."""
        return "nvme" in self[:3]

    def settings(self) -> dict[str, str]:
        """Return it as `infinity.Config` has it."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer_state,
        }


#: DeepSpeed keeps its gradients on NVMe where its state is.
PLACEMENTS: Final[dict[str, Placement]] = {
    "in-memory": Placement("device", "device", "device", ("cpu", "device")),
    "state-on-host": Placement("device", "host", "host", ("cpu", "device")),
    "all-on-host": Placement("host", "host", "host", ("cpu", "device")),
    "state-on-nvme": Placement("device", "host", "nvme", ("nvme", "device")),
    "state-and-gradients-on-nvme": Placement("device", "nvme", "nvme", ("nvme", "device")),
    "all-on-nvme": Placement("nvme", "nvme", "nvme", ("nvme", "nvme")),
}
CONTESTANTS: Final = ("infinity", "deepspeed", "torch")
#: Bytes per parameter that a peer holds at its peak with everything on a CPU (fp32, measured, rounded
#: up), beside what it takes anyway.
_HELD: Final = {"torch": 16, "deepspeed": 46}
_BESIDE: Final = 512 * MiB
_PEER_BESIDE: Final = GiB
#: Bytes per parameter on NVMe: state 12, copies 4, gradients 4.
_ON_NVME: Final = 20
_CONTEXT: Final = GiB  # of a CUDA process


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured. `burst`: steps of a turn; None: 4, or 1 where every update is ``sync``."""

    model: Model
    directory: str
    tokens: int = 128
    batch: int = 1
    dtype: str = "fp32"
    device: str = "cpu"
    placements: tuple[str, ...] = tuple(PLACEMENTS)
    updates: tuple[str, ...] = UPDATES
    contestants: tuple[str, ...] = CONTESTANTS
    rounds: int = 3
    warmup: int = 1
    burst: int | None = None
    threads: int | None = None
    deepspeed_python: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def steps(self) -> int:
        """Steps of a turn."""
        return self.burst or (1 if set(self.updates) == {"sync"} else 4)

    @property
    def names(self) -> list[str]:
        """The contestants of a group: ``infinity-UPDATE`` for each update, and the peers."""
        ours = [f"infinity-{update}" for update in self.updates if "infinity" in self.contestants]
        peers = [name for name in ("deepspeed", "torch") if name in self.contestants]
        return [*ours, *(n for n in peers if n != "deepspeed" or self.deepspeed_python)]

    @property
    def on_nvme(self) -> bool:
        """Whether anything of it is."""
        return any(PLACEMENTS[name].on_nvme for name in self.placements)


def find_deepspeed(python: str | None) -> str | None:
    """Return the interpreter that has DeepSpeed: `python`, this one, or None."""
    return python or (sys.executable if importlib.util.find_spec("deepspeed") else None)


def check_room(request: Request) -> None:
    """Raise unless the contestants of a group fit host memory, the device and the drive together.

    Raises:
        BudgetError: memory has not the room: the kernel would end somebody.
        DirectoryError: the directory is unfit, or has not the room.
    """
    model, cuda = request.model, request.device.startswith("cuda")
    names = request.names
    itemsize = parse_dtype(request.dtype).itemsize
    activations = 0 if cuda else model.activations(request.batch, request.tokens, itemsize)
    needs = [
        sum(_host_bytes(n, model, PLACEMENTS[p]) + activations for n in names) for p in request.placements
    ]
    need = max(needs) + GiB // 2
    have = available_host_memory()
    if need > have:
        raise BudgetError(
            "the contestants do not fit host memory together",
            expected=f"about {format_size(need)} for {', '.join(names)}",
            found=f"{format_size(have)} available",
            cure="a smaller --preset, or fewer --update or --contestant",
        )
    if cuda:
        on_device = model.activations(request.batch, request.tokens, itemsize) + _CONTEXT
        need = len(names) * (16 * model.parameters + on_device)
        free = gpus()[torch.device(request.device).index or 0].free
        if need > free:
            raise BudgetError(
                "the contestants do not fit the device together",
                expected=f"about {format_size(need)} for {', '.join(names)}",
                found=f"{format_size(free)} free",
                cure="a smaller --preset, or fewer --update or --contestant",
            )
    check_directory(request.directory)
    if request.on_nvme:
        writers = sum(name != "torch" for name in names)
        need = writers * _ON_NVME * model.parameters + probe_bytes(request.directory)
        usable, reserve = usable_bytes(request.directory)
        if need > usable:
            raise DirectoryError(
                f"{request.directory} has not the room for this model",
                errno=errno.ENOSPC,
                path=request.directory,
                expected=f"{format_size(need)} free, and {format_size(reserve)} that stay free",
                found=f"{format_size(usable + reserve)} free",
                cure="a smaller --preset, another --directory, or --placement all-on-host",
            )


def _host_bytes(name: str, model: Model, placement: Placement) -> int:
    kind, _, update = name.partition("-")
    if kind == "deepspeed":
        return _HELD[kind] * model.parameters + _PEER_BESIDE
    if kind == "torch":
        return _HELD[kind] * model.parameters + _BESIDE
    # fp32: parameters and gradients 4 each, state 12; delayed updates have two of the first two.
    held = 4 * (placement.parameters != "nvme") + 4 * (placement.gradients != "nvme")
    held = held * (2 if update == "delayed" else 1) + 12 * (placement.optimizer_state != "nvme")
    leases = min(12 * model.parameters, GiB)
    return held * model.parameters + leases + 2 * _BESIDE


# ---- children ----


def child_environment(folder: str, python: str) -> dict[str, str]:
    """Return the environment of a contestant: this package, and nothing else of its environment, is
    importable by any interpreter; for DeepSpeed a world of one.

    Args:
        folder: a temporary directory; gets a link to the package.
    """
    link = Path(folder, "package", "infinity")
    if not link.exists():
        link.parent.mkdir(parents=True)
        link.symlink_to(Path(__file__).resolve().parents[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not resolve(): a virtual environment's python is a link, and ninja stands beside the link.
    beside = str(Path(python).absolute().parent)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(link.parent), os.environ.get("PYTHONPATH")))),
        "PATH": os.pathsep.join((beside, os.environ.get("PATH", ""))),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }


def start(task: Task, folder: str, *, python: str | None = None, timeout: float) -> Child:
    """Start a contestant in `python`, or in this interpreter.

    Raises:
        ChildError: it could not be built.
    """
    python = python or sys.executable
    env = child_environment(folder, python)
    if task.contestant == "deepspeed" and task.device == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
    command = [python, "-u", "-m", "infinity.cli.bench.step_child", task.as_json()]
    return Child(task.contestant, command, env=env, timeout=timeout)


def task_of(name: str, placement: str, folder: str, request: Request) -> Task:
    """Return what a contestant of a group does, in a directory of its own below `folder`."""
    kind, _, update = name.partition("-")
    where = PLACEMENTS[placement]
    settings: dict[str, Any] = {}
    if kind == "deepspeed":
        settings = dict(zip(("state", "parameters"), where.deepspeed, strict=True))
    elif kind == "infinity":
        settings = {**where.settings(), "update": update, **_update_settings(update)}
        if where.parameters == "nvme":  # else everything would be fetched ahead into what is free
            budget = max(GiB, 32 * request.model.largest_unit)
            settings |= {"device_memory": budget, "host_memory": budget}
        settings |= request.settings
    own = os.path.join(folder, f"{placement}-{name}")
    os.makedirs(own)
    return Task(
        contestant=kind,
        model=request.model,
        tokens=request.tokens,
        batch=request.batch,
        dtype=request.dtype,
        device=request.device,
        directory=own,
        threads=request.threads,
        settings=settings,
    )


def _update_settings(update: str) -> dict[str, Any]:
    """A delayed update is measured from the first step on, not after its warm-up."""
    known = {f.name for f in dataclasses.fields(Config)}
    return {"delay_warmup_steps": 0} if update == "delayed" and "delay_warmup_steps" in known else {}
