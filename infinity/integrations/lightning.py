"""Lightning's Trainer over a wrapped model: `InfinityStrategy`.

Lightning asks its strategy for everything that depends on where the model is: the ranks, the optimizer, the
precision, the files. The strategy wraps what ``configure_optimizers`` returns, and all ranks save and load
together, by `infinity.save` and `infinity.load`. What Lightning itself knows of the run (loops, callbacks,
schedulers) is a small file of Lightning's beside that.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

import torch

import infinity
from infinity.api.engine import Engine, engine_of
from infinity.api.random_state import same_random_numbers
from infinity.api.together import together
from infinity.api.wanted import Wanted, check_minutes
from infinity.core.config import Config
from infinity.core.errors import ConfigError, CorruptionError, DirectoryError, StateDictError, WrapError
from infinity.core.handlers import of_program
from infinity.core.optional import optional
from infinity.core.signals import SAVED, Ended
from infinity.optim.optimizer import OffloadOptimizer
from infinity.storage.checkpoints import list_checkpoints
from infinity.storage.folder import sync

[_Callback] = optional("lightning.pytorch", "lightning", "Callback")
[_DDPStrategy] = optional("lightning.pytorch.strategies", "lightning", "DDPStrategy")
[_Precision, _Mixed] = optional(
    "lightning.pytorch.plugins.precision", "lightning", "Precision", "MixedPrecision"
)
[_TorchCheckpointIO] = optional("lightning.pytorch.plugins.io", "lightning", "TorchCheckpointIO")
[_apply] = optional("lightning_utilities.core.apply_func", "lightning", "apply_to_collection")

#: Lightning's words for the compute dtype. The weights are fp32, or split, whatever it is.
_DTYPES: Final = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
_FILE: Final = "lightning-"  # what Lightning knows; the engine's checkpoint names the one that belongs to it
_NEW: Final = ".saving"
_STOPPED: Final = "stopped.ckpt"  # in the Trainer's default_root_dir: what a signal or the clock has saved


class _Scaled(_Precision):  # type: ignore[misc,valid-type]
    """The engine casts the weights, and looks for overflow. Batches, and a loss of fp16, need this."""

    def __init__(self, strategy: InfinityStrategy, name: str, dtype: torch.dtype | None) -> None:
        self._strategy, self._dtype = strategy, dtype
        self.precision = name  # another Trainer may get it with the strategy

    def convert_input(self, data: Any) -> Any:
        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        return data if self._dtype is None else _apply(data, torch.Tensor, cast)

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(self._strategy.wrapped_optimizer.scale(tensor), module)


class _Wanted(Wanted):
    def _ask(self, number: int, frame: FrameType | None) -> None:
        try:
            super()._ask(number, frame)
        except Ended as error:  # Lightning ends with 1 on any KeyboardInterrupt
            raise SystemExit(error.code) from None


class _Signals(_Callback):  # type: ignore[misc,valid-type]
    """Has a fit save where a signal or the clock asks for it, and stop where a signal does."""

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes
        self._wanted: Wanted | None = None  # no step is made: nothing to train is left
        self._step = self._saved = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        theirs = of_program(signal.SIGTERM)  # Lightning's own handler ends a run without a save
        known = type(theirs).__module__.startswith(("lightning.", "pytorch_lightning."))
        self._wanted = _Wanted(engine_of(module), self._minutes)
        self._wanted.take([theirs] if known else ())
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._wanted is None or trainer.global_step == self._step:
            return  # gradients are added up
        self._step = trainer.global_step
        end, due = self._wanted.agreed()
        if end or due:
            self._save(trainer)
        trainer.should_stop = trainer.should_stop or bool(end)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self._wanted is not None:
            # What came behind the last step, or in its save. What stopped the training is saved: to
            # Lightning the epoch is complete by now, and a checkpoint of now would leave out its rest.
            if any(self._wanted.agreed()) and self._saved != trainer.global_step:
                self._save(trainer)
            self._wanted.give_back()
            self._wanted.pass_on()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if self._wanted is not None:
            self._wanted.give_back()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        if self._wanted is not None and self._wanted.end:
            raise SystemExit(SAVED)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(os.path.join(trainer.default_root_dir, _STOPPED))
        self._saved = trainer.global_step


def newest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Return the checkpoint of `InfinityStrategy` below `directory` with the most steps, the last one of
    these; None if there is none. It is for ``fit(ckpt_path=…)``.

    Raises:
        CorruptionError: the index of a checkpoint is damaged.
    """
    found = []
    for path in glob.iglob(os.path.join(glob.escape(os.fspath(directory)), "**", "*.ckpt"), recursive=True):
        if os.path.isdir(path) and (whole := list_checkpoints(path)):
            found.append((whole[-1].step, os.stat(whole[-1].path).st_mtime_ns, path))
    return max(found)[-1] if found else None


