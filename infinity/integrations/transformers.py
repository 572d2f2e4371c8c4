"""transformers' Trainer, and the trainers that derive from it, over a wrapped model: `offloaded`.

Trainer builds the optimizer after everything that changes the model (TRL adds its adapters in the
constructor), so the model is wrapped there. Trainer saves on one rank and reads state dicts; here all ranks
save and load together, by `infinity.save` and `infinity.load`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.api.random_state import same_random_numbers
from infinity.api.together import together
from infinity.api.wanted import Wanted, check_minutes
from infinity.core.config import Config
from infinity.core.errors import ConfigError, CorruptionError, DirectoryError, TransferError
from infinity.core.optional import optional
from infinity.core.signals import SAVED
from infinity.optim.optimizer import OffloadOptimizer
from infinity.storage.checkpoints import list_checkpoints
from infinity.storage.folder import sync

if TYPE_CHECKING:
    from .deepspeed.trainer import TrainerSettings

_Class = TypeVar("_Class", bound=type)
#: Methods of Trainer that are not for users, with the parameters that they must have. The first one gives
#: accelerate the precision of the arguments, which older versions do by the environment; the others are
#: overridden here.
_HOOKS: Final = {
    "_build_accelerator_args": ("kwargs",),
    "create_accelerator_and_postprocess": (),
    "_load_best_model": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_move_model_to_device": ("model", "device"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
}
_HOME: Final = "infinity"  # the directory of the engine's checkpoint in Trainer's checkpoint-<n>
_STATE: Final = "trainer_state.json"  # what Trainer writes last into a checkpoint
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")
_WEIGHTS: Final = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
#: What launchers tell their processes by the environment: who else would shard or cast the model.
_LAUNCHED: Final = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "ACCELERATE_DEEPSPEED_CONFIG_FILE"),
    "ACCELERATE_USE_FSDP": ("FSDP", ""),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", ""),
}


def check_hooks(trainer: type) -> None:
    """Check that a Trainer has the methods that are overridden here, with the parameters that they must have.

    Raises:
        ConfigError: it does not.
    """
    wrong = []
    for name, wanted in _HOOKS.items():
        method = getattr(trainer, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found != wanted:
            wrong.append(f"no {name}" if found is None else f"{name}({', '.join(found)})")
    if wrong:
        [version] = optional("transformers", "hf", "__version__")
        raise ConfigError(
            f"the Trainer of transformers {version} is not one that infinity.integrations.transformers knows",
            expected=", ".join(f"{name}({', '.join(names)})" for name, names in _HOOKS.items()),
            found=", ".join(wrong),
            cure="pip install 'transformers==5.24.0'; or train in a loop of your own, in `infinity.Run`",
        )


[_Trainer, _TrainerCallback, _TrainerState] = optional(
    "transformers", "hf", "Trainer", "TrainerCallback", "TrainerState"
)
[_TrainOutput] = optional("transformers.trainer_utils", "hf", "TrainOutput")
check_hooks(_Trainer)


@functools.cache
def offloaded(trainer: _Class) -> _Class:
    """Return a subclass of a trainer of transformers or TRL that trains with `wrap`: for example
    ``offloaded(transformers.Trainer)``, ``offloaded(trl.SFTTrainer)``.

    Its constructor takes what that of `trainer` takes, ``infinity=Config(…)``, and two more: with
    ``save_frozen=False`` the run's checkpoints leave out the frozen base of adapters (see ``frozen`` of
    `save`), and ``save_minutes`` is the time between two checkpoints.

    In place of a `Config` it takes a settings file of DeepSpeed, or its content as a dict: it calls
    `infinity.integrations.deepspeed.config_from` with the training arguments, and warns once with the notes.
    The optimizer and the scheduler are those of the file, if it has them and the program passes none.

    The class does by itself what a wrapped model needs:

    - It wraps the model with the optimizer that Trainer builds, before the first step or evaluation. The
      model, with its parameters on the tiers, stays ``trainer.model``; `infinity.close` takes it.
    - ``bf16=True`` and ``fp16=True`` become the compute dtype of the `Config`. fp16 has a loss scale.
    - A checkpoint of Trainer, ``checkpoint-<n>``, has the run's state in ``infinity/``, from `infinity.save`
      on all ranks, and the model as `infinity.export` writes it, for ``from_pretrained``.
      ``train(resume_from_checkpoint=True)`` takes the newest complete one, ``trainer.newest_checkpoint()``,
      which is None where there is none. From the one of the last step it loads the model, and makes no step.
      Checkpoints of Trainer itself can be resumed as well.
    - ``load_best_model_at_end`` loads the whole state of the best checkpoint.
    - ``save_total_limit`` removes an older checkpoint once the newer one is durable on all ranks, and only
      those that this run has written. The best one stays.
    - ``save_model`` is `infinity.export`. With several ranks, all call it.
    - After a SIGTERM or SIGHUP, ``train`` finishes the current step, saves a checkpoint, stops, and raises
      SystemExit(75), "try again later". After a SIGUSR1, and every `save_minutes` minutes, it saves and goes
      on. A second SIGTERM, a second later or more, ends it now, with exit code 143. A signal to one rank
      counts for all. After the last step a signal ends nothing: ``train`` returns. A signal that the program
      ignores or handles itself is left alone. After ``train`` the process ignores SIGUSR1.

    Raises:
        DataError: transformers is not installed, or the installation is broken.
        ConfigError: `trainer` is no trainer of transformers; or ``accelerate launch`` has started the process
            for DeepSpeed, FSDP or Megatron-LM. From the import of this module: this version of transformers
            is not known. From the constructor: `infinity` is neither a `Config` nor settings of DeepSpeed, or
            contradicts the training arguments; or `save_minutes` is no number; or the engine lacks some of
            these settings; or the arguments ask for DeepSpeed, FSDP or ``auto_find_batch_size``. From
            ``train``: an option of the file's optimizer or scheduler is wrong, or Trainer does not know of
            all ranks.
        DirectoryError: from ``train(resume_from_checkpoint=True)``: there is no complete checkpoint.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, _Trainer)):
        raise ConfigError(
            "offloaded takes a class of trainers",
            expected="transformers.Trainer, or a class that derives from it",
            found=repr(trainer),
            cure="offloaded(transformers.Trainer)",
        )
    _check_launcher()  # here already: TrainingArguments would ask for the other engine's package
    if issubclass(trainer, _Offloaded):
        return trainer
    return type(f"Offloaded{trainer.__name__}", (_Offloaded, trainer), {"__doc__": trainer.__doc__})  # type: ignore[return-value]


