"""Records checkpoints of DeepSpeed itself, in tests/deepspeed.tar.xz, for tests/test_import_deepspeed.py.

DS_ACCELERATOR=cpu python -m tests.deepspeed_states    (on the path: deepspeed 0.19.8)

Each case is a run of a few steps on several ranks, its checkpoint, and what DeepSpeed itself says of it: the
masters and the moments of each parameter, and the losses of the steps that follow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

from .offloaded import ON_HOST, config_for

ARCHIVE = Path(__file__).parent / "deepspeed.tar.xz"
#: The steps before the checkpoint, and those after it.
STEPS, MORE = 3, 3

#: The settings of each case: those of DeepSpeed, and `ranks`, `frozen`, `client`, `torch`, `universal`.
CASES: dict[str, dict[str, Any]] = {
    "stage1-fp32": {"stage": 1, "ranks": 2},
    "stage1-round-robin": {"stage": 1, "ranks": 2, "round_robin_gradients": True},
    "stage2-bf16": {"stage": 2, "ranks": 2, "dtype": "bf16", "frozen": True},
    "stage2-fp16": {"stage": 2, "ranks": 3, "dtype": "fp16", "parameter_alignment": True},
    "stage2-l2": {"stage": 2, "ranks": 1, "params": {"adam_w_mode": False}},
    "stage3-fp32": {"stage": 3, "ranks": 2, "sub_group_size": 30, "frozen": True},
    "stage3-bf16": {"stage": 3, "ranks": 3, "dtype": "bf16", "sub_group_size": 30},
    "stage3-fp16": {"stage": 3, "ranks": 2, "dtype": "fp16"},
    "stage3-offload": {"stage": 3, "ranks": 2, "offload_optimizer": {"device": "cpu"}, "params": {}},
    "bf16-optimizer": {"stage": 1, "ranks": 2, "dtype": "bf16", "accumulate": "fp32", "frozen": True},
    "client": {"stage": 2, "ranks": 2, "client": True},
    "universal-stage2": {"stage": 2, "ranks": 2, "dtype": "bf16", "universal": True},
    "universal-stage3": {"stage": 3, "ranks": 2, "universal": True, "sub_group_size": 30, "frozen": True},
    "universal-round-robin": {"stage": 2, "ranks": 2, "round_robin_gradients": True, "universal": True},
}


class Net(nn.Module):
    """Odd sizes, so that nothing fills its padding; a head that is tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("shift", torch.arange(3) / 10)
        self.second = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(self.embed(tokens))))
        hidden = hidden + self.get_buffer("shift").to(hidden.dtype)
        return self.head(self.second(hidden) * self.scale)


def build(*, frozen: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.first.requires_grad_(not frozen)
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def batch(step: int) -> torch.Tensor:
    """Tokens for all ranks; each rank sees all of them, so that the mean over ranks is that of one."""
    return torch.randint(0, 7, (12,), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def wrapped(folder: Path, *, frozen: bool, dtype: str = "fp32", lr: float = 0.5) -> tuple[Any, Any]:
    """A model of the engine that knows nothing of the checkpoint, with other values."""
    model = build(frozen=frozen)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(0.25)
    folder.mkdir(exist_ok=True)
    adam = torch.optim.AdamW(groups_of(model), lr=lr)
    return infinity.wrap(model, adam, config_for(folder, **{**ON_HOST, "dtype": dtype}))


def losses_after(
    model: Any, adam: Any, begin_step: Callable[[int], object], scheduler: Any = None
) -> list[float]:
    """The losses of the steps that follow the checkpoint."""
    losses = []
    for step in range(STEPS, STEPS + MORE):
        begin_step(step)
        loss = loss_of(model, step)
        adam.scale(loss).backward()
        adam.step()
        adam.zero_grad()
        if scheduler is not None and step + 1 < STEPS + MORE:
            scheduler.step()
        losses.append(loss.item())
    return losses


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    known = ("round_robin_gradients", "parameter_alignment", "sub_group_size", "offload_optimizer")
    dtype = case.get("dtype", "fp32")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": case["ranks"],
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case["stage"], **{k: case[k] for k in known if k in case}},
    }
    if case["stage"] == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 4
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 9} if dtype == "fp16" else {})}
    if "accumulate" in case:
        config["data_types"] = {"grad_accum_dtype": case["accumulate"]}
    if not case.get("client"):
        more = case.get("params", {"torch_adam": True})
        if not more.get("adam_w_mode", True):
            more = {**more, "torch_adam": True}
        settings = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        config["optimizer"] = {"type": "Adam", "params": {**settings, **more}}
        schedule = {
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 2,
            "total_num_steps": 20,
            "warmup_type": "linear",
        }
        config["scheduler"] = {"type": "WarmupDecayLR", "params": schedule}
    return config


def train(name: str, folder: Path) -> None:
    """On each rank: train, save, say what was saved, and go on."""
    import deepspeed
    import safetensors.torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    case = CASES[name]
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # by torch it is, on every CPU
    deepspeed.init_distributed(dist_backend="gloo")
    model = build(frozen=case.get("frozen", False))
    given: dict[str, Any] = {"model_parameters": groups_of(model)}
    if case.get("client"):
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        given = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    engine, *_ = deepspeed.initialize(model=model, config=config_of(case), **given)
    losses, rates = [], []
    rank = torch.distributed.get_rank()
    for step in range(STEPS + MORE):
        if step == STEPS:
            engine.save_checkpoint(str(folder), client_state={"epoch": 2, "order": torch.arange(3)})
            truth = {}
            for param_name, param in engine.module.named_parameters():
                if param.requires_grad:
                    truth[f"{param_name}/master"] = safe_get_full_fp32_param(param)
                    # Of the other stages DeepSpeed tells no moments; the losses that follow depend on them.
                    for kind in ("exp_avg", "exp_avg_sq") if case["stage"] == 3 else ():
                        truth[f"{param_name}/{kind}"] = safe_get_full_optimizer_state(param, kind)
            if rank == 0:
                shown = {k: v.detach().float().cpu().clone().contiguous() for k, v in truth.items()}
                safetensors.torch.save_file(shown, folder / "truth.safetensors")
        rates.append([g["lr"] for g in engine.optimizer.param_groups])
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if rank == 0:
        (folder / "truth.json").write_text(json.dumps({"losses": losses, "rates": rates}))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo that still run end a process with an error


def record(into: Path) -> None:
    for port, (name, case) in enumerate(CASES.items()):
        folder = into / name
        folder.mkdir()
        ranks = case["ranks"]
        command = [sys.executable, "-m", "tests.deepspeed_states", name, str(folder)]
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + port)}
        env |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError(name)
        if case.get("universal"):
            tag = (folder / "latest").read_text()
            converter = [
                sys.executable,
                "-m",
                "deepspeed.checkpoint.ds_to_universal",
                "--inject_missing_state",
            ]
            paths = ["--input_folder", str(folder / tag), "--output_folder", str(folder / "universal")]
            workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
            subprocess.run([*converter, *paths, *workers], check=True)
            shutil.rmtree(folder / tag)
            (folder / "universal").rename(folder / tag)
        for path in folder.glob("*.py"):
            path.unlink()


def main(arguments: list[str]) -> None:
    if arguments:
        train(arguments[0], Path(arguments[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        record(Path(temporary))
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(temporary, ".", filter=plain)


def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made a file, and when."""
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


if __name__ == "__main__":
    main(sys.argv[1:])
