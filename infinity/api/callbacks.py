"""Callbacks that have transformers' Trainer and Lightning end as `Run` does: saved, with exit code 75."""

from __future__ import annotations

import os
import signal
from typing import Any

from infinity.core.optional import optional
from infinity.core.signals import SAVED

from .engine import engine_of
from .wanted import Wanted


def trainer_callback(*, save_minutes: float | None = None) -> Any:
    """Return a callback for ``transformers.Trainer(callbacks=[…])``, whose model or optimizer is wrapped.

    SIGTERM and SIGHUP have Trainer save after the step under way, and stop; then SystemExit(75) is raised,
    "try again later": ``train(resume_from_checkpoint=True)`` goes on. SIGUSR1, and the clock every
    `save_minutes` minutes, have it save and go on. It saves as it always does, into its ``output_dir``. A
    second SIGTERM ends it now, as Ctrl-C does. With several ranks, what one of them is told counts for all.

    Signals that are ignored, or that somebody else handles, stay so. Where ``train`` raises, the handlers
    stay until the next ``train`` of this callback has ended.

    Raises:
        DataError: transformers is not installed, or broken.
    """
    [base] = optional("transformers", "hf", "TrainerCallback")

    class Signals(base):  # type: ignore[misc,valid-type]
        wanted: Wanted

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.wanted = Wanted(engine_of(given["optimizer"]), save_minutes)
            self.wanted.take()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            end, due = self.wanted.agreed()
            control.should_save = control.should_save or due or bool(end)
            control.should_training_stop = control.should_training_stop or bool(end)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.wanted.agreed()  # of a signal that came while the last step was saved
            self.wanted.give_back()
            if self.wanted.end:
                raise SystemExit(SAVED)
            self.wanted.pass_on()

    return Signals()


def lightning_callback(path: str | os.PathLike[str], *, save_minutes: float | None = None) -> Any:
    """Return a callback for ``lightning.Trainer(callbacks=[…])``, whose `LightningModule` is wrapped.

    SIGTERM and SIGHUP have it save the file `path` after the step under way, by ``trainer.save_checkpoint``,
    and stop; then SystemExit(75) is raised, "try again later": ``fit(ckpt_path=path)`` goes on. SIGUSR1, and
    the clock every `save_minutes` minutes, have it save and go on. A second SIGTERM ends it now, as Ctrl-C
    does. With several ranks, what one of them is told counts for all.

    Signals that are ignored, or that somebody else handles, stay so, but for Lightning's own handler of
    SIGTERM, which ends a run without a save: this one takes its place while the run lasts.

    Raises:
        DataError: lightning is not installed, or broken.
    """
    [base] = optional("lightning.pytorch", None, "Callback")

    class Signals(base):  # type: ignore[misc,valid-type]
        wanted: Wanted
        step = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.wanted, self.step = Wanted(engine_of(module), save_minutes), trainer.global_step
            theirs = signal.getsignal(signal.SIGTERM)
            known = type(theirs).__module__.startswith(("lightning.", "pytorch_lightning."))
            self.wanted.take([theirs] if known else ())

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == self.step:
                return  # gradients are added up
            self.step = trainer.global_step
            end, due = self.wanted.agreed()
            if end or due:
                trainer.save_checkpoint(path)
            trainer.should_stop = trainer.should_stop or bool(end)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.wanted.agreed()  # of a signal that came while the last step was saved
            self.wanted.give_back()
            self.wanted.pass_on()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            if hasattr(self, "wanted"):
                self.wanted.give_back()

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            if self.wanted.end:
                raise SystemExit(SAVED)

    return Signals()
