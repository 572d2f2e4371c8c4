"""Callbacks that make transformers' Trainer and Lightning stop as `Run` does: saved, with exit code 75."""

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

    After a SIGTERM or SIGHUP, Trainer finishes the current step, saves and stops. Then the callback raises
    SystemExit(75), "try again later"; ``train(resume_from_checkpoint=True)`` resumes the run. After a
    SIGUSR1, and every `save_minutes` minutes, Trainer saves and goes on. It saves as usual, into its
    ``output_dir``. A second SIGTERM ends it now, as Ctrl-C does. With several ranks, a signal to one rank
    counts for all.

    If the program ignores a signal or handles it itself, the callback leaves that signal alone. If ``train``
    raises, the handlers stay until the next ``train`` with this callback has ended.

    Raises:
        DataError: transformers is not installed, or the installation is broken.
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

    After a SIGTERM or SIGHUP, Lightning finishes the current step, saves the file `path` by
    ``trainer.save_checkpoint``, and stops. Then the callback raises SystemExit(75), "try again later";
    ``fit(ckpt_path=path)`` resumes the run. After a SIGUSR1, and every `save_minutes` minutes, Lightning
    saves and goes on. A second SIGTERM ends it now, as Ctrl-C does. With several ranks, a signal to one rank
    counts for all.

    If the program ignores a signal or handles it itself, the callback leaves that signal alone. The exception
    is Lightning's own handler of SIGTERM, which ends a run without a save: the callback replaces it for the
    run.

    Raises:
        DataError: lightning is not installed, or the installation is broken.
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
