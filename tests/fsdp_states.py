"""Records checkpoints of FSDP2, in tests/fsdp.tar.xz, for tests/test_import_dcp.py.

python -m tests.fsdp_states    (trains on three ranks, and makes the archive)
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from .deepspeed_states import MORE, STEPS, build, groups_of, loss_of
from .ranks import all_well, run_ranks

ARCHIVE = Path(__file__).parent / "fsdp.tar.xz"
RANKS = 3
#: How a checkpoint is laid out: one directory, flat names of the optimizer's state, or accelerate's two.
KINDS = ("nested", "flat", "accelerate")


def second_dimension(param: nn.Parameter) -> Shard | None:
    """Cut some matrices by columns."""
    return Shard(1) if param.shape == (5, 3) else None


def train(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = build(frozen=True)
    fully_shard(model, mesh=mesh, shard_placement_fn=second_dimension)
    adam = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 2)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            for kind in KINDS:
                save(folder / kind, kind, model, adam, scheduler)
        loss = loss_of(model, step)
        loss.backward()
        adam.step()
        scheduler.step()
        adam.zero_grad()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo that still run may end a process with an error


def save(folder: Path, kind: str, model: nn.Module, adam: Any, scheduler: Any) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "flat")
    of_model = get_model_state_dict(model, options=options)
    of_adam = get_optimizer_state_dict(model, adam, options=options)
    if kind == "accelerate":
        dcp.save({"model": of_model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": of_adam}, checkpoint_id=folder / "optimizer_0")
        return
    further = {"scheduler": scheduler.state_dict(), "epoch": 2, "order": torch.arange(3)}
    dcp.save({"model": of_model, "optim": of_adam, **further}, checkpoint_id=folder)


def record(folder: Path) -> None:
    """Train on all ranks, and save into `folder`."""
    script = "import sys, pathlib\nfrom tests.fsdp_states import train\ntrain(pathlib.Path(sys.argv[1]))"
    all_well(run_ranks(RANKS, script, str(folder), seconds=200))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        record(Path(temporary))
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(temporary, ".", filter=plain)


def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made a file, and when."""
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


if __name__ == "__main__":
    main()
