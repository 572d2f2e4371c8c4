"""Callbacks that make transformers' Trainer and Lightning stop as `Run` does: saved, with exit code 75."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Collection
from types import FrameType
from typing import Any

from infinity.core.errors import ConfigError
from infinity.core.optional import optional
from infinity.core.signals import SAVED, Ended

from .engine import engine_of
from .wanted import Wanted

#: What a callback has taken last; an exception that ends a training leaves it so.
_newest: list[Wanted] = []


class _OfLightning(Wanted):
    def _ask(self, number: int, frame: FrameType | None) -> None:
        try:
            super()._ask(number, frame)
        except Ended as error:  # Lightning ends with 1 on any KeyboardInterrupt
            raise SystemExit(error.code) from None


def _taken(wanted: Wanted, also: Collection[Any] = ()) -> Wanted:
    """Take the signals of the training that begins, in place of what one before has left."""
    while _newest:
        _newest.pop().give_back()
    wanted.take(also)
    _newest.append(wanted)
    return wanted


def trainer_callback(*, save_minutes: float | None = None) -> Any:
    """Return a callback for ``transformers.Trainer(callbacks=[…])``, whose model or optimizer is wrapped.

    After a SIGTERM or SIGHUP, Trainer finishes the current step, saves and stops. Then the callback raises
    SystemExit(75), "try again later"; ``train(resume_from_checkpoint=True)`` resumes the run. After a
    SIGUSR1, and every `save_minutes` minutes, Trainer saves and goes on. It saves as usual, into its
    ``output_dir``. A second SIGTERM, a second later or more, ends it now, with exit code 143. With several
    ranks, a signal to one rank counts for all. Trainer saves on one rank alone, which needs
    ``Config(zero_stage=0)``, or an offloaded trainer (`infinity.integrations.transformers`), which saves on
    all.

    After the last step a signal ends nothing: ``train`` returns, and the program can save the model.
    (Trainer makes one step more than ``max_steps`` when it resumes from its last step.)

    If the program ignores a signal or handles it itself, the callback leaves that signal alone. If ``train``
    raises, the handlers stay until the next ``train`` with such a callback begins. After a training the
    process ignores SIGUSR1.

    Raises:
        DataError: transformers is not installed, or the installation is broken.
        ConfigError: in ``train``, before the first step: with several ranks, `Config.zero_stage` is not 0,
            and the trainer is not an offloaded one.
    """
    [base] = optional("transformers", "hf", "TrainerCallback")

    class Signals(base):  # type: ignore[misc,valid-type]
        wanted: Wanted

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            engine = engine_of(given["optimizer"])
            stage = engine.config.zero_stage
            if engine.comm.world > 1 and stage and not engine.saves_on_all_ranks:
                raise ConfigError(
                    "transformers.Trainer cannot save a model that ranks share out: it asks one rank alone",
                    expected="with several ranks, zero_stage=0, where each has the whole model",
                    found=f"zero_stage={stage}, {engine.comm.world} ranks, and a callback that has it save",
                    cure="`offloaded` of infinity.integrations.transformers; or Config(zero_stage=0); or, in "
                    "place of `trainer_callback`, a TrainerCallback whose on_step_end calls "
                    "infinity.save(optimizer, directory) on all ranks (docs/ranks.md has it in full); "
                    "or a loop of your own in `infinity.Run`",
                )
            self.wanted = _taken(Wanted(engine, save_minutes))

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            end, due = self.wanted.agreed()
            control.should_save = control.should_save or due or bool(end)
            control.should_training_stop = control.should_training_stop or bool(end)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.wanted.give_back()
            if self.wanted.end and state.global_step < state.max_steps:
                raise SystemExit(SAVED)
            if self.wanted.came:
                warnings.warn(
                    f"{self.wanted.came} came in the last step, or behind it: the training is over, and "
                    "`train` returns",
                    RuntimeWarning,
                    stacklevel=2,
                )

    return Signals()


def lightning_callback(path: str | os.PathLike[str], *, save_minutes: float | None = None) -> Any:
    """Return a callback for ``lightning.Trainer(callbacks=[…])``, whose `LightningModule` is wrapped.

    After a SIGTERM or SIGHUP, Lightning finishes the current step, saves `path` by
    ``trainer.save_checkpoint`` (a file; with `InfinityStrategy` a directory), and stops. Then the callback
    raises SystemExit(75), "try again later"; ``fit(ckpt_path=path)`` resumes the run. After a SIGUSR1, and
    every `save_minutes` minutes, Lightning saves and goes on. A second SIGTERM, a second later or more, ends
    it now, with exit code 143. With several ranks, a signal to one rank counts for all. In the middle of an
    epoch Lightning begins its data again, unless the loader has a state (``state_dict``).

    If the program ignores a signal or handles it itself, the callback leaves that signal alone. The exception
    is Lightning's own handler of SIGTERM, which ends a run without a save: the callback replaces it for the
    run.

    Raises:
        DataError: lightning is not installed, or the installation is broken.
    """
    [base] = optional("lightning.pytorch", None, "Callback")

    class Signals(base):  # type: ignore[misc,valid-type]
        wanted: Wanted | None = None  # no step is made: nothing to train is left
        step = saved = -1

        def on_train_start(self, trainer: Any, module: Any) -> None:
            theirs = signal.getsignal(signal.SIGTERM)
            known = type(theirs).__module__.startswith(("lightning.", "pytorch_lightning."))
            self.wanted = _taken(_OfLightning(engine_of(module), save_minutes), [theirs] if known else ())
            self.step = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if self.wanted is None or trainer.global_step == self.step:
                return  # gradients are added up
            self.step = trainer.global_step
            end, due = self.wanted.agreed()
            if end or due:
                trainer.save_checkpoint(path)
                self.saved = self.step
            trainer.should_stop = trainer.should_stop or bool(end)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if self.wanted is not None:
                # What came behind the last step, or in its save. What stopped the training is saved: to
                # Lightning the epoch is complete by now, and a checkpoint of now would leave out its rest.
                if any(self.wanted.agreed()) and self.saved != trainer.global_step:
                    trainer.save_checkpoint(path)
                self.wanted.give_back()
                self.wanted.pass_on()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            if self.wanted is not None:
                self.wanted.give_back()

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            if self.wanted is not None and self.wanted.end:
                raise SystemExit(SAVED)

    return Signals()
