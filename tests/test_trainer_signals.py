"""Signals that end an offloaded trainer and Lightning: these save, and the run goes on bit for bit."""

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

from .test_ecosystem import STEPS, Seen, arguments, examples, llama, need, tokens, watch

pytestmark = pytest.mark.integration

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def usual_handlers() -> Any:
    """Whoever runs these tests may have been told to ignore them. Lightning leaves its process group."""
    environment = dict(os.environ)
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    yield
    now = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert all(handler in (signal.SIG_DFL, ignore) for handler in now), "more than one SIGHUP comes"


def config() -> infinity.Config:
    return infinity.Config(dtype="fp32", optimizer_state="host", threads=1)


def trainer(out: Path, number: int | None, at: int, seen: Seen, **more: Any) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint; a signal comes in step `at`."""
    import transformers

    from infinity.integrations.transformers import offloaded

    class Sends(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at and number is not None:
                os.kill(os.getpid(), number)

    run = offloaded(transformers.Trainer)(
        llama(),
        transformers.TrainingArguments(**arguments(out, save_strategy="no")),
        train_dataset=examples(),
        callbacks=[watch(seen), Sends()],
        infinity=config(),
        **more,
    )
    try:
        run.train(resume_from_checkpoint=run.newest_checkpoint())
        return {name: value.clone() for name, value in run.model.state_dict().items()}
    finally:
        infinity.close(run.model)


def lightning(out: Path, number: int | None, at: int, seen: Seen, **more: Any) -> dict[str, torch.Tensor]:
    L = need("lightning.pytorch")
    from infinity.integrations.lightning import InfinityStrategy, newest_checkpoint

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
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    net = Net()
    run = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        strategy=InfinityStrategy(config(), **more),
    )
    loader = torch.utils.data.DataLoader(examples(), batch_size=2)
    try:
        run.fit(net, loader, ckpt_path=newest_checkpoint(out))
        return {name: value.clone() for name, value in net.state_dict().items()}
    finally:
        infinity.close(net)


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


@pytest.mark.parametrize("library", CASES)
def test_sigusr1_saves_and_the_run_goes_on_at_once(library: str, tmp_path: Path) -> None:
    need(library)
    seen = Seen()
    CASES[library](tmp_path, signal.SIGUSR1, 3, seen)
    assert len(seen.losses) == STEPS
    saved = {"accelerate": "checkpoint-4", "lightning": "stopped.ckpt"}
    assert [path.name for path in tmp_path.iterdir()] == [saved[library]]


@pytest.mark.parametrize("library", CASES)
def test_the_clock_saves(library: str, tmp_path: Path) -> None:
    need(library)
    with pytest.raises(infinity.InfinityError, match="save_minutes=True is not valid"):
        CASES[library](tmp_path, None, 0, Seen(), save_minutes=True)
    seen = Seen()
    CASES[library](tmp_path, None, 0, seen, save_minutes=0)
    assert len(seen.losses) == STEPS
    saved = {"accelerate": [f"checkpoint-{n + 1}" for n in range(STEPS)], "lightning": ["stopped.ckpt"]}
    assert {path.name for path in tmp_path.iterdir()} == {*saved[library]}