class _Scaler:
    """What accelerate takes for a scaler of gradients; the engine scales, unscales and looks for overflow."""

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        self.scale = optimizer.scale

    def state_dict(self) -> dict[str, Any]:
        return {}  # `infinity.save` has the scale

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _Signals(_TrainerCallback):  # type: ignore[misc,valid-type]
    """Has a training save where a signal or the clock asks for it, and stop where a signal does."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._wanted: Wanted | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wanted = Wanted(engine_of(given["optimizer"]), self._minutes)
        self._wanted.take()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert self._wanted is not None
        end, due = self._wanted.agreed()
        control.should_save = control.should_save or due or bool(end)
        control.should_training_stop = control.should_training_stop or bool(end)

    def give_back(self) -> None:
        """Restore the handlers of signals."""
        if self._wanted is not None:
            self._wanted.give_back()

    def end(self, state: Any) -> None:
        """End the process if a signal has stopped the training before its last step."""
        if self._wanted is None:
            return
        if self._wanted.end and state.global_step < state.max_steps:
            raise SystemExit(SAVED)
        if self._wanted.came:
            warnings.warn(
                f"{self._wanted.came} came in the last step or after it: the training is complete, and "
                "`train` returns",
                RuntimeWarning,
                stacklevel=3,
            )


class _Offloaded(_Trainer):  # type: ignore[misc,valid-type]
    """What `offloaded` puts before a trainer."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _config: Config

    def __init__(
        self,
        *given: Any,
        infinity: Config | str | os.PathLike[str] | Mapping[str, Any] | None = None,
        save_frozen: bool = True,
        save_minutes: float | None = None,
        **settings: Any,
    ) -> None:
        check_minutes(save_minutes)
        self._save_frozen = save_frozen
        self._deepspeed: TrainerSettings | None = None
        if isinstance(infinity, Config):
            self._config = infinity
        elif isinstance(infinity, (str, os.PathLike, Mapping)):
            from .deepspeed.trainer import TrainerSettings  # few programs need it

            self._deepspeed = TrainerSettings(infinity)
        if not isinstance(infinity, Config) and not (self._deepspeed and self._deepspeed.known):
            raise ConfigError(
                "an offloaded trainer takes a Config",
                expected="infinity.Config(…), or the settings of DeepSpeed: the name of a file, or a dict",
                found=repr(infinity),
                cure=f"{type(self).__name__}(…, infinity=infinity.Config(…))",
            )
        self._rates: list[Any] = []  # of the param groups, before any scheduler
        self._engine: Engine | None = None
        self._limit: int | None = None  # of checkpoints; Trainer's own rotation sees none
        self._directory = ""  # of the newest checkpoint
        self._written: list[str] = []  # names of this run's checkpoints there
        super().__init__(*given, **settings)
        self._signals = _Signals(save_minutes)
        self.add_callback(self._signals)

    # -- settings ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Translate the training arguments, before anything is made of them. The user's object stays."""
        args = self.args = copy.copy(self.args)
        _check_launcher()
        _check_arguments(args)
        if self._deepspeed is not None and not hasattr(self, "_config"):
            self._config = self._deepspeed.config(args)
        self._config = _translated(self._config, args)
        self._limit, args.save_total_limit = args.save_total_limit, None
        args.bf16 = args.fp16 = args.bf16_full_eval = args.fp16_full_eval = False
        args.mixed_precision = "no"
        args._n_gpu = min(1, args.n_gpu)  # or it would put torch's DataParallel around the model
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The engine does."""

    # -- the engine -------------------------------------------------------------------------

    def create_optimizer(self, *given: Any, **named: Any) -> Any:
        """Build the optimizer as the trainer does, or as the file of DeepSpeed; wrap the model with it."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and self._deepspeed is not None:
            self.optimizer = self._deepspeed.optimizer(self.model.parameters(), self.args)
        super().create_optimizer(*given, **named)
        if self._engine is not None and self._engine.model() is not self.model:  # of `model_init`
            self._engine.close()
            self._engine = None
        if self._engine is None:
            with same_random_numbers(self.args.device):  # the order of Trainer's data follows from them
                self.model, self.optimizer = infinity.wrap(self.model, self.optimizer, self._config)
            self._engine = engine_of(self.optimizer)
            self._rates = [group["lr"] for group in self.optimizer.param_groups]
            self._check_ranks(self._engine)
            if self.args.world_size > 1 and hasattr(self.model, "generate"):
                self.model.generate = functools.partial(_generate, self.model.generate)
            if self._config.dtype == "fp16":
                self.accelerator.scaler = _Scaler(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the scheduler of the file of DeepSpeed, if it has one; else as the trainer does."""
        settings = self._deepspeed
        if self.lr_scheduler is None and settings is not None and settings.has_scheduler:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate  # another `train` may have changed it
            self.lr_scheduler = settings.scheduler(self.optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _check_ranks(self, engine: Engine) -> None:
        if engine.comm.world != self.args.world_size:
            engine.close()
            raise ConfigError(
                "Trainer does not know of all ranks: each would train with the data of others",
                expected=f"a world size of {engine.comm.world}, as of torch.distributed",
                found=f"TrainingArguments.world_size is {self.args.world_size}",
                cure="use_cpu=True in the training arguments, where the ranks have no GPU",
            )

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        if self._engine is None:
            self.create_optimizer()
        return super().evaluation_loop(*given, **named)

    # -- checkpoints, on all ranks ----------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.newest_checkpoint()
            if resume_from_checkpoint is None:
                raise DirectoryError(
                    f"no complete checkpoint in {self.args.output_dir}",
                    path=self.args.output_dir,
                    expected=f"a directory checkpoint-<n> with {_STATE}, which Trainer writes last",
                    found="none; a save that was killed leaves an incomplete one",
                    cure="train(resume_from_checkpoint=trainer.newest_checkpoint()), which begins anew where "
                    "there is none",
                )
        if isinstance(resume_from_checkpoint, str) and _is_ours(resume_from_checkpoint):
            state = _TrainerState.load_from_json(os.path.join(resume_from_checkpoint, _STATE))
            if 0 < self.args.max_steps <= state.global_step:
                return self._completed(resume_from_checkpoint, state)
        try:
            done = super().train(resume_from_checkpoint, *given, **named)
        finally:
            self._signals.give_back()
        if self._limit == 1 and self.state.best_model_checkpoint is not None:
            self._rotate({self.state.best_model_checkpoint})
        self._signals.end(self.state)
        return done

    def _completed(self, checkpoint: str, state: Any) -> Any:
        """Load the last checkpoint of a training. Trainer itself would make one step more."""
        if self._engine is None:
            self.create_optimizer()
        self._load(checkpoint, None)
        self.state = state
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        return _TrainOutput(state.global_step, 0.0, {})

    def newest_checkpoint(self) -> str | None:
        """Return the newest complete checkpoint in ``output_dir``; None if there is none."""
        return _newest_whole(self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._engine is None:
            super().save_model(output_dir, _internal_call)
            return
        target = os.path.abspath(output_dir or self.args.output_dir)
        beside = os.path.join(target, ".export")  # an export needs a directory that is empty

        def begin() -> None:
            os.makedirs(target, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)

        def end() -> None:
            names = os.listdir(beside)
            for name in names:
                os.replace(os.path.join(beside, name), os.path.join(target, name))
            os.rmdir(beside)
            for name in os.listdir(target):
                if _WEIGHTS.fullmatch(name) and name not in names:  # `from_pretrained` might prefer it
                    os.remove(os.path.join(target, name))

        self._together("the begin of an export", begin)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        # What a resume begins from is not rounded.
        dtype = "fp32" if _internal_call and self.args.save_only_model else None
        infinity.export(self.model, beside, dtype=dtype, tokenizer=tokenizer)
        self._together("the end of an export", end)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory, name = self._get_output_dir(trial), f"checkpoint-{self.state.global_step}"
        before = self._written if directory == self._directory else []  # a trial has its own
        self._directory, self._written = directory, [*(n for n in before if n != name), name]
        super()._save_checkpoint(model, trial)
        newest = os.path.join(directory, name)
        for file in os.listdir(newest):  # of each rank its own; what there is of others is synced twice
            sync(os.path.join(newest, file))
        sync(newest)
        best = self.state.best_model_checkpoint
        self._rotate({newest} if best is None else {newest, best})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        infinity.save(
            self.optimizer,
            os.path.join(output_dir, _HOME),
            state={"scheduler": self.lr_scheduler, "written": self._written},
            keep_last=1,  # another run may have left one
            frozen=self._save_frozen,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            if checkpoint is not None and not os.path.isfile(os.path.join(checkpoint, "optimizer.pt")):
                warnings.warn(
                    f"{checkpoint} has the model alone, without {_HOME} or optimizer.pt: the optimizer and "
                    "its schedule begin anew",
                    RuntimeWarning,
                    stacklevel=2,
                )
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        written = self._load(checkpoint, {"scheduler": self.lr_scheduler})["written"]
        directory = self._get_output_dir(None)
        if os.path.realpath(os.path.dirname(checkpoint)) == os.path.realpath(directory):
            self._directory, self._written = directory, written

    def _load_best_model(self) -> None:
        if _is_ours(self.state.best_model_checkpoint):
            self._load(self.state.best_model_checkpoint, None)
        else:
            super()._load_best_model()

    def _load(self, checkpoint: str, state: dict[str, Any] | None) -> dict[str, Any]:
        # Trainer restores the random numbers when it has skipped its batches.
        with _going_on(checkpoint), same_random_numbers(self.args.device):
            return infinity.load(self.optimizer, os.path.join(checkpoint, _HOME), state=state)

    def _rotate(self, kept: set[str]) -> None:
        """Remove the oldest checkpoints of this run, but not those that are `kept`. All ranks have synced
        what they have written by the time the first one removes anything."""
        self._together("a checkpoint", lambda: None)
        limit = max(self._limit or 0, len(kept))
        if not self._limit or self._limit < 0:
            return
        paths = [os.path.join(self._directory, name) for name in self._written]
        paths = [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]
        stay = {os.path.realpath(path) for path in kept}
        removable = [path for path in paths if os.path.realpath(path) not in stay]
        old = removable[: max(0, len(paths) - limit)]
        self._written = [n for n in self._written if os.path.join(self._directory, n) not in old]

        def remove() -> None:
            for path in old:
                try:
                    shutil.rmtree(path)
                except OSError as error:
                    warnings.warn(f"the checkpoint {path} stays: {error}", RuntimeWarning, stacklevel=2)

        self._together("the removal of checkpoints", remove)

    def _together(self, what: str, call: Callable[[], Any]) -> None:
        """Make the call on ranks that save files (the first one, or the first one of each node), and raise
        its error on all."""
        engine, saves = self._engine, self.args.should_save
        assert engine is not None
        engine.commits.run(lambda: together(engine.comm, what, call if saves else lambda: None))


def _generate(generate: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A rank whose texts have ended takes part in the forwards of the others."""
    return generate(*given, **{**named, "synced_gpus": True})


def _is_ours(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, _HOME))


