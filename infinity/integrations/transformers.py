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
from typing import Any, Final, TypeVar

import torch

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.api.random_state import same_random_numbers
from infinity.api.together import together
from infinity.core.config import Config
from infinity.core.deepspeed import has_settings, read_deepspeed
from infinity.core.errors import ConfigError, CorruptionError, DirectoryError, TransferError
from infinity.core.optional import optional
from infinity.optim.deepspeed import any_scheduler, deepspeed_optimizer
from infinity.optim.optimizer import OffloadOptimizer
from infinity.storage.checkpoints import list_checkpoints
from infinity.storage.folder import sync

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
            cure="pip install 'transformers==5.24.0'; or call `infinity.wrap` yourself, and give Trainer the "
            "model and the optimizer that it returns",
        )


[_Trainer] = optional("transformers", "hf", "Trainer")
check_hooks(_Trainer)


@functools.cache
def offloaded(trainer: _Class) -> _Class:
    """Return a subclass of a trainer of transformers or TRL that trains with `wrap`: for example
    ``offloaded(transformers.Trainer)``, ``offloaded(trl.SFTTrainer)``.

    Its constructor takes what that of `trainer` takes, ``infinity=Config(…)``, and ``save_frozen=False``,
    with which the run's checkpoints leave out the frozen base of adapters (see ``frozen`` of `save`).

    In place of a `Config` it takes a settings file of DeepSpeed, or its content as a dict: it calls
    `Config.from_deepspeed` with the training arguments, and warns once with the notes. The optimizer and the
    scheduler are those of the file, if it has them and the program passes none. The class then does by itself
    what a wrapped model needs:

    - It wraps the model with the optimizer that Trainer builds, before the first step or evaluation. The
      model, with its parameters on the tiers, stays ``trainer.model``; `infinity.close` takes it.
    - ``bf16=True`` and ``fp16=True`` become the compute dtype of the `Config`. fp16 has a loss scale.
    - A checkpoint of Trainer, ``checkpoint-<n>``, has the run's state in ``infinity/``, from `infinity.save`
      on all ranks, and the model as `infinity.export` writes it, for ``from_pretrained``.
      ``train(resume_from_checkpoint=True)`` takes the newest complete one, ``trainer.newest_checkpoint()``,
      which is None where there is none. Checkpoints of Trainer itself can be resumed as well.
    - ``load_best_model_at_end`` loads the whole state of the best checkpoint.
    - ``save_total_limit`` removes an older checkpoint once the newer one is durable on all ranks, and only
      those that this run has written. The best one stays.
    - ``save_model`` is `infinity.export`. With several ranks, all call it.

    Raises:
        DataError: transformers is not installed, or the installation is broken.
        ConfigError: `trainer` is no trainer of transformers; or ``accelerate launch`` has started the process
            for DeepSpeed, FSDP or Megatron-LM. From the import of this module: this version of transformers
            is not known. From the constructor: `infinity` is neither a `Config` nor settings of DeepSpeed, or
            contradicts the training arguments; or the engine lacks some of these settings; or the arguments
            ask for DeepSpeed, FSDP or ``auto_find_batch_size``. From ``train``: an option of the file's
            optimizer or scheduler is wrong, or Trainer does not know of all ranks.
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
        **settings: Any,
    ) -> None:
        self._save_frozen = save_frozen
        self._deepspeed: dict[str, Any] = {}
        if isinstance(infinity, (str, os.PathLike, Mapping)):
            self._deepspeed = read_deepspeed(infinity)
        if not isinstance(infinity, Config) and not has_settings(self._deepspeed):
            raise ConfigError(
                "an offloaded trainer takes a Config",
                expected="infinity.Config(…), or the settings of DeepSpeed: the name of a file, or a dict",
                found=repr(infinity),
                cure=f"{type(self).__name__}(…, infinity=infinity.Config(…))",
            )
        if isinstance(infinity, Config):
            self._config = infinity
        self._rates: list[Any] = []  # of the param groups, before any scheduler
        self._engine: Engine | None = None
        self._limit: int | None = None  # of checkpoints; Trainer's own rotation sees none
        self._directory = ""  # of the newest checkpoint
        self._written: list[str] = []  # names of this run's checkpoints there
        super().__init__(*given, **settings)

    # -- settings ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Translate the training arguments, before anything is made of them. The user's object stays."""
        args = self.args = copy.copy(self.args)
        _check_launcher()
        _check_arguments(args)
        if not hasattr(self, "_config"):
            self._config = _from_deepspeed(self._deepspeed, args)
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
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and self._deepspeed:
            self.optimizer = deepspeed_optimizer(self._deepspeed, self.model.parameters(), self.args)
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
            self._engine.saves_on_all_ranks = True
            if self.args.world_size > 1 and hasattr(self.model, "generate"):
                self.model.generate = functools.partial(_generate, self.model.generate)
            if self._config.dtype == "fp16":
                self.accelerator.scaler = _Scaler(self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the scheduler of the file of DeepSpeed, if it has one; else as the trainer does."""
        if self.lr_scheduler is None and "scheduler" in self._deepspeed:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate  # another `train` may have changed it
            self.lr_scheduler = any_scheduler(self._deepspeed, self.optimizer, self.args, num_training_steps)
            self._created_lr_scheduler = self.lr_scheduler is not None
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
        done = super().train(resume_from_checkpoint, *given, **named)
        if self._limit == 1 and self.state.best_model_checkpoint is not None:
            self._rotate({self.state.best_model_checkpoint})
        return done

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
        engine.deferral.run(lambda: together(engine.comm, what, call if saves else lambda: None))


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


def _from_deepspeed(settings: dict[str, Any], args: Any) -> Config:
    """Return the `Config` of settings of DeepSpeed, to which the arguments add the dtype."""
    for name, keys in {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}.items():
        block = next((settings[key] for key in keys if key in settings), None)
        if block is None:
            settings[name] = {"enabled": "auto"}
            continue
        said, wanted = isinstance(block, Mapping) and block.get("enabled", False), getattr(args, name)
        if said in (True, False) and said != wanted:
            raise ConfigError(
                "the settings of DeepSpeed contradict the training arguments",
                expected=f"{name}={said} in the training arguments, as {name}.enabled in the settings",
                found=f"TrainingArguments({name}={wanted})",
                cure=f'{name}={said} in the training arguments; or write "{name}": {{"enabled": "auto"}}',
            )
    said, wanted = settings.get("train_batch_size"), args.per_device_train_batch_size
    wanted *= args.gradient_accumulation_steps * args.world_size
    if said not in (None, "auto", wanted):
        raise ConfigError(
            "the settings of DeepSpeed contradict the training arguments",
            expected=f"train_batch_size {wanted}: per_device_train_batch_size × "
            "gradient_accumulation_steps × ranks, as in the arguments",
            found=f"train_batch_size = {said!r}",
            cure='write "train_batch_size": "auto", or change the arguments',
        )
    config, notes = Config.from_deepspeed(settings, args)
    if args.process_index == 0 and notes:
        warnings.warn(
            "these are notes about the settings of DeepSpeed. They speak of a loop of your own: the trainer "
            "creates the optimizer and the scheduler, scales losses and divides them by itself.\n"
            + "\n".join(f"- {note}" for note in notes),
            UserWarning,
            stacklevel=2,
        )
    return config


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