class InfinityStrategy(_DDPStrategy):  # type: ignore[misc,valid-type]
    """A strategy for ``lightning.Trainer(strategy=InfinityStrategy(Config(…)))``, with one rank or several.

    The `LightningModule` stays as it is: ``configure_optimizers`` returns an optimizer of torch, and
    schedulers if it likes. The strategy then does by itself what a wrapped model needs:

    - It wraps the module with that optimizer before the first step or evaluation. `infinity.close` takes the
      module, after the last one. What ``configure_model`` builds is on the tiers from the start.
    - ``precision="bf16-mixed"`` and ``"16-mixed"`` become the compute dtype of the `Config`. The strategy
      casts the floating-point tensors of a batch to it, as Lightning's DeepSpeed does. fp16 has a loss scale.
      With ``update="backward"`` and ``accumulation=1``, ``accumulate_grad_batches`` takes its place.
    - A checkpoint, of `ModelCheckpoint` or ``trainer.save_checkpoint``, is a directory from `infinity.save`
      on all ranks. A save that is killed leaves the older checkpoint of that name, or none.
      ``fit(ckpt_path=…)`` goes on from it, on any number of ranks, and restores the random numbers. A
      checkpoint that Lightning wrote without this strategy can be resumed as well.
    - `ModelCheckpoint` removes an older checkpoint once the newer one is durable on all ranks.
    - ``ckpt_path="best"`` of ``validate``, ``test`` and ``predict`` loads the whole state of that checkpoint.
    - ``on_save_checkpoint`` and ``on_load_checkpoint`` work for what they add. The state dicts that they see
      are empty, and changes of them are errors.
    - With ``save_weights_only=True`` a checkpoint is a file of Lightning's, with all weights, which
      ``load_from_checkpoint`` reads. `infinity.export` writes a model for ``from_pretrained``.
    - After a SIGTERM or SIGHUP, ``fit`` finishes the current step, saves ``stopped.ckpt`` in the Trainer's
      ``default_root_dir``, stops, and raises SystemExit(75), "try again later". After a SIGUSR1, and every
      `save_minutes` minutes, it saves that and goes on. A second SIGTERM, a second later or more, ends it
      now, with exit code 143. A signal to one rank counts for all. A signal that the program ignores or
      handles itself is left alone. `newest_checkpoint` finds what ``fit(ckpt_path=…)`` goes on from. In the
      middle of an epoch Lightning begins its data again, unless the loader has a state.

    Ranks are started by torchrun, SLURM or Lightning, as for ``strategy="ddp"``.

    Args:
        config: where parameters, gradients and the optimizer's state are. ``device`` is that of Lightning.
        save_frozen: whether checkpoints hold the frozen parameters: see ``frozen`` of `save`.
        save_minutes: time between two saves of ``stopped.ckpt``; None: the clock saves nothing.
        given: what Lightning's `DDPStrategy` takes for the ranks: ``timeout``, ``process_group_backend``,
            ``cluster_environment``.

    Raises:
        DataError: from the import of this module: lightning is not installed, or the installation is broken.
        ConfigError: `config` is no `Config`, or `save_minutes` no number; or the `Config` contradicts the
            Trainer's precision, devices or ``accumulate_grad_batches``; or the Trainer has a precision or a
            `CheckpointIO` that the engine cannot take.
        WrapError: ``configure_optimizers`` returns no optimizer, or several, or `wrap` refuses the one; or
            ``fit`` gets a module that a fit or the program has wrapped.
        StateDictError: ``on_save_checkpoint`` or ``on_load_checkpoint`` changes weights or the state.
        DirectoryError: a checkpoint's path is a file or no path of this machine; or there is none to load.
        CorruptionError: a checkpoint lacks the file of Lightning's.
    """

    strategy_name = "infinity"
    optimizers: Any
    lr_scheduler_configs: Any

    def __init__(
        self,
        config: Config,
        *,
        save_frozen: bool = True,
        save_minutes: float | None = None,
        **given: Any,
    ) -> None:
        check_minutes(save_minutes)
        if not isinstance(config, Config):
            raise ConfigError(
                "the strategy takes a Config",
                expected="infinity.Config(…)",
                found=repr(config),
                cure="InfinityStrategy(infinity.Config(…)); for settings of DeepSpeed: "
                "InfinityStrategy(infinity.integrations.deepspeed.config_from(file)[0])",
            )
        self._given = self._config = config
        self._save_frozen = save_frozen
        self._signals = _Signals(save_minutes)
        self._engine: Engine | None = None
        self._made: tuple[Any, Any] | None = None  # optimizer and schedulers that no fit has taken yet
        self._from_directory = False  # what is being loaded
        super().__init__(**given)

    @property
    def wrapped_optimizer(self) -> OffloadOptimizer:
        """The optimizer that `wrap` has returned."""
        if self._engine is None:
            raise WrapError(
                "the strategy has not wrapped the module yet",
                expected="a call behind Trainer's setup: in a step, or on_fit_start",
                found="no wrapped module",
                cure="call it later",
            )
        return self._engine.optimizer

    # -- what the Trainer sets up -----------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Lightning's plugin for the precision."""
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None
        if plugin is None:  # the Trainer sets its own
            return
        name = plugin.precision
        if name not in _DTYPES or type(plugin) not in (_Precision, _Mixed, _Scaled):
            raise ConfigError(
                "the engine keeps the weights, and cannot take this precision",
                expected=" or ".join(f"precision={name!r}" for name in _DTYPES),
                found=f"{type(plugin).__name__}, precision={name!r}",
                cure="a precision of these, or Config(dtype=…) without a precision",
            )
        dtype = _DTYPES[name]
        if dtype and self._given.dtype not in (None, dtype):
            raise ConfigError(
                "the Config contradicts the Trainer",
                expected=f"a precision that goes with Config(dtype={self._given.dtype!r})",
                found=f"precision={name!r}",
                cure="leave precision out",
            )
        self._config = self._given.replace(dtype=dtype) if dtype else self._given
        self._precision_plugin = _Scaled(self, name, self._config.compute_dtype)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """What ``configure_model`` builds is on the tiers from the start."""
        with infinity.init(self._config):
            yield

    def setup(self, trainer: Any) -> None:
        """Wrap the module, where it is not wrapped yet."""
        self.accelerator.setup(trainer)
        if type(self.checkpoint_io) is not _TorchCheckpointIO:
            raise ConfigError(
                "the engine writes the checkpoints",
                expected="no CheckpointIO among the Trainer's plugins",
                found=type(self.checkpoint_io).__name__,
                cure="leave it out",
            )
        fits, wrapped = trainer.state.fn == "fit", self._is_wrapped()
        if wrapped and fits and self._made is None:
            raise WrapError(
                "the module is wrapped already, and Lightning begins each fit with a new optimizer",
                expected="a module that is not wrapped, or that only validate, test or predict have wrapped",
                found="the optimizer of a fit before, of another Trainer, or of your own `wrap`",
                cure="to begin with a new optimizer, call infinity.unwrap(module) before fit; to go on, "
                "trainer.save_checkpoint(path), infinity.unwrap(module), and fit(module, ckpt_path=path)",
            )
        if not wrapped:
            self.setup_optimizers(trainer)
            self._wrap(trainer)
            self._made = self.optimizers, self.lr_scheduler_configs
        if fits and self._made is not None:
            (self.optimizers, self.lr_scheduler_configs), self._made = self._made, None
        self.setup_precision_plugin()
        if self._signals not in trainer.callbacks:
            trainer.callbacks.insert(0, self._signals)  # ModelCheckpoint is the last one

    def _is_wrapped(self) -> bool:
        try:
            engine = engine_of(self.lightning_module)
        except WrapError:  # another module, or one that is plain again
            return False
        if engine is not self._engine:
            self._engine, self._made = engine, None
        return True

    def _wrap(self, trainer: Any) -> None:
        none = [type(optimizer).__name__ for optimizer in self.optimizers] == ["_MockOptimizer"]
        if len(self.optimizers) != 1 or none:
            raise WrapError(
                "the engine trains with one optimizer",
                expected="one optimizer from configure_optimizers, with as many param groups as you like",
                found="None" if none else f"{len(self.optimizers)} optimizers",
                cure="return one; an optimizer for each of two models needs a loop of your own",
            )
        config, here = self._config, self.root_device
        if config.device is None:
            config = config.replace(device=here.type if self.world_size > 1 else str(here))
        if config.update == "backward":
            count = trainer.accumulate_grad_batches
            if config.accumulation not in (1, count):
                raise ConfigError(
                    "the Config contradicts the Trainer",
                    expected=f"accumulate_grad_batches={config.accumulation}, as Config.accumulation",
                    found=f"accumulate_grad_batches={count}",
                    cure=f"Config(accumulation={count})",
                )
            config = config.replace(accumulation=count)
        with same_random_numbers(here):  # those of the ranks are as with strategy="ddp"
            _, optimizer = infinity.wrap(self.lightning_module, self.optimizers[0], config)
        self._engine = engine_of(optimizer)
        if self._engine.comm.world != self.world_size:
            found = self._engine.comm.world
            infinity.close(optimizer)
            raise ConfigError(
                "Lightning does not know of all ranks: each would train with the data of others",
                expected=f"a world size of {found}, as of torch.distributed",
                found=f"{self.world_size} in Lightning: devices × num_nodes",
                cure="devices= and num_nodes= of the Trainer as they were given to torchrun or SLURM",
            )
        self.optimizers = [optimizer]

    # -- checkpoints, on all ranks ----------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """`infinity.load` takes a wrapped module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` saves the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` saves the state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the run on all ranks: into a directory, or weights alone into a file of Lightning's."""
        if self._engine is None and (error := sys.exc_info()[1]) is not None:
            warnings.warn(
                f"nothing is saved to {filepath}: the module is not wrapped yet, because of {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )
            return  # a callback that saves on exceptions must not hide this one
        if "optimizer_states" not in checkpoint:
            checkpoint["state_dict"] = self.lightning_module.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        _check_empty(checkpoint, "on_save_checkpoint")
        optimizer, path = self.wrapped_optimizer, _local(filepath)
        exists = os.path.isdir(path)
        target, file = path if exists else path + _NEW, f"{_FILE}{secrets.token_hex(8)}"

        def begin() -> None:
            if not exists:
                shutil.rmtree(target, ignore_errors=True)
                os.makedirs(target)
            self.checkpoint_io.save_checkpoint(checkpoint, os.path.join(target, file))
            sync(os.path.join(target, file))
            sync(target)

        def end() -> None:
            for name in os.listdir(target):
                if name.startswith(_FILE) and name != file:
                    os.remove(os.path.join(target, name))
            if not exists:
                os.rename(target, path)
            sync(os.path.dirname(path))

        try:
            self._together("the begin of a checkpoint", begin)
            infinity.save(optimizer, target, state={"lightning": file}, keep_last=1, frozen=self._save_frozen)
            self._together("the end of a checkpoint", end)
        except BaseException:
            if self.is_global_zero and not exists:  # it may be the drive that is full
                shutil.rmtree(target, ignore_errors=True)
            raise

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """Load the run on all ranks, and return what Lightning knows of it."""
        self._from_directory = os.path.isdir(checkpoint_path)
        if not self._from_directory:
            if os.path.basename(checkpoint_path).startswith(_FILE):
                raise DirectoryError(
                    "this file has neither weights nor moments",
                    path=os.fspath(checkpoint_path),
                    expected="the directory that it is in, which is the checkpoint",
                    found="the file of what Lightning knows of the run",
                    cure=f"ckpt_path={os.path.dirname(os.path.abspath(checkpoint_path))!r}",
                )
            return super().load_checkpoint(checkpoint_path, *given, **named)  # type: ignore[no-any-return]
        state = infinity.load(self.wrapped_optimizer, checkpoint_path)
        file = os.path.join(checkpoint_path, str(state.get("lightning")))
        if not os.path.isfile(file):
            raise CorruptionError(
                f"the checkpoint {os.fspath(checkpoint_path)} lacks what Lightning knows of the run",
                path=file,
                expected=f"a file {_FILE}*, which the strategy writes beside the engine's checkpoint",
                found="no such file; infinity.save, called by hand, writes none",
                cure="another checkpoint; or fit without ckpt_path, and in on_fit_start "
                "infinity.load(self.optimizers().optimizer, directory): Lightning begins its loops anew",
            )
        return self.checkpoint_io.load_checkpoint(file, *given, **named)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights from a file of Lightning's; those of a directory are loaded already."""
        if not self._from_directory:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        _check_empty(checkpoint, "on_load_checkpoint")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state from a file of Lightning's; that of a directory is loaded already."""
        if not self._from_directory:
            [state] = checkpoint["optimizer_states"]
            self.wrapped_optimizer.load_state_dict(state)
            return
        _check_empty(checkpoint, "on_load_checkpoint")

    def _together(self, what: str, call: Callable[[], Any]) -> None:
        """Make the call on the first rank, and raise its error on all."""
        engine = self._engine
        assert engine is not None
        engine.commits.run(lambda: together(engine.comm, what, call if self.is_global_zero else lambda: None))


def _check_empty(checkpoint: Mapping[str, Any], hook: str) -> None:
    """Raise `StateDictError` if a hook has changed state dicts in vain."""
    weights, states = checkpoint["state_dict"], checkpoint["optimizer_states"]
    if weights or states != [{}]:
        changed = (
            f"state_dict with {sorted(weights)[:3]}" if weights else f"optimizer_states = {states!r:.80}"
        )
        raise StateDictError(
            f"{hook} changed weights or the state of the optimizer, which are not in this dict",
            expected="state_dict = {} and optimizer_states = [{}]: infinity.save and infinity.load have them",
            found=changed,
            cure=f"leave both alone in {hook}; change weights in on_train_start, in infinity.gathered; to "
            "begin with a new optimizer, load the weights of an export, and fit without ckpt_path",
        )


def _local(filepath: Any) -> str:
    path: str = os.path.abspath(filepath)
    if "://" in str(filepath) or os.path.isfile(path):
        raise DirectoryError(
            "the checkpoint cannot be a directory here",
            path=str(filepath),
            expected="a path on this machine, of a directory or of nothing yet",
            found="a file" if os.path.isfile(path) else "an address",
            cure="another path; ModelCheckpoint(dirpath=…) and default_root_dir=… name a directory",
        )
    return path
