"""Signals that end transformers' Trainer and Lightning: they are saved, and go on bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.signals import ignore

from .test_ecosystem import STEPS, Seen, adamw, arguments, examples, llama, need, schedule, tokens, watch

pytestmark = pytest.mark.ecosystem

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def usual_handlers() -> Any:
    """Whoever runs these tests may have been told to ignore them."""
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    yield
    now = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert all(handler in (signal.SIG_DFL, ignore) for handler in now), "more than one SIGHUP comes"


def wrapped(model: Any) -> tuple[Any, Any]:
    return infinity.wrap(model, adamw(model), infinity.Config(device="cpu", dtype="fp32"))


def trainer(out: Path, number: int | None, at: int, seen: Seen, **settings: Any) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint; a signal comes in step `at`."""
    import transformers

    class Sends(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at and number is not None:
                os.kill(os.getpid(), number)

    model, optimizer = wrapped(llama())
    try:
        run = transformers.Trainer(
            model,
            transformers.TrainingArguments(**arguments(out, save_strategy="no", **settings)),
            train_dataset=examples(),
            optimizers=(optimizer, schedule(optimizer)),
            callbacks=[watch(seen), Sends(), infinity.trainer_callback()],
        )
        run.train(resume_from_checkpoint=bool(list(out.glob("checkpoint-*"))))
        return {name: value.clone() for name, value in model.state_dict().items()}
    finally:
        infinity.close(optimizer)


def lightning(out: Path, number: int | None, at: int, seen: Seen, **settings: Any) -> dict[str, torch.Tensor]:
    L = need("lightning.pytorch")

    class Net(L.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            step = self.trainer.global_step  # Lightning begins the loader again
            if step == at and number is not None:
                os.kill(os.getpid(), number)
            loss = self.model(input_ids=tokens(step), labels=tokens(step)).loss
            seen.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return self.optimizer

    net = Net()
    net, net.optimizer = wrapped(net)
    path = out / "run.ckpt"
    try:
        run = L.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
            callbacks=[infinity.lightning_callback(path)],
        )
        loader = torch.utils.data.DataLoader(examples(), batch_size=2)
        run.fit(net, loader, ckpt_path=path if path.exists() else None)
        return {name: value.clone() for name, value in net.state_dict().items()}
    finally:
        infinity.close(net.optimizer)


CASES: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"accelerate": trainer, "lightning": lightning}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("library", CASES)
def test_a_signal_saves_and_the_run_goes_on(library: str, number: int, tmp_path: Path) -> None:
    need(library)
    train = CASES[library]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, parts = Seen(), Seen()
    wanted = train(tmp_path / "whole", None, 0, whole)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "parts", number, 3, parts)
    assert ended.value.code == 75
    assert len(parts.losses) == 4
    found = train(tmp_path / "parts", None, 0, parts)
    assert parts.losses == whole.losses
    assert all(map(torch.equal, found.values(), wanted.values()))


@pytest.mark.parametrize("library", CASES)
def test_sigusr1_saves_and_the_run_goes_on_at_once(library: str, tmp_path: Path) -> None:
    need(library)
    seen = Seen()
    CASES[library](tmp_path, signal.SIGUSR1, 3, seen)
    assert len(seen.losses) == STEPS
    assert [path.name for path in tmp_path.iterdir()] == [
        {"accelerate": "checkpoint-4", "lightning": "run.ckpt"}[library]
    ]
