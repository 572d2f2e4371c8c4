"""Five ways to train the same net, for the contracts that all of them keep (test_contracts.py).

Each adapter resumes from the newest checkpoint in the directory `out`, if there is one, trains up to the step
`until`, saves every `save_every` steps, and returns what it came to. `acts` has what happens in a step, by
its number: names of signals that the process sends to itself, an error that it raises, and directories
whose file system it fills. Further settings are those of `built`, and of `Config`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

from . import inner
from .offloaded import ON_HOST
from .ranks import Result, run_ranks
from .whole import ALL_OPTIMIZERS, Make

STEPS = 9
EPOCH, ROWS = 6, 4  # batches of an epoch, and rows of a batch
Acts = Mapping[int, str] | None
OPTIMIZERS: dict[str, Make] = {
    **ALL_OPTIMIZERS,
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),  # the rounding of a gradient stays small
}


class Net(nn.Module):
    """Four units; tensors of odd sizes, tied ones, a frozen one and buffers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(37, 150)
        self.norm = nn.BatchNorm1d(150)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(150, 151), nn.Linear(151, 150)) for _ in range(2))
        self.layers[1][0].weight = self.layers[0][0].weight
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(150, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(self.dropout(x))


@dataclass
class Found:
    """The loss of each step that was made, by its number; and the values and the optimizer's state then."""

    losses: dict[int, float] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, model: nn.Module, optimizer: Any) -> Found:
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            self.values |= {f"{index} {kind}": torch.as_tensor(v).clone() for kind, v in state.items()}
        return self