def _newest_whole(directory: str) -> str | None:
    """Return the newest of Trainer's checkpoints that is complete."""
    with contextlib.suppress(FileNotFoundError):
        found = filter(None, map(_CHECKPOINT.fullmatch, os.listdir(directory)))
        for name in sorted(found, key=lambda match: -int(match[1])):
            path = os.path.join(directory, name[0])
            with _going_on(path):
                if _is_whole(path):
                    return path
    return None


@contextlib.contextmanager
def _going_on(checkpoint: str) -> Iterator[None]:
    """A block that reads one of Trainer's checkpoints: if it is damaged, the error names the newest older one
    that is whole. A run never takes that by itself, because the steps between them are lost."""
    try:
        yield
    except (CorruptionError, TransferError) as error:
        error.cure = f"copy {checkpoint} again from its source; or " + (
            f"train(resume_from_checkpoint={older!r})"
            if (older := _older(checkpoint))
            else "begin a new run, train(resume_from_checkpoint=None): there is no older one that is whole"
        )
        raise


def _older(checkpoint: str) -> str | None:
    """Return the newest whole checkpoint of Trainer's that is older than another one, and beside it."""
    directory, mine = os.path.split(os.path.abspath(checkpoint))
    numbers = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, os.listdir(directory)) if match]
    this = _CHECKPOINT.fullmatch(mine)
    for number in sorted(numbers, reverse=True):
        path = os.path.join(directory, f"checkpoint-{number}")
        with contextlib.suppress(CorruptionError, TransferError, DirectoryError):
            if this is not None and number < int(this[1]) and _is_whole(path):
                return path
    return None


