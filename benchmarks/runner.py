"""A runner in a race of whole steps, in a process of its own: infinity, plain torch or DeepSpeed.

    python benchmarks/runner.py '{"kind": "torch", …}'

It builds its model, says that it is ready, and for every line takes as many steps as the line says. With
DeepSpeed it may run under another interpreter, whose environment has DeepSpeed and torch: nothing of
infinity that needs a native module is imported for it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from children import Child, forget_peak, lines, peak_memory, tell
from devices import opened
from gpt2 import GPT2

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("torch", "transformers", "deepspeed", "infinity-offload")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one runner does. `settings` are of `infinity.Config`, or for DeepSpeed ``state`` (cpu, nvme)
    and ``parameters`` (device, nvme)."""

    kind: str
    model: GPT2
    tokens: int
    threads: int
    directory: str
    dtype: str = "fp32"
    device: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)


def start(
    name: str, task: Any, *, python: str | None = None, timeout: float, script: str = __file__
) -> Child:
    """Start a runner in `python`, or in this interpreter, with a directory of its own.

    Args:
        task: a `Task`, or that of another `script`, which takes it as JSON.

    Raises:
        ChildError: it could not be built.
    """
    os.makedirs(task.directory)
    python = python or sys.executable
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        # Not resolve(): a virtual environment's python is a link, and ninja stands beside the link.
        "PATH": os.pathsep.join((str(Path(python).absolute().parent), os.environ.get("PATH", ""))),
        # For DeepSpeed a world of one.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    if task.kind == "deepspeed" and task.device == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
    command = [python, "-u", os.path.abspath(script), json.dumps(asdict(task))]
    return Child(name, command, env=env, timeout=timeout)


# -- the child --------------------------------------------------------------------------------


def deepspeed_configuration(task: Task, adamw: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings: ZeRO-3, as its documentation recommends for one process; on NVMe
    the optimizer goes through its pipelined swapper."""
    state, parameters = task.settings["state"], task.settings["parameters"]
    optimizer: dict[str, Any] = {"device": state, "pin_memory": task.device != "cpu"}
    if state == "nvme":
        optimizer |= {
            "nvme_path": task.directory,
            "buffer_count": 8,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 100_000_000,
        "offload_optimizer": optimizer,
        "stage3_param_persistence_threshold": 0,
    }
    if parameters != "device":
        zero["offload_param"] = {
            "device": parameters,
            "pin_memory": False,
            "nvme_path": task.directory,
            "buffer_size": 60_000_000,
            "buffer_count": 40,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": task.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**adamw, "betas": list(adamw["betas"])}},
        "zero_optimization": zero,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def with_deepspeed(task: Task) -> Any:
    """Return DeepSpeed's engine, as something that takes steps."""
    import deepspeed
    from steps import ADAMW, Stepper

    # Not later: within zero.Init torch's constructors are others, which an import trips over.
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401

    config = deepspeed_configuration(task, ADAMW)
    deepspeed.init_distributed("gloo" if task.device == "cpu" else None)
    if task.settings["parameters"] == "device":
        model = task.model.build()
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = task.model.build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Stepper(model=engine, device=engine.device, step=engine.step, backward=engine.backward)


def contestant(task: Task, device: str) -> Any:
    """Return what takes steps; `device` is what infinity calls the one of `task`."""
    import torch
    from steps import in_memory, offloaded

    if task.kind == "deepspeed":
        return with_deepspeed(task)
    if task.kind == "torch":
        dtype = torch.bfloat16 if task.dtype == "bf16" else torch.float32
        return in_memory(task.model.build, device=task.device, dtype=dtype)
    shared = {"dtype": task.dtype, "device": device, "threads": task.threads}
    return offloaded(task.model.build, nvme=task.directory, **shared, **task.settings)


def serve(task: Task, device: str) -> None:
    """Build; then take as many steps as each line says."""
    import torch

    torch.set_num_threads(task.threads)
    began = time.perf_counter()
    who = contestant(task, device)
    built = time.perf_counter() - began
    loss_of = task.model.loss_of(task.tokens, who.device)
    tell({"threads": torch.get_num_threads(), "built_seconds": built, "versions": versions(*PACKAGES)})
    forget_peak()  # not what building took, which is freed by now: what steps take
    for line in lines():
        tell({**who.turn(loss_of, int(line), apart=task.kind == "torch"), "peak_rss": peak_memory()})
    who.close()


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of this interpreter and of what it has of `packages`."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    wanted = Task(**{**given, "model": GPT2(**given["model"])})
    with opened(wanted.device) as named:
        serve(wanted, named)
