"""What each rank runs in test_rank_libraries.py: a Trainer, with the engine or with torch's
DistributedDataParallel.

    rank_libraries.generates() sys.argv: a folder; a Seq2SeqTrainer that generates texts
    rank_libraries.stopped()   sys.argv: a folder; or this and "resume"; a signal comes to one rank
    rank_libraries.unaware()   sys.argv: a folder; a Trainer that takes a rank for the only one
    rank_libraries.offloads()  sys.argv: a folder, "torch" or "engine"; Trainer, or that of `offloaded`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.core.errors import ConfigError

from .test_ecosystem import Seen, arguments, examples, llama, need, watch


def offloads() -> None:
    """Train and resume in the middle of an epoch, with the best model at the end; leave the state in the
    folder, and print the losses and norms, the best checkpoint, and the checkpoints."""
    torch.set_num_threads(1)
    folder, by = Path(sys.argv[1]), sys.argv[2]
    transformers = need("transformers")
    from infinity.integrations.transformers import offloaded

    out = folder / by / "out"
    cls, given = transformers.Trainer, {}
    if by != "torch":
        (folder / "arenas").mkdir(exist_ok=True)
        cls = offloaded(cls)
        given["infinity"] = infinity.Config(
            **{"nvme": str(folder / "arenas"), "host_memory": "64MiB", "device_memory": "8MiB", "threads": 1},
            **{"parameters": "nvme", "optimizer_state": "nvme"},
        )
    seen = Seen()
    for resume in (None, str(out / "checkpoint-3")):
        model = llama()
        run = cls(
            model,
            transformers.TrainingArguments(
                **arguments(out, max_steps=6, save_strategy="steps", save_steps=1, save_total_limit=2),
                **{"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True},
                **{"metric_for_best_model": "eval_loss", "gradient_accumulation_steps": 2},
                greater_is_better=resume is None,  # first the first one is the best, then the last one
            ),
            train_dataset=examples(),
            eval_dataset=examples()[:5],
            callbacks=[watch(seen)],
            **given,
        )
        if resume is None:  # what the second run resumes from is not rotated away
            run.add_callback(_Keep(out / "checkpoint-3", transformers))
        run.train(resume_from_checkpoint=resume)
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        seen.losses.append(run.evaluate()["eval_loss"])
        torch.distributed.barrier()
        found = sorted(p.name for p in out.glob("checkpoint-*"))
        print(json.dumps([found, Path(run.state.best_model_checkpoint).name]))  # noqa: T201
        run.save_model(str(out / "final"))
        if given:
            infinity.close(run.model)
        torch.distributed.barrier()
        if resume is None and torch.distributed.get_rank() == 0:
            (out / "kept").rename(out / "checkpoint-3")
        torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.save(state, folder / f"{by}.pt")
    print(json.dumps([seen.losses, seen.norms]))  # noqa: T201


def generates() -> None:
    """Evaluate by texts of different lengths on each rank, with room for a part of the model."""
    from infinity.integrations.transformers import offloaded

    from .test_offloaded_trainer import seq2seq

    folder = Path(sys.argv[1])
    (folder / "arenas").mkdir(exist_ok=True)
    config = infinity.Config(
        **{"nvme": str(folder / "arenas"), "parameters": "nvme", "optimizer_state": "nvme"},
        **{"host_memory": "64MiB", "device_memory": "130KiB", "threads": 1, "rank_timeout": 30},
    )
    run = seq2seq(folder, offloaded, Seen(), infinity=config)
    run.args.generation_max_length = 4 + 6 * torch.distributed.get_rank()
    run.train()
    infinity.close(run.model)


def stopped() -> None:
    """Train with a signal to the second rank, after which all save and end; or go on to the end."""
    transformers = need("transformers")
    from infinity.integrations.transformers import offloaded

    folder, resume = Path(sys.argv[1]), sys.argv[2:] == ["resume"]

    class Signal(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and torch.distributed.get_rank() == 1 and not resume:
                os.kill(os.getpid(), signal.SIGTERM)

    config = infinity.Config(nvme=str(folder), optimizer_state="nvme", host_memory="64MiB", threads=1)
    seen = Seen()
    run = offloaded(transformers.Trainer)(
        llama(),
        transformers.TrainingArguments(**arguments(folder / "out", max_steps=5, save_strategy="steps")),
        train_dataset=examples(),
        callbacks=[watch(seen), Signal()],
        infinity=config,
    )
    run.train(resume_from_checkpoint=resume)
    print(json.dumps(seen.losses))  # noqa: T201
    infinity.close(run.model)


def unaware() -> None:
    """Build a trainer that does not know of the ranks; print the error."""
    transformers = need("transformers")
    from infinity.integrations.transformers import offloaded

    settings = arguments(Path(sys.argv[1])) | {"use_cpu": False}
    config = infinity.Config(device="cpu", host_memory="64MiB", zero_stage=1)
    run = offloaded(transformers.Trainer)(
        llama(), transformers.TrainingArguments(**settings), train_dataset=examples(), infinity=config
    )
    try:
        run.train()
    except ConfigError as error:
        print(error)  # noqa: T201


def _Keep(path: Path, transformers: Any) -> Any:
    """A callback that copies a checkpoint once it is there."""

    class Keep(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero and state.global_step == 3:
                shutil.copytree(path, path.parent / "kept")

    return Keep()