def _is_whole(checkpoint: str) -> bool:
    try:
        with open(os.path.join(checkpoint, _STATE), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError):
        return False
    return not _is_ours(checkpoint) or bool(list_checkpoints(os.path.join(checkpoint, _HOME)))


def _check_launcher() -> None:
    """Raise `ConfigError` if `accelerate launch` has started this process for another engine."""
    asked = [(name, *what) for name, what in _LAUNCHED.items() if os.environ.get(name, "").lower() == "true"]
    for name, what, file in asked:
        path = os.environ.get(file, "")
        cure = f"give the trainer the settings of DeepSpeed: infinity={path!r}; " if path else ""
        raise _other_engine(f"{name}=true, for {what} {path}".rstrip(), cure)


def _other_engine(found: str, cure: str = "") -> ConfigError:
    return ConfigError(
        "an offloaded trainer cannot run under another engine",
        expected="no DeepSpeed, FSDP or Megatron-LM: infinity shards the parameters and their state",
        found=found,
        cure=f"{cure}leave deepspeed= and fsdp= out; start the ranks by torchrun, or by `accelerate launch` "
        "with options or a configuration file that name none of these engines",
    )


def _check_arguments(args: Any) -> None:
    """Raise `ConfigError` for training arguments that an offloaded trainer does not support."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            given = repr(getattr(args, name))
            cure = f"give the trainer these settings: infinity={given}; " if name == "deepspeed" else ""
            raise _other_engine(f"TrainingArguments({name}={given})", cure)
    if args.auto_find_batch_size:
        raise ConfigError(
            "an offloaded trainer cannot look for a batch size",
            expected="auto_find_batch_size=False: a step that ran out of memory leaves parts of an update",
            found="auto_find_batch_size=True",
            cure="set per_device_train_batch_size",
        )


def _translated(config: Config, args: Any) -> Config:
    """Return the `Config` with what the training arguments say of the dtype, the device and the steps."""
    mixed = "fp16" if args.fp16 else "bf16" if args.bf16 else args.mixed_precision
    if mixed != "no":
        if config.dtype not in (None, mixed):
            raise _contradiction(f"Config(dtype={config.dtype!r})", f"{mixed}=True", f"{mixed}=False")
        config = config.replace(dtype=mixed)
    for dtype in ("bf16", "fp16"):
        name = f"{dtype}_full_eval"
        if getattr(args, name) and config.dtype != dtype:
            raise _contradiction(f"Config(dtype={config.dtype!r})", f"{name}=True", f"{name}=False")
    here = args.device
    if config.device is None:
        config = config.replace(device=here.type if args.world_size > 1 else str(here))
    elif torch.device(str(config.device)).type != here.type:
        cure = "use_cpu=True" if "cpu" in str(config.device) else f"Config(device={here.type!r})"
        raise _contradiction(f"Config(device={config.device!r})", f"batches on {here.type}", cure)
    if config.update == "backward" and args.gradient_accumulation_steps > 1:
        config = config.replace(accumulation=args.gradient_accumulation_steps)
    return config


def _contradiction(one: str, other: str, cure: str) -> ConfigError:
    return ConfigError(
        "the Config contradicts the training arguments",
        expected=f"arguments that go with {one}",
        found=other,
        cure=f"{cure}, in the training arguments" if "Config" not in cure else cure,
    )