class Ended(SystemExit):
    """A process of several ranks, or a child, has not ended with 0. `said`: what it has written to stderr."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(code)
        self.said = said


def built(settings: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer]:
    """Return the net of a seed and its optimizer; take what they need out of `settings`."""
    torch.manual_seed(settings.pop("seed", 7))
    model = Net(settings.pop("dropout", 0.1))
    if settings.pop("frozen", False):
        model.layers.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    return model, OPTIMIZERS[settings.pop("optimizer", "adamw")](params)


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def config_of(settings: dict[str, Any]) -> infinity.Config:
    memory = {"device_memory": "8MiB", "host_memory": "64MiB", "chunk_elements": 65536}
    return inner.config(**{"device": "cpu", "dtype": "fp32", **ON_HOST, **memory, **settings})


def data(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 37, generator=torch.Generator().manual_seed(step % EPOCH))


def loss_of(model: Any, x: torch.Tensor, step: int, found: Found, acts: Acts = None) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    found.losses[step] = loss.item()
    for act in (acts or {}).get(step, "").split():
        if act.startswith("SIG"):
            signal.raise_signal(getattr(signal, act))
        elif act == "KeyError":
            raise KeyError("mine")
        else:
            with open(f"{act}/fill", "wb") as file:
                file.write(bytes(shutil.disk_usage(act).free - (64 << 10)))
    return loss


def plain() -> Found:
    """What torch itself comes to, without an engine."""
    model, optimizer = built({"dropout": 0.0})
    scheduler, found = schedule(optimizer), Found()
    for step in range(STEPS):
        loss_of(model, data(step), step, found).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return found.keep(model, optimizer)


def bare(
    out: Path, until: int = STEPS, *, acts: Acts = None, save_every: int = STEPS, **settings: Any
) -> Found:
    """`wrap`, `save` and `load` in a loop of the user's own."""
    model, optimizer = built(settings)
    model, optimizer = infinity.wrap(model, optimizer, config_of(settings))
    scheduler, found = schedule(optimizer), Found()
    state = {"scheduler": scheduler}
    try:
        if out.exists():
            infinity.load(optimizer, out, state=state)
        for step in range(scheduler.last_epoch, until):
            optimizer.scale(loss_of(model, data(step), step, found, acts)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (step + 1) % save_every == 0 or step + 1 == until:
                infinity.save(optimizer, out, state=state)
        return found.keep(model, optimizer)
    finally:
        infinity.close(optimizer)


def run(
    out: Path, until: int = STEPS, *, acts: Acts = None, save_every: int | None = None, **settings: Any
) -> Found:
    """`infinity.Run`. With several ranks the loss of the first one counts, times their number, which changes
    no bits where that is a power of two: so they make the steps of one rank."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model, optimizer = built(settings)
    model, optimizer = infinity.wrap(model, optimizer, config_of(settings))
    scheduler, found = schedule(optimizer), Found()
    try:
        with infinity.Run(optimizer, out, state={"scheduler": scheduler}, save_every=save_every) as run:
            for step in run.steps(until):
                loss = loss_of(model, data(step), step, found, acts)
                optimizer.scale(loss * (0 if rank else world)).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return found.keep(model, optimizer)
    finally:
        infinity.close(optimizer)


def trainer(
    out: Path,
    until: int = STEPS,
    *,
    acts: Acts = None,
    save_every: int | None = None,
    save_minutes: float | None = None,
    **settings: Any,
) -> Found:
    """`offloaded(transformers.Trainer)`, whose data goes on in the middle of an epoch."""
    from .test_ecosystem import arguments, need

    transformers, _ = need("transformers"), need("accelerate")
    from infinity.integrations.transformers import offloaded

    model, optimizer = built(settings)
    found = Found()

    class Watched(offloaded(transformers.Trainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return loss_of(model, inputs["x"], self.state.global_step, found, acts)

    saving = {"save_strategy": "steps", "save_steps": save_every} if save_every else {}
    given = {"per_device_train_batch_size": ROWS, "train_sampling_strategy": "sequential"}
    run = Watched(
        model,
        transformers.TrainingArguments(
            **arguments(out, max_steps=until, max_grad_norm=0.0, **given, **saving)
        ),
        train_dataset=[{"x": row} for step in range(EPOCH) for row in data(step)],
        optimizers=(optimizer, schedule(optimizer)),
        infinity=config_of({"device": None, **settings}),
        save_minutes=save_minutes,
    )
    try:
        run.train(resume_from_checkpoint=run.newest_checkpoint())
        return found.keep(run.model, run.optimizer)
    finally:
        infinity.close(run.model)


def lightning(
    out: Path,
    until: int = STEPS,
    *,
    acts: Acts = None,
    save_every: int | None = None,
    save_minutes: float | None = None,
    **settings: Any,
) -> Found:
    """Lightning's Trainer with `InfinityStrategy`. In the middle of an epoch it begins the data again, for
    which it draws a random number: so each step has its own data, and there is no dropout."""
    from .test_ecosystem import need

    L = need("lightning.pytorch")
    from infinity.integrations.lightning import InfinityStrategy, newest_checkpoint

    settings = {"dropout": 0.0, **settings}
    net, optimizer = built(settings)
    found = Found()

    class Module(L.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            step = self.trainer.global_step
            return loss_of(self.net, data(step), step, found, acts)

        def configure_optimizers(self) -> Any:
            each = {"scheduler": schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": each}

    module, kept = Module(), []
    if save_every:
        kept = [L.callbacks.ModelCheckpoint(out, "{step}", every_n_train_steps=save_every, save_top_k=-1)]
    off = ("logger", "enable_progress_bar", "enable_model_summary")
    run = L.Trainer(
        **{"max_steps": until, "accelerator": "cpu", "devices": 1, "default_root_dir": out},
        **{**dict.fromkeys(off, False), "callbacks": kept, "enable_checkpointing": bool(kept)},
        strategy=InfinityStrategy(config_of({"device": None, **settings}), save_minutes=save_minutes),
    )
    loader = torch.utils.data.DataLoader([0] * (EPOCH * ROWS), batch_size=ROWS)
    try:
        run.fit(module, loader, ckpt_path=newest_checkpoint(out))
        return found.keep(module, run.strategy.wrapped_optimizer)
    finally:
        infinity.close(module)


def ranks(out: Path, until: int = STEPS, *, world: int = 2, **more: Any) -> Found:
    """`run` on several ranks, the last of which does what is in `acts`."""
    return _found(out, run_ranks(world, _MAIN, _job(out, until, more), seconds=150, imports=_IMPORTS))


def child(out: Path, until: int = STEPS, **more: Any) -> Found:
    """`run` in a process of its own."""
    from .command_line import started  # which a child does not need, nor libraries

    with started("-c", _MAIN, _job(out, until, more)) as process:
        _, said = process.communicate(timeout=150)
    return _found(out, [(process.returncode, "", said)])


_MAIN = "from tests.adapters import main; main()"
_IMPORTS = ["tests.adapters", "infinity.api.save", "infinity.api.load"]


def _job(out: Path, until: int, more: dict[str, Any]) -> str:
    return json.dumps({"out": str(out), "until": until, **more})


def _found(out: Path, results: list[Result]) -> Found:
    for code, _, said in results:
        if code:
            raise Ended(code, said)
    return Found(**torch.load(f"{out}.pt", weights_only=True))


def main() -> None:
    """Do the job of a rank or a child; the first rank leaves what it found beside the checkpoints."""
    torch.set_num_threads(1)
    for name in (
        "SIGTERM",
        "SIGHUP",
        "SIGUSR1",
    ):  # whoever runs these tests may have been told to ignore them
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    job = json.loads(sys.argv[1])
    acts = {int(step): act for step, act in (job.pop("acts", None) or {}).items()}
    found = run(Path(job.pop("out")), acts=acts if rank == world - 1 else None, **job)
    if rank == 0:
        torch.save(asdict(found), f"{json.loads(sys.argv[1])['out']}.pt")
