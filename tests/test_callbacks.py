"""Signals that end transformers' Trainer and Lightning: they are saved, and go on bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.core.signals import ignore

from .ranks import all_well, run_ranks
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


def test_a_signal_in_the_last_step_ends_nothing(tmp_path: Path) -> None:
    """Trainer would make one step too many if it went on from its last one."""
    need("accelerate")
    with pytest.warns(RuntimeWarning, match="SIGTERM came in the last step"):
        found = trainer(tmp_path, signal.SIGTERM, STEPS - 1, Seen())
    (tmp_path / "whole").mkdir()
    wanted = trainer(tmp_path / "whole", None, 0, Seen())
    assert all(map(torch.equal, found.values(), wanted.values()))


def test_lightning_has_nothing_left_to_train(tmp_path: Path) -> None:
    need("lightning")
    with pytest.raises(SystemExit) as ended:
        lightning(tmp_path, signal.SIGTERM, STEPS - 1, Seen())
    assert ended.value.code == 75
    seen = Seen()
    found = lightning(tmp_path, None, 0, seen)
    assert seen.losses == []
    (tmp_path / "whole").mkdir()
    wanted = lightning(tmp_path / "whole", None, 0, Seen())
    assert all(map(torch.equal, found.values(), wanted.values()))


@pytest.mark.parametrize("library", CASES)
def test_a_training_that_raised_leaves_the_next_one_its_signals(library: str, tmp_path: Path) -> None:
    need(library)

    class Fails(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.losses = Raising()

    class Raising(list[float]):
        def append(self, _: float) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        CASES[library](tmp_path, None, 0, Fails())
    with pytest.raises(SystemExit) as ended:
        CASES[library](tmp_path, signal.SIGTERM, 3, Seen())
    assert ended.value.code == 75


@pytest.mark.parametrize("library", CASES)
def test_a_second_signal_ends_a_training_at_once(library: str, tmp_path: Path) -> None:
    """By an exception that Python makes an exit code of, and no traceback."""
    need(library)

    class Twice(list[float]):
        def append(self, loss: float) -> None:
            super().append(loss)
            if len(self) == 4:
                time.sleep(1.5)  # or it is the first one by another way
                os.kill(os.getpid(), signal.SIGTERM)

    seen = Seen()
    seen.losses = Twice()
    with pytest.raises(SystemExit) as ended:
        CASES[library](tmp_path, signal.SIGTERM, 3, seen)
    assert ended.value.code == 143
    with pytest.raises(SystemExit) as ended:
        CASES[library](tmp_path, signal.SIGTERM, 3, Seen())
    assert ended.value.code == 75


ON_RANKS = """
import sys
import torch, transformers
import infinity
from infinity.core.errors import ConfigError
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)
model = transformers.LlamaForCausalLM(config)
adam = torch.optim.AdamW(model.parameters())
model, optimizer = infinity.wrap(model, adam, infinity.Config(device="cpu", dtype="fp32"))
rows = torch.arange(320).view(20, 16) % 64
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        sys.argv[1], max_steps=2, per_device_train_batch_size=2, save_strategy="no", use_cpu=True
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    callbacks=[infinity.trainer_callback()],
)
try:
    trainer.train()
except ConfigError as error:
    print(error.what, error.cure)
infinity.close(optimizer)
"""


def test_trainer_on_ranks_that_share_a_model_out_is_refused_at_once(tmp_path: Path) -> None:
    """It could not save when a signal comes."""
    need("accelerate")
    for out in all_well(run_ranks(2, ON_RANKS, str(tmp_path / "out"), seconds=120)):
        assert "transformers.Trainer cannot save a model that ranks share out" in out
        assert "Config(zero_stage=0)" in out


@pytest.mark.parametrize("library", CASES)
def test_sigusr1_saves_and_the_run_goes_on_at_once(library: str, tmp_path: Path) -> None:
    need(library)
    seen = Seen()
    CASES[library](tmp_path, signal.SIGUSR1, 3, seen)
    assert len(seen.losses) == STEPS
    assert [path.name for path in tmp_path.iterdir()] == [
        {"accelerate": "checkpoint-4", "lightning": "run.ckpt"}[library]
    ]
